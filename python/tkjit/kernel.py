"""Kernels of the user's own, from an expression or from CUDA text: elementwise, and Kernel for raw templates.

``import tkjit`` has them as ``tkjit.elementwise`` and ``tkjit.Kernel``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import _elementwise
from ._elementwise import Text
from ._library import define
from ._plan import Spec, planned
from ._torch import Op, compiling, filled, routed

__all__ = ["Elementwise", "elementwise"]


class Elementwise:
    """An op that :func:`elementwise` made. Call it with a tensor or a number for each input."""

    def __init__(
        self,
        text: Text,
        grad: Elementwise | None,
        composite: Callable[..., Any] | None = None,
        public: Callable[..., tuple[Callable[..., Any], tuple]] | None = None,
    ):
        self.text = text
        self.grad = grad
        self.key: str
        self.composite = composite
        self.__name__ = text.name
        parts = (text.name, text.body, repr(text.inputs), repr(text.outputs), text.preamble, grad.key if grad else "")
        digest = hashlib.sha256("\x1f".join(parts).encode()).hexdigest()
        self.key = f"{text.name}_{digest[:12]}"
        _ops[self.key] = self
        self.raw = planned(_elementwise.planner_of(text))
        op = Op(
            name=text.name,
            public=public or (lambda *args: (self, args)),
            library=self._library,
            fallback=composite or self._no_composite,
            autocast=lambda *args: args,
            dtypes=None,
        )
        self._call = routed(self.raw, type(f"_{text.name}", (_Function,), {"op": self}), lambda *args: op)

    def __call__(self, *args: Any) -> Any:
        """The output, or a tuple of them. Arguments are those of the inputs, in their order: tensors, or numbers."""
        if len(args) != len(self.text.inputs):
            names = ", ".join(name for _, name in self.text.inputs)
            raise TypeError(
                f"{self.text.name}() takes {len(self.text.inputs)} arguments ({names}), but {len(args)} were given"
            )
        if compiling():
            return self._library(*args)
        if not all(type(arg) is Tensor for arg in args):
            _require_values(self.text, args)
        try:
            return self._call(*args)
        except NotImplementedError:  # a dtype without kernels
            if self.composite is None:
                raise
            return self.composite(*args)

    def __repr__(self) -> str:
        names = ", ".join(" ".join(pair) for pair in self.text.inputs)
        return (
            f"tkjit.elementwise {self.text.name}({names}) -> {', '.join(' '.join(pair) for pair in self.text.outputs)}"
        )

    def _library(self, *args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        numbers = [arg for arg in args if not isinstance(arg, Tensor)]
        kinds = "".join("t" if isinstance(arg, Tensor) else "n" for arg in args)
        found = _op(self.key, kinds, tensors, numbers)
        return found[0] if len(found) == 1 else tuple(found)

    def _no_composite(self, *args: Any) -> Any:
        raise NotImplementedError(
            f"{self.text.name}: without a composite= it has no forward-mode derivative, no vmap, and takes plain tensors only"
        )

    def gradients(
        self, grads: Sequence[Tensor | None], args: Sequence[Any], outs: Sequence[Tensor], needs: Sequence[bool]
    ) -> list:
        """Of each argument; None for numbers and where none is needed."""
        if torch.is_grad_enabled() and self.composite is not None:
            return self._differentiable(grads, args, needs)
        if self.grad is None:
            raise RuntimeError(f"{self.text.name}: it has no gradient; give elementwise() a grad=")
        values = {name: value for (_, name), value in zip(self.text.inputs, args)}
        values |= {name: out for (_, name), out in zip(self.text.outputs, outs)}
        for (_, name), g, out in zip(self.text.outputs, grads, outs):
            values[f"d{name}"] = torch.zeros_like(out) if g is None else g
        wanted = frozenset(f"d{name}" for (_, name), need in zip(self.text.inputs, needs) if need)
        op = self.grad.of_outputs(wanted)
        found = op(*(values[name] for _, name in op.text.inputs))
        found = dict(zip((name for _, name in op.text.outputs), found if isinstance(found, tuple) else (found,)))
        return [
            found[f"d{name}"].sum_to_size(arg.shape).to(arg.dtype) if f"d{name}" in found else None
            for (_, name), arg in zip(self.text.inputs, args)
        ]

    def _differentiable(self, grads: Sequence[Tensor | None], args: Sequence[Any], needs: Sequence[bool]) -> list:
        """The same of torch's own ops, which have gradients themselves."""
        # Each by itself: one argument that was computed from another is no way for its gradient here.
        args = [arg.view_as(arg) if isinstance(arg, Tensor) else arg for arg in args]
        found = self.composite(*args)  # type: ignore[misc]
        wanted = [arg for arg, need in zip(args, needs) if need]
        outs = found if isinstance(found, tuple) else (found,)
        pairs = [(out, g) for out, g in zip(outs, grads) if g is not None]
        made = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], create_graph=True))
        return [next(made) if need else None for need in needs]

    def into(self, outs: Sequence[Tensor], *args: Any) -> tuple[Tensor, ...]:
        """Write into given tensors of the result's shape, of any strides and dtype; one may be an input. Without a gradient."""
        found = self.raw(*args, *outs)
        for out in outs:
            if not out.is_inference():  # those have no version
                torch.autograd.graph.increment_version(out)
        return found if isinstance(found, tuple) else (found,)

    @functools.cache  # noqa: B019  # ops live as long as the program
    def of_outputs(self, wanted: frozenset[str]) -> Elementwise:
        """The same with some of the outputs only."""
        outputs = tuple(pair for pair in self.text.outputs if pair[1] in wanted)
        if missing := wanted - {name for _, name in outputs}:
            raise RuntimeError(f"{self.text.name}: its text declares no {', '.join(sorted(missing))}")
        if outputs == self.text.outputs:
            return self
        return Elementwise(replace(self.text, outputs=outputs), self.grad)


