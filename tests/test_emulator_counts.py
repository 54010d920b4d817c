"""What the emulator counts of bank conflicts and sectors, against arithmetic."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from emulate import text
from tkjit import _emulator
from tkjit._plan import i32, plan, planned
from tkjit._template import Template

SOURCE = text("patterns")
LINE = {
    space: next(n for n, line in enumerate(SOURCE.split("\n"), 1) if "// counted" in line and f"load_{space}" in line)
    for space in ("shared", "global")
}


# (bytes a lane, bytes between lanes, wavefronts, the ideal) of loads from shared memory.
SHARED = (
    (4, 4, 1, 1),  # neighbours
    (4, 0, 1, 1),  # all one word
    (4, 8, 2, 1),  # every second word: two of a bank
    (4, 128, 32, 1),  # a column of rows of 32 words: all of one bank
    (4, 132, 1, 1),  # the same of padded rows
    (4, 64, 16, 1),
    (2, 2, 1, 1),  # two lanes a word
    (8, 8, 2, 2),  # two half warps
    (16, 16, 4, 4),  # four quarters
    (16, 32, 8, 4),  # in each quarter two of a bank
    (16, 128, 32, 4),  # a column of 16-byte pieces in rows of 128 bytes, without swizzle
)
# (bytes a lane, bytes between lanes, bytes before the first, sectors, the ideal) of loads from global memory.
GLOBAL = (
    (4, 4, 0, 4, 4),  # neighbours
    (4, 4, 4, 5, 4),  # a word off
    (4, 8, 0, 8, 4),  # every second word
    (4, 64, 0, 32, 4),  # a sector a lane
    (4, 0, 0, 1, 1),  # all one word
    (2, 2, 0, 2, 2),
    (16, 16, 0, 16, 16),
    (16, 48, 0, 32, 16),  # pieces of 16 bytes, 32 apart
)


def launch(space: str, size: int, pitch: int, offset: int, device: str) -> None:
    instance = Template.from_source(SOURCE, f"patterns_{space}_{size}_{pitch}_{offset}")

    def planner(y, x):
        kernel = instance.kernel(f"patterns::from_{space}<{size}>")
        args = (y, i32(pitch)) if space == "shared" else (y, x, i32(pitch), i32(offset))
        return plan(y, kernel.launch(grid=1, block=32, smem=32 * 1024, args=args))

    planned(planner)(torch.zeros(32, device=device), torch.zeros(1 << 14, dtype=torch.uint8, device=device))


def counted(space: str, size: int, pitch: int, offset: int, monkeypatch) -> tuple[int, int, int]:
    """(requests, wavefronts or sectors, the ideal) of the counted line."""
    monkeypatch.setenv("TKJIT_EMULATE_CHECK", "2")
    monkeypatch.setattr(_emulator, "count", lambda kernel: kernels.append(kernel))
    kernels: list = []
    launch(space, size, pitch, offset, "cpu")
    (kernel,) = kernels
    known = _emulator._lines(kernel, [row[0] for row in kernel.counts()])
    rows = [row for row in kernel.counts() if f":{LINE[space]} " in known[row[0]]]
    assert len(rows) == 1, known
    return rows[0][3:]


@pytest.mark.parametrize(("size", "pitch", "wavefronts", "ideal"), SHARED)
def test_wavefronts_of_shared_loads(size: int, pitch: int, wavefronts: int, ideal: int, monkeypatch) -> None:
    assert counted("shared", size, pitch, 0, monkeypatch) == (1, wavefronts, ideal)


@pytest.mark.parametrize(("size", "pitch", "offset", "sectors", "ideal"), GLOBAL)
def test_sectors_of_global_loads(size: int, pitch: int, offset: int, sectors: int, ideal: int, monkeypatch) -> None:
    assert counted("global", size, pitch, offset, monkeypatch) == (1, sectors, ideal)


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="no ncu")
def test_the_hardware_counts_the_same() -> None:
    metric = {
        "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
        "global": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    }
    code = (
        "import test_emulator_counts as t\n"
        "for size, pitch, *_ in t.SHARED: t.launch('shared', size, pitch, 0, 'cuda')\n"
        "for size, pitch, offset, *_ in t.GLOBAL: t.launch('global', size, pitch, offset, 'cuda')\n"
    )
    command = ["ncu", "--csv", "--kernel-name", "regex:from_", "--metrics", ",".join(metric.values())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    done = subprocess.run(
        [*command, sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        pytest.skip("the machine doesn't allow counters")
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.index('"ID"') :]
    seen = [
        (row["Metric Name"], float(row["Metric Value"].replace(",", ""))) for row in csv.DictReader(io.StringIO(table))
    ]
    assert [value for name, value in seen if name == metric["shared"]][: len(SHARED)] == [row[2] for row in SHARED]
    assert [value for name, value in seen if name == metric["global"]][len(SHARED) :] == [row[3] for row in GLOBAL]


def test_the_table_is_printed_at_the_end(tmp_path: Path) -> None:
    code = "import torch, tkjit; tkjit.softmax(torch.randn(4, 1000))"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TKJIT_CACHE_DIR": str(tmp_path),
        "TKJIT_EMULATE_CHECK": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "" and "softmax::fwd<float" in done.stderr and "row.cuh:" in done.stderr, done.stderr


@pytest.mark.parametrize("value", ("3", "yes"))
def test_another_level_of_checks_is_refused(value: str, monkeypatch) -> None:
    monkeypatch.setenv("TKJIT_EMULATE_CHECK", value)
    with pytest.raises(ValueError, match="TKJIT_EMULATE_CHECK"):
        _emulator.checking()
