"""tkjit.rotary_embedding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tkjit
from emulate import emulating
from judge import answer, check
from tkjit._device import ARCHS
from tkjit.ops import rotary
from tkjit.testing import LAYOUTS, as_layout, as_tuple, fence_intact, fenced

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])
both_forms = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])


def plain(x: Tensor, cos: Tensor, sin: Tensor, where: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """x (batch, heads, seq, head_dim), tables (positions, R / 2); where (batch, seq). Pair by pair, as the paper has it."""
    where = torch.arange(x.shape[2], device=x.device).expand(x.shape[0], -1) if where is None else where.long()
    half, wide = cos.shape[-1], torch.promote_types(x.dtype, torch.float32)
    columns = [column.clone() for column in x.to(wide).unbind(-1)]
    for i in range(half):
        c, s = (t[:, i].to(wide)[where][:, None] for t in (cos, sin))
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = columns[first], columns[second]
        columns[first], columns[second] = a * c - b * s, b * c + a * s
    return torch.stack(columns, -1).to(x.dtype)


def made(place: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(place, dtype)


def tables(place: str, positions: int, turned: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return rotary.tables(positions, turned, dtype, place)


def turned(function, x: Tensor, cos: Tensor, sin: Tensor, **more):
    """A function of x alone, whose tables take its precision."""
    return lambda x: function(x, *(t.double() if x.dtype == torch.float64 else t for t in (cos, sin)), **more)


# --- values ------------------------------------------------------------------------------------------------------------


@every_type
@both_forms
def test_values_and_gradients_for_every_width_of_head_and_turned_part(
    dtype: torch.dtype, interleaved: bool, place: str
) -> None:
    for width, part in (
        (2, 2),
        (5, 2),
        (8, 8),
        (24, 24),
        (64, 64),
        (64, 32),
        (64, 16),
        (80, 20),
        (96, 24),
        (128, 2),
        (7, 0),
    ):
        for heads in (1, 2, 3, 5):
            cos, sin = tables(place, 9, part)
            x = made(place, 2, heads, 3, width, dtype=dtype)
            more = {"interleaved": interleaved}
            label = f"{part} of {width}, {heads} heads"
            check(
                turned(tkjit.rotary_embedding, x, cos, sin, **more),
                turned(plain, x, cos, sin, **more),
                [x],
                label=label,
            )


@both_forms
def test_tables_of_any_dtype(interleaved: bool, place: str) -> None:
    for dtype in DTYPES:
        for kind in DTYPES:
            x, (cos, sin) = made(place, 1, 2, 4, 32, dtype=dtype), tables(place, 4, 32, kind)
            got = tkjit.rotary_embedding(x, cos, sin, interleaved=interleaved)
            want = plain(x.double(), cos.double(), sin.double(), interleaved=interleaved)
            torch.testing.assert_close(got, want.to(dtype), msg=f"{dtype} by {kind}")


@both_forms
def test_queries_and_fewer_keys_in_one_launch(interleaved: bool, place: str) -> None:
    cos, sin = tables(place, 8, 32)
    for heads, kv in ((8, 2), (5, 3), (6, 1), (1, 4), (3, 0)):
        q, k = made(place, 2, heads, 7, 48), made(place, 2, kv, 7, 48)
        before = tkjit.cache.stats()["compiles"], tkjit.cache.stats()["plan_misses"]
        got = tkjit.rotary_embedding(q, cos, sin, key=k, interleaved=interleaved)
        assert isinstance(got, tuple) and tkjit.cache.stats()["plan_misses"] == before[1] + 1
        for x, y in zip((q, k), got, strict=True):
            torch.testing.assert_close(y, plain(x, cos, sin, interleaved=interleaved))
        check(
            lambda q, k: tkjit.rotary_embedding(q, cos, sin, None, interleaved, k),
            lambda q, k: tuple(plain(x, cos.to(x.dtype), sin.to(x.dtype), interleaved=interleaved) for x in (q, k)),
            [q, k],
            label=f"{heads} and {kv}",
        )


@both_forms
def test_layouts_and_their_strides(interleaved: bool, place: str) -> None:
    cos, sin = tables(place, 6, 16)
    for dtype in (torch.bfloat16, torch.float32):
        x = made(place, 2, 4, 6, 24, dtype=dtype)
        want = plain(x, cos, sin, interleaved=interleaved)
        for layout in LAYOUTS:
            given = as_layout(layout, x)
            got = tkjit.rotary_embedding(given, cos, sin, interleaved=interleaved)
            torch.testing.assert_close(got, plain(given, cos, sin, interleaved=interleaved))
            assert got.stride() == (given * 1).stride(), layout
        first = tkjit.rotary_embedding(x.transpose(1, 2).contiguous(), cos, sin, interleaved=interleaved, seq_dim=1)
        assert first.is_contiguous()
        torch.testing.assert_close(first.transpose(1, 2), want)
        for seq_dim in (-3, 1):
            view = tkjit.rotary_embedding(x.transpose(1, 2), cos, sin, interleaved=interleaved, seq_dim=seq_dim)
            torch.testing.assert_close(view.transpose(1, 2), want)
        torch.testing.assert_close(tkjit.rotary_embedding(x[0], cos, sin, interleaved=interleaved), want[0])
        torch.testing.assert_close(tkjit.rotary_embedding(x[0, 0], cos, sin, interleaved=interleaved), want[0, 0])


def test_parts_of_a_packed_tensor_are_read_where_they_lie(place: str) -> None:
    cos, sin = tables(place, 5, 64)
    packed = made(place, 3, 5, (4 + 2 + 2) * 64, dtype=torch.bfloat16)
    before = packed.clone()
    q, k, _ = (t.unflatten(-1, (-1, 64)) for t in packed.split([256, 128, 128], -1))
    for x, got in zip((q, k), tkjit.rotary_embedding(q, cos, sin, key=k, seq_dim=-3), strict=True):
        torch.testing.assert_close(got.transpose(1, 2), plain(x.transpose(1, 2), cos, sin))
    assert torch.equal(packed, before)


def test_tables_as_hugging_face_gives_them(place: str) -> None:
    cos, sin = tables(place, 6, 32)
    x, half = made(place, 2, 3, 6, 32), made(place, 2, 3, 6, 64)
    wide = [torch.cat((t, t), -1) for t in (cos, sin)]
    want = plain(x, cos, sin)
    torch.testing.assert_close(tkjit.rotary_embedding(x, *wide), want)
    torch.testing.assert_close(tkjit.rotary_embedding(x, *(t[None] for t in wide)), want)
    torch.testing.assert_close(tkjit.rotary_embedding(half, *wide, rotary_dim=32), plain(half, cos, sin))
    # Each entry of a batch by its own, and by a view that is not contiguous.
    own = [torch.stack((t, t.flip(0))) for t in wide]
    flipped = torch.tensor([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]], device=place)
    torch.testing.assert_close(tkjit.rotary_embedding(x, *own), plain(x, cos, sin, flipped))
    repeated = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    pairs = tkjit.rotary_embedding(x, *(t[..., ::2] for t in repeated), interleaved=True)
    torch.testing.assert_close(pairs, plain(x, cos, sin, interleaved=True))
    with pytest.raises(ValueError, match=r"32 columns; to turn 32 dims takes 16$"):
        tkjit.rotary_embedding(x, *wide, interleaved=True)


def test_nan_and_infinities_stay_in_their_pair(place: str) -> None:
    cos, sin = tables(place, 4, 8)
    for interleaved in (False, True):
        for bad in (math.nan, math.inf):
            x = made(place, 1, 1, 4, 16)
            x[0, 0, 2, 1], x[0, 0, 1, 12] = bad, bad
            got = tkjit.rotary_embedding(x, cos, sin, interleaved=interleaved)
            partner = 0 if interleaved else 5
            wrong = {tuple(i) for i in (~got.isfinite()).nonzero().tolist()}
            assert wrong == {(0, 0, 2, 1), (0, 0, 2, partner), (0, 0, 1, 12)} and got[
                0, 0, 1, 12
            ].isnan() == math.isnan(bad)


def test_nothing_outside_the_tensors_is_touched(place: str) -> None:
    for width, part in ((64, 64), (24, 8), (7, 6)):
        for offset in (0, 1, 3):
            for interleaved in (False, True):
                x = fenced((2, 3, 5, width), torch.bfloat16, place, offset=offset)
                walls = [
                    fenced((5, part // 2), torch.float32, place, offset=offset).copy_(t) for t in tables(place, 5, part)
                ]
                got = tkjit.rotary_embedding(x, *walls, interleaved=interleaved)
                torch.testing.assert_close(got, plain(x, *walls, interleaved=interleaved))
                assert all(map(fence_intact, (x, *walls)))


# --- positions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_position_ids_choose_the_rows(kind: torch.dtype, place: str) -> None:
    cos, sin = tables(place, 50, 32)
    q, k = made(place, 3, 4, 6, 32), made(place, 3, 2, 6, 32)
    ids = torch.randint(0, 50, (3, 6)).to(place, kind)
    for given, where in (
        (ids, ids), (ids[:1], ids[:1].expand(3, 6)), (ids[1], ids[1].expand(3, 6)), (ids.t().contiguous().t(), ids),
        (ids.repeat_interleave(2, 1)[:, ::2], ids),
    ):  # fmt: skip
        got = tkjit.rotary_embedding(q, cos, sin, given, key=k)
        for x, y in zip((q, k), got, strict=True):
            torch.testing.assert_close(y, plain(x, cos, sin, where))
    first = tkjit.rotary_embedding(q.transpose(1, 2), cos, sin, ids, seq_dim=1)
    torch.testing.assert_close(first.transpose(1, 2), plain(q, cos, sin, ids))
    torch.testing.assert_close(tkjit.rotary_embedding(q[0], cos, sin, ids[0]), plain(q, cos, sin, ids)[0])
    check(
        lambda x: tkjit.rotary_embedding(x, cos.to(x.dtype), sin.to(x.dtype), ids),
        lambda x: plain(x, cos.to(x.dtype), sin.to(x.dtype), ids),
        [q],
        label="gradient",
    )


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_offsets_for_decoding(kind: torch.dtype, place: str) -> None:
    cos, sin = tables(place, 40, 16)
    x = made(place, 3, 2, 4, 16)
    start = torch.arange(4, device=place)
    for given in (5, 36, torch.tensor(5), torch.tensor([7]), torch.tensor([0, 36, 11])):
        given = given.to(place, kind) if isinstance(given, Tensor) else given
        where = (start + (given.reshape(-1, 1) if isinstance(given, Tensor) else given)).expand(3, 4)
        torch.testing.assert_close(tkjit.rotary_embedding(x, cos, sin, offsets=given), plain(x, cos, sin, where))
    misses = tkjit.cache.stats()["plan_misses"]
    for at in range(6, 12):
        tkjit.rotary_embedding(x, cos, sin, offsets=at)
    assert tkjit.cache.stats()["plan_misses"] <= misses + 1, "a plan for each number"


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_packed_sequences_begin_anew(kind: torch.dtype, place: str) -> None:
    cos, sin = tables(place, 12, 16)
    for starts in ([0, 3, 3, 10, 17], [0, 17], [0, 0, 0, 17, 17], [2, 5, 14], [0]):
        q, k = made(place, 17, 4, 16, dtype=torch.bfloat16), made(place, 17, 1, 16, dtype=torch.bfloat16)
        given = torch.tensor(starts, device=place, dtype=kind)
        for offsets in (0, 1, torch.tensor([2], device=place), torch.arange(len(starts) - 1, device=place, dtype=kind)):
            got = tkjit.rotary_embedding(q, cos, sin, key=k, cu_seqlens=given, offsets=offsets)
            for x, y in zip((q, k), got, strict=True):
                want = x.clone()
                for n, (begin, end) in enumerate(itertools.pairwise(starts)):
                    at = offsets if not isinstance(offsets, Tensor) else int(offsets[n if len(offsets) > 1 else 0])
                    where = torch.arange(end - begin, device=place)[None] + at
                    part = plain(x[begin:end].transpose(0, 1)[None].float(), *_longer(cos, sin, 20), where)
                    # What is not in the tables is NaN.
                    part = part.masked_fill((where >= len(cos))[:, None, :, None], math.nan)
                    want[begin:end] = part[0].transpose(0, 1).to(x.dtype)
                torch.testing.assert_close(y, want, equal_nan=True)
    heads_first = tkjit.rotary_embedding(q.transpose(0, 1), cos, sin, cu_seqlens=given, seq_dim=-2)
    torch.testing.assert_close(heads_first.transpose(0, 1), tkjit.rotary_embedding(q, cos, sin, cu_seqlens=given))


def _longer(cos: Tensor, sin: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return tuple(torch.cat((t, t.new_zeros(rows, t.shape[1]))) for t in (cos, sin))


def test_packed_sequences_have_gradients(place: str) -> None:
    cos, sin = tables(place, 12, 16)
    starts = torch.tensor([1, 5, 5, 9], device=place, dtype=torch.int32)
    where = torch.tensor([[0, 0, 1, 2, 3, 0, 1, 2, 3, 0, 0]], device=place)
    x = made(place, 11, 2, 16)

    def reference(x: Tensor) -> Tensor:
        y = plain(x.transpose(0, 1)[None], cos.to(x.dtype), sin.to(x.dtype), where)[0].transpose(0, 1)
        return torch.cat((x[:1], y[1:9], x[9:]))

    check(lambda x: tkjit.rotary_embedding(x, cos.to(x.dtype), sin.to(x.dtype), cu_seqlens=starts), reference, [x])


def test_positions_outside_the_tables_are_nan_and_read_nothing(place: str) -> None:
    walls = [fenced((8, 4), torch.float32, place).copy_(t) for t in tables(place, 8, 8)]
    x = made(place, 1, 2, 6, 12).requires_grad_()
    huge = 2**62
    for ids, out in (
        ([0, 8, 7, -1, huge, -huge], [1, 3, 4, 5]), ([3, 3, 3, 3, 3, 3], []), ([1000000] * 6, [0, 1, 2, 3, 4, 5]),
    ):  # fmt: skip
        y = tkjit.rotary_embedding(x, *walls, torch.tensor(ids, device=place))
        (g,) = torch.autograd.grad(y.sum(), x)
        for t in (y, g):
            assert [i for i in range(6) if t[0, :, i, :8].isnan().all()] == out
            assert not t[0, :, [i for i in range(6) if i not in out]].isnan().any() and not t[..., 8:].isnan().any()
    for offset in (3, -1, huge, -huge, 2**63 - 1):
        y = tkjit.rotary_embedding(x, *walls, offsets=torch.tensor([offset], device=place))
        inside = [0 <= offset + i < 8 for i in range(6)]
        assert [not bool(y[0, :, i, :8].isnan().any()) for i in range(6)] == inside
    none = [torch.empty(0, 4, device=place) for _ in range(2)]
    assert tkjit.rotary_embedding(x, *none, torch.zeros(6, device=place, dtype=torch.int32))[..., :8].isnan().all()


def test_the_fallback_of_torchs_ops_agrees_on_every_way_to_tell_positions(place: str) -> None:
    cos, sin = tables(place, 9, 8)
    x, k = made(place, 2, 3, 5, 12), made(place, 2, 2, 5, 12)
    ids = torch.tensor([[0, 3, 8, 9, -1], [1, 1, 2, 700, 5]], device=place)
    own = [torch.stack((t, t.flip(0))) for t in (cos, sin)]
    offsets = torch.tensor([3, 7], device=place)
    for tables_, given in (
        ((cos, sin), {}), ((cos, sin), {"ids": ids}), ((cos, sin), {"offsets": offsets}), (own, {}), (own, {"ids": ids}),
        (own, {"offsets": offsets}),
    ):  # fmt: skip
        for back in (False, True):
            for seq_dim in (-2, -3):
                a = [x, k] if seq_dim == -2 else [x.transpose(1, 2), k.transpose(1, 2)]
                args = (*a, *tables_, given.get("ids"), given.get("offsets"), None, True, seq_dim, None, back)
                for got, want in zip(rotary._rotate(*args, False), rotary._composite(*args), strict=True):
                    torch.testing.assert_close(got, want, equal_nan=True)
                    assert got.stride() == want.stride()
    packed, starts = made(place, 9, 3, 12), torch.tensor([1, 4, 8], device=place)
    for offsets in (None, torch.tensor([5, 7], device=place), torch.tensor(2, device=place)):
        args = (packed, None, cos, sin, None, offsets, starts, False, -3, None, False)
        torch.testing.assert_close(rotary._rotate(*args, False), rotary._composite(*args), equal_nan=True)


# --- in place ----------------------------------------------------------------------------------------------------------


def test_in_place_writes_over_query_and_key_and_bumps_their_versions(place: str) -> None:
    cos, sin = tables(place, 5, 16)
    for interleaved in (False, True):
        q, k = made(place, 2, 4, 5, 24, dtype=torch.bfloat16), made(place, 2, 1, 5, 24, dtype=torch.bfloat16)
        want = tkjit.rotary_embedding(q, cos, sin, interleaved=interleaved, key=k)
        versions = q._version, k._version
        got = tkjit.rotary_embedding(q, cos, sin, interleaved=interleaved, key=k, inplace=True)
        assert got[0] is q and got[1] is k and torch.equal(q, want[0]) and torch.equal(k, want[1])
        assert q._version > versions[0] and k._version > versions[1]
        x = made(place, 2, 4, 5, 24)
        want = tkjit.rotary_embedding(x, cos, sin)
        assert tkjit.rotary_embedding(x, cos, sin, inplace=True) is x and torch.equal(x, want)


@both_forms
def test_kernel_in_place_leaves_what_does_not_turn(interleaved: bool, place: str) -> None:
    for width, part in ((64, 64), (64, 32), (11, 4)):
        cos, sin = tables(place, 5, part)
        q, k = made(place, 2, 5, 3, width), fenced((2, 5, 2, width), torch.float32, place, offset=1)
        want = [plain(t.transpose(1, 2), cos, sin, interleaved=interleaved).transpose(1, 2) for t in (q, k)]
        wide, wide[:, :, :3] = made(place, 2, 5, 3, 2 * width), 0.0
        view = wide[..., width:].copy_(q)
        args = (cos, sin, None, None, None, interleaved, -3, None, False, True)
        got = rotary._rotate(view, k, *args)
        assert got[0] is view and got[1] is k and fence_intact(k) and not wide[..., :width].any()
        torch.testing.assert_close(got, tuple(want))
        rotary._rotate(view, None, *args[:-2], True, True)
        torch.testing.assert_close(view, q)


def test_in_place_has_a_gradient(place: str) -> None:
    cos, sin = tables(place, 5, 16)
    leaf, other = (made(place, 2, 5, n, 16).requires_grad_() for n in (4, 2))
    g = made(place, 2, 5, 4, 16), made(place, 2, 5, 2, 16)
    want = torch.autograd.grad(tkjit.rotary_embedding(leaf * 2, cos, sin, key=other * 3, seq_dim=1), (leaf, other), g)
    q, k = leaf * 2, other * 3
    got = torch.autograd.grad(tkjit.rotary_embedding(q, cos, sin, key=k, seq_dim=1, inplace=True), (leaf, other), g)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    # By the function that a GPU's tensors go through, of views of one packed tensor too.
    packed = torch.cat((leaf, other), 2).mul(2.0)
    for t in (packed[:, :, :4], packed[:, :, 4:]):
        version = t._version
        rotary._RotateInPlace.apply(t, None, cos, sin, None, None, None, False, -3, None, False)
        assert t._version > version
    parts = torch.autograd.grad(packed, (leaf, other), torch.cat(g, 2))
    torch.testing.assert_close(parts[0], want[0])
    torch.testing.assert_close(parts[1] * 1.5, want[1])
    with pytest.raises(RuntimeError, match="leaf"):
        tkjit.rotary_embedding(leaf, cos, sin, seq_dim=1, inplace=True)


def test_in_place_leaves_to_torch_what_it_refuses() -> None:
    leaf = torch.randn(2, 6, 8).requires_grad_()
    made_of = leaf * 2
    with torch.no_grad():
        hidden = made_of[:, 1:]
    for t in (leaf, leaf.view(12, 8), leaf[:, :3], made_of.split(3, 1)[0], made_of.unbind()[1], hidden):
        assert rotary._is_torchs(t, True) and not rotary._is_torchs(t, False)
        with pytest.raises(RuntimeError, match=r"in-?place"):
            tkjit.rotary_embedding(t, *rotary.tables(t.shape[-2], 8), inplace=True)
    for t in (made_of, made_of[:, :3], made_of.transpose(0, 1)):
        assert not rotary._is_torchs(t, True)


def test_in_place_of_what_overlaps(place: str) -> None:
    cos, sin = tables(place, 5, 16)
    x = made(place, 2, 4, 5, 16)
    with pytest.raises(RuntimeError, match="more than one element"):
        tkjit.rotary_embedding(x[:1].expand(2, 4, 5, 16), cos, sin, inplace=True)
    twice = tkjit.rotary_embedding(tkjit.rotary_embedding(x, cos, sin), cos, sin)
    tkjit.rotary_embedding(x, cos, sin, key=x, inplace=True)
    torch.testing.assert_close(x, twice)


def test_parts_of_packed_tensors_are_known_to_be_apart() -> None:
    packed = torch.randn(3, 5, 8, 16)
    q, k = packed[:, :, :4], packed[:, :, 4:6]
    for x, y, seq_dim in (
        (q, k, -3), (k, q, -3), (q.transpose(1, 2), k.transpose(1, 2), -2), (q.clone(), k, -3), (packed[:0], k[:0], -3),
        (q[0], k[0], -3), (packed[:, :1, :4], packed[:, :1, 4:], -3),
    ):  # fmt: skip
        assert not rotary._meet(x, y, seq_dim)
    for x, y, seq_dim in (
        (q, packed[:, :, 3:5], -3), (packed, packed, -3), (packed[:2], packed[1:], -3), (packed[:, :4], packed[:, 1:], -3),
        (q, packed[:, 1:, :4], -3), (q, packed.transpose(0, 1)[:3, :3].transpose(0, 1), -3),
    ):  # fmt: skip
        assert rotary._meet(x, y, seq_dim)


# --- autograd and the rest of torch --------------------------------------------------------------------------------------


def test_backward_keeps_neither_query_nor_key(place: str) -> None:
    cos, sin = tables(place, 5, 16)
    q, k = (made(place, 2, n, 5, 16).requires_grad_() for n in (4, 2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = tkjit.rotary_embedding(q, cos, sin, key=k)
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()} and all(t.requires_grad for t in out)
    (only,) = torch.autograd.grad(out[1].sum(), k, retain_graph=True)
    (want,) = torch.autograd.grad(plain(k, cos, sin).sum(), k)
    torch.testing.assert_close(only, want)
    assert torch.autograd.grad(out[0].sum(), k, allow_unused=True) == (None,)


@both_forms
def test_tables_have_gradients(interleaved: bool, place: str) -> None:
    cos, sin = tables(place, 6, 8, torch.float64)
    ids = torch.tensor([[0, 5, 5, 2], [1, 5, 0, 9]], device=place)
    own = [torch.stack((t, t.flip(0))) for t in (cos, sin)]
    q, k = made(place, 2, 3, 4, 11, dtype=torch.float64), made(place, 2, 2, 4, 11, dtype=torch.float64)
    for c, s in ((cos, sin), own):
        for given in (None, ids[:, :3].repeat(1, 2)[:, :4], ids.clamp(max=5)):
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, c, s)]

            def ours(q: Tensor, k: Tensor, c: Tensor, s: Tensor, given: Tensor | None = given) -> tuple:
                return tkjit.rotary_embedding(q, c, s, given, interleaved, k)

            assert torch.autograd.gradcheck(ours, leaves, fast_mode=True)
            assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)
    packed = (
        q.transpose(1, 2)[0].contiguous().requires_grad_(),
        cos.clone().requires_grad_(),
        sin.clone().requires_grad_(),
    )
    starts = torch.tensor([0, 1, 3], device=place)
    assert torch.autograd.gradcheck(
        lambda x, c, s: tkjit.rotary_embedding(x, c, s, interleaved=interleaved, cu_seqlens=starts), packed
    )


def test_tables_made_in_inference_mode_serve_for_training(place: str) -> None:
    with torch.inference_mode():
        cos, sin = tables(place, 5, 16)
        inside = tkjit.rotary_embedding(made(place, 2, 5, 16), cos, sin)
        assert inside.is_inference()
        x = made(place, 2, 5, 16)
        assert tkjit.rotary_embedding(x, cos, sin, inplace=True) is x
    x = made(place, 2, 5, 16).requires_grad_()
    (g,) = torch.autograd.grad(tkjit.rotary_embedding(x, cos, sin).sum(), x)
    torch.testing.assert_close(g, torch.autograd.grad(plain(x[None], cos.clone(), sin.clone()).sum(), x)[0])


def test_compiles_whole_with_keys_positions_and_in_place(place: str) -> None:
    cos, sin = tables(place, 9, 16)
    ids = torch.tensor([[3, 1, 4, 8]], device=place)

    def step(q: Tensor, k: Tensor, **more) -> tuple:
        return tuple(t.sin() for t in tkjit.rotary_embedding(q * 2, cos, sin, key=k, seq_dim=1, **more))

    q, k = made(place, 2, 4, 6, 20), made(place, 2, 4, 2, 20)
    for more in ({}, {"position_ids": ids}, {"offsets": 3}, {"offsets": ids[0, :2].int()}, {"interleaved": True}):
        ours = functools.partial(step, **more)
        want = answer(ours, (q, k)).tensors
        for dynamic in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic, backend="aot_eager")
            for a, b in zip(answer(compiled, (q, k)).tensors, want, strict=True):
                torch.testing.assert_close(a, b)

    def over(q: Tensor, k: Tensor) -> tuple:
        return tkjit.rotary_embedding(q, cos, sin, key=k, seq_dim=1, inplace=True)

    torch._dynamo.reset()
    want = over(q.clone(), k.clone())
    q, k = q.clone(), k.clone()
    torch.compile(over, fullgraph=True, backend="aot_eager")(q, k)
    assert torch.equal(q, want[0]) and torch.equal(k, want[1])


def test_library_ops_pass_opcheck_in_every_form(place: str) -> None:
    cos, sin = tables(place, 9, 8)
    q, k = made(place, 2, 3, 4, 12).requires_grad_(), made(place, 2, 1, 4, 12).requires_grad_()
    ids, starts = torch.tensor([0, 3, 8, 2], device=place), torch.tensor([0, 2, 4], device=place)
    leaf = cos.clone().requires_grad_()
    packed = made(place, 4, 3, 12).requires_grad_()
    for name in ("rotary_embedding", "rotary_embedding_backward"):
        op = getattr(torch.ops.tkjit, name).default
        for args in (
            (q, k, cos, sin, ids, None, None, False, -2, None),
            (q, None, leaf, sin, None, starts[:2], None, True, -2, 8),
            (packed, None, cos, sin, None, None, starts, False, -3, None),
        ):
            torch.library.opcheck(op, args)


def test_fake_and_negated_tensors_and_autocast(place: str) -> None:
    cos, sin = tables(place, 5, 16)
    x = made(place, 2, 5, 16)
    negative = torch.complex(x, x).conj().imag
    assert torch.equal(tkjit.rotary_embedding(negative, cos, sin), tkjit.rotary_embedding(-x, cos, sin))
    assert torch.equal(tkjit.rotary_embedding(negative.clone(), -cos, sin), tkjit.rotary_embedding(-x, -cos, sin))
    with FakeTensorMode():
        fake = torch.empty(2, 7, 5, 16, device=place)
        got = tkjit.rotary_embedding(
            fake, torch.empty(5, 8, device=place), torch.empty(5, 8, device=place), key=fake[:, :3]
        )
        assert [t.shape for t in got] == [(2, 7, 5, 16), (2, 3, 5, 16)]
    with torch.autocast(place, torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert tkjit.rotary_embedding(x.to(dtype), cos, sin).dtype == dtype
    mapped = torch.vmap(lambda t, k: tkjit.rotary_embedding(t, cos, sin, key=k))(x[None], x[None])
    torch.testing.assert_close(mapped[1][0], tkjit.rotary_embedding(x, cos, sin))


# --- refusals ----------------------------------------------------------------------------------------------------------


def test_wrong_calls_are_refused_before_anything_runs() -> None:
    cos, sin = rotary.tables(6, 8)
    x = torch.ones(2, 3, 6, 16)
    ids = torch.zeros(2, 6, dtype=torch.int32)
    starts = torch.tensor([0, 6])
    turn = tkjit.rotary_embedding
    for error, message, call in (
        (ValueError, "7 dims can't turn: it must be even", lambda: turn(x, cos, sin, rotary_dim=7)),
        (ValueError, "18 dims can't turn.*at most the head_dim, 16", lambda: turn(x, *rotary.tables(6, 18))),
        (ValueError, "4 columns; to turn 12 dims takes 6, or 12", lambda: turn(x, cos, sin, rotary_dim=12)),
        (ValueError, "cos and sin have 5 positions, but query .* has 6", lambda: turn(x, cos[:5], sin[:5])),
        (ValueError, "must be alike", lambda: turn(x, cos, sin[:5])),
        (ValueError, "must be alike", lambda: turn(x, cos, sin.double())),
        (ValueError, "must be alike", lambda: turn(x, cos[0], sin[0])),
        (ValueError, "another batch", lambda: turn(x, cos.expand(3, 6, 4), sin.expand(3, 6, 4))),
        (ValueError, "only heads may differ", lambda: turn(x, cos, sin, key=x[:, :, :5])),
        (ValueError, "only heads may differ", lambda: turn(x, cos, sin, key=x.half())),
        (ValueError, "only heads may differ", lambda: turn(x, cos, sin, key=x[0])),
        (ValueError, r"with seq_dim -2 it is \(batch", lambda: turn(x[None], cos, sin)),
        (ValueError, "seq_dim must be", lambda: turn(x, cos, sin, seq_dim=3)),
        (ValueError, "without batch with cu_seqlens", lambda: turn(x, cos, sin, cu_seqlens=starts)),
        (ValueError, "one dimension", lambda: turn(x[0], cos, sin, cu_seqlens=starts[None])),
        (ValueError, "tell all positions", lambda: turn(x, cos, sin, ids, offsets=ids[:, 0])),
        (ValueError, "tell all positions", lambda: turn(x, cos, sin, ids, offsets=1)),
        (ValueError, "position_ids are", lambda: turn(x, cos, sin, ids[:, :5])),
        (ValueError, "offsets are", lambda: turn(x, cos, sin, offsets=torch.zeros(3, dtype=torch.int32))),
        (TypeError, "position_ids must be int32 or int64, not float32", lambda: turn(x, cos, sin, ids.float())),
        (TypeError, "'offsets' must be int or Tensor, not float", lambda: turn(x, cos, sin, offsets=1.0)),
        (TypeError, "'key' must be Tensor, not list", lambda: turn(x, cos, sin, key=[x])),
        (TypeError, "'cos' must be Tensor, not NoneType", lambda: turn(x, None, sin)),
        (IndexError, "offsets is 1, but", lambda: turn(x, cos, sin, offsets=1)),
        (IndexError, "offsets is -1, but", lambda: turn(x, cos, sin, offsets=-1)),
        (NotImplementedError, "rotary_embedding", lambda: turn(x.int(), cos, sin)),
        (NotImplementedError, "rotary_embedding", lambda: turn(x, cos.to(torch.complex64), sin)),
    ):
        with pytest.raises(error, match=message):
            call()
        before = x.clone()
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=message):
            call()
        assert torch.equal(x, before)


# --- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_for_every_architecture_and_spill_nothing(arch: str, request: pytest.FixtureRequest) -> None:
    kernels = list(dict.fromkeys(rotary.all_kernels()))
    for kernel in kernels if request.config.getoption("--all-kernels") else kernels[::37]:
        facts = kernel.compiled(arch).facts
        assert facts["spill_stores"] == facts["spill_loads"] == 0, (kernel.expression, facts)


def test_every_order_of_the_threads_gives_the_same(place: str) -> None:
    if place == "cuda":
        pytest.skip("a GPU chooses its own")
    cos, sin = rotary.tables(9, 16)
    args = made(place, 3, 5, 9, 24), made(place, 3, 2, 9, 24)
    want = None
    for seed in range(4):
        tkjit.cache.clear_plans()
        with emulating("sm_80" if seed % 2 else "sm_90a", seed=seed):
            got = tkjit.rotary_embedding(args[0], cos, sin, key=args[1])
        want = want or got
        assert all(map(torch.equal, got, want))


@both_forms
def test_every_choice_of_heads_tiles_and_vectors_gives_the_same_bits(
    interleaved: bool, place: str, monkeypatch
) -> None:
    pick = rotary.Config.pick
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for width, part in ((32, 32), (48, 16), (40, 24), (10, 6)):
            q, k = made(place, 2, 6, 11, width, dtype=dtype), made(place, 2, 3, 11, width, dtype=dtype)
            given = (*tables(place, 11, part), None, interleaved, k)
            want = None
            for more in (
                {"heads": 1, "tile": 1}, {"heads": 2, "tile": 2}, {"heads": 4, "tile": 8}, {"heads": 8, "tile": 2},
                {"heads": 4, "tile": 1, "tables": False}, {"heads": 2, "tile": 4, "vec": 1, "tables": False},
            ):  # fmt: skip
                chosen = lambda *args, more=more: dataclasses.replace(pick(*args), **more)  # noqa: E731
                monkeypatch.setattr(rotary.Config, "pick", chosen)
                tkjit.cache.clear_plans()
                got = tkjit.rotary_embedding(q, *given)
                want = want or got
                assert all(map(torch.equal, got, want)), (dtype, width, part, more)
            for x, y in zip((q, k), want, strict=True):
                torch.testing.assert_close(y, plain(x, *given[:2], interleaved=interleaved))
    tkjit.cache.clear_plans()


def test_large_calls_read_each_row_of_the_tables_for_several_heads() -> None:
    device = rotary.Device.of_arch("sm_90a")

    def chosen(shape: tuple, seq_dim: int, dtype: str = "bfloat16", part: int = 128, interleaved: bool = False):
        x, t = (rotary.Spec(kind, s, _dense(s), 0, 16) for kind, s in ((dtype, shape), ("float32", (4096, part // 2))))
        a = rotary.Args(x, None, t, t, None, None, None, interleaved, seq_dim, None, False)
        return rotary.Config.pick(a, part, [(x, rotary._like(x))], device)

    assert chosen((8, 32, 4096, 128), -2) == rotary.Config(vec=8, tables=True, heads=4, tile=4)
    assert chosen((8, 4096, 32, 128), -3) == rotary.Config(vec=8, tables=True, heads=4, tile=4)
    assert chosen((8, 4096, 32, 128), -3, "float32") == rotary.Config(vec=4, tables=True, heads=4, tile=4)
    assert chosen((8, 4096, 32, 80), -3, part=20) == rotary.Config(vec=2, tables=True, heads=4, tile=4)
    assert chosen((8, 4096, 32, 80), -3, part=24, interleaved=True).vec == 8
    assert chosen((8, 4096, 32, 128), -3, interleaved=True).heads == 8
    assert chosen((64, 1, 32, 128), -3).heads == 1 and chosen((8, 1, 4096, 128), -2) == rotary.Config(8, True, 1, 4)


def _dense(shape: tuple) -> tuple:
    return torch.empty(shape, device="meta").stride()


@both_forms
def test_calls_of_more_threads_than_32_bits_count_are_cut_in_chunks(interleaved: bool, place: str, monkeypatch) -> None:
    x, (cos, sin) = made(place, 3, 4, 21, 32), tables(place, 21, 32)
    k = made(place, 3, 1, 21, 32)
    for most in (700, 256, 64):
        monkeypatch.setattr(rotary, "MOST", most)
        tkjit.cache.clear_plans()
        got = tkjit.rotary_embedding(x, cos, sin, None, interleaved, k)
        for given, y in zip((x, k), got, strict=True):
            torch.testing.assert_close(y, plain(given, cos, sin, interleaved=interleaved))
    tkjit.cache.clear_plans()


@pytest.mark.gpu
def test_more_than_32_bits_of_elements_and_reach(much_memory) -> None:
    much_memory(28)
    cos, sin = tables("cuda", 4096, 128)
    x = torch.zeros(17, 64, 16384, 128, device="cuda", dtype=torch.bfloat16).view(68, 4096, 64, 128)
    assert x.numel() > 2**31
    x[-1, -3:] = torch.randn(3, 64, 128, device="cuda")
    y = tkjit.rotary_embedding(x, cos, sin, seq_dim=1)
    want = plain(x[-1:, -3:].transpose(1, 2), cos, sin, torch.arange(4093, 4096, device="cuda")[None]).transpose(1, 2)
    torch.testing.assert_close(y[-1:, -3:], want)
    assert not y[:-1].any() and not y[-1, :-3].any()
    reach = x.flatten()[: 2**31 + 2**20].view(-1)
    far = reach.as_strided((2, 2, 3, 128), (2**31, 384, 128, 1))
    far.copy_(torch.randn(2, 2, 3, 128, device="cuda"))
    torch.testing.assert_close(tkjit.rotary_embedding(far, cos, sin), plain(far, cos, sin))


@pytest.mark.gpu
def test_in_place_of_packed_parts_is_one_launch(device: str) -> None:
    cos, sin = tables(device, 5, 64)
    packed = torch.randn(3, 5, 8, 64, device=device)
    q, k = packed[:, :, :4], packed[:, :, 4:6]
    want = tkjit.rotary_embedding(q, cos, sin, key=k, seq_dim=1)
    rest = packed[:, :, 6:].clone()
    calls = tkjit.cache.stats()["plan_misses"]
    got = tkjit.rotary_embedding(q, cos, sin, key=k, seq_dim=1, inplace=True)
    assert tkjit.cache.stats()["plan_misses"] == calls + 1
    assert all(map(torch.equal, got, want)) and torch.equal(packed[:, :, 6:], rest) and as_tuple(got)[0] is q
