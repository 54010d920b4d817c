"""What a user would call instead of tkjit.

Every op has three peers without being listed here: torch (the reference of its ``CASES``), torch.compile of that, and a
copy that moves the same bytes. A peer of one op is a function decorated with ``@peer(name, op, ...)`` that imports what
it needs and returns a ``(forward, backward)`` pair; where the import fails the results say "not installed". Each of the
pair takes a :class:`Call` and returns a function without arguments: the thing that is timed. Whatever can be made ahead
(saved outputs, leaves that need a gradient) is made ahead.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tkjit.testing import BenchCase, OpCases, as_tuple

Thunk = Callable[[], Any]


class NotApplicable(Exception):
    """Raised by a peer that doesn't offer this call; the message says what it lacks."""


@dataclass
class Call:
    """One bench case with its arguments made: what peers work from."""

    op: OpCases
    case: BenchCase
    direction: str  # "forward" or "backward"
    args: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...] = ()  # torch's, for peers whose backward takes them
    grads: tuple[torch.Tensor, ...] = ()  # of the outputs

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(self.case.kwargs)

    @property
    def bytes(self) -> int:
        return self.case.forward_bytes if self.direction == "forward" else self.case.backward_bytes

    def leaves(self) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
        """The arguments with those that need a gradient as leaves, and these leaves."""
        args = list(self.args)
        for i in self.case.grad_of:
            args[i] = args[i].detach().requires_grad_()
        return tuple(args), tuple(args[i] for i in self.case.grad_of)


def _no_peer(call: Call) -> Thunk:
    raise NotApplicable(f"no {call.direction}")


@dataclass(frozen=True)
class Peer:
    name: str
    forward: Callable[[Call], Thunk] = field(default=_no_peer)
    backward: Callable[[Call], Thunk] = field(default=_no_peer)
    missing: str = ""  # why it can't run at all
    checked: bool = True  # whether its results are those of the op

    def build(self, call: Call) -> Thunk:
        return (self.forward if call.direction == "forward" else self.backward)(call)


Pair = tuple[Callable[[Call], Thunk], Callable[[Call], Thunk]]
_OF_ONE_OP: list[tuple[str, tuple[str, ...], Callable[[str], Pair]]] = []


def peer(name: str, *ops: str) -> Callable[[Callable[[str], Pair]], Callable[[str], Pair]]:
    """Register a maker, called with the op's key, of a peer of these ops; it replaces an every-op peer of that name."""

    def register(maker: Callable[[str], Pair]) -> Callable[[str], Pair]:
        _OF_ONE_OP.append((name, ops, maker))
        return maker

    return register


def peers_of(op: OpCases) -> list[Peer]:
    """tkjit, then the copy, then the peers; those that can't be imported say so in ``missing``."""
    found = {
        "tkjit": Peer("tkjit", *through_autograd(op.public)),
        "copy": Peer("copy", _copy, _copy, checked=False),
        "torch": Peer("torch", *through_autograd(op.reference)),
        "torch.compile": Peer("torch.compile", *_compiled(op.reference)),
    }
    for name, ops, maker in _OF_ONE_OP:
        if op.peers_key not in ops:
            continue
        try:
            found[name] = Peer(name, *maker(op.peers_key))
        except ImportError as e:
            found[name] = Peer(name, missing=f"not installed ({e})")
    return list(found.values())


# --- Peers of every op --------------------------------------------------------


def through_autograd(function: Callable[..., Any]) -> Pair:
    """Forward without gradients; backward through ``torch.autograd.grad`` of a graph that was recorded ahead."""

    def forward(call: Call) -> Thunk:
        args, kwargs = call.args, call.kwargs

        def run() -> Any:
            with torch.no_grad():
                return function(*args, **kwargs)

        return run

    def backward(call: Call) -> Thunk:
        args, leaves = call.leaves()
        outputs = as_tuple(function(*args, **call.kwargs))
        return lambda: torch.autograd.grad(outputs, leaves, call.grads, retain_graph=True)

    return forward, backward


def _compiled(function: Callable[..., Any]) -> Pair:
    """The same under torch.compile, compiled afresh for each shape, as its best case."""

    def fresh() -> Pair:
        import torch._functorch.config as functorch

        torch._dynamo.reset()
        # A graph that is run more than once, as a benchmark does, may not give its buffers away.
        functorch.donated_buffer = False
        return through_autograd(torch.compile(function, dynamic=False))

    return lambda call: fresh()[0](call), lambda call: fresh()[1](call)


