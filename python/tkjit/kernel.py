"""Kernels of the user's own, from expressions or from CUDA text: elementwise, reduction, and Kernel for raw templates.

``import tkjit`` has them as ``tkjit.elementwise``, ``tkjit.reduction`` and ``tkjit.Kernel``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from struct import error as struct_error
from struct import pack, unpack
from typing import Any

import torch
from torch import Tensor

from . import _elementwise, _raw, _reduction
from ._device import Device
from ._elementwise import Text
from ._errors import DeviceError
from ._library import define
from ._plan import Scalar, Spec, canonical, planned
from ._raw import Struct
from ._template import Template, digest, three
from ._torch import (
    Op,
    compiling,
    drawn_seed,
    filled,
    gradients_through,
    may_overlap,
    may_write_directly,
    routed,
    transformed,
    written,
)
from .testing import as_tuple

__all__ = [
    "Elementwise",
    "Kernel",
    "KernelOp",
    "Reduction",
    "bf16",
    "bool_",
    "elementwise",
    "f16",
    "f32",
    "f64",
    "i32",
    "i64",
    "reduction",
    "struct",
    "u32",
    "u64",
]


class Elementwise:
    """An op that :func:`elementwise` made. Call it with a tensor or a number for each input."""

    key: str  # what stands for it in torch.ops

    def __init__(
        self,
        text: Text,
        grad: Elementwise | None,
        composite: Callable[..., Any] | None = None,
        public: Callable[..., tuple[Callable[..., Any], tuple]] | None = None,
    ):
        self.text = text
        self.grad = grad
        self.composite = composite
        # torch's own would draw other random numbers: what is random is differentiated by its texts alone.
        self._differentiates_itself = composite is None or text.is_random
        wanted = {name for _, name in grad.text.inputs} if grad else set()
        # Of inputs and outputs, which the gradient needs.
        self.kept = [
            name in wanted or not (is_output or self._differentiates_itself)
            for is_output, pairs in enumerate((text.inputs, text.outputs))
            for _, name in pairs
        ]
        self.__name__ = text.name
        parts = (text.name, text.body, repr(text.inputs), repr(text.outputs), text.preamble, grad.key if grad else "")
        self.key = f"{text.name}_{digest(parts)[:12]}"
        registered[self.key] = self
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
        """The output, or a tuple of them. Arguments are those of the inputs, in their order: tensors, or numbers.

        What is random takes one more, a tensor of one int64 on the device: the seed, by default drawn from torch's generator.
        """
        if self.text.is_random and len(args) == len(self.text.inputs) - 1:
            if self.composite is not None and not compiling() and transformed():
                return self.composite(*args, None)
            _require_values(self.text, args)
            args = (*args, drawn_seed(next(arg for arg in args if isinstance(arg, Tensor))))
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
        self,
        grads: Sequence[Tensor | None],
        args: Sequence[Any],
        outs: Sequence[Any],
        likes: Likes,
        needs: Sequence[bool],
    ) -> list:
        """Of each argument; None for numbers and where none is needed. Of arguments and outputs only those kept are there."""
        if torch.is_grad_enabled() and not self._differentiates_itself:
            return self._differentiable(grads, args, needs)
        if self.grad is None:
            raise RuntimeError(f"{self.text.name}: it has no gradient; give elementwise() a grad=")
        values = {name: value for (_, name), value in zip(self.text.inputs, args)}
        values |= {name: out for (_, name), out in zip(self.text.outputs, outs)}
        some = next(g for g in grads if g is not None)
        for (_, name), g, like in zip(self.text.outputs, grads, likes[len(args) :]):
            values[f"d{name}"] = some.new_zeros(like[0], dtype=like[1]) if g is None else g
        wanted = {f"d{name}" for (_, name), need in zip(self.text.inputs, needs) if need}
        found = self.grad.of_names(values, wanted, some)
        return [
            found[f"d{name}"].sum_to_size(like[0]).to(like[1]) if need else None
            for (_, name), like, need in zip(self.text.inputs, likes, needs)
        ]

    def of_names(
        self, values: Mapping[str, Any], wanted: set[str], like: Tensor, always: bool = True
    ) -> dict[str, Tensor]:
        """Those outputs of a gradient's op that are wanted, by name, from inputs by name; what is missing is 0.

        Args:
            always: Whether a kernel runs where copies of inputs are all that is wanted: those are then returned as they are.
        """
        # Where a kernel runs anyway, it writes no copy of what is there already.
        copies = {name: of for name, of in self.text.copies.items() if name in wanted}
        computed = wanted - copies.keys() | {of for of in copies.values() if of not in values}
        if not computed and always:
            copies, computed = {}, wanted
        known = dict(values)
        if computed:
            op = self.of_outputs(frozenset(computed))
            # An output that of_outputs left out has no gradient.
            found = op(*(values[name] if name in values else like.new_zeros(()) for _, name in op.text.inputs))
            known |= zip((name for _, name in op.text.outputs), as_tuple(found))
        return {name: known[copies.get(name, name)] for name in wanted}

    def _differentiable(self, grads: Sequence[Tensor | None], args: Sequence[Any], needs: Sequence[bool]) -> list:
        """The same of torch's own ops, which have gradients themselves."""
        # Each by itself: one argument that was computed from another is no way for its gradient here.
        args = [arg.view_as(arg) if isinstance(arg, Tensor) else arg for arg in args]
        found = self.composite(*args)  # type: ignore[misc]
        wanted = [arg for arg, need in zip(args, needs) if need]
        outs = as_tuple(found)
        pairs = [(out, g) for out, g in zip(outs, grads) if g is not None]
        made = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [g for _, g in pairs], create_graph=True))
        return [next(made) if need else None for need in needs]

    def in_place(self, x: Tensor, *numbers: Any) -> Tensor:
        """Write the output over the first input."""
        if compiling() or not may_write_directly(x, x) or may_overlap(x):
            # What the gradient needs of x would be gone: a copy is kept. And torch knows what else may be written to.
            return x.copy_(self(x.clone() if self.kept[0] else x, *numbers))
        seed = (drawn_seed(x),) if self.text.is_random else ()
        self.raw(x, *numbers, *seed, x)
        written(x)
        return x

    @functools.cache  # noqa: B019  # ops live as long as the program
    def of_outputs(self, wanted: frozenset[str]) -> Elementwise:
        """The same with some of the outputs only."""
        outputs = tuple(pair for pair in self.text.outputs if pair[1] in wanted)
        if missing := wanted - {name for _, name in outputs}:
            raise RuntimeError(f"{self.text.name}: its text declares no {', '.join(sorted(missing))}")
        if outputs == self.text.outputs:
            return self
        return Elementwise(replace(self.text, outputs=outputs), self.grad)


