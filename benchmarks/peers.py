"""What a user would call instead of tkjit.

Every op has three peers without being listed here: torch (the reference of its ``CASES``), torch.compile of that, and a
copy that moves the same bytes. A peer of one op is a function decorated with ``@peer(name, op, ...)`` that imports what
it needs and returns a ``(forward, backward)`` pair; where the import fails the results say "not installed". Each of the
pair takes a :class:`Call` and returns a function without arguments: the thing that is timed. Whatever can be made ahead
(saved outputs, leaves that need a gradient) is made ahead. What writes over its arguments has copies of them, which are
filled again before each timed call (:class:`Refilled`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import adamw
from report import without_paths
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
    """Register a maker of a peer of these ops, called with the op's name, or the key that it shares with others; it
    replaces an every-op peer of that name."""

    def register(maker: Callable[[str], Pair]) -> Callable[[str], Pair]:
        _OF_ONE_OP.append((name, ops, maker))
        return maker

    return register


def peers_of(op: OpCases) -> list[Peer]:
    """tkjit, then the copy, then the peers; those that can't be imported say so in ``missing``."""
    found = {
        "tkjit": Peer("tkjit", *through_autograd(op.public), checked=not op.random),
        "copy": Peer("copy", _copy, _copy, checked=False),
        "torch": Peer("torch", *through_autograd(op.reference), checked=not op.random),
        "torch.compile": Peer("torch.compile", *made_for(lambda call: compiled(op.reference)), checked=not op.random),
    }
    for name, ops, maker in _OF_ONE_OP:
        key = next((key for key in (op.name, op.peers_key) if key in ops), None)
        if key is None:
            continue
        try:
            found[name] = Peer(name, *maker(key))
        except ImportError as e:
            found[name] = Peer(name, missing=without_paths(f"not installed ({e})"))
        except Exception as e:  # a package that dies while it is imported is as good as none
            found[name] = Peer(name, missing=without_paths(f"import failed: {type(e).__name__}: {e}"))
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


def made_for(
    make: Callable[[Call], Callable[..., Any]], pair: Callable[[Callable[..., Any]], Pair] = through_autograd
) -> Pair:
    """The same of a function that is made for the call, with whatever it needs beside the arguments."""
    return lambda call: pair(make(call))[0](call), lambda call: pair(make(call))[1](call)


class Refilled:
    """A call that writes over tensors of its own: :meth:`refill` gives them their values again, outside what is timed."""

    def __init__(self, call: Thunk, held: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._call, self._held = call, tuple(held)

    def __call__(self) -> Any:
        return self._call()

    def refill(self) -> None:
        for own, source in self._held:
            own.data.copy_(source)  # .data: autograd takes what it saved for unchanged, as the peer's own writes do


def overwriting(build: Callable[[Call], Thunk], *places: int, grads: bool = False) -> Callable[[Call], Thunk]:
    """The same with copies of the arguments in these places (and of the gradients), which the call may write over."""

    def built(call: Call) -> Thunk:
        args, dys = list(call.args), call.grads
        for i in places:
            args[i] = None if args[i] is None else args[i].clone()
        if grads:
            dys = tuple(dy.clone() for dy in dys)
        own = [(args[i], call.args[i]) for i in places if args[i] is not None]
        own += zip(dys, call.grads, strict=True) if grads else ()
        return Refilled(build(replace(call, args=tuple(args), grads=dys)), own)

    return built


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under torch.compile, compiled afresh for one shape, as its best case."""
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    # A graph that is run more than once, as a benchmark does, may not give its buffers away.
    functorch.donated_buffer = False
    return torch.compile(function, dynamic=False)


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
def _quack_rms_norm(key: str) -> Pair:
    from quack.rmsnorm import rmsnorm

    return through_autograd(lambda x, shape, weight: rmsnorm(x, weight))


@peer("quack", "layer_norm")
def _quack_layer_norm(key: str) -> Pair:
    """Its raw ops. The forward takes weight and bias in float32 alone: these it gets, made ahead."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    def forward(call: Call) -> Thunk:
        x, _, weight, bias = call.args
        weight, bias = weight.float(), bias.float()
        return lambda: layernorm_fwd(x, weight, bias, 1e-5)

    def backward(call: Call) -> Thunk:
        (x, _, weight, bias), (dy,) = call.args, call.grads
        _, rstd, mean = layernorm_fwd(x, weight.float(), bias.float(), 1e-5, return_rstd=True, return_mean=True)
        return lambda: layernorm_bwd(x, weight, dy, rstd, mean)

    return forward, backward


@peer("liger", "layer_norm", "rms_norm")
def _liger_norm(key: str) -> Pair:
    from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

    def layer_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)

    def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor) -> torch.Tensor:
        return LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", False)  # not in place

    return through_autograd(layer_norm if key == "layer_norm" else rms_norm)


