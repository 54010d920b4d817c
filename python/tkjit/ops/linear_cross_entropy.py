"""linear_cross_entropy: a projection and the cross entropy of its logits, which are never in memory as a whole.

    logits = input @ linear_weight.T + linear_bias        loss = cross_entropy(logits, target)

torch's product writes the logits of some rows to a buffer, and our kernels write their gradient over them (cross_entropy.cuh); from
there two products take it to the gradients. The forward does all that where a gradient is wanted, so no product is made twice. The
backward multiplies by the upstream gradient, which it reads on the device (linear_cross_entropy.cuh); a loss' own is 1, and then
nothing is read or written. Where the upstream gradient has a value a row (no reduction), or lse has one, the backward makes the
logits again.

That the forward makes the gradients, chunk by chunk, is the idea of Liger Kernel's fused linear cross entropy (Hsu et al., "Liger
Kernel: Efficient Triton Kernels for LLM Training", 2024). Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
2024, keep the logits on chip and make them twice: less memory, a product more.

How the gradient of linear_weight is summed. A product sums its rows in float32, whatever the types; but between two chunks the sum
lies in memory in the type of linear_weight, and in bfloat16 each chunk rounds it once more. What that costs most are the classes
of few rows: a target's gradient is some thousand times another's, and where two of them nearly cancel the roundings of the
larger sum are left. So with few rows a class (ROWS_A_CLASS) the chunks leave the targets out, and the rows that have one
are added to its class at the end, in float32 and rounded once (add_rows). And of the most frequent classes, whose sums without
the targets would be larger than with them, the logits' gradient is kept for all rows, for one product at the end. Largest
error against float64 and root mean square, both as multiples of torch's own, of 22 chunks, on a CPU, 2026-12-03; 1408 rows of 64,
as many a class as 16384 rows have of 32000 (128256) classes; logits of spread 1:

                                            left to the chunks        with that apart           in float32
    each class as often                     5.5, 2.7  (17, 2.7)       0.9, 1.0  (1.0, 1.0)      0.9, 0.9  (1.0, 0.9)
    by Zipf's law                           4.4, 2.6  (32, 2.6)       1.0, 1.0  (1.0, 0.9)      1.0, 0.8  (1.0, 0.8)
    the same, and the bias learned          1.5, 2.3  (2.0, 2.2)      0.6, 1.0  (0.6, 0.9)      0.6, 0.9  (0.6, 0.8)
    the same, and columns of input with
    a mean as large as their deviation      2.7, 3.6  (1.0, 3.7)      7.5, 2.5  (1.8, 1.9)      1.1, 0.9  (0.6, 0.9)

float32 sums cost 4 bytes an element of linear_weight: of 16384 rows of 4096 and 128256 classes half of the logits' memory, which
this op is there to save. Digits kept apart cost the same in another place; sums of slices of the vocabulary cost a third more time,
for they make the logits twice; larger chunks cost memory, and of eight the largest error is as large. Who has the memory says
``acc_dtype=torch.float32``. Where autocast makes the products of float32 weights, the gradient is float32 anyway and summed there.

float16 can't hold a gradient before its loss scale is known: what that is to save would be 0. So of float16 the forward keeps the
gradients in float32, and the logits' in units of 1 / UNIT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .._device import device_of
from .._library import define
from .._plan import Spec, i64, plan, planned
from .._plan import empty as empty_spec
from .._rows import ITEMSIZE, ceil_div
from .._template import template
from .._torch import FLOATING, Composed, Op, accumulator, autocasting, compiling, gradients_through, refusing_as
from ..testing import DTYPE_NAMES, BenchCase, Sample, op_cases
from .cross_entropy import (
    BLOCKS_PER_SM,
    LSE,
    MEAN,
    NONE,
    _is_plain,
    _is_visible,
    _keeps_graph,
    _Loss,
    _loss_launches,
    _options,
    _require_classes,
)
from .cross_entropy import (
    _composite as _of_logits,
)

INPUT, WEIGHT, BIAS = 1, 2, 4  # whose gradient is needed

# A chunk has a 21st of the rows, in whole tiles of a product: each chunk moves the weights' gradient through memory.
# Of 16384 rows it has 768, with 4.7 % of the logits. And it has so many rows, and bytes of logits, at least: below, products waste
# a GPU. Not measured.
CHUNKS, FEWEST, LEAST, TILE = 21, 512, 32 << 20, 128
FREQUENT = 500  # one of so many classes is frequent: 0.2 % of the logits are kept for them
ROWS_A_CLASS = 2  # with more, what is left without the targets is larger than with them
PITCH = 16  # bytes: rows of logits start on such, or products go element by element
UNIT = 2.0**13  # a row's gradient is 1 at most: of float16's range that leaves 8 times as much for z_loss


def chunk_rows(n: int, classes: int, itemsize: int) -> int:
    """How many of n rows a chunk has."""
    rows = max(n // CHUNKS, FEWEST, LEAST // (max(classes, 1) * itemsize))
    return rows // TILE * TILE


# --- planners --------------------------------------------------------------------------------------------------------


@planned
def _chunk(
    logits: Spec,
    target: Spec,
    weight: Spec | None,
    total: Spec | None,
    g: Spec | None,
    g_lse: Spec | None,
    loss: Spec,
    lse: Spec,
    ignore: int,
    reduction: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    gradient: bool,
) -> Any:
    """Fills loss and lse of some rows, and writes, if asked to, the logits' gradient over them."""
    c = _Loss(logits, target, weight, ignore, reduction, smoothing, z_loss, softcap)
    c.check()
    stats, over = (c.stats(), logits) if gradient else (None, None)
    outputs = [loss] if stats is None else [loss, stats]
    return plan(outputs, *_loss_launches(c, loss, lse, stats, total, over, g, g_lse))


