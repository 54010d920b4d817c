"""cross_entropy: options, corners, what the backward may give away, kernels. What every op must hold is in test_contract.py.

Everything here runs on the emulator with checks, and what is marked so on a GPU too, at larger sizes.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tkjit
from emulate import emulating
from judge import answer, as_leaves, assert_same, check, upstream
from test_kernels import Kernel, compile_together, every_nth
from tkjit._device import ARCHS, Device
from tkjit.ops import cross_entropy as module
from tkjit.testing import LAYOUTS, as_layout, assert_close, fence_intact, fenced, poison

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])
every_arch = pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))


pytestmark = pytest.mark.usefixtures("fresh_plans")


def plain(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """The formula, in the order of its text."""
    dim = min(x.dim() - 1, 1)
    u = softcap * (x / softcap).tanh() if softcap else x
    w = u.new_ones(u.shape[dim]) if weight is None else weight.to(u.dtype)
    lse = u.logsumexp(dim)
    counts = target != ignore_index
    index = target.where(counts, 0)
    picked = w[index] * (lse - u.gather(dim, index.unsqueeze(dim)).squeeze(dim))
    by_class = w.view(-1, *(1,) * (u.dim() - dim - 1))
    spread = (by_class * (lse.unsqueeze(dim) - u)).sum(dim) / u.shape[dim]
    loss = (1 - label_smoothing) * picked
    if label_smoothing:
        loss = loss + label_smoothing * spread
    loss = (loss + z_loss * lse.square()).where(counts, 0.0)
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / w[index].where(counts, 0.0).sum()
    return (loss, lse) if return_lse else loss


def logits(shape: tuple[int, ...], dtype: torch.dtype, device: str, spread: float = 3.0) -> Tensor:
    return (torch.randn(shape, device=device) * spread).to(dtype)


def classes(x: Tensor) -> Tensor:
    dim = min(x.dim() - 1, 1)
    return torch.randint(0, x.shape[dim], x.shape[:dim] + x.shape[dim + 1 :], device=x.device)


def judged(
    x: Tensor, target: Tensor, weight: Tensor | None = None, grads: Any = None, scale: Any = None, **kwargs: Any
) -> Any:
    """Loss and gradient are close to float64's formula. ``scale``: see check."""
    return check(
        lambda x: tkjit.cross_entropy(x, target, weight, **kwargs),
        lambda x: plain(x, target, weight, **kwargs),
        (x,),
        grads=grads,
        scale=scale,
        label=f"{tuple(x.shape)} {x.dtype} {kwargs}",
    )


# --- Values ------------------------------------------------------------------------------------------------------------

SHAPES = [(3, 8), (5, 40), (4, 31), (3, 256), (2, 781), (2, 5, 7), (2, 3, 4, 5), (2, 6, 40), (50,)]


@every_dtype
def test_options_together_are_close_to_float64(dtype: torch.dtype, place: str):
    """On the emulator each type takes a quarter of them."""
    options = itertools.product(
        ("none", "sum", "mean"), (False, True), (0.0, 0.3), ({}, {"z_loss": 0.01}, {"softcap": 5.0, "z_loss": 0.1})
    )
    chosen = list(zip(options, itertools.cycle(SHAPES)))
    for (reduction, weighted, smoothing, more), shape in (
        chosen if place == "cuda" else chosen[DTYPES.index(dtype) :: 4]
    ):
        x = logits(shape, dtype, place)
        target = classes(x)
        if target.dim():
            target.view(-1)[-1] = -100
        weight = torch.rand(x.shape[min(x.dim() - 1, 1)], device=place).to(dtype) + 0.1 if weighted else None
        judged(x, target, weight, reduction=reduction, label_smoothing=smoothing, **more)