# --- Element by element ----------------------------------------------------------


@peer("liger", "swiglu")
def _liger_swiglu(key: str) -> Pair:
    """Its backward writes the gradients over gate and up."""
    from liger_kernel.ops import LigerSiLUMulFunction

    forward, backward = through_autograd(LigerSiLUMulFunction.apply)
    return forward, overwriting(backward, 0, 1)


# --- Cross entropy ------------------------------------------------------------


def _step(function: Callable[..., Any]) -> Pair:
    """The backward is timed with its forward, which does some of its work, or all."""

    def backward(call: Call) -> Thunk:
        args, leaves = call.leaves()
        return lambda: torch.autograd.grad(as_tuple(function(*args, **call.kwargs)), leaves, call.grads)

    return through_autograd(function)[0], backward


LOSSES = "cross_entropy", "linear_cross_entropy"


@peer("tkjit", *LOSSES)
def _tkjit_loss(key: str) -> Pair:
    import tkjit

    return _step(getattr(tkjit, key))


@peer("torch", *LOSSES)
def _torch_loss(key: str) -> Pair:
    return made_for(lambda call: call.op.reference, _step)


@peer("torch.compile", *LOSSES)
def _compiled_loss(key: str) -> Pair:
    return made_for(lambda call: compiled(call.op.reference), _step)


@peer("torch, chunked", "linear_cross_entropy")
def _chunked_linear_cross_entropy(key: str) -> Pair:
    from torch.nn import LinearCrossEntropyOptions

    function = torch.nn.functional.linear_cross_entropy
    return _step(lambda *args: function(*args, options=LinearCrossEntropyOptions()))


@peer("liger", "linear_cross_entropy")
def _liger_linear_cross_entropy(key: str) -> Pair:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return _step(liger_fused_linear_cross_entropy)


@peer("quack", "linear_cross_entropy")
def _quack_linear_cross_entropy(key: str) -> Pair:
    """Its pipeline of scaled exponentials, where that takes the shape; else the products in the tiles that it picks untuned,
    since to tune them takes minutes."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return _step(lambda *args: chunked_linear_cross_entropy(*args, tuned=False))


@peer("quack", "cross_entropy")
def _quack_cross_entropy(key: str) -> Pair:
    from quack.cross_entropy import cross_entropy

    return _step(lambda x, target: cross_entropy(x, target, reduction="mean"))


@peer("liger", "cross_entropy")
def _liger_cross_entropy(key: str) -> Pair:
    """Its forward writes the gradient over logits that need one. It also waits for the device, to count the rows: that wait is
    in its time."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    forward, backward = _step(liger_cross_entropy)
    return forward, overwriting(backward, 0)


# --- Attention -----------------------------------------------------------------

SDPA, LAYER = "scaled_dot_product_attention", "multi_head_attention"


def _torchs(call: Call) -> Callable[..., Any]:
    """torch's function of this call; a causal window is a mask that is made ahead."""
    if call.op.peers_key == LAYER:
        return call.op.reference
    function = torch.nn.functional.scaled_dot_product_attention
    if "window" not in call.kwargs:
        return function
    q, k, *_ = call.args
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    seen = seen.tril().triu(-call.kwargs["window"][0])
    return lambda q, k, v, **_: function(q, k, v, seen)


