"""attend, varlen and with_kv_cache: what attention has beyond torch's signature, beside a plain reference of it.

Everything runs on a GPU, and through the emulator with all checks on the CPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tkjit
from judge import check
from test_attention import heads
from tkjit.attention import ScoreMod, attend, varlen, with_kv_cache
from tkjit.ops.attention import SLACK
from tkjit.testing import assert_close

both_types = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=["bf16", "fp32"])
every_type = pytest.mark.parametrize(
    "dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64), ids=["fp16", "bf16", "fp32", "fp64"]
)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
    window: tuple[int | None, int | None] = (None, None),
    mod: Any = None,
) -> tuple[Tensor, Tensor]:
    """Output and logarithms of sums, in the dtype of the inputs or float32."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    n_q, n_k = s.shape[-2:]
    distance = torch.arange(n_k, device=q.device) - torch.arange(n_q, device=q.device)[:, None] - (n_k - n_q)
    if slopes is not None:
        s = s - slopes.to(wide)[..., None, None] * distance.abs()
    s = s if mod is None else mod(s)
    left, right = window
    s = s if left is None else s.masked_fill(distance < -left, -math.inf)
    s = s if right is None else s.masked_fill(distance > right, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.to(wide)[:, None, None].expand(*s.shape[:-1], 1)), -1)
    empty = (s == -math.inf).all(-1)
    filled = s.masked_fill(empty[..., None], 0.0)
    p = filled.softmax(-1).masked_fill(empty[..., None], 0.0)[..., :n_k]
    lse = filled.logsumexp(-1).masked_fill(empty, -math.inf) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    return (p @ v.to(wide)).to(q.dtype), lse


@every_type
def test_alibi_sinks_and_logarithms(dtype: torch.dtype, place: str) -> None:
    kinds = (((20, 1), 1.5, True), ((None, None), 0.0, True), ((20, 1), 0.0, False))
    for n, (length, keys) in enumerate(((40, 70), (1, 600), (70, 20))):
        q, k, v = heads(place, 2, 4, length, keys, 32, dtype, group=2)
        slopes = torch.rand((4,) if n % 2 else (2, 4)).to(place)
        sinks = torch.randn(4).to(place, dtype)
        for window, softcap, with_sinks in kinds[: 1 if n else 3]:
            kwargs = dict(softcap=softcap, window=window)

            def ours(*t: Tensor, kwargs: dict = kwargs, slopes: Tensor = slopes) -> tuple[Tensor, Tensor]:
                sinks = t[3] if len(t) > 3 else None
                return attend(*t[:3], enable_gqa=True, alibi_slopes=slopes, sinks=sinks, return_lse=True, **kwargs)

            def theirs(*t: Tensor, kwargs: dict = kwargs, slopes: Tensor = slopes) -> tuple[Tensor, Tensor]:
                return reference(*t, slopes=slopes, **kwargs)

            given = [q, k, v, *([sinks] if with_sinks else [])]
            check(ours, theirs, given, label=f"{length} {keys} {kwargs} {with_sinks}", slack=SLACK)


@both_types
def test_logarithms_are_optional_and_change_nothing(dtype: torch.dtype, place: str) -> None:
    """Also with a sink that outweighs all keys, with one that counts nothing, and in a fixed order."""
    q, k, v = heads(place, 1, 2, 20, 250, 16, dtype)
    sinks = torch.tensor([80.0, -math.inf]).to(place, dtype)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            check(
                lambda *t: attend(*t[:3], sinks=t[3]), lambda *t: reference(*t)[0], [q, k, v, sinks],
                label=f"{deterministic}", slack=SLACK,
            )  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(False)
    with torch.no_grad():
        o, lse = attend(q, k, v, sinks=sinks, return_lse=True)
        assert torch.equal(o, attend(q, k, v, sinks=sinks))
    assert lse.dtype == torch.float32 and lse.shape == (1, 2, 20)


