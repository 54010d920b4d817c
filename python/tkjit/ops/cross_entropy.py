"""cross_entropy of logits and classes, with z-loss, capped logits and the logarithm of the normalizer.

    u = x, or softcap * tanh(x / softcap)        lse = log(sum(exp(u))) of a row
    loss = (1 - a) w[y] (lse - u[y]) + a / C sum_c(w[c] (lse - u[c])) + z_loss lse^2

Where the logits want a gradient and rows fit into registers, the forward writes the gradient while it holds the row; other rows
are read a second time for it (csrc/templates/cross_entropy.cuh). What the backward does with it stands at _CrossEntropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .._device import Device, device_of
from .._library import define
from .._plan import Spec, empty, f32, f64, i32, i64, plan, planned, require_dtype, scratch, struct
from .._plan import bool_ as boolean
from .._rows import (
    DTYPES,
    ITEMSIZE,
    Layout,
    RingConfig,
    RowConfig,
    RowKernel,
    SpanConfig,
    acc_of,
    any_team,
    ceil_div,
    rows_struct,
    shared_bytes,
)
from .._template import template
from .._torch import Op, accumulator, compiling, filled, gradients_through, routed, transformed
from ..testing import DTYPE_NAMES, ROW_BYTES, BenchCase, Sample, op_cases, row_values

NONE, MEAN, SUM = range(3)  # reductions, as torch numbers them
LSE, STATS, GRAD = 1, 2, 4  # what a forward is asked for besides the loss

# --- kernels ---------------------------------------------------------------------------------------------------------

THREADS = 256  # of a block of every kernel but fwd
SHORT = 16  # rows below it have no vector to speak of
LONG = 1 << 18  # columns from which on a row is worth several blocks, whatever its strides
# Rows whose weights or losses one block sums. Not measured: so many classes are 256 KB, a few microseconds of one block.
CHUNK = 1 << 15
# Rows side by side in memory from which on neighbour threads take neighbour rows. Not measured: a warp's width.
SIDE_BY_SIDE = 32
# Blocks a multiprocessor of the backward that has nothing to do where the upstream gradient is 1. Not measured: few enough that
# they all live at once.
BLOCKS_PER_SM = 8


@dataclass(frozen=True)
class Cells:
    """How rows that are in no registers are cut: see Cells and row::for_cells in the templates."""

    vec: int
    team: int
    cells: int  # of a row
    span: int  # cells
    spans: int

    @classmethod
    def pick(cls, layout: Layout) -> Cells:
        c = SpanConfig.pick(layout)
        if layout.n < LONG and not layout.unit:
            side_by_side = bool(layout.inner) and layout.inner[-1][0] >= SIDE_BY_SIDE
            if side_by_side and all(s == 1 for s in layout.inner[-1][1]):
                return cls(1, 1, layout.n, layout.n, 1)
            return cls(1, any_team(layout.n), layout.n, layout.n, 1)
        return cls(c.vec, THREADS if c.spans > 1 else any_team(c.cells), c.cells, c.span, c.spans)

    def blocks(self, n_rows: int) -> int:
        return min(ceil_div(n_rows, THREADS // self.team) * self.spans, 2**31 - 1)

    def fields(self, n_rows: int) -> Any:
        return struct(i64(n_rows), i64(self.cells), i64(self.span), i32(self.spans))


@dataclass(frozen=True)
class _Loss:
    """The arguments of a call that its kernels share."""

    x: Spec
    target: Spec
    weight: Spec | None
    ignore: int
    reduction: int
    smoothing: float
    z_loss: float
    softcap: float

    @property
    def dim(self) -> int:
        return min(self.x.ndim - 1, 1)

    @property
    def acc(self) -> str:
        return acc_of(self.x.dtype)

    @property
    def value_bytes(self) -> int:
        """What a row is reduced to: a maximum and a sum; smoothed, two sums more."""
        return (4 if self.smoothing else 2) * (8 if self.acc == "float64" else 4)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.x.shape[: self.dim] + self.x.shape[self.dim + 1 :]

    def stats(self) -> Spec:
        """What the gradient needs of each row: maximum, logarithm of the sum; smoothed, the weights' sum."""
        return empty((3 if self.smoothing else 2, math.prod(self.row_shape)), self.acc, self.x)

    def by_row(self, spec: Spec | None, scalar: bool = False) -> Spec:
        """A tensor of a value a row, or of one for all, as if it had the classes' dim: their stride is that of a row's elements."""
        if spec is None or scalar:
            strides: tuple[int, ...] = (0,) * (self.x.ndim - 1)
        else:
            strides = spec.strides
        return replace(spec or self.x, shape=self.x.shape, strides=(*strides[: self.dim], 1, *strides[self.dim :]))

    def terms(self) -> Any:
        number = f64 if self.acc == "float64" else f32
        factors = (number(v) for v in (self.smoothing, self.z_loss, self.softcap))
        return struct(self.weight, i64(self.ignore), i64(self.x.shape[self.dim]), *factors)

    def check(self) -> None:
        require_dtype("cross_entropy", self.x.dtype, DTYPES)
        rest = [] if self.weight is None else [self.weight]
        if self.target.dtype != "int64" or self.target.shape != self.row_shape:
            raise RuntimeError(
                f"cross_entropy: classes for input {self.x.shape} must be int64 {self.row_shape}, but are {self.target.dtype} "
                f"{self.target.shape}"
            )
        for w in rest:
            if w.dtype != self.acc or w.shape != (self.x.shape[self.dim],) or not w.is_contiguous:
                raise RuntimeError(f"cross_entropy: weights must be contiguous {self.acc}, one a class")