@planned
def _scale(x: Spec, g: Spec, dtype: str, over: bool) -> Any:
    """x * g, rounded to dtype; over x itself, or new."""
    if not x.is_contiguous or (over and dtype != x.dtype):
        raise RuntimeError(
            "linear_cross_entropy: what the forward kept must be contiguous, and of the gradient's dtype"
        )
    y = x if over else empty_spec(x.shape, dtype, x)
    if x.numel == 0:
        return plan(y)
    wide = max(x.itemsize, ITEMSIZE[dtype])
    vec = math.gcd(x.numel, min(16 // wide, max(x.align // x.itemsize, 1)))
    cells = x.numel // vec
    kernel = template("linear_cross_entropy").kernel("scale", Out=dtype, In=x.dtype, L=g.dtype, kOver=over, kVec=vec)
    grid = min(ceil_div(cells, 1024), BLOCKS_PER_SM * device_of(x).sms)
    return plan(y, kernel.launch(grid, 256, (y, x, g, i64(cells))))


@planned
def _add_rows(y: Spec, x: Spec, by: Spec, keys: Spec, order: Spec) -> Any:
    """y[keys[i]] += by[order[i]] * x[order[i]], each row of y rounded once; keys are sorted, and without a row from y's last on."""
    (n_keys, n), (n_rows, _) = y.shape, x.shape
    if not (x.dtype == y.dtype == by.dtype and y.is_contiguous and x.shape[1] == n):
        raise RuntimeError("linear_cross_entropy: the rows are of another dtype or length than what they are added to")
    vec = math.gcd(n, 16 // x.itemsize)
    while vec > 1 and (x.strides[1] != 1 or min(x.align, y.align) % (vec * x.itemsize) or x.strides[0] % vec):
        vec //= 2
    if n == 0:
        return plan(y)
    blocks = ceil_div(n, 256 * vec)
    kernel = template("linear_cross_entropy").kernel("add_rows", T=x.dtype, kVec=vec)
    sizes = map(i64, (n_rows, n_keys, n, *x.strides, blocks))
    return plan(y, kernel.launch(n_rows * blocks, 256, (y, x, by, keys, order, *sizes)))


# --- the rows, chunk by chunk ----------------------------------------------------------------------------------------


@dataclass
class _Apart:
    """What chunks that round their sum leave out of the gradient of linear_weight, for all rows: see the top."""

    target: Tensor  # (n,): a class, even of a row that is ignored
    at_target: Tensor  # (n,): the logits' gradient there
    frequent: Tensor  # (k,): classes
    of_frequent: Tensor  # (n, k): the logits' gradient

    @classmethod
    def of(cls, target: Tensor, classes: int, dtype: torch.dtype) -> _Apart:
        target = target.clamp(0, classes - 1)
        counts = torch.zeros(classes, dtype=torch.int32, device=target.device)
        counts.scatter_add_(0, target, torch.ones_like(target, dtype=torch.int32))
        k = min(ceil_div(classes, 8 * FREQUENT) * 8, classes)  # a row of a product starts on 16 bytes
        frequent = counts.sort(descending=True, stable=True).indices[:k].clone()
        n = len(target)
        return cls(target, target.new_empty(n, dtype=dtype), frequent, target.new_empty(n, k, dtype=dtype))

    def take(self, dlogits: Tensor, rows: slice) -> None:
        """Leaves zeros where the targets are."""
        at = self.target[rows, None]
        torch.index_select(dlogits, 1, self.frequent, out=self.of_frequent[rows])
        torch.gather(dlogits, 1, at, out=self.at_target[rows, None])
        dlogits.scatter_(1, at, 0.0)

    def give(self, weight: Tensor, x: Tensor) -> None:
        """Adds it to the gradient, with one rounding more, or without the chunks' roundings."""
        row_of = torch.arange(len(weight), device=x.device).index_fill_(0, self.frequent, len(weight))
        keys, order = row_of[self.target].sort(stable=True)
        _add_rows(weight, x, self.at_target, keys, order)
        weight.index_copy_(0, self.frequent, self.of_frequent.t() @ x)


@dataclass
class _Gradients:
    """Of what is projected, and summed over the chunks; None where nobody needs one."""

    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    unit: float  # what the logits' gradient is a multiple of
    apart: _Apart | None = None

    @classmethod
    def of(
        cls, x: Tensor, linear_weight: Tensor, needs: int, unit: float, acc: torch.dtype | None, early: bool
    ) -> _Gradients:
        """early: the upstream gradient isn't known yet."""

        def made(like: Tensor, dtype: torch.dtype, bit: int) -> Tensor | None:
            return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format) if needs & bit else None

        half, wide = x.dtype == torch.float16, accumulator(x.dtype)
        return cls(
            made(x, wide if half and early else x.dtype, INPUT),
            made(linear_weight, wide if half or acc else linear_weight.dtype, WEIGHT),
            x.new_zeros(linear_weight.shape[0], dtype=wide) if needs & BIAS else None,
            unit,
        )

    def add(self, dlogits: Tensor, x: Tensor, linear_weight: Tensor, rows: slice) -> None:
        if self.input is not None:
            _product(self.input[rows], dlogits, linear_weight, 0, 1 / self.unit)
        if self.bias is not None:
            self.bias.add_(dlogits.sum(0, dtype=self.bias.dtype), alpha=1 / self.unit)
        if self.apart is not None:
            self.apart.take(dlogits, rows)
        if self.weight is not None:
            _product(self.weight, dlogits.t(), x, int(rows.start > 0), 1 / self.unit)


def _product(out: Tensor, a: Tensor, b: Tensor, beta: int, alpha: float) -> None:
    """out = beta out + alpha a @ b, rounded once."""
    scales = dict(beta=beta, alpha=alpha)
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, **scales, out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, **scales, out=out)
    else:  # has no such product
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), **scales, out=out)


