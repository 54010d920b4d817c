"""scaled_dot_product_attention: sizes, masks, layouts, corners, dropout. What every op must hold is in test_contract.py.

Everything runs on a GPU, and through the emulator with all checks on the CPU.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tkjit
from judge import Answer, answer, assert_same, check
from tkjit import _attention as plans
from tkjit import _device
from tkjit._plan import Launch, Spec, empty
from tkjit.ops import attention as module
from tkjit.testing import assert_close, poison

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = DTYPES[:2]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])


def math_backend(*args: Any, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def heads(
    place: str, b: int, h: int, length: int, keys: int, d: int, dtype: torch.dtype, dv: int = 0, group: int = 1
) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((b, h, length, d), (b, h // group, keys, d), (b, h // group, keys, dv or d))
    return [torch.randn(shape).to(place, dtype) for shape in shapes]


def judged(qkv: list[Tensor], mask: Tensor | None = None, label: str = "", **kwargs: Any) -> Answer:
    """Output and gradients are as close to float64's as torch's math is, or as the dtype's rounding."""
    args = [*qkv, *([mask] if mask is not None else [])]
    return check(tkjit.scaled_dot_product_attention, math_backend, args, kwargs, label=label, slack=module.SLACK)


# --- Sizes -------------------------------------------------------------------------------------------------------------

# Lengths around a tile of 16, 32, 64 and 128; primes; one.
LENGTHS = ((1, 1), (1, 70), (70, 1), (16, 16), (17, 31), (64, 64), (65, 63), (130, 97))


@every_dtype
@pytest.mark.parametrize("causal", (False, True))
def test_lengths(causal: bool, dtype: torch.dtype, place: str) -> None:
    for length, keys in LENGTHS:
        judged(heads(place, 1, 2, length, keys, 16, dtype), is_causal=causal, label=f"{length} queries, {keys} keys")


@every_dtype
def test_head_dims(dtype: torch.dtype, place: str) -> None:
    for d, dv in ((1, 1), (3, 5), (8, 8), (40, 24), (64, 128), (72, 72), (96, 96), (128, 64), (160, 160), (256, 256)):
        judged(heads(place, 1, 1, 20, 37, d, dtype, dv), is_causal=True, label=f"heads of {d} and {dv}")


@every_dtype
def test_head_dims_beyond_what_a_block_holds(dtype: torch.dtype, place: str) -> None:
    for d, dv in ((512, 512), (300, 16), (16, 300)):
        judged(heads(place, 1, 1, 20, 37, d, dtype, dv), label=f"heads of {d} and {dv}")


@pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16"])
def test_long_enough_for_every_stage(dtype: torch.dtype, place: str) -> None:
    for d in (64, 128, 256):
        for causal in (False, True):
            judged(heads(place, 1, 1, 150, 150, d, dtype), is_causal=causal, label=f"heads of {d}, causal {causal}")


def test_heads_above_512_are_torchs(place: str) -> None:
    judged(heads(place, 1, 1, 3, 5, 600, torch.float32))


@every_dtype
def test_heads_that_share_keys(dtype: torch.dtype, place: str) -> None:
    for group in (2, 4):
        judged(heads(place, 2, 4, 19, 40, 32, dtype, group=group), enable_gqa=True, is_causal=True)


def test_value_may_have_other_heads_than_key(place: str) -> None:
    q, k, v = heads(place, 2, 4, 9, 11, 16, torch.float32)
    judged([q, k[:, :2], v[:, :1]], enable_gqa=True)


def test_any_number_of_dims(place: str) -> None:
    for shape in ((), (3,), (2, 3), (2, 1, 3), (1, 2, 2, 2)):
        q, k, v = (torch.randn(*shape, n, 8, device=place) for n in (5, 7, 7))
        judged([q, k, v], is_causal=True, label=f"{len(shape)} leading dims")
        mask = torch.rand(*shape, 5, 7, device=place) > 0.3
        judged([q, k, v], mask, label=f"{len(shape)} leading dims and a mask")


def test_leading_dims_broadcast(place: str) -> None:
    q, k, v = heads(place, 3, 4, 6, 7, 16, torch.float32)
    judged([q, k[:1], v[:, :1]])
    judged([q[:1], k, v])
    judged([q, k[0], v[0, 0]])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=["bf16", "fp32"])
