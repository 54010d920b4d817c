"""The examples run as README says, and what README shows of them is what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def example(root: Path, name: str, tmp_path: Path, **variables: str) -> str:
    import os

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TKJIT_CACHE_DIR": str(tmp_path), **variables}
    done = subprocess.run(
        [sys.executable, str(root / "examples" / name)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the demo runs on it")
def test_the_demo_runs_on_the_cpu(root: Path, tmp_path: Path) -> None:
    said = example(root, "01_softmax.py", tmp_path)
    errors = [float(number) for number in re.findall(r"error (\S+) (?:\S+)", said)]
    # Logarithms from 16 on are 0.0625 off where bfloat16 rounds them right.
    assert len(errors) >= 4 and max(errors) < 0.1, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs there")
def test_attention_is_close_on_the_cpu(root: Path, tmp_path: Path) -> None:
    said = example(root, "03_attention.py", tmp_path)
    errors = [float(number) for number in re.findall(r"\d\.\de[-+]\d\d", said)]
    assert len(errors) == 18 and max(errors) < 0.02, said


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it runs there")
def test_serving_is_close_on_the_cpu(root: Path, tmp_path: Path) -> None:
    said = example(root, "04_serving.py", tmp_path)
    errors = [float(number) for number in re.findall(r"\d\.\de[-+]\d\d", said)]
    assert len(errors) == 3 and max(errors) < 0.02, said


def test_kernels_of_ones_own_are_right(root: Path, tmp_path: Path) -> None:
    said = example(root, "05_your_own_kernel.py", tmp_path, TKJIT_EMULATE_CHECK="1")
    assert said.splitlines() == ["add: right", "gelu: right", "row_sum: right", "gelu of CUDA text: right"]


def test_reductions_of_ones_own_are_right(root: Path, tmp_path: Path) -> None:
    said = example(root, "06_your_own_reduction.py", tmp_path, TKJIT_EMULATE_CHECK="1")
    assert said.splitlines() == ["norm: right", "its gradient: right", "largest: right", "variance: right"]


def test_the_broken_kernel_is_told_as_readme_shows(root: Path, tmp_path: Path) -> None:
    said = example(root, "02_broken_kernel.py", tmp_path)
    readme = (root / "README.md").read_text()
    shown = re.search(r"<!-- broken -->\n```\n(.*?)```\n<!-- /broken -->", readme, re.DOTALL)
    assert shown is not None and shown[1] == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is shown for it")
def test_attention_of_the_readme_runs_on_the_cpu(root: Path) -> None:
    shown = re.search(r"<!-- attention -->\n```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    names: dict = {"torch": torch}
    exec(shown[1].replace('"cuda"', '"cpu"'), names)
    assert names["o"].shape == (2, 1, 8, 64) and names["lse"].shape == (2, 8, 150)