def _weights_of_rows(target: Tensor, weight: Tensor | None, classes: int, ignore: int, wide: torch.dtype) -> Tensor:
    """(1,): the sum of those that count, which divides a mean."""
    counts = target != ignore
    each = counts if weight is None else weight[target.clamp(0, classes - 1)].where(counts, 0)
    return each.sum(dtype=wide).view(1)


def _run(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    loss: tuple,
    acc: torch.dtype | None,
    needs: int,
    g: Tensor | None = None,
    g_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, _Gradients]:
    """Losses and lse of the rows, what divides a mean, and the gradients, of upstream gradients of 1 or of these."""
    (n, _), classes = x.shape, linear_weight.shape[0]
    ignore, reduction, *_ = loss
    wide = accumulator(x.dtype)
    early = g is None and g_lse is None
    bounded = reduction == MEAN or weight is None
    unit = UNIT if early and needs and x.dtype == torch.float16 and bounded else 1.0
    total = _weights_of_rows(target, weight, classes, ignore, wide) if reduction == MEAN else None
    divisor = total
    if unit != 1:
        divisor = x.new_full((1,), 1 / unit, dtype=wide) if total is None else total / unit
    gradients = _Gradients.of(x, linear_weight, needs, unit, acc, early)
    low = linear_weight.to(x.dtype)
    if 1 not in low.stride():
        low = low.contiguous()  # once, and not by each product
    bias = bias if bias is None else bias.to(x.dtype)
    losses, lse = x.new_empty(n, dtype=wide), x.new_empty(n, dtype=wide)
    step = min(chunk_rows(n, classes, x.element_size()), n)
    if step < n <= ROWS_A_CLASS * classes and gradients.weight is not None and gradients.weight.dtype == torch.bfloat16:
        gradients.apart = _Apart.of(target, classes, x.dtype)
    per_pitch = PITCH // x.element_size()
    buffer = x.new_empty(step, ceil_div(classes, per_pitch) * per_pitch)[:, :classes]
    for first in range(0, max(n, 1), max(step, 1)):
        rows = slice(first, min(first + step, n))
        logits = buffer[: rows.stop - first]
        if bias is None:
            torch.mm(x[rows], low.t(), out=logits)
        else:
            torch.addmm(bias, x[rows], low.t(), out=logits)
        of_rows = (t if t is None or t.dim() == 0 else t[rows] for t in (g, g_lse))
        _chunk(logits, target[rows], weight, divisor, *of_rows, losses[rows], lse[rows], *loss, needs > 0)
        if needs:
            gradients.add(logits, x[rows], low, rows)
    if gradients.apart is not None and gradients.weight is not None:
        del logits, buffer  # or the memory of both would be needed at once
        gradients.apart.give(gradients.weight, x)
    return losses, lse, total, gradients