def test_few_queries_share_out_their_keys(dtype: torch.dtype, place: str) -> None:
    for length, group in ((1, 4), (1, 1), (3, 2)) if dtype == torch.bfloat16 else ((1, 2),):
        qkv = heads(place, 1, 4, length, 600, 32, dtype, group=group)
        judged(qkv, enable_gqa=True, label=f"{length} queries, {group} heads a key")
        tokens_first = [qkv[0].transpose(1, 2).contiguous().transpose(1, 2), *qkv[1:]]
        mask = torch.rand(1, 1, length, 600, device=place) > 0.5
        mask[0, 0, 0] = False
        judged(tokens_first, mask, enable_gqa=True, label=f"{length} queries, {group} heads a key, masked")


# --- Masks -------------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("kind", ("bool", "float"))
def test_masks_of_every_broadcast_shape(kind: str, dtype: torch.dtype, place: str) -> None:
    b, h, length, keys = 2, 2, 17, 24
    shapes = ((length, keys), (1, keys), (b, 1, 1, keys), (b, h, length, keys), (1, h, length, 1), (1, 1, 1, 1))
    for i, shape in enumerate(shapes):
        for layout in ("as it is", ("crosswise", "off")[i % 2]):
            torch.manual_seed(1)
            mask = torch.rand(shape, device=place) > 0.3 if kind == "bool" else torch.randn(shape).to(place, dtype)
            if layout == "crosswise":
                mask = mask.transpose(-1, -2).contiguous().transpose(-1, -2)
            elif layout == "off":
                mask = torch.cat([mask.flatten()[:1], mask.flatten()])[1:].view(shape)
            judged(heads(place, b, h, length, keys, 16, dtype), mask, label=f"{shape}, {layout}")


def test_float32_mask_of_half_heads(place: str) -> None:
    for dtype in HALVES:
        q, k, v = heads(place, 1, 2, 20, 24, 32, dtype)
        mask = torch.randn(20, 24, device=place)
        want = math_backend(*(t.double() for t in (q, k, v)), mask.double())
        assert_close(
            tkjit.scaled_dot_product_attention(q, k, v, mask), want, None, slack=module.SLACK[0], label=str(dtype)
        )


def test_gradient_of_a_mask_alone(place: str) -> None:
    q, k, v = heads(place, 2, 2, 20, 30, 16, torch.float32)
    for shape in ((20, 30), (2, 1, 20, 30), (30,) * 0 + (1, 30)):
        mask = torch.randn(shape, device=place, requires_grad=True)
        wide = mask.detach().double().requires_grad_()
        g = torch.randn(2, 2, 20, 16, device=place)
        (got,) = torch.autograd.grad(tkjit.scaled_dot_product_attention(q, k, v, mask), mask, g)
        (want,) = torch.autograd.grad(math_backend(q.double(), k.double(), v.double(), wide), wide, g.double())
        assert_close(got, want, None, slack=module.SLACK[1], label=f"mask of {shape}")


