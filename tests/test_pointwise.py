"""tkjit.elementwise, and the ops that are made with it: add, mul, copy, activations and gates."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import tkjit
from emulate import emulating
from judge import assert_spills_nothing, check
from tkjit import _elementwise
from tkjit._device import ARCHS
from tkjit._plan import Spec
from tkjit.ops import pointwise
from tkjit.testing import LAYOUTS, as_layout, fence_intact, fenced

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mish": F.mish,
    "leaky_relu": F.leaky_relu,
    "softplus": F.softplus,
}
GATES = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}
every_type = pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=["fp16", "bf16", "fp32", "fp64"]
)


@every_type
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes(name: str, dtype: torch.dtype, place: str) -> None:
    for shape in ((5, 37), (4, 512), (), (0, 3)):
        x = (torch.randn(shape) * (3 if shape else 1)).to(place, dtype)
        check(getattr(tkjit, name), ACTIVATIONS[name], [x], label=f"{name} {shape}")


def test_the_tanh_form_of_gelu(place: str) -> None:
    x = (torch.randn(9, 65) * 3).to(place)
    check(lambda t: tkjit.gelu(t, "tanh"), lambda t: F.gelu(t, approximate="tanh"), [x], label="tanh")


@every_type
@pytest.mark.parametrize("name", GATES)
def test_gates_of_two_tensors_and_of_one(name: str, dtype: torch.dtype, place: str) -> None:
    gate, up = (torch.randn(6, 40).to(place, dtype) for _ in range(2))
    ours = getattr(tkjit, name)
    check(ours, lambda g, u: GATES[name](g) * u, [gate, up], label=name)
    packed = torch.cat((gate, up), -1)
    assert torch.equal(ours(packed), ours(gate, up))
    check(ours, lambda x: GATES[name](x[..., :40]) * x[..., 40:], [packed], label=f"packed {name}")


@every_type
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_sums_with_a_bias(name: str, dtype: torch.dtype, place: str) -> None:
    ours = getattr(tkjit, name)
    x, bias = torch.randn(6, 40).to(place, dtype), torch.randn(40).to(place, dtype)
    check(lambda x, b: ours(x, bias=b), lambda x, b: ACTIVATIONS[name](x + b), [x, bias], label=f"{name} with a bias")
    if dtype == torch.float32:
        assert ours(x[:0], bias=bias).shape == (0, 40)
        with pytest.raises(RuntimeError, match="broadcast"):
            ours(x, bias=torch.ones(3, device=place))
        with pytest.raises(RuntimeError, match="broadcast"):
            ours(x[0], bias=x)
        with pytest.raises(TypeError, match="bias"):
            ours(x, bias=1.0)


@every_type
@pytest.mark.parametrize("name", GATES)
def test_gates_of_sums_with_biases(name: str, dtype: torch.dtype, place: str) -> None:
    ours, f = getattr(tkjit, name), GATES[name]
    packed, bias = torch.randn(6, 80).to(place, dtype), torch.randn(80).to(place, dtype)
    gate, up, b, c = packed[:, :40], packed[:, 40:], bias[:40], bias[40:]
    check(
        lambda x, y, b, c: ours(x, y, bias=(b, c)), lambda x, y, b, c: f(x + b) * (y + c), [gate, up, b, c],
        label=f"{name} with biases",
    )  # fmt: skip
    check(
        lambda x, b: ours(x, bias=b), lambda x, b: f((x + b)[..., :40]) * (x + b)[..., 40:], [packed, bias],
        label=f"packed {name} with a bias",
    )  # fmt: skip
    assert torch.equal(ours(packed, bias=bias), ours(gate, up, bias=(b, c)))
    if dtype == torch.float32:
        with pytest.raises(RuntimeError, match="their biases"):
            ours(packed, bias=bias[:40])
        with pytest.raises(TypeError, match="pair"):
            ours(packed, bias=(b, c))


def test_the_gradient_of_a_packed_gate_is_one_tensor_of_one_kernel(place: str) -> None:
    x = torch.randn(4, 64, device=place, dtype=torch.float64).requires_grad_()
    y = tkjit.swiglu(x)
    before = tkjit.cache.stats()["launches"]
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert tkjit.cache.stats()["launches"] == before + 1 and dx.is_contiguous() and dx._base is None
    bias = torch.randn(64, device=place, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, b: tkjit.swiglu(x, bias=b), (x[:, ::2].detach().requires_grad_(), bias[::2])
    )
    assert torch.autograd.gradgradcheck(lambda x: tkjit.swiglu(x), (x[:2, ::8].detach().requires_grad_(),))


def test_in_place_activations_with_a_bias(place: str) -> None:
    x, bias = torch.randn(5, 8, device=place), torch.randn(8, device=place)
    for name in ("relu", "silu", "mish", "leaky_relu"):
        y = x.clone()
        version = y._version
        assert getattr(tkjit, name)(y, inplace=True, bias=bias) is y and y._version > version
        assert torch.equal(y, getattr(tkjit, name)(x, bias=bias))
        with_own_row = getattr(tkjit, name)(x, bias=x[1])
        y = x.clone()
        assert torch.equal(getattr(tkjit, name)(y, inplace=True, bias=y[1]), with_own_row)
    leaf, b = x.clone().requires_grad_(), bias.clone().requires_grad_()
    tkjit.silu(leaf * 1, inplace=True, bias=b).sum().backward()
    again, c = x.clone().requires_grad_(), bias.clone().requires_grad_()
    F.silu(again + c).sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad)
    torch.testing.assert_close(b.grad, c.grad)


@pytest.mark.parametrize("name", ["gelu", "silu", "mish", "swiglu"])
def test_infinities_have_their_limits_and_nan_stays(name: str, place: str) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.tensor([math.inf, -math.inf, math.nan], device=place, dtype=dtype).requires_grad_()
        y = getattr(tkjit, name)(x, torch.ones_like(x)) if name in GATES else getattr(tkjit, name)(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert y[0] == math.inf and y[1] == 0 and y[2].isnan()
        assert dx[0] == 1 and dx[1] == 0 and dx[2].isnan()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_torchs_values_and_strides(layout: str, place: str) -> None:
    for shape in ((4, 6, 16), (3, 5, 7), (2, 8, 4, 8)):
        x, y = (as_layout(layout, torch.randn(shape).to(place)) for _ in range(2))
        for a, b in ((x, y), (x, y[:1]), (x[..., :1], y), (x, y.contiguous())):
            got, want = tkjit.add(a, b), a + b
            assert torch.equal(got, want) and got.stride() == want.stride(), (a.stride(), b.stride(), got.stride())
        got, want = tkjit.silu(x), F.silu(x)
        assert got.stride() == want.stride()


def test_integers_booleans_mixed_dtypes_and_numbers_promote_as_torch(place: str) -> None:
    kinds = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
             torch.float32, torch.float64)  # fmt: skip
    for a in kinds:
        for b in kinds[:: 1 if a is torch.float16 else 3]:
            x, y = torch.randint(0, 2, (3, 16)).to(place, a), torch.randint(0, 2, (16,)).to(place, b)
            got, want = tkjit.mul(x, y), x * y
            assert got.dtype == want.dtype and torch.equal(got, want), (a, b)
        for number in (3, 2.5, True):
            got, want = tkjit.mul(x, number), x * number
            assert got.dtype == want.dtype and torch.equal(got, want), (a, number)
        got, want = tkjit.mul(x, torch.tensor(3.0, device=place)), x * torch.tensor(3.0, device=place)
        assert got.dtype == want.dtype, a


def test_nothing_outside_the_tensors_is_touched(place: str) -> None:
    for n in (1, 7, 8, 1000, 4096):
        for offset in (0, 1, 3):
            x = fenced((n,), torch.bfloat16, place, offset=offset)
            assert torch.equal(tkjit.relu(x), x.clamp(min=0)) and fence_intact(x)
            before = x.clone()
            assert tkjit.relu(x, inplace=True) is x and torch.equal(x, before.clamp(min=0)) and fence_intact(x)


def test_in_place_bumps_the_version_and_keeps_the_gradient(place: str) -> None:
    x = torch.randn(4, 8, device=place)
    version = x._version
    tkjit.silu(x, inplace=True)
    assert x._version == version + 1
    leaf = torch.randn(4, 8, device=place, requires_grad=True)
    y = leaf * 2
    tkjit.silu(y, inplace=True).sum().backward()
    (want,) = torch.autograd.grad(F.silu(leaf * 2).sum(), leaf)
    torch.testing.assert_close(leaf.grad, want)


def test_in_place_leaves_to_torch_what_a_kernel_may_not_write(place: str) -> None:
    values = torch.randn(4, 8, device=place)
    negative = torch.complex(values, values).conj().imag
    assert negative.is_neg() and torch.equal(tkjit.silu(negative, inplace=True), tkjit.silu(-values))
    with pytest.raises(RuntimeError, match="more than one element"):
        tkjit.silu(values[:1].expand(4, 8), inplace=True)
    mapped = torch.vmap(lambda t: tkjit.silu(t, inplace=True))(values.clone())
    torch.testing.assert_close(mapped, F.silu(values))
    with FakeTensorMode():
        assert tkjit.silu(torch.empty(4, 8, device=place), inplace=True).shape == (4, 8)


def test_second_derivatives_are_torchs(place: str) -> None:
    x = torch.randn(3, 8, device=place, dtype=torch.float64).requires_grad_()
    for name in ("gelu", "silu", "softplus"):
        assert torch.autograd.gradgradcheck(getattr(tkjit, name), (x,))


# --- ops of the user's own -----------------------------------------------------------------------------------------------


def test_ten_lines_make_a_differentiable_compiled_op(place: str) -> None:
    axpy = tkjit.elementwise(
        "T z = alpha * x + y", inputs="float alpha, T x, T y", grad="T dx = alpha * dz; T dy = dz;", name="axpy"
    )
    x, y = torch.randn(4, 1, 8, device=place), torch.randn(3, 8, device=place)
    check(lambda *t: axpy(2.5, *t), lambda *t: 2.5 * t[0] + t[1], [x, y], label="axpy")
    compiled = torch.compile(lambda *t: axpy(2.5, *t).sin(), backend="aot_eager", fullgraph=True)
    check(compiled, lambda *t: (2.5 * t[0] + t[1]).sin(), [x, y], label="compiled")
    torch.library.opcheck(torch.ops.tkjit.elementwise.default, (axpy.key, "ntt", [x, y], [2.5]))


def test_several_outputs_of_their_own_types(place: str) -> None:
    split = tkjit.elementwise("y = x * x; positive = x > T(0);", inputs="T x", outputs="T y, bool positive")
    x = torch.randn(5, 9, device=place, dtype=torch.bfloat16)
    y, positive = split(x)
    assert torch.equal(y, x * x) and torch.equal(positive, x > 0) and positive.dtype == torch.bool
    both = tkjit.elementwise(
        "T s = a + b; T d = a - b;", outputs="T s, T d", grad="T da = ds + dd; T db = ds - dd;", name="both"
    )
    check(both, lambda a, b: (a + b, a - b), [torch.randn(4, 6, device=place) for _ in range(2)], label="both")


def test_only_the_wanted_gradients_are_computed(place: str) -> None:
    product = tkjit.elementwise("T y = a * b", grad="T da = dy * b; T db = dy * a;")
    a, b = torch.randn(4, device=place, requires_grad=True), torch.randn(4, device=place)
    product(a, b).sum().backward()
    assert torch.equal(a.grad, b) and b.grad is None


def test_an_op_whose_gradient_has_one_is_twice_differentiable(place: str) -> None:
    curve = tkjit.elementwise(
        "T ddy = ddx * T(3) * x * x; T dx = ddx * dy * T(6) * x;", inputs="T ddx, T dy, T x", outputs="T ddy, T dx"
    )
    slope = tkjit.elementwise("T dx = dy * T(3) * x * x", inputs="T dy, T x", grad=curve, name="slope")
    cube = tkjit.elementwise("T y = x * x * x", grad=slope)
    x = torch.randn(3, 4, device=place, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(cube, (x,))


def test_cudas_mathematical_functions_are_there(place: str) -> None:
    names = "erf erfc sin cos tan tanh expm1 log1p lgamma tgamma cbrt exp2 exp10 log2 log10 atan asinh normcdf rsqrt ceil".split()
    x = torch.rand(64, device=place, dtype=torch.float64) + 0.5
    theirs = {
        "tgamma": lambda t: t.lgamma().exp(), "cbrt": lambda t: t ** (1 / 3), "exp10": lambda t: 10.0**t,
        "normcdf": torch.special.ndtr,
    }  # fmt: skip
    for name in names:
        want = theirs.get(name) or getattr(torch, name)
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
            got = tkjit.elementwise(f"T y = {name}(x)")(x.to(dtype))
            torch.testing.assert_close(got.double(), want(x), rtol=tolerance, atol=tolerance)
    fast = tkjit.elementwise("float y = __expf(x) + __fdividef(__sinf(x), 2.0f) + fmaxf(x, INFINITY * 0 == 0 ? 1 : 0)")
    assert fast(x.float()).isfinite().all()


def test_text_that_is_no_cuda_tells_its_own_line() -> None:
    with (
        emulating("sm_90a"),
        pytest.raises(tkjit.CompileError, match=r"z\.elementwise:2:\d+: error: .*nothing") as caught,
    ):
        tkjit.elementwise("T y = x + T(1);\nT z = y.nothing();")(torch.ones(3))
    assert ">     2 | T z = y.nothing();" in str(caught.value)


@pytest.mark.parametrize(
    "text, more, message",
    [
        ("x + 1", {}, "nothing is declared"),
        ("T y = 1", {}, "no input"),
        ("T y = x", {"inputs": "x"}, "inputs has 'x'"),
        ("T y = x", {"inputs": "half x"}, "is of type 'half'"),
        ("U y = x", {"inputs": "T x"}, "no input has the type U"),
        ("y = x", {"inputs": "T x, T y", "outputs": "T y"}, "both an input and an output"),
        ("T y = x", {"grad": "T dx = dy * unknown"}, "grad names unknown"),
    ],
)
def test_what_cannot_be_read_is_a_value_error(text: str, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tkjit.elementwise(text, **more)


def test_wrong_calls_are_refused_before_anything_runs() -> None:
    op = tkjit.elementwise("T y = a + b")
    x = torch.ones(3, 4)
    with pytest.raises(TypeError, match="takes 2 arguments"):
        op(x)
    with pytest.raises(TypeError, match="must be a Tensor or a number"):
        op(x, "1")
    with pytest.raises(TypeError, match="at least must be a Tensor"):
        op(1, 2)
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        op(x, torch.ones(3))
    with pytest.raises(RuntimeError, match="no gradient"):
        op(x.clone().requires_grad_(), x).sum().backward()
    with pytest.raises(NotImplementedError, match="no kernels for complex64"):
        op(x.to(torch.complex64), x)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture_and_spill_nothing(arch: str) -> None:
    for op in (
        pointwise._add,
        pointwise._gelu[0],
        pointwise._swiglu[0],
        pointwise._mish[1],
        pointwise._tanh_gelu[0].grad,
    ):
        for dtype in ("float16", "float32", "float64"):
            for shape, strides in (((64, 64), (64, 1)), ((5, 7), (9, 1))):
                given = [2.0 if name == "alpha" else Spec(dtype, shape, strides, 0, 16) for _, name in op.text.inputs]
                (launch,) = _elementwise.planner_of(op.text)(*given).launches
                assert_spills_nothing(launch, arch)


@pytest.mark.gpu
def test_a_view_that_reaches_past_32_bits(much_memory) -> None:
    much_memory(3)
    base = torch.zeros(2**31 + 10, device="cuda", dtype=torch.uint8)
    view = base.as_strided((2, 5), (2**31, 1))
    assert torch.equal(tkjit.add(view, 1), torch.ones(2, 5, device="cuda", dtype=torch.uint8))


@pytest.mark.gpu
def test_more_than_32_bits_of_elements(much_memory) -> None:
    much_memory(14)
    x = torch.zeros(2**32 + 4099, device="cuda", dtype=torch.uint8)
    y = tkjit.add(x, 1)
    assert bool((y[-5000:] == 1).all()) and int(y[:: 2**20].sum()) == 4097