def _forward(x, linear_weight, target, bias, weight, *rest, needs=0):
    """The loss, lse, and the gradients for an upstream gradient of 1 (None where they aren't needed, or not known by that)."""
    *loss, dtype, acc, _ = rest
    reduction = loss[1]
    needs = 0 if reduction == NONE else needs
    losses, lse, total, found = _run(x, linear_weight, target, bias, weight, tuple(loss), acc, needs)
    if reduction != NONE:
        losses = losses.sum() if total is None else losses.sum() / total[0]
    return losses.to(dtype or x.dtype), lse, (found.input, found.weight, found.bias)


def _without_gradients(*args):
    loss, lse, _ = _forward(*args)
    return (loss, lse) if args[-1] & LSE else loss


def _backward(x, linear_weight, target, bias, weight, g, g_lse, dx, dw, db, *rest, over=False):
    """Gradients of x, linear_weight and bias; None where they aren't needed.

    dx, dw and db: for an upstream gradient of 1, if the forward left them; ``over``: they may be written to, and given away.
    """
    *loss, acc, needs = rest
    like = (x, linear_weight, bias if needs & BIAS else x)
    if g_lse is not None or any(t is None and needs >> i & 1 for i, t in enumerate((dx, dw, db))):
        found = _run(x, linear_weight, target, bias, weight, tuple(loss), acc, needs, g, g_lse)[-1]
        kept = (found.input, found.weight, found.bias)
        return tuple(t if t is None else t.to(of.dtype) for t, of in zip(kept, like))
    return tuple(
        t if t is None else _scale(t.contiguous(), g, of.dtype, over and t.dtype == of.dtype)
        for t, of in zip((dx, dw, db), like)
    )


# --- torch's own ops -------------------------------------------------------------------------------------------------


def _composite(x, linear_weight, target, bias, weight, *rest):
    """The loss, and lse where it is wanted, with all of the logits: for probabilities, transforms and second derivatives."""
    *loss, dtype, _, want = rest
    classes = linear_weight.shape[:-1]  # and more dims, where each of their entries is classified
    logits = F.linear(x, linear_weight.flatten(0, -2), bias if bias is None else bias.flatten())
    return _of_logits(*(logits.unflatten(-1, classes), target, weight, *loss, dtype, want))


def _composite_gradients(x, linear_weight, bias, g, g_lse, target, weight, *rest):
    """Those that are needed, by torch's own ops."""
    *loss, acc, needs = rest
    with torch.enable_grad():
        dtype = None if g is None else g.dtype
        low = (t if t is None else t.to(x.dtype) for t in (linear_weight, bias))  # autocast leaves them as they are
        found = _composite(x, next(low), target, next(low), weight, *loss, dtype, acc, LSE)
        pairs = [(o, d) for o, d in zip(found, (g, g_lse)) if d is not None]
        inputs = [t for i, t in enumerate((x, linear_weight, bias)) if needs >> i & 1]
        return torch.autograd.grad([o for o, _ in pairs], inputs, [d for _, d in pairs], create_graph=True)


def _second(upstream, x, linear_weight, target, bias, weight, g, g_lse, *rest):
    """Gradients of _backward for x, linear_weight, bias, g and g_lse."""
    *loss, acc, needs = rest
    # Of the gradients only those that something was made of.
    used = sum(1 << i for i, d in enumerate(upstream) if d is not None and needs >> i & 1)
    return gradients_through(
        lambda *given: _composite_gradients(*given, target, weight, *loss, acc, used),
        (x, linear_weight, bias, g, g_lse),
        [d for i, d in enumerate(upstream) if used >> i & 1],
    )