@every_arch
@every_dtype
def test_rows_of_every_path(arch: str, dtype: torch.dtype):
    with emulating(arch):
        for rows, n in ((40, 24), (12, 255), (5, 1024), (3, 2050), (2, 4096)):
            x = logits((rows, n), dtype, "cpu")
            judged(x, classes(x))
            judged(x, classes(x), label_smoothing=0.1)
        judged(x, classes(x), softcap=10.0)
        x = logits((6 * 512 + 1,), dtype, "cpu")[1:].view(6, 512)  # off alignment
        judged(x, classes(x))


@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=["bf16", "fp32"])
def test_rows_through_rings_and_of_clusters(dtype: torch.dtype, few_multiprocessors):
    with emulating("sm_90a"):
        for rows, n in ((7, 1000), (40, 4096), (3, 33024), (2, 40001)):
            x = logits((rows, n), dtype, "cpu")
            target = classes(x)
            target[1] = -100
            judged(x, target)
            judged(x, target, reduction="sum")
            with_gradient = tkjit.cross_entropy(x.clone().requires_grad_(), target)
            assert torch.equal(tkjit.cross_entropy(x, target), with_gradient.detach())
            assert tkjit.cross_entropy(x, target.fill_(-100)).isnan()
        judged(x, classes(x), label_smoothing=0.1, z_loss=1e-3)


def test_rows_longer_than_a_cluster_holds_are_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.RowKernel, "pick", classmethod(lambda *_: None))
    with emulating("sm_90a"):
        for dtype, n in ((torch.float32, 100_000), (torch.bfloat16, 70_001)):
            x = logits((2, n), dtype, "cpu")
            weight = torch.rand(n)
            judged(x, classes(x), reduction="none")
            judged(x, classes(x), weight, label_smoothing=0.1)


@pytest.mark.parametrize("chunk", (3, 1024))
def test_sums_over_rows_of_several_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    with emulating("sm_90a"):
        x = logits((20, 9), torch.float32, "cpu")
        judged(x, classes(x), torch.rand(9))
        judged(x, classes(x), reduction="sum")


def test_every_schedule_gives_the_same_bits(few_multiprocessors):
    first = None
    for seed in range(int(os.environ.get("TKJIT_TEST_SEEDS", "4"))):
        tkjit.cache.clear_plans()
        torch.manual_seed(1)
        with emulating("sm_90a", seed=seed):
            found = []
            for shape, dtype in (
                ((20, 1000), torch.bfloat16),
                ((9, 2048), torch.float32),
                ((2, 33024), torch.bfloat16),
            ):
                x = logits(shape, dtype, "cpu")
                found += answer(tkjit.cross_entropy, (x, classes(x)), {"label_smoothing": 0.1}).tensors
        first = first or found
        assert_same(found, first, f"seed {seed}")


@every_dtype
def test_lse_is_returned_and_has_a_gradient(dtype: torch.dtype, place: str):
    for shape, softcap in (((4, 40), 0.0), ((2, 5, 7), 2.0)):
        x = logits(shape, dtype, place)
        target = classes(x)
        target.view(-1)[0] = -100
        _, lse = tkjit.cross_entropy(x, target, softcap=softcap, return_lse=True)
        want = plain(x.double(), target, softcap=softcap, return_lse=True)[1]
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(lse, want, plain(x.float(), target, softcap=softcap, return_lse=True)[1].to(lse.dtype), slack=2)
        for use in (lambda loss, lse: lse.sum(), lambda loss, lse: 3 * loss + (lse * lse).sum()):
            (got, ref, wide) = (
                torch.autograd.grad(use(*f(leaf, target, softcap=softcap, return_lse=True)), leaf)[0]
                for f, leaf in (
                    (tkjit.cross_entropy, x.clone().requires_grad_()),
                    (plain, x.clone().requires_grad_()),
                    (plain, x.double().requires_grad_()),
                )
            )
            assert_close(got, wide, ref)


