"""What the tests of ops share: an op and its gradients beside torch's and float64's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tkjit.testing import as_tuple, assert_close


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def mapped(function: Callable[[Tensor], Tensor], args: Sequence[Any]) -> list[Any]:
    """The arguments, the function applied to each floating-point tensor."""
    return [function(arg) if is_float(arg) else arg for arg in args]


def as_leaves(args: Sequence[Any]) -> list[Any]:
    """The arguments as they lie in memory, their floating-point tensors wanting gradients."""
    return mapped(lambda t: t.detach().requires_grad_(), args)


@dataclass
class Answer:
    """Outputs of a call, and the gradients of its floating-point tensors."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.outputs + self.gradients


SEED = 0  # of what a judged call draws


def upstream(outputs: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """A random gradient for each output."""
    generator = torch.Generator(outputs[0].device).manual_seed(seed)
    make = {"generator": generator, "device": outputs[0].device}
    return [torch.randn(out.shape, **make, dtype=torch.float32).to(out.dtype) for out in outputs]


def answer(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    grads: Sequence[Tensor] | None = None,
) -> Answer:
    """Call the function and differentiate it; ``grads`` are by default those of :func:`upstream`."""
    args = as_leaves(args)
    torch.manual_seed(SEED)  # what is random is the same each time
    outputs = as_tuple(function(*args, **(kwargs or {})))
    leaves = [arg for arg in args if is_float(arg)]
    found = torch.autograd.grad(outputs, leaves, grads or upstream(outputs)) if leaves else ()
    return Answer(tuple(out.detach() for out in outputs), found)


def check(
    public: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    grads: Sequence[Tensor] | None = None,
    label: str = "",
    dim: int | None = None,
    scale: Callable[[Answer, Sequence[Tensor]], Tensor] | None = None,
    slack: tuple[float, float] = (1.0, 1.0),
    rounded_to: torch.dtype | None = None,
) -> Answer:
    """Outputs and gradients of ``public`` are close to float64's, held to torch's own error on dense copies.

    Args:
        dim: For the outputs' closeness; see tkjit.testing.error.
        scale: For the gradients' closeness: (float64's answer, upstream gradients) -> the size of the terms that cancel.
        slack: Of the outputs and of the gradients: see tkjit.testing.closeness.
        rounded_to: What both round to on the way: see there.

    Returns:
        What ``public`` answered.
    """
    dense = mapped(lambda t: t.detach().clone(memory_format=torch.contiguous_format), args)
    own = answer(reference, dense, kwargs, grads and [g.clone(memory_format=torch.contiguous_format) for g in grads])
    grads = grads or upstream(own.outputs)
    wide = {key: value for key, value in (kwargs or {}).items() if key != "dtype"}
    wide_grads = [g.double() for g in grads]
    want = answer(reference, mapped(Tensor.double, dense), wide, wide_grads)
    got = answer(public, args, kwargs, grads)
    for i, result in enumerate(got.outputs):
        rule: dict[str, Any] = dict(dim=dim, slack=slack[0], rounded_to=rounded_to)
        assert_close(result, want.outputs[i], own.outputs[i], label=f"{label}, output {i}", **rule)
    for i, result in enumerate(got.gradients):
        size = scale(want, wide_grads) if scale else _size(want.gradients[i], wide_grads)
        rule = dict(scale=size, slack=slack[1], rounded_to=rounded_to)
        assert_close(result, want.gradients[i], own.gradients[i], label=f"{label}, gradient {i}", **rule)
    return got


def _size(gradient: Tensor, grads: Sequence[Tensor]) -> Tensor | None:
    """What a gradient's error is measured by: its own size, or the upstream gradients' where it is 0 but for rounding."""
    given = torch.stack([rms(g) for g in grads]).max()
    return given if rms(gradient) < 1e-6 * given else None


def rms(tensor: Tensor) -> Tensor:
    """Root mean square of the finite entries."""
    finite = tensor.isfinite()
    total = torch.where(finite, tensor, torch.zeros_like(tensor)).square().sum()
    return (total / finite.sum().clamp(min=1)).sqrt()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal values, NaN equal to NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def bits(tensor: Tensor) -> Tensor:
    """The values as integers of the tensor's shape; every NaN alike, and 0 apart from -0."""
    if not tensor.is_floating_point():
        return tensor.detach()
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor.detach()).contiguous().view(whole)


def assert_same(a: Sequence[Tensor], b: Sequence[Tensor], label: str = "") -> None:
    """Every tensor bit for bit its counterpart."""
    assert len(a) == len(b), label
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        if not same_bits(left, right):
            assert left.shape == right.shape and left.dtype == right.dtype, f"{label}, tensor {i}: {left} and {right}"
            differ = bits(left) != bits(right)
            where = tuple(differ.nonzero()[0].tolist())
            count = int(differ.sum())
            raise AssertionError(
                f"{label}, tensor {i}: {count} of {differ.numel()} differ, first at {where}: {left[where]}, {right[where]}"
            )


def assert_spills_nothing(launch: Any, arch: str) -> None:
    """Of a plan's launch."""
    facts = launch.instance.compiled(arch).facts
    assert facts["spill_stores"] == facts["spill_loads"] == 0, (launch.instance.expression, facts)