# --- autograd --------------------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients that the forward has left are given away, and before that changed, as cross_entropy's: see _CrossEntropy."""

    @staticmethod
    def forward(ctx, x, linear_weight, target, bias, weight, *rest):
        needs = _needs(ctx.needs_input_grad)
        loss, lse, kept = _forward(x, linear_weight, target, bias, weight, *rest, needs=needs)
        ctx.save_for_backward(x, linear_weight, target, bias, weight, *kept)
        *options, _, acc, want = rest
        ctx.rest = (*options, acc, needs)
        ctx.set_materialize_grads(False)
        return (loss, lse) if want & LSE else loss

    @staticmethod
    def backward(ctx, g, g_lse=None):
        none = (None,) * (len(ctx.needs_input_grad) - 5)
        if g is None and g_lse is None:
            return (*(None,) * 5, *none)
        x, linear_weight, target, bias, weight, *kept = ctx.saved_tensors
        args = (x, linear_weight, target, bias, weight, g, g_lse, *kept, *ctx.rest)
        if g is not None and g_lse is None and not _keeps_graph() and _is_plain(g) and not torch.is_grad_enabled():
            dx, dw, db = _backward(*args, over=True)
        else:
            dx, dw, db = _gradient.call(*args)
        return dx, dw, None, db, None, *none


class _LinearCrossEntropyBackward(torch.autograd.Function):
    """The gradients as a function of what they are made of, so that they have gradients themselves."""

    @staticmethod
    def forward(ctx, x, linear_weight, target, bias, weight, g, g_lse, *rest):
        ctx.save_for_backward(x, linear_weight, target, bias, weight, g, g_lse)
        ctx.rest = rest[3:]
        ctx.set_materialize_grads(False)
        return _backward(x, linear_weight, target, bias, weight, g, g_lse, *rest)

    @staticmethod
    def backward(ctx, *upstream):
        none = (None,) * (len(ctx.needs_input_grad) - 7)
        if all(d is None for d in upstream):
            return (*(None,) * 7, *none)
        dx, dw, db, dg, dg_lse = _second(upstream, *ctx.saved_tensors, *ctx.rest)
        return dx, dw, None, db, None, dg, dg_lse, *none


def _needs(flags) -> int:
    """Of the arguments of a call: x, linear_weight, target, bias."""
    return INPUT * flags[0] + WEIGHT * flags[1] + BIAS * flags[3]


# --- torch.ops -------------------------------------------------------------------------------------------------------

_TENSORS = "Tensor x, Tensor linear_weight, Tensor target, Tensor? bias, Tensor? weight"
_OPTIONS = "int ignore_index, int reduction, float smoothing, float z_loss, float softcap"


def _none_as_empty(like: Tensor, found) -> tuple[Tensor, ...]:
    """A library op returns tensors, and none of them twice or an argument."""
    return tuple(like.new_empty(0) if t is None else t for t in found)


def _needed(needs: int, found) -> tuple[Tensor | None, ...]:
    return tuple(t if needs >> i & 1 else None for i, t in enumerate(found))


def _run_library(x, linear_weight, target, bias, weight, *rest):
    *options, needs = rest
    if target.device.type == "cpu":
        _require_classes(target, linear_weight.shape[0], options[0], "linear_cross_entropy")
    loss, lse, kept = _forward(x, linear_weight, target, bias, weight, *options, LSE, needs=needs)
    return loss, lse, *_none_as_empty(x, kept)


def _fake(x, linear_weight, target, bias, weight, *rest):
    _, reduction, *_, dtype, acc, needs = rest
    loss = x.new_empty(target.shape if reduction == NONE else (), dtype=dtype or x.dtype)
    lse = x.new_empty(target.shape, dtype=accumulator(x.dtype))
    kept = _Gradients.of(x, linear_weight, 0 if reduction == NONE else needs, 1.0, acc, True)
    return loss, lse, *_none_as_empty(x, (kept.input, kept.weight, kept.bias))


