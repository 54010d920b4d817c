"""scaled_dot_product_attention and its gradients.

    t = scale * q k^T, changed (+ mask)    p = softmax(t)    o = dropout(p) v
    dv = dropout(p)^T do              ds = p * (dropout(do v^T) - sum(do * o))
    dq = scale * ds k                 dk = scale * ds^T q                            dmask = ds

A kernel walks over tiles of keys with the softmax online, so that nothing of the scores' size is ever in memory
(csrc/templates/attention.cuh). Tri Dao, "FlashAttention-2: faster attention with better parallelism and work partitioning",
2023. What has no kernel (head dims above 512, second derivatives) is computed by torch's own composite, and is right too.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .._attention import DMASK, DSINKS, backward, forward, tokens_first
from .._library import define
from .._torch import Op, accumulator, compiling, drawn_seed, filled, routed
from ..testing import DTYPE_NAMES, BenchCase, Sample, as_tuple, op_cases

MAX_HEAD_DIM = 512

# torch.nn.functional's, whose name there may lead to ours: see tkjit.attention.enable.
_torchs = torch._C._nn.scaled_dot_product_attention

# --- a call's arguments ----------------------------------------------------------------------------------------------

_TENSORS = (
    "q",
    "k",
    "v",
    "mask",
    "seed",
    "sinks",
    "slopes",
    "q_starts",
    "k_starts",
    "k_lens",
    "pages",
    "e0",
    "e1",
    "e2",
)


class Args(NamedTuple):
    """What the kernels are told, in the order in which every op here takes it: see tkjit._attention.Call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    seed: Tensor | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    q_starts: Tensor | None = None
    k_starts: Tensor | None = None
    k_lens: Tensor | None = None
    pages: Tensor | None = None
    e0: Tensor | None = None
    e1: Tensor | None = None
    e2: Tensor | None = None
    mod: str | None = None
    upper: int | None = None
    lower: int | None = None
    q_most: int | None = None
    k_most: int | None = None
    softcap: float = 0.0
    scale: float = 1.0
    dropout: float = 0.0
    tf32: bool = False

    @property
    def is_varlen(self) -> bool:
        return self.q_starts is not None or self.k_starts is not None or self.k_lens is not None


_FIELDS = Args._fields
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, "
    + ", ".join(f"Tensor? {name}" for name in _TENSORS[3:])
    + ", str? mod, int? upper, int? lower, int? q_most, int? k_most, float softcap, float scale, float dropout, bool tf32"
)


# --- autograd --------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        o, stats = forward(*filled(ctx.arguments, tensors), True)
        ctx.save_for_backward(*tensors, o, stats)
        return o

    @staticmethod
    def backward(ctx, g):
        *tensors, o, stats = ctx.saved_tensors
        args = filled(ctx.arguments, tensors)
        places = [i for i, given in enumerate(ctx.arguments) if given is ...]
        needs = dict(zip(places, ctx.needs_input_grad))
        wanted = _wanted([needs.get(i, False) for i in _DIFFERENTIABLE])
        grads = (
            _differentiable(g, args, wanted) if torch.is_grad_enabled() else _gradients(g, None, o, stats, args, wanted)
        )
        found = dict(zip(_DIFFERENTIABLE, grads))
        return tuple(found.get(i) for i in places)


_DIFFERENTIABLE = tuple(_FIELDS.index(name) for name in ("q", "k", "v", "mask", "sinks"))


def _wanted(needs):
    """Of q, k, v, the mask and the sinks, by which need a gradient: one bit each."""
    return sum(bool(need) << bit for bit, need in enumerate(needs))


def _spread(found, wanted):
    """Of q, k, v, the mask and the sinks what was wanted; None for the others."""
    found = iter(found)
    return [next(found) if wanted >> bit & 1 else None for bit in range(len(_DIFFERENTIABLE))]


def _gradients(g, g_lse, o, stats, args, wanted):
    """Of q, k, v, the mask and the sinks; None where none is wanted."""
    # A hook may have given the statistics other strides, which the kernels don't ask for.
    kept = stats.contiguous()
    found = backward(g, g_lse, o, kept, *args, wanted, torch.are_deterministic_algorithms_enabled())
    grads = _spread(as_tuple(found), wanted)
    if grads[3] is not None:
        grads[3] = grads[3].to(args[3].dtype).view(args[3].shape)
    return grads


def _differentiable(g, args, wanted, g_lse=None):
    """The gradients as torch's own ops make them, which have gradients themselves."""
    if Args(*args).dropout > 0:
        raise RuntimeError("scaled_dot_product_attention: with dropout it has no second derivative")
    # Each by itself: a key that was computed from the query is no way for the query's gradient here.
    args = [t.view_as(t) if isinstance(t, Tensor) else t for t in args]
    inputs = [args[i] for bit, i in enumerate(_DIFFERENTIABLE) if wanted >> bit & 1]
    outputs = _explicit(Args(*args)) if g_lse is not None else (_composite(*args),)
    return _spread(torch.autograd.grad(outputs, inputs, (g, g_lse)[: len(outputs)], create_graph=True), wanted)


# --- of plain ops: what the kernels don't do ---------------------------------------------------------------------------


def _within(q, k, mask, upper, lower):
    """The mask that hides what lies beyond the limits too; None without either."""
    if upper is None and lower is None:
        return mask
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    seen = seen if upper is None else seen.tril(upper)
    seen = seen if lower is None else seen.triu(lower)
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def materialized(q, k, mask, upper, lower):
    """attn_mask and is_causal as torch takes them."""
    if upper == 0 and lower is None and mask is None:
        return None, True
    return _within(q, k, mask, upper, lower), False


def _composite(*args, gqa=None):
    """torch's own, of plain ops. gqa: by default whether the heads ask for it."""
    a = Args(*args)
    if a.softcap > 0 or a.mod is not None or a.slopes is not None or a.sinks is not None or a.is_varlen:
        return _explicit(a)[0]
    mask, causal = materialized(a.q, a.k, a.mask, a.upper, a.lower)
    if gqa is None:
        # Not the comparison itself, which may be symbolic.
        gqa = True if a.k.shape[-3] != a.q.shape[-3] else False  # noqa: SIM210
    with sdpa_kernel(SDPBackend.MATH):
        return _torchs(a.q, a.k, a.v, mask, a.dropout, causal, scale=a.scale, enable_gqa=gqa)