def test_probabilities_take_every_option(place: str):
    x, p = logits((4, 6, 3), torch.float32, place), torch.rand(4, 6, 3, device=place).softmax(1)
    for kwargs in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}, {"weight": torch.rand(6, device=place)}):
        check(
            lambda x, **kw: tkjit.cross_entropy(x, p, **kw),
            lambda x, **kw: F.cross_entropy(x, p.to(x.dtype), **kw),
            (x,),
            kwargs,
        )
    loss, lse = tkjit.cross_entropy(x, p, reduction="none", z_loss=0.5, softcap=4.0, return_lse=True)
    u = 4 * (x / 4).tanh()
    torch.testing.assert_close(lse, u.logsumexp(1))
    torch.testing.assert_close(loss, F.cross_entropy(u, p, reduction="none") + 0.5 * lse.square())


# --- Corners -----------------------------------------------------------------------------------------------------------


@every_dtype
def test_ignored_rows_have_no_loss_and_no_gradient_whatever_they_hold(dtype: torch.dtype, place: str):
    for n, softcap in ((40, 0.0), (7, 0.0), (40, 3.0)):
        x = logits((4, n), dtype, place)
        x[1] = torch.nan
        x[2] = torch.inf
        target = torch.tensor([1, 5, 5, 2], device=place)
        loss, dx = answer(
            tkjit.cross_entropy, (x, target), {"ignore_index": 5, "reduction": "none", "softcap": softcap}
        ).tensors
        assert not loss[1:3].any() and not dx[1:3].any() and loss[[0, 3]].isfinite().all()
        mean, dx = answer(tkjit.cross_entropy, (x, target), {"ignore_index": 5, "softcap": softcap}).tensors
        assert_close(mean, loss[[0, 3]].double().mean()) if dtype != torch.float16 else None
        assert not dx[1:3].any() and dx.isfinite().all()


def test_mean_of_no_rows_that_count_is_nan_and_its_gradient_zero(place: str):
    for rows in (3, 0):
        x = torch.randn(rows, 20, device=place)
        target = torch.full((rows,), -100, device=place)
        for reduction in ("mean", "sum", "none"):
            want = F.cross_entropy(x, target, reduction=reduction)
            loss, dx = answer(tkjit.cross_entropy, (x, target), {"reduction": reduction}).tensors
            assert_same([loss], [want], reduction)
            assert dx.shape == x.shape and not dx.any()


@every_dtype
def test_infinite_and_huge_logits_give_what_torch_gives(dtype: torch.dtype, place: str):
    inf, huge = float("inf"), 6e4 if dtype == torch.float16 else 1e30
    for n in (20, 5):
        x = torch.zeros(7, n, device=place)
        x[0, 1] = -inf  # another class
        x[1, 0] = -inf  # the row's own
        x[2] = -inf
        x[3, 2] = inf
        x[4, 2] = torch.nan
        x[5, 0], x[5, 1] = huge, -huge
        x[6] = 3e4
        x, target = x.to(dtype), torch.zeros(7, dtype=torch.long, device=place)
        for smoothing in (0.0, 0.1):
            for grad in (False, True):
                given = x.clone().requires_grad_(grad)
                got = tkjit.cross_entropy(given, target, reduction="none", label_smoothing=smoothing)
                want = F.cross_entropy(x.double(), target, reduction="none", label_smoothing=smoothing)
                torch.testing.assert_close(got.double(), want.to(dtype).double(), equal_nan=True, rtol=1e-2, atol=1e-3)
            (dx,) = torch.autograd.grad(got.sum(), given)
            assert dx[[2, 3, 4]].isnan().all() and dx[[0, 1, 5, 6]].isfinite().all()


@pytest.mark.parametrize("n", (3, 40))
def test_class_out_of_range_is_an_index_error_on_the_cpu(n: int):
    for bad in (n, -1, 2**40, -(2**40)):
        target = torch.tensor([0, bad, 1])
        with pytest.raises(IndexError, match="out of bounds"):
            tkjit.cross_entropy(torch.randn(3, n), target)
        assert tkjit.cross_entropy(torch.randn(3, n), target, ignore_index=bad).isfinite()