@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_of_some(wanted: int, place: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for d in (32, 256):
            qkv = heads(place, 1, 1, 20, 30, d, dtype)
            for bit, t in enumerate(qkv):
                t.requires_grad_(bool(wanted >> bit & 1))
            leaves = [t for t in qkv if t.requires_grad]
            g = torch.randn(1, 1, 20, d).to(place, dtype)
            got = torch.autograd.grad(tkjit.scaled_dot_product_attention(*qkv), leaves, g)
            wide = [t.detach().double().requires_grad_(t.requires_grad) for t in qkv]
            want = torch.autograd.grad(math_backend(*wide), [t for t in wide if t.requires_grad], g.double())
            for a, b in zip(got, want, strict=True):
                assert_close(a, b, None, slack=module.SLACK[1], label=f"{dtype} {d} {wanted:03b}")


@every_dtype
def test_query_that_sees_no_key_is_zero_and_so_are_its_gradients(dtype: torch.dtype, place: str) -> None:
    keep = torch.ones(70, 70, dtype=torch.bool, device=place).tril()
    keep[5] = False
    keep[64:] = False
    dead = ~keep.any(-1)
    for mask in (keep, torch.zeros(70, 70, device=place, dtype=dtype).masked_fill(~keep, -math.inf)):
        got = judged(heads(place, 1, 2, 70, 70, 16, dtype), mask)
        assert (got.outputs[0][..., dead, :] == 0).all() and (got.gradients[0][..., dead, :] == 0).all()


@every_dtype
def test_mask_of_the_lowest_number_is_an_average(dtype: torch.dtype, place: str) -> None:
    q, k, v = heads(place, 1, 1, 3, 3, 4, dtype)
    mask = torch.full((3, 3), torch.finfo(dtype).min, dtype=dtype, device=place)
    out = tkjit.scaled_dot_product_attention(q, k, v, mask)
    assert_close(
        out,
        math_backend(q.double(), k.double(), v.double(), mask.double()),
        None,
        slack=module.SLACK[0],
        label=str(dtype),
    )


def test_biases_of_torch_are_not_materialized(place: str) -> None:
    for length, keys in ((16, 32), (32, 16), (23, 56), (70, 70)):
        for bias in (causal_upper_left, causal_lower_right):
            q, k, v = heads(place, 1, 2, length, keys, 16, torch.float32)
            lower = bias is causal_lower_right
            seen = torch.ones(length, keys, dtype=torch.bool, device=place).tril(keys - length if lower else 0)
            got = answer(lambda q, k, v: tkjit.scaled_dot_product_attention(q, k, v, bias(length, keys)), [q, k, v])  # noqa: B023
            want = answer(lambda q, k, v: math_backend(q, k, v, seen), [q.double(), k.double(), v.double()])  # noqa: B023
            for a, b in zip(got.tensors, want.tensors, strict=True):
                assert_close(a, b, None, slack=module.SLACK[1], label=f"{length} {keys} {bias.__name__}")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=["bf16", "fp32"])
def test_sliding_windows(dtype: torch.dtype, place: str) -> None:
    for length, keys in ((150, 150), (40, 200), (200, 40), (1, 600)):
        for left, right in ((20, 0), (None, 3), (70, 10), (-3, 9)):
            q, k, v = heads(place, 1, 1, length, keys, 32, dtype)
            seen = torch.ones(length, keys, dtype=torch.bool, device=place)
            seen = seen if right is None else seen.tril(keys - length + right)
            seen = seen if left is None else seen.triu(keys - length - left)
            window = (left, right)

            def ours(q: Tensor, k: Tensor, v: Tensor, window: tuple = window) -> Tensor:
                return tkjit.attention.attend(q, k, v, window=window)

            def theirs(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
                return math_backend(q, k, v, seen)

            check(ours, theirs, [q, k, v], label=f"{length} {keys} {window}", slack=module.SLACK)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=["bf16", "fp32"])
def test_soft_caps(dtype: torch.dtype, place: str) -> None:
    """The products are large enough that the cap bends them."""

    def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = 3.0 * torch.tanh(0.5 * (q.double() @ k.double().mT) / 3.0)
        scores = scores if mask is None else scores + mask.double()
        return (scores.softmax(-1) @ v.double()).to(q.dtype)

    def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return tkjit.attention.attend(q, k, v, mask, softcap=3.0, scale=0.5)

    for length, keys in ((40, 70), (1, 600), (70, 250)):
        q, k, v = heads(place, 1, 2, length, keys, 32, dtype)
        check(ours, capped, [q, k, v], label=f"{length} {keys}", slack=module.SLACK)
        mask = torch.randn(2, length, keys).to(place, dtype)
        check(ours, capped, [q, k, v, mask], label=f"{length} {keys}, a bias", slack=module.SLACK)
    torch.use_deterministic_algorithms(True)
    try:
        check(ours, capped, heads(place, 1, 2, 40, 70, 32, dtype), label="in a fixed order", slack=module.SLACK)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(ValueError, match="softcap"):
        tkjit.attention.attend(q, k, v, softcap=-1.0)


def test_second_derivatives_with_a_cap(place: str) -> None:
    qkv = [t.requires_grad_() for t in heads(place, 1, 2, 4, 5, 4, torch.float64)]
    function = lambda *t: tkjit.attention.attend(*t, softcap=1.0, window=(2, 1))  # noqa: E731
    torch.autograd.gradcheck(function, qkv)
    torch.autograd.gradgradcheck(function, qkv)


