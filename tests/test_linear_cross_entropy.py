"""linear_cross_entropy: values over several chunks, options, what the backward may give away, memory. What every op must hold is in
test_contract.py; the rows' kernels are test_cross_entropy.py's.

Everything here runs on the emulator with checks, and what is marked so on a GPU too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tkjit
from emulate import emulating
from judge import answer, as_leaves, assert_same, check
from test_cross_entropy import plain
from test_kernels import compile_together
from tkjit._device import ARCHS
from tkjit.ops import linear_cross_entropy as module
from tkjit.testing import LAYOUTS, as_layout, assert_close, fence_intact, fenced, poison

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])
every_reduction = pytest.mark.parametrize("reduction", ("mean", "sum", "none"))

SLACK = module.CASES.slack


pytestmark = pytest.mark.usefixtures("fresh_plans")


@pytest.fixture(autouse=True)
def few_rows_a_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors are several chunks."""
    if "device" not in request.fixturenames:
        for name, value in {"CHUNKS": 1 << 20, "FEWEST": 4, "LEAST": 0, "TILE": 1}.items():
            monkeypatch.setattr(module, name, value)


def projected(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **options: Any
) -> Any:
    """The formula, of all the logits."""
    logits = F.linear(input, linear_weight, linear_bias)
    found = plain(logits.flatten(0, -2), target.flatten(), **options)
    if options.get("reduction") == "none":
        return found.view(target.shape)
    return (found[0], found[1].view(target.shape)) if options.get("return_lse") else found


def given(dtype: torch.dtype, place: str, n: int = 10, h: int = 24, classes: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    x, w = (torch.randn(size, h, device=place).to(dtype) for size in (n, classes))
    target = torch.randint(0, classes, (n,), device=place)
    target[1] = -100
    return x, (w / 4).to(dtype), target


def judged(args: tuple, reference: Callable = projected, grads: Any = None, slack: Any = SLACK, **kwargs: Any) -> Any:
    return check(tkjit.linear_cross_entropy, reference, args, kwargs, grads, slack=slack, label=str(kwargs))


# --- Values ------------------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.3, "z_loss": 0.01},
    {"softcap": 5.0, "z_loss": 0.1},
]


@every_dtype
@every_reduction
def test_options_together_are_close_to_float64(reduction: str, dtype: torch.dtype, place: str):
    args = given(dtype, place)
    weight = torch.rand(40, device=place) + 0.1
    for options in OPTIONS if dtype == torch.bfloat16 or place == "cuda" else OPTIONS[:1]:
        judged(args, reduction=reduction, **options)
        judged(args, reduction=reduction, weight=weight, **options)


@every_dtype
def test_bias_has_a_gradient(dtype: torch.dtype, place: str):
    x, w, target = given(dtype, place)
    bias = torch.randn(40, device=place).to(dtype)
    for reduction in ("mean", "none"):

        def of(function: Callable, x: Tensor, w: Tensor, b: Tensor, reduction: str = reduction) -> Tensor:
            return function(x, w, target, linear_bias=b, reduction=reduction)

        check(
            functools.partial(of, tkjit.linear_cross_entropy),
            functools.partial(of, module._reference),
            (x, w, bias),
            slack=SLACK,
        )


