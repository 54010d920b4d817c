"""The emulator's checks: each planted bug is found in every schedule, and its clean twin passes in every one."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from emulate import run, seeded, text
from tkjit import EmulatorError, LaunchError

SOURCE = text("broken")
BUG = "#define BUG\n"

# kernel -> what the report says of it, and how it is launched if not with one block of 128 threads
PLANTED: dict[str, tuple[str, dict]] = {
    "missing_barrier": (r"a race on shared memory|read before anything is written", {}),
    "tree_without_barriers": (r"a race on shared memory", {}),
    "missing_warp_barrier": (r"a race on shared memory|read before anything is written", {}),
    "barrier_of_too_few": (r"a race on shared memory|read before anything is written", {}),
    "read_of_the_unwritten": (r"read before anything is written", {}),
    "forgotten_row": (r"read before anything is written", {}),
    "read_past_the_end": (
        r"4 bytes of global memory at \S+ are read outside every tensor: 4 bytes behind tensor 1",
        {},
    ),
    "write_before_the_beginning": (r"are written outside every tensor", {}),
    "misaligned_load": (r"not aligned to 16 bytes", {}),
    "misaligned_shared_load": (r"not aligned to 16 bytes", {}),
    "divergent_shuffle": (r"deadlock.*lanes 0xffffffff of its warp, of which 0x0000ffff are there", {}),
    "mixed_collectives": (r"different collectives", {}),
    "barrier_in_a_branch": (r"deadlock.*barrier 1, where 64 of 128.*barrier 2, where 64 of 128", {}),
    "crossed_barriers": (r"deadlock.*barrier [12], where 64 of 128", {}),
    "swapped_phase": (r"deadlock.*mbarrier at byte|a race on shared memory", {"block": 64}),
    "too_many_bytes_expected": (r"deadlock.*mbarrier at byte \d+, parity 0.*16 bytes short", {"block": 64}),
    "too_few_bytes_expected": (r"deadlock.*-16 bytes short", {"block": 64}),
    "bytes_not_waited_for": (r"a race on shared memory|read before anything is written", {"block": 64}),
    "stage_released_early": (r"a race on shared memory", {"block": 64}),
    "missing_init_fence": (r"without a fence after its initialization", {"block": 64}),
    "barriers_used_too_soon": (r"nothing orders that after its initialization|never initialized", {"block": 64}),
    "missing_proxy_fence": (r"fence between ordinary writes and an asynchronous operation is missing", {"block": 64}),
    "copies_not_waited_for": (r"a race on shared memory", {}),
    "wrong_group_waited_for": (r"a race on shared memory", {}),
    "barrier_initialized_twice": (r"initialized again while it is in use", {"block": 64}),
    "barrier_never_initialized": (r"never initialized", {"block": 64}),
    "bytes_left_pending": (r"the block ends while an mbarrier is 64 bytes short", {"block": 64}),
    "too_many_arrivals": (r"more threads arrive at an mbarrier than it counts", {"block": 64}),
    "missing_cluster_barrier": (
        r"a race on shared memory|read before anything is written",
        {"grid": 2, "cluster": 2, "block": 64, "smem": 512},
    ),
    "too_little_shared_memory": (r"outside the block's shared memory", {"smem": 4096}),
    "store_not_waited_for": (r"ends with bulk stores that it has not waited for", {}),
    "store_without_fence": (r"fence between ordinary writes and an asynchronous operation is missing", {}),
    "arrival_that_never_comes": (r"deadlock.*1 arrivals and 0 bytes short", {"block": 64}),
}
SEEDS = range(50)


def launch(name: str, source: str, seed: int) -> Tensor:
    how = {"grid": 1, "block": 128, "smem": 2048, **PLANTED[name][1]}
    x = torch.arange(384, dtype=torch.float32)
    y = torch.zeros(384)
    if name == "read_past_the_end":
        x = x[:128].clone()
    if name == "misaligned_load":
        x = x[:256]
    run(source, name, args=[y, x], seed=seed, name="broken", **how)
    return y


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bug_is_found_in_every_schedule(name: str) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulatorError) as caught:
            launch(name, BUG + SOURCE, seed)
        message = str(caught.value)
        assert re.search(PLANTED[name][0], message, re.DOTALL), f"seed {seed}: {message}"
        assert re.search(r"broken\.cuh:\d+|at address", message), message  # a compiler may make one call of two


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_clean_twin_passes_in_every_schedule(name: str) -> None:
    first = launch(name, SOURCE, 0)
    for seed in SEEDS:
        assert torch.equal(launch(name, SOURCE, seed), first)


def test_a_race_is_told_with_both_lines_and_threads() -> None:
    with pytest.raises(EmulatorError) as caught:
        launch("tree_without_barriers", BUG + SOURCE, 1)
    message = str(caught.value)
    places = set(re.findall(r"broken\.cuh:(\d+) \(tree_without_barriers\)", message))
    lines = [number for number, line in enumerate((BUG + SOURCE).split("\n"), 1) if "s[threadIdx.x + half]" in line]
    assert str(lines[0]) in places, message
    assert len(re.findall(r"thread \(\d+, 0, 0\)", message)) == 2, message


def test_without_checks_a_deadlock_is_still_found() -> None:
    x, y = torch.zeros(128), torch.zeros(128)
    with pytest.raises(EmulatorError, match="deadlock"):
        run(BUG + SOURCE, "barrier_in_a_branch", 1, 128, [y, x], check=False, name="broken")


def test_a_kernel_that_does_not_compile_tells_the_line() -> None:
    from tkjit import CompileError

    with pytest.raises(CompileError, match=r"> +2 \| .*missing_name") as caught:
        run('#include "tk/tk.cuh"\n__global__ void f(float* y) { y[0] = missing_name; }', "f", 1, 32, [torch.zeros(1)])
    assert caught.value.arch == "sm_90a" and "missing_name" in caught.value.log


def test_what_an_architecture_lacks_is_a_fault() -> None:
    with pytest.raises(EmulatorError, match="no such instruction"):
        run(
            SOURCE,
            "arrival_that_never_comes",
            1,
            64,
            [torch.zeros(64), torch.zeros(64)],
            smem=2048,
            arch="sm_80",
            name="broken",
        )


def test_seeds_give_different_schedules() -> None:
    source = """