def _setup_forward(ctx, inputs, output):
    *ctx.loss, _, ctx.acc, _ = inputs[5:]
    ctx.save_for_backward(*inputs[:5], *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _library_backward(ctx, g, g_lse, *_):
    none = (None,) * 8
    if g is None and g_lse is None:
        return *(None,) * 5, *none
    needs = _needs(ctx.needs_input_grad)
    tensors, kept = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    dx, dw, db = _needed(needs, _backward_op(*tensors, g, g_lse, *kept, *ctx.loss, ctx.acc, needs))
    return dx, dw, None, db, None, *none


def _run_library_backward(x, linear_weight, target, bias, weight, g, g_lse, dx, dw, db, *rest):
    kept = (t if t.numel() or t.dim() > 1 else None for t in (dx, dw, db))
    return _none_as_empty(x, _backward(x, linear_weight, target, bias, weight, g, g_lse, *kept, *rest))


def _fake_backward(x, linear_weight, target, bias, weight, g, g_lse, dx, dw, db, *rest):
    wanted = _needed(rest[-1], (x, linear_weight, bias))
    made = (t if t is None else torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted)
    return _none_as_empty(x, made)


def _setup_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7])
    ctx.rest = inputs[10:]
    ctx.set_materialize_grads(False)


def _library_second(ctx, *upstream):
    dx, dw, db, dg, dg_lse = _second(upstream, *ctx.saved_tensors, *ctx.rest)
    return dx, dw, None, db, None, dg, dg_lse, *(None,) * 10


_forward_op = define(
    f"linear_cross_entropy({_TENSORS}, {_OPTIONS}, ScalarType? dtype, ScalarType? acc_dtype, int needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    run=_run_library,
    fake=_fake,
    setup_context=_setup_forward,
    backward=_library_backward,
)
_backward_op = define(
    f"linear_cross_entropy_backward({_TENSORS}, Tensor? g, Tensor? g_lse, Tensor dx, Tensor dw, Tensor db, {_OPTIONS}, "
    "ScalarType? acc_dtype, int needs) -> (Tensor, Tensor, Tensor)",
    run=_run_library_backward,
    fake=_fake_backward,
    setup_context=_setup_backward,
    backward=_library_second,
)


def _library(x, linear_weight, target, bias, weight, *rest):
    *options, want = rest
    flags = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, linear_weight, target, bias)]
    found = _forward_op(x, linear_weight, target, bias, weight, *options, _needs(flags))
    return found[:2] if want & LSE else found[0]


def _library_gradients(x, linear_weight, target, bias, weight, g, g_lse, *rest):
    kept = _none_as_empty(x, rest[:3])
    found = _backward_op(x, linear_weight, target, bias, weight, g, g_lse, *kept, *rest[3:])
    return _needed(rest[-1], found)


def _as_autocast(x, linear_weight, target, bias, weight, *rest):
    """torch's: the product in the smaller type, the loss in float32. float32 weights are cast later, so that their gradient is
    summed in float32."""
    *loss, dtype, acc, want = rest
    low = torch.get_autocast_dtype(x.device.type)

    def cast(t: Tensor | None, but: torch.dtype = torch.float64) -> Tensor | None:
        return t if t is None or t.dtype in (torch.float64, but) else t.to(low)

    x = cast(x)
    linear_weight, bias = (cast(t, torch.float32) for t in (linear_weight, bias))
    dtype = dtype or (None if x.dtype == torch.float64 else torch.float32)
    return x, linear_weight, target, bias, weight, *loss, dtype, acc, want


def _public(x, linear_weight, target, bias, weight, ignore, reduction, smoothing, z_loss, softcap, dtype, acc, want):
    def function(*tensors: Any) -> Any:
        x, linear_weight, target, bias, weight = tensors
        return linear_cross_entropy(
            x, linear_weight, target, linear_bias=bias, weight=weight, ignore_index=ignore,
            reduction=("none", "mean", "sum")[reduction], label_smoothing=smoothing, z_loss=z_loss, softcap=softcap,
            return_lse=bool(want & LSE), acc_dtype=acc,
        )  # fmt: skip

    return function, (x, linear_weight, target, bias, weight)


def _torch_backward(x, linear_weight, target, bias, weight, g, g_lse, dx, dw, db, *rest):
    with torch.enable_grad():
        leaves = [t if t is None else t.detach().requires_grad_() for t in (x, linear_weight, bias)]
    found = iter(_composite_gradients(*leaves, g, g_lse, target, weight, *rest))
    return tuple(next(found).detach() if rest[-1] >> i & 1 else None for i in range(3))


_call = Composed(
    _without_gradients,
    _LinearCrossEntropy,
    Op("linear_cross_entropy", _public, _library, _composite, _as_autocast, None),
)
_gradient = Composed(
    _backward,
    _LinearCrossEntropyBackward,
    Op(
        "linear_cross_entropy_backward",
        lambda *args: (_library_gradients, args),
        _library_gradients,
        _torch_backward,
        lambda *args: args,
        None,
    ),
)


