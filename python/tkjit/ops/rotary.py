"""rotary_embedding: pairs of a head's dims turn by the angle of their token's position.

    y_a = a cos - b sin        y_b = b cos + a sin         halves: dims i and i + R/2; interleaved: dims 2i and 2i + 1
    da = dy_a cos + dy_b sin   db = dy_b cos - dy_a sin    the turn back, which needs neither x nor y

One kernel does both ways, queries and keys in one launch (csrc/templates/rotary.cuh). Su et al., "RoFormer: enhanced
transformer with rotary position embedding", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .. import _core
from .._device import Device, device_of
from .._elementwise import output_strides
from .._library import define
from .._plan import Spec, f64, i64, plan, planned, require_dtype, struct
from .._rows import DTYPES, ITEMSIZE, ceil_div
from .._template import template
from .._torch import Op, accumulator, compiling, filled, may_overlap, reach, routed, written
from ..testing import DTYPE_NAMES, BenchCase, Sample, op_cases

THREADS = 128  # of a block: rotary::kThreads
MOST = 2**31 - THREADS  # threads that a kernel counts in 32 bits

# --- a call's arguments ----------------------------------------------------------------------------------------------


class Args(NamedTuple):
    """What the kernel and torch's composite are told, in the order in which every op here takes it."""

    query: Any
    key: Any
    cos: Any
    sin: Any
    ids: Any  # position of each token
    offsets: Any  # position of each sequence's first token
    starts: Any  # where packed sequences begin, and the end
    interleaved: bool
    seq_dim: int  # -2 or -3
    rotary_dim: int | None
    back: bool  # turn the other way: the gradient


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(t: Any) -> tuple:
    return tuple(t.shape)


def _turned(a: Args) -> int:
    """How many dims turn. Raises for arguments that don't fit each other; they may be tensors or specs."""
    query, key, cos, sin = a[:4]
    for t in (query, key):
        if t is not None:
            require_dtype("rotary_embedding", _name(t.dtype), DTYPES)
    for t in (cos, sin):
        require_dtype("rotary_embedding", _name(t.dtype), DTYPES)
    _require_shapes(a)
    head_dim, columns = query.shape[-1], cos.shape[-1]
    turned = a.rotary_dim
    if turned is None:
        turned = columns if columns == head_dim else 2 * columns
    if turned % 2 or not 0 <= turned <= head_dim:
        raise ValueError(
            f"rotary_embedding(): {turned} dims can't turn: it must be even, and at most the head_dim, {head_dim} "
            f"(query {_shape(query)}, cos {_shape(cos)}, rotary_dim {a.rotary_dim})"
        )
    if columns != turned // 2 and (columns != turned or a.interleaved):
        also = "" if a.interleaved else f", or {turned} of which the second half repeats the first"
        raise ValueError(
            f"rotary_embedding(): cos and sin have {columns} columns; to turn {turned} dims takes {turned // 2}{also}"
        )
    return turned


def _require_shapes(a: Args) -> None:
    query, key, cos, sin, ids, offsets, starts = a[:7]
    ndim, say = len(query.shape), "rotary_embedding(): "
    places = "(batch, heads, seq, head_dim), (heads, seq, head_dim) or (seq, head_dim)"
    if a.seq_dim == -3:
        places = "(batch, seq, heads, head_dim) or (tokens, heads, head_dim)"
    if not -a.seq_dim <= ndim <= (3 if starts is not None else 4):
        raise ValueError(
            f"{say}query is {_shape(query)}, but with seq_dim {a.seq_dim} it is {places}"
            f"{', and without batch with cu_seqlens' if starts is not None else ''}"
        )
    batch, tokens = query.shape[0] if ndim == 4 else 1, query.shape[a.seq_dim]
    if key is not None:
        heads = ndim - (2 if a.seq_dim == -3 else 3)
        theirs, ours = ([n for i, n in enumerate(t.shape) if i != heads] for t in (key, query))
        if len(key.shape) != ndim or theirs != ours or key.dtype != query.dtype:
            raise ValueError(
                f"{say}key is {_name(key.dtype)} {_shape(key)}, query {_name(query.dtype)} {_shape(query)}; only heads may differ"
            )
    if cos.shape != sin.shape or cos.dtype != sin.dtype or len(cos.shape) not in (2, 3):
        raise ValueError(
            f"{say}cos and sin must be alike, (positions, columns) or (batch, positions, columns); they are {_name(cos.dtype)} "
            f"{_shape(cos)} and {_name(sin.dtype)} {_shape(sin)}"
        )
    if len(cos.shape) == 3 and cos.shape[0] not in (1, batch):
        raise ValueError(f"{say}cos and sin are {_shape(cos)}, tables of another batch than query's, {_shape(query)}")
    for name, t in (("position_ids", ids), ("offsets", offsets), ("cu_seqlens", starts)):
        if t is not None and _name(t.dtype) not in ("int32", "int64"):
            raise TypeError(f"{say}{name} must be int32 or int64, not {_name(t.dtype)}")
    if ids is not None:
        if offsets is not None or starts is not None:
            raise ValueError(f"{say}position_ids tell all positions; give no offsets or cu_seqlens beside them")
        if (
            len(ids.shape) not in (1, 2)
            or ids.shape[-1] != tokens
            or (len(ids.shape) == 2 and ids.shape[0] not in (1, batch))
        ):
            raise ValueError(f"{say}position_ids are {_shape(ids)}; query has a batch of {batch} and {tokens} tokens")
    if starts is not None and (len(starts.shape) != 1 or starts.shape[0] < 1):
        raise ValueError(
            f"{say}cu_seqlens is {_shape(starts)}; it must have one dimension and one entry more than sequences"
        )
    sequences = batch if starts is None else starts.shape[0] - 1
    if offsets is not None and tuple(offsets.shape) not in ((), (1,), (sequences,)):
        raise ValueError(f"{say}offsets are {_shape(offsets)}; there are {sequences} sequences")
    if ids is None and offsets is None and starts is None and cos.shape[-2] < tokens:
        raise ValueError(f"{say}cos and sin have {cos.shape[-2]} positions, but query {_shape(query)} has {tokens}")