@pytest.mark.parametrize("n", (3, 40))
def test_class_out_of_range_makes_its_row_nan_where_nobody_looks(n: int, place: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_require_classes", lambda *_: None)
    for bad in (n, -1, 2**40, -(2**40)):
        x = fenced((3, n), torch.float32, place)
        target = torch.tensor([0, bad, 1], device=place)
        weight = fenced((n,), torch.float32, place).abs_()
        for kwargs in ({}, {"label_smoothing": 0.1}, {"softcap": 3.0}):
            given = functools.partial(tkjit.cross_entropy, target=target, weight=weight, **kwargs)
            loss, dx = answer(given, (x,), {"reduction": "none"}).tensors
            assert loss.isnan().tolist() == [False, True, False] and dx.isnan().all(1).tolist() == [False, True, False]
            assert given(x).isnan()
        assert fence_intact(x) and fence_intact(weight)


def test_one_class_costs_nothing(place: str):
    x = torch.randn(5, 1, device=place)
    loss, dx = answer(tkjit.cross_entropy, (x, torch.zeros(5, dtype=torch.long, device=place))).tensors
    assert loss == 0 and not dx.any()


def test_wrong_arguments_are_torchs_errors():
    x, target = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    wrong: list[tuple[tuple, dict]] = [
        ((x, target.int()), {}),
        ((x, target[:3]), {}),
        ((x, torch.zeros(4, 2)), {}),
        ((x, target.float()), {}),
        ((x, target, torch.ones(4)), {}),
        ((x, target, torch.ones(5).requires_grad_()), {}),
        ((x, target), {"label_smoothing": 1.5}),
        ((x, target), {"reduction": "all"}),
        ((x.long(), target), {}),
        ((x, 1), {}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(Exception) as theirs:
            F.cross_entropy(*args, **kwargs)
        with pytest.raises(type(theirs.value)):
            tkjit.cross_entropy(*args, **kwargs)
    for kwargs in ({"z_loss": -1.0}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match="negative"):
            tkjit.cross_entropy(x, target, **kwargs)


def test_torchs_former_spellings_of_reduction(place: str):
    x, target = torch.randn(4, 5, device=place), torch.tensor([0, 1, 2, 3], device=place)
    for size_average, reduce in ((True, True), (False, None), (None, False)):
        with pytest.warns(UserWarning, match="deprecated"):
            want = F.cross_entropy(x, target, None, size_average, -100, reduce)
        with pytest.warns(UserWarning, match="deprecated"):
            torch.testing.assert_close(tkjit.cross_entropy(x, target, None, size_average, -100, reduce), want)


# --- Gradients: what is given away, and what is kept -------------------------------------------------------------------


def gradients_of(x: Tensor, target: Tensor, scale: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(float64's gradient of scale * loss, rounded; torch's at x's dtype)."""
    found = []
    for leaf in (x.double().clone().requires_grad_(), x.clone().requires_grad_()):
        loss = F.cross_entropy(leaf, target, **kwargs)
        found += torch.autograd.grad(loss, leaf, torch.as_tensor(scale, device=x.device).to(loss.dtype).expand_as(loss))
    return found[0], found[1]


@every_dtype
@pytest.mark.parametrize("n", (40, 7))
def test_upstream_gradients_of_any_size_scale_the_gradient(n: int, dtype: torch.dtype, place: str):
    x = logits((4, n), dtype, place)
    target = classes(x)
    for scale in (1.0, 2.5, 0.0, -1.0):
        leaf = x.clone().requires_grad_()
        (got,) = torch.autograd.grad(tkjit.cross_entropy(leaf, target) * scale, leaf)
        want, own = gradients_of(x, target, scale)
        assert_close(got, want, own, label=f"times {scale}")
    per_row = torch.tensor([1.0, 0.5, -2.0, 1.0], device=place, dtype=dtype)
    leaf = x.clone().requires_grad_()
    tkjit.cross_entropy(leaf, target, reduction="none").backward(per_row)
    assert_close(leaf.grad, *gradients_of(x, target, per_row, reduction="none"))
    assert (leaf.grad[0] - gradients_of(x, target, 1.0, reduction="none")[0][0]).abs().max() < 1e-2


def test_loss_scale_saves_the_small_gradients_of_half(place: str):
    """Of 1e-8 float16 knows nothing, of 32768 times that it does: a product of the rounded gradient would be 0."""
    x = torch.zeros(64, 20, device=place, dtype=torch.float16)
    x[:, 0] = 14.0
    target = torch.zeros(64, dtype=torch.long, device=place)
    for keep in (False, True):
        leaf = x.clone().requires_grad_()
        (tkjit.cross_entropy(leaf, target).float() * 32768).backward(retain_graph=keep)
        want, _ = gradients_of(x, target, 32768.0)
        assert leaf.grad[:, 1:].all()
        assert_close(leaf.grad[:, 1:], want[:, 1:])
        assert_close(leaf.grad[:, 0], want[:, 0], slack=10)  # p - 1, of a p next to 1


def test_retained_graph_gives_the_same_gradient_however_the_first_is_changed(place: str):
    x = logits((4, 40), torch.float32, place)
    target = classes(x)
    want = gradients_of(x, target, 1.0)[0]
    leaf = x.clone().requires_grad_()
    loss = tkjit.cross_entropy(leaf, target)
    (once,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert_close(once, want)
    once.mul_(100.0)  # as clip_grad_norm_ does
    (thrice,) = torch.autograd.grad(3 * loss, leaf, retain_graph=True)
    assert_close(thrice, 3 * want)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_close(leaf.grad, 2 * want)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_loss_used_twice_and_two_losses_of_one_tensor_add_up(place: str):
    x = logits((4, 40), torch.float32, place)
    target = classes(x)
    want = gradients_of(x, target, 1.0)[0]
    leaf = x.clone().requires_grad_()
    loss = tkjit.cross_entropy(leaf, target)
    (loss + loss * loss.detach()).backward()
    assert_close(leaf.grad, want * (1 + loss.detach().double()))
    leaf.grad = None
    (tkjit.cross_entropy(leaf, target) + tkjit.cross_entropy(leaf, target)).backward()
    assert_close(leaf.grad, 2 * want)
    kept = leaf.grad.clone()
    tkjit.cross_entropy(leaf, target).backward()  # accumulates into a tensor that was another's gradient
    assert_close(leaf.grad, 3 * want)
    assert_close(kept, 2 * want)


def test_logits_are_never_written(place: str):
    for n in (40, 7):
        leaf = logits((4, n), torch.float32, place).requires_grad_()
        before, version = leaf.detach().clone(), leaf._version
        (2 * tkjit.cross_entropy(leaf, classes(leaf))).backward()
        assert torch.equal(leaf.detach(), before) and leaf._version == version
        assert leaf.grad.data_ptr() != leaf.data_ptr()


def test_backward_without_another_graph_gives_the_forwards_tensor_away(place: str):
    leaf = logits((4, 40), torch.float32, place).requires_grad_()
    loss = tkjit.cross_entropy(leaf, classes(leaf))
    dx = loss.grad_fn.saved_tensors[-1]
    (got,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert got.data_ptr() != dx.data_ptr()
    (got,) = torch.autograd.grad(loss, leaf)
    assert got.data_ptr() == dx.data_ptr()


def test_saved_tensors_of_other_strides_are_understood(place: str):
    x = logits((4, 40), torch.float32, place)
    target = classes(x)
    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: as_layout("sliced", t)):
        loss = tkjit.cross_entropy(leaf, target)
        (got,) = torch.autograd.grad(2 * loss, leaf)
    assert_close(got, gradients_of(x, target, 2.0)[0])


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"label_smoothing": 0.2},
        {"z_loss": 0.1},
        {"softcap": 2.0, "z_loss": 0.1},
        {"reduction": "none"},
        {"return_lse": True},
    ],
    ids=lambda kwargs: "-".join(kwargs) or "plain",
)
def test_derivatives_of_both_orders_agree_with_finite_differences(kwargs: dict[str, Any], place: str):
    for shape in ((3, 5), (2, 4, 3), (2, 18)):
        x = logits(shape, torch.float64, place, 1.0).requires_grad_()
        target = classes(x)
        target.view(-1)[0] = -100
        weight = torch.rand(shape[1], dtype=torch.float64, device=place)

        def function(x: Tensor, target: Tensor = target, weight: Tensor = weight) -> Any:
            return tkjit.cross_entropy(x, target, weight, **kwargs)

        assert torch.autograd.gradcheck(function, (x,), fast_mode=True)
        assert torch.autograd.gradgradcheck(function, (x,), fast_mode=True)


def test_third_derivative_is_torchs(place: str):
    x = logits((3, 5), torch.float64, place, 1.0)
    target = classes(x)

    def third(function: Callable) -> Tensor:
        leaf = x.clone().requires_grad_()
        found = function(leaf, target)
        for _ in range(3):
            (found,) = torch.autograd.grad(found.square().sum(), leaf, create_graph=True)
        return found.detach()

    torch.testing.assert_close(third(tkjit.cross_entropy), third(F.cross_entropy))


# --- Layouts -----------------------------------------------------------------------------------------------------------


@every_dtype
def test_layout_of_logits_classes_and_gradients_does_not_matter(dtype: torch.dtype, place: str):
    for shape in ((6, 40), (3, 9), (2, 5, 4), (2, 6, 33)):
        x, target = logits(shape, dtype, place), classes(torch.empty(shape, device=place))
        for layout in LAYOUTS:
            judged(as_layout(layout, x), target, reduction="none")
        spread = torch.stack((target, target + 1000), -1)[..., 0]
        judged(x, spread, label_smoothing=0.1)
        judged(x, target.flip(0)[:1].expand_as(target))
        for layout in LAYOUTS:
            g = as_layout(layout, upstream([x.new_empty(target.shape)])[0])
            judged(x, target, reduction="none", grads=[g])
        judged(x, target, reduction="none", grads=[torch.full((), 0.5, dtype=dtype, device=place).expand(target.shape)])


def test_every_element_is_written_and_nothing_outside_is_touched(place: str):
    for n, kwargs in ((40, {}), (41, {"label_smoothing": 0.1}), (7, {}), (3000, {"softcap": 5.0})):
        x = fenced((3, n), torch.float32, place, offset=1)
        target = classes(x)
        poison(place, 1 << 14)
        judged(x, target, **kwargs)
        assert fence_intact(x)


# --- torch's other sides -----------------------------------------------------------------------------------------------


def test_autocast_of_halves_gives_float32_as_torchs_does(place: str):
    target = torch.arange(4, device=place)

    def under(function: Callable) -> Callable:
        def run(x: Tensor) -> Tensor:
            with torch.autocast(place, torch.bfloat16, enabled=x.dtype != torch.float64):
                return function(x, target, weight=torch.ones(40, device=place, dtype=x.dtype))

        return run

    for dtype in DTYPES[:3]:
        check(under(tkjit.cross_entropy), under(F.cross_entropy), (logits((4, 40), dtype, place),))


def test_compiled_calls_give_the_same(place: str):
    torch._dynamo.reset()
    x = logits((4, 40), torch.float32, place)
    target = classes(x)
    for kwargs in ({}, {"reduction": "none", "label_smoothing": 0.1, "z_loss": 0.1}):

        def model(x: Tensor, function: Callable = tkjit.cross_entropy, kwargs: dict = kwargs) -> Tensor:
            return function(x * 2, target, **kwargs) + 1

        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        check(compiled, lambda x, kwargs=kwargs: plain(x * 2, target, **kwargs) + 1, (x,))


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_contract has it on the GPU")
def test_library_ops_pass_opcheck_on_the_cpu():
    with emulating("sm_90a"):
        x = torch.randn(3, 5)
        loss = (-100, 1, 0.1, 0.01, 0.0)
        args = (x, classes(x), None, *loss, None)
        torch.library.opcheck(module._forward_op, args)
        torch.library.opcheck(module._forward_op, tuple(as_leaves(args)))
        _, _, stats, total = module._forward_op(*args)
        args = (x, torch.tensor(2.0), torch.randn(3), args[1], None, stats, total, *loss)
        torch.library.opcheck(module._backward_op, args)
        torch.library.opcheck(module._backward_op, (*as_leaves(args[:3]), *args[3:]))


# --- Kernels -----------------------------------------------------------------------------------------------------------


def threads(kernel: Kernel) -> int:
    name, p = kernel
    return p["kTeam"] * p["kTeams"] if name == "fwd" else module.THREADS


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_a_spill(arch: str, request: pytest.FixtureRequest, own_cache):
    kernels = list(module.all_kernels(Device.of_arch(arch)))
    if not request.config.getoption("--all-kernels"):
        start = 5 * ARCHS.index(arch)
        full = [kernel for kernel in kernels if threads(kernel) == 512]  # the first to spill
        rest = [kernel for kernel in kernels if threads(kernel) != 512]
        kernels = every_nth(full, 32, start) + every_nth(rest, 32, start)
    work = [kernels[i : i + 16] for i in range(0, len(kernels), 16)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda group: compile_together(arch, group, "cross_entropy"), work)
        faults = [fact for facts in found for fact in facts if fact[1] or fact[2]]
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_is_listed_twice(arch: str):
    names = [str((name, sorted(p.items()))) for name, p in module.all_kernels(Device.of_arch(arch))]
    assert len(set(names)) == len(names)


# --- On a GPU ----------------------------------------------------------------------------------------------------------


@every_dtype
def test_vocabularies_of_every_size(dtype: torch.dtype, device: str):
    for n in (1, 16, 17, 1000, 32_000, 50_257, 65_536, 128_256, 262_144, 300_001):
        x = logits((33, n), dtype, device)
        target = classes(x)
        target[3] = -100
        # Of a single class all but z_loss' gradient cancels: in torch's float64 but for a rounding.
        scale = (lambda want, grads: grads[0].abs().max() / 33) if n == 1 else None
        for kwargs in ({}, {"label_smoothing": 0.1, "z_loss": 1e-4}, {"reduction": "none", "softcap": 30.0}):
            judged(x, target, scale=scale, **kwargs)


def test_more_elements_than_32_bits_count(device: str, much_memory: Callable[[float], None]):
    much_memory(30)
    x = torch.randn(85_457, 50_259, device=device, dtype=torch.float16).requires_grad_()
    target = classes(x)
    loss = tkjit.cross_entropy(x, target, reduction="none")
    (dx,) = torch.autograd.grad(loss.sum(), x)
    for rows in (slice(0, 8), slice(42_728, 42_731), slice(-8, None)):
        part = x.detach()[rows].double().requires_grad_()
        want = F.cross_entropy(part, target[rows], reduction="none")
        assert_close(loss.detach()[rows], want.detach(), slack=2)
        assert_close(dx[rows], torch.autograd.grad(want.sum(), part)[0])


def test_graph_of_a_step_replays_under_another_loss_scale(device: str):
    x = logits((64, 50_257), torch.bfloat16, device).requires_grad_()
    target, scale = classes(x), torch.ones((), device=device)

    def step() -> Tensor:
        return torch.autograd.grad(tkjit.cross_entropy(x, target) * scale, x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for value in (1.0, 1024.0, 1.0, -3.0):
        scale.fill_(value)
        graph.replay()
        assert_close(captured, *gradients_of(x.detach(), target, value))