def _explicit(a: Args) -> tuple[Tensor, Tensor]:
    """Output and logarithms of the rows' sums, with what torch's own has not."""
    if a.mod is not None:
        raise NotImplementedError(
            "attention: a score_mod has kernels only: no second derivative, no forward-mode AD, no vmap, and no head dim above 512"
        )
    if not a.is_varlen:
        return _explicit_entry(a, a.q, a.k, a.v, a.mask, a.slopes, 0)
    q_bounds = a.q_starts.tolist() if a.q_starts is not None else None
    k_bounds = a.k_starts.tolist() if a.k_starts is not None else None
    entries = len(q_bounds) - 1 if q_bounds is not None else a.q.shape[0]
    outs = []
    for n in range(entries):
        q = a.q[n : n + 1] if q_bounds is None else a.q[:, :, q_bounds[n] : q_bounds[n + 1]]
        k, v = (_keys_of(a, t, n, k_bounds) for t in (a.k, a.v))
        mask = a.mask
        if mask is not None:
            mask = mask[n : n + 1] if mask.dim() == 4 and mask.shape[0] > 1 else mask
            mask = mask[..., : k.shape[2]] if mask.shape[-1] > 1 else mask
        slopes = a.slopes[n : n + 1] if a.slopes is not None else None
        outs.append(_explicit_entry(a, q, k, v, mask, slopes, k.shape[2] - q.shape[2]))
    o, lse = (torch.cat(parts, 0 if q_bounds is None else 2) for parts in zip(*outs))
    if q_bounds is not None and o.shape[2] < a.q.shape[2]:
        rest = a.q.shape[2] - o.shape[2]
        o = torch.nn.functional.pad(o, (0, 0, 0, rest))
        lse = torch.nn.functional.pad(lse, (0, rest), value=-math.inf)
    return o, lse


def _keys_of(a: Args, t: Tensor, n: int, bounds: list[int] | None) -> Tensor:
    """An entry's keys or values."""
    if a.pages is not None:
        t = t[a.pages[n].long()].transpose(0, 1).flatten(1, 2)[None]
    else:
        t = t[n : n + 1] if bounds is None else t[:, :, bounds[n] : bounds[n + 1]]
    return t if a.k_lens is None else t[:, :, : int(a.k_lens[n])]


def _explicit_entry(a, q, k, v, mask, slopes, corner):
    wide = accumulator(q.dtype)
    if k.shape[-3] not in (0, q.shape[-3]):
        k, v = (t.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if a.scale is None else a.scale
    scores = scale * (q.to(wide) @ k.to(wide).mT)
    if a.softcap > 0:
        scores = a.softcap * torch.tanh(scores / a.softcap)
    n_q, n_k = q.shape[-2], k.shape[-2]
    if slopes is not None:
        distance = torch.arange(n_k, device=q.device) - torch.arange(n_q, device=q.device)[:, None] - (n_k - n_q)
        scores = scores - slopes.to(wide)[..., None, None] * distance.abs()
    limits = (None if limit is None else limit + corner for limit in (a.upper, a.lower))
    mask = _within(q, k, mask, *limits)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if a.sinks is not None:
        sinks = a.sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    lse = (
        scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -math.inf) if scores.shape[-1] else None
    )
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., :n_k]
    o = (torch.dropout(weights, a.dropout, a.dropout > 0) @ v.to(wide)).to(q.dtype)
    return o, o.new_full(o.shape[:-1], -math.inf, dtype=wide) if lse is None else lse


# --- torch.ops -------------------------------------------------------------------------------------------------------


def _setup_forward(ctx, inputs, output):
    o, stats = output
    ctx.save_for_backward(*inputs[: len(_TENSORS)], o, stats)
    ctx.scalars = inputs[len(_TENSORS) :]
    ctx.set_materialize_grads(False)


def _library_backward(ctx, g, g_stats):
    if g is None and g_stats is None:
        return (None,) * len(_FIELDS)
    *tensors, o, stats = ctx.saved_tensors
    # Of maxima and sums only the logarithm max + log(sum) is used: what comes for the maximum is its gradient.
    g_lse = g_stats[0].contiguous() if g_stats is not None else None
    g = torch.zeros_like(o) if g is None else g
    wanted = _wanted([ctx.needs_input_grad[i] for i in _DIFFERENTIABLE])
    found = _backward_op(g, g_lse, o, stats, *tensors, *ctx.scalars, wanted)
    grads = dict(zip(_DIFFERENTIABLE, _spread(found, wanted)))
    return tuple(grads.get(i) for i in range(len(_FIELDS)))


def _setup_backward(ctx, inputs, output):
    g, g_lse, _, _, *args, ctx.wanted = inputs
    ctx.save_for_backward(g, g_lse, *args[: len(_TENSORS)])
    ctx.scalars = args[len(_TENSORS) :]


def _library_second(ctx, gradients):
    g, g_lse, *tensors = ctx.saved_tensors
    with torch.enable_grad():
        args = [t.detach() if isinstance(t, Tensor) else t for t in (*tensors, *ctx.scalars)]
        for bit, i in enumerate(_DIFFERENTIABLE):
            if bit < 3 or ctx.wanted >> bit & 1:
                args[i].requires_grad_()
        given = [t.detach().requires_grad_() if t is not None else None for t in (g, g_lse)]
        first = [t for t in _differentiable(given[0], args, ctx.wanted, given[1]) if t is not None]
    places = [i for bit, i in enumerate(_DIFFERENTIABLE) if bit < 3 or ctx.wanted >> bit & 1]
    sources = [t for t in given if t is not None] + [args[i] for i in places]
    found = iter(torch.autograd.grad(first, sources, gradients, allow_unused=True))
    d_given = [next(found) if t is not None else None for t in given]
    grads = dict(zip(places, found))
    return (*d_given, None, None, *(grads.get(i) for i in range(len(_FIELDS))), None)


