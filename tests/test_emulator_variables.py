"""`__shared__` variables on the emulator: of templates and not, static and dynamic, one block after another and at once."""

from __future__ import annotations

import re

import pytest
import torch

from emulate import run, text
from tkjit import EmulatorError, LaunchError

SOURCE = text("variables")
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REVERSED = torch.arange(127, -1, -1)

# kernel -> what the report says of its bug, and how it is launched if not with one block of 128 threads
PLANTED: dict[str, tuple[str, dict]] = {
    "missing_barrier<128>": (r"a race on shared memory|read before anything is written", {}),
    "missing_second_barrier<float, kBlock>": (r"a race on shared memory", {}),
    "missing_second_barrier<float, kNamed>": (r"a race on shared memory", {}),
    "missing_second_barrier<float, kMbarrier>": (r"a race on shared memory", {}),
    "missing_second_barrier<float, kCluster>": (r"a race on shared memory", {}),
    "forgotten_half<128>": (r"read before anything is written.*byte \d+ of block 0's __shared__ variables", {}),
    "left_by_a_block<short>": (r"read before anything is written", {"grid": 2}),
    "before_the_first<128>": (r"outside the block's shared memory", {}),
    "missing_wait<64>": (
        r"a race on shared memory|read before anything is written",
        {"grid": 2, "cluster": 2, "block": 64},
    ),
}


def launch(source: str, kernel: str, dtype: torch.dtype = torch.int32, place: str = "cpu", **how) -> torch.Tensor:
    y = torch.full((256,), -1, dtype=dtype, device=place)
    run(source, kernel, **{"grid": 1, "block": 128, "args": [y], "name": "variables", **how})
    return y.cpu()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(("kind", "n"), [("float", 128), ("float", 96), ("double", 32)])
def test_each_block_has_its_own_variables_of_any_type(kind: str, n: int, check: bool, place: str) -> None:
    dtype = torch.double if kind == "double" else torch.float
    y = launch(SOURCE, f"kinds<{kind}, {n}>", dtype, place, grid=2, block=n, check=check)
    wanted = torch.cat([torch.arange(n - 1, -1, -1), torch.arange(2 * n - 1, n - 1, -1)]) + 115
    assert torch.equal(y[: 2 * n], wanted.to(dtype))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("check", [False, True])
def test_each_instance_of_a_function_has_its_own_variables(check: bool, place: str) -> None:
    assert bool((launch(SOURCE, "places", place=place, check=check)[:128] == 3).all())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("dtype", [torch.float, torch.int64])
def test_dynamic_shared_memory_has_any_name_and_type(dtype: torch.dtype, check: bool, place: str) -> None:
    kernel = f"dynamic<{'float' if dtype == torch.float else 'long long'}>"
    y = launch(SOURCE, kernel, dtype, place, check=check, smem=128 * dtype.itemsize)
    assert torch.equal(y[:128], (REVERSED + 1000).to(dtype))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("check", [False, True])
def test_blocks_of_a_cluster_reach_each_others_variables(check: bool, place: str) -> None:
    y = launch(SOURCE, "missing_wait<64>", place=place, grid=2, cluster=2, block=64, check=check)
    assert torch.equal(y[:128], REVERSED.int())


def test_too_little_dynamic_memory_does_not_reach_the_variables() -> None:
    with pytest.raises(EmulatorError, match="outside the block's shared memory"):
        launch(SOURCE, "dynamic<float>", torch.float, smem=256)


@pytest.mark.parametrize("kernel", PLANTED)
def test_planted_bug_is_found_in_every_schedule(kernel: str) -> None:
    report, how = PLANTED[kernel]
    for seed in range(50):
        with pytest.raises(EmulatorError) as caught:
            launch("#define BUG\n" + SOURCE, kernel, _dtype(kernel), seed=seed, **how)
        message = str(caught.value)
        assert re.search(report, message, re.DOTALL), f"seed {seed}: {message}"
        assert re.search(r"variables\.cuh:\d+|at address", message), message


@pytest.mark.parametrize("kernel", PLANTED)
def test_planted_bugs_clean_twin_passes_in_every_schedule(kernel: str) -> None:
    how = PLANTED[kernel][1]
    first = launch(SOURCE, kernel, _dtype(kernel), **how)
    for seed in range(50):
        assert torch.equal(launch(SOURCE, kernel, _dtype(kernel), seed=seed, **how), first)


def _dtype(kernel: str) -> torch.dtype:
    return torch.float if "<float" in kernel else torch.int16 if "<short" in kernel else torch.int32


def test_variables_count_as_memory_of_the_block() -> None:
    most = 101376 - 4096
    assert torch.equal(launch(SOURCE, "large<1024>", smem=most, arch="sm_86")[:128], REVERSED.int())
    with pytest.raises(LaunchError, match="wants 101392 bytes of shared memory, a block of this GPU has 101376"):
        launch(SOURCE, "large<1024>", smem=most + 16, arch="sm_86")


def test_more_variables_than_the_assembler_takes_are_refused() -> None:
    launch(SOURCE, "large<12288>", arch="sm_86")
    with pytest.raises(LaunchError, match="49156 bytes of __shared__ variables"):
        launch(SOURCE, "large<12289>", arch="sm_86")
    launch(SOURCE, "large<58112>", arch="sm_90a")
    with pytest.raises(LaunchError, match="wants 232452 bytes"):
        launch(SOURCE, "large<58113>", arch="sm_90a")


def test_users_templates_have_variables(monkeypatch) -> None:
    import tkjit

    source = """
template <class T, int BLOCK>
__global__ void flip(T* y, const T* x)
{
    __shared__ T s[BLOCK];
    s[threadIdx.x] = x[blockIdx.x * BLOCK + threadIdx.x];
    __syncthreads();
    y[blockIdx.x * BLOCK + threadIdx.x] = s[BLOCK - 1 - threadIdx.x];
}
"""
    x = torch.arange(256.0)
    for checked in ("0", "1"):
        monkeypatch.setenv("TKJIT_EMULATE_CHECK", checked)
        for block in (64, 128):
            y = torch.empty(256)
            tkjit.Kernel(source, "flip", T=torch.float32, BLOCK=block).launch(256 // block, block, (y, x))
            assert torch.equal(y.view(-1, block), x.view(-1, block).flip(1))