@both_types
def test_score_mod(dtype: torch.dtype, place: str) -> None:
    bias = torch.randn(4, 33).to(place)
    offsets = torch.arange(4, dtype=torch.int64).to(place)
    by_key = lambda s: bias[:, torch.arange(s.shape[-1]) % 33][:, None]  # noqa: E731
    mods = (
        (ScoreMod("score + bias[head * 33 + key % 33]", "1", bias=bias), lambda s: s + by_key(s)),
        (
            ScoreMod("score * score + offsets[head]", "2 * score", offsets=offsets),
            lambda s: s * s + offsets[:, None, None],
        ),
        (
            ScoreMod("query >= key ? tanh(score) : score", "query >= key ? 1 - tanh(score) * tanh(score) : Acc(1)"),
            lambda s: torch.where(torch.ones_like(s).tril().bool(), s.tanh(), s),
        ),
        (
            ScoreMod("score + float(batch) * min(q_len, k_len) / max(q_len, k_len)", "1"),
            lambda s: s + torch.arange(2, device=place)[:, None, None, None] * min(s.shape[-2:]) / max(s.shape[-2:]),
        ),
    )
    for length, keys in ((20, 37), (70, 40)):
        q, k, v = heads(place, 2, 4, length, keys, 32, dtype, group=2)
        for mod, plain in mods:
            check(
                lambda *t, mod=mod: attend(*t, enable_gqa=True, score_mod=mod, window=(None, 5)),
                lambda *t, plain=plain: reference(*t, mod=plain, window=(None, 5))[0],
                [q, k, v], label=f"{length} {keys} {mod.text}", slack=SLACK,
            )  # fmt: skip


def test_what_a_score_mod_cannot_do_is_an_error(place: str) -> None:
    q, k, v = (t.requires_grad_() for t in heads(place, 1, 1, 4, 4, 16, torch.float32))
    with pytest.raises(RuntimeError, match="slope"):
        torch.autograd.grad(attend(q, k, v, score_mod=ScoreMod("score * 2")).sum(), q)
    with pytest.raises(tkjit.CompileError, match=r"score_mod[(:]1"):
        attend(q, k, v, score_mod=ScoreMod("score *** 2"))
    with pytest.raises(NotImplementedError, match="score_mod"):
        torch.func.vmap(lambda t: attend(t, t, t, score_mod=ScoreMod("score")))(
            torch.randn(2, 1, 1, 4, 16, device=place)
        )
    for wrong in ((3,), ("score", 1)):
        with pytest.raises(TypeError):
            ScoreMod(*wrong)
    with pytest.raises(TypeError, match="bias"):
        ScoreMod("score", bias=torch.zeros(3, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous"):
        ScoreMod("score", bias=torch.zeros(3, 4).t())
    with pytest.raises(ValueError, match="up to 3"):
        ScoreMod("score", **{name: torch.zeros(1) for name in "abcd"})
    with pytest.raises(TypeError, match="score_mod"):
        attend(q, k, v, score_mod="score")


# --- Packed sequences --------------------------------------------------------------------------------------------------

LENGTHS = (([5, 0, 17, 1], [9, 4, 17, 30]), ([70, 3], [65, 140]), ([1, 1, 1], [600, 1, 33]), ([0], [0]))


def packed(place: str, dtype: torch.dtype, q_lens: list[int], k_lens: list[int], d: int = 16) -> list[Tensor]:
    """q, k, v with some rows behind the last sequence, and where sequences begin."""
    torch.manual_seed(0)
    shapes = ((sum(q_lens) + 3, 4, d), (sum(k_lens) + 2, 2, d), (sum(k_lens) + 2, 2, d))
    starts = [torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, k_lens)]
    return [*(torch.randn(shape).to(place, dtype) for shape in shapes), *(t.to(place) for t in starts)]


def one_by_one(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor, starts: tuple, **kwargs: Any) -> tuple[Tensor, Tensor]:
    outs = []
    for a, b, c, d in zip(*(t for s in starts for t in (s.tolist()[:-1], s.tolist()[1:]))):
        o, lse = reference(*(t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d])), *sinks, **kwargs)
        outs.append((o[0].transpose(0, 1), lse[0].T))
    o, lse = (torch.cat(parts) for parts in zip(*outs))
    return F.pad(o, (0, 0, 0, 0, 0, q.shape[0] - o.shape[0])), F.pad(
        lse, (0, 0, 0, q.shape[0] - lse.shape[0]), value=-math.inf
    )