def _empty_like(shape, source):
    b, h, n, d = shape
    if tokens_first(source.shape, source.stride()):
        return source.new_empty((b, n, h, d)).transpose(1, 2)
    return source.new_empty(shape)


def _fake(*args):
    q, v = args[0], args[2]
    if not q.is_floating_point():
        raise RuntimeError(
            f"scaled_dot_product_attention: Expected query, key, and value of a floating type, but got {q.dtype}"
        )
    acc = accumulator(q.dtype)
    return _empty_like((*q.shape[:3], v.shape[3]), q), q.new_empty((2, *q.shape[:3]), dtype=acc)


def _fake_backward(g, g_lse, o, stats, *args):
    wanted = args[-1]
    found = [_empty_like(t.shape, t) for bit, t in enumerate(args[:3]) if wanted >> bit & 1]
    found += [torch.empty_like(args[3], memory_format=torch.contiguous_format)] if wanted & DMASK else []
    return found + ([torch.empty_like(args[5])] if wanted & DSINKS else [])


def _run_forward(*args):
    return forward(*_named(args), True)


def _run_backward(g, g_lse, o, stats, *args):
    grads = _gradients(g, g_lse, o, stats, _named(args[:-1]), args[-1])
    return [t for t in grads if t is not None]


def _named(args):
    """With the one string for each change of scores by which plans are found."""
    args = list(args)
    at = len(_TENSORS)
    args[at] = sys.intern(args[at]) if args[at] is not None else None
    return args


_forward_op = define(
    f"attention({_SCHEMA}) -> (Tensor, Tensor)",
    run=_run_forward,
    fake=_fake,
    setup_context=_setup_forward,
    backward=_library_backward,
)
_backward_op = define(
    f"attention_backward(Tensor g, Tensor? g_lse, Tensor o, Tensor stats, {_SCHEMA}, int wanted) -> Tensor[]",
    run=_run_backward,
    fake=_fake_backward,
    setup_context=_setup_backward,
    backward=_library_second,
)


def _autocast(q, k, v, mask, *more):
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(t):
        # torch casts what is floating and not double.
        return t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t

    return *map(cast, (q, k, v, mask)), *more


def _public(*args):
    return _again, args


def _again(*args):
    """The call once more, by what the kernels are told."""
    return _call(*args)


_OP = Op(
    "scaled_dot_product_attention",
    _public,
    lambda *args: _forward_op(*args)[0],
    _composite,
    _autocast,
    None,
)
_call = routed(forward, _Attention, lambda *args: _OP)


# --- public ----------------------------------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention: ``softmax(scale * query @ key.T + attn_mask) @ value``.

    Args:
        query: (..., Hq, L, E); any strides. float16 and bfloat16 (products on the tensor cores, sums in float32), float32,
            float64.
        key: (..., H, S, E), of the same dtype.
        value: (..., H, S, Ev). Leading dimensions broadcast.
        attn_mask: Broadcasts to (..., Hq, L, S). bool: True where a key is seen. float32 or query's dtype: added to the scaled
            scores, and differentiable. Or a bias of ``torch.nn.attention.bias``, which is never materialized.
        dropout_p: Probability with which a weight is dropped; the others grow by ``1 / (1 - dropout_p)``. Applies always: pass
            0 in evaluation. Drawn from torch's generator of the device.
        is_causal: Query i sees keys 0 to i.
        scale: By default ``1 / sqrt(E)``. Any number, 0 and negative ones too.
        enable_gqa: Hq may be a multiple of H: neighbouring heads of the query share one of key and value.

    Returns:
        (..., Hq, L, Ev) in query's dtype, laid out in the order of query's dimensions. A query that sees no key gives 0, and
        its gradients are 0. NaN and infinity in what a query sees reach it.

    Raises:
        TypeError: What should be a tensor isn't.
        RuntimeError: Shapes or dtypes that don't go together, or integer; a mask together with ``is_causal``; ``dropout_p``
            outside [0, 1].
        ValueError: ``is_causal`` together with a bias of ``torch.nn.attention.bias``.
        DeviceError: A GPU before sm_80; a CPU tensor without a C++ compiler.

    Same as ``torch.nn.functional.scaled_dot_product_attention``. The forward gives the same bits every time, and so does the
    backward under ``torch.use_deterministic_algorithms(True)``.
    """
    if is_causal.__class__ is not bool or enable_gqa.__class__ is not bool or isinstance(scale, str):
        _require_kinds(is_causal=(is_causal, bool), scale=(scale, float), enable_gqa=(enable_gqa, bool))
    if dropout_p is None or isinstance(dropout_p, str):
        _require_kinds(dropout_p=(dropout_p, float))
    attn_mask, upper = without_bias(query, key, attn_mask, is_causal)
    if has_torch_function_variadic(query, key, value, attn_mask):
        attn_mask, causal = materialized(query, key, attn_mask, upper, None)
        given = (query, key, value, attn_mask, dropout_p, causal)
        more = dict(scale=scale, enable_gqa=enable_gqa)
        return handle_torch_function(scaled_dot_product_attention, given[:4], *given, **more)
    return _routed(query, key, value, attn_mask, dropout_p, upper, scale, enable_gqa, _NO_MORE)


def _require_kinds(**given: tuple[object, type]) -> None:
    for name, (value, kind) in given.items():
        if not isinstance(value, kind) and not (kind is float and (value is None) == (name == "scale")):
            raise TypeError(
                f"scaled_dot_product_attention(): argument '{name}' must be {kind.__name__}, not {type(value).__name__}"
            )


def without_bias(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, int | None]:
    """A mask of plain values, if any, and up to which key, counted from its own, a query sees: of attn_mask and is_causal."""
    if isinstance(mask, CausalBias):
        if is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        lengths = mask.seq_len_q, mask.seq_len_kv
        if mask.variant != CausalVariant.LOWER_RIGHT or lengths[0] == lengths[1]:
            return None, 0
        if lengths != (query.shape[-2], key.shape[-2]):
            raise RuntimeError(
                f"scaled_dot_product_attention: the bias is of {lengths[0]} queries and {lengths[1]} keys, but there are "
                f"{query.shape[-2]} and {key.shape[-2]}"
            )
        return None, lengths[1] - lengths[0]
    if mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    return mask, 0 if is_causal else None


class More(NamedTuple):
    """What torch's signature has no word for."""

    lower: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    mod: ScoreMod | None = None
    lse: bool = False

    def args(self, q, k, v, mask, seed, upper, scale, dropout, **packed) -> Args:
        slopes, sinks, mod = self.slopes, self.sinks, self.mod
        if slopes is not None:
            entries = packed["q_starts"].shape[0] - 1 if "q_starts" in packed else q.shape[0]
            slopes = slopes.detach().float().expand(entries, q.shape[-3]).contiguous()
        if sinks is not None:
            sinks = sinks.to(accumulator(q.dtype)).contiguous()
        extra = zip(("e0", "e1", "e2"), mod.tensors if mod is not None else ())
        return Args(
            q, k, v, mask, seed, sinks, slopes, **packed, **dict(extra), mod=mod.text if mod is not None else None,
            upper=upper, lower=self.lower, softcap=float(self.softcap), scale=scale, dropout=float(dropout), tf32=_is_tf32(q),
        )  # fmt: skip