def test_window_and_mask_together(place: str) -> None:
    q, k, v = heads(place, 1, 2, 40, 50, 16, torch.float32)
    band = torch.ones(40, 50, dtype=torch.bool, device=place).tril(10).triu(5)
    for mask in (torch.rand(40, 50, device=place) > 0.3, torch.randn(2, 40, 50, device=place)):
        both = mask & band if mask.dtype == torch.bool else mask.masked_fill(~band, -math.inf)
        got = tkjit.attention.attend(q, k, v, mask, window=(5, 0))
        want = math_backend(q.double(), k.double(), v.double(), both if both.dtype == torch.bool else both.double())
        assert_close(got, want, None, slack=module.SLACK[0])


# --- Corners -----------------------------------------------------------------------------------------------------------


@every_dtype
def test_any_scale(dtype: torch.dtype, place: str) -> None:
    for scale in (0.0, -1.0, 1e-4, 3.0):
        judged(heads(place, 1, 1, 20, 37, 16, dtype), scale=scale, label=f"scale {scale}")


@every_dtype
def test_scores_beyond_half_precision(dtype: torch.dtype, place: str) -> None:
    q, k, v = heads(place, 1, 1, 8, 8, 64, dtype)
    q, k = torch.full_like(q, 256.0), torch.full_like(k, 256.0)
    out = tkjit.scaled_dot_product_attention(q, k, v)
    assert_close(out, v.double().mean(-2, keepdim=True).expand_as(v), None, slack=module.SLACK[0], label=str(dtype))


@every_dtype
def test_empty_sizes(dtype: torch.dtype, place: str) -> None:
    for b, h, length, keys, d, dv in (
        (0, 2, 4, 4, 8, 8),
        (2, 0, 4, 4, 8, 8),
        (1, 2, 0, 4, 8, 8),
        (1, 2, 4, 0, 8, 8),
        (1, 2, 4, 4, 0, 8),
        (1, 2, 4, 4, 8, 0),
    ):
        qkv = [
            torch.randn(s).to(place, dtype).requires_grad_()
            for s in ((b, h, length, d), (b, h, keys, d), (b, h, keys, dv))
        ]
        poison(place) if place == "cuda" else None
        out = tkjit.scaled_dot_product_attention(*qkv)
        assert out.shape == (b, h, length, dv) and out.dtype == dtype
        grads = torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert [g.shape for g in grads] == [t.shape for t in qkv]
        if keys == 0 or length == 0:
            assert all((t == 0).all() for t in (out, *grads))


