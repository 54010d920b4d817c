"""How an op meets the rest of torch: autograd, torch.compile, autocast, transforms, subclasses, devices.

An op's public function checks ``compiling()`` and else calls what :func:`routed` returns. That is C, and for a plain CUDA
tensor it goes on to the launch plan or to the autograd.Function; every other call comes to :func:`_slow` below.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from . import _core
from ._errors import DeviceError
from ._plan import require_dtype

# What the kernels of floating numbers take.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# True while torch.compile traces; costs a call that returns False otherwise.
compiling = torch.compiler.is_dynamo_compiling


@dataclass(frozen=True)
class Op:
    """What the slow path has to know of an op. Every callable takes the arguments of the raw op.

    Attributes:
        name: As users call it, for messages.
        public: Arguments -> the function that users call and its arguments, for subclasses with ``__torch_function__``.
        library: The ``torch.ops`` entry: for dispatch modes, fake and meta tensors.
        fallback: torch's own function: for transforms, forward-mode AD and layouts that are torch's business.
        autocast: Arguments -> arguments as torch's autocast would make them.
        dtypes: What the kernels take, where others are a NotImplementedError; None: the planner and the fake function refuse.
    """

    name: str
    public: Callable[..., tuple[Callable[..., Any], tuple]]
    library: Callable[..., Any]
    fallback: Callable[..., Any]
    autocast: Callable[..., tuple]
    dtypes: tuple[str, ...] | None = ("float16", "bfloat16", "float32", "float64")


def filled(arguments: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """``ctx.arguments`` of an autograd.Function behind :func:`routed`, the tensors in their places."""
    found = iter(tensors)
    return [next(found) if given is ... else given for given in arguments]


def routed(raw: Callable, function: type[torch.autograd.Function], op_of: Callable[..., Op]) -> Callable[..., Any]:
    """The callable behind a public function.

    Args:
        raw: What ``@planned`` returned.
        function: Its autograd.Function. It is given the tensors among the arguments; ``ctx.arguments`` has ``...`` in their places.
        op_of: The arguments -> their Op.
    """
    core = raw.__self__  # type: ignore[attr-defined]

    def autograd(*arguments: Any) -> Callable[..., Any]:
        # A class for each set of them: an argument of apply, or an attribute set on ctx, costs a tenth of a microsecond.
        bound = type(function.__name__, (function,), {})
        bound._backward_cls.arguments = arguments  # type: ignore[attr-defined]  # the type of ctx
        # Not Function.apply: that adds 2 µs of checks for transforms, in which this is never called.
        return super(torch.autograd.Function, bound).apply

    core.autograd = autograd

    def slow(*args: Any) -> Any:
        return _slow(op_of(*args), core, args)

    core.slow = slow
    return core.call


class Composed:
    """What :func:`routed` is to one plan, for an op of several plans and torch's own ops.

    Args:
        raw: Runs it on plain tensors.
        function: Its autograd.Function, of all the arguments.
        op: See :class:`Op`.
    """

    def __init__(self, raw: Callable[..., Any], function: type[torch.autograd.Function], op: Op):
        self.raw, self.function, self.op = raw, function, op

    def call(self, *args: Any) -> Any:
        plain, wanted, _ = range(3)  # of _core.route
        way = _core.route(*args)
        return self.raw(*args) if way == plain else self._apply(args) if way == wanted else _slow(self.op, self, args)

    def direct(self, *args: Any) -> Any:
        """call(), when torch has seen the call."""
        wanted = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        return self._apply(args) if wanted else self.raw(*args)

    def _apply(self, args: tuple) -> Any:
        return self.function.apply(*args)


def _slow(op: Op, core: _core.Planned | Composed, args: tuple) -> Any:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors:
        raise TypeError(f"{op.name}(): argument 'input' (position 1) must be Tensor, not {type(args[0]).__name__}")
    if has_torch_function(tensors):
        function, public_args = op.public(*args)
        return handle_torch_function(function, tensors, *public_args)
    if transformed() or torch.jit.is_tracing() or any(map(_is_torchs_business, tensors)):
        return op.fallback(*args)
    device = tensors[0].device.type
    if autocasting(device):
        with torch.autocast(device, enabled=False):
            return core.call(*op.autocast(*args))
    _check(op, tensors)
    if device != "meta" and (device not in ("cuda", "cpu") or any(t.device.type != device for t in tensors)):
        _refuse_devices(op, tensors)
    if any(map(_is_dispatching, tensors)) or torch._C._len_torch_dispatch_stack() or device == "meta":
        return op.library(*args)
    return core.direct(*map(_plain, args))


def transformed() -> bool:
    """Inside vmap, grad or another functorch transform, or with a forward-mode level open."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def autocasting(device: str) -> bool:
    """Whether torch's autocast is on for a type of device; of others than these two torch would have to be asked whether they have
    one, which torch.compile of 2.11 can't read."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What the kernels compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refusing_as(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """torch's own function, for what has no kernel, or its refusal under our name."""
    try:
        return function(*args)
    except Exception as error:
        raise type(error)(f"{name}: {error}") from None


