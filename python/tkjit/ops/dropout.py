"""dropout and dropout_add: expressions with random numbers for :func:`tkjit.elementwise`.

    y  = keep * (x + bias) / (1 - p) + residual        keep = word(i) >= p * 2^32, i the element's place in row-major order
    dx = keep * dy / (1 - p)                           dbias = sum(dx)    dresidual = dy

Nothing is kept for the backward but the seed: it draws the same words again (csrc/templates/dropout.cuh).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .._torch import FLOATING, refusing_as
from ..kernel import Elementwise, elementwise
from ..testing import DTYPE_NAMES, BenchCase, Sample, op_cases

_INCLUDE = '#include "dropout.cuh"\n'

# What becomes of a value where p is 0, where it is 1, and else.
_NONE, _ALL, _SOME = "{}", "T(0)", "dropout::kept(random_halves, threshold, {}, scale)"


def _made(value: str, *names: str) -> Elementwise:
    """Of ``x``; ``x`` and ``residual``; or these and ``bias``. value: one of the three above."""
    name = "dropout_add" if len(names) > 1 else "dropout"
    numbers = ", i64 threshold, T scale" if value is _SOME else ""
    rest = " + residual" if "residual" in names else ""
    gradient = elementwise(
        f"T dx = {value.format('dy')}; T dbias = dx; T dresidual = dy;",
        inputs=f"T dy{numbers}", outputs=", ".join(f"T d{n}" for n in names), preamble=_INCLUDE, name=f"{name}_grad",
        # Linear, so that it has the same factors.
        grad=f"T ddy = {value.format(' + '.join(f'dd{n}' for n in names if n != 'residual'))}{rest.replace('r', 'ddr')};"
        if value is _SOME else None,
    )  # fmt: skip
    return elementwise(
        f"T y = {value.format('x + bias' if 'bias' in names else 'x')}{rest}",
        inputs=", ".join(f"T {n}" for n in names) + numbers, grad=gradient, preamble=_INCLUDE, name=name,
        composite=lambda *args: _of_torch(_probability(value, *args[len(names) :]), *args[: len(names)]),
        public=lambda *args: (_PUBLIC[name], (*_padded(args[: len(names)]), _probability(value, *args[len(names) :]))),
    )  # fmt: skip


def _probability(value: str, threshold: int = 0, *_: Any) -> float:
    return threshold / 2**32 if value is _SOME else float(value is _ALL)


def _padded(tensors: tuple) -> tuple:
    """A residual comes with a bias, or with None."""
    return (*tensors, None) if len(tensors) == 2 else tensors


def _of_torch(p: float, input: Tensor, residual: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """dropout_add of torch's own ops."""
    y = F.dropout(input if bias is None else input + bias, p)
    return y if residual is None else y + residual


# Made with the module: torch.compile traces what is called later.
_OPS: dict[tuple[str, tuple[str, ...]], Elementwise] = {
    (value, names): _made(value, *names)
    for names in (("x",), ("x", "residual"), ("x", "residual", "bias"))
    for value in (_NONE, _ALL, _SOME)
}


def _chosen(p: float, *names: str) -> tuple[Elementwise, tuple]:
    """The op for a probability, and its numbers."""
    if p == 0 or p == 1:
        return _OPS[_ALL if p else _NONE, names], ()
    threshold = min(round(p * 2**32), 2**32 - 1)
    return _OPS[_SOME, names], (threshold, 1 / (1 - p))


