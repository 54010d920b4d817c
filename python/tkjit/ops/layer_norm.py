"""layer_norm and rms_norm over the last dimensions, with their gradients.

    h = input + residual, or input                  w = weight, 1 + weight (zero-centred) or 1; b = bias or 0
    layer_norm   y = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * w + b
    rms_norm     y = h / sqrt(mean(h^2) + eps) * w

One kernel forward; one backward, and a small one that adds up the gradients of weight and bias (csrc/templates/layer_norm.cuh).
Rows that no cluster's registers hold are read several times. Rows that aren't contiguous, a gradient that was expanded, say,
are copied first, by a launch of the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .._device import Device, device_of
from .._library import define
from .._plan import (
    Clear,
    Launch,
    Scratch,
    Spec,
    empty,
    empty_like,
    f32,
    f64,
    i64,
    plan,
    planned,
    require_dtype,
    scratch,
    struct,
)
from .._rows import (
    DTYPES,
    ITEMSIZE,
    THREADS,
    Layout,
    RingConfig,
    RowConfig,
    RowKernel,
    acc_of,
    ceil_div,
    chunk_of,
    power_of_two,
    rows_struct,
    shared_bytes,
)
from .._template import template
from .._torch import Op, accumulator, compiling, filled, gradients_through, routed
from ..testing import Sample, as_tuple, op_cases, row_bench, row_values

# --- config ----------------------------------------------------------------------------------------------------------

# Forward, of whole vectors, for rms norms or not and by the size of the elements: for columns up to these and more than half as
# many, threads a row, blocks of a cluster and blocks a multiprocessor; 0: they end with their rows; None: and load them without a
# ring. Measured at these columns but 2048 and 32768, with weight and bias: NVIDIA H200, 2026-12-04,
# `benchmarks/run.py layer_norm --device --peer torch --peer liger --rounds 8`.
_FORWARD: dict[tuple[bool, int], list[tuple[int, int, int, int | None]]] = {
    (False, 2): [
        (768, 32, 1, 5),
        (1024, 32, 1, 4),
        (2048, 64, 1, 8),
        (4096, 128, 1, 5),
        (8192, 128, 1, 4),
        (16384, 256, 1, 2),
        (32768, 512, 1, 1),
        (65536, 512, 2, 1),
    ],
    (False, 4): [
        (768, 32, 1, 0),
        (1024, 32, 1, None),
        (2048, 128, 1, 6),
        (4096, 128, 1, 3),
        (8192, 256, 1, 2),
        (16384, 512, 1, 1),
        (32768, 512, 2, 1),
        (65536, 512, 4, 1),
    ],
    (True, 4): [
        (4096, 256, 1, 3),
    ],
}


def _forward_config(n: int, size: int, streams: int, max_cluster: int, aligned: bool, rms: bool) -> RowConfig | None:
    """As any op's rows, but for what was measured otherwise, and for those of which ptxas 13.0 spills some: they are read more than
    once instead."""
    vec = 16 // size
    for columns, team, cluster, blocks in _FORWARD.get((rms, size), ()) if aligned and streams == 1 else ():
        if columns // 2 < n <= columns and cluster <= max_cluster:
            vecs = ceil_div(n, team * cluster * vec)
            teams, chunk = 1 if blocks is None else max(128 // team, 1), chunk_of(vecs, streams, team)
            return RowConfig(vec, team, teams, cluster, vecs, chunk, blocks or 0, direct=blocks is None)
    cfg = RowConfig.pick(n, size, size, streams, max_cluster, aligned)
    if cfg is None:
        return None
    held = streams * cfg.vecs * max(cfg.vec * size, 4)  # bytes a thread
    if cfg.threads == THREADS and held > ((224 if rms else 160) if aligned else 64):
        return None
    # Off alignment a thread needs more registers than as many blocks at once would leave it.
    return cfg if aligned else replace(cfg, blocks_per_sm=min(cfg.blocks_per_sm, 256 // cfg.threads or 1))


# Elements of dy and of x that a thread holds backward, beside a sum for weight and one for bias of each, by their size: of
# whole vectors, and of rows off alignment, whose many loads take registers. With 128 of them a thread nothing is spilled. Not
# measured, but for the table below.
_HELD = {True: {2: 16, 4: 16, 8: 8}, False: {2: 8, 4: 8, 8: 8}}


# The same backward.
_BACKWARD = {
    (False, 2): [
        (768, 32, 1, 3),
        (1024, 64, 1, 4),
        (4096, 128, 1, 2),
        (8192, 256, 2, 2),
        (16384, 256, 2, 1),
        (65536, 256, 8, 1),
    ],
    (False, 4): [
        (768, 64, 1, 3),
        (4096, 256, 2, 2),
    ],
}
_BACKWARD[True, 2] = [*_BACKWARD[False, 2][:-1], (65536, 512, 4, 1)]
_BACKWARD[True, 4] = _BACKWARD[False, 4]


def _backward_config(n: int, size: int, max_cluster: int, aligned: bool, rms: bool) -> RowConfig | None:
    """How bwd holds a row, by blocks that live on; None if it is longer than a cluster's registers."""
    vec = 16 // size if aligned else 2 if size == 2 else 1
    if aligned:
        for columns, team, cluster, blocks in _BACKWARD.get((rms, size), ()):
            if columns // 2 < n <= columns and cluster <= max_cluster:
                vecs = ceil_div(n, team * cluster * vec)
                return RowConfig(vec, team, max(128 // team, 1), cluster, vecs, vecs, blocks)
    threads, blocks = (128, 4) if size == 2 and aligned and n <= 1024 else (256, 2)
    for team in (1, 2, 4, 8, 16, 32, 64, 128, 256, THREADS):
        if n <= team * _HELD[aligned][size]:
            vecs = ceil_div(n, team * vec)
            vecs = vecs if team >= 32 else power_of_two(vecs)
            return RowConfig(vec, team, max(threads // team, 1), 1, vecs, vecs, blocks if team < THREADS else 1)
    for cluster in (2, 4, 8, 16):
        if n <= cluster * THREADS * _HELD[aligned][size] and cluster <= max_cluster:
            vecs = ceil_div(n, cluster * THREADS * vec)
            return RowConfig(vec, THREADS, 1, cluster, vecs, vecs, 1)
    return None


RELOAD, REGISTERS, SHARED = range(3)  # layer_norm::Hold


def _hold(c: RowConfig, each: int, streamed: int, aligned: bool, dims: int, device: Device) -> int:
    """Where a thread keeps parameters, ``each`` bytes a column: only where its block takes row after row, so not without a ring.
    float32 layer norms of 65536 columns had 0.96 of the copy with shared memory, 0.82 without; rms norms 0.95 with registers. Of
    1024 columns, by blocks that end with their rows, 0.83 and without 0.98.

    Args:
        streamed: Bytes a column that go through the ring, which must have room for a row.
    """
    held = c.vecs * c.vec * each
    # Finding a row among many outer dims takes registers too.
    if not (aligned and dims == 1 and c.blocks_per_sm and each):
        return RELOAD
    if held <= (128 if c.threads * c.blocks_per_sm <= 512 else 64):
        return REGISTERS
    room = c.blocks_per_sm * c.threads * c.vecs * c.vec * (each + streamed)
    return SHARED if room <= device.smem_sm - (16 << 10) else RELOAD


def _kernel_of(
    cfg: RowConfig, layout: Layout, device: Device, each: int, aligned: bool, dealt: bool = False
) -> tuple[RowKernel, int, int]:
    """The kernel, where it holds parameters, and how many bytes of shared memory they take."""
    streams = len(layout.tensors) - 1
    dims, _ = rows_struct(layout.rows, len(layout.tensors))
    hold = _hold(cfg, each, streams * layout.tensors[0].itemsize, aligned, dims, device)
    spared = cfg.threads * cfg.vecs * cfg.vec * each if hold == SHARED else 0
    ring = RingConfig.pick(cfg, layout, streams, device, aligned, dealt, spared)
    if ring is None:
        hold = spared = 0
    return RowKernel(cfg, ring), hold, spared


def _forward_kernel(layout: Layout, device: Device, rms: bool, each: int) -> tuple[RowKernel, int, int] | None:
    size, streams = layout.tensors[0].itemsize, len(layout.tensors) - 1
    aligned = layout.aligned(16 // size)
    cfg = _forward_config(layout.n, size, streams, device.max_cluster, aligned, rms)
    return None if cfg is None else _kernel_of(cfg, layout, device, each, aligned)


def _backward_kernel(layout: Layout, device: Device, rms: bool, each: int) -> tuple[RowKernel, int, int] | None:
    size = layout.tensors[0].itemsize
    aligned = layout.aligned(16 // size)
    cfg = _backward_config(layout.n, size, device.max_cluster, aligned, rms)
    # Rows that are drawn would be summed in another order each time.
    return None if cfg is None else _kernel_of(cfg, layout, device, each, aligned, dealt=True)


# --- kernels ---------------------------------------------------------------------------------------------------------


ABSENT, PLAIN, PLUS_ONE = range(3)  # layer_norm::Counts


def _types(spec: Spec, weight: Spec | None, zero: bool) -> dict[str, Any]:
    counts = ABSENT if weight is None else PLUS_ONE if zero else PLAIN
    return dict(T=spec.dtype, W=weight.dtype if weight else spec.dtype, kWeight=counts)


def _dense(spec: Spec, copies: list[Launch]) -> Scratch:
    """The tensor's copy, contiguous from 16 bytes on, and its launch added to ``copies``."""
    target = scratch(spec.numel * spec.itemsize)
    # Each element as a row of one.
    column = replace(spec, shape=(*spec.shape, 1), strides=(*spec.strides, 1))
    dims, fields = rows_struct(Layout.of((column,), -1).rows, 1)
    kernel = template("layer_norm").kernel("dense", T=spec.dtype, kDims=dims)
    grid = min(ceil_div(spec.numel, 256), 1 << 16)
    copies.append(kernel.launch(grid=grid, block=256, args=(target, spec, struct(*fields), i64(spec.numel))))
    return target


def _as_rows(spec: Spec, dims: int, copies: list[Launch]) -> tuple[Spec | Scratch, Spec]:
    """What a kernel is given for the tensor, and how that lies in memory, the last ``dims`` as one."""
    lead, n = spec.ndim - dims, math.prod(spec.shape[spec.ndim - dims :])
    shape, step = (*spec.shape[:lead], n), 1
    for size, stride in zip(reversed(spec.shape[lead:]), reversed(spec.strides[lead:])):
        if size != 1 and stride != step:
            return _dense(spec, copies), empty(shape, spec.dtype, spec)
        step *= size
    return spec, replace(spec, shape=shape, strides=(*spec.strides[:lead], 1))


def _whole(spec: Spec | None, copies: list[Launch]) -> Spec | Scratch | None:
    """What a kernel is given for a tensor that it reads as one piece from 16 bytes on."""
    return spec if spec is None or (spec.is_contiguous and spec.align >= 16) else _dense(spec, copies)


def _wide_params(layout: Layout) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Cells of a row, the template arguments that the kernels for wide rows end with, and their launch."""
    vec = 16 // layout.tensors[0].itemsize
    vec = vec if layout.aligned(vec) else 1
    dims, _ = rows_struct(layout.rows, len(layout.tensors))
    smem = shared_bytes(THREADS, 2 * ITEMSIZE[acc_of(layout.tensors[0].dtype)])
    launch = dict(grid=min(layout.n_rows, 2**31 - 1), block=THREADS, smem=smem)
    return layout.n // vec, dict(kVec=vec, kDims=dims), launch


# --- planners --------------------------------------------------------------------------------------------------------


def _name(rms: bool) -> str:
    return "rms_norm" if rms else "layer_norm"


@planned
def _forward(
    x: Spec,
    weight: Spec | None,
    bias: Spec | None,
    residual: Spec | None,
    dims: int,
    eps: float,
    rms: bool,
    zero: bool,
    save: bool = False,
) -> Any:
    """y, then h if there is a residual, then the statistics if they are to be saved."""
    for given in (x, weight, bias, residual):
        if given is not None:
            require_dtype(_name(rms), given.dtype, DTYPES)
    n = math.prod(x.shape[x.ndim - dims :])
    y, h = empty_like(x), None if residual is None else empty_like(x)
    stats = empty((1 if rms else 3, x.numel // max(n, 1)), acc_of(x.dtype), x) if save else None
    outputs = [out for out in (y, h, stats) if out is not None]
    if x.numel == 0:
        return plan(outputs)
    launches: list[Launch] = []
    inputs = [_as_rows(t, dims, launches) for t in (x, residual) if t is not None]
    parameters = [_whole(t, launches) for t in (weight, bias)]
    layout = Layout.of((_as_rows(y, dims, launches)[1], *(rows for _, rows in inputs)), -1)
    tensors = (y, h, stats, inputs[0][0], inputs[1][0] if h else None, *parameters)
    more = (f64(eps) if x.dtype == "float64" else f32(eps),)
    types = dict(
        **_types(x, weight, zero),
        B=bias.dtype if bias else x.dtype,
        kBias=bias is not None,
        kRms=rms,
        kAdd=h is not None,
    )
    each = sum(ITEMSIZE[p.dtype] for p in (weight, bias) if p is not None)
    made = _forward_kernel(layout, device_of(x), rms, each)
    if made is not None:
        row, hold, spared = made
        dims_, _ = rows_struct(layout.rows, len(layout.tensors))
        kernel = template("layer_norm").kernel("fwd", **types, kHold=hold, **row.params(dims_))
        value = (1 if rms else 4) * ITEMSIZE[acc_of(x.dtype)]
        launches.append(row.launch(kernel, layout, value, tensors, more, spare_extents=2 - len(inputs), spared=spared))
    else:
        cells, params, launch = _wide_params(layout)
        kernel = template("layer_norm").kernel("fwd_wide", **types, **params)
        _, fields = rows_struct(layout.rows, len(layout.tensors))
        args = (*tensors, struct(*fields), i64(layout.n_rows), i64(cells), *more)
        launches.append(kernel.launch(**launch, args=args))
    return plan(outputs, *launches)


DW, DB = 1, 2  # what the backward is to give beside dx


@planned
def _backward(
    dy: Spec,
    dh: Spec | None,
    h: Spec,
    stats: Spec,
    weight: Spec | None,
    bias_dtype: str | None,
    dims: int,
    eps: float,
    rms: bool,
    zero: bool,
    wanted: int,
) -> Any:
    """dx, then dw and db as far as they are wanted."""
    require_dtype(f"{_name(rms)}_backward", dy.dtype, DTYPES)
    _require_alike(dy, h)
    dx = empty_like(h)
    lead = h.ndim - dims
    dw = empty(h.shape[lead:], weight.dtype, h) if weight and wanted & DW else None
    db = empty(h.shape[lead:], bias_dtype, h) if bias_dtype and wanted & DB else None
    outputs = [out for out in (dx, dw, db) if out is not None]
    if h.numel == 0:
        return plan(outputs, *(Clear(out) for out in outputs if out.numel))
    device = device_of(h)
    launches: list[Launch] = []
    (dy_given, dy_rows), (h_given, h_rows) = (_as_rows(t, dims, launches) for t in (dy, h))
    layout = Layout.of((_as_rows(dx, dims, launches)[1], dy_rows, h_rows), -1)
    given: tuple[Any, ...] = (dy_given, h_given, _whole(dh, launches), stats, _whole(weight, launches))
    sums: dict[str, Any] = dict(kDw=dw is not None, kDb=db is not None)
    size = ITEMSIZE[acc_of(h.dtype)]
    n_dims, fields = rows_struct(layout.rows, 3)

    def partials(count: int) -> list[Scratch | None]:
        return [None if out is None else scratch(count * layout.n * size) for out in (dw, db)]

    made = _backward_kernel(layout, device, rms, ITEMSIZE[weight.dtype] if weight else 0)
    if made is not None:
        row, hold, spared = made
        c = row.cfg
        # A row of partial sums for each team of each cluster, of a warp's teams one.
        groups = c.threads // max(c.team, 32)
        blocks = c.live_blocks(device) if row.ring is None else row.ring.blocks
        count = min(ceil_div(layout.n_rows, c.teams), max(blocks // c.cluster, 1)) * groups
        partial = partials(count)
        types = dict(**_types(h, weight, zero), kRms=rms, **sums, kHold=hold)
        kernel = template("layer_norm").kernel("bwd", **types, **row.params(n_dims))
        launches.append(row.launch(kernel, layout, 2 * size, (dx, *partial, *given), blocks=blocks, spared=spared))
    else:
        cells, params, launch = _wide_params(layout)
        sizes = (struct(*fields), i64(layout.n_rows), i64(cells))
        kernel = template("layer_norm").kernel("bwd_wide", **_types(h, weight, zero), kRms=rms, **params)
        launches.append(kernel.launch(**launch, args=(dx, *given, *sizes)))
        across = ceil_div(cells, THREADS)
        # Four blocks a multiprocessor: not measured.
        count = min(max(4 * device.sms // across, 1), layout.n_rows, 65535)
        partial = partials(count)
        if len(outputs) > 1:
            kernel = template("layer_norm").kernel("bwd_weight", T=h.dtype, kRms=rms, **sums, **params)
            given = (*partial, *given[:2], stats, *sizes)
            launches.append(kernel.launch(grid=(across, count), block=THREADS, args=given))
    if len(outputs) > 1:
        types = dict(Acc=acc_of(h.dtype), W=weight.dtype if weight else h.dtype, B=bias_dtype or h.dtype)
        kernel = template("layer_norm").kernel("total", **types, **sums)
        given = (dw, db, *partial, i64(count), i64(layout.n))
        # A warp for two rows of them or more, up to layer_norm::kWarps.
        block = 32 * min(power_of_two(ceil_div(count, 2)), 16)
        launches.append(kernel.launch(grid=ceil_div(layout.n, 32), block=block, smem=16 * 32 * size, args=given))
    return plan(outputs, *launches)


def _require_alike(dy: Spec | Tensor, h: Spec | Tensor) -> None:
    if dy.shape != h.shape or dy.dtype != h.dtype:
        raise RuntimeError(
            f"layer_norm_backward: the gradient is {dy.dtype} of {dy.shape}, but the input {h.dtype} of {h.shape}"
        )


def all_kernels(device: Device, dims: Sequence[int] = (1,)) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kernel and its template arguments that the planners can ask for, with these counts of outer dims.

    Of the parameters' dtypes the input's and float32, of which a layer norm has both and an rms norm the weight, zero-centred
    or not; of the sums over rows both or neither.
    """
    once = dict.fromkeys((name, tuple(params.items())) for name, params in _listed(device, dims))
    return ((name, dict(params)) for name, params in once)


def _listed(device: Device, dims: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same, some of them more than once."""
    lengths = [*range(1, 2048), *range(2048, 16 * THREADS * 64 + 1, 512)]
    for dtype in DTYPES:
        size = ITEMSIZE[dtype]
        rings = [None, RingConfig(1, 0, 0, False)] if device.bulk_copy and size < 8 else [None]
        for parameter in dict.fromkeys((dtype, "float32")):
            for rms, flag, d in ((rms, flag, d) for rms in (False, True) for flag in (False, True) for d in dims):
                types = dict(T=dtype, W=parameter, kWeight=PLUS_ONE if flag and rms else PLAIN)
                forward: dict[str, Any] = dict(**types, B=parameter, kBias=not rms, kRms=rms, kAdd=flag)
                backward: dict[str, Any] = dict(**types, kRms=rms)
                sums = dict(kDw=flag, kDb=flag)
                for aligned in (False, True):
                    streams = 2 if flag else 1
                    pick = [_forward_config(n, size, streams, device.max_cluster, aligned, rms) for n in lengths]
                    each = ITEMSIZE[parameter]
                    for cfg in filter(None, dict.fromkeys(pick)):
                        hold = _hold(cfg, each if rms else 2 * each, streams * size, aligned, d, device)
                        for k in (RowKernel(cfg, ring) for ring in rings):
                            yield "fwd", dict(**forward, kHold=hold if k.ring else RELOAD, **k.params(d))
                    pick = [_backward_config(n, size, device.max_cluster, aligned, rms) for n in lengths]
                    for cfg in filter(None, dict.fromkeys(pick)):
                        hold = _hold(cfg, each, 2 * size, aligned, d, device)
                        for k in (RowKernel(cfg, ring) for ring in rings):
                            types = dict(**backward, **sums, kHold=hold if k.ring else RELOAD)
                            yield "bwd", dict(**types, **k.params(d))
                    vec = 16 // size if aligned else 1
                    yield "fwd_wide", dict(**forward, kVec=vec, kDims=d)
                    if flag:
                        yield "bwd_wide", dict(**backward, kVec=vec, kDims=d)
                        if parameter == dtype:
                            yield "bwd_weight", dict(T=dtype, kRms=rms, **sums, kVec=vec, kDims=d)
        yield "total", dict(Acc=acc_of(dtype), W=dtype, B=dtype, kDw=True, kDb=True)
        for d in dims:
            yield "dense", dict(T=dtype, kDims=d)


# --- autograd --------------------------------------------------------------------------------------------------------


def _wanted(weight: Any, bias: Any) -> int:
    return DW * bool(weight) | DB * bool(bias)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        x, weight, bias, residual, *_ = args = filled(ctx.arguments, tensors)
        *outputs, stats = _forward(*args, True)
        ctx.save_for_backward(x if residual is None else outputs[1], stats, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return outputs[0] if residual is None else tuple(outputs)

    @staticmethod
    def backward(ctx, dy, dh=None):
        h, stats, weight = ctx.saved_tensors
        places = [i for i, given in enumerate(ctx.arguments) if given is ...]
        needs = dict(zip(places, ctx.needs_input_grad))
        wanted = _wanted(needs.get(1), needs.get(2))
        # Hooks may have given the statistics other strides, which the kernels don't ask for.
        dy, stats = torch.zeros_like(h) if dy is None else dy, stats.contiguous()
        found = as_tuple(_gradient(dy, dh, h, stats, weight, ctx.bias_dtype, *ctx.arguments[4:], wanted))
        grads = _spread(found, wanted)
        return tuple(grads[i] if needs[i] else None for i in places)


def _spread(found, wanted):
    """Of input, weight, bias and residual, from what the backward gave."""
    dx, *sums = found
    dw = sums.pop(0) if wanted & DW else None
    return dx, dw, sums[0] if sums else None, dx


class _NormBackward(torch.autograd.Function):
    """The gradients as a function of dy, dh, h and weight, so that they have gradients themselves."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return _backward(*filled(ctx.arguments, tensors))

    @staticmethod
    def backward(ctx, *gradients):
        found = _second(gradients, *filled(ctx.arguments, ctx.saved_tensors))
        return tuple(grad for grad, given in zip(found, ctx.arguments) if given is ...)


def _explicit(dy, dh, h, weight, bias_dtype, dims, eps, rms, zero, wanted):
    """What _backward gives, of torch's own ops."""
    wide = accumulator(h.dtype)
    over, lead = tuple(range(-dims, 0)), tuple(range(h.dim() - dims))

    def mean(t: Tensor) -> Tensor:
        return t.mean(over, keepdim=True)

    u, x = dy.to(wide), h.to(wide)
    x = x if rms else x - mean(x)
    rstd = (mean(x.square()) + eps).rsqrt()
    x = x * rstd
    g = u if weight is None else u * (weight.to(wide) + float(zero))
    dx = g - x * mean(g * x)
    dx = rstd * (dx if rms else dx - mean(g))
    found = [(dx if dh is None else dx + dh).to(h.dtype)]
    for bit, terms, dtype in ((DW, u * x, weight is not None and weight.dtype), (DB, u, bias_dtype)):
        if wanted & bit:
            found.append((terms.sum(lead) if lead else terms).to(dtype))
    return found


def _second(gradients, dy, dh, h, stats, weight, *scalars):
    """Gradients of _backward for its tensors."""
    to_dy, to_dh, to_h, to_weight = gradients_through(
        lambda *given: _explicit(*given, *scalars), (dy, dh, h, weight), gradients
    )
    return to_dy, to_dh, to_h, None, to_weight, *[None] * len(scalars)


# --- torch.ops -------------------------------------------------------------------------------------------------------


def _rows_of(x: Tensor, dims: int) -> Any:
    return math.prod(x.shape[: x.dim() - dims])


def _fake(x, weight, bias, residual, dims, eps, rms, zero):
    wide = accumulator(x.dtype)
    outputs = [x.new_empty(x.shape) for _ in range(1 if residual is None else 2)]
    if 0 in x.shape[x.dim() - dims :]:
        return [*outputs, x.new_empty((1 if rms else 3, 0), dtype=wide)]
    return [*outputs, x.new_empty((1 if rms else 3, _rows_of(x, dims)), dtype=wide)]


def _fake_backward(dy, dh, h, stats, weight, bias_dtype, dims, eps, rms, zero, wanted):
    _require_alike(dy, h)
    shape = h.shape[h.dim() - dims :]
    found = [h.new_empty(h.shape)]
    found += [weight.new_empty(shape)] if wanted & DW else []
    return found + ([h.new_empty(shape, dtype=bias_dtype)] if wanted & DB else [])


def _setup_forward(ctx, inputs, output):
    x, weight, bias, residual, *ctx.scalars = inputs
    ctx.save_for_backward(x if residual is None else output[1], output[-1], weight)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _library_backward(ctx, grads):
    h, stats, weight = ctx.saved_tensors
    dy, dh = grads[0], grads[1] if len(grads) > 2 else None
    if dy is None and dh is None:
        return (None,) * 8
    dy = torch.zeros_like(h) if dy is None else dy
    _, *needs = ctx.needs_input_grad[:3]
    wanted = _wanted(*needs)
    found = _backward_op(dy, dh, h, stats, weight, ctx.bias_dtype, *ctx.scalars, wanted)
    grads = [grad if need else None for grad, need in zip(_spread(found, wanted), ctx.needs_input_grad)]
    return *grads, None, None, None, None


def _setup_backward(ctx, inputs, output):
    *tensors, ctx.bias_dtype, ctx.dims, ctx.eps, ctx.rms, ctx.zero, ctx.wanted = inputs
    ctx.save_for_backward(*tensors)


def _library_second(ctx, gradients):
    return _second(gradients, *ctx.saved_tensors, ctx.bias_dtype, ctx.dims, ctx.eps, ctx.rms, ctx.zero, ctx.wanted)


_SCALARS = "int dims, float eps, bool rms, bool zero"
_forward_op = define(
    f"layer_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, {_SCALARS}) -> Tensor[]",
    run=lambda *args: list(_forward(*args, True)),
    fake=_fake,
    setup_context=_setup_forward,
    backward=_library_backward,
)
_backward_op = define(
    "layer_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor stats, Tensor? weight, ScalarType? bias_dtype, "
    f"{_SCALARS}, int wanted) -> Tensor[]",
    run=lambda *args: list(as_tuple(_backward(*args))),
    fake=_fake_backward,
    setup_context=_setup_backward,
    backward=_library_second,
)


def _library(*args):
    y, *more, _ = _forward_op(*args)
    return (y, *more) if more else y


def _composite(x, weight, bias, residual, dims, eps, rms, zero):
    """Of torch's own op; in the sums' precision where it wants parameters of the input's dtype."""
    h = x if residual is None else x + residual
    weight = weight + 1 if zero and weight is not None else weight
    wide = accumulator(h.dtype)
    mixed = any(t is not None and t.dtype != h.dtype for t in (weight, bias))
    source, w, b = (t.to(wide) if mixed and t is not None else t for t in (h, weight, bias))
    shape = h.shape[h.dim() - dims :]
    y = F.rms_norm(source, shape, w, eps) if rms else F.layer_norm(source, shape, w, b, eps)
    y = y.to(h.dtype) if mixed else y
    return y if residual is None else (y, h)


_LAYER_NORM_IS_CAST, _RMS_NORM_IS_CAST = (
    torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")
    for name in ("layer_norm", "rms_norm")
)


def _autocast(*args):
    """torch's: all to float32 but what is double, on a GPU; a CPU's autocast leaves norms alone, older torch's rms_norm."""
    is_cast = _RMS_NORM_IS_CAST if args[6] else _LAYER_NORM_IS_CAST  # torch.compile of 2.11 can't index by a bool
    if not is_cast:
        return args

    def cast(t):
        return t.float() if isinstance(t, Tensor) and t.is_cuda and t.dtype in (torch.float16, torch.bfloat16) else t

    return tuple(map(cast, args))


def _again(*args):
    """The call once more, by what the kernels are told."""
    return _call(*args)


def _op(rms: bool) -> Op:
    return Op(_name(rms), lambda *args: (_again, args), _library, _composite, _autocast)


_OPS = (_op(False), _op(True))
_BACKWARD_OP = Op(
    "layer_norm_backward",
    lambda *args: (_backward_op, args),
    _backward_op,
    lambda dy, dh, h, stats, *rest: _explicit(dy, dh, h, *rest),
    autocast=lambda *args: args,
)
_call = routed(_forward, _Norm, lambda *args: _OPS[args[6]])
_gradient = routed(_backward, _NormBackward, lambda *args: _BACKWARD_OP)


# --- public ----------------------------------------------------------------------------------------------------------


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    zero_centered: bool = False,
    residual: Tensor | None = None,
) -> Any:
    """Layer normalization over the last dimensions: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    Args:
        input: Any shape and strides; float16 and bfloat16 (computed in float32), float32 or float64. Rows that aren't
            contiguous are copied first.
        normalized_shape: Sizes of the last dimensions, over which mean and variance are taken.
        weight: Of ``normalized_shape``, of any of these dtypes, whatever the input's. None counts as 1.
        bias: The same; None counts as 0.
        eps: Added to the variance.
        zero_centered: ``1 + weight`` is what counts.
        residual: Of input's shape and dtype: what is normalized is ``input + residual``.

    Returns:
        A contiguous tensor of the input's shape and dtype. With ``residual`` a pair: that, and ``input + residual``. A row with
        a NaN or an infinity is all NaN, and no other is.

    Raises:
        TypeError: What should be a tensor, a sequence of ints or a number isn't.
        RuntimeError: ``normalized_shape`` is empty or not how the input's shape ends; weight, bias or residual are of another
            shape, or the residual of another dtype.
        NotImplementedError: A tensor is integer, bool, complex or float8.
        DeviceError: ``input`` is on the CPU and no C++ compiler is there for the emulator, or on a device of another kind.

    Same as ``torch.nn.functional.layer_norm``; zero-centred weight as TransformerEngine's. The variance keeps its digits
    however far the mean is from 0. The gradients have the same bits every time.
    """
    if has_torch_function_variadic(input, weight, bias, residual):
        args, extras = (
            (input, normalized_shape, weight, bias, eps),
            dict(zero_centered=zero_centered, residual=residual),
        )
        return handle_torch_function(layer_norm, (input, weight, bias, residual), *args, **extras)
    dims = _checked("layer_norm", input, normalized_shape, weight, bias, residual)
    return _norm(input, weight, bias, residual, dims, _eps("layer_norm", 5, eps), False, bool(zero_centered))


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    zero_centered: bool = False,
    residual: Tensor | None = None,
) -> Any:
    """Normalization by the root mean square over the last dimensions: ``y = x / sqrt(mean(x^2) + eps) * weight``.

    ``input``, ``normalized_shape``, ``weight``, ``zero_centered``, ``residual``, errors: as of :func:`layer_norm`.

    Args:
        input: See there.
        normalized_shape: See there.
        weight: See there.
        eps: Added to the mean square. None: the smallest difference to 1 of what is computed in, ``finfo(float32).eps``, and
            for float64 its own; so torch has it.
        zero_centered: See there.
        residual: See there.

    Returns:
        A contiguous tensor of the input's shape and dtype, with ``residual`` and ``input + residual`` beside it.

    Raises:
        ValueError: ``normalized_shape`` has more dimensions than the input.

    Same as ``torch.nn.functional.rms_norm``; zero-centred weight as Gemma's.
    """
    if has_torch_function_variadic(input, weight, residual):
        args, extras = (input, normalized_shape, weight, eps), dict(zero_centered=zero_centered, residual=residual)
        return handle_torch_function(rms_norm, (input, weight, residual), *args, **extras)
    dims = _checked("rms_norm", input, normalized_shape, weight, None, residual)
    if eps is None:
        eps = _EPS64 if input.dtype == torch.float64 else _EPS32
    return _norm(input, weight, None, residual, dims, _eps("rms_norm", 4, eps), True, bool(zero_centered))


_EPS32, _EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def _norm(*args):
    if compiling():
        if args[0].is_cuda and torch.is_autocast_enabled("cuda"):
            args = _autocast(*args)
        return _library(*args)
    return _call(*args)


def _eps(name, position, eps):
    if isinstance(eps, (float, int)):
        return float(eps)
    raise TypeError(f"{name}(): argument 'eps' (position {position}) must be float, not {type(eps).__name__}")


def _checked(name, input, normalized_shape, weight, bias, residual):
    """How many dimensions are normalized, after a look at all that torch looks at."""
    for what, position, t in (("input", 1, input), ("weight", 3, weight), ("bias", 4, bias), ("residual", 5, residual)):
        if not (isinstance(t, Tensor) or (t is None and position > 1)):
            place = f" (position {position})" if position < 5 else ""
            raise TypeError(f"{name}(): argument '{what}'{place} must be Tensor, not {type(t).__name__}")
    what = f"{name}(): argument 'normalized_shape' (position 2) must be tuple of ints"
    if not isinstance(normalized_shape, (tuple, list)):
        raise TypeError(f"{what}, not {type(normalized_shape).__name__}")
    for i, size in enumerate(normalized_shape):
        if isinstance(size, bool) or not (isinstance(size, int) or hasattr(size, "__index__")):
            raise TypeError(f"{what}, but found element of type {type(size).__name__} at pos {i}")
    shape, dims = tuple(normalized_shape), len(normalized_shape)
    if dims == 0:
        raise RuntimeError(
            f"{name}: Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
            "normalized_shape = []"
        )
    if name == "rms_norm" and input.dim() < dims:
        raise ValueError(f"{name}: Input tensor must have at least {dims} dimensions, but got {input.dim()}")
    if input.dim() < dims or tuple(input.shape[input.dim() - dims :]) != shape:
        raise RuntimeError(
            f"{name}: Given normalized_shape={list(shape)}, expected input with shape "
            f"[{', '.join(map(str, ('*', *shape)))}], but got input of size{list(input.shape)}"
        )
    for what, t in (("weight", weight), ("bias", bias)):
        if t is not None and tuple(t.shape) != shape:
            raise RuntimeError(
                f"{name}: Expected {what} to be of same shape as normalized_shape, but got {what} of shape {list(t.shape)} and "
                f"normalized_shape = {list(shape)}"
            )
    if residual is not None and (residual.shape != input.shape or residual.dtype != input.dtype):
        raise RuntimeError(
            f"{name}: Expected residual to be as the input, but got {residual.dtype} of shape {list(residual.shape)} for "
            f"{input.dtype} of shape {list(input.shape)}"
        )
    return dims


# --- cases -----------------------------------------------------------------------------------------------------------


def _inputs(with_bias: bool) -> Callable[[str, torch.dtype], Iterator[Sample]]:
    shapes = (
        ("small", (4, 8), (8,)),
        ("odd width", (3, 37), (37,)),
        ("two dims", (2, 3, 4, 5), (4, 5)),
        ("all dims", (3, 5), (3, 5)),
        ("one row", (1000,), (1000,)),
        ("three columns", (5, 3), (3,)),
        ("wide", (2, 5000), (5000,)),
        ("no rows", (0, 8), (8,)),
        ("no columns", (4, 0), (0,)),
    )

    def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        def parameters(shape: Sequence[int]) -> list[Tensor]:
            return [torch.randn(shape, device=device).to(dtype) for _ in range(2 if with_bias else 1)]

        for label, shape, over in shapes:
            yield Sample(label, (row_values("random", shape, dtype, device), over, *parameters(over)))
        yield Sample("no weight", (row_values("random", (6, 50), dtype, device), (50,)))
        # A mean far off costs torch's float64 digits that ours keeps: it is no judge of it.
        for kind in ("constant",) if dtype == torch.float64 else ("offset", "constant"):
            yield Sample(kind, (row_values(kind, (4, 50), dtype, device), (50,), *parameters((50,))))

    return samples


def _bench(with_bias: bool) -> list[Any]:
    def arguments(x: Tensor) -> tuple[Any, ...]:
        n = x.shape[-1]
        return x, (n,), *(torch.randn(n, device=x.device).to(x.dtype) for _ in range(2 if with_bias else 1))

    grad_of = (0, 2, 3) if with_bias else (0, 2)
    return row_bench((768, 1024, 4096, 8192, 16384, 65536), arguments=arguments, grad_of=grad_of)


# dx is the difference of larger terms.
_SLACK = (1.0, 4.0)

CASES = (
    op_cases(public=layer_norm, reference=F.layer_norm, inputs=_inputs(True), bench=_bench(True), slack=_SLACK),
    op_cases(public=rms_norm, reference=F.rms_norm, inputs=_inputs(False), bench=_bench(False), slack=_SLACK),
)
