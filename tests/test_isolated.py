"""Runs the scripts of isolated/, each in a process of its own: leaks, forks, first use by many threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import environment

SCRIPTS = sorted(Path(__file__).with_name("isolated").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script(script: Path, tmp_path: Path) -> None:
    env = environment(TKJIT_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path))
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stdout == ""


def test_there_are_scripts() -> None:
    assert {path.stem for path in SCRIPTS} >= {
        "leak_calls",
        "leak_kernels",
        "fork_after_nvrtc",
        "first_use_threads",
        "unload",
    }
