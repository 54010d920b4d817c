"""``python -m tkjit doctor``: what tkjit needs, whether it is there, and one kernel as proof."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from . import __version__, _core, _emulator, _env, _nvrtc, cache
from ._errors import Error

# A finding: (is it well, text)
Finding = tuple[bool, str]


def _versions() -> Iterator[Finding]:
    yield True, f"tkjit {__version__}, Python {platform.python_version()}, {platform.platform()}"
    try:
        import torch
    except ImportError as error:
        yield False, f"torch cannot be imported: {error}; pip install 'torch>=2.10'"
        return
    yield hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), f"torch {torch.__version__}"
    cuda = torch.version.cuda
    yield cuda is not None, f"torch is built for CUDA {cuda}" if cuda else "this torch is built without CUDA"


def _driver() -> Iterator[Finding]:
    version, count = _core.driver_info()
    yield True, f"driver for CUDA {version // 1000}.{version % 1000 // 10}, {count} GPU{'s' * (count != 1)}"
    yield count > 0, "a GPU is visible" if count else "no GPU is visible; see CUDA_VISIBLE_DEVICES"
    for index in range(count):
        info = _core.device_info(index)
        arch = _nvrtc.arch_of(info["cc"])
        memory = f"{info['memory_bytes'] / 2**30:.0f} GiB"
        yield (
            True,
            f"cuda:{index} {info['name']}: {arch}, {info['sms']} multiprocessors, {memory}, L2 {info['l2_bytes'] >> 20} MiB",
        )


def _compiler() -> Iterator[Finding]:
    nvrtc = _nvrtc.open_library()
    archs = ", ".join(map(str, nvrtc.archs))
    yield True, f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} at {nvrtc.path}, for {archs}"


def _host_compiler() -> Iterator[Finding]:
    path, identity = _emulator.compiler()
    yield True, f"{identity} at {path}, for {_emulator.arch()}"


def _cache() -> Iterator[Finding]:
    folders = cache.folders()
    for path, reason in folders.refused:
        yield False, f"{path} is not used: {reason}"
    if folders.home is None:
        yield False, "kernels are kept in memory only"
        return
    found = cache.entries(folders.home)
    damaged = sum(entry.meta is None for entry in found)
    size = sum(entry.size for entry in found) / 2**20
    free = shutil.disk_usage(folders.home).free / 2**30
    yield (
        damaged == 0,
        f"{folders.home}: {len(found)} entries, {size:.1f} MB, {damaged} damaged, {free:.0f} GiB free",
    )


def _environment() -> Iterator[Finding]:
    chosen = [f"{name}={os.environ[name]}" for name in _env.VARIABLES if name in os.environ]
    known = {*_env.VARIABLES, *_env.OF_BUILD}
    unknown = [name for name in os.environ if name.startswith("TKJIT_") and name not in known]
    yield True, ", ".join(chosen) or "no TKJIT_ variable is set"
    _env.number("TKJIT_CACHE_MAX_MB", 0)  # raises where it is no size
    if unknown:
        yield False, f"unknown variables: {', '.join(unknown)}"


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """An empty cache in place of the user's."""
    name = "TKJIT_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def _self_test() -> Iterator[Finding]:
    """Compile into an empty cache, run, compare: the whole path, whatever the user's cache holds."""
    import torch

    from . import softmax

    if not torch.cuda.is_available():
        yield False, "not run: torch sees no GPU"
        return
    with _empty_cache():
        x = torch.randn(64, 1000, device="cuda", requires_grad=True)
        started = time.perf_counter()
        y = softmax(x, -1)
        y.backward(x.detach())
        torch.cuda.synchronize()
        took = (time.perf_counter() - started) * 1e3
        wide = x.detach().double().requires_grad_()
        want = torch.softmax(wide, -1)
        want.backward(x.detach().double())
        error = max((y - want).abs().max().item(), (x.grad - wide.grad).abs().max().item())
    yield error < 1e-6, f"softmax forward and backward in {took:.0f} ms with compiling, error {error:.1e}"


CHECKS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("versions", _versions),
    ("environment", _environment),
    ("driver", _driver),
    ("compiler", _compiler),
    ("emulator", _host_compiler),
    ("cache", _cache),
    ("self-test", _self_test),
)


def run() -> int:
    """Print every finding; returns 0 if all is well, else 1."""
    ill = 0
    for name, check in CHECKS:
        try:
            findings = list(check())
        except (Error, ImportError, OSError, RuntimeError, ValueError) as error:
            findings = [(False, str(error))]
        for well, text in findings:
            ill += not well
            print(f"{'ok  ' if well else 'FAIL'} {name}: {text}")
    print("all is well" if not ill else f"{ill} finding{'s' * (ill != 1)} to look at", file=sys.stdout)
    return 1 if ill else 0
