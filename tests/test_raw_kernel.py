"""tkjit.Kernel: CUDA text of a user's own, its arguments and its candidates."""

from __future__ import annotations

import array
import ctypes
import json
from typing import Any

import pytest
import torch

import tkjit
from emulate import emulating
from tkjit import Kernel, _raw

pytestmark = pytest.mark.usefixtures("own_cache")

SCALE = """
template <class T, int BLOCK>
__global__ void scale(T* y, const T* x, float by, long long n)
{
    const long long i = blockIdx.x * (long long)BLOCK + threadIdx.x;
    if (i < n) { y[i] = x[i] * by; }
}
"""
ADD_ONE = """
template <int BLOCK>
__global__ void add_one(float* x, long long n) {
    for (long long i = blockIdx.x * (long long)BLOCK + threadIdx.x; i < n; i += (long long)gridDim.x * BLOCK) { x[i] += 1.0f; }
}
"""


def test_a_template_of_tile_parameters_runs(place: str) -> None:
    x = torch.randn(1000, device=place)
    for dtype in (torch.float32, torch.float64):
        kernel = Kernel(SCALE, "scale", T=dtype, tune=[{"BLOCK": 128}, {"BLOCK": 256}])
        y = torch.zeros_like(x, dtype=dtype)
        args = (y, x.to(dtype), tkjit.f32(2), tkjit.i64(1000))
        kernel.launch(lambda p: -(-1000 // p["BLOCK"]), lambda p: p["BLOCK"], args)
        assert torch.equal(y, 2 * x.to(dtype)) and y._version == 1 and args[1]._version == 0


def test_tuning_applies_a_kernel_once_and_takes_no_candidate_that_differs(place: str, own_cache) -> None:
    kernel = Kernel(ADD_ONE, "add_one", tune=[{"BLOCK": 128}, {"BLOCK": 256}])
    x = torch.zeros(1000, device=place)
    with pytest.warns(RuntimeWarning, match="'BLOCK': 256} does not give what"):
        kernel.launch(4, 128, (x, tkjit.i64(1000)))  # with 256 half of the elements are nobody's
    for calls in range(1, 4):
        assert torch.equal(x, torch.full_like(x, calls))
        kernel.launch(4, 128, (x, tkjit.i64(1000)))
    (kept,) = (own_cache / "tuned").iterdir()
    assert json.loads(kept.read_text())["best"] == 0
    again = Kernel(ADD_ONE, "add_one", tune=[{"BLOCK": 128}, {"BLOCK": 256}])
    again.launch(4, 128, (x, tkjit.i64(1000)))  # from the disk: no warning
    assert torch.equal(x, torch.full_like(x, 5))


def test_a_choice_on_disk_that_is_damaged_is_made_again(place: str, own_cache) -> None:
    x = torch.zeros(64, device=place)
    for damage in ("", "{", '{"best": 7}', '{"best": "0"}', "[]"):
        kernel = Kernel(ADD_ONE, "add_one", tune=[{"BLOCK": 32}, {"BLOCK": 64}])
        kernel.launch(1, lambda p: p["BLOCK"], (x, tkjit.i64(64)))
        (kept,) = (own_cache / "tuned").iterdir()
        assert json.loads(kept.read_text())["best"] in (0, 1)
        kept.write_text(damage)
    assert torch.equal(x, torch.full_like(x, 5))


MANY = """
struct Many { float* y[3]; const float* x[3]; double by; int n[3]; };

__global__ void scale_many(const __grid_constant__ Many a)
{
    const int i = blockIdx.x;
    for (int k = threadIdx.x; k < a.n[i]; k += blockDim.x) { a.y[i][k] = a.x[i][k] * float(a.by); }
}
"""


def test_a_struct_has_lists_of_tensors_and_of_numbers(place: str) -> None:
    kernel = Kernel(MANY, "scale_many")
    xs = [torch.randn(n, device=place) for n in (5, 100)]
    ys = [torch.zeros_like(x) for x in xs]
    for by in (2.0, 3.0):
        sizes = array.array("i", (5, 100, 0))
        kernel.launch(2, 32, (tkjit.struct([*ys, None], [*xs, None], tkjit.f64(by), sizes, writes=ys),))
        assert all(torch.equal(y, x * by) for x, y in zip(xs, ys))
    assert [y._version for y in ys] == [2, 2] and [x._version for x in xs] == [0, 0]
    leaf = ys[0].requires_grad_()
    with pytest.raises(RuntimeError, match="needs a gradient"):
        kernel.launch(1, 32, (tkjit.struct([leaf, None, None], [*xs, None], tkjit.f64(1), sizes, writes=[leaf]),))
    with pytest.raises(TypeError):
        kernel.launch(1, 32, (tkjit.struct(xs[0], "x"),))
    with pytest.raises(NotImplementedError, match="candidates are not tried"):
        tuned = Kernel(MANY, "scale_many", tune=[{}, {}])
        tuned.launch(1, 32, (tkjit.struct([*xs, None], [*xs, None], tkjit.f64(1), sizes),))


def test_numbers_that_change_make_no_new_plan(place: str) -> None:
    kernel = Kernel(SCALE, "scale", T=torch.float32, BLOCK=128)
    x = torch.randn(8, device=place)
    y = torch.empty_like(x)
    before = tkjit.cache.stats()
    for by in range(10):
        kernel.launch(1, 128, (y, x, tkjit.f32(by), tkjit.i64(8)))
        assert torch.equal(y, x * by)
    after = tkjit.cache.stats()
    assert after["plan_misses"] == before["plan_misses"] and after["launches"] == before["launches"] + 10


GELU = """
template <class T>
__global__ void gelu(T* y, const T* x, long long n)
{
    const long long i = blockIdx.x * 64ll + threadIdx.x;
    if (i < n) { y[i] = x[i] * normcdf(x[i]); }
}
template <class T>
__global__ void gelu_grad(T* dx, const T* dy, const T* x, long long n)
{
    const long long i = blockIdx.x * 64ll + threadIdx.x;
    if (i < n) { dx[i] = dy[i] * (normcdf(x[i]) + x[i] * exp(T(-0.5) * x[i] * x[i]) * T(0.3989422804014327)); }
}
"""


def each(*tensors: torch.Tensor) -> dict:
    n = tensors[0].numel()
    return {"grid": -(-n // 64), "block": 64, "args": (*tensors, tkjit.i64(n))}


gelu_grad = Kernel(GELU, "gelu_grad", T=torch.float64).op(lambda dy, x: torch.empty_like(x), each)
gelu = Kernel(GELU, "gelu", T=torch.float64).op(
    torch.empty_like, each, backward=lambda dy, x, y: gelu_grad(dy, x)
)  # fmt: skip


def test_a_kernel_with_a_backward_is_an_op(place: str) -> None:
    x = torch.randn(5, 30, device=place, dtype=torch.float64).requires_grad_()
    theirs = torch.nn.functional.gelu
    torch.testing.assert_close(gelu(x), theirs(x))
    torch.testing.assert_close(gelu(x.t()[::2]), theirs(x.t()[::2]))
    assert torch.autograd.gradcheck(gelu, torch.randn(7, device=place, dtype=torch.float64, requires_grad=True))
    (want,) = torch.autograd.grad(theirs(x).sum(), x)
    torch.testing.assert_close(torch.autograd.grad(gelu(x).sum(), x)[0], want)
    compiled = torch.compile(lambda t: gelu(t).sum(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], want)
    torch.library.opcheck(torch.ops.tkjit.kernel.default, (gelu.key, "t", [x], []))
    (dx,) = torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gelu_grad: it has no gradient"):
        dx.sum().backward()


def test_an_op_takes_numbers_and_has_several_outputs(place: str) -> None:
    source = """
__global__ void halves(float* y, float* z, const float* x, float by, long long n)
{
    const long long i = threadIdx.x;
    if (i < n) { y[i] = x[i] * by; z[i] = x[i] + by; }
}
"""
    op = Kernel(source, "halves").op(
        outputs=lambda x, by: (torch.empty_like(x), torch.empty_like(x)),
        launch=lambda y, z, x, by: {
            "grid": 1,
            "block": 64,
            "args": (y, z, x, tkjit.f32(by), tkjit.i64(x.numel())),
        },
        backward=lambda dy, dz, x, by, y, z: dy * by + dz,
    )
    x = torch.randn(40, device=place, requires_grad=True)
    y, z = op(x, 3.0)
    assert torch.equal(y, x * 3) and torch.equal(z, x + 3)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    broken = Kernel(source, "halves").op(op.outputs, op.launch, lambda *all: (None, None))
    with pytest.raises(RuntimeError, match="2 gradients for 1 tensors"):
        broken(x, 3.0)[0].sum().backward()


def test_a_kernel_prints(place: str, capfd: pytest.CaptureFixture) -> None:
    source = '__global__ void say(const float* x) { printf("x[%d] = %g\\n", int(threadIdx.x), x[threadIdx.x]); }'
    Kernel(source, "say").launch(1, 2, (torch.tensor([0.5, 2.0], device=place),))
    if place == "cuda":
        torch.cuda.synchronize()
    ctypes.CDLL(None).fflush(None)
    assert sorted(capfd.readouterr().out.splitlines()) == ["x[0] = 0.5", "x[1] = 2"]


def test_views_are_written_in_their_places(place: str) -> None:
    base = torch.zeros(64, device=place)
    Kernel(ADD_ONE, "add_one", BLOCK=32).launch(1, 32, (base[10:], tkjit.i64(20)))
    assert base[10:30].eq(1).all() and base.sum() == 20


@pytest.mark.parametrize(
    "make, good, bad",
    [
        (tkjit.i32, (0, -1, 2**31 - 1), (2**31, 1.5, "7", None)),
        (tkjit.i64, (-(2**63),), (2**63,)),
        (tkjit.u32, (2**32 - 1,), (-1,)),
        (tkjit.u64, (2**64 - 1,), (-1, 2**64)),
        (tkjit.f16, (65500.0,), (1e6, "1")),
        (tkjit.bf16, (3e38, 7), ("1", None)),
        (tkjit.f32, (1e30, 7, torch.tensor(2.5), float("inf")), (1e300, "1", None)),
        (tkjit.f64, (1e300, torch.tensor(2.5)), ("1", None)),
        (tkjit.bool_, (True, False), ("1", 1.5)),
    ],
)
def test_numbers_are_of_their_type_or_refused(make: Any, good: tuple, bad: tuple) -> None:
    for value in good:
        make(value)
    for value in bad:
        with pytest.raises((TypeError, OverflowError)):
            make(value)


def test_numbers_arrive_exactly(place: str) -> None:
    source = "template <class T> __global__ void store(T* out, T value) { out[0] = value; }"
    for make, dtype, values in (
        (tkjit.u64, torch.uint64, (2**63, 2**64 - 1, 42)),
        (tkjit.i64, torch.int64, (-(2**63), 2**40)),
        (tkjit.f16, torch.float16, (65500.0, 0.1)),
        (tkjit.bf16, torch.bfloat16, (65536.0, 0.1, float("nan"))),
        (tkjit.f64, torch.float64, (1e300, 0.1)),
        (tkjit.bool_, torch.bool, (True, False)),
    ):
        kernel = Kernel(source, "store", T=dtype)
        for value in values:
            out = torch.zeros(1, device=place, dtype=dtype)
            kernel.launch(1, 32, (out, make(value)))
            want = torch.tensor(value, dtype=dtype).item()
            assert out.item() == want or (value != value and out.isnan().all()), (dtype, value)


def test_a_signature_is_read_from_the_text() -> None:
    of = _raw.Signature.of
    assert of(SCALE, "scale") == _raw.Signature(("T", "BLOCK"), (True, False, False, False))
    assert of("__global__ void f() {}", "f") == _raw.Signature((), ())
    assert of("template <int A = 3, class B> __global__ void __launch_bounds__(A) g(B* x) {}", "g").parameters == (
        "A",
        "B",
    )
    assert of("__global__ void h(Pair<int, int> p, float* x) {}", "h").writes is None  # not counted
    assert of("no kernel", "f") == _raw.Signature((), None)


def test_wrong_launches_are_refused() -> None:
    kernel = Kernel(ADD_ONE, "add_one", BLOCK=32)
    x = torch.zeros(8)
    with pytest.raises(TypeError, match="2 parameters, but 1 arguments"):
        kernel.launch(1, 32, (x,))
    with pytest.raises(TypeError, match=r"argument 1 is 8; give a tensor, tkjit.i32"):
        kernel.launch(1, 32, (x, 8))
    with pytest.raises(TypeError, match="must be a tensor"):
        kernel.launch(1, 32, (None, tkjit.i64(8)))
    with pytest.raises(RuntimeError, match="needs a gradient"):
        kernel.launch(1, 32, (x.clone().requires_grad_(), tkjit.i64(8)))
    with pytest.raises(RuntimeError, match="memory is not its values"):
        kernel.launch(1, 32, (torch.ones(8, dtype=torch.complex64).conj().imag, tkjit.i64(8)))
    with pytest.raises(TypeError, match="template parameters BLOCK, given are T"):
        Kernel(ADD_ONE, "add_one", T=torch.float32)
    with pytest.raises(ValueError, match="NUL"):
        Kernel("\0", "f")


def test_checks_see_what_a_users_kernel_does_wrong() -> None:
    with emulating("sm_90a"), pytest.raises(tkjit.EmulatorError, match="outside every tensor"):
        Kernel("__global__ void past(float* x) { x[threadIdx.x] = 1.0f; }", "past").launch(1, 64, (torch.zeros(32),))