def test_nan_and_infinity_reach_who_sees_them(place: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for value in (math.nan, math.inf):
            q, k, v = heads(place, 1, 1, 40, 40, 16, dtype)
            v[..., 30, 3] = value
            out = tkjit.scaled_dot_product_attention(q, k, v, is_causal=True)
            assert not out[..., 30:, 3].isfinite().any() and out[..., :3].isfinite().all()
            q, k, v = heads(place, 1, 1, 40, 40, 16, dtype)
            k[..., 30, 3] = math.nan
            out = tkjit.scaled_dot_product_attention(q, k, v, is_causal=True)
            assert out[..., 30:, :].isnan().all() and out[..., :30, :].isfinite().all()


def test_more_blocks_than_a_grid_has_rows(place: str) -> None:
    n = 65537 if place == "cuda" else 40
    q, k, v = heads(place, n, 1, 2, 2, 8, torch.bfloat16)
    got = answer(tkjit.scaled_dot_product_attention, [q, k, v])
    want = answer(math_backend, [q.double(), k.double(), v.double()])
    for a, b in zip(got.tensors, want.tensors, strict=True):
        assert_close(a[-8:], b[-8:], None, slack=module.SLACK[1])


# --- Layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=["bf16", "fp32"])
def test_views_give_what_dense_copies_give(dtype: torch.dtype, place: str) -> None:
    q, k, v = heads(place, 2, 2, 33, 40, 32, dtype)
    dense = answer(tkjit.scaled_dot_product_attention, [q, k, v])

    def tokens_first(t: Tensor) -> Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def every_second(t: Tensor) -> Tensor:
        wide = torch.full((*t.shape[:2], 2 * t.shape[2], t.shape[3]), math.nan, device=place, dtype=dtype)
        wide[:, :, ::2] = t
        return wide[:, :, ::2]

    def crosswise(t: Tensor) -> Tensor:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    def one_off(t: Tensor) -> Tensor:
        flat = torch.full((t.numel() + 1,), math.nan, device=place, dtype=dtype)
        flat[1:] = t.flatten()
        return flat[1:].view(t.shape)

    def packed(t: Tensor) -> Tensor:
        wide = torch.full((*t.shape[:3], 3 * t.shape[3]), math.nan, device=place, dtype=dtype)
        wide[..., t.shape[3] : 2 * t.shape[3]] = t
        return wide[..., t.shape[3] : 2 * t.shape[3]]

    for layout in (tokens_first, every_second, crosswise, one_off, packed):
        got = answer(tkjit.scaled_dot_product_attention, [layout(q), layout(k), layout(v)])
        assert_same(got.outputs, dense.outputs, layout.__name__)
        for a, b in zip(got.gradients, dense.gradients, strict=True):
            assert_close(a, b.double(), None, slack=module.SLACK[1], label=layout.__name__)


def test_output_is_laid_out_as_query(place: str) -> None:
    q, k, v = heads(place, 2, 3, 5, 7, 16, torch.float32)
    assert tkjit.scaled_dot_product_attention(q, k, v).is_contiguous()
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert tkjit.scaled_dot_product_attention(q, k, v).transpose(1, 2).is_contiguous()


def test_broadcast_heads_and_batches_are_read_in_place(place: str) -> None:
    q, k, v = heads(place, 2, 4, 9, 33, 64, torch.bfloat16)
    judged([q, k[:1, :1].expand_as(k), v[:1].expand_as(v)])


# --- Dropout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=["bf16", "fp32"])
def test_dropout_in_forward_and_backward(dtype: torch.dtype, place: str) -> None:
    """With v the identity the output is the dropped weights themselves; with them, gradients follow by hand."""
    b, h, n, p = 1, 2, 64, 0.3
    q, k, _ = heads(place, b, h, n, n, 64, dtype)
    v = torch.eye(n, device=place, dtype=dtype).expand(b, h, n, n).contiguous()
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    torch.manual_seed(7)
    out = tkjit.scaled_dot_product_attention(q, k, v, dropout_p=p)
    torch.manual_seed(7)
    assert_same([tkjit.scaled_dot_product_attention(q, k, v, dropout_p=p)], [out])
    kept = (out != 0).double() / (1 - p)
    assert abs(float((out != 0).double().mean()) - (1 - p)) < 5 * math.sqrt(p * (1 - p) / out.numel())
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    weights = (wide[0] @ wide[1].mT / 8.0).softmax(-1) * kept
    g = torch.randn(b, h, n, n).to(place, dtype)
    got = torch.autograd.grad(out, (q, k, v), g)
    want = torch.autograd.grad(weights @ wide[2], wide, g.double())
    assert_close(out, (weights @ wide[2]).detach(), None, slack=module.SLACK[0])
    for a, c in zip(got, want, strict=True):
        assert_close(a, c, None, slack=module.SLACK[1])


def test_dropout_of_everything_and_of_nothing(place: str) -> None:
    q, k, v = heads(place, 1, 1, 9, 9, 16, torch.float32)
    assert (tkjit.scaled_dot_product_attention(q, k, v, dropout_p=1.0) == 0).all()
    before = torch.random.get_rng_state() if place == "cpu" else torch.cuda.get_rng_state()
    tkjit.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
    assert torch.equal(before, torch.random.get_rng_state() if place == "cpu" else torch.cuda.get_rng_state())


# --- Gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=["bf16", "fp32"])
def test_deterministic_backward_gives_the_same_bits(dtype: torch.dtype, place: str) -> None:
    n = 300 if place == "cuda" else 150
    qkv = heads(place, 1, 2, n, n, 64, dtype)
    torch.use_deterministic_algorithms(True)
    try:
        first = judged(qkv, is_causal=True)
        for _ in range(30 if place == "cuda" else 3):
            again = answer(tkjit.scaled_dot_product_attention, qkv, {"is_causal": True})
            assert_same(again.tensors, first.tensors)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=["bf16", "fp32"])