# --- public ----------------------------------------------------------------------------------------------------------


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
    acc_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``cross_entropy(input @ linear_weight.T + linear_bias, target)`` without the logits in memory.

    Args:
        input: (H,), or (..., H) of any leading dims; any strides; float16, bfloat16, float32 or float64. Must not be changed in
            place before the backward.
        linear_weight: (V, H), of input's dtype: a row for each class; any strides. (V, d1, ..., H) of an input (N, H): torch's
            own ops.
        target: Classes, int64 or uint8, of input's shape without H; or their probabilities, (..., V): torch's own ops.
        linear_bias: (V,), of input's dtype.
        weight: (V,), the weight of each class. Where it wants a gradient: torch's own ops.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, which divides by the weights of the rows that count.
        ignore_index: The class whose rows count neither in the loss nor in the gradients; None: -100.
        label_smoothing: From 0 to 1: how much of the target is spread over all classes.
        z_loss: Times ``lse^2``, added to the loss of each row that counts, before the reduction.
        softcap: Keeps logits within ``(-softcap, softcap)``; 0: as they are.
        return_lse: Whether to return the logarithm of each row's normalizer too; it has a gradient.
        acc_dtype: In what the gradient of linear_weight is summed over the chunks of rows: ``torch.float32``, or None, its own
            dtype, at the cost of some digits in bfloat16 where there are more than two rows a class or where columns of input
            have a large mean.

    Returns:
        The loss, of input's dtype (float32 under autocast); or it and ``lse``, of input's shape without H, float32 (float64 of
        float64). As of :func:`cross_entropy`: a mean of no rows that count is NaN; on a GPU a class out of range gives its row a
        loss of NaN, and NaN to what gradients it adds to.

    Raises:
        IndexError: a class is out of range, of tensors on the CPU (as torch there).
        TypeError: an argument isn't a tensor; ``acc_dtype`` is another one.
        NotImplementedError: ``input`` isn't of a floating type above.
        ValueError: batch sizes differ, or there is no such reduction.
        RuntimeError: shapes, dtypes or devices don't belong together, or ``label_smoothing`` is outside 0 to 1.

    Same as ``torch.nn.functional.linear_cross_entropy`` of torch 2.13, which has ``options`` and no leading dims. The logits are
    there for some rows at a time, of many rows for a 21st. With ``"mean"`` and ``"sum"`` the forward computes the gradients, and
    the backward multiplies them by the upstream gradient unless that is 1. With ``"none"``, and for the gradient of ``lse``, the
    backward makes the logits again. Second derivatives, transforms and forward-mode derivatives are those of torch's own ops,
    with all of the logits. Of float16 the gradients are kept in float32 between forward and backward, for a loss scale to find
    the small ones.
    """
    given = {
        "input": input,
        "linear_weight": linear_weight,
        "target": target,
        "linear_bias": linear_bias,
        "weight": weight,
    }
    tensors = tuple(given.values())
    if has_torch_function_variadic(*tensors):
        return handle_torch_function(
            linear_cross_entropy, tensors, input, linear_weight, target, linear_bias=linear_bias, weight=weight,
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, return_lse=return_lse, acc_dtype=acc_dtype,
        )  # fmt: skip
    for name, value in given.items():
        if not isinstance(value, Tensor) and (value is not None or name in ("input", "linear_weight", "target")):
            raise TypeError(f"linear_cross_entropy(): argument '{name}' must be Tensor, not {type(value).__name__}")
    if acc_dtype not in (None, torch.float32):
        raise TypeError(f"linear_cross_entropy(): acc_dtype is {acc_dtype}; it must be torch.float32 or None")
    ignore = -100 if ignore_index is None else ignore_index
    loss = _options("linear_cross_entropy", ignore, reduction, label_smoothing, z_loss, softcap)
    want = LSE if return_lse else 0
    rows = input.shape[:-1]
    x, classes = _as_rows("input", input, rows), _as_rows("target", target, rows)
    args = (x, linear_weight, classes, linear_bias, weight, *loss, None, acc_dtype, want)
    fits = _fits(*args[:5], label_smoothing)
    found = _of_rows(*args) if fits else refusing_as("linear_cross_entropy", _composite, *args)
    if len(rows) == 1:
        return found
    shaped = [t.reshape((*rows, *t.shape[1:])) if t.dim() else t for t in (found if return_lse else (found,))]
    return tuple(shaped) if return_lse else shaped[0]


def _as_rows(name: str, tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
    """With one dim in place of the leading ones."""
    if len(rows) == 1:
        return tensor
    if tensor.shape[: len(rows)] != rows:
        raise ValueError(
            f"linear_cross_entropy(): {name} has shape {tuple(tensor.shape)}, but of an input of shape (*, H) its first dims "
            f"must be those: {tuple(rows)}"
        )
    return tensor.reshape(math.prod(rows), *tensor.shape[len(rows) :])


def _of_rows(x, linear_weight, target, bias, weight, *rest):
    if target.dtype != torch.int64:
        target = target.long()
    if weight is not None:
        weight = weight.to(accumulator(x.dtype)).contiguous()
    args = (x, linear_weight, target, bias, weight, *rest)
    if compiling():
        return _library(*(_as_autocast(*args) if autocasting(x.device.type) else args))
    if x.device.type == "cpu" and _is_visible(target):
        _require_classes(target, linear_weight.shape[0], rest[0], "linear_cross_entropy")
    return _call.call(*args)


def _fits(x, linear_weight, target, bias, weight, smoothing: float) -> bool:
    """Whether there are kernels for the call; else it is torch's, to compute or to refuse."""
    projection = [x, linear_weight, *(() if bias is None else (bias,))]
    tensors = [*projection, target, *(() if weight is None else (weight,))]
    if not all(t.device == x.device and t.layout == torch.strided and not t.is_nested for t in tensors):
        return False
    autocast = autocasting(x.device.type)
    return (
        x.dim() == 2
        and linear_weight.dim() == 2
        and x.shape[1] == linear_weight.shape[1]
        and linear_weight.shape[0] > 0
        and all(t.dtype in FLOATING and (t.dtype == x.dtype or autocast) for t in projection)
        and len({t.dtype == torch.float64 for t in projection}) == 1  # which autocast leaves alone
        and (bias is None or bias.shape == linear_weight.shape[:1])
        and target.dtype in (torch.int64, torch.uint8)
        and target.shape == x.shape[:1]
        and 0.0 <= smoothing <= 1.0
        and (
            weight is None
            or (
                weight.is_floating_point()
                and weight.shape == linear_weight.shape[:1]
                and not (weight.requires_grad and torch.is_grad_enabled())
            )
        )
    )