def _row_launch(c: _Loss, layout: Layout, rows: Layout, k: RowKernel, dx, total, loss, sum, results) -> Any:
    dims, _ = rows_struct(rows.rows, 3)
    kernel = template("cross_entropy").kernel(
        "fwd", T=c.x.dtype, L=_type(loss, c), S=sum.dtype if sum else c.acc, kWhole=sum is not None, kGrad=dx is not None,
        kSmooth=c.smoothing > 0, **k.params(dims),
    )  # fmt: skip
    tensors = (dx, c.x, c.target, total, loss, sum, results, c.terms())
    return k.launch(kernel, layout, c.value_bytes, tensors, rows=rows)


def _type(loss: Any, c: _Loss) -> str:
    """Of the losses a row: what is summed later is not rounded."""
    return loss.dtype if isinstance(loss, Spec) else c.acc


def _scan_launches(c: _Loss, layout: Layout, rows: Layout, loss, results) -> tuple[Any, ...]:
    cells = Cells.pick(layout)
    dims, fields = rows_struct(rows.rows, 3)
    t = template("cross_entropy")
    kind = dict(T=c.x.dtype, L=_type(loss, c), kSmooth=c.smoothing > 0, kCap=c.softcap > 0)
    x_stride = layout.strides[1]
    partial = scratch(layout.n_rows * cells.spans * c.value_bytes) if cells.spans > 1 else None
    smem = shared_bytes(THREADS, c.value_bytes)
    scan = t.kernel("scan", **kind, kVec=cells.vec, kTeam=cells.team, kDims=dims).launch(
        grid=cells.blocks(layout.n_rows),
        block=THREADS,
        smem=smem,
        args=(
            partial, c.x, c.target, loss, results, c.terms(), struct(*fields), cells.fields(layout.n_rows),
            i64(cells.vec if layout.unit else x_stride),
        ),
    )  # fmt: skip
    if partial is None:
        return (scan,)
    merge = t.kernel("merge", **kind, kDims=dims).launch(
        grid=min(layout.n_rows, 2**31 - 1),
        block=THREADS,
        smem=smem,
        args=(partial, c.x, c.target, loss, results, c.terms(), struct(*fields), i32(cells.spans), i64(x_stride)),
    )
    return scan, merge


def _gradient_launch(c: _Loss, dx, g, g_lse, stats, total, device: Device, only_unless_one: bool = False) -> Any:
    layout = Layout.of((dx, c.x), c.dim)
    one_g = g is None or c.reduction != NONE
    rows = Layout.of(
        (dx, c.x, c.by_row(c.target), c.by_row(g, one_g), c.by_row(g_lse)),
        c.dim,
    )
    cells = Cells.pick(layout)
    dims, fields = rows_struct(rows.rows, 5)
    kernel = template("cross_entropy").kernel(
        "bwd", T=c.x.dtype, L=g.dtype if g is not None else c.x.dtype, kOnlyUnlessOne=only_unless_one,
        kSmooth=c.smoothing > 0, kCap=c.softcap > 0, kVec=cells.vec, kTeam=cells.team, kDims=dims,
    )  # fmt: skip
    blocks = cells.blocks(layout.n_rows)
    return kernel.launch(
        grid=min(blocks, BLOCKS_PER_SM * device.sms) if only_unless_one else blocks,
        block=THREADS,
        args=(
            dx, c.x, c.target, g, g_lse, stats, total, c.terms(), struct(*fields), cells.fields(layout.n_rows),
            *(i64(cells.vec if layout.unit else s) for s in layout.strides), boolean(one_g),
        ),
    )  # fmt: skip


