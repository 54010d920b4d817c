"""tkjit.reduction: ops that reduce dims, from expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tkjit
from emulate import emulating
from judge import assert_spills_nothing, check, same_bits
from tkjit import _elementwise, _reduction
from tkjit._device import ARCHS
from tkjit._plan import Spec
from tkjit.testing import LAYOUTS, as_layout

total = tkjit.reduction("A(x)", "a + b", identity="0", outputs="A y", grad="T dx = dy", name="total")
mean = tkjit.reduction("x", "a + b", identity="0", finish="a / count", grad="T dx = dy / T(count)", name="mean")
norm = tkjit.reduction(
    "A(x) * x",
    "a + b",
    identity="0",
    finish="sqrt(a)",
    grad="T dx = y == T(0) ? T(0) : dy * x / y",
    name="norm",
    composite=torch.linalg.vector_norm,
)
amax = tkjit.reduction("x", "a > b || isnan(a) ? a : b", accumulators="T a", inputs="T x", name="amax")
largest = tkjit.reduction(
    "x, index",
    "b.value > a.value || (b.value == a.value && b.place < a.place) ? b : a",
    accumulators="T value, i64 place",
    finish="value, place",
    outputs="T y, i64 argmax",
    grad="T dx = index == argmax ? dy : T(0)",
    name="largest",
)
logsumexp = tkjit.reduction(
    "x, 1",
    """
    const A m = a.m > b.m ? a.m : b.m;
    if (m == -INFINITY) return a;
    return {m, a.s * exp(a.m - m) + b.s * exp(b.m - m)};
    """,
    identity="-INFINITY, 0",
    accumulators="A m, A s",
    finish="m + log(s)",
    grad="T dx = dy * exp(x - y)",
    name="logsumexp",
)
variance = tkjit.reduction(
    "x, 0, 1",
    """
    if (a.n == A(0)) return b;
    if (b.n == A(0)) return a;
    const A n = a.n + b.n, d = b.mean - a.mean;
    return {a.mean + d * b.n / n, a.m2 + b.m2 + d * d * a.n * b.n / n, n};
    """,
    identity="0, 0, 0",
    accumulators="A mean, A m2, A n",
    finish="m2 / (n - 1)",
    grad="T dx = dy * T(2) * (x - T(mean)) / T(n - 1)",
    name="variance",
)
weighted = tkjit.reduction(
    "A(w) * (x - shift)",
    "a + b",
    identity="0",
    inputs="T x, T w, float shift",
    grad="T dx = dy * w; T dw = dy * (x - shift)",
    name="weighted",
)

THEIRS: list[tuple[Callable, Callable]] = [
    (mean, torch.mean),
    (norm, torch.linalg.vector_norm),
    (logsumexp, lambda x, dim, **kw: torch.logsumexp(x, tuple(range(x.dim())) if dim is None else dim, **kw)),
    (variance, torch.var),
]
ops = pytest.mark.parametrize("op, theirs", THEIRS, ids=[op.text.name for op, _ in THEIRS])

SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((7, 64), -1),
    ((3, 5, 33), 1),
    ((64, 96), 0),
    ((3, 4, 5, 8), (0, 2)),
    ((3, 4, 5), (-1, 0)),
    ((6, 7), None),
]


@ops
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_close_to_float64(op: Any, theirs: Callable, dtype: torch.dtype, place: str) -> None:
    for shape, dim in SHAPES if dtype == torch.float32 else SHAPES[:2]:
        x = torch.randn(shape, device=place).to(dtype)
        check(op, theirs, [x], {"dim": dim}, label=f"{shape}, {dim}")
    check(op, theirs, [x], {"dim": 0, "keepdim": True}, label="keepdim")


def test_bfloat16_is_summed_in_float32(place: str) -> None:
    x = torch.full((3, 4096), 1.0 + 2**-7, device=place, dtype=torch.bfloat16)
    assert torch.equal(total(x, dim=1), torch.full((3,), 4096 + 32.0, device=place))
    check(norm, torch.linalg.vector_norm, [torch.randn(9, 40, device=place, dtype=torch.bfloat16)], {"dim": 1})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [0, 1, (0, 2), None])
def test_layout_does_not_matter(layout: str, dim: Any, place: str) -> None:
    x = as_layout(layout, torch.randn(4, 6, 8, device=place))
    check(norm, torch.linalg.vector_norm, [x], {"dim": dim}, label=layout)
    y, argmax = largest(x, dim=dim, keepdim=True)
    want = x.amax(tuple(range(3)) if dim is None else dim, keepdim=True)
    assert torch.equal(y, want)
    dims = (0, 1, 2) if dim is None else dim if isinstance(dim, tuple) else (dim,)
    rest = [d for d in range(3) if d not in dims]
    rows = x.permute(*rest, *dims).flatten(len(rest))
    assert torch.equal(argmax.flatten(), rows.argmax(-1).flatten())


def test_long_rows_and_tall_columns_come_in_spans(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reduction, "BLOCKS", 8)
    tkjit.cache.clear_plans()
    for shape, dim in (((2, 40000), 1), ((1200, 40), 0), ((2, 1000, 24), 1), ((50001,), 0), ((3001, 3), 0)):
        x = torch.randn(shape, device=place)
        spec = Spec("float32", shape, x.stride(), -1, 16)
        assert len(_reduction.planner_of(norm.text)(spec, 1 << dim, False).launches) == 2
        check(norm, torch.linalg.vector_norm, [x], {"dim": dim}, label=f"{shape}")
        y, argmax = largest(x, dim=dim)
        assert torch.equal(y, x.amax(dim)) and torch.equal(argmax, x.argmax(dim))
    check(variance, torch.var, [torch.randn(2, 20000, device=place) + 100], {"dim": 1})
    tkjit.cache.clear_plans()


def test_indices_of_64_bits_do_the_same(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 6, 16, device=place)
    want = [op(x, dim=dim) for op in (norm, mean) for dim in (0, 2, (0, 2))]
    monkeypatch.setattr(_reduction, "WIDE", 0)
    tkjit.cache.clear_plans()
    got = [op(x, dim=dim) for op in (norm, mean) for dim in (0, 2, (0, 2))]
    assert all(map(same_bits, want, got))
    tkjit.cache.clear_plans()


def test_whole_numbers_are_summed_in_64_bits(place: str) -> None:
    for i, dtype in enumerate((torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)):
        x = torch.randint(0, 2 if dtype == torch.bool else 100, (5, 48), device=place).to(dtype)
        y = total(x, dim=i % 2)
        assert y.dtype == torch.int64 and torch.equal(y, x.sum(i % 2))
    big = torch.full((3, 8), 2**31 - 1, device=place, dtype=torch.int32)
    assert torch.equal(total(big, dim=1), big.sum(1))
    every = tkjit.reduction("x", "a && b", identity="true", inputs="bool x", accumulators="bool a", outputs="bool y")
    flags = torch.rand(6, 40, device=place) > 0.01
    assert torch.equal(every(flags, dim=1), flags.all(1))


def test_several_inputs_broadcast_and_numbers_are_numbers(place: str) -> None:
    def theirs(x: Tensor, w: Tensor, dim: int | None = None, shift: float = 0.5) -> Tensor:
        return (w * (x - shift)).sum(dim)

    def ours(x: Tensor, w: Tensor, dim: int | None = None) -> Tensor:
        return weighted(x, w, 0.5, dim=dim)

    x = torch.randn(4, 5, 16, device=place)
    for shape, dim in (((16,), 0), ((16,), 2), ((5, 1), 1), ((5, 1), 2), ((4, 5, 16), None)):
        check(ours, theirs, [x, torch.randn(shape, device=place)], {"dim": dim}, label=f"{shape} over {dim}")
    a, b = torch.randn(8, 1, device=place), torch.randn(1, 6, device=place)
    check(ours, theirs, [a, b], {"dim": 0}, label="both broadcast")
    mixed = weighted(x.half(), b.new_ones(16), 0.5, dim=2)
    assert mixed.dtype == torch.float32


def test_no_dims_no_elements(place: str) -> None:
    scalar = torch.tensor(-3.0, device=place)
    for dim in (None, 0, -1, ()):
        assert norm(scalar, dim=dim).item() == 3.0 and norm(scalar, dim=dim).shape == ()
    assert torch.equal(total(torch.empty(0, 3, device=place), dim=0), torch.zeros(3, device=place))
    assert total(torch.empty(0, 3, device=place), dim=1, keepdim=True).shape == (0, 1)
    assert mean(torch.empty(2, 0, device=place), dim=1).isnan().all()
    assert torch.equal(largest(torch.empty(0, 3, device=place), dim=1)[1], torch.empty(0, device=place).long())
    with pytest.raises(IndexError, match="size 0 without an identity"):
        largest(torch.empty(0, 3, device=place), dim=0)
    x = torch.empty(0, 3, device=place, requires_grad=True)
    norm(x, dim=0).sum().backward()
    assert x.grad.shape == (0, 3)


def test_nan_goes_where_the_text_lets_it(place: str) -> None:
    x = torch.randn(4, 40, device=place)
    x[1, 7] = float("nan")
    x[2, 3] = float("inf")
    for op, theirs in ((amax, torch.amax), (norm, torch.linalg.vector_norm), (mean, torch.mean)):
        torch.testing.assert_close(op(x, dim=1), theirs(x, dim=1), equal_nan=True)


def test_the_same_bits_every_time(place: str) -> None:
    x = torch.randn(3, 70000, device=place)
    for op in (norm, variance, mean):
        first = op(x, dim=1)
        assert all(same_bits(first, op(x.clone(), dim=1)) for _ in range(2))


# --- gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [mean, norm, logsumexp, variance, largest, total], ids=lambda op: op.text.name)
def test_gradients_are_those_of_finite_differences(op: Any, place: str) -> None:
    x = torch.randn(3, 4, 2, device=place, dtype=torch.float64).requires_grad_()
    for dim, keepdim in ((1, False), ((0, 2), True), (None, False)):
        assert torch.autograd.gradcheck(lambda t, d=dim, k=keepdim: op(t, dim=d, keepdim=k), x)
    y = torch.randn(4, 1, device=place, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: weighted(a, b, 0.25, dim=(0, 1)), (x, y))


def test_a_gradient_that_is_a_copy_is_a_view(place: str) -> None:
    x = torch.randn(5, 6, device=place, requires_grad=True)
    y = total(x, dim=1)
    before = tkjit.cache.stats()["launches"]
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert tkjit.cache.stats()["launches"] == before and torch.equal(dx, torch.ones_like(x))


def test_only_the_wanted_gradients_are_computed(place: str) -> None:
    x, w = torch.randn(4, 8, device=place, requires_grad=True), torch.randn(8, device=place)
    weighted(x, w, 0.0, dim=1).sum().backward()
    assert torch.equal(x.grad, w.expand(4, 8)) and w.grad is None


def test_second_derivatives_are_the_composites_or_refused(place: str) -> None:
    x = torch.randn(3, 4, device=place, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: norm(t, dim=1), x)
    (dx,) = torch.autograd.grad(variance(x, dim=1).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient"):
        dx.sum().backward()
    twice = tkjit.elementwise(
        "T ddy = ddx * T(2) * a; T da = ddx * T(2) * dy", inputs="T ddx, T dy, T a", outputs="T ddy, T da"
    )
    slope = tkjit.elementwise("T dx = dy * T(2) * a", inputs="T dy, T a", grad=twice)
    square = tkjit.reduction("x", "a + b", identity="0", finish="a * a", grad=slope)
    (dx,) = torch.autograd.grad(square(x, dim=1).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative without composite"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="no gradient"):
        amax(x, dim=1).sum().backward()
    bare = tkjit.reduction("x", "a + b", identity="0", name="bare", composite=torch.sum)
    assert torch.autograd.gradcheck(lambda t: bare(t, dim=0), x) and bare(x, dim=0).requires_grad


# --- the rest of torch ---------------------------------------------------------------------------------------------------


def test_ten_lines_make_a_compiled_op(place: str) -> None:
    def step(x: Tensor) -> Tensor:
        return (
            (x / norm(x, dim=-1, keepdim=True)).sum()
            + variance(x, dim=(0, 1)).sum() * mean(x)
            + largest(x, dim=1)[0].sum()
        )

    x = torch.randn(3, 4, 8, device=place)
    (want,) = torch.autograd.grad(step(leaf := x.clone().requires_grad_()), leaf)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    (got,) = torch.autograd.grad(compiled(leaf := x.clone().requires_grad_()), leaf)
    torch.testing.assert_close(got, want)
    dynamic = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (2, 3):
        (got,) = torch.autograd.grad(dynamic(leaf := x[:n].clone().requires_grad_()), leaf)
        (want,) = torch.autograd.grad(step(leaf := x[:n].clone().requires_grad_()), leaf)
        torch.testing.assert_close(got, want)
    torch.library.opcheck(torch.ops.tkjit.reduction.default, (variance.key, "t", [x.requires_grad_()], [], 0b101, True))


def test_transforms_and_fake_tensors(place: str) -> None:
    x = torch.randn(3, 4, device=place)
    torch.testing.assert_close(torch.func.vmap(lambda t: norm(t, dim=0))(x), torch.linalg.vector_norm(x, dim=1))
    with pytest.raises(NotImplementedError, match="without a composite="):
        torch.func.vmap(lambda t: mean(t, dim=0))(x)
    with FakeTensorMode():
        y, argmax = largest(torch.empty(4, 8, device=place), dim=0)
        assert y.shape == argmax.shape == (8,) and argmax.dtype == torch.int64
    assert torch.equal(norm(x.to(torch.complex64), dim=1), torch.linalg.vector_norm(x.to(torch.complex64), dim=1))
    with pytest.raises(NotImplementedError, match="no kernels for complex64"):
        mean(x.to(torch.complex64))


# --- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what, line, text",
    [
        ("map", 1, "x.nothing()"),
        ("combine", 2, "const A c = a + b;\nreturn c.nothing();"),
        ("identity", 1, "nothing"),
        ("finish", 2, "a +\nnothing"),
        ("preamble", 2, "\nTK_DEVICE float f(float x) { return nothing; }"),
    ],
)
def test_text_that_is_no_cuda_tells_its_own_line(what: str, line: int, text: str) -> None:
    texts = {"map": "x", "combine": "a + b", "identity": "0"} | {what: text}
    op = tkjit.reduction(texts.pop("map"), texts.pop("combine"), **texts, name="broken")
    with emulating("sm_90a"), pytest.raises(tkjit.CompileError, match=rf"broken\.{what}:{line}:\d+: error") as caught:
        op(torch.ones(3))
    assert f">     {line} | {text.splitlines()[line - 1]}" in str(caught.value)


@pytest.mark.parametrize(
    "texts, more, message",
    [
        (("1", "a + b"), {}, "no input"),
        (("x", "a + b"), {"inputs": "x"}, "inputs has 'x'"),
        (("x", "a + b"), {"inputs": "half x"}, "is of type 'half'"),
        (("x", "a + b"), {"inputs": "A x"}, "no input has it"),
        (("a * a", "a + b"), {}, "a names two things"),
        (("x, x", "a"), {"accumulators": "A m, A n"}, "need finish="),
        (("x", "a + b"), {"outputs": "U y"}, "no input has the type U"),
        (("x", "a + b"), {"grad": "T dx = dy * unknown"}, r"reduction\(\): grad names unknown"),
    ],
)
def test_what_cannot_be_read_is_a_value_error(texts: tuple, more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tkjit.reduction(*texts, **more)


def test_wrong_calls_are_refused_before_anything_runs() -> None:
    x = torch.ones(3, 4)
    with pytest.raises(TypeError, match="combine must be CUDA"):
        tkjit.reduction("x", "")
    with pytest.raises(TypeError, match="takes 1 arguments"):
        norm(x, x)
    with pytest.raises(TypeError, match="must be a Tensor or a number"):
        norm("1")
    with pytest.raises(IndexError, match="Dimension out of range"):
        norm(x, dim=2)
    with pytest.raises(TypeError, match="'dim' must be int"):
        norm(x, dim=1.0)
    with pytest.raises(RuntimeError, match="appears multiple times"):
        norm(x, dim=(1, -1))
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        weighted(x, torch.ones(3), 1.0)


# --- compiled kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture_and_spill_nothing(arch: str) -> None:
    rows, columns, odd = ((1 << 24,), 1), ((1 << 14, 1 << 12), 1), ((64, 33), 2)
    for op, dtype, (shape, dims) in (
        (norm, "bfloat16", rows), (norm, "float64", columns), (norm, "float16", odd), (largest, "float32", rows),
        (variance, "bfloat16", columns),
    ):  # fmt: skip
        spec = Spec(dtype, shape, _elementwise.row_major(shape), 0, 16)
        for launch in _reduction.planner_of(op.text)(spec, dims, False).launches:
            assert_spills_nothing(launch, arch)


@pytest.mark.gpu
def test_more_than_32_bits_of_elements(much_memory) -> None:
    much_memory(10)
    x = torch.ones(2**32 + 4099, device="cuda", dtype=torch.uint8)
    assert total(x).item() == x.numel()
    assert total(x[: 2**32].view(2**31, 2), dim=0).tolist() == [2**31, 2**31]
    assert torch.equal(total(x[: 2**32].view(2**31, 2), dim=1)[:: 2**20].cpu(), torch.full((2**11,), 2))