def _backend(name: str) -> Pair:
    """One of torch's own; the graph that it recorded is differentiated by it too."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def make(call: Call) -> Callable[..., Any]:
        function = _torchs(call)

        def limited(*args: Any, **kwargs: Any) -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, name)):
                return function(*args, **kwargs)

        return limited

    return made_for(make)


@peer("torch", SDPA, "attend")
def _torch_attention(key: str) -> Pair:
    """What torch chooses itself, where the reference is its composite."""
    return made_for(_torchs)


@peer("flash", SDPA, LAYER)
def _flash(key: str) -> Pair:
    return _backend("FLASH_ATTENTION")


@peer("cudnn", SDPA, "attend", LAYER)
def _cudnn(key: str) -> Pair:
    return _backend("CUDNN_ATTENTION")


@peer("efficient", SDPA, "attend", LAYER)
def _efficient(key: str) -> Pair:
    return _backend("EFFICIENT_ATTENTION")


@peer("math", SDPA, "attend", LAYER)
def _math(key: str) -> Pair:
    return _backend("MATH")


@peer("torch", "varlen")
def _jagged(key: str) -> Pair:
    """Nested tensors, which are made in the call: views of the packed ones."""

    def function(q: Any, k: Any, v: Any, starts: torch.Tensor, *, max_seqlen_q: int, is_causal: bool, **_: Any) -> Any:
        limits = dict(min_seqlen=1, max_seqlen=max_seqlen_q)
        q, k, v = (torch.nested.nested_tensor_from_jagged(t, starts, **limits).transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return out.transpose(1, 2).values()

    return through_autograd(function)


@peer("flash", "varlen")
def _flash_varlen(key: str) -> Pair:
    from torch.nn.attention.varlen import varlen_attn

    def function(q: Any, k: Any, v: Any, starts: Any, *, max_seqlen_q: int, max_seqlen_k: int, is_causal: bool) -> Any:
        window = (-1, 0 if is_causal else -1)
        return varlen_attn(q, k, v, starts, starts, max_seqlen_q, max_seqlen_k, window_size=window)

    return through_autograd(function)


@peer("flex", SDPA, "attend", "varlen")
def _flex(key: str) -> Pair:
    """FlexAttention, compiled; which blocks count is found ahead."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def make(call: Call) -> Callable[..., Any]:
        (q, k, _, *rest), given = call.args, call.kwargs
        flex, blocks, seen = compiled(flex_attention), None, None
        mask = rest[0] if rest and key == SDPA else None
        if key == "varlen":
            entry = torch.bucketize(torch.arange(len(q), device=q.device), rest[0], right=True)
            seen = lambda b, h, i, j: (entry[i] == entry[j]) & (i >= j)  # noqa: E731
        elif "window" in given:
            seen = lambda b, h, i, j: (i >= j) & (i - j <= given["window"][0])  # noqa: E731
        elif given.get("is_causal"):
            seen = lambda b, h, i, j: i >= j  # noqa: E731
        elif mask is not None and mask.dtype == torch.bool:
            seen = lambda b, h, i, j: mask[b, 0, i, j]  # noqa: E731
        if seen is not None:
            batch, lengths = None if mask is None else len(mask), (len(q),) * 2
            lengths = lengths if key == "varlen" else (q.shape[-2], k.shape[-2])
            blocks = create_block_mask(seen, batch, None, *lengths, device=q.device)

        def function(q: Any, k: Any, v: Any, bias: Any = None, *, enable_gqa: bool = False, **_: Any) -> Any:
            added = None
            if bias is not None and bias.dtype != torch.bool:
                added = lambda score, b, h, i, j: score + bias[b, 0, i, j]  # noqa: E731
            return flex(q, k, v, added, blocks, enable_gqa=enable_gqa)

        if key != "varlen":
            return function
        return lambda q, k, v, *_, **__: function(*(t.transpose(0, 1)[None] for t in (q, k, v)))[0].transpose(0, 1)

    return made_for(make)


@peer("flash-attn-4", SDPA, "attend", "varlen")
def _flash_attn_4(key: str) -> Pair:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def packed(q: Any, k: Any, v: Any, starts: Any, *, is_causal: bool, **longest: int) -> Any:
        given = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, causal=is_causal, **longest)
        return as_tuple(flash_attn_varlen_func(q, k, v, **given))[0]

    def padded(q: Any, k: Any, v: Any, mask: Any = None, *, is_causal: bool = False, **more: Any) -> Any:
        if mask is not None:
            raise NotApplicable("no masks")
        window = more.get("window", (None, None))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return as_tuple(flash_attn_func(q, k, v, causal=is_causal, window_size=window))[0].transpose(1, 2)

    return through_autograd(packed if key == "varlen" else padded)


# --- Rotary embedding ------------------------------------------------------------

ROTARY = "rotary_embedding"


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((-b, a), -1).flatten(-2)


def _as_models_do(query: Any, cos: Any, sin: Any, ids: Any, interleaved: bool, key: Any, *, seq_dim: int = -2) -> Any:
    """apply_rotary_pos_emb of transformers, computed in float32 and rounded once."""
    turned = 2 * cos.shape[-1]
    rows = (lambda t: t[: query.shape[seq_dim]]) if ids is None else (lambda t: t[ids])
    spread = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
    cos, sin = (spread(rows(t)).unsqueeze(-3 if seq_dim == -2 else -2) for t in (cos, sin))
    rotate = _rotate_pairs if interleaved else _rotate_half

    def turn(x: torch.Tensor) -> torch.Tensor:
        part = x[..., :turned].float()
        y = (part * cos + rotate(part) * sin).to(x.dtype)
        return y if turned == x.shape[-1] else torch.cat((y, x[..., turned:]), -1)

    return turn(query) if key is None else (turn(query), turn(key))


@peer("torch", ROTARY)
def _torch_rotary(key: str) -> Pair:
    return through_autograd(_as_models_do)


@peer("torch.compile", ROTARY)
def _compiled_rotary(key: str) -> Pair:
    return made_for(lambda call: compiled(_as_models_do))