registered: dict[str, Elementwise] = {}  # by key

# Shape and dtype of each argument, then of each output; None of a number.
Likes = Sequence[Any]


def _likes(values: Sequence[Any]) -> Likes:
    return [(value.shape, value.dtype) if isinstance(value, Tensor) else None for value in values]


def _require_values(text: Text | _reduction.Text, args: Sequence[Any]) -> None:
    for (_, name), arg in zip(text.inputs, args):
        if not isinstance(arg, (Tensor, bool, int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{text.name}(): argument '{name}' must be a Tensor or a number, not {type(arg).__name__}")
    if not any(isinstance(arg, Tensor) for arg in args):
        raise TypeError(f"{text.name}(): one argument at least must be a Tensor")


class _Function(torch.autograd.Function):
    """Of one op: its class attribute ``op``."""

    op: Elementwise

    @staticmethod
    def forward(ctx, *tensors):
        op = type(ctx)._forward_cls.op
        args = filled(ctx.arguments, tensors)
        found = op.raw(*args)
        outs = as_tuple(found)
        ctx.likes = _likes((*args, *outs))
        values = (*args, *outs)
        ctx.save_for_backward(*(v if kept else None for v, kept in zip(values, op.kept) if isinstance(v, Tensor)))
        return found

    @staticmethod
    def backward(ctx, *grads):
        op = type(ctx)._forward_cls.op
        args, outs, wanted = _of_backward(ctx)
        found = op.gradients(grads, args, outs, ctx.likes, wanted)
        return tuple(g for g, given in zip(found, ctx.arguments) if given is ...)


def _of_backward(ctx) -> tuple[list, Sequence[Any], list[bool]]:
    """The call's arguments, what was saved behind its tensors, and which arguments need a gradient."""
    saved = ctx.saved_tensors
    n = sum(given is ... for given in ctx.arguments)
    needs = iter(ctx.needs_input_grad)
    return filled(ctx.arguments, saved[:n]), saved[n:], [given is ... and next(needs) for given in ctx.arguments]


class Reduction:
    """An op that :func:`reduction` made. Call it with a tensor or a number for each input, ``dim`` and ``keepdim``."""

    key: str  # what stands for it in torch.ops

    def __init__(self, text: _reduction.Text, grad: Elementwise | None, composite: Callable[..., Any] | None = None):
        wanted = {name for _, name in grad.text.inputs} if grad else set()
        self.text = text
        # With the accumulators that the gradient names.
        self.kept_text = replace(text, kept=tuple(name for _, name in text.accumulators if name in wanted))
        self.grad = grad
        self.composite = composite
        self.kept = {name for _, name in (*text.inputs, *text.outputs) if name in wanted or composite} | {
            *self.kept_text.kept
        }
        self.__name__ = text.name
        self.key = f"{text.name}_{digest([text.template.source, grad.key if grad else ''])[:12]}"
        reductions[self.key] = self
        self.raw = planned(_reduction.planner_of(text))
        self.raw_kept = planned(_reduction.planner_of(self.kept_text)) if self.kept_text.kept else self.raw
        op = Op(
            name=text.name,
            public=lambda *args: (functools.partial(self, **self._options(args)), args[:-2]),
            library=self._library,
            fallback=self._composite,
            autocast=lambda *args: args,
            dtypes=None,
        )
        self._call = routed(self.raw, type(f"_{text.name}", (_Reduced,), {"op": self}), lambda *args: op)

    def __call__(self, *args: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Any:
        """The output, or a tuple of them.

        Args:
            args: Of the inputs, in their order: tensors, or numbers. They broadcast.
            dim: What is reduced; None or none: everything.
            keepdim: Whether the reduced dims stay, of size 1.
        """
        if len(args) != len(self.text.inputs):
            names = ", ".join(name for _, name in self.text.inputs)
            raise TypeError(
                f"{self.text.name}() takes {len(self.text.inputs)} arguments ({names}), but {len(args)} were given"
            )
        _require_values(self.text, args)
        ndim = max(arg.dim() for arg in args if isinstance(arg, Tensor))
        dims = _bits(dim, ndim)
        if compiling():
            return self._library(*args, dims, keepdim)
        try:
            return self._outputs(self._call(*args, dims, bool(keepdim)))
        except NotImplementedError:  # a dtype without kernels
            if self.composite is None:
                raise
            return self._composite(*args, dims, keepdim)

    def __repr__(self) -> str:
        pairs = (", ".join(" ".join(pair) for pair in pairs) for pairs in (self.text.inputs, self.text.outputs))
        return f"tkjit.reduction {self.text.name}({next(pairs)}, dim, keepdim) -> {next(pairs)}"

    @staticmethod
    def _options(args: Sequence[Any]) -> dict[str, Any]:
        ndim = max(arg.dim() for arg in args if isinstance(arg, Tensor))
        return {"dim": tuple(_reduction.reduced_dims(args[-2], ndim)), "keepdim": bool(args[-1])}

    def _composite(self, *args: Any) -> Any:
        if self.composite is None:
            raise NotImplementedError(
                f"{self.text.name}: without a composite= it has no forward-mode derivative, no vmap, and takes plain tensors only"
            )
        return self.composite(*args[:-2], **self._options(args))

    def _library(self, *args: Any) -> Any:
        *given, dims, keepdim = args
        tensors = [arg for arg in given if isinstance(arg, Tensor)]
        numbers = [arg for arg in given if not isinstance(arg, Tensor)]
        kinds = "".join("t" if isinstance(arg, Tensor) else "n" for arg in given)
        return self._outputs(_reduction_op(self.key, kinds, tensors, numbers, dims, keepdim))

    def _outputs(self, found: Any) -> Any:
        """Without the accumulators that are kept."""
        n = len(self.text.outputs)
        return found if isinstance(found, Tensor) else found[0] if n == 1 else tuple(found[:n])

    @property
    def names(self) -> list[str]:
        """Of the inputs, the outputs, and the accumulators that are kept."""
        return [*(name for _, name in (*self.text.inputs, *self.text.outputs)), *self.kept_text.kept]

    def saved(self, args: Sequence[Any], outs: Sequence[Tensor]) -> list[Tensor | None]:
        """Of all that has a name, the tensors, or None for those that no gradient needs."""
        named = zip(self.names, (*args, *outs))
        return [value if name in self.kept else None for name, value in named if isinstance(value, Tensor)]

    def gradients(
        self,
        grads: Sequence[Tensor | None],
        args: Sequence[Any],
        outs: Sequence[Any],
        dims: int,
        likes: Likes,
        needs: Sequence[bool],
    ) -> list:
        """Of each argument; None for numbers and where none is needed. Of what is named only what is kept is there.

        likes: shape and dtype of each argument.
        """
        grads = grads[: len(self.text.outputs)]
        again = torch.is_grad_enabled()
        shape = torch.broadcast_shapes(*(like[0] for like in likes if like))
        gone = _reduction.reduced_dims(dims, len(shape))
        column = _reduction.reduced_shape(shape, gone, True)
        if self.composite is not None and (again or self.grad is None):
            return self._through_composite(grads, args, gone, column, needs)
        if self.grad is None:
            raise RuntimeError(f"{self.text.name}: it has no gradient; give reduction() a grad=")
        some = next((g for g in grads if g is not None), None)
        if some is None:
            return [None] * len(needs)
        values: dict[str, Any] = dict(zip(self.names, args))
        count = 1
        for d in gone:
            count = count * shape[d]
        # Of shapes that are traced as symbols it is one: a tensor then.
        values["count"] = count if isinstance(count, int) else some.new_full((), count, dtype=torch.int64)
        for name, out in zip(self.names[len(args) :], outs):
            if out is not None:
                once = again and name in self.kept_text.kept
                values[name] = _Once.apply(out.reshape(column), self.text.name) if once else out.reshape(column)
        for (_, name), g in zip(self.text.outputs, grads):
            values[f"d{name}"] = some.new_zeros(()) if g is None else g.reshape(column)
        if any(name == "index" for _, name in self.grad.text.inputs):
            places = torch.arange(count, device=some.device)
            values["index"] = places.reshape([n if d in gone else 1 for d, n in enumerate(shape)])
        wanted = {f"d{name}" for (_, name), need in zip(self.text.inputs, needs) if need}
        found = self.grad.of_names(values, wanted, some, always=False)
        return [
            found[f"d{name}"].expand(shape).sum_to_size(like[0]).to(like[1]) if need else None
            for (_, name), like, need in zip(self.text.inputs, likes, needs)
        ]

    def _through_composite(
        self,
        grads: Sequence[Tensor | None],
        args: Sequence[Any],
        gone: Sequence[int],
        column: Sequence[int],
        needs: Sequence[bool],
    ) -> list:
        where = [i for i, need in enumerate(needs) if need]
        given = [i for i, g in enumerate(grads) if g is not None]

        def outputs(*tensors: Tensor) -> list[Tensor]:
            all_args = list(args)
            for i, tensor in zip(where, tensors):
                all_args[i] = tensor
            found = self.composite(*all_args, dim=tuple(gone), keepdim=True)  # type: ignore[misc]
            return [as_tuple(found)[i] for i in given]

        upstream = [grads[i].reshape(column) for i in given]  # type: ignore[union-attr]
        made = iter(gradients_through(outputs, [args[i] for i in where], upstream))
        return [next(made) if need else None for need in needs]


reductions: dict[str, Reduction] = {}  # by key


def _bits(dim: int | Sequence[int] | None, ndim: int) -> int:
    """The reduced dims, a bit each. Raises what torch raises."""
    dims = () if dim is None else (dim,) if not isinstance(dim, (tuple, list)) else dim
    found = 0
    for d in dims:
        bit = 1 << canonical(d, ndim)
        if found & bit:
            raise RuntimeError(f"dim {d} appears multiple times in the list of dims")
        found |= bit
    return found or (1 << max(ndim, 1)) - 1


class _Once(torch.autograd.Function):
    """An accumulator, which has no gradient of its own."""

    @staticmethod
    def forward(ctx, accumulator, name):
        ctx.name = name
        return accumulator.view_as(accumulator)

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError(f"{ctx.name}: a grad= that names accumulators has no second derivative without composite=")


class _Reduced(torch.autograd.Function):
    """Of one reduction: its class attribute ``op``."""

    op: Reduction

    @staticmethod
    def forward(ctx, *tensors):
        op = type(ctx)._forward_cls.op
        args = filled(ctx.arguments, tensors)
        outs = as_tuple(op.raw_kept(*args))
        ctx.likes = _likes(args[:-2])
        ctx.save_for_backward(*op.saved(args[:-2], outs))
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        op = type(ctx)._forward_cls.op
        (*args, dims, _), outs, wanted = _of_backward(ctx)
        found = op.gradients(grads, args, outs, dims, ctx.likes, wanted[:-2])
        return tuple(g for g, given in zip(found, ctx.arguments) if given is ...)


# --- torch.ops -------------------------------------------------------------------------------------------------------


def _arguments(kinds: str, tensors: Sequence[Any], numbers: Sequence[Any]) -> list:
    t, n = iter(tensors), iter(numbers)
    return [next(t) if kind == "t" else next(n) for kind in kinds]


def _run(key: str, kinds: str, tensors: list[Tensor], numbers: list) -> list[Tensor]:
    return list(as_tuple(registered[key].raw(*_arguments(kinds, tensors, numbers))))


def _fake(key: str, kinds: str, tensors: list[Tensor], numbers: list) -> list[Tensor]:
    text = registered[key].text
    given = [t for t in _elementwise.values_of(text, _arguments(kinds, tensors, numbers)) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in given))
    strides = _elementwise.output_strides(shape, [_elementwise.expanded(t.shape, t.stride(), shape) for t in given])
    specs = [Spec(str(t.dtype).removeprefix("torch."), (1,) * t.dim(), (1,) * t.dim(), -1, 16) for t in tensors]
    dtypes = _elementwise.output_dtypes(text, _elementwise.types_of(text, _arguments(kinds, specs, numbers)))
    return [tensors[0].new_empty_strided(shape, strides, dtype=getattr(torch, dtype)) for dtype in dtypes]


def _setup(ctx, inputs, output):
    ctx.key, ctx.kinds, tensors, ctx.numbers = inputs
    ctx.n = len(tensors)
    args = _arguments(ctx.kinds, tensors, ctx.numbers)
    values = (*args, *output)
    ctx.likes = _likes(values)
    kept = registered[ctx.key].kept
    ctx.save_for_backward(*(v if keep else None for v, keep in zip(values, kept) if isinstance(v, Tensor)))


def _backward(ctx, grads):
    args, outs, wanted = _of_library_backward(ctx)
    return _library_gradients(ctx, registered[ctx.key].gradients(grads, args, outs, ctx.likes, wanted))


def _of_library_backward(ctx) -> tuple[list, Sequence[Any], list[bool]]:
    """As _of_backward."""
    saved = ctx.saved_tensors
    needs = iter(ctx.needs_input_grad[2])
    wanted = [kind == "t" and next(needs) for kind in ctx.kinds]
    return _arguments(ctx.kinds, saved[: ctx.n], ctx.numbers), saved[ctx.n :], wanted


def _library_gradients(ctx, found: Sequence[Any]) -> tuple:
    """Of op, kinds, tensors and numbers."""
    # torch counts an empty list as one of tensors, and one of numbers as a single argument.
    return None, None, [g for g, kind in zip(found, ctx.kinds) if kind == "t"], None if ctx.numbers else []


_op = define(
    "elementwise(str op, str kinds, Tensor[] tensors, Scalar[] numbers) -> Tensor[]",
    run=_run,
    fake=_fake,
    setup_context=_setup,
    backward=_backward,
)


def _run_reduction(
    key: str, kinds: str, tensors: list[Tensor], numbers: list, dims: int, keepdim: bool
) -> list[Tensor]:
    return list(as_tuple(reductions[key].raw_kept(*_arguments(kinds, tensors, numbers), dims, keepdim)))


def _fake_reduction(
    key: str, kinds: str, tensors: list[Tensor], numbers: list, dims: int, keepdim: bool
) -> list[Tensor]:
    text = reductions[key].kept_text
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    specs = [Spec(str(t.dtype).removeprefix("torch."), (1,) * t.dim(), (1,) * t.dim(), -1, 16) for t in tensors]
    dtypes = _reduction.output_dtypes(text, _reduction.types_of(text, _arguments(kinds, specs, numbers)))
    made = _reduction.reduced_shape(shape, _reduction.reduced_dims(dims, len(shape)), keepdim)
    return [tensors[0].new_empty(made, dtype=getattr(torch, dtype)) for dtype in dtypes]


def _setup_reduction(ctx, inputs, output):
    ctx.key, ctx.kinds, tensors, ctx.numbers, ctx.dims, _ = inputs
    ctx.n = len(tensors)
    args = _arguments(ctx.kinds, tensors, ctx.numbers)
    ctx.likes = _likes(args)
    ctx.save_for_backward(*reductions[ctx.key].saved(args, output))


def _backward_reduction(ctx, grads):
    args, outs, wanted = _of_library_backward(ctx)
    found = reductions[ctx.key].gradients(grads, args, outs, ctx.dims, ctx.likes, wanted)
    return *_library_gradients(ctx, found), None, None


_reduction_op = define(
    "reduction(str op, str kinds, Tensor[] tensors, Scalar[] numbers, int dims, bool keepdim) -> Tensor[]",
    run=_run_reduction,
    fake=_fake_reduction,
    setup_context=_setup_reduction,
    backward=_backward_reduction,
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

    ``random`` is a float in [0, 1) and ``random_bits`` an unsigned, one for each element and the same in the gradient: the words of
    Philox 4x32-7 by the element's place in row-major order, of a seed that the call draws from torch's generator, or that is given
    behind the arguments as a tensor of one int64. ``random_halves``, instead of these, is enough for one comparison, and costs half
    as much where all letters have two bytes: there its lower half is the upper one of a neighbour.
    """
    parsed = Text.of(text, inputs, outputs, preamble, name)
    if isinstance(grad, str):
        grad = _gradient_op(parsed, grad)
    return Elementwise(parsed, grad, composite, public)


def _gradient_op(
    text: Text | _reduction.Text, grad: str, more: Mapping[str, str] | None = None, maker: str = "elementwise"
) -> Elementwise:
    """The op of a gradient's text: its names have the types that the op's own have; ``more``: name -> type of others."""
    kinds = {name: kind for kind, name in (*text.inputs, *text.outputs)}
    kinds |= {f"d{name}": kind for name, kind in tuple(kinds.items())}
    kinds |= more or {}
    named = Text.of(grad, None, None, text.preamble, f"{text.name}_grad")
    outs = [
        (kinds[what], what)
        for _, what in _elementwise.declared(grad)
        if what[1:] in {n for _, n in text.inputs} and what[0] == "d"
    ]
    ins = [(kinds.get(what, ""), what) for _, what in named.inputs if what not in {n for _, n in outs}]
    if unknown := [what for kind, what in ins if not kind]:
        raise ValueError(f"{maker}(): grad names {', '.join(unknown)}, which is no input, output or d + output")
    # A letter that no input has: the output is converted to what it belongs to in any case.
    letters = {kind for kind, _ in ins}
    other = {kind for kind, _ in outs if _elementwise.is_letter(kind)} - letters if ins else set()
    body = "".join(f"using {kind} = {_elementwise.value_of(ins[0][0])}; " for kind in sorted(other)) + named.body
    outs = [(ins[0][0] if kind in other else kind, what) for kind, what in outs]
    return Elementwise(replace(named, body=body, inputs=tuple(ins), outputs=tuple(outs)), None)


def reduction(
    map: str,
    combine: str,
    *,
    identity: str | None = None,
    finish: str | None = None,
    inputs: str | None = None,
    accumulators: str = "A a",
    outputs: str | None = None,
    grad: str | Elementwise | None = None,
    preamble: str = "",
    name: str | None = None,
    composite: Callable[..., Any] | None = None,
) -> Reduction:
    """An op that reduces dims of its inputs: each element is mapped to accumulators, and accumulators are combined.

        norm = tkjit.reduction("A(x) * x", "a + b", identity="0", finish="sqrt(a)", grad="T dx = y == T(0) ? T(0) : dy * x / y")
        y = norm(x, dim=-1)  # any shape, strides and dtype; differentiable

        largest = tkjit.reduction(
            "x, index",
            "b.value > a.value || (b.value == a.value && b.place < a.place) ? b : a",
            accumulators="T value, i64 place", finish="value, place", outputs="T y, i64 argmax",
            grad="T dx = index == argmax ? dy : T(0)",
        )
        y, argmax = largest(x, dim=(0, 2), keepdim=True)

    Every text but ``grad`` is CUDA: an expression for each thing that it makes, separated by commas; or statements that
    ``return`` it, in braces if there are several.

    Args:
        map: The accumulators of one element, from the inputs' names, and ``index``, its place among those it is reduced with, in
            row-major order.
        combine: The accumulators of two sets of elements: ``a`` and ``b`` are those of each, numbers where there is one
            accumulator, else structs of them. Must be associative and commutative, as far as the result's roundings don't matter.
        identity: The accumulators of no element, with which others stay as they are. Without it, an empty dim can't be reduced.
        finish: The outputs, from the accumulators' names and ``count``, how many elements were reduced. By default the only
            accumulator.
        inputs: Their types and names, as :func:`elementwise` has them; by default what ``map`` names.
        accumulators: Types and names. ``A`` is what sums are kept in: float, double where an input is, a 64-bit integer where all
            are whole numbers or bool.
        outputs: Types and names; by default ``y``, of the first input's type.
        grad: The gradient's text or op as in :func:`elementwise`: what each element's gradient is. It may name inputs, outputs,
            accumulators, ``index``, ``count``, and ``d`` + name of an output.
        preamble: Functions for the texts.
        name: For messages.
        composite: The same function of torch's own ops, with ``dim`` (a tuple) and ``keepdim``: for second derivatives,
            forward-mode AD, vmap, tensors without plain memory, and, without ``grad``, the gradient.

    Returns:
        A function of a tensor or a number for each input, which broadcast, ``dim=None`` (an int, several, or all) and
        ``keepdim=False``. Outputs are contiguous.

    Raises:
        ValueError: Texts or declarations that can't be read.
        CompileError: At the first call, with the text's own line numbers, where it is no CUDA.
        IndexError: At a call: a dim that isn't there, or that is empty where there is no identity.
        RuntimeError: At a call: shapes that don't broadcast, a dim named twice; at a backward, without ``grad`` and composite.

    The order of combining is fixed by shape, strides and alignment: the same bits every time, and no atomics. NaN does what the
    texts do with it. float16 and bfloat16 are float in the texts, and results are rounded once. ``kFast`` and CUDA's functions
    are as in :func:`elementwise`. Works under torch.compile, in CUDA graphs, and for CPU tensors through the emulator.
    """
    text = _reduction.Text.of(map, combine, identity, finish, inputs, accumulators, outputs, preamble, name)
    if isinstance(grad, str):
        more = {what: "A" if _elementwise.is_letter(kind) else kind for kind, what in text.accumulators}
        grad = _gradient_op(text, grad, {**more, "count": "i64", "index": "i64"}, "reduction")
    return Reduction(text, grad, composite)


# --- raw kernels -----------------------------------------------------------------------------------------------------


def _scalar(name: str, format: str, kind: str, doc: str) -> Callable[[Any], Scalar]:
    def make(value: Any) -> Scalar:
        given = value.item() if hasattr(value, "item") else value
        try:
            if kind == "float":
                if isinstance(given, str | bytes) or given is None:
                    raise TypeError
                given = float(given)
            else:
                given = operator.index(given)
        except TypeError:
            raise TypeError(f"{name}(): {value!r} is no {kind}") from None
        if name == "bool_":
            return Scalar("?", bool(given))
        if name == "bf16":
            bits = int.from_bytes(pack("=f", given), "little")
            # To nearest, ties to even; a NaN stays one.
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if given == given else bits >> 16 | 0x40
            return Scalar("H", rounded)
        try:
            data = pack(f"={format}", given)
        except (struct_error, OverflowError):
            raise OverflowError(f"{name}(): {value!r} is out of range") from None
        # As it is rounded, so that equal arguments have one plan.
        return (
            Scalar("H", int.from_bytes(data, "little"))
            if name == "f16"
            else Scalar(format, unpack(f"={format}", data)[0])
        )

    make.__name__ = make.__qualname__ = name
    make.__doc__ = (
        f"{doc} as a kernel's argument. Raises TypeError for another kind of value, OverflowError out of range."
    )
    return make


i32 = _scalar("i32", "i", "whole number", "An ``int``")
i64 = _scalar("i64", "q", "whole number", "A ``long long``")
u32 = _scalar("u32", "I", "whole number", "An ``unsigned``")
u64 = _scalar("u64", "Q", "whole number", "An ``unsigned long long``")
f16 = _scalar("f16", "e", "float", "A ``tk::f16``")
bf16 = _scalar("bf16", "f", "float", "A ``tk::bf16``")
f32 = _scalar("f32", "f", "float", "A ``float``")
f64 = _scalar("f64", "d", "float", "A ``double``")
bool_ = _scalar("bool_", "?", "whole number", "A ``bool``")


def struct(
    *fields: Tensor | Scalar | Sequence[Tensor | None] | bytes | Any | None, writes: Sequence[Tensor] = ()
) -> Struct:
    """A struct by value as a kernel's argument, its fields laid out as C lays them out.

        struct Many { float* y[8]; const float* x[8]; long long n[8]; };
        kernel.launch(..., (tkjit.struct(ys, xs, array.array("q", sizes), writes=[y for y in ys if y is not None]),))

    Args:
        fields: A tensor (its address); a list of tensors and None (an array of pointers); ``tkjit.i32(n)`` and its kin; a buffer,
            such as array.array (an array of its numbers); None (a null pointer).
        writes: The tensors among them that the kernel writes to.

    A kernel's arguments have 4096 bytes. Declare it ``const __grid_constant__`` where it is indexed.
    """
    return Struct(fields, writes)


class Kernel:
    """A kernel of CUDA text of your own.

        SOURCE = '''
        template <class T, int BLOCK>
        __global__ void scale(T* y, const T* x, float by, long long n)
        {
            const long long i = blockIdx.x * (long long)BLOCK + threadIdx.x;
            if (i < n) { y[i] = x[i] * by; }
        }
        '''
        scale = tkjit.Kernel(SOURCE, "scale", T=torch.float32, tune=[{"BLOCK": 128}, {"BLOCK": 256}])
        scale.launch(lambda p: -(-n // p["BLOCK"]), lambda p: p["BLOCK"], (y, x, tkjit.f32(2), tkjit.i64(n)))

    Args:
        source: CUDA C++. It may include the package's templates (``tk/tk.cuh`` and CUDA's mathematical functions are); what they
            have for the machine (vectors, barriers, mma, copies) is in ``tkjit``'s ``templates/tk``.
        name: The kernel's.
        tune: Template parameters to choose from. The first launch of a kind (dtypes, shapes, strides, grid) times them on
            copies of what the kernel writes, so that each launch happens once, and keeps the choice on disk. One that does not give
            what the first gives is not taken.
        parameters: The template's parameters by name: a dtype, a number, a bool, or C++ text.

    Raises:
        TypeError: A template parameter that the kernel lacks, or lacks a value.
        CompileError: At the first launch, with the text's own line numbers.

    For CPU tensors the kernel runs through the emulator: ``TKJIT_EMULATE_CHECK=1`` finds its races and what it reads or writes
    outside the tensors. ``printf`` prints. A launch has no gradient: for that, see :meth:`op`.
    """

    def __init__(
        self, source: str, name: str, *, tune: Sequence[Mapping[str, object]] | None = None, **parameters: object
    ) -> None:
        if not isinstance(source, str) or not isinstance(name, str):
            raise TypeError("Kernel(): source and name must be str")
        if "\0" in source:
            raise ValueError("Kernel(): the source has a NUL")
        self.name, self.source = name, source
        self.candidates = [{**parameters, **given} for given in tune or ({},)]
        self._signature = _raw.Signature.of(source, name)
        self._template: Template = _raw.template_of(source, name)
        self._launchers = [_raw.launcher(self._instance(given)) for given in self.candidates]
        self._chosen: dict[Any, int] = {}

    def _instance(self, given: Mapping[str, object]) -> Any:
        names = self._signature.parameters
        if not names and not given:
            return self._template.kernel(self.name)
        if names and set(given) != set(names):
            raise TypeError(
                f"Kernel(): {self.name} has the template parameters {', '.join(names)}, given are {', '.join(given)}"
            )
        values = {n: given[n] for n in names or given}
        return self._template.kernel(
            self.name,
            **{n: _raw.ctype(str(v)) if isinstance(v, torch.dtype) else v for n, v in values.items()},
        )

    def launch(
        self,
        grid: int | Sequence[int] | Callable[[dict], Any],
        block: int | Sequence[int] | Callable[[dict], Any],
        args: Sequence[Tensor | Scalar | None],
        smem: int = 0,
        cluster: int | Sequence[int] = 1,
    ) -> None:
        """Launch the kernel on torch's current stream of the tensors' device.

        Args:
            grid: Blocks, in up to three dimensions; or a function of the template parameters that gives them.
            block: Threads of a block, likewise.
            args: The kernel's arguments: tensors (their address), ``tkjit.i32(n)`` and its kin, :func:`tkjit.struct`, None for a
                null pointer.
            smem: Bytes of dynamic shared memory.
            cluster: Blocks of a cluster.

        Raises:
            TypeError: An argument of another kind, or another number of them than the kernel has.
            RuntimeError: The kernel may write to a tensor that needs a gradient; tensors of several devices.
            LaunchError: What the device refuses.

        What a tensor's parameter doesn't declare ``const`` counts as written to: its version goes up.
        """
        writes = self._signature.writes
        if writes is not None and len(writes) != len(args):
            raise TypeError(f"{self.name} has {len(writes)} parameters, but {len(args)} arguments were given")
        for i, arg in enumerate(args):
            if arg is not None and not isinstance(arg, Tensor | Scalar | Struct):
                raise TypeError(
                    f"{self.name}: argument {i} is {arg!r}; give a tensor, tkjit.i32(...) and its kin, or None"
                )
        packed = _raw.Parameters(args)
        tensors = packed.tensors
        if not tensors:
            raise TypeError(f"{self.name}: one argument at least must be a tensor")
        if any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_conj, tensors)):
            raise RuntimeError(
                f"{self.name}: a tensor's memory is not its values (torch.resolve_neg, torch.resolve_conj)"
            )
        out = [a for i, a in enumerate(args) if isinstance(a, Tensor) and (writes is None or writes[i])]
        for arg in args:
            if isinstance(arg, Struct):
                out += arg.writes
        if torch.is_grad_enabled() and any(t.requires_grad for t in out):
            raise RuntimeError(
                f"{self.name}: it may write to a tensor that needs a gradient; use torch.no_grad(), or declare it const"
            )

        place = tensors[0].device
        device = -1 if place.type == "cpu" else place.index if place.type == "cuda" else None
        if device is None:
            raise DeviceError(f"{self.name}: a tensor is neither on a GPU nor on the CPU")

        def run(i: int, given: Sequence[Any]) -> None:
            blocks, threads = (three(s(dict(self.candidates[i])) if callable(s) else s) for s in (grid, block))
            parameters = packed if given is args else _raw.Parameters(given)
            self._launchers[i](device, blocks, threads, three(cluster), smem, parameters)

        run(0 if len(self.candidates) == 1 else self._best(grid, block, args, out, run), args)
        written(*out)

    def op(
        self,
        outputs: Callable[..., Any],
        launch: Callable[..., Mapping[str, Any]],
        backward: Callable[..., Any] | None = None,
    ) -> KernelOp:
        """A function of tensors and numbers that makes its outputs with this kernel: differentiable, whole under torch.compile.

            double = tkjit.Kernel(SCALE, "scale", T=torch.float32, BLOCK=256).op(
                outputs=torch.empty_like,
                launch=lambda y, x: dict(grid=-(-x.numel() // 256), block=256, args=(y, x, tkjit.f32(2), tkjit.i64(x.numel()))),
                backward=lambda dy, x, y: double(dy),
            )
            y = double(x)

        Args:
            outputs: Arguments -> a new tensor, or several, for the kernel to fill. Also called with fake tensors.
            launch: Outputs, arguments -> what :meth:`launch` takes, as a dict. The kernel writes to no argument.
            backward: The outputs' gradients, arguments, outputs -> a gradient, or None, for each tensor among the arguments. An
                output that nothing depends on has a gradient of 0. Made of ops with gradients it has one itself.

        Tensors are given to all three contiguous, copied where they are not: gradients often are expanded from fewer elements.
        """
        return KernelOp(self, outputs, launch, backward)

    def _best(self, grid: Any, block: Any, args: Sequence[Any], out: Sequence[Tensor], run: Callable[..., None]) -> int:
        if any(isinstance(a, Struct) for a in args):
            raise NotImplementedError(f"{self.name}: candidates are not tried on what a struct points to; give one")
        kinds = tuple(
            (str(a.dtype), *a.shape, *a.stride(), a.data_ptr() % 16) if isinstance(a, Tensor) else a for a in args
        )
        sizes = tuple(None if callable(size) else three(size) for size in (grid, block))
        place = next(a.device for a in args if isinstance(a, Tensor))
        key = (kinds, sizes, place)
        if key in self._chosen:
            return self._chosen[key]
        if place.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return 0  # nothing can be timed now

        def fresh() -> tuple[list[Tensor], list[Any]]:
            copies = [_copied(t) for t in out]
            by_id = {id(t): copy for t, copy in zip(out, copies)}
            return copies, [by_id.get(id(a), a) if isinstance(a, Tensor) else a for a in args]

        made: list[list[Tensor]] = []

        def trial(i: int) -> bool:
            copies, given = fresh()
            run(i, given)
            made.append(copies)
            return all(map(_alike, made[0], copies))

        given = fresh()[1]
        wait = torch.cuda.synchronize if place.type == "cuda" else lambda: None
        device = Device.of(place.index if place.type == "cuda" else -1)
        fields = [self._template.source, self.name, repr(kinds), repr(sizes)]
        best = _raw.fastest(fields, self.candidates, device, trial, lambda i: run(i, given), wait)
        self._chosen[key] = best
        return best


class KernelOp:
    """An op that :meth:`Kernel.op` made. Call it with tensors and numbers."""

    def __init__(self, kernel: Kernel, outputs: Callable, launch: Callable, backward: Callable | None) -> None:
        self.kernel, self.outputs, self.launch, self.backward = kernel, outputs, launch, backward
        # The same in every process that makes the same ops: torch.compile keeps graphs on disk.
        parts = [kernel.source, repr(kernel.candidates), *map(_identity, (outputs, launch, backward))]
        key = f"{kernel.name}_{digest(parts)[:12]}"
        self.key = f"{key}_{sum(other.startswith(key) for other in kernel_ops)}"
        kernel_ops[self.key] = self

    def __call__(self, *args: Any) -> Any:
        kinds = "".join("t" if isinstance(arg, Tensor) else "n" for arg in args)
        tensors = [arg.contiguous() for arg in args if isinstance(arg, Tensor)]
        found = _kernel_op(self.key, kinds, tensors, [arg for arg in args if not isinstance(arg, Tensor)])
        return found[0] if len(found) == 1 else tuple(found)

    def __repr__(self) -> str:
        return f"tkjit.Kernel {self.kernel.name} as an op"


kernel_ops: dict[str, KernelOp] = {}  # by key


def _identity(function: Callable | None) -> str:
    """What a function's text is, roughly: its name and its code."""
    code = getattr(function, "__code__", None)
    return f"{getattr(function, '__qualname__', '')} {code and code.co_code.hex()} {code and code.co_names}"


def _run_kernel(key: str, kinds: str, tensors: list[Tensor], numbers: list) -> list[Tensor]:
    op, args = kernel_ops[key], _arguments(kinds, tensors, numbers)
    with torch.no_grad():
        outs = list(as_tuple(op.outputs(*args)))
        op.kernel.launch(**op.launch(*outs, *args))
    return outs


def _fake_kernel(key: str, kinds: str, tensors: list[Tensor], numbers: list) -> list[Tensor]:
    return list(as_tuple(kernel_ops[key].outputs(*_arguments(kinds, tensors, numbers))))


def _setup_kernel(ctx, inputs, output):
    ctx.key, ctx.kinds, tensors, ctx.numbers = inputs
    ctx.n = len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _backward_kernel(ctx, grads):
    op, saved = kernel_ops[ctx.key], ctx.saved_tensors
    if op.backward is None:
        raise RuntimeError(f"{op.kernel.name}: it has no gradient; give op() a backward=")
    outs = saved[ctx.n :]
    given = [torch.zeros_like(out) if g is None else g.contiguous() for g, out in zip(grads, outs)]
    found = list(as_tuple(op.backward(*given, *_arguments(ctx.kinds, saved[: ctx.n], ctx.numbers), *outs)))
    if len(found) != ctx.n:
        raise RuntimeError(f"{op.kernel.name}: its backward gives {len(found)} gradients for {ctx.n} tensors")
    return None, None, found, None if ctx.numbers else []


_kernel_op = define(
    "kernel(str op, str kinds, Tensor[] tensors, Scalar[] numbers) -> Tensor[]",
    run=_run_kernel,
    fake=_fake_kernel,
    setup_context=_setup_kernel,
    backward=_backward_kernel,
)


def _copied(t: Tensor) -> Tensor:
    """With the same strides, whatever they are, and all that lies between its first and its last element."""
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
    whole = t.as_strided((reach,), (1,)).clone()
    return whole.as_strided(t.shape, t.stride(), 0)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two candidates did the same, but for the order of sums."""
    if not a.is_floating_point() or a.numel() == 0:
        return torch.equal(a, b)
    size = a.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02 * size, equal_nan=True)