_ops: dict[str, Elementwise] = {}


def _require_values(text: Text, args: Sequence[Any]) -> None:
    for (_, name), arg in zip(text.inputs, args):
        if not isinstance(arg, (Tensor, bool, int, float)):
            raise TypeError(f"{text.name}(): argument '{name}' must be a Tensor or a number, not {type(arg).__name__}")
    if not any(isinstance(arg, Tensor) for arg in args):
        raise TypeError(f"{text.name}(): one argument at least must be a Tensor")


class _Function(torch.autograd.Function):
    """Of one op: its class attribute ``op``."""

    op: Elementwise

    @staticmethod
    def forward(ctx, *tensors):
        op = type(ctx)._forward_cls.op
        outs = op.raw(*filled(ctx.arguments, tensors))
        ctx.save_for_backward(*tensors, *(outs if isinstance(outs, tuple) else (outs,)))
        return outs

    @staticmethod
    def backward(ctx, *grads):
        op = type(ctx)._forward_cls.op
        saved = ctx.saved_tensors
        n = sum(given is ... for given in ctx.arguments)
        args = filled(ctx.arguments, saved[:n])
        needs = iter(ctx.needs_input_grad)
        found = op.gradients(grads, args, saved[n:], [given is ... and next(needs) for given in ctx.arguments])
        return tuple(g for g, given in zip(found, ctx.arguments) if given is ...)


# --- torch.ops -------------------------------------------------------------------------------------------------------


def _arguments(kinds: str, tensors: Sequence[Any], numbers: Sequence[Any]) -> list:
    t, n = iter(tensors), iter(numbers)
    return [next(t) if kind == "t" else next(n) for kind in kinds]


def _run(key: str, kinds: str, tensors: list[Tensor], numbers: list) -> list[Tensor]:
    found = _ops[key].raw(*_arguments(kinds, tensors, numbers))
    return list(found) if isinstance(found, tuple) else [found]


def _fake(key: str, kinds: str, tensors: list[Tensor], numbers: list) -> list[Tensor]:
    text = _ops[key].text
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    strides = _elementwise.output_strides(shape, [_elementwise.expanded(t.shape, t.stride(), shape) for t in tensors])
    specs = [Spec(str(t.dtype).removeprefix("torch."), (1,) * t.dim(), (1,) * t.dim(), -1, 16) for t in tensors]
    dtypes = _elementwise.output_dtypes(text, _arguments(kinds, specs, numbers))
    return [tensors[0].new_empty_strided(shape, strides, dtype=getattr(torch, dtype)) for dtype in dtypes]