@peer("liger", ROTARY)
def _liger_rotary(key: str) -> Pair:
    """It writes over queries, keys and gradients in whose memory tokens lie first; others it copies before. The tables are made
    ahead, in float32: what it computes in."""
    from liger_kernel.ops import LigerRopeFunction

    def make(call: Call) -> Callable[..., Any]:
        _, cos, sin, ids, interleaved, keys = call.args
        if interleaved or keys is None or ids is not None:
            raise NotApplicable("halves, queries and keys, no position ids")
        cos, sin = (torch.cat((t, t), -1)[None] for t in (cos, sin))
        heads_first = _turned(call, -2)

        def function(query: Any, _cos: Any, _sin: Any, _ids: Any, _interleaved: bool, keys: Any, **_: Any) -> Any:
            return tuple(map(heads_first, LigerRopeFunction.apply(heads_first(query), heads_first(keys), cos, sin)))

        return function

    forward, backward = made_for(make)
    return overwriting(forward, 0, 5), overwriting(backward, 0, 5, grads=True)


def _turned(call: Call, seq_dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A view of a query or key whose tokens lie along ``seq_dim``; from there, the way back."""
    same = call.kwargs.get("seq_dim", -2) == seq_dim
    return lambda x: x if same else x.transpose(1, 2)


def _one_by_one(apply: Callable[..., torch.Tensor]) -> Pair:
    """A launch each for queries and keys, which have tokens first, of any strides."""

    def make(call: Call) -> Callable[..., Any]:
        if call.args[3] is not None:
            raise NotApplicable("no position ids")
        tokens_first = _turned(call, -3)

        def function(query: Any, cos: Any, sin: Any, ids: Any, interleaved: bool, keys: Any, **_: Any) -> Any:
            given = [tokens_first(x) for x in (query, keys) if x is not None]
            found = tuple(tokens_first(apply(x, cos, sin, interleaved)) for x in given)
            return found if keys is not None else found[0]

        return function

    return made_for(make)


@peer("quack", ROTARY)
def _quack_rotary(key: str) -> Pair:
    from quack.rotary import apply_rotary_emb

    return _one_by_one(apply_rotary_emb)


@peer("flash-attn", ROTARY)
def _flash_rotary(key: str) -> Pair:
    from flash_attn.layers.rotary import apply_rotary_emb

    return _one_by_one(apply_rotary_emb)


# --- AdamW -------------------------------------------------------------------------


def _stepping(make: Callable[[Call, list[torch.Tensor]], torch.optim.Optimizer], *, graph: bool = False) -> Pair:
    """Steps of an optimizer of its own copies; each goes on where the last has stopped."""

    def forward(call: Call) -> Thunk:
        own = [t.clone() for t in call.args]
        params, grads, averages, squares = adamw.by_role(own)
        optimizer = make(call, params)
        for p, g, m, v in zip(params, grads, averages, squares, strict=True):
            p.grad = g
            done = torch.tensor(float(adamw.STEPS_BEFORE), device=p.device)
            optimizer.state[p] = {"step": done, "exp_avg": m, "exp_avg_sq": v}
        step = compiled(lambda: optimizer.step()) if graph else optimizer.step

        def run() -> tuple[torch.Tensor, ...]:
            step()
            return (*params, *averages, *squares)

        return run

    return forward, _no_peer


def _of_torch(**settings: Any) -> Callable[[Call, list[torch.Tensor]], torch.optim.Optimizer]:
    def make(call: Call, params: list[torch.Tensor]) -> torch.optim.Optimizer:
        if call.args[-1].dtype != params[0].dtype:
            raise NotApplicable("states have the parameters' type")
        return torch.optim.AdamW(params, **adamw.SETTINGS, **settings)

    return make


@peer("tkjit", adamw.NAME)
def _tkjit_adamw(key: str) -> Pair:
    import tkjit

    def make(call: Call, params: list[torch.Tensor]) -> torch.optim.Optimizer:
        own = call.args[-1].dtype
        state_dtype = own if own != params[0].dtype else None
        return tkjit.optim.AdamW(params, **adamw.SETTINGS, fused=True, state_dtype=state_dtype)

    return _stepping(make)


@peer("torch", adamw.NAME)
def _torch_adamw(key: str) -> Pair:
    return _stepping(_of_torch(fused=True))


@peer("torch.compile", adamw.NAME)
def _compiled_adamw(key: str) -> Pair:
    """The step that torch computes with lists of tensors, compiled; its counters stay on the GPU."""

    def make(call: Call, params: list[torch.Tensor]) -> torch.optim.Optimizer:
        if len(params) > 500:
            raise NotApplicable("to compile for so many tensors takes minutes")
        return _of_torch(foreach=True, capturable=params[0].is_cuda)(call, params)

    return _stepping(make, graph=True)
