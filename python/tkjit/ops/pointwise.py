"""add, mul, copy, activations and gates: each an expression for :func:`tkjit.elementwise`.

The functions of csrc/templates/pointwise.cuh tell the formulas. All broadcast, take any strides, and give what torch's own of the
same names give, but for infinities, where they are the limits (torch's gelu and silu of -inf are NaN).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import FLOATING, compiling, gradients_through, may_write_directly, refusing_as
from ..kernel import Elementwise, elementwise
from ..testing import DTYPE_NAMES, BenchCase, OpCases, Sample, op_cases

_INCLUDE = '#include "pointwise.cuh"\n'


def _op(
    name: str,
    text: str,
    grad: str,
    composite: Callable[..., Any],
    public: Callable[..., tuple[Callable[..., Any], tuple]],
    inputs: str | None = None,
) -> Elementwise:
    return elementwise(text, grad=grad, inputs=inputs, preamble=_INCLUDE, name=name, composite=composite, public=public)


# --- arithmetic ------------------------------------------------------------------------------------------------------

_plus = _op("add", "T y = a + b", "T da = dy; T db = dy;", torch.add, lambda *args: (add, args))
_add = _op(
    "add", "T y = a + alpha * b", "T da = dy; T db = alpha * dy;", lambda a, b, alpha: torch.add(a, b, alpha=alpha),
    lambda *args: (functools.partial(add, alpha=args[2]), args[:2]), "T a, T b, T alpha",
)  # fmt: skip
_mul = _op("mul", "T y = a * b", "T da = dy * b; T db = dy * a;", torch.mul, lambda *args: (mul, args))
_copy = _op("copy", "T y = x", "T dx = dy", torch.clone, lambda *args: (copy, args))


def _require_tensor(name: str, *values: Any) -> None:
    for position, value in enumerate(values, 1):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name}(): argument 'input' (position {position}) must be Tensor, not {type(value).__name__}"
            )


def add(input: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    """``input + alpha * other``, which broadcast. Same as ``torch.add``.

    Args:
        input: A tensor of any shape, strides and dtype; complex numbers are torch's business.
        other: Another, or a number.
        alpha: A number.

    Returns:
        A tensor of the shape that both broadcast to, of torch's dtype and layout.

    Raises:
        TypeError: ``input`` is no tensor, ``other`` neither a tensor nor a number.
        RuntimeError: Shapes that don't broadcast.
    """
    _require_tensor("add", input)
    return _plus(input, other) if alpha == 1 else _add(input, other, alpha)


def mul(input: Tensor, other: Any) -> Tensor:
    """``input * other``, which broadcast. Same as ``torch.mul``; arguments and errors as :func:`add`."""
    _require_tensor("mul", input)
    return _mul(input, other)


def copy(input: Tensor) -> Tensor:
    """A new tensor of the same values and, where it is dense, layout. Same as ``torch.clone``."""
    _require_tensor("copy", input)
    return _copy(input)


# --- activations -----------------------------------------------------------------------------------------------------


def _activation(
    name: str,
    text: str,
    grad: str,
    composite: Callable[..., Any],
    public: Callable[..., tuple[Callable[..., Any], tuple]],
    numbers: str = "",
) -> tuple[Elementwise, Elementwise]:
    """The op of an input, ``{x}`` in the texts, and of an input plus a bias."""

    def public_of_sum(x: Tensor, bias: Tensor, *rest: Any) -> tuple[Callable[..., Any], tuple]:
        function, args = public(x, *rest)
        return functools.partial(function, bias=bias), args

    of_sum = "T z = x + bias; "
    return (
        _op(name, f"T y = {text.format(x='x')}", f"T dx = {grad.format(x='x')}", composite, public, f"T x{numbers}"),
        _op(
            name, f"{of_sum}T y = {text.format(x='z')}", f"{of_sum}T dx = {grad.format(x='z')}; T dbias = dx;",
            lambda x, bias, *rest: composite(x + bias, *rest), public_of_sum, f"T x, T bias{numbers}",
        ),
    )  # fmt: skip


_relu = _activation("relu", "pointwise::relu({x})", "y <= T(0) ? T(0) : dy", F.relu, lambda x: (relu, (x,)))
_gelu = _activation(
    "gelu", "pointwise::gelu<kFast>({x})", "dy * pointwise::gelu_slope<kFast>({x})", F.gelu, lambda x: (gelu, (x,))
)
_tanh_gelu = _activation(
    "gelu", "pointwise::tanh_gelu<kFast>({x})", "dy * pointwise::tanh_gelu_slope<kFast>({x})",
    functools.partial(F.gelu, approximate="tanh"), lambda x: (gelu, (x, "tanh")),
)  # fmt: skip
_silu = _activation(
    "silu", "pointwise::silu<kFast>({x})", "dy * pointwise::silu_slope<kFast>({x})", F.silu, lambda x: (silu, (x,))
)
_sigmoid = _activation(
    "sigmoid", "pointwise::sigmoid<kFast>({x})", "dy * y * (T(1) - y)", torch.sigmoid, lambda x: (sigmoid, (x,))
)
_tanh = _activation("tanh", "::tanh({x})", "dy * (T(1) - y * y)", torch.tanh, lambda x: (tanh, (x,)))
_mish = _activation("mish", "pointwise::mish({x})", "dy * pointwise::mish_slope({x})", F.mish, lambda x: (mish, (x,)))
_leaky_relu = _activation(
    "leaky_relu", "{x} > T(0) ? {x} : {x} * slope", "{x} > T(0) ? dy : dy * slope", F.leaky_relu,
    lambda *args: (leaky_relu, args), ", T slope",
)  # fmt: skip
_softplus = _activation(
    "softplus", "pointwise::softplus({x}, beta, threshold)", "dy * pointwise::softplus_slope({x}, beta, threshold)", F.softplus,
    lambda *args: (softplus, args), ", T beta, T threshold",
)  # fmt: skip


def _applied(
    ops: tuple[Elementwise, Elementwise], x: Tensor, bias: Tensor | None, inplace: bool, *numbers: float
) -> Tensor:
    plain, of_sum = ops
    _require_tensor(plain.text.name, x)
    if bias is not None:
        return _applied_to_sum(of_sum, x, bias, inplace, *numbers)
    if type(x) is Tensor and x.dtype not in FLOATING:
        torchs: Any = plain.composite
        return refusing_as(plain.text.name, functools.partial(torchs, inplace=True) if inplace else torchs, x, *numbers)
    return plain.in_place(x, *numbers) if inplace else plain(x, *numbers)


def _applied_to_sum(op: Elementwise, x: Tensor, bias: Tensor, inplace: bool, *numbers: float) -> Tensor:
    name = op.text.name
    if not isinstance(bias, Tensor):
        raise TypeError(f"{name}(): argument 'bias' must be Tensor, not {type(bias).__name__}")
    if torch.broadcast_shapes(x.shape, bias.shape) != x.shape:
        raise RuntimeError(f"{name}(): a bias of {tuple(bias.shape)} doesn't broadcast to the input's {tuple(x.shape)}")
    if type(x) is type(bias) is Tensor and not {x.dtype, bias.dtype} <= {*FLOATING}:
        y = refusing_as(name, op.composite, x, bias, *numbers)  # type: ignore[arg-type]
        return x.copy_(y) if inplace else y
    if not inplace:
        return op(x, bias, *numbers)
    if compiling() or not may_write_directly(x, bias):  # the bias needs a gradient, or lies in x
        return x.copy_(op(x.clone(), bias, *numbers))
    return op.in_place(x, bias, *numbers)


def relu(input: Tensor, inplace: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """``max(x, 0)``; NaN stays NaN. Same as ``F.relu``.

    Args:
        input: A tensor of any shape and strides; other than float16, bfloat16, float32 and float64 are torch's business.
        inplace: Write over the input.
        bias: Added to the input first, in float32; it broadcasts to the input's shape.

    Returns:
        A tensor like ``input``, or the input itself.

    Raises:
        TypeError: ``input`` or ``bias`` is no tensor.
        RuntimeError: A ``bias`` that doesn't broadcast to the input.
        Exception: What torch raises for a dtype that it has no kernel for either.
    """
    return _applied(_relu, input, bias, inplace)


def gelu(input: Tensor, approximate: str = "none", *, bias: Tensor | None = None) -> Tensor:
    """``x P(x)``, P the normal distribution; with ``approximate="tanh"`` ``x sigmoid(2u)``, ``u = sqrt(2/pi) (x + 0.044715 x^3)``.

    Args:
        input: As :func:`relu`.
        approximate: ``"none"`` or ``"tanh"``.
        bias: As :func:`relu`.

    Returns:
        A tensor like ``input``.

    Raises:
        RuntimeError: Another ``approximate``. Others as :func:`relu`.

    Same as ``F.gelu``, but 0 at -inf. Hendrycks and Gimpel, "Gaussian error linear units", 2016.
    """
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    return _applied(_tanh_gelu if approximate == "tanh" else _gelu, input, bias, False)


def silu(input: Tensor, inplace: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """``x sigmoid(x)``. Same as ``F.silu``, but 0 at -inf; arguments and errors as :func:`relu`."""
    return _applied(_silu, input, bias, inplace)


def sigmoid(input: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """``1 / (1 + e^-x)``. Same as ``torch.sigmoid`` of floating tensors; errors as :func:`relu`."""
    return _applied(_sigmoid, input, bias, False)


def tanh(input: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """The hyperbolic tangent. Same as ``torch.tanh`` of floating tensors; errors as :func:`relu`."""
    return _applied(_tanh, input, bias, False)


def mish(input: Tensor, inplace: bool = False, *, bias: Tensor | None = None) -> Tensor:
    """``x tanh(log(1 + e^x))``. Same as ``F.mish``; arguments and errors as :func:`relu`."""
    return _applied(_mish, input, bias, inplace)


def leaky_relu(
    input: Tensor, negative_slope: float = 0.01, inplace: bool = False, *, bias: Tensor | None = None
) -> Tensor:
    """``x`` above 0, else ``negative_slope * x``. Same as ``F.leaky_relu``; arguments and errors as :func:`relu`."""
    return _applied(_leaky_relu, input, bias, inplace, float(negative_slope))


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0, *, bias: Tensor | None = None) -> Tensor:
    """``log(1 + e^(beta x)) / beta``; ``x`` where ``beta x > threshold``. Same as ``F.softplus``; errors as :func:`relu`."""
    return _applied(_softplus, input, bias, False, float(beta), float(threshold))


# --- gates -----------------------------------------------------------------------------------------------------------


def _gate(
    name: str,
    function: str,
    slope: str,
    activation: Callable[[Tensor], Tensor],
    public: Callable[[], Callable[..., Tensor]],
) -> tuple[Elementwise, Elementwise]:
    """The op of a gate, ``{}`` in the texts, and what goes through it; and of both plus biases."""

    def op(sums: str, gate: str, up: str, inputs: str, more: str) -> Elementwise:
        f, df = function.format(gate), slope.format(gate)
        return _op(
            name, f"{sums}T y = {f} * {up}", f"{sums}T dgate = dy * {up} * {df}; T dup = dy * {f}; {more}",
            functools.partial(_gate_of, activation),
            lambda gate, up, *biases: (functools.partial(public(), bias=biases) if biases else public(), (gate, up)), inputs,
        )  # fmt: skip

    return (
        op("", "gate", "up", "T gate, T up", ""),
        op(
            "T a = gate + gate_bias; T b = up + up_bias; ", "a", "b", "T gate, T up, T gate_bias, T up_bias",
            "T dgate_bias = dgate; T dup_bias = dup;",
        ),
    )  # fmt: skip


def _gate_of(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, *biases: Tensor) -> Tensor:
    """Of torch's own ops."""
    if biases:
        gate, up = gate + biases[0], up + biases[1]
    return activation(gate) * up