def _routed(query, key, value, mask, dropout, upper, scale, gqa, more):
    """To a kernel, or to torch where none is for such tensors."""
    if _is_torchs(query, key, value, mask):
        return _torchs_way(query, key, value, mask, dropout, upper, scale, gqa, more)
    if query.is_complex():
        raise NotImplementedError(f"scaled_dot_product_attention: not implemented for {query.dtype}")
    if not compiling() and torch._C._is_tracing():
        return _plain_ops(more.args(query, key, value, mask, None, upper, scale, dropout), gqa, more.lse)
    if dropout and not 0.0 <= dropout <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout}")
    if not (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1] == value.shape[1]
        and (query.shape[1] == key.shape[1] or (gqa and key.shape[1] != 0 and query.shape[1] != 0))
        and 0 < query.shape[3] <= MAX_HEAD_DIM
        and 0 < value.shape[3] <= MAX_HEAD_DIM
    ):
        return _general(query, key, value, mask, dropout, upper, scale, gqa, more)
    return _attend(query, key, value, mask, dropout, upper, scale, more)


def _is_torchs(query, key, value, mask):
    """Nested tensors, which no kernel of ours is for; masks of one dim, which torch takes on some devices; and what is no tensor,
    for torch to refuse."""
    return (
        not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor))
        or not (mask is None or (isinstance(mask, Tensor) and mask.dim() >= 2))
        or query.is_nested
        or key.is_nested
        or value.is_nested
    )


def _torchs_way(query, key, value, mask, dropout, upper, scale, gqa, more):
    if mask is None and all(map(_is_jagged, (query, key, value))) and not compiling():
        found = _jagged(query, key, value, dropout, upper, scale, more)
        if found is not None:
            return found
    if more is not _NO_MORE and (
        more.lse or more.softcap or more.sinks is not None or more.slopes is not None or more.mod
    ):
        raise NotImplementedError(
            "attend(): nested tensors other than jagged ones, and masks of one dim, are for torch's own"
        )
    tensors = isinstance(query, Tensor) and isinstance(key, Tensor)
    mask, causal = materialized(query, key, mask, upper, more.lower) if tensors else (mask, False)
    return _torchs(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)


def _is_jagged(t: Any) -> bool:
    """(batch, heads, one's own length, d), with entries one behind the other."""
    return (
        isinstance(t, Tensor)
        and t.is_nested
        and t.layout is torch.jagged
        and t.dim() == 4
        and t._ragged_idx == 2
        and t._lengths is None
    )


def _jagged(query, key, value, dropout, upper, scale, more):
    """Nested tensors as packed entries; None if that isn't what torch makes of them."""
    starts = query.offsets(), key.offsets()
    if (upper is not None or more.lower is not None) and starts[0] is not starts[1]:
        return None  # torch counts from another corner than packed entries do
    q, k, v = (t.transpose(1, 2).values() for t in (query, key, value))
    found = _packed(q, k, v, starts, (None, None), dropout, upper, scale, more)
    nested = [
        torch.nested.nested_tensor_from_jagged(t if t.dim() == 3 else t.unsqueeze(-1), starts[0]).transpose(1, 2)
        for t in as_tuple(found)
    ]
    return (nested[0], nested[1].squeeze(-1)) if more.lse else nested[0]


def _attend(q, k, v, mask, dropout, upper, scale, more):
    """Four dims, of heads that go together."""
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    seed = drawn_seed(q) if dropout > 0 else None
    if more is _NO_MORE:
        args = (
            q,
            k,
            v,
            mask,
            seed,
            *_NO_TENSORS,
            None,
            upper,
            None,
            None,
            None,
            0.0,
            scale,
            float(dropout),
            _is_tf32(q),
        )
    else:
        args = more.args(q, k, v, mask, seed, upper, scale, dropout)
    return _run(args, more.lse)


def _is_tf32(q: Tensor) -> bool:
    """Whether torch's own products of float32 may be of 11 bits here: ``torch.backends.cuda.matmul.allow_tf32``."""
    return q.dtype is torch.float32 and q.is_cuda and torch.backends.cuda.matmul.allow_tf32


_NO_TENSORS = (None,) * (len(_TENSORS) - 5)


def _run(args, lse):
    """The kernels, by what they are told."""
    if not (lse or compiling()):
        return _call(*args)
    if not compiling() and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        return _explicit(Args(*args))
    if torch.is_autocast_enabled(args[0].device.type):
        args = _autocast(*args)
    o, stats = _forward_op(*args)
    return (o, stats[0] + stats[1].log()) if lse else o


def _plain_ops(a: Args, gqa: bool, lse: bool) -> Any:
    """Without kernels."""
    return _explicit(a) if lse else _composite(*a, gqa=gqa)