def _four(sizes: Sequence[Any], seq_dim: int, missing: int) -> tuple[Any, ...]:
    """Sizes or strides of (batch, heads, tokens, head_dim)."""
    b, h, s, d = [missing] * (4 - len(sizes)) + [*sizes]
    return (b, s, h, d) if seq_dim == -3 else (b, h, s, d)


# --- the kernel ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Template arguments and the order of the threads.

    Attributes:
        vec: Elements of x a load.
        tables: The tables are read in vectors too.
        heads: Heads a thread, which reads its cosines and sines once for them.
        tile: Tokens that lie side by side in a block before it goes on to other heads.
    """

    vec: int
    tables: bool
    heads: int
    tile: int

    @classmethod
    def pick(cls, a: Args, turned: int, sides: Sequence[tuple[Spec, Spec]], device: Device) -> Config:
        head_dim = a.query.shape[-1]
        runs = [turned if a.interleaved else turned // 2]  # what vectors must fill
        if _copies(sides):
            runs.append(head_dim - turned)
        vec = 16 // a.query.itemsize
        while vec > 1 and not (
            all(n % vec == 0 for n in runs) and all(_in_vectors(t, vec) for pair in sides for t in pair)
        ):
            vec //= 2
        entries = vec // 2 if a.interleaved else vec
        # Vectors of float64 are more than the registers hold beside those of a smaller type.
        tables = (
            vec > 1
            and a.cos.itemsize <= max(4, a.query.itemsize)
            and all(_in_vectors(t, entries, min(16, entries * t.itemsize)) for t in (a.cos, a.sin))
        )
        batch, _, tokens, _ = _four(a.query.shape, a.seq_dim, 1)
        counts = [_four(x.shape, a.seq_dim, 1)[1] for x, _ in sides]
        # 128 bytes on their way a thread, and a table read for four heads, of pairs in a vector for eight: 0.94 of the copy, where
        # four have 0.92. But fill the GPU first.
        heads = 8 if a.interleaved and vec > 1 else 4
        while heads > 1 and (
            heads > max(counts) or batch * tokens * sum(counts) * ceil_div(head_dim, 2 * vec) < 512 * heads * device.sms
        ):
            heads //= 2
        # Four tokens before the next heads: where these are neighbours in memory, pages of DRAM are read in order, and the heads of
        # a block still share the rows of the tables. 1 to 8 differ by 0.01. NVIDIA H200, 2026-12-04, `benchmarks/run.py
        # rotary_embedding --device --peer torch --peer liger --rounds 8`.
        tile = 1
        while tile < 4 and (tokens % (2 * tile) == 0 or tokens >= 64 * tile):
            tile *= 2
        return cls(vec, tables, heads, tile)


def _in_vectors(t: Spec, vec: int, align: int | None = None) -> bool:
    """Whether the last dimension is contiguous vectors, each at a multiple of its size."""
    *outer, (_, last) = zip(t.shape, t.strides)
    step = vec if align is None else align // t.itemsize
    return (
        last == 1
        and t.align % (vec * t.itemsize if align is None else align) == 0
        and all(s % step == 0 for n, s in outer if n > 1)
    )


def _copies(sides: Sequence[tuple[Spec, Spec]]) -> bool:
    """Whether what doesn't turn has to be written."""
    return any(x is not y for x, y in sides)