def test_gradient_of_an_entrys_mask_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few entries blocks share the heads out, of many a block has them all."""
    tkjit.cache.clear_plans()
    monkeypatch.setitem(_device._TYPICAL, "sm_90a", replace(_device._TYPICAL["sm_90a"], sms=4))
    b, h, n = 5 if place == "cpu" else 140, 4, 32
    qkv = heads(place, b, h, n, n, 32, dtype)
    g = torch.randn(b, h, n, 32).to(place, dtype)
    torch.use_deterministic_algorithms(True)
    try:
        for sizes in ((1, n, n), (1, 1, n)):
            args = [*qkv, torch.randn(b, *sizes).to(place, dtype)]
            whole = answer(tkjit.scaled_dot_product_attention, args, grads=[g])
            for rows in (slice(0, 1), slice(1, 3), slice(b - 1, b)):
                part = answer(tkjit.scaled_dot_product_attention, [t[rows] for t in args], grads=[g[rows]])
                assert_same(part.tensors, [t[rows] for t in whole.tensors], f"mask of {sizes}, entries {rows}")
    finally:
        torch.use_deterministic_algorithms(False)
        tkjit.cache.clear_plans()


def test_second_derivatives(place: str) -> None:
    for kwargs in ({}, {"is_causal": True}, {"scale": -0.5}):
        qkv = [t.requires_grad_() for t in heads(place, 1, 1, 4, 5, 4, torch.float64)]
        torch.autograd.gradcheck(lambda *t: tkjit.scaled_dot_product_attention(*t, **kwargs), qkv)  # noqa: B023
        torch.autograd.gradgradcheck(lambda *t: tkjit.scaled_dot_product_attention(*t, **kwargs), qkv)  # noqa: B023
    qkv = [t.requires_grad_() for t in heads(place, 1, 1, 4, 5, 4, torch.float64)]
    out = tkjit.scaled_dot_product_attention(*qkv, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out.sum(), qkv, create_graph=True)


def test_second_derivatives_where_the_inputs_depend_on_each_other(place: str) -> None:
    x = torch.randn(1, 1, 5, 8, dtype=torch.float64, device=place, requires_grad=True)
    w = torch.randn(8, 8, dtype=torch.float64, device=place, requires_grad=True)

    def first(attention: Any) -> list[Tensor]:
        grads = torch.autograd.grad(
            attention(x, x, x).sum() + attention(x, x @ w, x @ w).square().sum(), (x, w), create_graph=True
        )
        return [*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w))]

    for a, b in zip(first(tkjit.scaled_dot_product_attention), first(math_backend), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_with_masks_dropout_and_any_dims(dynamic: bool, place: str) -> None:
    q, k, v = heads(place, 1, 2, 5, 7, 16, torch.float32)
    mask = torch.randn(5, 7, device=place)

    def compiled(function: Any, *args: Tensor) -> Tensor:
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*args)

    cases = (
        (lambda f, q, k, v, m: f(q, k, v, m), (q, k, v, mask)),
        (lambda f, q, k, v: f(q[None], k[None], v[None], is_causal=True), (q, k, v)),
        (lambda f, q, k, v: f(q[0, 0], k[0, 0], v[0, 0]), (q, k, v)),
        (lambda f, q: f(q, q, q), (torch.randn(1, 2, 3, 600, device=place),)),
    )
    for function, args in cases:
        got = compiled(lambda *args: function(tkjit.scaled_dot_product_attention, *args), *args)  # noqa: B023
        torch.testing.assert_close(got, function(math_backend, *args), rtol=1e-4, atol=1e-5)
    got = compiled(lambda q, k, v: tkjit.scaled_dot_product_attention(q, k, v, None, 0.5), q, k, v)
    assert got.shape == q.shape and got.isfinite().all()


# --- Behind torch's own function -----------------------------------------------------------------------------------------


class Counter:
    """Counts calls that come to tkjit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = 0
        self.ours = tkjit.attention.scaled_dot_product_attention
        monkeypatch.setattr(tkjit.attention, "scaled_dot_product_attention", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return self.ours(*args, **kwargs)


def test_enabled_changes_torchs_function_and_puts_it_back() -> None:
    before = F.scaled_dot_product_attention
    q, k, v = heads("cpu", 1, 2, 5, 6, 8, torch.float32)
    with tkjit.attention.enabled():
        assert tkjit.attention.is_enabled()
        with tkjit.attention.enabled():
            pass
        assert tkjit.attention.is_enabled()
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), before(q, k, v))  # torch's: the CPU's
    assert F.scaled_dot_product_attention is before and not tkjit.attention.is_enabled()