def _general(q, k, v, mask, dropout, upper, scale, gqa, more):
    """Any number of dims, leading dims that broadcast, heads of another number in key and value."""
    name = "scaled_dot_product_attention"
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise RuntimeError(
            f"{name}: Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: {q.dim()}, key.dim: "
            f"{k.dim()} and value.dim: {v.dim()} instead."
        )
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise RuntimeError(f"{name}: these shapes do not go together: {shapes}")
    counts = {t.shape[-3] for t in (q, k, v) if t.dim() >= 3}
    if 0 in counts and (gqa or counts <= {0, 1}):
        # torch's own divides by their number, and the process ends (2.11), or has zeros for the queries (2.13).
        nothing = q[..., :0].sum(-1, keepdim=True).expand(*q.shape[:-1], v.shape[-1])
        return (nothing, nothing.new_full(q.shape[:-1], -math.inf, dtype=torch.float32)) if more.lse else nothing
    if 0 in counts or q.shape[-1] == 0 or max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM or v.shape[-1] == 0:
        return _plain_ops(more.args(q, k, v, mask, None, upper, scale, dropout), gqa, more.lse)
    if gqa and min(q.dim(), k.dim(), v.dim()) >= 3:
        heads = q.shape[-3]
        if any(n == 0 or heads % n for n in (k.shape[-3], v.shape[-3])):
            raise RuntimeError(
                f"{name}: Number of heads in key and value must divide the number of heads in query, but got {shapes}"
            )
        if k.shape[-3] != v.shape[-3]:
            k, v = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (k, v))
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        q, k, v = (t.expand(*lead, *t.shape[-3:]) for t in (q, k, v))
    else:
        try:
            lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        except RuntimeError as error:
            raise RuntimeError(f"{name}: leading dimensions do not broadcast: {shapes}") from error
        q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
        lead = lead[:-1]
    if mask is not None and mask.dim() > 2:
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    shape = (*q.shape[:-1], v.shape[-1])
    heads = q.shape[-3] if q.dim() >= 4 or (gqa and q.dim() == 3) else 1
    batch = math.prod(q.shape[:-2]) // max(heads, 1)

    def four(t: Tensor) -> Tensor:
        own = t.shape[-3] if heads != 1 or t.dim() >= 4 else 1
        return t if t.dim() == 4 else t.reshape(batch, own, *t.shape[-2:])

    if mask is not None and mask.dim() != 4 and mask.dim() > 2:
        mask = mask.reshape(batch, heads, *mask.shape[-2:])
    found = _attend(four(q), four(k), four(v), mask, dropout, upper, scale, more)
    return (found[0].reshape(shape), found[1].reshape(shape[:-1])) if more.lse else found.reshape(shape)


# --- beyond torch's signature ------------------------------------------------------------------------------------------


class ScoreMod:
    """A change of attention's scores, as CUDA expressions.

    Args:
        expression: Of ``score``, the scaled score, a float (or double): what it becomes, before the mask is added. It may use the
            ints ``batch``, ``head``, ``query``, ``key`` (indices; of a packed entry counted in the entry), ``q_len``, ``k_len``,
            the tensors by their names, CUDA's math functions, ``min`` and ``max``. It is also asked, and the answer dropped, for
            keys that mask or window hide: an index must lie inside a tensor for every query and key.
        slope: The expression's derivative for ``score``, an expression too; ``"1"`` where something is added. None: it has no
            gradient, and asking for one is an error.
        **tensors: Up to three, contiguous, of float32, float64, int32 or int64: ``name[i]`` is an element. They have no gradient.

    Example:
        >>> mod = ScoreMod("score + bias[head * 32 + min(max(query - key, 0), 31)]", slope="1", bias=bias)
        >>> tkjit.attention.attend(q, k, v, window=(None, 0), score_mod=mod)

    Make it once and keep it: what was compiled is found by it. As FlexAttention's ``score_mod``.
    """

    def __init__(self, expression: str, slope: str | None = None, **tensors: Tensor):
        if not isinstance(expression, str) or not (slope is None or isinstance(slope, str)):
            raise TypeError("ScoreMod(): expression and slope are strings")
        if len(tensors) > 3:
            raise ValueError(f"ScoreMod(): {len(tensors)} tensors; up to 3 are possible")
        for name, t in tensors.items():
            if not isinstance(t, Tensor) or t.dtype not in (torch.float32, torch.float64, torch.int32, torch.int64):
                raise TypeError(f"ScoreMod(): {name} must be a tensor of float32, float64, int32 or int64")
            if not t.is_contiguous():
                raise ValueError(f"ScoreMod(): {name} must be contiguous")
        self.tensors = (*tensors.values(), *(None,) * (3 - len(tensors)))
        self.text = sys.intern("\x1f".join((expression, slope or "", *tensors)))