@both_types
def test_packed_sequences(dtype: torch.dtype, place: str) -> None:
    slopes, sinks = torch.rand(4).to(place), torch.randn(4).to(place, dtype)
    for q_lens, k_lens in LENGTHS:
        q, k, v, *starts = packed(place, dtype, q_lens, k_lens)
        for window, is_causal in (((None, None), False), ((None, 0), True), ((6, 2), False)):
            check(
                lambda *t, starts=starts, window=window, is_causal=is_causal: varlen(
                    *t[:3], *starts, window=window, is_causal=is_causal, alibi_slopes=slopes, sinks=t[3], return_lse=True
                ),
                lambda *t, starts=starts, window=window: one_by_one(*t, starts=starts, window=window, slopes=slopes),
                [q, k, v, sinks], label=f"{q_lens} {k_lens} {window}", slack=SLACK,
            )  # fmt: skip


@both_types
def test_packed_sequences_plain(dtype: torch.dtype, place: str) -> None:
    """Without logarithms and more; with lengths given, starts of both types, and in a fixed order."""
    q_lens, k_lens = [33, 5, 70], [40, 5, 1]
    q, k, v, *starts = packed(place, dtype, q_lens, k_lens, 64)
    starts = [starts[0].int(), starts[1]]
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            check(
                lambda *t: varlen(*t, *starts, 70, 40), lambda *t: one_by_one(*t, starts=starts)[0], [q, k, v],
                label=f"{deterministic}", slack=SLACK,
            )  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(False)


def test_packed_rows_of_no_sequence_are_zero(place: str) -> None:
    """Before, behind, and beyond the longest that was promised; and starts that make no sense touch nothing outside."""
    q = torch.randn(12, 2, 16, device=place)
    starts = torch.tensor([3, 5, 9], device=place)
    o, lse = varlen(q, q, q, starts, return_lse=True)
    seen = torch.zeros(12, dtype=torch.bool)
    seen[3:9] = True
    assert ((o != 0).all((1, 2)).cpu() == seen).all() and ((lse > -math.inf).all(1).cpu() == seen).all()
    grads = torch.autograd.grad(varlen(t := q.clone().requires_grad_(), t, t, starts).sum(), t)[0]
    assert (grads[~seen] == 0).all() and (grads[seen] != 0).any()
    for wild in ([-5, 100], [9, 3], [2**31 - 1, -(2**31)]):
        found = varlen(q, q, q, torch.tensor(wild, device=place), None, 12, 12)
        assert found.isfinite().all()


