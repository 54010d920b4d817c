"""softmax and log_softmax along one dimension, with their gradients.

    fwd   y = exp(x - max(x)) / sum(exp(x - max(x)))           log: y = (x - max(x)) - log(sum(exp(x - max(x))))
    bwd   dx = y * (dy - sum(dy * y))                          log: dx = dy - exp(y) * sum(dy)

Four kernels a direction, by what the strides allow (csrc/templates/softmax.cuh): rows held in registers, columns held in
registers, rows too long for that (two passes through scratch), and any strides whatever.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._device import Device, device_of
from .._library import define
from .._plan import Spec, canonical, empty, i32, i64, plan, planned, require_dtype, scratch, struct
from .._rows import (
    DTYPES,
    ITEMSIZE,
    THREADS,
    ColumnConfig,
    Layout,
    RingConfig,
    RowConfig,
    RowKernel,
    SpanConfig,
    any_team,
    ceil_div,
    count,
    rows_struct,
    shared_bytes,
)  # fmt: skip
from .._template import template
from .._torch import Op, accumulator, compiling, may_write_directly, routed, write_into
from ..testing import inner_bench, op_cases, row_bench, row_inputs

# --- kernels ---------------------------------------------------------------------------------------------------------


def _value_bytes(name: str, layout: Layout) -> int:
    """What a row is reduced to: a maximum and a sum forward, a sum backward; in double for double."""
    return (2 if name == "fwd" else 1) * (8 if layout.tensors[1].itemsize == 8 else 4)


def _row_launch(name: str, log: bool, layout: Layout, k: RowKernel) -> Any:
    out, *inputs = layout.tensors
    dims, _ = rows_struct(layout.rows, len(layout.tensors))
    kernel = template("softmax").kernel(name, T=inputs[0].dtype, Out=out.dtype, kLog=log, **k.params(dims))
    return k.launch(kernel, layout, _value_bytes(name, layout), layout.tensors)


def _column_launch(name: str, log: bool, layout: Layout, c: ColumnConfig, device: Device) -> Any:
    out, *inputs = layout.tensors
    n_inner = layout.inner[-1][0]
    dims, fields = rows_struct(layout.outer + layout.inner[:-1], len(layout.tensors))
    n_across = ceil_div(n_inner, c.across * c.vec)
    tiles = n_across * count(layout.outer + layout.inner[:-1])
    fields += [i64(s) for s in layout.strides]
    fields += [i64(layout.n), i64(n_inner), i64(n_across), i64(tiles)]
    kernel = template("softmax").kernel(f"{name}_cols", **c.params(inputs[0].dtype, out.dtype, log, dims))
    clusters = max(device.sms // c.cluster, 1) * c.blocks_per_sm if c.blocks_per_sm else 2**30 // c.cluster
    return kernel.launch(
        grid=min(tiles, clusters) * c.cluster,
        block=c.threads,
        cluster=c.cluster,
        smem=c.shared_bytes(inputs[0].itemsize, len(inputs)),
        args=(out, *inputs, struct(*fields)),
    )


def _span_launches(name: str, log: bool, layout: Layout, c: SpanConfig) -> tuple[Any, Any]:
    out, *inputs = layout.tensors
    dims, fields = rows_struct(layout.rows, len(layout.tensors))
    value = _value_bytes(name, layout)
    partial = scratch(layout.n_rows * c.spans * value)
    sizes = (i64(layout.n_rows), i64(c.cells))
    strides = [i64(c.vec if layout.unit else s) for s in layout.strides]
    spans = (i64(c.span), i32(c.spans))
    common: dict[str, Any] = dict(
        grid=min(layout.n_rows * c.spans, 2**31 - 1), block=THREADS, smem=shared_bytes(THREADS, value)
    )
    k = template("softmax")
    types = dict(T=inputs[0].dtype, Out=out.dtype)
    logs = dict(kLog=log) if name == "bwd" else {}
    part = k.kernel(f"{name}_part", **types, **logs, kVec=c.vec, kDims=dims)
    apply = k.kernel(f"{name}_apply", **types, kLog=log, kVec=c.vec, kDims=dims)
    return (
        part.launch(args=(partial, *inputs, struct(*fields), *sizes, *strides[1:], *spans), **common),
        apply.launch(args=(out, *inputs, partial, struct(*fields), *sizes, *strides, *spans), **common),
    )


def _any_launch(name: str, log: bool, layout: Layout) -> Any:
    out, *inputs = layout.tensors
    dims, fields = rows_struct(layout.rows, len(layout.tensors))
    team = any_team(layout.n)
    kernel = template("softmax").kernel(
        f"{name}_any", T=inputs[0].dtype, Out=out.dtype, kLog=log, kTeam=team, kDims=dims
    )
    return kernel.launch(
        grid=min(ceil_div(layout.n_rows, 256 // team), 2**31 - 1),
        block=256,
        smem=shared_bytes(256, _value_bytes(name, layout)),
        args=(out, *inputs, struct(*fields), i64(layout.n_rows), i64(layout.n), *(i64(s) for s in layout.strides)),
    )


# --- planners --------------------------------------------------------------------------------------------------------

SHORT = 16  # rows below it are left to the kernels for any strides: there is no vector to speak of
LONG = 1 << 18  # columns from which on a strided row is worth several blocks


def _launches(name: str, log: bool, layout: Layout, device: Device) -> tuple[Any, ...]:
    if layout.unit and layout.n >= SHORT:
        row = RowKernel.pick(layout, device)
        if row is not None:
            return (_row_launch(name, log, layout, row),)
        return _span_launches(name, log, layout, SpanConfig.pick(layout))
    columns = ColumnConfig.pick(layout, device)
    if columns is not None:
        return (_column_launch(name, log, layout, columns, device),)
    if layout.n >= LONG:
        return _span_launches(name, log, layout, SpanConfig.pick(layout))
    return (_any_launch(name, log, layout),)


# Element types of the inputs and the output: equal, or as torch's dtype=float32 has it for float16 and bfloat16.
_TYPES = {
    "fwd": [*((t, t) for t in DTYPES), ("float16", "float32"), ("bfloat16", "float32")],
    "bwd": [*((t, t) for t in DTYPES), ("float32", "float16"), ("float32", "bfloat16")],
}


def _require_types(name: str, source: Spec, out: Spec) -> None:
    if (source.dtype, out.dtype) not in _TYPES[name]:
        raise RuntimeError(f"softmax: no kernel takes {source.dtype} to {out.dtype}")


def _require_alike(dy: Spec | Tensor, y: Spec | Tensor) -> None:
    if dy.shape != y.shape or dy.dtype != y.dtype:
        raise RuntimeError(
            f"softmax_backward: the gradient is {dy.dtype} of {dy.shape}, but the result {y.dtype} of {y.shape}"
        )


def all_kernels(device: Device, dims: Sequence[int] = (1,)) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kernel and its template arguments that the planners can ask for, with these counts of outer dims."""
    for name, log, d in ((name, log, d) for name in _TYPES for log in (False, True) for d in dims):
        for dtype, out_dtype in _TYPES[name]:
            sizes = ITEMSIZE[dtype], ITEMSIZE[out_dtype]
            streams = 1 if name == "fwd" else 2
            # A config changes where a row outgrows it: at multiples of a vector of a warp, or of small teams.
            lengths = [*range(SHORT, 2048), *range(2048, 16 * THREADS * 64 + 1, 512)]
            for aligned in (False, True):
                for cfg in dict.fromkeys(
                    RowConfig.pick(n, *sizes, streams, device.max_cluster, aligned) for n in lengths
                ):
                    for ringed in (False, True) if device.bulk_copy and sizes[0] < 8 else (False,):
                        if cfg is not None:
                            ring = RingConfig(1, 0, 0, False) if ringed else None
                            yield name, dict(T=dtype, Out=out_dtype, kLog=log, **RowKernel(cfg, ring).params(d))
            for columns in dict.fromkeys(_column_configs(dtype, out_dtype, streams, device)):
                yield f"{name}_cols", columns.params(dtype, out_dtype, log, d)
            types = dict(T=dtype, Out=out_dtype)
            for team in dict.fromkeys(any_team(n) for n in (1, 5, 9, 17, 33, 65, 2049)):
                yield f"{name}_any", dict(**types, kLog=log, kTeam=team, kDims=d)
            vec = 16 // max(sizes)
            while vec >= 1:
                if name == "bwd" or not log:
                    yield f"{name}_part", dict(**types, **(dict(kLog=log) if name == "bwd" else {}), kVec=vec, kDims=d)
                yield f"{name}_apply", dict(**types, kLog=log, kVec=vec, kDims=d)
                vec //= 2