_NO_MORE = More()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    scale: float | None = None,
    *,
    window: tuple[int | None, int | None] = (None, None),
    enable_gqa: bool = False,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention with what torch's signature has no word for.

    Args:
        window: ``(left, right)``: query i of L sees the keys from ``i + S - L - left`` to ``i + S - L + right`` of S. None: no
            limit on that side; ``(n - 1, 0)`` is the causal window of n keys. Tiles of keys outside are not even loaded.
        softcap: If above 0, a scaled score s counts as ``softcap * tanh(s / softcap)``, before the mask is added.
        alibi_slopes: (Hq,) or (batch, Hq): ``slope * |i + S - L - j|`` comes off the score of query i and key j. No gradient.
        sinks: (Hq,): a further score of each head that counts in the softmax, and whose value is 0. Differentiable.
        score_mod: A :class:`ScoreMod`; it comes after cap and slopes.
        return_lse: Also return the natural logarithm of each row's sum of exponentials, -inf where a query sees no key.
            Differentiable.
        query, key, value, attn_mask, dropout_p, scale, enable_gqa: As of :func:`scaled_dot_product_attention`; a key counts that
            window and mask both let through.

    Returns:
        As :func:`scaled_dot_product_attention`; a query that sees no key gives 0. With ``return_lse`` that and (..., Hq, L)
        in float32 (float64 for float64).

    Raises:
        TypeError: What should be a tensor isn't.
        ValueError: ``softcap`` is negative.
        RuntimeError: Shapes or dtypes that don't go together; ``dropout_p`` outside [0, 1]; a gradient through a ScoreMod
            without a slope.
        NotImplementedError: A ScoreMod where there are no kernels: second derivatives, vmap, forward-mode AD.
        CompileError: A ScoreMod's expression is no CUDA.

    Window and cap as FlashAttention's ``flash_attn_func`` has them, where -1 stands for None; sinks as gpt-oss has them.
    """
    given = _checked("attend", query, key, value, softcap, alibi_slopes, sinks, score_mod)
    attn_mask, corner = without_bias(query, key, attn_mask, False)
    left, right = window
    diagonal = key.shape[-2] - query.shape[-2]
    if corner is not None:
        right = corner - diagonal if right is None else min(right, corner - diagonal)
    if has_torch_function_variadic(*given, attn_mask):
        first = (query, key, value, attn_mask, dropout_p, softcap, scale)
        named = dict(window=(left, right), enable_gqa=enable_gqa, alibi_slopes=alibi_slopes, sinks=sinks)
        named |= dict(score_mod=score_mod, return_lse=return_lse)
        return handle_torch_function(attend, (*given, attn_mask), *first, **named)
    upper = None if right is None else diagonal + right
    lower = None if left is None else diagonal - left
    more = More(lower, softcap, sinks, alibi_slopes, score_mod, return_lse)
    return _routed(query, key, value, attn_mask, dropout_p, upper, scale, enable_gqa, more)


def _checked(name, query, key, value, softcap, slopes, sinks, mod):
    """The tensors, after a look at each."""
    for what, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}(): argument '{what}' must be Tensor, not {type(t).__name__}")
    for what, t in (("alibi_slopes", slopes), ("sinks", sinks)):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name}(): argument '{what}' must be Tensor, not {type(t).__name__}")
    if mod is not None and not isinstance(mod, ScoreMod):
        raise TypeError(f"{name}(): argument 'score_mod' must be ScoreMod, not {type(mod).__name__}")
    if softcap < 0:
        raise ValueError(f"{name}(): softcap is {softcap}; it must be 0 or above")
    return query, key, value, slopes, sinks


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    *,
    window: tuple[int | None, int | None] = (None, None),
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of sequences of different lengths that lie one behind the other, without padding.

    Args:
        query: (total of L, Hq, E). Sequence n has the rows ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1] - 1``.
        key: (total of S, H, E); Hq is a multiple of H.
        value: (total of S, H, Ev).
        cu_seqlens_q: (batch + 1,), int32 or int64, on the same device; rows of no sequence give 0.
        cu_seqlens_k: The same of keys; by default the queries'.
        max_seqlen_q: At least the longest sequence's queries; rows beyond it give 0. By default it is looked up, which waits
            for the device.
        max_seqlen_k: The same of keys.
        is_causal: The same as ``window=(None, 0)``: the last query sees the last key.
        dropout_p, softcap, scale, window, alibi_slopes, sinks, score_mod, return_lse: As of :func:`attend`.

    Returns:
        (total of L, Hq, Ev); with ``return_lse`` that and (total of L, Hq).

    Raises:
        As :func:`attend`.

    Differentiable. Same as FlashAttention's ``flash_attn_varlen_func``, but for the order of the logarithms' dimensions.
    """
    given = _checked("varlen", query, key, value, softcap, alibi_slopes, sinks, score_mod)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    for name, t in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64) or t.dim() != 1 or t.shape[0] < 1:
            raise TypeError(f"varlen(): argument '{name}' must be a tensor of (batch + 1,) int32 or int64")
    if any(t.dim() != 3 for t in given[:3]):
        raise RuntimeError(
            f"varlen(): query, key and value must have 3 dims, but have {[tuple(t.shape) for t in given[:3]]}"
        )
    if dropout_p and not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    right = 0 if is_causal else window[1]
    if is_causal and window[1] not in (None, 0):
        raise ValueError(f"varlen(): is_causal together with a window of {window}")
    more = More(None if window[0] is None else -window[0], softcap, sinks, alibi_slopes, score_mod, return_lse)
    starts, most = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return _packed(query, key, value, starts, most, dropout_p, right, scale, more)


def _packed(q, k, v, starts, most, dropout, upper, scale, more):
    """Of entries one behind the other, (total, heads, d)."""
    longest = [
        int(t.diff().max()) if n is None and t.shape[0] > 1 else int(n or 0) for t, n in zip(starts, most, strict=True)
    ]
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q_starts, k_starts = (t.to(torch.int32).contiguous() for t in starts)
    seed = drawn_seed(q) if dropout > 0 else None
    packed = dict(q_starts=q_starts, k_starts=k_starts, q_most=longest[0], k_most=longest[1])
    found = _by_size(more.args(q, k, v, None, seed, upper, scale, dropout, **packed), more.lse)
    if not more.lse:
        return found[0].transpose(0, 1)
    return found[0][0].transpose(0, 1), found[1][0].transpose(0, 1)


def _by_size(args: Args, lse: bool) -> Any:
    """The kernels, or plain ops for heads that have none."""
    kernels = 0 < args.q.shape[-1] <= MAX_HEAD_DIM and 0 < args.v.shape[-1] <= MAX_HEAD_DIM
    return _run(args, lse) if kernels else _plain_ops(args, True, lse)