def _copy(call: Call) -> Thunk:
    """``dst.copy_(src)`` that reads and writes, together, the bytes that the call counts: the ceiling."""
    source = torch.randn(call.bytes // 8, device=call.args[0].device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# --- Softmax and log_softmax --------------------------------------------------


def _rows(call: Call) -> torch.Tensor:
    """The input as 2-D rows, for peers that know nothing else."""
    x, dim = call.args
    if dim not in (-1, x.ndim - 1) or not x.is_contiguous():
        raise NotApplicable("contiguous rows only")
    return x.view(-1, x.shape[-1])


def _rows_backward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient and the saved output as rows."""
    width = _rows(call).shape[-1]
    return call.grads[0].view(-1, width), call.outputs[0].view(-1, width)


@peer("torch", "softmax", "log_softmax")
def _torch_softmax(key: str) -> Pair:
    """Backward as the raw op, so that none of autograd's host time can count against torch."""
    forward = through_autograd({"softmax": torch.softmax, "log_softmax": torch.log_softmax}[key])[0]
    raw = getattr(torch.ops.aten, f"_{key}_backward_data")

    def backward(call: Call) -> Thunk:
        (dy,), (y,), (x, dim) = call.grads, call.outputs, call.args
        return lambda: raw(dy, y, dim, x.dtype)

    return forward, backward


@peer("triton", "softmax", "log_softmax")
def _triton_softmax(key: str) -> Pair:
    import triton_softmax

    log = key == "log_softmax"

    def forward(call: Call) -> Thunk:
        x = _rows(call)
        return lambda: triton_softmax.forward(x, log)

    def backward(call: Call) -> Thunk:
        dy, y = _rows_backward(call)
        return lambda: triton_softmax.backward(dy, y, log)

    return forward, backward


@peer("quack", "softmax")
def _quack_softmax(key: str) -> Pair:
    from quack.softmax import softmax_bwd, softmax_fwd

    def forward(call: Call) -> Thunk:
        x = _rows(call)
        return lambda: softmax_fwd(x)

    def backward(call: Call) -> Thunk:
        dy, y = _rows_backward(call)
        return lambda: softmax_bwd(dy, y)

    return forward, backward


@peer("liger", "softmax")
def _liger_softmax(key: str) -> Pair:
    from liger_kernel.ops import LigerSoftmaxFunction

    def over_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
        return LigerSoftmaxFunction.apply(x)

    forward, backward = through_autograd(over_rows)

    def checked(build: Callable[[Call], Thunk]) -> Callable[[Call], Thunk]:
        def only_rows(call: Call) -> Thunk:
            _rows(call)
            return build(call)

        return only_rows

    return checked(forward), checked(backward)


# --- Norms ---------------------------------------------------------------------


@peer("quack", "rms_norm")
def _quack_norm(key: str) -> Pair:
    from quack.rmsnorm import rmsnorm

    return through_autograd(lambda x, shape, weight: rmsnorm(x, weight))


@peer("liger", "layer_norm", "rms_norm")
def _liger_norm(key: str) -> Pair:
    from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

    def layer_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)

    def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor) -> torch.Tensor:
        return LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)  # not in place

    return through_autograd(layer_norm if key == "layer_norm" else rms_norm)


# --- Attention -----------------------------------------------------------------


def _backend(name: str) -> Pair:
    """One of torch's fused attention backends; the graph that it recorded is differentiated by it too."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def function(*args: Any, **kwargs: Any) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)

    return through_autograd(function)


@peer("torch", "scaled_dot_product_attention")
def _torch_attention(key: str) -> Pair:
    """What torch chooses itself, where the reference is its composite."""
    return through_autograd(torch.nn.functional.scaled_dot_product_attention)


@peer("flash", "scaled_dot_product_attention")
def _flash(key: str) -> Pair:
    return _backend("FLASH_ATTENTION")


@peer("cudnn", "scaled_dot_product_attention")
def _cudnn(key: str) -> Pair:
    return _backend("CUDNN_ATTENTION")


@peer("efficient", "scaled_dot_product_attention")
def _efficient(key: str) -> Pair:
    return _backend("EFFICIENT_ATTENTION")
