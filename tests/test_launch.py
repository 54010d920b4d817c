"""What reaches a kernel: parameters of every kind, scratch, shared memory, clusters, tensor maps; and what a refusal says."""

from __future__ import annotations

import struct

import pytest
import torch

import tkjit
from tkjit import _core
from tkjit._plan import (
    bool_,
    empty,
    empty_like,
    f32,
    f64,
    i32,
    i64,
    plan,
    planned,
    scratch,
    tensor_map,
    u32,
    u64,
)
from tkjit._plan import struct as by_value
from tkjit._template import Template

pytestmark = pytest.mark.gpu

SCALARS = """
struct Three { int a; double b; bool c; };
__global__ void scalars(unsigned long long* out, bool b, int i, long long q, float f, double d, unsigned u, unsigned long long w,
                        Three t, const float* nothing) {
    out[0] = b; out[1] = (long long)i; out[2] = q; out[3] = __float_as_uint(f); out[4] = __double_as_longlong(d);
    out[5] = u; out[6] = w; out[7] = t.a; out[8] = __double_as_longlong(t.b); out[9] = t.c; out[10] = nothing == nullptr;
}
"""


def test_scalars_arrive_with_their_type_and_value(device):
    kernel = Template.from_source(SCALARS, "scalars").kernel("scalars")

    @planned
    def run(x):
        out = empty((11,), "int64", x)
        args = (
            out, bool_(True), i32(-5), i64(-(2**40)), f32(0.1), f64(0.1), u32(2**32 - 1), u64(2**64 - 1),
            by_value(i32(-7), f64(2.5), bool_(True)), None,
        )  # fmt: skip
        return plan(out, kernel.launch(grid=1, block=1, args=args))

    got = [value % 2**64 for value in run(torch.zeros(1, device=device)).tolist()]
    bits = lambda kind, value: int.from_bytes(struct.pack(kind, value), "little")  # noqa: E731
    want = [
        1,
        -5 % 2**64,
        -(2**40) % 2**64,
        bits("f", 0.1),
        bits("d", 0.1),
        2**32 - 1,
        2**64 - 1,
        -7 % 2**64,
        bits("d", 2.5),
        1,
        1,
    ]
    assert got == want


def test_zeroed_scratch_is_zero_and_every_call_has_its_own(device):
    source = """
    __global__ void count(int* out, int* seen) { out[0] = atomicAdd(seen, 1); }
    """
    kernel = Template.from_source(source, "count").kernel("count")

    @planned
    def run(x):
        out, seen = empty((1,), "int32", x), scratch(4, zeroed=True)
        return plan(
            out, kernel.launch(grid=1, block=1, args=(out, seen)), kernel.launch(grid=1, block=1, args=(out, seen))
        )

    x = torch.zeros(1, device=device)
    torch.full((1 << 20,), 77, dtype=torch.int32, device=device)  # recycled memory is not zero
    assert [run(x).item() for _ in range(3)] == [1, 1, 1]