def _chunks(n: int) -> tuple[int, int]:
    """The rows of a chunk, and how many chunks there are: at most 1024, which one block then sums."""
    chunk = max(CHUNK, ceil_div(n, 1024))
    return chunk, max(ceil_div(n, chunk), 1)


def _fold_launches(c: _Loss, values, n: int, out, out_dtype: str, total) -> Iterator[Any]:
    """out = sum of the values, divided by total."""
    chunk, chunks = _chunks(n)
    t, smem = template("cross_entropy"), shared_bytes(THREADS, 8)
    if chunks > 1:
        sums = scratch(chunks * (8 if c.acc == "float64" else 4))
        yield t.kernel("fold", Out=c.acc, A=c.acc).launch(
            chunks, THREADS, (sums, values, None, i64(n), i64(chunk)), smem=smem
        )
        values, n, chunk = sums, chunks, chunks
    yield t.kernel("fold", Out=out_dtype, A=c.acc).launch(
        1, THREADS, (out, values, total, i64(n), i64(chunk)), smem=smem
    )


def _count_launches(c: _Loss, rows: Layout, total) -> Iterator[Any]:
    """total = the weights of the rows that count."""
    chunk, chunks = _chunks(rows.n_rows)
    dims, fields = rows_struct(rows.rows, 3)
    sums = total if chunks == 1 else scratch(chunks * (8 if c.acc == "float64" else 4))
    args = (sums, c.target, c.terms(), struct(*fields), i64(rows.n_rows), i64(chunk))
    kernel = template("cross_entropy").kernel("count", A=c.acc, kDims=dims)
    yield kernel.launch(chunks, THREADS, args, smem=shared_bytes(THREADS, 8))
    if chunks > 1:
        yield from _fold_launches(c, sums, chunks, total, c.acc, None)


# --- planners --------------------------------------------------------------------------------------------------------


def _row_kernel(c: _Loss, layout: Layout, device: Device) -> RowKernel | None:
    """None where rows are read twice: strided or short ones, those longer than a cluster holds; capped logits, whose gradient
    wants the logits beside their exponentials, and smoothing with weights, of each element one: more registers than there are."""
    if c.softcap or (c.smoothing and c.weight) or not layout.unit or layout.n < SHORT:
        return None
    k = RowKernel.pick(layout, device)
    # Blocks of a cluster send each other 16 bytes at most.
    return k if k is None or k.cfg.cluster == 1 or c.value_bytes <= 16 else None


def _sums_itself(c: _Loss, layout: Layout) -> bool:
    """Whether fwd sums the losses and counts the rows: where its blocks draw their rows, and without weights, which each block
    would have to gather."""
    if c.weight is not None or not 0 < layout.n_rows <= CHUNK:
        return False
    k = _row_kernel(c, layout, device_of(c.x))
    return k is not None and k.draws