def _column_configs(dtype: str, out_dtype: str, streams: int, device: Device) -> Iterator[ColumnConfig]:
    for n in (2**k for k in range(15)):
        for n_inner in (8, 9, 16, 17, 32, 33, 64, 65, 128):
            for align in (1, 16):
                tensors = [Spec(t, (n, n_inner), (n_inner, 1), 0, align) for t in (out_dtype, *[dtype] * streams)]
                config = ColumnConfig.pick(Layout.of(tensors, 0), device)
                if config is not None:
                    yield config


@planned
def _forward(x: Spec, dim: int, log: bool, dtype: str | None = None, out: Spec | None = None) -> Any:
    """y (``out``, or new) of ``x``; ``dtype`` is the output's, where it isn't x's: float32 from float16 or bfloat16."""
    dim = canonical(dim, x.ndim)
    require_dtype("log_softmax" if log else "softmax", x.dtype, DTYPES)
    y = empty(x.shape, dtype or x.dtype, x) if out is None else out
    _require_types("fwd", x, y)
    if x.numel == 0:
        return plan(y)
    layout = Layout.of((y, x), dim)
    return plan(y, *_launches("fwd", log, layout, device_of(x)))


@planned
def _backward(dy: Spec, y: Spec, dim: int, log: bool, dtype: str | None = None) -> Any:
    """dx of ``dy`` and ``y``; ``dtype`` is dx's, where it isn't y's."""
    dim = canonical(dim, y.ndim)
    require_dtype("softmax_backward", dy.dtype, DTYPES)
    _require_alike(dy, y)
    dx = empty(y.shape, dtype or y.dtype, y)
    _require_types("bwd", y, dx)
    if y.numel == 0:
        return plan(dx)
    layout = Layout.of((dx, dy, y), dim)
    return plan(dx, *_launches("bwd", log, layout, device_of(y)))


