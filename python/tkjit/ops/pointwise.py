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

from .._torch import FLOATING, refusing_as
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
    public: Callable[..., Any],
    inputs: str | None = None,
) -> Elementwise:
    return _op(name, f"T y = {text}", f"T dx = {grad}", composite, public, inputs)


_relu = _activation("relu", "pointwise::relu(x)", "y <= T(0) ? T(0) : dy", F.relu, lambda x: (relu, (x,)))
_gelu = _activation(
    "gelu", "pointwise::gelu<kFast>(x)", "dy * pointwise::gelu_slope<kFast>(x)", F.gelu, lambda x: (gelu, (x,))
)
_tanh_gelu = _activation(
    "gelu", "pointwise::tanh_gelu<kFast>(x)", "dy * pointwise::tanh_gelu_slope<kFast>(x)",
    lambda x: F.gelu(x, approximate="tanh"), lambda x: (gelu, (x, "tanh")),
)  # fmt: skip
_silu = _activation(
    "silu", "pointwise::silu<kFast>(x)", "dy * pointwise::silu_slope<kFast>(x)", F.silu, lambda x: (silu, (x,))
)
_sigmoid = _activation(
    "sigmoid", "pointwise::sigmoid<kFast>(x)", "dy * y * (T(1) - y)", torch.sigmoid, lambda x: (sigmoid, (x,))
)
_tanh = _activation("tanh", "::tanh(x)", "dy * (T(1) - y * y)", torch.tanh, lambda x: (tanh, (x,)))
_mish = _activation("mish", "pointwise::mish(x)", "dy * pointwise::mish_slope(x)", F.mish, lambda x: (mish, (x,)))
_leaky_relu = _activation(
    "leaky_relu", "x > T(0) ? x : x * slope", "x > T(0) ? dy : dy * slope", F.leaky_relu,
    lambda *args: (leaky_relu, args), "T x, T slope",
)  # fmt: skip
_softplus = _activation(
    "softplus", "pointwise::softplus(x, beta, threshold)", "dy * pointwise::softplus_slope(x, beta, threshold)", F.softplus,
    lambda *args: (softplus, args), "T x, T beta, T threshold",
)  # fmt: skip


def _applied(op: Elementwise, x: Tensor, inplace: bool, *numbers: float) -> Tensor:
    _require_tensor(op.text.name, x)
    if type(x) is Tensor and x.dtype not in FLOATING:
        torchs: Any = op.composite
        return refusing_as(op.text.name, functools.partial(torchs, inplace=True) if inplace else torchs, x, *numbers)
    return op.in_place(x, *numbers) if inplace else op(x, *numbers)


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """``max(x, 0)``; NaN stays NaN. Same as ``F.relu``.

    Args:
        input: A tensor of any shape and strides; other than float16, bfloat16, float32 and float64 are torch's business.
        inplace: Write over the input.

    Returns:
        A tensor like ``input``, or the input itself.

    Raises:
        TypeError: ``input`` is no tensor.
        Exception: What torch raises for a dtype that it has no kernel for either.
    """
    return _applied(_relu, input, inplace)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """``x P(x)``, P the normal distribution; with ``approximate="tanh"`` ``x sigmoid(2u)``, ``u = sqrt(2/pi) (x + 0.044715 x^3)``.

    Args:
        input: As :func:`relu`.
        approximate: ``"none"`` or ``"tanh"``.

    Returns:
        A tensor like ``input``.

    Raises:
        RuntimeError: Another ``approximate``. Others as :func:`relu`.

    Same as ``F.gelu``, but 0 at -inf. Hendrycks and Gimpel, "Gaussian error linear units", 2016.
    """
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    return _applied(_tanh_gelu if approximate == "tanh" else _gelu, input, False)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """``x sigmoid(x)``. Same as ``F.silu``, but 0 at -inf; arguments and errors as :func:`relu`."""
    return _applied(_silu, input, inplace)


def sigmoid(input: Tensor) -> Tensor:
    """``1 / (1 + e^-x)``. Same as ``torch.sigmoid`` of floating tensors; errors as :func:`relu`."""
    return _applied(_sigmoid, input, False)


def tanh(input: Tensor) -> Tensor:
    """The hyperbolic tangent. Same as ``torch.tanh`` of floating tensors; errors as :func:`relu`."""
    return _applied(_tanh, input, False)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """``x tanh(log(1 + e^x))``. Same as ``F.mish``; arguments and errors as :func:`relu`."""
    return _applied(_mish, input, inplace)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """``x`` above 0, else ``negative_slope * x``. Same as ``F.leaky_relu``; arguments and errors as :func:`relu`."""
    return _applied(_leaky_relu, input, inplace, float(negative_slope))


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """``log(1 + e^(beta x)) / beta``; ``x`` where ``beta x > threshold``. Same as ``F.softplus``; errors as :func:`relu`."""
    return _applied(_softplus, input, False, float(beta), float(threshold))


# --- gates -----------------------------------------------------------------------------------------------------------


def _gate(name: str, function: str, slope: str, composite: Callable[[Tensor], Tensor], public: Callable) -> Elementwise:
    return _op(
        name, f"T y = {function} * up", f"T dgate = dy * up * {slope}; T dup = dy * {function};",
        lambda gate, up: composite(gate) * up, lambda *args: (public(), args), "T gate, T up",
    )  # fmt: skip


_swiglu = _gate("swiglu", "pointwise::silu<kFast>(gate)", "pointwise::silu_slope<kFast>(gate)", F.silu, lambda: swiglu)
_geglu = _gate("geglu", "pointwise::gelu<kFast>(gate)", "pointwise::gelu_slope<kFast>(gate)", F.gelu, lambda: geglu)
_reglu = _gate("reglu", "pointwise::relu(gate)", "T(gate > T(0) ? 1 : 0)", F.relu, lambda: reglu)


def _gated(op: Elementwise, gate: Tensor, up: Tensor | None) -> Tensor:
    _require_tensor(op.text.name, gate, gate if up is None else up)
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise RuntimeError(
                f"{op.text.name}(): gate and up are halves of the last dimension; {tuple(gate.shape)} has none"
            )
        gate, up = gate.chunk(2, -1)
    if type(gate) is type(up) is Tensor and not {gate.dtype, up.dtype} <= {*FLOATING}:
        return refusing_as(op.text.name, op.composite, gate, up)  # type: ignore[arg-type]
    return op(gate, up)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``; without ``up`` the two are the halves of ``gate``'s last dimension.

    Args:
        gate: A tensor of any strides; of which dtype, see :func:`relu`.
        up: Another; they broadcast.

    Returns:
        A tensor of the shape that both broadcast to.

    Raises:
        TypeError: What should be a tensor isn't.
        RuntimeError: Shapes that don't broadcast; a last dimension without halves.

    Noam Shazeer, "GLU variants improve transformer", 2020.
    """
    return _gated(_swiglu, gate, up)


def geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``gelu(gate) * up``; see :func:`swiglu`."""
    return _gated(_geglu, gate, up)


def reglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``relu(gate) * up``; see :func:`swiglu`."""
    return _gated(_reglu, gate, up)


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