# --- cases -----------------------------------------------------------------------------------------------------------


def _reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, linear_bias: Tensor | None = None, **options: Any
) -> Tensor:
    return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, **options)


def _inputs(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(label: str, n: int, h: int, classes: int, **kwargs: Any) -> Sample:
        x, w = (torch.randn(size, h, device=device).to(dtype) for size in (n, classes))
        target = torch.randint(0, classes, (n,), device=device)
        if "ignore_index" in kwargs and n:
            target[:1] = kwargs["ignore_index"]
        return Sample(label, (x, w, target), kwargs)

    yield sample("small", 6, 8, 12)
    yield sample("none", 5, 33, 13, reduction="none")
    yield sample("sum", 3, 4, 16, reduction="sum", ignore_index=2)
    yield sample("smoothed", 6, 8, 15, label_smoothing=0.1, ignore_index=-1)
    yield sample("one row", 1, 8, 9)
    yield sample("one class", 5, 33, 1, reduction="none")
    yield sample("wide", 9, 16, 700)
    yield sample("no rows", 0, 8, 9, reduction="sum")


def _bench() -> Iterator[BenchCase]:
    """Heads of models. Backward is timed together with the forward (benchmarks/peers.py): three products."""
    for n, h, classes in ((8192, 4096, 32000), (16384, 4096, 128256)):
        dtype = torch.bfloat16

        def make(device: str, n: int = n, h: int = h, classes: int = classes) -> tuple[Tensor, ...]:
            x, w = (torch.randn(size, h, device=device, dtype=torch.bfloat16) for size in (n, classes))
            return x, w.mul_(h**-0.5), torch.randint(0, classes, (n,), device=device)

        size = (n + classes) * h * dtype.itemsize
        flops = 2 * n * h * classes
        yield BenchCase(
            label=f"{n}x{h}x{classes} {DTYPE_NAMES[dtype]}", group="mean", x=classes, dtype=dtype, make=make,
            forward_bytes=size, backward_bytes=2 * size, grad_of=(0, 1), flops=(flops, 3 * flops),
        )  # fmt: skip


CASES = op_cases(public=linear_cross_entropy, reference=_reference, inputs=_inputs, bench=_bench())