def test_blocks_of_enabled_may_overlap() -> None:
    first, second = tkjit.attention.enabled(), tkjit.attention.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert tkjit.attention.is_enabled()
    second.__exit__(None, None, None)
    assert not tkjit.attention.is_enabled()


def test_biases_keep_their_corner_under_modes_and_subclasses(place: str) -> None:
    class Sub(Tensor):
        pass

    q, k, v = heads(place, 1, 2, 3, 6, 8, torch.float32)
    bias = causal_lower_right(3, 6)
    want = math_backend(q, k, v, bias)
    with torch.device(place):
        torch.testing.assert_close(tkjit.scaled_dot_product_attention(q, k, v, bias), want)
    got = tkjit.scaled_dot_product_attention(q.as_subclass(Sub), k, v, bias)
    torch.testing.assert_close(got.as_subclass(Tensor), want)


def test_windows_and_caps_survive_modes_subclasses_and_biases(place: str) -> None:
    class Sub(Tensor):
        pass

    q, k, v = heads(place, 1, 2, 9, 12, 8, torch.float32)
    want = tkjit.attention.attend(q, k, v, softcap=2.0, window=(3, 0))
    got = tkjit.attention.attend(q.as_subclass(Sub), k, v, softcap=2.0, window=(3, 0))
    torch.testing.assert_close(got.as_subclass(Tensor), want)
    with torch.device(place):
        torch.testing.assert_close(tkjit.attention.attend(q, k, v, softcap=2.0, window=(3, 0)), want)
    bias = causal_lower_right(9, 12)
    torch.testing.assert_close(tkjit.attention.attend(q, k, v, bias, softcap=2.0, window=(3, 4)), want)


def test_no_heads(place: str) -> None:
    def made(h: int, n: int) -> Tensor:
        return torch.randn(1, h, n, 8, device=place, requires_grad=True)

    for gqa, h, hk in ((True, 0, 2), (True, 2, 0), (False, 1, 0), (False, 0, 0)):
        q, k, v = made(h, 4), made(hk, 5), made(hk, 5)
        got = tkjit.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
        assert got.shape == (1, h, 4, 8), (h, hk)
        assert (got == 0).all(), (h, hk)
        for a, t in zip(torch.autograd.grad(got.sum(), (q, k, v), allow_unused=True), (q, k, v), strict=True):
            assert a is None or (a.shape == t.shape and (a == 0).all())


def test_enabled_takes_torchs_biases() -> None:
    q, k, v = heads("cpu", 1, 2, 3, 6, 8, torch.float32)
    for bias in (causal_lower_right(3, 6), causal_upper_left(3, 6)):
        want = math_backend(q, k, v, bias)
        with tkjit.attention.enabled():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), want)


