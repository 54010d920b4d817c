"""The n-th allocation, read, write or call of NVRTC fails, for every n: no crash, no damage, and the next attempt works.

A build of its own (TKJIT_HOSTILE=1) runs hostile_build.py, in one process for each place and scenario.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import environment

SCRIPT = Path(__file__).with_name("hostile_build.py")

# (place, scenario) -> the outcomes that there are; "ok": the failure was survived
EXPECTED = {
    ("alloc", "compile_cold"): "MemoryError",
    ("alloc", "read_warm"): "MemoryError ok",
    ("alloc", "replace_damaged"): "MemoryError ok",
    ("alloc", "broken_source"): "MemoryError",
    ("alloc", "with_headers"): "MemoryError",
    ("alloc", "look_after_cache"): "ok",
    ("alloc", "plan_calls"): "MemoryError",
    ("alloc", "use_torch_first"): "MemoryError",
    ("alloc", "open_first"): "MemoryError",
    ("read", "read_warm"): "ok",
    ("read", "replace_damaged"): "ok",
    ("read", "look_after_cache"): "ok",
    ("write", "compile_cold"): "ok",
    ("write", "replace_damaged"): "ok",
    ("nvrtc", "compile_cold"): "CompileError",
    ("nvrtc", "replace_damaged"): "CompileError",
    ("nvrtc", "broken_source"): "CompileError ok",
    ("nvrtc", "open_first"): "CompileError",
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, root: Path) -> Path:
    """The folder of a hostile build: the one whose tests these are, if it is one."""
    from tkjit import _core

    if hasattr(_core, "hostile"):
        return Path(_core.__file__).parents[1]
    folder = tmp_path_factory.mktemp("hostile")
    sanitize = "1" if "libasan" in os.environ.get("LD_PRELOAD", "") else "0"  # as the build under test
    switches = {"TKJIT_HOSTILE": "1", "TKJIT_SANITIZE": sanitize}
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(folder), "--build-lib", str(folder / "lib")]
    subprocess.run(build, cwd=root, env={**os.environ, **switches}, check=True, stdout=subprocess.DEVNULL)
    return folder / "lib"


@pytest.mark.parametrize(("place", "scenario"), EXPECTED)
def test_every_failure_is_survived_or_told(hostile: Path, place: str, scenario: str, tmp_path: Path) -> None:
    env = environment(TMPDIR=str(tmp_path))
    env["PYTHONPATH"] = os.pathsep.join([str(hostile), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, SCRIPT, place, scenario], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    count, *outcomes = done.stdout.split()
    assert int(count) >= 1 and " ".join(outcomes) == EXPECTED[place, scenario], done.stdout


def test_an_ordinary_build_cannot_be_made_to_fail(hostile: Path) -> None:
    from tkjit import _core

    assert not hasattr(_core, "hostile") or Path(_core.__file__).parents[1] == hostile