def _holds_gradient(dtype: str, smooth: bool, k: RowKernel) -> bool:
    """Whether fwd may write the gradient of such rows: only where that leaves it the registers.

    A thread has its exponentials, of two bytes the elements too, off alignment what says where its row ends, and 72 more; by
    ptxas 13.0, which spills at less.
    """
    c = k.cfg
    # Without smoothing it does, but where a thread holds 64 floats and has no ring: ptxas 13.0 spills one of sm_75's.
    if not smooth and not (k.ring is None and ITEMSIZE[dtype] == 4 and c.vecs * c.vec >= 64):
        return True
    resident = k.params(1)["kResident"]
    size = ITEMSIZE[dtype]
    each = (2 if size == 8 else 1) + (0.5 if size == 2 else 0) + (0.5 if c.vec * size < 16 else 0)
    return c.vecs * c.vec * each + 72 <= min(65536 // (c.threads * resident), 255)


def _loss_launches(c: _Loss, loss, lse, stats, total, dx, g=None, g_lse=None, sum=None) -> Iterator[Any]:
    """The loss of each row; lse, stats and dx where they are given, dx of an upstream gradient of 1 or of these. dx may be x.

    sum: where their sum over total goes, and total is found too, if the kernel is one that does it.
    """
    layout = Layout.of((dx or c.x, c.x), c.dim)
    if layout.n_rows == 0:
        return
    rows = Layout.of((dx or c.x, c.x, c.by_row(c.target)), c.dim)
    device = device_of(c.x)
    results = struct(lse, stats, i64(layout.n_rows))
    k = _row_kernel(c, layout, device)
    written = k is not None and g is None and g_lse is None and _holds_gradient(c.x.dtype, c.smoothing > 0, k)
    if k is not None:
        yield _row_launch(c, layout, rows, k, dx if written else None, total, loss, sum, results)
    else:
        yield from _scan_launches(c, layout, rows, loss, results)
    if dx is not None and not written and c.x.numel:
        yield _gradient_launch(c, dx, g, g_lse, stats, total, device)


@planned
def _forward(
    x: Spec,
    target: Spec,
    weight: Spec | None,
    ignore: int,
    reduction: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    dtype: str | None,
    want: int,
) -> Any:
    """The loss, of ``dtype`` or x's, and by ``want`` lse; stats and total, which the backward needs; the gradient for a g of 1."""
    c = _Loss(x, target, weight, ignore, reduction, smoothing, z_loss, softcap)
    c.check()
    out = empty(c.row_shape if reduction == NONE else (), dtype or x.dtype, x)
    lse = empty(c.row_shape, c.acc, x) if want & LSE else None
    dx = empty(x.shape, x.dtype, x) if want & GRAD else None
    layout = Layout.of((dx or x, x), c.dim)
    stats = c.stats() if want & (STATS | GRAD) else None
    total = empty((1 if reduction == MEAN else 0,), c.acc, x)
    outputs = [
        out,
        *(t for t in (lse, stats) if t is not None),
        *((total,) if stats is not None else ()),
        *((dx,) if dx else ()),
    ]
    whole = reduction != NONE and _sums_itself(c, layout)
    divisor: Any = None
    launches: list[Any] = []
    if reduction == MEAN:
        divisor = total if stats is not None else scratch(8)
        if not whole:
            rows = Layout.of((dx or x, x, c.by_row(target)), c.dim)
            launches += _count_launches(c, rows, divisor)
    loss: Any = out if reduction == NONE else scratch(max(layout.n_rows, 1) * (8 if c.acc == "float64" else 4))
    launches += _loss_launches(c, loss, lse, stats, divisor, dx, sum=out if whole else None)
    if reduction != NONE and not whole:
        launches += _fold_launches(c, loss, layout.n_rows, out, out.dtype, divisor)
    return plan(outputs, *launches)


@planned
def _backward(
    x: Spec,
    g: Spec | None,
    g_lse: Spec | None,
    target: Spec,
    weight: Spec | None,
    stats: Spec,
    total: Spec,
    ignore: int,
    reduction: int,
    smoothing: float,
    z_loss: float,
    softcap: float,
    into: Spec | None = None,
) -> Any:
    """dx of x, new; or ``into``, which holds it for a g of 1, made right for this one."""
    c = _Loss(x, target, weight, ignore, reduction, smoothing, z_loss, softcap)
    c.check()
    if not stats.is_contiguous or (g_lse is not None and g_lse.dtype != c.acc):
        raise RuntimeError("cross_entropy_backward: what the forward kept must be contiguous")
    dx = empty(x.shape, x.dtype, x) if into is None else into
    if x.numel == 0:
        return plan(dx)
    divisor = total if reduction == MEAN else None
    return plan(dx, _gradient_launch(c, dx, g, g_lse, stats, divisor, device_of(x), into is not None))


def all_kernels(device: Device, dims: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kernel and its template arguments that the planners can ask for with so many outer dims, of losses in the logits'
    type."""
    flags = (False, True)
    for dtype in DTYPES:
        acc = acc_of(dtype)
        size = ITEMSIZE[dtype]
        lengths = [*range(SHORT, 2048), *range(2048, 16 * 512 * 64 + 1, 512)]
        for aligned in flags:
            for cfg in dict.fromkeys(RowConfig.pick(n, size, size, 1, device.max_cluster, aligned) for n in lengths):
                for ringed in flags if device.bulk_copy and size < 8 else (False,):
                    for smooth in flags:
                        if cfg is None or (smooth and size == 8 and cfg.cluster > 1):
                            continue
                        k = RowKernel(cfg, RingConfig(1, 0, 0, False) if ringed else None)
                        for grad in (False, True) if _holds_gradient(dtype, smooth, k) else (False,):
                            whole = ringed and cfg.teams == 1
                            kind = dict(T=dtype, L=acc, S=dtype, kWhole=whole, kGrad=grad, kSmooth=smooth)
                            yield "fwd", dict(**kind, **k.params(dims))
        for smooth in flags:
            for cap in flags:
                kind = dict(kSmooth=smooth, kCap=cap)
                yield "merge", dict(T=dtype, L=acc, **kind, kDims=dims)
                vecs = [v for v in (1, 2, 4, 8) if v * size <= 16]
                for vec, team in [*((v, t) for v in vecs for t in (1, 2, 4, 8, 16, 32, 256))]:
                    place = dict(kVec=vec, kTeam=team, kDims=dims)
                    yield "scan", dict(T=dtype, L=acc, **kind, **place)
                    for only in flags:
                        yield "bwd", dict(T=dtype, L=dtype, kOnlyUnlessOne=only, **kind, **place)
    for acc in ("float32", "float64"):
        yield "count", dict(A=acc, kDims=dims)
        for out in ("float16", "bfloat16", "float32") if acc == "float32" else ("float64",):
            yield "fold", dict(Out=out, A=acc)


# --- torch's own ops -------------------------------------------------------------------------------------------------


def _composite(x, target, weight, ignore, reduction, smoothing, z_loss, softcap, dtype, want):
    """The loss, and lse where it is wanted, of torch's own ops: for probabilities, transforms and second derivatives."""
    probabilities = target.is_floating_point()
    out_dtype = dtype or (torch.promote_types(x.dtype, target.dtype) if probabilities else x.dtype)
    name = ("none", "mean", "sum")[reduction]
    weigh = dict(weight=weight, ignore_index=ignore, label_smoothing=smoothing)
    if not (z_loss or softcap or want & LSE) and out_dtype == x.dtype:
        return F.cross_entropy(x, target, reduction=name, **weigh)
    wide = accumulator(x.dtype)
    u = x.to(wide)
    if softcap:
        u = softcap * torch.tanh(u / softcap)
    weigh["weight"] = None if weight is None else weight.to(wide)
    given = target.to(wide) if probabilities else target
    lse = torch.logsumexp(u, min(x.dim() - 1, 1))
    if not z_loss:
        loss = F.cross_entropy(u, given, reduction=name, **weigh)
    else:
        counts = torch.ones_like(lse, dtype=torch.bool) if probabilities else target != ignore
        loss = F.cross_entropy(u, given, reduction="none", **weigh) + z_loss * lse.square() * counts
        if reduction == MEAN:
            if probabilities or weight is None:
                total = counts.sum()
            else:
                total = (weigh["weight"][torch.where(counts, target, 0)] * counts).sum()
            loss = loss.sum() / total
        elif reduction == SUM:
            loss = loss.sum()
    loss = loss.to(out_dtype)
    return (loss, lse) if want & LSE else loss


def _composite_gradient(x, g, g_lse, target, weight, *loss):
    """dx by torch's own ops, as a function of x, g and g_lse that torch can differentiate on."""
    with torch.enable_grad():
        dtype = None if g is None else g.dtype
        out, lse = _composite(*(x, target, weight, *loss, dtype, LSE))
        pairs = [(o, d) for o, d in ((out, g), (lse, g_lse)) if d is not None]
        (dx,) = torch.autograd.grad([o for o, _ in pairs], x, [d for _, d in pairs], create_graph=True)
    return dx


def _second(ddx, x, g, g_lse, target, weight, *loss):
    """Gradients of _backward for x, g and g_lse."""
    return gradients_through(lambda *given: _composite_gradient(*given, target, weight, *loss), (x, g, g_lse), ddx)


# --- autograd --------------------------------------------------------------------------------------------------------

# Whether the backward that runs leaves its graph for another one. Where torch doesn't say: as if it did.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class _CrossEntropy(torch.autograd.Function):
    """The forward has written dx for an upstream gradient of 1. When may the backward give that tensor away, and change it?

    If the graph is freed by this backward (no retain_graph, no create_graph), nobody asks this node again, and nobody has been
    given the tensor before: earlier backwards, which kept the graph, got tensors of their own. So it is returned itself, after a
    kernel that reads g on the device and ends at once where it is 1; else that kernel writes dx for this g over it. If the graph is
    kept, a new tensor is written: the caller may keep what it got as .grad, and add to it.

    Another g is not multiplied onto dx but dx is made again from the logits: a product would round twice, and of float16
    what a loss scale is there to save is 0 before it is scaled. That reads and writes as much.
    """

    @staticmethod
    def forward(ctx, x, target, weight=None):
        *_, dtype, want = ctx.arguments
        loss = ctx.arguments[3:8]
        out, *rest = _forward(x, target, weight, *loss, dtype, want | STATS | GRAD)
        lse = [rest.pop(0)] if want & LSE else []
        ctx.save_for_backward(x, target, weight, *rest)
        ctx.set_materialize_grads(False)
        return (out, *lse) if lse else out

    @staticmethod
    def backward(ctx, g, g_lse=None):
        none = (None,) * (len(ctx.needs_input_grad) - 1)
        if g is None and g_lse is None:
            return (None, *none)
        x, target, weight, stats, total, dx = ctx.saved_tensors
        stats, total, loss = stats.contiguous(), total.contiguous(), ctx.arguments[3:8]
        weight = weight if weight is None else weight.contiguous()
        if g is not None and g_lse is None and not _keeps_graph() and _is_plain(g) and not torch.is_grad_enabled():
            return (_backward(x, g, None, target, weight, stats, total, *loss, dx), *none)
        return (_gradient(x, g, g_lse, target, weight, stats, total, *loss), *none)


class _CrossEntropyBackward(torch.autograd.Function):
    """The gradient as a function of x, g and g_lse, so that it has a gradient itself."""

    @staticmethod
    def forward(ctx, *tensors):
        args = filled(ctx.arguments, tensors)
        ctx.save_for_backward(*args[:5])
        return _backward(*args)

    @staticmethod
    def backward(ctx, ddx):
        found = _second(ddx, *ctx.saved_tensors, *ctx.arguments[7:12])
        places = (*found, *(None,) * 4)
        return tuple(d for d, a in zip(places, ctx.arguments) if a is ...)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may read its memory, and nobody has to see that."""
    return (
        type(tensor) is Tensor
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not torch._C._len_torch_dispatch_stack()
        and not transformed()
    )


# --- torch.ops -------------------------------------------------------------------------------------------------------

_LOSS = "int ignore_index, int reduction, float smoothing, float z_loss, float softcap"


def _setup_forward(ctx, inputs, output):
    x, target, weight, *ctx.loss, _ = inputs
    _, _, stats, total = output
    ctx.save_for_backward(x, target, weight, stats, total)
    ctx.mark_non_differentiable(stats, total)
    ctx.set_materialize_grads(False)


def _library_backward(ctx, g, g_lse, *_):
    none = (None,) * 8
    if g is None and g_lse is None:
        return None, *none
    x, target, weight, stats, total = ctx.saved_tensors
    return _backward_op(x, g, g_lse, target, weight, stats, total, *ctx.loss), *none


def _setup_backward(ctx, inputs, output):
    x, g, g_lse, target, weight, _, _, *ctx.loss = inputs
    ctx.save_for_backward(x, g, g_lse, target, weight)


def _library_second(ctx, ddx):
    return (*_second(ddx, *ctx.saved_tensors, *ctx.loss), *(None,) * 9)


def _run_forward(x, target, weight, *loss):
    if target.device.type == "cpu":
        _require_classes(target, x.shape[min(x.dim() - 1, 1)], loss[0])
    return _forward(x, target, weight, *loss, LSE | STATS)


def _fake(x, target, weight, ignore, reduction, smoothing, z_loss, softcap, dtype):
    require_dtype("cross_entropy", str(x.dtype).removeprefix("torch."), DTYPES)
    acc = accumulator(x.dtype)
    loss = x.new_empty(target.shape if reduction == NONE else (), dtype=dtype or x.dtype)
    stats = x.new_empty((3 if smoothing else 2, target.numel()), dtype=acc)
    return loss, x.new_empty(target.shape, dtype=acc), stats, x.new_empty((int(reduction == MEAN),), dtype=acc)


_forward_op = define(
    f"cross_entropy(Tensor x, Tensor target, Tensor? weight, {_LOSS}, ScalarType? dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    run=_run_forward,
    fake=_fake,
    setup_context=_setup_forward,
    backward=_library_backward,
)
_backward_op = define(
    "cross_entropy_backward(Tensor x, Tensor? g, Tensor? g_lse, Tensor target, Tensor? weight, Tensor stats, Tensor total, "
    f"{_LOSS}) -> Tensor",
    run=lambda *args: _backward(*args),
    fake=lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    setup_context=_setup_backward,
    backward=_library_second,
)


def _library(x, target, weight, *rest):
    *loss, want = rest
    found = _forward_op(x, target, weight, *loss)
    return found[:2] if want & LSE else found[0]


def _to_float32(*args):
    """torch's autocast: log_softmax and nll_loss give float32, of double too little to change."""
    *rest, dtype, want = args
    return *rest, dtype or (torch.float32 if args[0].dtype in (torch.float16, torch.bfloat16) else None), want


def _public(x, target, weight, ignore, reduction, smoothing, z_loss, softcap, dtype, want):
    name = ("none", "mean", "sum")[reduction]
    more = dict(z_loss=z_loss, softcap=softcap, return_lse=bool(want & LSE))
    return (lambda *args: cross_entropy(*args, **more)), (x, target, weight, None, ignore, None, name, smoothing)


def _torch_backward(x, g, g_lse, target, weight, stats, total, *loss):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
    return _composite_gradient(leaf, g, g_lse, target, weight, *loss).detach()


_OP = Op("cross_entropy", _public, _library, _composite, _to_float32, None)
_BACKWARD_OP = Op(
    "cross_entropy_backward",
    lambda *args: (_backward_op, args),
    _backward_op,
    _torch_backward,
    lambda *args: args,
    None,
)

_call = routed(_forward, _CrossEntropy, lambda *args: _OP)
_gradient = routed(_backward, _CrossEntropyBackward, lambda *args: _BACKWARD_OP)


# --- public ----------------------------------------------------------------------------------------------------------


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of logits and classes: ``loss = lse - u[y]``, of a row with ``lse = log(sum(exp(u)))``.

    With everything: ``(1 - a) w[y] (lse - u[y]) + a / C sum_c(w[c] (lse - u[c])) + z_loss lse^2``, where ``a`` is
    ``label_smoothing``, ``w`` are the weights and ``u`` is ``input``, or ``softcap * tanh(input / softcap)``.

    Args:
        input: Logits (C,), (N, C) or (N, C, d1, ...); any strides; float16 and bfloat16 (computed in float32), float32 or float64.
            Must not be changed in place before the backward.
        target: Classes, int64 or uint8, of input's shape without C; or their probabilities, of input's shape (torch's own ops).
        weight: (C,), the weight of each class. Where it wants a gradient: torch's own ops.
        size_average: torch's former spelling of ``reduction``.
        ignore_index: The class whose rows count neither in the loss nor in the gradient, which is 0 whatever their logits (torch:
            NaN where one is NaN or inf).
        reduce: torch's former spelling of ``reduction``.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, which divides by the weights of the rows that count.
        label_smoothing: From 0 to 1: how much of the target is spread over all classes.
        z_loss: Times ``lse^2``, added to the loss of each row that counts, before the reduction.
        softcap: Keeps logits within ``(-softcap, softcap)``; 0: as they are.
        return_lse: Whether to return ``lse`` too, of each row; it has a gradient.

    Returns:
        The loss, of input's dtype (float32 under autocast); or it and ``lse``, float32 (float64 of float64). A mean of no rows
        that count is NaN. A row with a NaN or +inf, or -inf throughout, has loss NaN. On a GPU a class that is neither in
        [0, C) nor ``ignore_index`` gives its row a loss and a gradient of NaN; nothing is read or written out of bounds.

    Raises:
        IndexError: a class is out of range, of tensors on the CPU (as torch there).
        TypeError: ``input`` or ``target`` isn't a tensor.
        NotImplementedError: ``input`` isn't of a floating type above.
        ValueError: batch sizes differ, or there is no such reduction.
        RuntimeError: shapes or dtypes don't belong together, or ``label_smoothing`` is outside 0 to 1.

    Same as ``torch.nn.functional.cross_entropy``. (N, C) with contiguous rows is read once and, for a gradient, written once,
    in the forward; the backward then only looks whether the upstream gradient is 1, and else makes the gradient again from
    the logits. With ``retain_graph``, under torch.compile, of strided, capped or very long rows the logits are read twice.
    """
    if has_torch_function_variadic(input, target, weight):
        return handle_torch_function(
            cross_entropy, (input, target, weight), input, target, weight, size_average, ignore_index, reduce, reduction,
            label_smoothing, z_loss=z_loss, softcap=softcap, return_lse=return_lse,
        )  # fmt: skip
    for name, value in (("input", input), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"cross_entropy(): argument '{name}' must be Tensor, not {type(value).__name__}")
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    loss = _options("cross_entropy", ignore_index, reduction, label_smoothing, z_loss, softcap)
    # By its name: the message of torch's names another function.
    require_dtype("cross_entropy", str(input.dtype).removeprefix("torch."), DTYPES)
    want = LSE if return_lse else 0
    if not _fits(input, target, weight) or not 0.0 <= label_smoothing <= 1.0:
        return _composite(input, target, weight, *loss, None, want)  # or torch's own refusal
    if target.dtype != torch.int64:
        target = target.long()
    if weight is not None:
        weight = weight.to(accumulator(input.dtype)).contiguous()
    if compiling():
        args = (input, target, weight, *loss, None, want)
        autocast = torch.is_autocast_enabled(input.device.type)
        return _library(*(_to_float32(*args) if autocast else args))
    if input.device.type == "cpu" and _is_visible(target):
        _require_classes(target, input.shape[min(input.dim() - 1, 1)], ignore_index)
    return _call(input, target, weight, *loss, None, want)


def _options(
    name: str, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float
) -> tuple[int, int, float, float, float]:
    """As the planners take them."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{name}(): {reduction} is not a valid value for reduction")
    if z_loss < 0 or softcap < 0:
        raise ValueError(f"{name}(): z_loss is {z_loss} and softcap {softcap}; neither may be negative")
    number = {"none": NONE, "mean": MEAN, "sum": SUM}[reduction]
    return ignore_index, number, float(label_smoothing), float(z_loss), float(softcap)


def _fits(x: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Whether there are kernels for the call; else it is torch's, to compute or to refuse."""
    shape = x.shape
    return (
        target.dtype in (torch.int64, torch.uint8)
        and len(shape) > 0
        and target.shape == (shape[:1] + shape[2:] if len(shape) > 1 else shape[1:])
        and x.layout == torch.strided
        and target.layout == torch.strided
        and not (x.is_nested or target.is_nested)
        and target.device == x.device
        and (
            weight is None
            or (
                weight.dim() == 1
                and weight.shape[0] == shape[min(len(shape) - 1, 1)]
                and weight.is_floating_point()
                and weight.device == x.device
                and not (weight.requires_grad and torch.is_grad_enabled())
            )
        )
    )


def _is_visible(target: Tensor) -> bool:
    """Whether its values may be looked at."""
    return _is_plain(target) and target.device.type == "cpu" and not torch.jit.is_tracing()


def _require_classes(target: Tensor, classes: int, ignore: int, name: str = "cross_entropy") -> None:
    outside = ((target < 0) | (target >= classes)) & (target != ignore)
    if outside.any():
        raise IndexError(f"{name}(): Target {target[outside][0].item()} is out of bounds.")


# --- cases -----------------------------------------------------------------------------------------------------------


def _inputs(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(label: str, shape: tuple[int, ...], values: str = "random", **kwargs: Any) -> Sample:
        x = row_values(values, shape, dtype, device)
        n = shape[min(len(shape) - 1, 1)]
        target = torch.randint(0, max(n, 1), shape[: min(len(shape) - 1, 1)] + shape[2:], device=device)
        if values == "minus inf":
            target.zero_()  # the one class that no row lacks
        if "ignore_index" in kwargs and target.numel():
            target.view(-1)[:1] = kwargs["ignore_index"]
        return Sample(label, (x, target), kwargs)  # no weight: torch refuses one that wants a gradient

    yield sample("small", (4, 8))
    yield sample("none", (5, 37), reduction="none")
    yield sample("sum", (3, 5), reduction="sum", ignore_index=2)
    yield sample("smoothed", (6, 40), label_smoothing=0.1, ignore_index=-1)
    yield sample("2-D images", (2, 5, 4, 5))
    yield sample("side by side", (2, 6, 40))
    yield sample("one row", (100,))
    yield sample("one class", (5, 1), reduction="none")
    yield sample("wide", (2, 5000), reduction="none")
    yield sample("no rows", (0, 8), reduction="sum")
    for values in ("huge range", "offset", "constant", "minus inf"):
        yield sample(values, (4, 50), values, reduction="none")


def _bench() -> Iterator[BenchCase]:
    """512 MB of logits. Forward: they are read once. Backward is timed together with the forward (benchmarks/peers.py): logits
    read once, their gradient written once."""
    for dtype in (torch.bfloat16, torch.float32):
        for classes in (32000, 50257, 65536, 128256, 262144):
            shape = (ROW_BYTES // (classes * dtype.itemsize), classes)
            size = math.prod(shape) * dtype.itemsize

            def make(device: str, shape: tuple[int, int] = shape, dtype: torch.dtype = dtype) -> tuple[Tensor, Tensor]:
                return torch.randn(shape, device=device, dtype=dtype), torch.randint(
                    0, shape[1], shape[:1], device=device
                )

            yield BenchCase(
                label=f"{shape[0]}x{classes} {DTYPE_NAMES[dtype]}",
                group="mean",
                x=classes,
                dtype=dtype,
                make=make,
                forward_bytes=size,
                backward_bytes=2 * size,
            )


CASES = op_cases(public=cross_entropy, reference=F.cross_entropy, inputs=_inputs, bench=_bench())
