"""Every op on the CPU, through the emulator with all checks: each dtype, each path of its kernels, small shapes.

The kernels are those of a GPU: what a path computes here, it computes there, and a race, a deadlock or an access outside the
tensors is found here.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch import Tensor

import tkjit
from emulate import emulating
from judge import assert_same, check
from test_softmax import judged
from tkjit import _device, _rows
from tkjit.testing import OpCases, all_cases

ARCHS = ("sm_80", "sm_90a")
OPS = [pytest.param(op, id=name) for name, op in all_cases().items()]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

every_op = pytest.mark.parametrize("op", OPS)
every_arch = pytest.mark.parametrize("arch", ARCHS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def fresh_plans():
    tkjit.cache.clear_plans()
    yield
    tkjit.cache.clear_plans()


@pytest.fixture
def few_multiprocessors(monkeypatch) -> None:
    """A GPU of two multiprocessors, and rings for tensors of any size: blocks that live on take several rows of a small one."""
    monkeypatch.setattr(_rows, "RING_BYTES", 0)
    monkeypatch.setattr(_rows, "DRAW_BYTES", 0)
    small = {arch: dataclasses.replace(device, sms=18) for arch, device in _device._TYPICAL.items()}
    monkeypatch.setattr(_device, "_TYPICAL", small)


@every_op
@every_arch
@every_dtype
def test_samples(op: OpCases, arch: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with emulating(arch):
        for sample in op.samples("cpu", dtype):
            if max((a.numel() for a in sample.args if isinstance(a, Tensor)), default=0) <= 1 << 16:
                check(op.public, op.reference, sample.args, sample.kwargs, slack=op.slack, label=sample.label)


# Rows: of a part of a warp, of a warp, several, a cluster; whole vectors and not, forward and backward.
ROWS = [(40, 24), (40, 31), (12, 256), (12, 255), (5, 781), (5, 1024), (4, 2050), (3, 4096), (3, 4095), (2, 8200)]
CLUSTERS = [(3, 33024), (3, 40001), (2, 65600)]


def normal(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    torch.manual_seed(1)
    n = torch.Size(shape).numel()
    return (torch.randn(n + offset) * 3).to(dtype)[offset:].view(shape)


# --- softmax and log_softmax: each path of their kernels ---------------------------------------------------------------

both = pytest.mark.parametrize("op", ("softmax", "log_softmax"))


@both
@every_arch
@every_dtype
def test_rows(op: str, arch: str, dtype: torch.dtype) -> None:
    with emulating(arch):
        for shape in ROWS:
            judged(op, normal(shape, dtype), -1)
        judged(op, normal((6, 512), dtype, offset=1), -1)


@both
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_rows_through_rings(op: str, dtype: torch.dtype, few_multiprocessors) -> None:
    with emulating("sm_90a"):
        for rows, n in ROWS:
            judged(op, normal((max(rows, 7), n), dtype), -1)
        judged(op, normal((40, 4096), dtype, offset=1), -1)  # more rows than blocks that live at once


@both
@pytest.mark.parametrize("dtype", DTYPES[:3:2], ids=str)
def test_rows_of_a_cluster(op: str, dtype: torch.dtype, few_multiprocessors) -> None:
    with emulating("sm_90a"):
        for shape in CLUSTERS:
            judged(op, normal(shape, dtype), -1)


@both
@every_arch
@every_dtype
def test_columns(op: str, arch: str, dtype: torch.dtype) -> None:
    with emulating(arch):
        for shape, dim in (((3, 50, 64), 1), ((2, 300, 40), 1), ((2, 17, 9), 1), ((2, 2100, 16), 1), ((70, 3, 8), 0)):
            judged(op, normal(shape, dtype), dim)


@both
def test_columns_fetched_ahead(op: str, few_multiprocessors) -> None:
    with emulating("sm_90a"):
        judged(op, normal((21, 1024, 32), torch.bfloat16), 1)


@both
@every_arch
def test_any_strides_and_long_rows(op: str, arch: str) -> None:
    with emulating(arch):
        judged(op, normal((50, 7), torch.float32).t(), -1)
        judged(op, normal((9, 33), torch.bfloat16)[:, ::2], -1)
        judged(op, normal((300_001,), torch.bfloat16), 0)


@both
def test_every_schedule_gives_the_same_bits(op: str, few_multiprocessors) -> None:
    first = None
    for seed in range(int(os.environ.get("TKJIT_TEST_SEEDS", "5"))):
        tkjit.cache.clear_plans()
        with emulating("sm_90a", seed=seed):
            found = [
                tensor
                for shape, dtype, dim in (
                    ((20, 1000), torch.bfloat16, -1),
                    ((9, 2048), torch.float32, -1),
                    ((3, 33024), torch.bfloat16, -1),
                    ((2, 300, 40), torch.float16, 1),
                )
                for tensor in judged(op, normal(shape, dtype), dim).tensors
            ]
        first = first or found
        assert_same(found, first, f"seed {seed}")


# --- The same on a GPU -------------------------------------------------------------------------------------------------

# What ex2.approx and rcp.approx are off by, and a * b + c that NVRTC rounds once: of the half types the result is the same or the
# next number, of the others it is off by some units of the last place of the largest term that it was summed from.
EPS = {torch.float32: 4 * 2.0**-23, torch.float64: 8 * 2.0**-52}
SHAPES = [
    *((shape, -1) for shape in (*ROWS, *CLUSTERS, (70, 5), (33, 9))),
    *(((3, 50, 64), 1), ((2, 300, 40), 1), ((2, 17, 9), 1), ((2, 2100, 16), 1), ((70, 3, 8), 0), ((600_001,), 0)),
]


def ulps_apart(a: Tensor, b: Tensor) -> int:
    """The most numbers of the dtype that lie between two counterparts."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]

    def place(t: Tensor) -> Tensor:
        bits = t.contiguous().view(whole).to(torch.int64)
        return torch.where(bits < 0, torch.iinfo(whole).min - bits, bits)

    return int((place(a) - place(b)).abs().max()) if a.numel() else 0