_swiglu = _gate("swiglu", "pointwise::silu<kFast>({})", "pointwise::silu_slope<kFast>({})", F.silu, lambda: swiglu)
_geglu = _gate("geglu", "pointwise::gelu<kFast>({})", "pointwise::gelu_slope<kFast>({})", F.gelu, lambda: geglu)
_reglu = _gate("reglu", "pointwise::relu({})", "T({} > T(0) ? 1 : 0)", F.relu, lambda: reglu)


class _Packed(torch.autograd.Function):
    """A gate of a tensor's halves, whose gradient is one tensor too: written where it belongs, not put together of two."""

    @staticmethod
    def forward(ctx: Any, op: Elementwise, packed: Tensor, bias: Tensor | None) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(packed, bias)
        return op.raw(*_halves(packed, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        packed, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *gradients_through(lambda *whole: ctx.op.composite(*_halves(*whole)), (packed, bias), dy)
        values = dict(zip((name for _, name in ctx.op.text.inputs), _halves(packed, bias)), dy=dy)
        dx = torch.empty_like(packed, memory_format=torch.contiguous_format)
        gradient = ctx.op.grad.of_outputs(frozenset(("dgate", "dup")))
        gradient.raw(*(values[name] for _, name in gradient.text.inputs), *_halves(dx))
        return None, dx, None if bias is None else dx.sum_to_size(bias.shape)


def _halves(*packed: Tensor | None) -> list[Tensor]:
    return [half for t in packed if t is not None for half in t.tensor_split(2, -1)]


def _gated(gate_op: tuple[Elementwise, Elementwise], gate: Tensor, up: Tensor | None, bias: Any) -> Tensor:
    plain, of_sums = gate_op
    op = plain if bias is None else of_sums  # torch.compile of 2.11 can't index by a bool
    name = op.text.name
    _require_tensor(name, gate, gate if up is None else up)
    packed = up is None
    if bias is not None and not all(isinstance(b, Tensor) for b in ((bias,) if packed else bias)):
        raise TypeError(f"{name}(): bias must be a tensor, beside two tensors a pair of them")
    if packed:
        for what, t in (("gate and up", gate), ("their biases", bias)):
            if t is not None and (t.dim() == 0 or t.shape[-1] % 2 or t.shape[-1] != gate.shape[-1]):
                raise RuntimeError(f"{name}(): {what} are halves of the last dimension; {tuple(t.shape)} has none")
        tensors = [gate] if bias is None else [gate, bias]
        if torch.broadcast_shapes(*(t.shape for t in tensors)) != gate.shape:
            raise RuntimeError(f"{name}(): a bias of {tuple(bias.shape)} doesn't broadcast to {tuple(gate.shape)}")
        halves = _halves(*tensors)
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        alike = all(t.dtype == gate.dtype in FLOATING for t in tensors)
        if differentiable and alike and not compiling() and may_write_directly(gate, gate):
            return _Packed.apply(op, gate, bias)
    else:
        halves = [gate, up, *(() if bias is None else bias)]
    if all(type(t) is Tensor for t in halves) and not {t.dtype for t in halves} <= {*FLOATING}:
        return refusing_as(name, op.composite, *halves)  # type: ignore[arg-type]
    return op(*halves)


def swiglu(gate: Tensor, up: Tensor | None = None, *, bias: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``silu(gate) * up``; without ``up`` the two are the halves of ``gate``'s last dimension.

    Args:
        gate: A tensor of any strides; of which dtype, see :func:`relu`.
        up: Another; they broadcast.
        bias: Added first, in float32: a tensor that broadcasts to a packed ``gate``'s shape, as wide as that; beside ``up`` a pair,
            one for each.

    Returns:
        A tensor of the shape that both broadcast to.

    Raises:
        TypeError: What should be a tensor isn't.
        RuntimeError: Shapes that don't broadcast; a last dimension without halves.

    Noam Shazeer, "GLU variants improve transformer", 2020.
    """
    return _gated(_swiglu, gate, up, bias)


def geglu(gate: Tensor, up: Tensor | None = None, *, bias: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``gelu(gate) * up``; see :func:`swiglu`."""
    return _gated(_geglu, gate, up, bias)


def reglu(gate: Tensor, up: Tensor | None = None, *, bias: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``relu(gate) * up``; see :func:`swiglu`."""
    return _gated(_reglu, gate, up, bias)


# --- cases -----------------------------------------------------------------------------------------------------------

BYTES = 512 * 10**6  # of each tensor: far beyond any L2


def _inputs(n: int, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    shapes = (
        ("small", ((4, 8), (4, 8))), ("row", ((3, 37), (37,))), ("column", ((5, 64), (5, 1))), ("0-D", ((), ())),
        ("wide", ((2, 5000), (2, 5000))), ("4-D", ((2, 3, 4, 5), (3, 1, 5))), ("none", ((0, 8), (8,))),
    )  # fmt: skip
    for label, sizes in shapes:
        yield Sample(label, tuple(torch.randn(s, device=device, dtype=torch.float32).to(dtype) for s in sizes[:n]))


def _random(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def _bench(n: int) -> Iterator[BenchCase]:
    """Two sizes, and a row that is broadcast. Bytes: each input once, the output once; backward dy, what the slope needs, dx."""
    for dtype in (torch.bfloat16, torch.float32):
        for data in (64 * 10**6, BYTES):
            shape = (data // dtype.itemsize // 4096, 4096)
            size = math.prod(shape) * dtype.itemsize
            yield BenchCase(
                label=f"{n} in {'x'.join(map(str, shape))} {DTYPE_NAMES[dtype]}", group="whole", x=data / 1e6, dtype=dtype,
                make=functools.partial(_random, (shape,) * n, dtype), forward_bytes=(n + 1) * size,
                backward_bytes=(3 if n == 1 else 5) * size, batch=shape[0], grad_of=tuple(range(n)),
            )  # fmt: skip


def _cases(public: Callable[..., Any], composite: Callable[..., Any], n: int) -> OpCases:
    return op_cases(
        public=public, reference=composite, inputs=functools.partial(_inputs, n), bench=_bench(n), peers_key="pointwise"
    )


CASES = (
    _cases(add, torch.add, 2),
    _cases(mul, torch.mul, 2),
    _cases(relu, F.relu, 1),
    _cases(gelu, F.gelu, 1),
    _cases(silu, F.silu, 1),
    _cases(swiglu, lambda gate, up: F.silu(gate) * up, 2),
)