def _setup(ctx, inputs, output):
    ctx.key, ctx.kinds, tensors, ctx.numbers = inputs
    ctx.n = len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grads):
    saved = ctx.saved_tensors
    args = _arguments(ctx.kinds, saved[: ctx.n], ctx.numbers)
    needs = iter(ctx.needs_input_grad[2])
    found = _ops[ctx.key].gradients(grads, args, saved[ctx.n :], [kind == "t" and next(needs) for kind in ctx.kinds])
    # torch counts an empty list as one of tensors, and one of numbers as a single argument.
    return None, None, [g for g, kind in zip(found, ctx.kinds) if kind == "t"], None if ctx.numbers else []


_op = define(
    "elementwise(str op, str kinds, Tensor[] tensors, Scalar[] numbers) -> Tensor[]",
    run=_run,
    fake=_fake,
    setup_context=_setup,
    backward=_backward,
)


# --- public ----------------------------------------------------------------------------------------------------------


def elementwise(
    text: str,
    *,
    inputs: str | None = None,
    outputs: str | None = None,
    grad: str | Elementwise | None = None,
    preamble: str = "",
    name: str | None = None,
    composite: Callable[..., Any] | None = None,
    public: Callable[..., tuple[Callable[..., Any], tuple]] | None = None,
) -> Elementwise:
    """An op that computes each element of its outputs from the elements of its inputs in the same place.

        gelu = tkjit.elementwise(
            "T y = x * normcdf(x)",
            grad="T dx = dy * (normcdf(x) + x * exp(T(-0.5) * x * x) * T(0.3989422804))",
        )
        y = gelu(x)  # any shape, strides and dtype; differentiable

    Args:
        text: CUDA statements. What the last declaration, ``T y = ...``, names is the output, unless ``outputs`` says more.
        inputs: Their types and names, ``"T x, U weight, float alpha"``. A letter is one dtype, to which all inputs of that
            letter are promoted as torch promotes; else ``float``, ``double``, ``int``, ``bool``, ``f16``, ``bf16``, ``i64``, ... By
            default what the text names and does not declare, in the order of appearance, each a ``T``.
        outputs: The same. The text declares them or only assigns to them.
        grad: The gradient's text, or an op: it declares ``d`` + name for each input that has a gradient, and may name inputs,
            outputs, and ``d`` + name of an output for what comes from above. An op that has a ``grad`` itself gives second
            derivatives.
        preamble: Functions for the text, ``TK_DEVICE float f(float x) { ... }``, templates if they serve several types.
        name: For messages; by default the output's.
        composite: The same function of torch's own ops, if there is one: for second derivatives, forward-mode AD, vmap, and
            tensors that have no plain memory.
        public: Arguments -> the function that users call and its arguments, for tensor subclasses; by default the op itself.

    Returns:
        A function of a tensor or a number for each input; they broadcast. Outputs have torch's layout and dtype.

    Raises:
        ValueError: Text or declarations that can't be read.
        CompileError: At the first call, with the text's own line numbers, where the text is no CUDA.
        RuntimeError: At a call: shapes that don't broadcast; at a backward, when there is no ``grad``.

    In the text float16 and bfloat16 values are float; results are rounded once. CUDA's mathematical functions are there by their
    overloaded names (``erf``, ``sin``, ``expm1``, ``lgamma``) and in fast forms (``__expf``, ``__fdividef``); ``kFast`` is true
    where every output has two bytes. Works under torch.compile, in CUDA graphs, and for CPU tensors through the emulator.
    """
    parsed = Text.of(text, inputs, outputs, preamble, name)
    if isinstance(grad, str):
        grad = _gradient_op(parsed, grad)
    return Elementwise(parsed, grad, composite, public)


def _gradient_op(text: Text, grad: str) -> Elementwise:
    """The op of a gradient's text: its names have the types that the op's own have."""
    kinds = {name: kind for kind, name in (*text.inputs, *text.outputs)}
    kinds |= {f"d{name}": kind for name, kind in tuple(kinds.items())}
    named = Text.of(grad, None, None, text.preamble, f"{text.name}_grad")
    outs = [
        (kinds[what], what)
        for _, what in _elementwise.declared(grad)
        if what[1:] in {n for _, n in text.inputs} and what[0] == "d"
    ]
    ins = [(kinds.get(what, ""), what) for _, what in named.inputs if what not in {n for _, n in outs}]
    if unknown := [what for kind, what in ins if not kind]:
        raise ValueError(f"elementwise(): grad names {', '.join(unknown)}, which is no input, output or d + output")
    return Elementwise(replace(named, inputs=tuple(ins), outputs=tuple(outs)), None)