def _require(name: str, p: float, **tensors: Any) -> None:
    for position, (argument, value) in enumerate(tensors.items(), 1):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name}(): argument '{argument}' (position {position}) must be Tensor, not {type(value).__name__}"
            )
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Each element 0 with probability ``p``, else ``x / (1 - p)``.

    Args:
        input: A tensor of any shape and strides; other than float16, bfloat16, float32 and float64 are torch's business.
        p: From 0 to 1. Exact to 2^-32.
        training: Without, the result is the input, as it is where there is nothing to drop.
        inplace: Write over the input.

    Returns:
        A tensor like ``input``, or the input itself. What is dropped is 0, whatever it was.

    Raises:
        TypeError: ``input`` is no tensor.
        ValueError: ``p`` is outside [0, 1].
        Exception: What torch raises for a dtype that it has no kernel for either.

    Same as ``F.dropout``. Random numbers come from torch's generator of the device, by Philox 4x32-7, eight or four of a call.
    Which elements are dropped depends on a seed from there, on their place in row-major order and on whether they have two bytes:
    not on strides, the GPU or the launch. There is no mask in memory, and the input is not kept: the backward draws the numbers
    again. Under vmap, and in forward mode, it is torch's own.

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014.
    """
    _require("dropout", p, input=input)
    if has_torch_function((input,)):
        return handle_torch_function(dropout, (input,), input, p, training, inplace)
    if not training or p == 0 or input.numel() == 0:
        return input
    if input.dtype not in FLOATING:
        if inplace:
            return F.dropout(input, p, True, True)
        return refusing_as("dropout", _of_torch, p, input)
    if p == 1 and inplace:
        return input.zero_()
    op, numbers = _chosen(float(p), "x")
    return op.in_place(input, *numbers) if inplace else op(input, *numbers)


def dropout_add(
    input: Tensor, residual: Tensor, bias: Tensor | None = None, p: float = 0.5, training: bool = True
) -> Tensor:
    """``dropout(input + bias, p) + residual``, read and written once and rounded once.

    Args:
        input: As :func:`dropout`.
        residual: Added to what is left; it broadcasts with ``input + bias``.
        bias: Added before, if given; it broadcasts.
        p: As :func:`dropout`.
        training: Without, nothing is dropped.

    Returns:
        A tensor of the shape that all broadcast to, of the dtype that they promote to.

    Raises:
        RuntimeError: Shapes that don't broadcast. Others as :func:`dropout`.

    The backward reads the gradient once and writes that of ``input``; it is summed for a ``bias``, and the residual's is the
    gradient itself. Nothing but a seed is kept.
    """
    given: dict[str, Any] = {"input": input, "residual": residual}
    if bias is not None:
        given["bias"] = bias
    _require("dropout_add", p, **given)
    tensors = tuple(given.values())
    if has_torch_function(tensors):
        return handle_torch_function(dropout_add, tensors, *_padded(tensors), p, training)
    rate = float(p) if training else 0.0
    if any(t.dtype not in FLOATING for t in tensors):
        return refusing_as("dropout_add", _of_torch, rate, input, residual, bias)
    dropped = input.shape if bias is None else torch.broadcast_shapes(input.shape, bias.shape)
    try:
        whole = torch.broadcast_shapes(dropped, residual.shape)
    except RuntimeError:
        whole = None  # for the kernel's planner to refuse
    if 0.0 < rate < 1.0 and whole is not None:
        if whole != dropped:
            # One number for each element that is dropped, however often the residual repeats it.
            return dropout(input if bias is None else input + bias, rate) + residual
        if 0 in whole:
            rate = 0.0
    op, numbers = _chosen(rate, "x", "residual", *(() if bias is None else ("bias",)))
    return op(*tensors, *numbers)


_PUBLIC: dict[str, Callable[..., Tensor]] = {"dropout": dropout, "dropout_add": dropout_add}

# --- cases -----------------------------------------------------------------------------------------------------------

BYTES = 512 * 10**6  # of each tensor: far beyond any L2


def _random(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=device, dtype=torch.float32).to(dtype) for shape in shapes)


def _inputs(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """All dropped: what a call can promise without its seed. The rest is in tests/test_dropout.py."""
    shapes = ("small", (4, 8)), ("odd width", (3, 37)), ("0-D", ()), ("wide", (2, 5000)), ("4-D", (2, 3, 4, 5))
    for label, shape in shapes:
        yield Sample(label, _random((shape,), dtype, device), {"p": 1.0})


def _add_inputs(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    shapes = (
        ("small", ((4, 8), (4, 8), (8,))), ("no bias", ((3, 37), (3, 37))), ("0-D", ((), (), ())), ("wide", ((2, 5000),) * 2),
        ("4-D", ((2, 3, 4, 5), (3, 1, 5), (5,))), ("none", ((0, 8), (0, 8), (8,))),
    )  # fmt: skip
    for label, sizes in shapes:
        yield Sample(label, _random(sizes, dtype, device), {"p": 0.0})


def _bench(extra: int) -> Iterator[BenchCase]:
    """p = 0.1. Bytes: each tensor once; backward dy and dx."""
    for dtype in (torch.bfloat16, torch.float32):
        for data in (64 * 10**6, BYTES):
            shape = (data // dtype.itemsize // 4096, 4096)
            size = math.prod(shape) * dtype.itemsize
            shapes = (shape, shape, (4096,))[: 1 + extra]
            yield BenchCase(
                label=f"p0.1 {'x'.join(map(str, shape))} {DTYPE_NAMES[dtype]}", group="p = 0.1", x=data / 1e6, dtype=dtype,
                make=functools.partial(_random, shapes, dtype), forward_bytes=(2 + (extra > 0)) * size,
                backward_bytes=2 * size, kwargs={"p": 0.1},
            )  # fmt: skip


def _reference(input: Tensor, residual: Tensor, bias: Tensor | None = None, p: float = 0.5) -> Tensor:
    return _of_torch(p, input, residual, bias)


CASES = (
    op_cases(public=dropout, reference=F.dropout, inputs=_inputs, bench=_bench(0), random=True),
    op_cases(public=dropout_add, reference=_reference, inputs=_add_inputs, bench=_bench(2), random=True),
)