# --- autograd --------------------------------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        _, dim, log, dtype = ctx.arguments
        y = _forward(x, dim, log, dtype)
        ctx.save_for_backward(y)  # not x: y is enough
        if dtype is not None:
            ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        _, dim, log, dtype = ctx.arguments
        return _gradient(dy, y, dim, log, y.dtype if dtype is None else ctx.dtype)


class _SoftmaxBackward(torch.autograd.Function):
    """The gradient as a function of dy and y, so that it has a gradient itself."""

    @staticmethod
    def forward(ctx, dy, y):
        ctx.save_for_backward(dy, y)
        return _backward(dy, y, *ctx.arguments[2:])

    @staticmethod
    def backward(ctx, ddx):
        dy, y = ctx.saved_tensors
        _, _, dim, log, _ = ctx.arguments
        return _second(ddx, dy, y, dim, log)


def _second(ddx: Tensor, dy: Tensor, y: Tensor, dim: int, log: bool) -> tuple[Tensor, Tensor]:
    """Gradients of _backward for dy and y, of torch's own ops, which torch can differentiate on."""
    wide = accumulator(y.dtype)
    g, u, v = ddx.to(wide), dy.to(wide), y.to(wide)
    if log:
        p = v.exp()
        to_dy = g - (g * p).sum(dim, keepdim=True)
        to_y = -g * p * u.sum(dim, keepdim=True)
    else:
        to_dy = v * (g - (g * v).sum(dim, keepdim=True))
        to_y = g * (u - (u * v).sum(dim, keepdim=True)) - u * (g * v).sum(dim, keepdim=True)
    return to_dy.to(dy.dtype), to_y.to(y.dtype)


# --- torch.ops -------------------------------------------------------------------------------------------------------


def _setup_forward(ctx, inputs, output):
    x, ctx.dim, ctx.log, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _library_backward(ctx, dy):
    (y,) = ctx.saved_tensors
    return _backward_op(dy, y, ctx.dim, ctx.log, ctx.dtype), None, None, None


def _setup_backward(ctx, inputs, output):
    dy, y, ctx.dim, ctx.log, _ = inputs
    ctx.save_for_backward(dy, y)


def _library_second(ctx, ddx):
    dy, y = ctx.saved_tensors
    return (*_second(ddx, dy, y, ctx.dim, ctx.log), None, None, None)