def gradients_through(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], upstream: Sequence[Tensor | None] | Tensor
) -> list[Tensor | None]:
    """Gradients of ``function(*tensors)`` for each of the tensors, by torch's own ops, which torch can differentiate on."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, since one may be a function of another: each gradient is to leave out what comes through the others.
        given = [
            t if t is None else t.view_as(t) if again and t.requires_grad else t.detach().requires_grad_()
            for t in tensors
        ]
        sources = [t for t in given if t is not None]
        found = iter(torch.autograd.grad(function(*given), sources, upstream, create_graph=again, allow_unused=True))
    return [None if t is None else next(found) for t in given]


def drawn_seed(like: Tensor) -> Tensor:
    """A seed from torch's generator, on the device: so that a captured graph draws another one at each replay."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=like.device)


def _is_torchs_business(tensor: Tensor) -> bool:
    """What has no memory of the kind a kernel wants: other layouts, and subclasses that know torch's own ops only."""
    if _is_dispatching(tensor):
        from torch._subclasses import FakeTensor
        from torch._subclasses.functional_tensor import FunctionalTensor

        return not isinstance(tensor, (FakeTensor, FunctionalTensor))
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor()


def _is_dispatching(tensor: Tensor) -> bool:
    """A subclass that takes over at the dispatcher, as fake tensors and DTensor do."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _plain(arg: Any) -> Any:
    """The same values as a Tensor itself, without a lazy negation."""
    if not isinstance(arg, Tensor):
        return arg
    arg = arg.resolve_neg()
    return arg if type(arg) in (Tensor, torch.nn.Parameter) else arg.as_subclass(Tensor)


def _check(op: Op, tensors: list[Tensor]) -> None:
    if op.dtypes is not None:
        for tensor in tensors:
            require_dtype(op.name, str(tensor.dtype).removeprefix("torch."), op.dtypes)


def _refuse_devices(op: Op, tensors: list[Tensor]) -> None:
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise RuntimeError(
            f"{op.name}(): Expected all tensors to be on the same device, but found at least two devices, {' and '.join(devices)}!"
        )
    raise DeviceError(
        f"{op.name}(): argument 'input' is on {devices[0]}; tkjit runs on CUDA tensors, and through its emulator on the CPU's"
    )


def write_into(
    out: Tensor, name: str, dtype: torch.dtype, source: Tensor, compute: Callable[[Tensor], Tensor]
) -> Tensor:
    """The semantics of ``out=`` for an op whose result has the source's shape.

    Args:
        out: The caller's tensor; resized as torch does.
        name: The op's, for messages.
        dtype: The result's.
        source: The op's input.
        compute: Writes into the tensor it is given and returns it, or returns another one, which is then copied.
    """
    if torch.is_grad_enabled() and (source.requires_grad or out.requires_grad):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the arguments "
            "requires grad."
        )
    if forward_ad._current_level >= 0 and any(_has_tangent(tensor) for tensor in (source, out)):
        raise NotImplementedError(
            f"{name}(): functions with out=... arguments don't support forward-mode differentiation"
        )
    if out.dtype != dtype:
        raise RuntimeError(f"{name}(): Expected out tensor to have dtype {dtype}, but got {out.dtype} instead")
    if out.device != source.device:
        raise RuntimeError(f"{name}(): Expected out tensor on device {source.device}, but got {out.device} instead")
    if out.shape != source.shape:
        if out.numel() > 0:
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not match the "
                f"required output shape {list(source.shape)}. This behavior is deprecated.",
                stacklevel=4,
            )
        out.resize_(source.shape)
    if may_overlap(out):
        raise RuntimeError(
            f"{name}(): unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    result = compute(out)
    if result is not out:
        out.copy_(result)
    else:
        written(out)
    return out


def written(*tensors: Tensor) -> None:
    """Tell autograd that a kernel has written to the tensors."""
    # Those of inference mode have no version.
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def may_overlap(tensor: Tensor) -> bool:
    """Whether two elements may lie in one place: no proof that each dimension steps over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def may_write_directly(out: Tensor, source: Tensor) -> bool:
    """Whether a kernel may write ``out`` while it reads ``source``: plain tensors that share no memory, or all of it alike."""
    if _core.route(source, out) != 0:
        return False
    if out.numel() == 0:
        return True
    (out_begin, out_end), (begin, end) = reach(out), reach(source)
    if out_end <= begin or end <= out_begin:
        return True
    return out_begin == begin and out.stride() == source.stride() and out.dtype == source.dtype


def reach(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte, and of the one behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