def _side(x: Spec, y: Spec, seq_dim: int, c: Config) -> list[Any]:
    fields: list[Any] = [x, y]
    for t in (x, y):
        *outer, last = _four(t.strides, seq_dim, 0)
        fields += [i64(stride) for stride in outer] + [i64(last * c.vec)]
    n_heads = _four(x.shape, seq_dim, 1)[1]
    return [*fields, i64(n_heads), i64(ceil_div(n_heads, c.heads))]


def _table(t: Spec) -> list[Any]:
    outer = t.strides[0] if len(t.shape) == 3 and t.shape[0] > 1 else 0
    return [t, i64(outer), i64(t.strides[-2]), i64(t.strides[-1])]


def _integers(t: Spec | None, per_token: bool = False) -> list[Any]:
    if t is None:
        return [None, i64(0), i64(0), i64(0)]
    steps = [s if n > 1 else 0 for n, s in zip(t.shape, t.strides)]
    outer, inner = ([0, 0, *steps][-2:]) if per_token else ([*steps, 0, 0][:2])
    return [t, i64(outer), i64(inner), i64(t.dtype == "int64")]


def _divider(d: int) -> tuple[int, int]:
    """(by, shift) with n // d == n * by >> shift for all n < 2^31."""
    shift = 31 + (d - 1).bit_length()
    return ceil_div(1 << shift, d), shift