def test_packed_dropout_is_reproducible_and_right_on_average(place: str) -> None:
    q, k, _, *starts = packed(place, torch.float32, [5, 9], [5, 9])
    v = torch.ones_like(k)
    torch.manual_seed(1)
    first = varlen(q, k, v, *starts, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(first, varlen(q, k, v, *starts, dropout_p=0.5))
    assert not torch.equal(first, varlen(q, k, v, *starts, dropout_p=0.5))
    assert 0.6 < first[:14].mean().item() < 1.4


def test_wrong_packed_arguments(place: str) -> None:
    q = torch.randn(6, 2, 16, device=place)
    starts = torch.tensor([0, 6], device=place)
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        varlen(q, q, q, starts.float())
    with pytest.raises(RuntimeError, match="3 dims"):
        varlen(q[None], q, q, starts)
    with pytest.raises(RuntimeError, match="k_starts"):
        varlen(q, q, q, starts, torch.tensor([0, 3, 6], device=place))
    with pytest.raises(RuntimeError, match="dropout probability"):
        varlen(q, q, q, starts, dropout_p=1.5)
    with pytest.raises(ValueError, match="is_causal"):
        varlen(q, q, q, starts, is_causal=True, window=(None, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        varlen(q, q, q[:4], starts)


def test_second_derivatives_of_packed_sequences(place: str) -> None:
    q, k, v, *starts = packed(place, torch.float64, [1, 2], [2, 2], 8)
    sinks = torch.randn(4, dtype=torch.float64).to(place)
    given = [t.requires_grad_() for t in (q, k, v, sinks)]
    window = (None, 0)

    def second(function: Any) -> tuple[Tensor, ...]:
        o, lse = function(*given)
        first = torch.autograd.grad(o.square().sum() + lse[:3].sin().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    ours = second(lambda *t: varlen(*t[:3], *starts, sinks=t[3], window=window, softcap=1.0, return_lse=True))
    theirs = second(lambda *t: one_by_one(*t, starts=starts, window=window, softcap=1.0))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_packed_sequences_compile(place: str) -> None:
    q, k, v, *starts = packed(place, torch.float32, [5, 9], [7, 9])
    qkv = [t.requires_grad_() for t in (q, k, v)]
    mod = ScoreMod("score * 0.5f", "0.5f")

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = varlen(q, k, v, *starts, 9, 9, is_causal=True, score_mod=mod, return_lse=True)
        return o.sum() + lse[:14].sum()

    compiled = torch.compile(function, fullgraph=True)
    torch.testing.assert_close(compiled(*qkv), function(*qkv))
    for a, b in zip(torch.autograd.grad(compiled(*qkv), qkv), torch.autograd.grad(function(*qkv), qkv), strict=True):
        torch.testing.assert_close(a, b)


@both_types
def test_jagged_tensors(dtype: torch.dtype, place: str) -> None:
    """As torch's own for each by itself, gradients too."""
    torch.manual_seed(0)
    parts = [torch.randn(n, 2, 16).to(place, dtype) for n in (5, 39, 1)]
    for causal in (False, True):
        jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        t = jagged.transpose(1, 2)
        o = tkjit.scaled_dot_product_attention(t, t, t, is_causal=causal)
        assert o.is_nested and o.shape[:2] == t.shape[:2]
        got = torch.autograd.grad(o.values().float().square().sum(), jagged)[0].unbind()
        for i, part in enumerate(parts):
            leaf = part.double().requires_grad_()
            x = leaf.transpose(0, 1)[None]
            want = F.scaled_dot_product_attention(x, x, x, is_causal=causal)
            assert_close(o.unbind()[i], want[0], None, slack=SLACK[0], label=f"{i} {causal}")
            assert_close(
                got[i], torch.autograd.grad(want.square().sum(), leaf)[0], None, slack=SLACK[1], label=f"{i} {causal}"
            )


# --- Caches of keys ----------------------------------------------------------------------------------------------------


@both_types
def test_cached_keys(dtype: torch.dtype, place: str) -> None:
    """Whole and in pages of several sizes; those beyond a length are NaN."""
    torch.manual_seed(0)
    lens = [96, 7, 0]
    k, v = (torch.randn(3, 96, 2, 16).to(place, dtype) for _ in range(2))
    for n, length in enumerate(lens):
        k[n, length:] = v[n, length:] = math.nan
    sinks = torch.randn(4).to(place)
    counts = torch.tensor(lens).to(place)
    for length in (1, 3):
        q = torch.randn(3, length, 4, 16).to(place, dtype)
        for window, is_causal in (((None, None), False), ((4, 0), True)):
            kwargs = dict(sinks=sinks, window=window)
            want = [
                reference(*(t[None].transpose(1, 2) for t in (q[n], k[n, :m], v[n, :m])), sinks, window=window)
                for n, m in enumerate(lens)
            ]
            wide = [
                reference(
                    *(t[None].transpose(1, 2).double() for t in (q[n], k[n, :m], v[n, :m])),
                    sinks.double(),
                    window=window,
                )
                for n, m in enumerate(lens)
            ]
            own, exact = (torch.cat([o for o, _ in found]).transpose(1, 2) for found in (want, wide))
            lse = torch.cat([lse for _, lse in wide])
            with torch.no_grad():
                got = with_kv_cache(q, k, v, counts, is_causal=is_causal, return_lse=True, **kwargs)
                assert_close(got[0], exact, own, slack=SLACK[0], label=f"{length} {window}")
                assert_close(got[1], lse, None, slack=SLACK[0], label=f"{length} {window}, logarithms")
                for size in (1, 3, 16, 32):
                    tables = torch.randperm(300)[: 288 // size].view(3, -1).to(place)
                    pages = [torch.full((300, size, 2, 16), math.nan).to(place, dtype) for _ in range(2)]
                    for page, whole in zip(pages, (k, v)):
                        page[tables.flatten()] = whole.reshape(-1, size, 2, 16)
                    paged = with_kv_cache(q, *pages, counts, tables, is_causal=is_causal, **kwargs)
                    assert_close(paged, exact, own, slack=SLACK[0], label=f"{length} {window}, pages of {size}")


@both_types
def test_long_caches_are_shared_out(dtype: torch.dtype, place: str) -> None:
    """Among blocks that have some of the keys each."""
    torch.manual_seed(0)
    q = torch.randn(2, 1, 4, 16).to(place, dtype)
    k, v = (torch.randn(2, 1200, 2, 16).to(place, dtype) for _ in range(2))
    counts = torch.tensor([1200, 513]).to(place)
    tables = torch.randperm(80)[:75].view(1, 75).expand(2, 75).to(place)
    pages = [torch.zeros(80, 16, 2, 16).to(place, dtype) for _ in range(2)]
    for page, whole in zip(pages, (k, v)):
        page[tables[0]] = whole[0].view(75, 16, 2, 16)
    with torch.no_grad():
        got = with_kv_cache(q, k, v, counts)
        paged = with_kv_cache(q, *pages, counts, tables)
    for n, m in enumerate(counts.tolist()):
        for found, source in ((got, n), (paged, 0)):
            args = [t.double()[None].transpose(1, 2) for t in (q[n], k[source, :m], v[source, :m])]
            assert_close(found[n], reference(*args)[0][0].transpose(0, 1), None, slack=SLACK[0], label=f"{n} {m}")


def test_gradients_through_a_cache(place: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 2, dtype=torch.float64).to(place).requires_grad_() for n in (2, 3, 3))
    counts = torch.tensor([3, 2]).to(place)
    torch.autograd.gradcheck(lambda *t: with_kv_cache(*t, counts, is_causal=True), (q, k, v))
    pages = [t.detach().reshape(6, 1, 2, 2).requires_grad_() for t in (k, v)]
    table = torch.arange(6).view(2, 3).to(place)
    with pytest.raises(NotImplementedError, match="pages"):
        torch.autograd.grad(with_kv_cache(q, *pages, counts, table).sum(), q)


def test_wrong_caches(place: str) -> None:
    q, cache = torch.randn(2, 1, 2, 8, device=place), torch.randn(2, 9, 2, 8, device=place)
    counts = torch.tensor([9, 4], device=place)
    with pytest.raises(TypeError, match="cache_seqlens"):
        with_kv_cache(q, cache, cache, counts.float())
    with pytest.raises(TypeError, match="block_table"):
        with_kv_cache(q, cache, cache, counts, counts)
    with pytest.raises(RuntimeError, match="4 dims"):
        with_kv_cache(q[0], cache, cache, counts)
    with pytest.raises(RuntimeError, match="k_lens"):
        with_kv_cache(q, cache, cache, counts[:1])


@pytest.mark.gpu
def test_a_captured_step_sees_new_lengths(device: str) -> None:
    q, cache = torch.randn(2, 1, 2, 64, device=device), torch.randn(2, 900, 2, 64, device=device)
    counts = torch.tensor([900, 4], device=device, dtype=torch.int32)
    with torch.no_grad():
        with_kv_cache(q, cache, cache, counts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = with_kv_cache(q, cache, cache, counts)
        counts.copy_(torch.tensor([7, 650]))
        graph.replay()
        torch.testing.assert_close(out, with_kv_cache(q, cache, cache, counts))


@pytest.mark.gpu
def test_tf32_is_torchs_to_allow(device: str) -> None:
    q, k, v = heads(device, 1, 2, 100, 300, 64, torch.float32)
    exact = reference(q.double(), k.double(), v.double())[0]
    before = torch.backends.cuda.matmul.allow_tf32
    errors = []
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            errors.append((tkjit.scaled_dot_product_attention(q, k, v) - exact).abs().max().item())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert errors[0] < 1e-5 < errors[1] < 1e-2, errors
