"""What every test shares.

A test that takes the ``device`` fixture, or carries the ``gpu`` marker, needs a CUDA device. Where there is none such a test
is an error, not a skip: a run that tested nothing must not look like one that passed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Without it torch refuses products under use_deterministic_algorithms(True).
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kernels", action="store_true", help="compile every kernel, not a selection: takes an hour")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a GPU, before -m is applied."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly or not any(item.get_closest_marker("gpu") for item in session.items):
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(
            'the tests chosen need a GPU, and torch finds no CUDA device; -m "not gpu" leaves them out'
        )


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the source tree."""
    return ROOT


@pytest.fixture
def device() -> Iterator[str]:
    """The GPU to test on. A fault that a test's kernels left behind fails that test, not the next one."""
    import torch

    torch.manual_seed(0)
    yield "cuda"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run: on the CPU, emulated for sm_90a with all checks, or on a GPU."""
    import torch

    from emulate import emulating

    torch.manual_seed(0)
    if request.param == "cuda":
        yield "cuda"
        return
    with emulating("sm_90a"):
        yield "cpu"


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """The same random numbers for each test, and no plan of another's."""
    import torch

    import tkjit

    torch.manual_seed(0)
    tkjit.cache.clear_plans()
    yield
    tkjit.cache.clear_plans()


@pytest.fixture
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of few of them, and rings for tensors of any size: blocks that live on take several rows of a small one."""
    from tkjit import _device, _rows

    monkeypatch.setattr(_rows, "RING_BYTES", 0)
    monkeypatch.setattr(_rows, "DRAW_BYTES", 0)
    small = {arch: dataclasses.replace(device, sms=18) for arch, device in _device._TYPICAL.items()}
    monkeypatch.setattr(_device, "_TYPICAL", small)


@pytest.fixture
def much_memory(device: str) -> Iterator[Callable[[float], None]]:
    """Skip the test unless so many GB are free on the GPU. Tests that ask take turns, also between processes."""
    import torch

    def needs(gb: float) -> None:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 1e9
        if free < gb:
            pytest.skip(f"needs {gb:g} GB of device memory, {free:.0f} are free")

    with (Path(tempfile.gettempdir()) / f"tkjit-test-memory-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield needs
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., str]:
    """Run code in a new process with a kernel cache of its own, empty at first; the result is what it printed."""

    def run(code: str, timeout: float = 240, **variables: str) -> str:
        paths = os.pathsep.join([str(ROOT / "tests"), *(path for path in sys.path if path)])
        env = {**os.environ, "PYTHONPATH": paths, "TKJIT_CACHE_DIR": str(tmp_path / "cache"), **variables}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, not made yet; no other TKJIT_CACHE_ setting holds."""
    for name in ("TKJIT_CACHE_TRUST", "TKJIT_CACHE_MAX_MB", "TKJIT_NO_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TKJIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def public_path() -> Iterator[Path]:
    """A folder that every user may enter, which those of pytest are not."""
    folder = Path(tempfile.mkdtemp(prefix="tkjit-test-"))
    folder.chmod(0o755)
    yield folder
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o700)
    shutil.rmtree(folder)