def test_a_block_may_have_all_the_shared_memory_there_is(device):
    source = """
    __global__ void fill(int* out, int n) {
        extern __shared__ int s[];
        for (int i = threadIdx.x; i < n; i += blockDim.x) { s[i] = i; }
        __syncthreads();
        int sum = 0;
        for (int i = threadIdx.x; i < n; i += blockDim.x) { sum += s[n - 1 - i] == n - 1 - i; }
        atomicAdd(out, sum);
    }
    """
    most = _core.device_info(0)["smem_block"]
    kernel = Template.from_source(source, "fill").kernel("fill")

    def run_with(smem):
        @planned
        def run(x):
            return plan(x, kernel.launch(grid=1, block=256, smem=smem, args=(x, i32(smem // 4))))

        return run

    out = torch.zeros(1, dtype=torch.int32, device=device)
    for smem in (most, 1024, most):
        assert run_with(smem)(out.zero_()).item() == smem // 4
    with pytest.raises(
        tkjit.LaunchError, match=f"{most + 1024} bytes of shared memory, a block of this GPU has {most}"
    ):
        run_with(most + 1024)(out)
    assert out.item() == most // 4


def test_a_refused_launch_names_kernel_and_limits_and_harms_nothing(device):
    kernel = Template.from_source("__global__ void nothing(float* x) { x[0] = 1.0f; }", "nothing").kernel("nothing")

    @planned
    def run(x):
        return plan(x, kernel.launch(grid=(3, 2), block=2048, args=(x,)))

    x = torch.zeros(4, device=device)
    with pytest.raises(tkjit.LaunchError) as caught:
        run(x)
    for words in ("nothing", "grid (3, 2, 1)", "block (2048, 1, 1)", "CUDA_ERROR_INVALID_VALUE"):
        assert words in str(caught.value)
    assert x.sum().item() == 0
    assert torch.allclose(tkjit.softmax(x), torch.full_like(x, 0.25))


@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_the_blocks_of_a_cluster_know_their_rank(device, size):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters begin with compute capability 9.0")
    source = """
    #include "tk/tk.cuh"
    __global__ void ranks(int* out) { out[blockIdx.x] = tk::cluster_rank(); tk::sync_cluster(); }
    """
    kernel = Template.from_source(source, "ranks").kernel("ranks")

    @planned
    def run(x):
        out = empty((32,), "int32", x)
        return plan(out, kernel.launch(grid=32, block=32, cluster=size, args=(out,)))

    assert run(torch.zeros(1, device=device)).tolist() == [i % size for i in range(32)]


TENSOR_MAP = """
struct alignas(64) Map { unsigned long long words[16]; };
__global__ void tile(float* out, const __grid_constant__ Map map, int column, int row) {
    __shared__ alignas(128) float s[8][16];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned b = __cvta_generic_to_shared(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(b));
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(b), "r"(512) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                     :: "r"((unsigned)__cvta_generic_to_shared(s)), "l"(&map), "r"(column), "r"(row), "r"(b) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra again; }" :: "r"(b) : "memory");
    for (int i = threadIdx.x; i < 128; i += blockDim.x) { out[i] = s[i / 16][i % 16]; }
}
"""


def _tile_of(box):
    kernel = Template.from_source(TENSOR_MAP, "tile").kernel("tile")

    @planned
    def run(x, column, row):
        rows, columns = x.shape
        map_ = tensor_map(x, dims=(columns, rows), strides=(x.strides[0] * 4,), box=box)
        out = empty((8, 16), "float32", x)
        return plan(out, kernel.launch(grid=1, block=32, args=(out, map_, i32(column), i32(row))))

    return run


def test_a_tensor_map_follows_the_tensor_it_is_called_with(device):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("tensor maps begin with compute capability 9.0")
    run = _tile_of(box=(16, 8))
    tensors = [torch.randn(40, 64, device=device) for _ in range(3)]
    for x in (*tensors, *tensors):  # one plan, another address each time
        assert torch.equal(run(x, 4, 5), x[5:13, 4:20])
    padded = torch.zeros(8, 16, device=device)
    padded[:3, :8] = tensors[0][37:, 56:]  # what lies outside is 0
    assert torch.equal(run(tensors[0], 56, 37), padded)


def test_a_tensor_map_that_cannot_be_is_refused_before_the_launch(device):
    with pytest.raises(tkjit.Error, match="cuTensorMapEncodeTiled"):
        _tile_of(box=(512, 8))(torch.randn(40, 64, device=device), 0, 0)
    assert torch.equal(tkjit.softmax(torch.zeros(2, device=device)), torch.full((2,), 0.5, device=device))


def test_several_launches_of_a_plan_run_in_their_order(device):
    source = "template <int N> __global__ void step(int* x) { x[0] = x[0] * 10 + N; }"
    template = Template.from_source(source, "step")

    @planned
    def run(x):
        return plan(x, *(template.kernel("step", N=n).launch(grid=1, block=1, args=(x,)) for n in (1, 2, 3)))

    before = tkjit.cache.stats()["launches"]
    assert run(torch.zeros(1, dtype=torch.int32, device=device)).item() == 123
    assert tkjit.cache.stats()["launches"] == before + 3


def test_outputs_are_torchs_own_memory(device):
    x = torch.randn(64, 64, device=device)
    y = tkjit.softmax(x)
    side = torch.cuda.Stream()
    y.record_stream(side)  # has no effect on memory that torch's allocator does not know
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(64 * 64 * 4)
    assert y.numel() == 64 * 64

    @planned
    def copy(x):
        out = empty_like(x, "float64")
        return plan(out)

    x = torch.zeros(1 << 20, device=device)
    before = torch.cuda.memory_allocated()
    z = copy(x)
    assert z.dtype == torch.float64 and torch.cuda.memory_allocated() - before == 8 << 20