def with_kv_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    scale: float | None = None,
    *,
    window: tuple[int | None, int | None] = (None, None),
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of a few new queries of each sequence to its cached keys and values: a step of decoding.

    Args:
        query: (batch, L, Hq, E).
        k_cache: (batch, capacity, H, E), or, with ``block_table``, (blocks, block size, H, E).
        v_cache: The same with Ev.
        cache_seqlens: (batch,), int32 or int64, on the same device: keys that count, the queries' own included. It is read by
            the kernels, so a captured graph may change it.
        block_table: (batch, blocks of a sequence), int32 or int64: which blocks of the cache hold a sequence's keys. Those
            beyond its length are not looked at.
        is_causal: The same as ``window=(None, 0)``: the last query sees the last key.
        softcap, scale, window, alibi_slopes, sinks, score_mod, return_lse: As of :func:`attend`.

    Returns:
        (batch, L, Hq, Ev); with ``return_lse`` that and (batch, Hq, L).

    Raises:
        As :func:`attend`.
        NotImplementedError: A gradient through a ``block_table``.

    Same as FlashAttention's ``flash_attn_with_kvcache`` after the new keys are in the cache.
    """
    _checked("with_kv_cache", query, k_cache, v_cache, softcap, alibi_slopes, sinks, score_mod)
    for name, t, dims in (("cache_seqlens", cache_seqlens, 1), ("block_table", block_table, 2)):
        if not (t is None and name == "block_table") and (
            not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64) or t.dim() != dims
        ):
            raise TypeError(f"with_kv_cache(): argument '{name}' must be a tensor of {dims} dims, int32 or int64")
    if any(t.dim() != 4 for t in (query, k_cache, v_cache)):
        shapes = [tuple(t.shape) for t in (query, k_cache, v_cache)]
        raise RuntimeError(f"with_kv_cache(): query and caches must have 4 dims, but have {shapes}")
    right = 0 if is_causal else window[1]
    if is_causal and window[1] not in (None, 0):
        raise ValueError(f"with_kv_cache(): is_causal together with a window of {window}")
    q, k, v = (t.transpose(1, 2) for t in (query, k_cache, v_cache))
    more = More(None if window[0] is None else -window[0], softcap, sinks, alibi_slopes, score_mod, return_lse)
    pages = block_table.to(torch.int32).contiguous() if block_table is not None else None
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    lens = cache_seqlens.to(torch.int32).contiguous()
    found = _by_size(more.args(q, k, v, None, None, right, scale, 0.0, k_lens=lens, pages=pages), return_lse)
    return (found[0].transpose(1, 2), found[1]) if return_lse else found.transpose(1, 2)


# --- cases -----------------------------------------------------------------------------------------------------------


def _inputs(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def heads(b: int, h: int, length: int, keys: int, d: int, dv: int, group: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((b, h, length, d), (b, h // group, keys, d), (b, h // group, keys, dv))
        q, k, v = (torch.randn(shape, device=device, dtype=torch.float32).to(dtype) for shape in shapes)
        return q, k, v

    yield Sample("small", heads(1, 2, 3, 4, 8, 8))
    yield Sample("causal", heads(2, 2, 37, 50, 40, 24), {"is_causal": True})
    yield Sample("grouped", heads(1, 4, 19, 33, 16, 16, 2), {"enable_gqa": True, "scale": -0.4})
    seen = torch.rand(2, 1, 20, 17, device=device) > 0.3
    seen[0, 0, 3] = False
    yield Sample("bool mask", (*heads(2, 2, 20, 17, 64, 64), seen))
    yield Sample(
        "bias", (*heads(2, 2, 20, 17, 64, 64), torch.randn(2, 1, 17, device=device, dtype=torch.float32).to(dtype))
    )
    yield Sample("3-D", tuple(t[0] for t in heads(1, 3, 9, 9, 32, 32)))
    yield Sample("no batch", heads(0, 2, 4, 4, 8, 8))
    yield Sample("no keys", heads(1, 2, 4, 0, 8, 8))


Tensors = tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and type of each
_QKV, _TOKENS, _COLUMNS = (0, 1, 2), 16384, 2048


def _bench() -> Iterator[BenchCase]:
    """16k tokens and 2048 columns of heads, as FlashAttention's papers have them; other heads, masks, and a step of decoding."""
    for d, causal in itertools.product((64, 128, 256, 512), (False, True)):
        for length in (512, 1024, 2048, 4096, 8192):
            yield _square(f"d{d} {'causal' if causal else 'full'}", length, d, is_causal=causal)
    half = torch.bfloat16
    masks = (("bool mask", torch.bool, _QKV), ("bias", half, _QKV), ("bias with gradient", half, (*_QKV, 3)))
    kinds: tuple[tuple[str, int, dict[str, Any]], ...] = (
        *((f"d{d} full", d, dict(dtype=torch.float32)) for d in (64, 128, 256)),
        ("32 heads on 8", 128, dict(heads=(32, 8), is_causal=True, enable_gqa=True)),
        *((f"d{d} {name}", d, dict(mask=mask, grad_of=of)) for d in (64, 128) for name, mask, of in masks),
    )
    for group, d, settings in kinds:
        for length in (1024, 4096):
            yield _square(group, length, d, **settings)
    for batch in (1, 32):
        # Bytes bound it, and nobody differentiates it.
        tensors = _qkv(batch, (32, 8), 1, 128, half, keys=8192)
        yield _case("decode, batch", batch, tensors, kwargs={"enable_gqa": True}, batch=batch, grad_of=())