@pytest.mark.gpu
def test_modules_of_torch_use_it(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device=device)
    models = (
        torch.nn.MultiheadAttention(64, 4, batch_first=True, device=device),
        torch.nn.TransformerEncoder(layer, 2),
    )
    counter = Counter(monkeypatch)
    for model in models:
        x = torch.randn(2, 33, 64, device=device)
        args = (x, x, x) if isinstance(model, torch.nn.MultiheadAttention) else (x,)
        kwargs = {"need_weights": False} if isinstance(model, torch.nn.MultiheadAttention) else {}

        def run(model: Any = model, args: tuple = args, kwargs: dict = kwargs) -> list[Tensor]:
            out = model(*args, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]

        want = run()
        with tkjit.attention.enabled():
            got = run()
        assert counter.calls > 0
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_hugging_face_model_uses_it(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = transformers.LlamaConfig(vocab_size=100, **sizes, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).to(device)
    ids = torch.randint(0, 100, (2, 33), device=device)
    want = model(ids).logits
    counter = Counter(monkeypatch)
    with tkjit.attention.enabled():
        got = model(ids).logits
    assert counter.calls == 2
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


# --- Wrong arguments ---------------------------------------------------------------------------------------------------


def test_what_torch_refuses_is_refused_with_its_type() -> None:
    q, k, v = heads("cpu", 2, 4, 5, 7, 8, torch.float32)
    mask = torch.ones(5, 7, dtype=torch.bool)
    wrong: list[tuple[tuple, dict]] = [
        ((q, k.half(), v), {}),
        ((q, k[..., :4], v), {}),
        ((q, k, v[..., :3, :]), {}),
        ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
        ((q, k[:, :2], v[:, :2]), {}),
        ((q[0, 0, 0], k, v), {}),
        ((q, k, v, mask), {"is_causal": True}),
        ((q, k, v, mask[:3]), {}),
        ((q, k, v, mask[:, :3]), {}),
        ((q, k, v, torch.ones(3, 1, 5, 7)), {}),
        ((q, k, v), {"dropout_p": 1.5}),
        ((q, k, v), {"is_causal": 1}),
        ((q, k, v), {"enable_gqa": None}),
        ((q, k, v), {"scale": "a"}),
        ((q, k, v), {"dropout_p": None}),
        ((q, k, v, causal_lower_right(2, 9)), {}),
        ((torch.ones(1, 4, 3, 600), torch.ones(1, 2, 6, 600), torch.ones(1, 2, 6, 600)), {}),
        ((q, k, v, causal_lower_right(5, 7)), {"is_causal": True}),
    ]
    for args, kwargs in wrong:
        with pytest.raises(Exception) as theirs:
            math_backend(*args, **kwargs)
        with pytest.raises(Exception) as ours:
            tkjit.scaled_dot_product_attention(*args, **kwargs)
        shapes = [tuple(a.shape) for a in args], kwargs
        assert type(ours.value) is type(theirs.value), f"{shapes}: {ours.value!r}, torch: {theirs.value!r}"


def test_every_config_fits_every_gpu() -> None:
    """Where the tables have nothing that fits, the planner would raise; that may happen on small GPUs with wide doubles only."""
    from tkjit._device import ARCHS, Device

    for arch in ARCHS[1:]:
        for size in (2, 4, 8):
            for width in plans._WIDTHS:
                for kernel in ("fwd", "bwd_dkv", "bwd_dq", "bwd_dmask"):
                    small = Device.of_arch(arch).smem_block < 160 << 10 and width == 512 and size > 2
                    try:
                        config = plans.Config.pick(kernel, size, width, width, 4096, Device.of_arch(arch))
                    except NotImplementedError:
                        assert small, f"{arch} {kernel} {size} bytes {width}"
                    else:
                        assert config.shared_bytes(kernel, size, width, width) <= Device.of_arch(arch).smem_block


# --- What compiles -----------------------------------------------------------------------------------------------------

# Bytes that a thread may spill, by kernel and width of the heads: their sums fill the registers. What spills nothing is slower:
# forward at 128 with 16 rows a warp rather than 32 274 TFLOP/s beside 336, backward at 64, causal, 203 beside 209, with a bool
# mask 7.3 ms beside 6.7. NVIDIA H200,
# 2026-12-01.
SPILLS = {("fwd", 64): 256, ("fwd", 128): 320, ("bwd", 64): 1000, ("bwd", 128): 256, ("bwd", 256): 256}


@pytest.mark.parametrize("arch", ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"))
def test_kernels_compile_and_spill_no_more_than_is_written_down(arch: str) -> None:
    from tkjit import _nvrtc
    from tkjit._device import Device

    device, faults = Device.of_arch(arch), []
    for width, kind in itertools.product((64, 128, 256), ("full", "causal", "bias", "bool")):
        q = empty((1, 16, 4096, width), "bfloat16", Spec("bfloat16", (), (), 0, 16))
        mask = {"bias": "bfloat16", "bool": "bool"}.get(kind)
        bias = empty((4096, 4096), mask, q) if mask else None
        upper = 0 if kind == "causal" else None
        call = plans.Call.of([q, q, q, bias, *(None,) * 11, upper, *(None,) * 3, 0.0, 0.125, 0.0, False])
        run = plans._Backward(call, q, q, device)
        launches = plans._forward_launches(call, q, q, None, device)
        plans._fused(run, q, q, q, plans.DQ | plans.DK | plans.DV | plans.DMASK * (kind == "bias"))
        for launch in launches + run.launches:
            if isinstance(launch, Launch):
                name = launch.instance.expression.split("<")[0].split("::")[1]
                facts = launch.instance.compiled(_nvrtc.arch_of(device.cc)).facts
                if facts["spill_stores"] + facts["spill_loads"] > SPILLS.get((name, width), 0):
                    faults.append(f"{launch.instance.expression}: {facts}")
    assert not faults, "\n".join(faults)