#include "tk/tk.cuh"
__global__ void order(int* y, int* next) { y[threadIdx.x] = atomicAdd(next, 1); }
"""
    seen = set()
    for seed in range(8):
        y, counter = torch.zeros(64, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        run(source, "order", 1, 64, [y, counter], seed=seed)
        assert sorted(y.tolist()) == list(range(64))
        seen.add(tuple(y.tolist()))
    assert len(seen) == 8
    seeded(0)


def test_plain_cuda_runs_too() -> None:
    source = """
__global__ void sums(float* y, const float* x, int n)
{
    __shared__ float part[8];
    float s = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        s += x[blockIdx.x * n + i];
    }
    for (int o = 16; o > 0; o /= 2) {
        s += __shfl_down_sync(0xffffffff, s, o);
    }
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < blockDim.x / 32; ++i) {
            s += part[i];
        }
        atomicAdd(&y[blockIdx.x % 2], s);
    }
}
"""
    from tkjit._plan import i32

    x = torch.randint(-8, 8, (6, 1000)).float()
    y = torch.zeros(2)
    run('#include "tk/tk.cuh"\n' + source, "sums", 6, 256, [y, x, i32(1000)])
    assert torch.equal(y, torch.stack([x[::2].sum(), x[1::2].sum()]))


def test_objects_for_the_cpu_are_cached_listed_and_exported_like_cubins(fresh, tmp_path) -> None:
    code = """
import os, sys
import torch, tkjit
tkjit.softmax(torch.randn(4, 8))
before = tkjit.cache.stats()
assert before["compiles"] == COMPILES and before["disk_hits"] == 1 - COMPILES, before
(entry,) = tkjit.cache.entries()
assert entry.meta["arch"] == "sm_90a" and entry.meta["compiler"], entry.meta
print(tkjit.cache.export(os.path.join(os.environ["TKJIT_CACHE_DIR"], "..", "shipped")))
"""
    assert fresh(code.replace("COMPILES", "1")).strip() == "1"
    assert fresh(code.replace("COMPILES", "0")).strip() == "1"
    shipped = code.replace("COMPILES", "0").split("print")[0]
    fresh(shipped, TKJIT_CACHE_DIR=f"{tmp_path / 'other'}:{tmp_path / 'shipped'}", TKJIT_NO_JIT="1")


def test_activemask_promises_the_caller_alone() -> None:
    y = torch.zeros(64, dtype=torch.int32)
    kernel = "__global__ void mask(int* y) { y[threadIdx.x] = int(__activemask() >> threadIdx.x % 32 & 1); }"
    run(f'#include "tk/tk.cuh"\n{kernel}', "mask", 1, 64, [y])
    assert bool((y == 1).all())


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("grid", [0, (1, 0), (1, 65536), (1, 1, 65536)])
def test_grids_that_the_driver_refuses_the_emulator_refuses_too(grid, place) -> None:
    x = torch.zeros(4, device=place)
    with pytest.raises(LaunchError, match="one"):
        run('#include "tk/tk.cuh"\n__global__ void one(float* x) { x[0] = 1.0f; }', "one", grid, 32, [x])
    assert x.sum().item() == 0