def test_number_of_chunks_changes_nothing_but_the_order_of_sums(place: str, monkeypatch: pytest.MonkeyPatch):
    args = given(torch.float64, place)
    for kwargs in ({"linear_bias": torch.randn(40, device=place, dtype=torch.float64)}, {"reduction": "none"}):
        found = []
        for rows in (1, 3, 10, 100):
            monkeypatch.setattr(module, "FEWEST", rows)
            found.append(answer(tkjit.linear_cross_entropy, args, kwargs).tensors)
        for other in found[1:]:
            for a, b in zip(other, found[0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


@every_dtype
def test_lse_is_returned_and_has_a_gradient(dtype: torch.dtype, place: str):
    x, w, target = given(dtype, place)
    for use in (lambda loss, lse: lse.sum(), lambda loss, lse: 3 * loss + (lse * lse).sum(), lambda loss, lse: loss):

        def function(of: Callable, x: Tensor, w: Tensor, use: Callable = use) -> Tensor:
            return use(*of(x, w, target, return_lse=True)).to(x.dtype)

        check(*(functools.partial(function, f) for f in (tkjit.linear_cross_entropy, projected)), (x, w), slack=SLACK)
    lse = tkjit.linear_cross_entropy(x, w, target, return_lse=True)[1]
    assert lse.shape == target.shape and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_input_has_any_leading_dims(place: str):
    x, w, target = given(torch.float32, place, n=12)
    whole = answer(tkjit.linear_cross_entropy, (x, w, target), {"reduction": "none"})
    for shape in ((3, 4), (2, 3, 2), (12, 1)):
        args = (x.view(*shape, -1), w, target.view(shape))
        grads = [g.view(shape) for g in torch.ones(1, 12, device=place)]
        judged(args, grads=grads, reduction="none")
        loss, lse = tkjit.linear_cross_entropy(*args, reduction="none", return_lse=True)
        assert loss.shape == lse.shape == target.view(shape).shape
        assert_same([loss.flatten()], whole.outputs)
        judged(args)
    for reduction in ("mean", "none"):
        loss = tkjit.linear_cross_entropy(x[0], w, target[0], reduction=reduction)
        torch.testing.assert_close(loss, F.cross_entropy(F.linear(x[0], w), target[0], reduction=reduction))


@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=["bf16", "fp32"])
def test_gradient_over_the_logits_of_rows_through_rings_and_of_clusters(
    dtype: torch.dtype, few_multiprocessors, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "FEWEST", 30)
    with emulating("sm_90a"):
        for n, classes in ((40, 2048), (40, 1003), (3, 33024)):
            judged(given(dtype, "cpu", n, 4, classes), module._reference)


def weights_errors(args: tuple, **kwargs: Any) -> tuple[float, float]:
    """Of the gradient of linear_weight: the largest error and the root mean square, each of torch's own."""
    one = torch.ones((), device=args[0].device)
    wide = [t.double() if t.is_floating_point() else t for t in args]
    want = answer(module._reference, wide, grads=[one.double()]).gradients[1]
    size = want.square().mean().sqrt()

    def off(function: Callable, **kwargs: Any) -> Tensor:
        got = answer(function, args, kwargs, [one.to(args[0].dtype)]).gradients[1]
        error = (got - want).abs() / (want.abs() + size)
        return torch.stack((error.max(), error.square().mean().sqrt()))

    worst, mean = (off(tkjit.linear_cross_entropy, **kwargs) / off(module._reference)).tolist()
    return worst, mean


def test_many_chunks_of_bfloat16_lose_no_more_than_said(place: str, monkeypatch: pytest.MonkeyPatch):
    """The figures of the module's docstring: 22 chunks, against float64."""
    monkeypatch.setattr(module, "FEWEST", 16)
    n = 22 * 16
    for classes in (n // 2, 3 * n):
        x, w, target = given(torch.bfloat16, place, n=n, h=16, classes=classes)
        by_zipf = torch.multinomial(1 / torch.arange(1.0, classes + 1), n, replacement=True).to(place)
        for classes_of_rows in (target, by_zipf):
            worst, mean = weights_errors((x, w, classes_of_rows))
            assert worst < 2.5 and mean < 1.3  # a maximum beside another: their ratio is partly chance
    monkeypatch.setattr(module, "ROWS_A_CLASS", 0)
    worst, mean = weights_errors((x, w, target))
    assert worst > 2
    worst, mean = weights_errors((x, w, target), acc_dtype=torch.float32)
    assert worst < 2 and mean < 1.1


def test_rows_of_many_a_class_are_left_to_the_chunks(place: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FEWEST", 64)
    monkeypatch.setattr(module, "_Apart", None)
    args = given(torch.bfloat16, place, n=22 * 64, h=16, classes=64)
    assert weights_errors(args)[1] < 3
    assert weights_errors(args, acc_dtype=torch.float32)[1] < 1.2


def test_targets_that_are_kept_apart_are_those_that_count(place: str, monkeypatch: pytest.MonkeyPatch):
    x, w, target = given(torch.bfloat16, place, n=30)
    slack = tuple(1.5 * s for s in SLACK)  # a row or two alone: what their roundings come to is partly chance
    for reduction in ("mean", "none"):
        kwargs = {"reduction": reduction}
        want = answer(tkjit.linear_cross_entropy, (x, w, target), kwargs)
        x[1] = 1e30  # a row that is ignored
        assert_same(answer(tkjit.linear_cross_entropy, (x, w, target), kwargs).tensors, want.tensors)
        x[1] = 0.0
        judged((as_layout("sliced", x), w, target), module._reference, slack=slack, reduction=reduction)
        judged((as_layout("transposed", x), w, target), module._reference, slack=slack, reduction=reduction)
        judged((x, w, torch.full_like(target, 7)), module._reference, slack=slack, reduction=reduction)
        judged((x[:, :0], w[:, :0], target), module._reference, slack=slack, reduction=reduction)
    monkeypatch.setattr(module, "_require_classes", lambda *_: None)
    target[2] = 40
    dx, dw = answer(tkjit.linear_cross_entropy, (x, w, target), {"reduction": "none"}).gradients
    assert dx.isnan().any(1).nonzero().tolist() == [[2]] and dw.isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS[:5])
def test_rows_are_added_to_their_keys(layout: str, place: str):
    for n in (1, 12, 40, 2056):
        x, y = as_layout(layout, torch.randn(9, n, device=place).bfloat16()), torch.randn(7, n, device=place).bfloat16()
        by = torch.randn(9, device=place).bfloat16()
        keys, order = torch.tensor([6, 2, 2, 7, 0, 2, 7, 6, 2], device=place).sort(stable=True)
        want = torch.cat((y.double(), y.double()[:1])).index_add(0, keys, (by[:, None].double() * x.double())[order])[
            :7
        ]
        poison(place, 1 << 14)
        got = module._add_rows(y, x, by, keys, order)
        assert got.data_ptr() == y.data_ptr()
        torch.testing.assert_close(got, want.bfloat16(), rtol=2**-7, atol=1e-6)


# --- Corners -----------------------------------------------------------------------------------------------------------


@every_reduction
def test_no_rows_and_no_rows_that_count(reduction: str, place: str):
    for n in (0, 5):
        x, w = torch.randn(n, 8, device=place), torch.randn(20, 8, device=place)
        target = torch.full((n,), -100, device=place)
        loss, dx, dw = answer(tkjit.linear_cross_entropy, (x, w, target), {"reduction": reduction}).tensors
        assert_same([loss], [F.cross_entropy(F.linear(x, w), target, reduction=reduction)])
        assert dx.shape == x.shape and dw.shape == w.shape and not dx.any() and not dw.any()


def test_ignored_rows_add_nothing_whatever_they_hold(place: str):
    x, w, target = given(torch.float32, place)
    for kwargs in ({}, {"reduction": "none"}):
        want = answer(tkjit.linear_cross_entropy, (x, w, target), kwargs)
        for value in (1e30, -5.0):
            x[1] = value
            got = answer(tkjit.linear_cross_entropy, (x, w, target), kwargs)
            assert not got.gradients[0][1].any()
            assert_same(got.tensors, want.tensors)


def test_class_out_of_range(place: str, monkeypatch: pytest.MonkeyPatch):
    x, w, target = given(torch.float32, place)
    for bad in (40, -1, 2**40):
        target[2] = bad
        assert tkjit.linear_cross_entropy(x, w, target.where(target != -100, 0), ignore_index=bad).isfinite()
        if place == "cpu":
            with pytest.raises(IndexError, match=r"linear_cross_entropy.*out of bounds"):
                tkjit.linear_cross_entropy(x, w, target)
    monkeypatch.setattr(module, "_require_classes", lambda *_: None)
    weight = torch.ones(40, device=place)
    loss, dx, _ = answer(tkjit.linear_cross_entropy, (x, w, target), {"reduction": "none", "weight": weight}).tensors
    assert loss.isnan().nonzero().tolist() == [[2]] and dx.isnan().any(1).nonzero().tolist() == [[2]]


def test_wrong_arguments_are_torchs_errors():
    x, w, target = given(torch.float32, "cpu")
    bias = torch.zeros(40)
    wrong: list[tuple[tuple, dict]] = [
        ((x, w[:, :5], target), {}),
        ((x, w, target[:3]), {}),
        ((x, w, target.int()), {}),
        ((x, w.double(), target), {}),
        ((x, w, target), {"linear_bias": bias[:3]}),
        ((x, w, target), {"linear_bias": bias.double()}),
        ((x, w, target), {"weight": torch.ones(4)}),
        ((x, w, target), {"weight": torch.ones(40).requires_grad_()}),
        ((x, w, target), {"label_smoothing": 1.5}),
        ((x, w, target), {"reduction": "all"}),
        ((x, w, 1), {}),
        ((x, None, target), {}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(Exception) as theirs:
            module._reference(*args, **kwargs)
        with pytest.raises(type(theirs.value), match="linear_cross_entropy"):
            tkjit.linear_cross_entropy(*args, **kwargs)
    for kwargs in ({"z_loss": -1.0}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match="negative"):
            tkjit.linear_cross_entropy(x, w, target, **kwargs)
    with pytest.raises(ValueError, match="target has shape"):
        tkjit.linear_cross_entropy(x.view(2, 5, -1), w, target)
    with pytest.raises(TypeError, match="acc_dtype"):
        tkjit.linear_cross_entropy(x, w, target, acc_dtype=torch.float16)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
def test_what_has_no_kernel_is_torchs():
    x, w, _ = given(torch.float32, "cpu")
    p, more = torch.rand(10, 40).softmax(1), torch.randn(5, 3, 24)
    for args, kwargs in (
        ((x, w, p), {}),
        ((x, w, p), {"reduction": "none", "label_smoothing": 0.1}),
        ((x, more, torch.randint(0, 5, (10, 3))), {"reduction": "none"}),
        ((x, w, p), {"weight": torch.rand(40)}),
    ):
        got, want = (answer(f, args, kwargs) for f in (tkjit.linear_cross_entropy, F.linear_cross_entropy))
        for a, b in zip(got.tensors, want.tensors, strict=True):
            torch.testing.assert_close(a, b)


# --- Gradients: which are made, given away, kept -------------------------------------------------------------------------


@every_dtype
def test_upstream_gradients_of_any_size_scale_the_gradients(dtype: torch.dtype, place: str):
    args = given(dtype, place)
    for scale in (1.0, 2.5, 0.0, -1.0):
        judged(args, grads=[torch.full((), scale, dtype=dtype, device=place)])


def test_loss_scale_saves_the_small_gradients_of_half(place: str):
    """Of 1e-8 float16 knows nothing, of 32768 times that it does; with the scale given in the backward only."""
    x = torch.zeros(64, 8, device=place, dtype=torch.float16)
    x[:, 0] = 7.0
    w = torch.zeros(20, 8, device=place, dtype=torch.float16)
    w[0, 0] = 2.0
    target = torch.zeros(64, dtype=torch.long, device=place)
    want = answer(
        module._reference, (x.double(), w.double(), target), grads=[torch.tensor(32768.0, device=place).double()]
    )
    for reduction, scale in (("mean", 1.0), ("sum", 64.0)):
        for keep in (False, True):
            leaves = as_leaves((x, w))
            loss = tkjit.linear_cross_entropy(*leaves, target, reduction=reduction)
            (loss.float() * 32768 / scale).backward(retain_graph=keep)
            for leaf, wide in zip(leaves, want.gradients):
                assert_close(leaf.grad, wide, slack=10)
            assert leaves[1].grad[1:, 0].all()


@pytest.mark.parametrize("needs", (1, 2, 4, 3, 6))
def test_gradients_that_nobody_needs_are_not_made(needs: int, place: str):
    x, w, target = given(torch.float32, place)
    tensors = [x, w, torch.randn(40, device=place)]
    for reduction in ("mean", "none"):

        def function(*t: Tensor, of: Callable = tkjit.linear_cross_entropy, reduction: str = reduction) -> Tensor:
            return of(t[0], t[1], target, linear_bias=t[2], reduction=reduction).sum()

        leaves = [t.detach().requires_grad_(bool(needs >> i & 1)) for i, t in enumerate(tensors)]
        loss = function(*leaves)
        kept = [t for t in loss.grad_fn.next_functions[0][0].saved_tensors[5:]] if reduction == "none" else []
        assert not any(t is not None for t in kept)
        loss.backward()
        want = [t.detach().requires_grad_() for t in tensors]
        function(*want, of=module._reference).backward()
        for i, (leaf, other) in enumerate(zip(leaves, want)):
            assert (leaf.grad is not None) == bool(needs >> i & 1)
            if leaf.grad is not None:
                torch.testing.assert_close(leaf.grad, other.grad)


def test_forward_leaves_the_gradients_and_a_backward_gives_them_away(place: str):
    x, w, target = given(torch.float32, place)
    leaves = as_leaves((x, w))
    loss = tkjit.linear_cross_entropy(*leaves, target)
    kept = loss.grad_fn.saved_tensors[5:7]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert not {t.data_ptr() for t in first} & {t.data_ptr() for t in kept}
    assert_same(first, kept)
    for t in first:
        t.mul_(100.0)  # as clip_grad_norm_ does
    thrice = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    assert_same(thrice, [3 * t for t in kept])
    last = torch.autograd.grad(loss, leaves)
    assert [t.data_ptr() for t in last] == [t.data_ptr() for t in kept]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_loss_used_twice_and_two_losses_of_the_same_weights_add_up(place: str):
    x, w, target = given(torch.float32, place)
    want = answer(module._reference, (x, w, target), grads=[torch.ones((), device=place)]).gradients
    leaves = as_leaves((x, w))
    loss = tkjit.linear_cross_entropy(*leaves, target)
    (loss + 2 * loss).backward()
    (tkjit.linear_cross_entropy(*leaves, target) + tkjit.linear_cross_entropy(*leaves, target)).backward()
    for leaf, one in zip(leaves, want):
        assert_close(leaf.grad, 5 * one.double())


def test_nothing_of_the_callers_is_written(place: str):
    x, w, target = (fenced((10, 24), torch.float32, place), fenced((41, 24), torch.float32, place), None)
    target = torch.randint(0, 41, (10,), device=place)
    before = [t.clone() for t in (x, w, target)]
    versions = [t._version for t in (x, w, target)]
    poison(place, 1 << 14)
    for reduction in ("mean", "none"):
        g = torch.full((10,) if reduction == "none" else (), 2.0, device=place)
        judged((x, w, target), grads=[g], reduction=reduction)
        assert (g == 2).all()
    assert_same((x, w, target), before)
    assert versions == [t._version for t in (x, w, target)] and fence_intact(x) and fence_intact(w)


@pytest.mark.parametrize(
    "kwargs", [{}, {"reduction": "none", "label_smoothing": 0.2}, {"return_lse": True, "softcap": 2.0}], ids=str
)
def test_derivatives_of_both_orders_agree_with_finite_differences(kwargs: dict[str, Any], place: str):
    x, w, target = given(torch.float64, place, 5, 4, 6)
    leaves = as_leaves((x, w, torch.randn(6, dtype=torch.float64, device=place)))

    def function(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return tkjit.linear_cross_entropy(x, w, target, linear_bias=b, **kwargs)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layout_does_not_matter(layout: str, place: str):
    x, w, target = given(torch.float32, place)
    spread = torch.stack((target, target + 1000), -1)[..., 0]
    judged((as_layout(layout, x), as_layout(layout, w), spread))
    judged((as_layout(layout, x.view(2, 5, -1)), w, target.view(5, 2).t()), reduction="none")


# --- torch's other sides -----------------------------------------------------------------------------------------------


def test_autocast_casts_as_torchs_and_sums_weights_gradients_in_their_own_type(place: str):
    x, w, target = given(torch.float32, place)
    bias = torch.randn(40, device=place)

    def under(function: Callable) -> Callable:
        def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            with torch.autocast(place, torch.bfloat16, enabled=x.dtype != torch.float64):
                return function(x, w, target, linear_bias=b)

        return run

    for dtype in (torch.float32, torch.bfloat16):
        args = [t.to(dtype) for t in (x, w, bias)]
        loss = under(tkjit.linear_cross_entropy)(*args)
        assert loss.dtype == torch.float32
        want, own = (answer(under(module._reference), [t.to(d) for t in args]) for d in (torch.float64, dtype))
        got = answer(under(tkjit.linear_cross_entropy), args)
        for a, b, c in zip(got.tensors, want.tensors, own.tensors):
            assert_close(a, b, c, slack=SLACK[1], rounded_to=torch.bfloat16)


def test_compiled_calls_give_the_same(place: str):
    torch._dynamo.reset()
    args = given(torch.float32, place)
    for kwargs in ({}, {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.1}):

        def model(x: Tensor, w: Tensor, target: Tensor, kwargs: dict = kwargs) -> Tensor:
            return tkjit.linear_cross_entropy(x * 2, w, target, **kwargs) + 1

        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_same(answer(compiled, args).tensors, answer(model, args).tensors)


def test_saved_tensors_of_other_strides_are_understood(place: str):
    args = given(torch.float32, place)
    for kwargs in ({}, {"reduction": "none"}):
        want = answer(tkjit.linear_cross_entropy, args, kwargs).tensors
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: as_layout("sliced", t)):
            got = answer(tkjit.linear_cross_entropy, args, kwargs).tensors
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_contract has it on the GPU")
def test_library_ops_pass_opcheck_on_the_cpu():
    with emulating("sm_90a"):
        x, w, target = given(torch.float32, "cpu", 5, 4, 6)
        options = (-100, 1, 0.1, 0.01, 0.0)
        args = (x, w, target, torch.randn(6), None, *options, None, None, 7)
        torch.library.opcheck(module._forward_op, args)
        torch.library.opcheck(module._forward_op, tuple(as_leaves(args)))
        kept = module._forward_op(*args)[2:]
        for g_lse in (None, torch.randn(5)):
            tensors = (*args[:5], torch.tensor(2.0), g_lse, *kept)
            torch.library.opcheck(module._backward_op, (*tensors, *options, None, 7))
            torch.library.opcheck(module._backward_op, (*as_leaves(tensors), *options, None, 7))


# --- Kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_a_spill(arch: str, own_cache):
    kinds = [(t, t, True) for t in ("float16", "bfloat16", "float32", "float64")]
    kinds += [("float16", "float32", False), ("bfloat16", "float32", False), ("float32", "float32", False)]
    kernels: list[Any] = [
        ("scale", dict(Out=out, In=kept, L=kept, kOver=over, kVec=vec))
        for out, kept, over in kinds
        for vec in (1, 16 // {"float64": 8, "float32": 4}.get(kept, 2))
    ]
    kernels += [("add_rows", dict(T="bfloat16", kVec=vec)) for vec in (1, 2, 4, 8)]
    faults = [fact for fact in compile_together(arch, kernels, "linear_cross_entropy") if fact[1] or fact[2]]
    assert not faults, "\n".join(map(str, faults))


# --- On a GPU ----------------------------------------------------------------------------------------------------------


def test_memory_beyond_inputs_and_gradients_is_a_twentieth_of_the_logits(
    device: str, much_memory: Callable[[float], None]
):
    much_memory(16)
    n, h, classes = 16384, 4096, 128256
    x = torch.randn(n, h, device=device, dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(classes, h, device=device, dtype=torch.bfloat16).mul_(h**-0.5).requires_grad_()
    target = torch.randint(0, classes, (n,), device=device)
    tkjit.linear_cross_entropy(x[:1024], w, target[:1024]).backward()  # cuBLAS' workspace is there from then on
    x.grad = w.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = tkjit.linear_cross_entropy(x, w, target)
    loss.backward()
    extra = torch.cuda.max_memory_allocated() - before - x.grad.nbytes - w.grad.nbytes
    logits = n * classes * x.element_size()
    assert extra <= logits / 20, f"{extra / 1e6:.0f} MB, {100 * extra / logits:.1f} % of the logits"


@every_dtype
def test_vocabularies_of_many_sizes(dtype: torch.dtype, device: str):
    # What float64 is held to sums a hundred thousand terms in float64 too.
    slack = (4.0, 4.0) if dtype == torch.float64 else SLACK
    for classes in (1, 17, 1000, 50_257, 128_256):
        x, w, target = given(dtype, device, 700, 64, classes)
        judged((x, w, target), module._reference, slack=slack)
        judged((x, w, target), module._reference, slack=slack, reduction="none", label_smoothing=0.1)
