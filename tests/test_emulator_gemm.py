"""A warp-specialised GEMM of tensor maps, mbarrier rings and wgmma: on the emulator under checks, and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from emulate import run, text
from tkjit import EmulatorError
from tkjit._plan import Spec, TensorMap, i32, tensor_map

SOURCE = text("gemm")
STAGES = 3
SMEM = STAGES * 2 * 128 * 64 * 2 + 128 * 128 * 2 + STAGES * 16 + 1024 + 1024


def mapped(tensor: int, box: tuple[int, int], swizzle: int):
    def make(specs: Sequence[Spec]) -> TensorMap:
        rows, cols = specs[tensor].shape
        return tensor_map(specs[tensor], (cols, rows), (cols * 2,), box, swizzle)

    return make


def gemm(a: Tensor, b: Tensor, source: str = SOURCE, **how) -> Tensor:
    """a b^T. The planner needs the tensors whose maps it makes among its arguments: the kernel takes c, and ignores it."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.full((m, n), float("nan"), dtype=a.dtype, device=a.device)
    maps = [mapped(1, (64, 128), 128), mapped(2, (64, 128), 128), mapped(0, (128, 64), 0)]
    run(
        source,
        f"gemm::warp_specialized<{STAGES}>",
        (n // 128, m // 128),
        384,
        [c, *maps, i32(k // 64)],
        also=(a, b),
        smem=SMEM,
        name="gemm",
        **how,
    )
    return c


def operands(m: int, n: int, k: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(m, k).bfloat16().to(device), torch.randn(n, k).bfloat16().to(device)


def test_gemm_of_256_is_right_under_checks() -> None:
    a, b = operands(256, 256, 256)
    got = gemm(a, b)
    want = (a.double() @ b.double().t()).bfloat16()
    assert (got.double() - want.double()).abs().max() <= 2**-8 * want.double().abs().max()
    assert torch.equal(got, gemm(a, b, check=False))


@pytest.mark.parametrize("seed", range(3))
def test_gemm_gives_the_same_bits_in_every_schedule(seed: int) -> None:
    a, b = operands(128, 128, 320)
    assert torch.equal(gemm(a, b, seed=seed), gemm(a, b, seed=seed + 100))


def test_a_tile_takes_little_time() -> None:
    a, b = operands(128, 128, 64)
    for check, limit in ((False, 1.0), (True, 5.0)):
        gemm(a, b, check=check)  # compiles
        started = time.perf_counter()
        gemm(a, b, check=check)
        assert time.perf_counter() - started < limit


def test_gemm_on_the_gpu_gives_the_emulators_result(device: str) -> None:
    a, b = operands(256, 256, 256)
    got, emulated = gemm(a.to(device), b.to(device)).cpu(), gemm(a, b, check=False)
    # The tensor cores' order of a sum is their own: a rounding of bfloat16 apart, here and there.
    assert (got.double() - emulated.double()).abs().max() <= 2**-7 * emulated.double().abs().max()
    integers = [torch.randint(-4, 5, (256, 256)).bfloat16() for _ in range(2)]
    assert torch.equal(gemm(*(t.to(device) for t in integers)).cpu(), gemm(*integers, check=False))


BUGS = {
    "no wait for the products": ("        tk::wgmma_wait<0>(acc);\n", "", r"race on shared memory"),
    "stage released before its products are done": (
        "        tk::wgmma_wait<0>(acc);\n        if (tk::lane() == 0) {\n            tk::arrive_expect(s.empty[stage], 0);",
        "        if (tk::lane() == 0) {\n            tk::arrive_expect(s.empty[stage], 0);\n        }\n"
        "        tk::wgmma_wait<0>(acc);\n        if (false) {\n",
        r"race on shared memory",
    ),
    "a warp misses a product": (
        "            tk::wgmma<BLOCK_N",
        "            if (thread / 32 != 3 || i != 1) tk::wgmma<BLOCK_N",
        r"deadlock.*the rest of warpgroup|at different instructions",
    ),
    "a warp names another operand": (
        "tk::advanced(b, 32 * k)",
        "tk::advanced(b, thread / 32 == 2 ? 0 : 32 * k)",
        r"different operands",
    ),
    "no fence before the store": ("    tk::fence_async();\n", "", r"fence between ordinary writes and an asynchronous"),
    "no barrier before the store": (
        "    tk::sync_named(1 + half, 128);",
        "    ;",
        r"race on shared memory|read before anything",
    ),
    "too many bytes expected": ("sizeof s.b[0]));", "sizeof s.b[0]) + 128);", r"deadlock.*128 bytes short"),
    "the ring's phase is wrong": (
        "tk::wait(s.empty[stage], phase ^ 1);",
        "tk::wait(s.empty[stage], phase);",
        r"deadlock",
    ),
    "one group arrives for both": ("tk::init(s.empty[i], 8);", "tk::init(s.empty[i], 4);", r"race|more threads arrive"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_in_the_gemm_is_found(bug: str) -> None:
    before, after, told = BUGS[bug]
    assert SOURCE.count(before) == 1
    a, b = operands(128, 128, 512)
    for seed in range(10):
        with pytest.raises(EmulatorError, match=f"(?s){told}"):
            gemm(a, b, SOURCE.replace(before, after), seed=seed)