def _fake(x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    canonical(dim, x.dim())
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _fake_backward(dy: Tensor, y: Tensor, dim: int, log: bool, dtype: torch.dtype) -> Tensor:
    _require_alike(dy, y)
    return _fake(y, dim, dtype)


_forward_op = define(
    "softmax(Tensor x, int dim, bool log, ScalarType? dtype) -> Tensor",
    run=_forward,
    fake=lambda x, dim, log, dtype: _fake(x, dim, dtype),
    setup_context=_setup_forward,
    backward=_library_backward,
)
_backward_op = define(
    "softmax_backward(Tensor dy, Tensor y, int dim, bool log, ScalarType dtype) -> Tensor",
    run=_backward,
    fake=_fake_backward,
    setup_context=_setup_backward,
    backward=_library_second,
)


def _to_float32(x, dim, log, dtype):
    """torch's autocast: half in, float out, unless a dtype was asked for or x is double."""
    return x, dim, log, dtype or (torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None)


def _torch_forward(x, dim, log, dtype):
    return (F.log_softmax if log else F.softmax)(x, dim, dtype=dtype)


def _torch_backward(dy, y, dim, log, dtype):
    op = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    return op(dy, y, dim, dtype)


def _public(x, dim, log, dtype):
    return (log_softmax if log else softmax), (x, dim, dtype)


_OPS = tuple(Op(name, _public, _forward_op, _torch_forward, _to_float32) for name in ("softmax", "log_softmax"))
_BACKWARD_OP = Op(
    "softmax_backward", lambda *args: (_backward_op, args), _backward_op, _torch_backward, autocast=lambda *args: args
)

_call = routed(_forward, _Softmax, lambda x, dim, log, dtype: _OPS[log])
_gradient = routed(_backward, _SoftmaxBackward, lambda *args: _BACKWARD_OP)


# --- public ----------------------------------------------------------------------------------------------------------


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Softmax along a dimension: ``y = exp(x - max(x)) / sum(exp(x - max(x)))``.

    Args:
        input: Any shape and strides; float16 and bfloat16 (computed in float32), float32 or float64.
        dim: The dimension whose values sum to 1.
        dtype: If given, the dtype of the result; the input counts as cast to it first. Half to float32 costs no extra pass.
        out: Where to write; of any strides, may be ``input`` itself. Has no gradient.

    Returns:
        A contiguous tensor of the input's shape. A slice that is -inf throughout, or holds a NaN or +inf, is all NaN.

    Raises:
        IndexError: ``dim`` is out of range.
        TypeError: ``input`` isn't a tensor.
        NotImplementedError: ``input`` is integer, bool, complex or float8 and ``dtype`` is not given.
        RuntimeError: ``out`` has another dtype or device, or overlaps itself.
        DeviceError: ``input`` is on the CPU and no C++ compiler is there for the emulator, or on a device of another kind.

    Same as ``torch.softmax``. Forward and backward are one kernel each; the backward keeps the result only.
    """
    if dtype is None and out is None and dim.__class__ is int and not compiling():
        return _call(input, dim, False, None)  # the usual call, without another frame
    return _softmax(input, dim, False, dtype, out)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Logarithm of the softmax along a dimension: ``y = (x - max(x)) - log(sum(exp(x - max(x))))``.

    Exact at large offsets: adding 1e4 to every ``x`` changes no bit that the input's own rounding has not changed.
    Arguments, result and errors are those of :func:`softmax`. Same as ``torch.log_softmax``.
    """
    if dtype is None and out is None and dim.__class__ is int and not compiling():
        return _call(input, dim, True, None)
    return _softmax(input, dim, True, dtype, out)


def _softmax(x, dim, log, dtype, out):
    name = "log_softmax" if log else "softmax"
    _require_kind(name, "input", 1, x, Tensor)
    if dtype is not None:
        _require_kind(name, "dtype", 3, dtype, torch.dtype)
        x, dtype = _cast(x, dtype)
    if isinstance(dim, Tensor):  # a 0-d one of integers counts as its number
        dim = operator.index(dim)
    if out is not None:
        _require_kind(name, "out", 4, out, Tensor)
        return _into(out, x, canonical(dim, x.dim()), log, dtype)
    if compiling():
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            x, dim, log, dtype = _to_float32(x, dim, log, dtype)
        return _forward_op(x, dim, log, dtype)
    return _call(x, dim, log, dtype)


def _require_kind(function, argument, position, value, kind):
    if not isinstance(value, kind):
        raise TypeError(
            f"{function}(): argument '{argument}' (position {position}) must be {kind.__name__}, not {type(value).__name__}"
        )


def _cast(x, dtype):
    """The cast that ``dtype`` asks for, unless the kernel does it on the way."""
    if x.dtype == dtype:
        return x, None
    if dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16):
        return x, dtype
    return x.to(dtype), None


def _into(out, x, dim, log, dtype):
    def compute(target):
        if not compiling() and may_write_directly(target, x):
            return _forward(x.detach(), dim, log, dtype, target)
        return _softmax(x.detach(), dim, log, dtype, None)

    return write_into(out, "log_softmax" if log else "softmax", dtype or x.dtype, x, compute)


# --- cases -----------------------------------------------------------------------------------------------------------

CASES = (
    op_cases(
        public=softmax,
        reference=F.softmax,
        inputs=row_inputs(),
        bench=[*row_bench(), *row_bench((4096,), group="offset view", offset=1), *inner_bench((64, 1024, 512), dim=1)],
    ),
    op_cases(
        public=log_softmax,
        reference=F.log_softmax,
        inputs=row_inputs(),
        bench=row_bench((1024, 4096, 32768, 131072)),
    ),
)