def _launch(a: Args, turned: int, sides: Sequence[tuple[Spec, Spec]], device: Device) -> Any:
    c = Config.pick(a, turned, sides, device)
    batch, _, tokens, head_dim = _four(a.query.shape, a.seq_dim, 1)
    n_vecs, n_turned = head_dim // c.vec, turned // c.vec
    n_turning = ceil_div(n_turned, 2)
    n_copying = ceil_div(n_vecs - n_turned, 2) if _copies(sides) else 0
    fields = [field for pair in sides for field in _side(*pair, a.seq_dim, c)]
    if len(sides) == 1:
        fields += [None, None, *(i64(0),) * 10]
    n_groups = sum(ceil_div(_four(x.shape, a.seq_dim, 1)[1], c.heads) for x, _ in sides)
    n_tiles = ceil_div(tokens, c.tile)
    inner = n_groups * c.tile * (n_turning + n_copying)  # threads of a tile of tokens
    if batch * tokens * inner == 0:
        return None
    if inner > MOST:
        raise ValueError(f"rotary_embedding(): {_shape(a.query)} has more heads than there are threads for")
    # Threads are counted in 32 bits: beyond that, in chunks.
    chunk_tiles = min(n_tiles, MOST // inner)
    chunk_batch = min(batch, max(1, MOST // (inner * chunk_tiles)))
    fields += [*_table(a.cos), *_table(a.sin), *_integers(a.ids, True), *_integers(a.offsets), *_integers(a.starts)]
    sequences = 0 if a.starts is None else a.starts.shape[0] - 1
    sizes = (
        a.cos.shape[-2], sequences, batch, tokens, c.tile.bit_length() - 1, n_tiles, chunk_tiles, chunk_batch, n_turned, n_vecs,
        n_turning, n_copying,
        *_divider(n_turning + n_copying), *_divider(n_groups), *_divider(chunk_tiles),
    )  # fmt: skip
    fields += [*map(i64, sizes), f64(-1.0 if a.back else 1.0)]
    return _kernel(a.query.dtype, a.cos.dtype, a.interleaved, c).launch(
        grid=(
            ceil_div(inner * chunk_tiles * chunk_batch, THREADS),
            ceil_div(n_tiles, chunk_tiles),
            ceil_div(batch, chunk_batch),
        ),
        block=THREADS,
        args=(struct(*fields),),
    )


def _kernel(dtype: str, tables: str, interleaved: bool, c: Config) -> Any:
    return template("rotary").kernel(
        "turn", T=dtype, C=tables, kInterleaved=interleaved, kVec=c.vec, kTables=c.tables, kHeads=c.heads
    )


def all_kernels() -> Iterator[Any]:
    """Every kernel that a call can ask for."""
    for dtype in DTYPES:
        for tables in DTYPES:
            for interleaved in (False, True):
                vec = 16 // ITEMSIZE[dtype]
                while vec >= 1:
                    for in_vectors in (
                        (False, True) if vec > 1 and ITEMSIZE[tables] <= max(4, ITEMSIZE[dtype]) else (False,)
                    ):
                        for heads in (1, 2, 4, 8) if interleaved and vec > 1 else (1, 2, 4):
                            yield _kernel(dtype, tables, interleaved, Config(vec, in_vectors, heads, 1))
                    vec //= 2


@planned
def _rotate(*given: Any) -> Any:
    """The results of Args' fields, and whether they are written over query and key."""
    *fields, inplace = given
    a = Args(*fields)
    turned = _turned(a)
    inputs = [t for t in (a.query, a.key) if t is not None]
    sides = [(x, x if inplace else _like(x)) for x in inputs]
    outputs = [y for _, y in sides]
    if sum(x.numel for x in inputs) == 0:
        return plan(outputs)
    launch = _launch(a, turned, sides, device_of(a.query))
    return plan(outputs, *([launch] if launch else []))


def _like(x: Spec) -> Spec:
    return Spec(x.dtype, x.shape, output_strides(x.shape, [x.strides]), x.device, 16)


# --- torch's own ops -------------------------------------------------------------------------------------------------


def _composite(*given: Any) -> Any:
    """The same of torch's ops: for transforms, forward-mode AD, and what has no plain memory."""
    a = Args(*given[: len(Args._fields)])
    turned = _turned(a)
    wide = accumulator(a.query.dtype)
    cos, sin = (t.to(wide) for t in _gathered(a, turned))
    found = tuple(
        _turn(x, cos, -sin if a.back else sin, turned, a.interleaved) for x in (a.query, a.key) if x is not None
    )
    return found[0] if a.key is None else found


def _gathered(a: Args, turned: int) -> tuple[Tensor, Tensor]:
    """Rows of the tables for every token, in a shape that broadcasts over heads."""
    cos, sin = (t.narrow(-1, 0, turned // 2) for t in (a.cos, a.sin))
    if cos.dim() == 3 and cos.shape[0] == 1:
        cos, sin = cos.squeeze(0), sin.squeeze(0)
    rows = _rows(a, cos.shape[-2])
    if rows is None:
        cos, sin = (t.narrow(-2, 0, a.query.shape[a.seq_dim]) for t in (cos, sin))
    else:
        # Behind the tables: a row for positions outside of them, and one for tokens of no sequence.
        blank = cos.new_full((*cos.shape[:-2], 1, cos.shape[-1]), math.nan)
        cos = torch.cat((cos, blank, torch.ones_like(blank)), -2)
        sin = torch.cat((sin, blank, torch.zeros_like(blank)), -2)
        if cos.dim() == 3:
            batch = torch.arange(cos.shape[0], device=cos.device)[:, None]
            cos, sin = cos[batch, rows], sin[batch, rows]
        else:
            cos, sin = cos[rows], sin[rows]
    if cos.dim() == 3 and a.query.dim() < 4:
        cos, sin = cos.squeeze(0), sin.squeeze(0)
    if a.query.dim() == 2:
        return cos, sin
    heads = -3 if a.seq_dim == -2 else -2
    return cos.unsqueeze(heads), sin.unsqueeze(heads)


def _rows(a: Args, n_rows: int) -> Tensor | None:
    """Which row of the extended tables each token has; None: its place in the sequence."""
    if a.ids is None and a.offsets is None and a.starts is None:
        return None
    token = torch.arange(a.query.shape[a.seq_dim], device=a.query.device)
    none = None
    if a.ids is not None:
        at = a.ids.long()
    elif a.starts is not None:
        starts, n = a.starts.long(), a.starts.shape[0] - 1
        sequence = torch.searchsorted(starts, token, right=True) - 1
        none = (sequence < 0) | (sequence >= n)
        sequence = sequence.clamp(0, n)
        at = token - starts[sequence]
        if a.offsets is not None:
            given = torch.cat((a.offsets.long().reshape(-1).expand(n), starts.new_zeros(1)))
            at = at + given[sequence]
    else:
        at = token + a.offsets.long().reshape(-1, 1)
    at = torch.where((at < 0) | (at >= n_rows), n_rows, at)
    return at if none is None else torch.where(none, n_rows + 1, at)


def _pairs(x: Tensor, turned: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    half = turned // 2
    if not interleaved:
        return x.narrow(-1, 0, half), x.narrow(-1, half, half)
    a, b = x.narrow(-1, 0, turned).unflatten(-1, (half, 2)).unbind(-1)
    return a, b


def _turn(x: Tensor, cos: Tensor, sin: Tensor, turned: int, interleaved: bool) -> Tensor:
    a, b = _pairs(x.to(cos.dtype), turned, interleaved)
    a, b = a * cos - b * sin, b * cos + a * sin
    y = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    y = torch.cat((y.to(x.dtype), x.narrow(-1, turned, x.shape[-1] - turned)), -1)
    # Chosen by x, for its strides.
    return torch.where(torch.arange(x.shape[-1], device=x.device) >= turned, x, y)


def _table_gradients(a: Args, grads: Sequence[Tensor | None], needs: tuple[bool, bool]) -> list[Tensor | None]:
    """Of cos and sin, of torch's ops, which torch can differentiate on."""
    turned = _turned(a)
    wide = accumulator(a.query.dtype)
    with torch.enable_grad():
        tables = [t.detach().requires_grad_() for t in (a.cos, a.sin)]
        gathered = _gathered(a._replace(cos=tables[0], sin=tables[1]), turned)
    sums: list[Any] = [0, 0]
    for x, g in zip((a.query, a.key), grads):
        if x is not None and g is not None:
            (p, q), (dp, dq) = (_pairs(t.to(wide), turned, a.interleaved) for t in (x, g))
            sums[0] = sums[0] + (dp * p + dq * q).sum_to_size(gathered[0].shape)
            sums[1] = sums[1] + ((dp * q - dq * p) if a.back else (dq * p - dp * q)).sum_to_size(gathered[1].shape)
    found: list[Tensor | None] = []
    for table, rows, total, need in zip(tables, gathered, sums, needs):
        if need:
            # The gathering is linear, so the table's own values don't matter.
            grad = torch.autograd.grad(rows, table, total.to(rows.dtype), create_graph=torch.is_grad_enabled())[0]
            found.append(grad)
        else:
            found.append(None)
    return found


# --- autograd --------------------------------------------------------------------------------------------------------

_N = 7  # tensors among Args' fields, query and key first
_QUERY, _KEY, _COS, _SIN = range(4)


def _kept(a: Args, needs: Sequence[bool]) -> list[Any]:
    """What the gradient needs: not query and key, unless the tables have one too."""
    keep: list[Any] = [*a[:_N]]
    if not (needs[_COS] or needs[_SIN]):
        keep[_QUERY] = keep[_KEY] = None
    # Those of inference mode can't be kept.
    return [t.clone() if t is not None and t.is_inference() else t for t in keep]


def _gradients(
    grads: Sequence[Tensor | None], kept: Sequence[Any], flags: Sequence[Any], needs: Sequence[bool], run: Any
) -> list[Any]:
    """Of the tensors among Args' fields; ``run`` turns the arguments and returns a sequence."""
    wanted = [i for i in (_QUERY, _KEY) if needs[i] and grads[i] is not None]
    found: list[Any] = [None] * _N
    if wanted:
        given = [grads[i] for i in wanted]
        turned = run(given[0], given[1] if len(given) > 1 else None, *kept[2:], *flags[:-1], not flags[-1])
        for i, g in zip(wanted, turned):
            found[i] = g
    if (needs[_COS] or needs[_SIN]) and any(g is not None for g in grads):
        a = Args(*kept, *flags)
        found[_COS : _SIN + 1] = _table_gradients(a, grads, (needs[_COS], needs[_SIN]))
    return found


def _run(*args: Any) -> tuple[Tensor, ...]:
    found = _call(*args, False)
    return found if isinstance(found, tuple) else (found,)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        args = filled(ctx.arguments, tensors)
        out = _rotate(*args)
        needs = iter(ctx.needs_input_grad)
        ctx.needs = [given is ... and next(needs) for given in ctx.arguments[:_N]]
        ctx.save_for_backward(*_kept(Args(*args[:-1]), ctx.needs))
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, *grads):
        flags = ctx.arguments[_N:-1]
        found = _gradients((*grads, None)[:2], ctx.saved_tensors, flags, ctx.needs, _run)
        return tuple(g for g, given in zip(found, ctx.arguments) if given is ...)


class _RotateInPlace(torch.autograd.Function):
    """Of one tensor; the tables have no gradient."""

    @staticmethod
    def forward(ctx, *args):
        a = Args(*args)
        _rotate(*args, True)
        ctx.mark_dirty(a.query)
        ctx.save_for_backward(*_kept(a, [False] * _N))
        ctx.flags = args[_N:]
        return a.query

    @staticmethod
    def backward(ctx, g):
        needs = [True, *(False,) * (_N - 1)]
        found = _gradients((g, None), ctx.saved_tensors, ctx.flags, needs, _run)
        return (*found, *(None for _ in ctx.flags))


# --- torch.ops -------------------------------------------------------------------------------------------------------

_SCHEMA = (
    "(Tensor query, Tensor? key, Tensor cos, Tensor sin, Tensor? ids, Tensor? offsets, Tensor? starts, bool interleaved, "
    "int seq_dim, int? rotary_dim) -> Tensor[]"
)


def _setup(ctx, inputs, output):
    needs = list(ctx.needs_input_grad[:_N])
    ctx.save_for_backward(*_kept(Args._make((*inputs, False)), needs))
    ctx.flags, ctx.needs = inputs[_N:], needs
    ctx.set_materialize_grads(False)


def _differentiated(back: bool) -> Any:
    def backward(ctx, grads):
        def run(*args: Any) -> list[Tensor]:
            return (_forward_op if back else _backward_op)(*args[:-1])

        given = (*(grads or (None,)), None)[:2]
        found = _gradients(given, ctx.saved_tensors, (*ctx.flags, back), ctx.needs, run)
        return (*found, *(None for _ in ctx.flags))

    return backward


def _runner(back: bool) -> Any:
    def run(*args: Any) -> list[Tensor]:
        found = _rotate(*args, back, False)
        return list(found) if isinstance(found, tuple) else [found]

    return run


def _fake(*args: Any) -> list[Tensor]:
    a = Args._make((*args, False))
    _turned(a)
    return [
        x.new_empty_strided(x.shape, output_strides(x.shape, [x.stride()])) for x in (a.query, a.key) if x is not None
    ]


_forward_op, _backward_op = (
    define(name + _SCHEMA, run=_runner(back), fake=_fake, setup_context=_setup, backward=_differentiated(back))
    for name, back in (("rotary_embedding", False), ("rotary_embedding_backward", True))
)


def _library(*given: Any) -> Any:
    a = Args(*given[: len(Args._fields)])
    found = (_backward_op if a.back else _forward_op)(*a[:-1])
    return found[0] if a.key is None else tuple(found)


def _run_as_is(*args: Any) -> Any:
    return _call(*args)


# A subclass was seen by the public function already; what comes here of one is the gradient's call.
_OP = Op(
    "rotary_embedding", lambda *args: (_run_as_is, args), _library, _composite, autocast=lambda *args: args, dtypes=None
)
_call: Any = routed(_rotate, _Rotate, lambda *args: _OP)


# --- public ----------------------------------------------------------------------------------------------------------


def rotary_embedding(
    query: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    interleaved: bool = False,
    key: Tensor | None = None,
    *,
    offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    seq_dim: int | None = None,
    rotary_dim: int | None = None,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Turn pairs of each head's dims by the angle of the token's position: ``(a cos - b sin, b cos + a sin)``.

        q, k = tkjit.rotary_embedding(q, cos, sin, key=k)                                  # (batch, heads, seq, head_dim)
        q, k = tkjit.rotary_embedding(q, cos, sin, key=k, seq_dim=1, offsets=cache_lens)   # (batch, seq, heads, head_dim)

    Args:
        query: (batch, heads, seq, head_dim), as F.scaled_dot_product_attention has it, or without batch, or without both; with
            ``seq_dim=-3`` (batch, seq, heads, head_dim) or (seq, heads, head_dim). Any strides; float16, bfloat16 (computed in
            float32), float32 or float64.
        cos: (positions, R / 2) to turn R dims, or (batch, positions, R / 2) where each batch entry has its own. Hugging Face's
            tables of R columns are taken too: their second half repeats the first and is not read. Of any floating dtype
            and strides: ``cos[..., ::2]`` and the like cost no copy.
        sin: The same, like ``cos`` in shape and dtype.
        position_ids: (seq,) or (batch, seq), int32 or int64: the row of the tables for each token. By default tokens count from 0.
        interleaved: Pairs are dims 2i and 2i + 1, as in GPT-J; else i and i + R / 2, as in GPT-NeoX and Llama.
        key: A second tensor, of which only the number of heads may differ; both are turned in one launch.
        offsets: Position of the first token: a number, or a tensor of int32 or int64 on the device with one for all or one for each
            batch entry or packed sequence, as for decoding with a cache.
        cu_seqlens: (sequences + 1,), int32 or int64: the batch is packed, and positions begin anew at each of these tokens.
            query is then (tokens, heads, head_dim). Tokens of no sequence are not turned.
        seq_dim: Which dimension of query counts the tokens: the last but one, -2, or the last but two, -3; or the same from the
            front. By default -2, and -3 with ``cu_seqlens``.
        rotary_dim: R; the dims behind it are copied as they are. By default it is told by the tables: their columns where these are
            as many as the head's dims, else twice as many. Needed only for Hugging Face's tables of a part of the dims.
        inplace: Write over query and key.

    Returns:
        A tensor like query, of its dtype and order of dimensions, or query itself; with ``key`` a tuple of two.

    Raises:
        TypeError: A tensor was due, or integers.
        NotImplementedError: A dtype without kernels.
        ValueError: Shapes or options that don't fit each other; an odd number of dims to turn, or more than there are.
        IndexError: A number of ``offsets`` that leads out of the tables.

    Positions on the device can't be checked without waiting for it: one outside the tables gives NaN, and reads nothing. cos and
    sin may need gradients, which torch's own ops then compute; else a backward keeps neither query nor key. Tensors of the
    same arguments: ``flash_attn.layers.rotary.apply_rotary_emb`` with ``seq_dim=1``, ``apply_rotary_pos_emb`` of transformers.
    """
    tensors = (query, cos, sin, position_ids, key, offsets, cu_seqlens)
    if has_torch_function(tensors):
        given = dict(offsets=offsets, cu_seqlens=cu_seqlens, seq_dim=seq_dim, rotary_dim=rotary_dim, inplace=inplace)
        return handle_torch_function(
            rotary_embedding, tensors, query, cos, sin, position_ids, interleaved, key, **given
        )
    if not (isinstance(query, Tensor) and isinstance(cos, Tensor) and isinstance(sin, Tensor)):
        _require_tensors(query=query, cos=cos, sin=sin)
    if not (position_ids is key is cu_seqlens is None):
        _require_tensors(position_ids=position_ids, key=key, cu_seqlens=cu_seqlens, optional=True)
    if seq_dim is None:
        seq_dim = -2 if cu_seqlens is None else -3
    elif seq_dim >= 0:
        seq_dim -= query.dim()
    if seq_dim not in (-2, -3):
        raise ValueError(
            f"rotary_embedding(): seq_dim must be the last dimension but one or but two, query is {tuple(query.shape)}"
        )
    first = None
    if isinstance(offsets, Tensor):
        first = offsets
    elif offsets.__class__ is not int or offsets != 0:
        cos, sin = _from_offset(query, cos, sin, position_ids, cu_seqlens, offsets, seq_dim)
    args = (query, key, cos, sin, position_ids, first, cu_seqlens, bool(interleaved), seq_dim, rotary_dim, False)
    if inplace:
        return _in_place(args)
    if compiling():
        return _library(*args)
    return _call(*args, False)


def _require_tensors(*, optional: bool = False, **values: Any) -> None:
    for name, value in values.items():
        if not (isinstance(value, Tensor) or (optional and value is None)):
            raise TypeError(f"rotary_embedding(): argument '{name}' must be Tensor, not {type(value).__name__}")


def _from_offset(query, cos, sin, ids, starts, offset, seq_dim):
    """The tables from the row of the first token on: a number among a plan's arguments would need a plan for each."""
    if isinstance(offset, bool) or not isinstance(offset, (int, torch.SymInt)):
        raise TypeError(f"rotary_embedding(): argument 'offsets' must be int or Tensor, not {type(offset).__name__}")
    if isinstance(offset, int) and offset == 0:
        return cos, sin
    if ids is not None:
        raise ValueError("rotary_embedding(): position_ids tell all positions; give no offsets beside them")
    if cos.dim() < 2 or cos.shape != sin.shape or query.dim() < -seq_dim:
        return cos, sin  # refused later, by a message that tells more
    rows = cos.shape[-2]
    tokens = query.shape[seq_dim] if starts is None else 0
    if not 0 <= offset <= rows - tokens:
        raise IndexError(
            f"rotary_embedding(): offsets is {offset}, but there are {rows} positions, and {tokens} tokens of query"
        )
    length = tokens if starts is None else rows - offset
    return cos.narrow(-2, offset, length), sin.narrow(-2, offset, length)


def _in_place(args: tuple) -> Any:
    a = Args(*args)
    both = [t for t in (a.query, a.key) if t is not None]
    given = [t for t in a[:_N] if t is not None]
    route = 2 if compiling() else _core.route(*given)
    tables = torch.is_grad_enabled() and (a.cos.requires_grad or a.sin.requires_grad)
    if route == 2 or tables or any(_is_torchs(t, route == 1) for t in both):
        # Torch knows what may be written to, and how the gradient goes on.
        for t in both:
            t.copy_(_call_or_library(a._replace(query=t.clone(), key=None)))
    elif route == 1 or (len(both) == 2 and _meet(a.query, a.key, a.seq_dim)):
        _turned(a)  # before anything is written
        for t in both:
            one = a._replace(query=t, key=None)
            if route == 1:
                _RotateInPlace.apply(*one)
            else:
                _rotate(*one, True)
                written(t)
    else:
        _rotate(*a, True)
        for t in both:
            written(t)
    return a.query if a.key is None else (a.query, a.key)


def _is_torchs(t: Tensor, recorded: bool) -> bool:
    """Whether torch may refuse to have it written to; ``recorded``: by an autograd.Function."""
    if not t.is_contiguous() and may_overlap(t):
        return True
    if not recorded:
        return False
    whole = t
    if t._is_view():
        meta = torch._C._autograd
        if meta._get_creation_meta(t) != meta.CreationMeta.DEFAULT:
            return True
        whole = t._base
    return whole.requires_grad and whole.is_leaf


def _call_or_library(a: Args) -> Tensor:
    return _library(*a) if compiling() else _call(*a, False)


def _meet(query: Tensor, key: Tensor, seq_dim: int) -> bool:
    """Whether an element may be in both: not where they share no memory, or are parts of one packed tensor's tokens."""
    (begin, end), (other_begin, other_end) = reach(query), reach(key)
    if query.numel() == 0 or key.numel() == 0 or end <= other_begin or other_end <= begin:
        return False
    shape, strides, other = (_four(x, seq_dim, 1) for x in (query.shape, query.stride(), key.stride()))
    if any(n > 1 and s != o for n, s, o in zip(shape[::2], strides[::2], other[::2])):
        return True
    # Within a token: heads and dims of each, side by side, in steps that the tokens' strides leave room for.
    size = query.element_size()
    inner = (
        1 + sum((n - 1) * s for n, s in zip(_four(t.shape, seq_dim, 1)[1::2], _four(t.stride(), seq_dim, 0)[1::2]))
        for t in (query, key)
    )
    first, second = sorted(zip((begin, other_begin), inner))
    if first[0] + first[1] * size > second[0]:
        return True
    room = (second[0] - first[0]) // size + second[1]
    for stride, n in sorted((s, n) for n, s in zip(shape[::2], strides[::2]) if n > 1):
        if stride < room:
            return True
        room += stride * (n - 1)
    return False


# --- cases -----------------------------------------------------------------------------------------------------------


def _reference(query, cos, sin, position_ids=None, interleaved=False, key=None, *, seq_dim=-2, rotary_dim=None):
    return _composite(query, key, cos, sin, position_ids, None, None, interleaved, seq_dim % -4, rotary_dim, False)


def tables(
    positions: int, turned: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """cos and sin, (positions, turned / 2), of the usual angles."""
    frequency = 10000.0 ** (-torch.arange(turned // 2, device=device, dtype=torch.float64) * 2 / max(turned, 1))
    angle = torch.arange(positions, device=device, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _inputs(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    def made(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    for label, shape, turned, interleaved in (
        ("small", (1, 2, 3, 8), 8, False),
        ("pairs", (2, 3, 8), 8, True),
        ("a part", (1, 2, 2, 11), 6, False),
        ("a part, pairs", (3, 7), 4, True),
        ("4-D", (2, 3, 5, 32), 32, False),
        ("longer tables", (2, 5, 3, 64), 32, True),
        ("nothing turns", (2, 2, 5), 0, False),
        ("no tokens", (2, 2, 0, 8), 8, False),
    ):
        cos, sin = tables(max(shape[-2], 4), turned, accumulator(dtype), device)
        yield Sample(label, (made(*shape), cos, sin, None, interleaved))
    cos, sin = tables(5, 16, accumulator(dtype), device)
    yield Sample("tokens first", (made(2, 5, 6, 24), cos, sin), {"seq_dim": -3})
    wide = [torch.cat((t, t), -1).to(dtype).expand(2, 5, 16) for t in (cos, sin)]
    yield Sample("tables of a batch, twice as wide", (made(2, 6, 5, 16), *wide))


def _bench() -> Iterator[BenchCase]:
    """Llama 3's heads; each of them reads and writes 335 MB of bfloat16, or 671 MB of float32."""
    batch, tokens = 8, 4096

    def case(label, dtype, heads, kv, width, turned, ids=False, **kwargs):
        tokens_first = kwargs.get("seq_dim") == -3
        interleaved = kwargs.pop("interleaved", False)

        def shape(n: int) -> tuple[int, ...]:
            return (batch, tokens, n, width) if tokens_first else (batch, n, tokens, width)

        def make(device: str) -> tuple[Any, ...]:
            cos, sin = tables(tokens, turned, torch.float32, device)
            query = torch.randn(shape(heads), device=device, dtype=dtype)
            key = torch.randn(shape(kv), device=device, dtype=dtype) if kv else None
            where = torch.randint(tokens, (batch, tokens), device=device) if ids else None
            return query, cos, sin, where, interleaved, key

        moved = 2 * batch * tokens * (heads + kv) * width * dtype.itemsize + 4 * tokens * turned
        moved += 8 * batch * tokens * ids
        return BenchCase(
            label=f"{label} {heads}+{kv}x{width} {DTYPE_NAMES[dtype]}", group=label, x=moved / 1e6, dtype=dtype, make=make,
            forward_bytes=moved, backward_bytes=moved, kwargs=kwargs, batch=batch, grad_of=(0, 5) if kv else (0,),
        )  # fmt: skip

    for dtype in (torch.bfloat16, torch.float32):
        yield case("heads first", dtype, 32, 8, 128, 128)
        yield case("tokens first", dtype, 32, 8, 128, 128, seq_dim=-3)
        yield case("pairs", dtype, 32, 8, 128, 128, seq_dim=-3, interleaved=True)
    for width in (64, 256):
        yield case("tokens first", torch.bfloat16, 32, 8, width, width, seq_dim=-3)
    yield case("query alone", torch.bfloat16, 32, 0, 128, 128)
    yield case("a part", torch.bfloat16, 32, 8, 128, 64, seq_dim=-3)
    yield case("position ids", torch.bfloat16, 32, 8, 128, 128, ids=True)


CASES = op_cases(
    public=rotary_embedding,
    reference=_reference,
    inputs=_inputs,
    bench=tuple(_bench()),
)