@both
@every_dtype
def test_gpu_gives_the_emulators_result(op: str, dtype: torch.dtype, device: str, record_property) -> None:
    from tkjit.ops import softmax as module

    log = op == "log_softmax"
    worst, cases = 0.0, 0
    for shape, dim in SHAPES:
        for offset in (0, 1):
            x, dy = normal(shape, dtype, offset), normal(shape, dtype, offset)
            y, y_gpu = module._forward(x, dim, log), module._forward(x.to(device), dim, log).cpu()
            dx, dx_gpu = (
                module._backward(dy, y, dim, log),
                module._backward(dy.to(device), y.to(device), dim, log).cpu(),
            )
            label = f"{shape} dim {dim} offset {offset}"
            if dtype in EPS:
                # dx = y (dy - sum(y dy)), or dy - exp(y) sum(dy): it may be far smaller than what it is a difference of.
                sums = dy.double().abs().sum(dim, keepdim=True)
                term = (
                    y.double().exp() * sums if log else y.double() * dy.double().abs().amax(dim, keepdim=True)
                ).max()
                largest = (float(y.double().abs().max()), float(term))
                for ours, theirs, most in zip((y, dx), (y_gpu, dx_gpu), largest):
                    apart = float((ours.double() - theirs.double()).abs().max()) / most
                    worst = max(worst, apart / EPS[dtype])
                    assert apart <= EPS[dtype], label
            else:
                worst = max(worst, ulps_apart(y, y_gpu))
                assert ulps_apart(y, y_gpu) <= 1, label
                scale = dx.double().abs().max()
                assert (dx.double() - dx_gpu.double()).abs().max() <= 2 * torch.finfo(dtype).eps * scale, label
            cases += 2
    record_property("compared", cases)
    print(f"{op} {dtype}: {cases} results compared, at most {worst:.2f} of what is allowed apart")