def _square(
    group: str,
    length: int,
    d: int,
    *,
    heads: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    mask: torch.dtype | None = None,
    grad_of: tuple[int, ...] = _QKV,
    **kwargs: Any,
) -> BenchCase:
    """As many keys as queries; of causal pairs half count, of a mask's all."""
    batch = _TOKENS // length
    tensors = _qkv(batch, heads or (_COLUMNS // d,) * 2, length, d, dtype)
    pairs = batch * tensors[0][0][1] * length * length // (2 if kwargs.get("is_causal") else 1)
    if mask is not None:
        tensors += (((batch, 1, length, length), mask),)
    return _case(group, length, tensors, _flops(pairs, d), kwargs=kwargs, batch=batch, grad_of=grad_of)


def _qkv(batch: int, heads: tuple[int, int], length: int, d: int, dtype: torch.dtype, keys: int = 0) -> Tensors:
    """heads: of q, and of k and v. keys: by default as many as queries."""
    of_keys = (batch, heads[1], keys or length, d), dtype
    return ((batch, heads[0], length, d), dtype), of_keys, of_keys


def _flops(pairs: int, d: int) -> tuple[int, int]:
    """Of the two products forward and the five backward, over pairs of a query and a key."""
    return 4 * pairs * d, 10 * pairs * d


def _case(
    group: str, x: int, tensors: Tensors, flops: tuple[int, int] | None = None, *, make: Any = None, **more: Any
) -> BenchCase:
    """The output is as large as the first tensor. The backward reads the inputs, the output and its gradient."""
    (shape, dtype), *_ = tensors
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in tensors]
    return BenchCase(
        label=f"{group} {'x'.join(map(str, shape))} {DTYPE_NAMES[dtype]}",
        group=group,
        x=x,
        dtype=dtype,
        make=functools.partial(make or _random, tensors),
        forward_bytes=sum(sizes) + sizes[0],
        backward_bytes=sum(sizes) + 2 * sizes[0] + sum(sizes[i] for i in more["grad_of"]),
        flops=flops,
        **more,
    )


def _random(tensors: Tensors, device: str) -> tuple[Tensor, ...]:
    return tuple(
        torch.rand(shape, device=device) > 0.3
        if dtype == torch.bool
        else torch.randn(shape, device=device, dtype=torch.float32).to(dtype)
        for shape, dtype in tensors
    )


def _reference(*args: Any, **kwargs: Any) -> Tensor:
    """torch's own by its math backend: its fused ones differ in what they can differentiate, and in some corners."""
    with sdpa_kernel(SDPBackend.MATH):
        return _torchs(*args, **kwargs)


# Weights are rounded to the inputs' type before they meet v; and dp - delta, of which delta was rounded with the output, is far
# smaller than the two where few keys share a query's weight. torch's own suite allows its fused backends 4 times the composite's
# error in the output, and up to 180 times in the gradients.
SLACK = (2.0, 10.0)

CASES = op_cases(
    public=scaled_dot_product_attention, reference=_reference, inputs=_inputs, bench=_bench(), slack=SLACK, dim=-1
)


# --- what is timed beside it: a window, packed sequences, a whole layer ------------------------------------------------


def _masked(q: Tensor, k: Tensor, v: Tensor, *, window: tuple[int, int]) -> Tensor:
    """attend of as many keys as queries, the window a mask."""
    return _reference(q, k, v, _within(q, k, None, window[1], -window[0]))


def _windows() -> Iterator[BenchCase]:
    """Causal windows of 1024 keys. Only pairs inside count."""
    n = 1024
    for d, length in ((64, 4096), (128, 4096), (128, 8192)):
        tensors = _qkv(_TOKENS // length, (_COLUMNS // d,) * 2, length, d, torch.bfloat16)
        batch, heads = tensors[0][0][:2]
        flops = _flops(batch * heads * (n * length - n * (n - 1) // 2), d)
        kwargs = {"window": (n - 1, 0)}
        yield _case(f"d{d} window of {n}", length, tensors, flops, kwargs=kwargs, batch=batch, grad_of=_QKV)


_LENGTHS = (4096, 3000, 2500, 2000, 1500, 1300, 900, 500, 300, 160, 128)  # 16k tokens


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, is_causal: bool = False, **_: Any) -> Tensor:
    """varlen, a sequence at a time."""
    parts = itertools.pairwise(starts.tolist())
    outs = (
        _reference(*(t[a:b].transpose(0, 1)[None] for t in (q, k, v)), is_causal=is_causal)[0].transpose(0, 1)
        for a, b in parts
    )
    return torch.cat(tuple(outs))


def _sequences() -> Iterator[BenchCase]:
    longest = max(_LENGTHS)
    kwargs = {"max_seqlen_q": longest, "max_seqlen_k": longest, "is_causal": True}
    make = functools.partial(_packed_of, _LENGTHS)
    for d in (64, 128):
        tensors = (((_TOKENS, _COLUMNS // d, d), torch.bfloat16),) * 3
        pairs = _COLUMNS // d * sum(n * n for n in _LENGTHS) // 2
        yield _case(f"d{d} causal", longest, tensors, _flops(pairs, d), make=make, kwargs=kwargs, grad_of=_QKV)


def _packed_of(lengths: tuple[int, ...], tensors: Tensors, device: str) -> tuple[Tensor, ...]:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return *_random(tensors, device), starts


def _layer(x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor, *, heads: int) -> Tensor:
    """What nn.MultiheadAttention does with a batch."""
    t, width = x.transpose(0, 1), x.shape[-1]
    given = (w_in, b_in, None, None, False, 0.0, w_out, b_out)
    out, _ = torch.nn.functional.multi_head_attention_forward(t, t, t, width, heads, *given, need_weights=False)
    return out.transpose(0, 1)


def _layer_with_ours(*args: Tensor, heads: int) -> Tensor:
    from ..attention import enabled

    with enabled():
        return _layer(*args, heads=heads)


def _layers() -> Iterator[BenchCase]:
    batch, length, width = 8, 2048, 1024
    pairs, products = batch * length * length, 8 * batch * length * width * width
    flops = products + _flops(pairs, width)[0], 2 * products + _flops(pairs, width)[1]
    yield _case(
        "16 heads of 64", length, _layer_tensors(batch, length, width, torch.bfloat16), flops, make=_layer_of,
        kwargs={"heads": 16}, grad_of=(0, 1, 2, 3, 4),
    )  # fmt: skip


def _layer_tensors(batch: int, length: int, width: int, dtype: torch.dtype) -> Tensors:
    shapes = ((batch, length, width), (3 * width, width), (3 * width,), (width, width), (width,))
    return tuple((shape, dtype) for shape in shapes)


def _layer_of(tensors: Tensors, device: str) -> tuple[Tensor, ...]:
    x, *weights = _random(tensors, device)
    return x, *(w * x.shape[-1] ** -0.5 for w in weights)


def _small_window(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("small", _random(_qkv(1, (2, 2), 6, 8, dtype), device), {"window": (2, 0)})


def _small_sequences(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    tensors = (((8, 2, 8), dtype),) * 3
    kwargs = {"max_seqlen_q": 5, "max_seqlen_k": 5, "is_causal": True}
    yield Sample("small", _packed_of((5, 3), tensors, device), kwargs)


def _small_layer(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("small", _layer_of(_layer_tensors(2, 5, 16, dtype), device), {"heads": 2})


TIMED = (
    op_cases(public=attend, reference=_masked, inputs=_small_window, bench=_windows(), slack=SLACK, dim=-1),
    op_cases(public=varlen, reference=_one_by_one, inputs=_small_sequences, bench=_sequences(), slack=SLACK, dim=-1),
    op_cases(
        public=_layer_with_ours, reference=_layer, inputs=_small_layer, bench=_layers(), name="multi_head_attention",
        slack=SLACK, dim=-1,
    ),
)  # fmt: skip
