"""softmax and log_softmax: widths, layouts, values, dtype= and out=. What every op must hold is in test_contract.py."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tkjit
from judge import Answer, answer, as_leaves, assert_same, check, upstream
from memory import resident_kib
from tkjit.testing import FLOOR, ROW_VALUES, as_layout, assert_close, fence_intact, fenced, poison, row_values

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = DTYPES[:2]
PAIRS = {"softmax": (tkjit.softmax, torch.softmax), "log_softmax": (tkjit.log_softmax, torch.log_softmax)}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16", "fp32", "fp64"])
both = pytest.mark.parametrize("name", list(PAIRS))


def judged(name: str, x: Tensor, dim: int = -1, grads: Tensor | None = None, label: str = "", **kwargs: Any) -> Answer:
    """Output and gradient are close to float64's, row by row; returns ours."""
    ours, theirs = PAIRS[name]

    def scale(want: Answer, grads: Sequence[Tensor]) -> Tensor:
        # dx = y * (dy - s), s = sum(dy * y); log: dx = dy - exp(y) * s, s = sum(dy). Where the difference is small, its
        # error is still that of its terms.
        (y,), (g,) = want.outputs, grads
        if name == "softmax":
            terms = y * (g.abs() + (g * y).sum(dim, keepdim=True).abs())
        else:
            terms = g.abs() + y.exp() * g.sum(dim, keepdim=True).abs()
        return terms.nan_to_num(0, 0, 0).square().mean(dim, keepdim=True).sqrt() if y.ndim else terms

    return check(
        lambda x: ours(x, dim, **kwargs),
        lambda x, **kw: theirs(x, dim, **(kwargs if x.dtype != torch.float64 else {})),
        (x,),
        grads=None if grads is None else [grads],
        label=f"{name} {label or tuple(x.shape)} dim {dim}",
        dim=dim,
        scale=scale,
    )


def compile_ahead(ours: Callable, inputs: Sequence[Tensor]) -> None:
    """Many kernels at a time, which a test would compile one by one."""
    tkjit.warmup(ours, inputs, threads=os.cpu_count() or 1)


# --- Widths ------------------------------------------------------------------------------------------------------------


@every_dtype
def test_rows_of_every_width_sum_to_one_and_read_nothing_beyond(dtype: torch.dtype, device: str):
    """From float64 rows between 513 and 1023 whose tail came from their neighbour."""
    allowed = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    widths = range(1, 2101)
    worst = torch.zeros(4, len(widths), dtype=torch.float64, device=device)
    values = torch.randn(3 * widths[-1], device=device).to(dtype)
    for ours, _ in PAIRS.values():
        compile_ahead(
            ours, [values[: 3 * n].view(3, n) for n in (*range(1, 34), *range(35, widths[-1], 13), *widths[47::16])]
        )
    for i, n in enumerate(widths):
        for rows in (1, 2, 3):
            x = torch.full((rows * n + 128,), math.nan, dtype=dtype, device=device)[64 : 64 + rows * n].view(rows, n)
            x.copy_(values[: rows * n].view(rows, n))
            want = x.double().softmax(-1)
            y = tkjit.softmax(x, -1).double()
            found = [(y.sum(-1) - 1).abs().max(), ((y - want).abs() / (want + 1 / n)).max()]
            if rows == 3:
                z = tkjit.log_softmax(x, -1).double()
                found += [(z.exp().sum(-1) - 1).abs().max() / (1 + math.log(n)), ((z.exp() - want).abs()).max()]
            found = torch.stack(found).nan_to_num(math.inf)
            torch.maximum(worst[: len(found), i], found, out=worst[: len(found), i])
    for what, row, times in zip(("sum", "value", "sum of log's", "value of log's"), worst, (1, 1, 2, 4), strict=True):
        n = widths[int(row.argmax())]
        assert row.max() <= times * allowed, f"{what}: off by {row.max():.3g} at width {n}"


EDGES = sorted(
    {n + d for n in (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288) for d in (-1, 0, 1)}
    - {0}
    | {7, 15, 16, 17, 100, 781, 1023, 2049, 3000, 5000, 6144, 8200, 12289, 20000, 50257, 100_000, 128_256, 200_003, 1_000_001}
)  # fmt: skip


@both
@every_dtype
def test_widths_on_both_sides_of_every_path(name: str, dtype: torch.dtype, device: str):
    compile_ahead(PAIRS[name][0], [torch.empty(3, n, device=device, dtype=dtype) for n in EDGES])
    for n in EDGES:
        judged(name, torch.randn(3, n, device=device).to(dtype))


@both
@every_dtype
def test_many_rows_on_every_path(name: str, dtype: torch.dtype, device: str):
    """Enough rows that a block takes several in turn, through the ring of bulk copies where there is one."""
    inputs = []
    for n in (1, 5, 16, 33, 100, 256, 781, 1024, 1500, 4096, 5001, 10_000, 16_384, 33_000, 70_000, 140_000, 300_000):
        size = 12 << 20 if dtype == torch.float64 else 48 << 20
        inputs.append(torch.randn(max(3, min(1_000_003, size // (n * dtype.itemsize))), n, device=device).to(dtype))
    compile_ahead(PAIRS[name][0], inputs)
    for x in inputs:
        judged(name, x)


def some_rows_are_right(
    theirs: Callable, x: Tensor, g: Tensor, y: Tensor, dx: Tensor, rows: slice, scale: float | None = None
) -> None:
    part, grads = x.detach()[rows], g[rows]
    own, want = answer(theirs, (part, -1), grads=[grads]), answer(theirs, (part.double(), -1), grads=[grads.double()])
    assert_close(y.detach()[rows], want.outputs[0], own.outputs[0], dim=-1, label=f"rows {rows}")
    assert_close(dx[rows], want.gradients[0], own.gradients[0], dim=-1, scale=scale, label=f"gradient, rows {rows}")


@both
def test_more_elements_than_32_bits_count(name: str, device: str, much_memory: Callable[[float], None]):
    """Last rows that came back as zeros or old memory: a row times a width in 32 bits."""
    much_memory(40)
    ours, theirs = PAIRS[name]
    x = torch.randn(85_457, 50_259, device=device, dtype=torch.float16).requires_grad_()
    g = torch.randn(1, 50_259, device=device, dtype=torch.float16).expand_as(x)
    y = ours(x, -1)
    (dx,) = torch.autograd.grad(y, x, g)
    for rows in (slice(0, 64), slice(42_728, 42_731), slice(-64, None)):
        some_rows_are_right(theirs, x, g, y, dx, rows)


@both
def test_more_rows_than_a_grid_is_high(name: str, device: str, much_memory: Callable[[float], None]):
    """1.1e9 rows of 2, with the gradient of a broadcast."""
    much_memory(30)
    ours, theirs = PAIRS[name]
    x = torch.randn(1_100_000_000, 2, device=device, dtype=torch.float16).requires_grad_()
    g = torch.tensor([[1.0, 0.25]], device=device, dtype=torch.float16).expand_as(x)
    y = ours(x, -1)
    (dx,) = torch.autograd.grad(y, x, g)
    for rows in (slice(0, 8), slice(1 << 29, (1 << 29) + 8), slice(-8, None)):
        some_rows_are_right(theirs, x, g, y, dx, rows, scale=0.25)


def test_strides_that_reach_beyond_32_bits(device: str, much_memory: Callable[[float], None]):
    """Few elements, far apart."""
    much_memory(12)
    memory = torch.full(((1 << 32) + 4096,), math.nan, device=device, dtype=torch.float16)
    for shape, strides in (
        ((3, 1000), (1 << 31, 1)),
        ((2, 7), (1 << 32, 3)),
        ((1000, 3), (1, 1 << 31)),
        ((5, 3), (2, (1 << 31) + 7)),
        ((2, 40, 3), ((1 << 31) + 8, 50, 1 << 30)),
    ):
        x = memory.as_strided(shape, strides)
        x.copy_(torch.randn(shape, device=device))
        for name, dim in itertools.product(PAIRS, range(len(shape))):
            judged(name, x, dim, label=f"{shape} by {strides}")
            judged(name, x.clone(), dim, grads=x, label=f"{shape}, gradient by {strides}")
        x.fill_(math.nan)


# --- Dims and layouts --------------------------------------------------------------------------------------------------


@both
@every_dtype
def test_every_dim_of_every_rank(name: str, dtype: torch.dtype, device: str):
    shapes = [(), (1,), (7,), (3, 5), (1, 9), (2, 3, 4), (4, 1, 6), (2, 3, 4, 5), (3, 2, 5, 2, 4), (2, 1, 3, 1, 2, 2)]
    shapes += [(0,), (5, 0), (0, 5), (2, 0, 3), (2, 64, 16), (3, 33, 40), (4, 300, 7), (2, 5, 1000), (64, 3, 3, 8)]
    for shape in shapes:
        x = torch.randn(shape, device=device).to(dtype)
        for dim in range(-max(x.ndim, 1), max(x.ndim, 1)):
            judged(name, x, dim)


@both
@every_dtype
def test_long_dims_with_others_inside(name: str, dtype: torch.dtype, device: str):
    shapes: list[tuple[tuple[int, ...], int]]
    shapes = [((64, 1024, 128), 1), ((300_000, 4), 0), ((70_001, 33), 0), ((3, 70_001, 5), 1), ((2, 400_000, 3), 1)]
    shapes += [((70_000, 5, 3), 1), ((70_000, 3, 5), 0), ((1, 5000, 4096), 1), ((4096, 2, 2), 0), ((17, 129, 8), 1)]
    for shape, dim in shapes:
        judged(name, torch.randn(shape, device=device).to(dtype), dim)


def strided(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Views that kernels which take the geometry from the sizes alone get wrong."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return {
        "padded": normal(2, 8, 2, 2)[:, :4],
        "padded rows": normal(9, 150)[:, :128],
        "padded, off alignment": normal(9, 151)[:, 3:131],
        "transposed": normal(40, 6).t(),
        "permuted": normal(4, 50, 6, 8).permute(2, 0, 3, 1),
        "expanded outside": normal(1, 70).expand(6, 70),
        "expanded in the middle": normal(6, 1, 5).expand(6, 3, 5),
        "expanded along the rows": normal(6, 1).expand(6, 50),
        "one value": normal(1).expand(5, 6),
        "channels last": normal(2, 24, 4, 5).to(memory_format=torch.channels_last),
        "channels last 3-D": normal(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
        "every second column": normal(9, 140)[:, ::2],
        "every third row": normal(30, 64)[::3],
        "diagonals": normal(20, 20).unfold(0, 5, 1),
        "windows that overlap": normal(300).unfold(0, 64, 2),
        "one column of many": normal(50, 40)[:, 3:4],
    }


@both
@every_dtype
def test_views_of_every_kind_along_every_dim(name: str, dtype: torch.dtype, device: str):
    for what, x in strided(device, dtype).items():
        for dim in range(x.ndim):
            judged(name, x, dim, label=what)
            judged(name, torch.randn(x.shape, device=device).to(dtype), dim, grads=x, label=f"gradient {what}")
            judged(name, x, dim, grads=x.flip(0), label=f"both {what}")


@both
@every_dtype
def test_bits_of_a_row_do_not_depend_on_where_it_lies(name: str, dtype: torch.dtype, device: str):
    """Of whole vectors, rows that lie on 16 bytes are shared out among the threads in another way than others: not here."""
    ours = PAIRS[name][0]
    for n in (37, 781, 4099, 50_257):
        x = torch.randn(5, n, device=device).to(dtype)
        g = torch.randn(5, n, device=device).to(dtype)
        want = answer(ours, (x, -1), grads=[g])
        for layout in ("offset", "padded", "transposed"):
            if layout == "transposed":  # of the rows, not of their elements
                views = [t.view(5, 1, n).expand(5, 2, n).contiguous()[:, 1] for t in (x, g)]
            else:
                views = [as_layout(layout, t) for t in (x, g)]
            got = answer(ours, (views[0], -1), grads=[views[1]])
            assert_same(got.tensors, want.tensors, f"{n} columns, {layout}")


@both
@every_dtype
def test_inputs_and_gradients_off_alignment(name: str, dtype: torch.dtype, device: str):
    """From a gradient that was a slice aligned to 4 bytes only: a vector path shifted it wrongly."""
    for n, off in itertools.product((1, 7, 128, 1999, 4096, 50_257), (1, 2, 3, 5)):
        x, g = (torch.randn(3 * n + off, device=device).to(dtype)[off:].view(3, n) for _ in range(2))
        judged(name, x, grads=g, label=f"{n} columns, both {off} off")
        judged(name, x, grads=g.clone(), label=f"{n} columns, x {off} off")
        judged(name, x.clone(), grads=g, label=f"{n} columns, gradient {off} off")


@both
def test_dim_out_of_range_is_an_index_error(name: str, device: str):
    ours, theirs = PAIRS[name]
    for shape in ((), (3,), (2, 3), (0, 3), (2, 3, 4)):
        x = torch.ones(shape, device=device)
        for dim, given in itertools.product(
            (max(x.ndim, 1), -max(x.ndim, 1) - 1, 100), (x, x.clone().requires_grad_())
        ):
            with pytest.raises(IndexError, match=r"[Dd]im"):
                ours(given, dim)
            with pytest.raises(IndexError):
                theirs(given, dim)


@both
def test_dim_out_of_range_is_an_index_error_when_tracing(name: str):
    for dim in (2, -3):
        with pytest.raises(IndexError):
            PAIRS[name][0](torch.ones(2, 3, device="meta"), dim)


@both
def test_dim_that_is_no_whole_number_is_a_type_error(name: str, device: str):
    ours, theirs = PAIRS[name]
    x = torch.ones(2, 3, device=device)
    for dim in (0.5, [0], True):
        for function in (ours, theirs):
            with pytest.raises(TypeError):
                function(x, dim)


# --- Values ------------------------------------------------------------------------------------------------------------


def families(dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Rows that are hard."""
    top = torch.finfo(dtype).max
    shape = (13, 1000)
    found = {kind: row_values(kind, shape, dtype, device) for kind in ROW_VALUES}
    normal = torch.randn(shape, device=device, dtype=torch.float64)
    coin = torch.rand(shape, device=device) < 0.5
    infinity = torch.full(shape, math.inf, device=device, dtype=torch.float64)
    first = torch.arange(shape[1], device=device) == 0
    found |= {
        "plus or minus 1e4": (normal * 1e4).clamp(-6e4, 6e4),
        "the largest numbers": torch.where(coin, infinity.new_tensor(top), -top),
        "near the largest": normal.tanh() * top,
        "large and far apart": normal + torch.where(coin, 1e4, -1e4),
        "the smallest numbers": normal * torch.finfo(dtype).smallest_normal / 16,
        "one large": torch.where(first, 50.0, normal),
        "all minus inf": -infinity,
        "one finite": torch.where(first, 1.0, -infinity),
        "one plus inf": torch.where(first, infinity, normal),
        "all plus inf": infinity,
        "both infinities": torch.where(coin, infinity, -infinity),
        "one NaN": torch.where(first, math.nan, normal),
        "a NaN last": torch.where(first.flip(0), math.nan, normal),
        "minus inf and a NaN": torch.where(first, math.nan, -infinity),
        "exact ties": normal.sign(),
        "results below the smallest normal": torch.where(first, 0.0, -normal.abs() - 88),
    }
    # One hard row must not harm its neighbours.
    mixed = torch.stack([x.to(dtype)[i % 13] for i, x in enumerate(found.values())])
    return {what: x.to(dtype) for what, x in found.items()} | {"a row of each": mixed}


@both
@every_dtype
def test_hard_rows(name: str, dtype: torch.dtype, device: str):
    for what, x in families(dtype, device).items():
        for n in (3, 17, 64, 333, 1000):
            judged(name, x[:, :n].contiguous(), label=f"{what}, {n} columns")
        judged(name, x, label=f"{what}, padded")
        judged(name, x.t().contiguous(), 0, label=f"{what}, first dim")
        judged(name, x.t(), 0, label=f"{what}, transposed")
        judged(name, x.repeat(2, 7)[:, 1:6500], label=f"{what}, 6499 columns")


@both
@every_dtype
def test_hard_values_in_long_rows(name: str, dtype: torch.dtype, device: str):
    """In the first, the last or a middle place of rows that several blocks share."""
    for n, value in itertools.product((20_000, 70_000, 600_001), (math.nan, math.inf, -math.inf, 1e4)):
        x = torch.randn(5, n, device=device).to(dtype)
        for row, place in enumerate((0, n // 3, n // 2, n - 1)):
            x[row, place] = value
        judged(name, x, label=f"{value} among {n}")
    judged(name, torch.full((2, 600_001), -math.inf, device=device, dtype=dtype), label="-inf throughout")


@every_dtype
def test_log_softmax_is_exact_at_large_offsets(dtype: torch.dtype, device: str):
    """(x - max) - log(sum), not x - (max + log(sum)): held to the dtype's own rounding, whatever torch's error."""
    offsets = {torch.float16: (100, 1000, 3e4), torch.bfloat16: (100, 1e7, 1e30)}.get(dtype, (100, 1e4, 1e7, 1e30))
    for n, offset, sign in itertools.product((10, 100, 3000, 40_000, 600_000), offsets, (1, -1)):
        x = (torch.randn(3, n, device=device, dtype=torch.float64) + sign * offset).to(dtype)
        want = x.double().log_softmax(-1)
        assert_close(tkjit.log_softmax(x, -1), want, dim=-1, at_most=FLOOR[dtype], label=f"{n} columns at {offset}")


@both
def test_one_entry_far_above_the_rest_has_no_gradient(name: str, device: str):
    x = torch.zeros(3, 100, device=device)
    x[:, 0] = 1000.0
    got = answer(PAIRS[name][0], (x, -1), grads=[torch.ones_like(x)])
    if name == "softmax":
        assert torch.equal(got.outputs[0], F.one_hot(torch.zeros(3, device=device).long(), 100).float())
        assert (got.gradients[0] == 0).all()
    else:
        assert torch.equal(got.outputs[0], torch.where(x == 1000, 0.0, -1000.0))
        assert torch.equal(got.gradients[0], torch.where(x == 1000, -99.0, 1.0))


# --- dtype= ------------------------------------------------------------------------------------------------------------


@both
def test_dtype_argument_casts_first_as_torch_does(name: str, device: str):
    ours, theirs = PAIRS[name]
    for given, wanted in itertools.product(DTYPES, DTYPES):
        for shape, dim in (*SHAPES, ((4, 4096), -1), ((2, 70_000), -1), ((7, 5), 0)):
            x = torch.randn(shape, device=device).to(given)
            got = answer(ours, (x, dim, wanted))
            own = answer(theirs, (x, dim), {"dtype": wanted})
            want = answer(theirs, (x.to(wanted).double(), dim), grads=[g.double() for g in upstream(own.outputs)])
            label = f"{given} to {wanted}, {shape}"
            assert_close(got.outputs[0], want.outputs[0], own.outputs[0], dim=dim, label=label)
            # Of outputs that were rounded to the dtype.
            rule = dict(label=f"gradient, {label}", rounded_to=wanted)
            assert_close(got.gradients[0], want.gradients[0], own.gradients[0], **rule)


@both
def test_half_to_float32_takes_one_launch(name: str, device: str):
    for dtype in HALVES:
        x = torch.randn(64, 1000, device=device).to(dtype)
        for _ in range(2):
            before = tkjit.cache.stats()["launches"]
            y = PAIRS[name][0](x, -1, torch.float32)
            assert tkjit.cache.stats()["launches"] == before + 1
        assert y.dtype == torch.float32


@both
def test_integers_and_bools_take_a_dtype(name: str, device: str):
    ours, theirs = PAIRS[name]
    for given in (torch.int64, torch.int8, torch.uint8, torch.bool):
        x = torch.randint(0, 2 if given == torch.bool else 9, (5, 33), device=device).to(given)
        for wanted in DTYPES:
            want = theirs(x.to(wanted).double(), -1)
            assert_close(ours(x, -1, dtype=wanted), want, theirs(x, -1, dtype=wanted), label=f"{given} to {wanted}")


@both
def test_dtype_that_no_softmax_has_is_refused_as_torch_refuses(name: str, device: str):
    ours, theirs = PAIRS[name]
    x = torch.ones(2, 3, device=device)
    for wanted in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        errors = []
        for function in (theirs, ours):
            with pytest.raises(Exception) as caught:
                function(x, -1, dtype=wanted)
            errors.append(caught.type)
        assert errors[0] is errors[1], f"{wanted}: {errors}"


# --- out= --------------------------------------------------------------------------------------------------------------


SHAPES = (((2, 3), -1), ((9, 128), -1), ((5, 1999), -1), ((6, 40, 16), 1), ((3, 30_000), -1), ((2, 300_001), -1))


@both
@every_dtype
def test_out_of_any_strides_is_written_and_nothing_beside_it(name: str, dtype: torch.dtype, device: str):
    ours, theirs = PAIRS[name]
    for shape, dim in SHAPES:
        x = torch.randn(shape, device=device).to(dtype)
        want, own, n = theirs(x.double(), dim), theirs(x, dim), shape[-1]
        wide = (*shape[:-1], 2 * n)
        for what, columns, backwards in (
            ("every second column", slice(0, None, 2), False),
            ("the left half", slice(0, n), False),
            ("the right half", slice(n, None), False),
            ("off alignment", slice(1, n + 1), False),
            ("first dim innermost", slice(0, n), True),
        ):
            if backwards:
                buffer = torch.full(wide[::-1], 9.0, device=device, dtype=dtype).permute(*range(len(wide))[::-1])
            else:
                buffer = torch.full(wide, 9.0, device=device, dtype=dtype)
            out = buffer[..., columns]
            assert ours(x, dim, out=out) is out
            assert_close(out, want, own, dim=dim, label=f"{what} of {shape}")
            out.fill_(9.0)
            assert (buffer == 9).all(), f"{what} of {shape}: written beside out"


@both
@every_dtype
def test_out_between_fences(name: str, dtype: torch.dtype, device: str):
    """Nothing is written past either end of a result, aligned or not."""
    ours, theirs = PAIRS[name]
    for n, offset in itertools.product((1, 7, 16, 33, 128, 1000, 4096, 4099, 20_001, 70_000), (0, 1, 3)):
        x = torch.randn(5, n, device=device).to(dtype)
        out = fenced((5, n), dtype, device, offset=offset)
        ours(x, -1, out=out)
        assert fence_intact(out), f"{n} columns, {offset} off"
        assert_close(out, theirs(x.double(), -1), theirs(x, -1), dim=-1, label=f"{n} columns, {offset} off")


@both
@every_dtype
def test_in_place(name: str, dtype: torch.dtype, device: str):
    ours = PAIRS[name][0]
    for shape, dim in (*SHAPES, ((5, 1999), 0), ((2, 600_001), -1)):
        x = torch.randn(shape, device=device).to(dtype)
        want = ours(x, dim)
        y = x.clone()
        assert ours(y, dim, out=y) is y
        assert_same([y], [want], f"{shape}")
        strided = x.repeat(*(1,) * (x.ndim - 1), 2)[..., : shape[-1]]
        ours(strided, dim, out=strided)
        assert torch.allclose(strided, want, rtol=10 * FLOOR[dtype], atol=10 * FLOOR[dtype])


@both
def test_out_that_overlaps_the_input_in_part_is_right(name: str, device: str):
    ours = PAIRS[name][0]
    for n, shift in itertools.product((5, 64, 1000, 20_000), (1, 3, 4)):
        memory = torch.randn(4 * n + shift, device=device)
        x, out = memory[: 4 * n].view(4, n), memory[shift : shift + 4 * n].view(4, n)
        want = ours(x.clone(), -1)
        ours(x, -1, out=out)
        assert_same([out.clone()], [want], f"{n} columns, {shift} on")
    buffer = torch.randn(6, 200, device=device)
    x, before = buffer[:, :100], buffer[:, :100].clone()
    ours(x, -1, out=buffer[:, 100:])
    assert_same([x, buffer[:, 100:]], [before, ours(before, -1)], "halves of one buffer")
    square = torch.randn(50, 50, device=device)
    want = ours(square.clone(), -1)
    ours(square, -1, out=square.t())
    assert_same([square.t()], [want], "the input's transpose")


@both
def test_out_that_cannot_hold_the_result_is_refused(name: str, device: str):
    ours, theirs = PAIRS[name]
    x = torch.randn(4, 6, device=device)
    for function in (ours, theirs):
        for out in (torch.empty(4, 6, device=device, dtype=torch.float16), torch.empty(4, 6, device=device).long()):
            with pytest.raises(RuntimeError, match="dtype"):
                function(x, -1, out=out)
        with pytest.raises(RuntimeError, match="device"):
            function(x, -1, out=torch.empty(4, 6))
        with pytest.raises(RuntimeError, match="single memory location"):
            function(x, -1, out=torch.empty(4, 1, device=device).expand(4, 6))
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            function(x, -1, out=torch.empty_like(x).requires_grad_())
        with pytest.raises(IndexError):
            function(x, 2, out=torch.empty_like(x))
    # torch takes these, and leaves values that another row's overwrote, or a result without a gradient.
    with pytest.raises(RuntimeError, match="single memory location"):
        ours(x, -1, out=torch.empty(30, device=device).as_strided((4, 6), (3, 1)))
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        ours(x.clone().requires_grad_(), -1, out=torch.empty_like(x))
    with torch.no_grad():
        assert_same([ours(x.clone().requires_grad_(), -1, out=torch.empty_like(x))], [ours(x, -1)])


@both
def test_out_of_another_shape_is_resized_with_torchs_warning(name: str, device: str):
    ours, theirs = PAIRS[name]
    x = torch.randn(4, 6, device=device)
    for function in (ours, theirs):
        out = torch.empty(3, device=device)
        with pytest.warns(UserWarning, match="resized"):
            function(x, -1, out=out)
        assert out.shape == x.shape
        out = torch.empty(0, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(x, -1, out=out)
        assert_close(out, theirs(x.double(), -1), label="an empty out")


@both
def test_out_with_dtype(name: str, device: str):
    ours, theirs = PAIRS[name]
    for given, wanted in itertools.product(DTYPES, DTYPES):
        x = torch.randn(5, 100, device=device).to(given)
        out = torch.empty(5, 200, device=device, dtype=wanted)[:, ::2]
        ours(x, -1, dtype=wanted, out=out)
        assert_close(out, theirs(x.to(wanted).double(), -1), theirs(x, -1, dtype=wanted), label=f"{given} to {wanted}")


@both
def test_results_changed_in_place_are_noticed_by_the_backward(name: str, device: str):
    """The backward keeps the result: writing to it must be an error, also when the writer is out=."""
    ours = PAIRS[name][0]
    x = torch.randn(4, 6, device=device).requires_grad_()

    def into(y: Tensor) -> None:
        ours(torch.randn_like(y), -1, out=y.detach())

    for change in (lambda y: y.mul_(2), lambda y: y.detach().zero_(), into):
        y = ours(x, -1)
        loss = (y * 1.0).sum()
        change(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_input_may_be_changed_before_the_backward(device: str):
    """Only the result is kept."""
    for ours, _ in PAIRS.values():
        leaf = torch.randn(4, 6, device=device).requires_grad_()
        x = leaf * 1.0
        y = ours(x, -1)
        want = torch.autograd.grad(ours(leaf, -1), leaf, torch.ones_like(x).cumsum(-1))
        x.zero_()
        assert_same(torch.autograd.grad(y, leaf, torch.ones_like(x).cumsum(-1)), want)


def test_backward_keeps_the_result_alone(device: str):
    for ours, _ in PAIRS.values():
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # noqa: B023
            y = ours(torch.randn(4, 6, device=device).requires_grad_(), -1)
        assert [t.data_ptr() for t in kept] == [y.data_ptr()]


# --- As torch's --------------------------------------------------------------------------------------------------------


def test_call_forms_of_torch(device: str):
    x = torch.randn(3, 5, 7, device=device)
    for ours, theirs in PAIRS.values():
        for call in (
            lambda f: f(x, 1),
            lambda f: f(x, dim=1),
            lambda f: f(input=x, dim=-2),
            lambda f: f(x, 1, torch.float64),
            lambda f: f(x, dim=1, dtype=torch.float64),
        ):
            torch.testing.assert_close(call(ours), call(theirs), rtol=1e-5, atol=1e-6)


def test_model_trains_the_same_when_it_takes_our_softmax(device: str, monkeypatch: pytest.MonkeyPatch):
    """A drop-in: the same losses over some steps of a small attention classifier."""

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 32)
            self.qkv = torch.nn.Linear(32, 96)
            self.out = torch.nn.Linear(32, 11)

        def forward(self, tokens: Tensor) -> Tensor:
            q, k, v = self.qkv(self.embed(tokens)).chunk(3, -1)
            mixed = F.softmax(q @ k.transpose(-2, -1) / 32**0.5, dim=-1) @ v
            return F.log_softmax(self.out(mixed).mean(1), dim=-1)

    def train() -> list[float]:
        torch.manual_seed(0)
        model = Classifier().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        tokens, target = torch.randint(50, (64, 20), device=device), torch.randint(11, (64,), device=device)
        losses = []
        for _ in range(30):
            loss = F.nll_loss(model(tokens), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    want = train()
    calls = []

    def counted(function: Callable) -> Callable:
        return lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs)

    monkeypatch.setattr(F, "softmax", counted(tkjit.softmax))
    monkeypatch.setattr(F, "log_softmax", counted(tkjit.log_softmax))
    got = train()
    assert len(calls) == 60 and want[-1] < want[0] / 2
    assert got == pytest.approx(want, rel=1e-3, abs=1e-4)


def test_recycled_memory_full_of_nan_shows_nothing(device: str):
    for dtype, n in itertools.product(DTYPES, (1, 15, 100, 4096, 5001, 70_000, 600_001)):
        x = as_leaves([torch.randn(3, n, device=device).to(dtype)])[0]
        for ours, _ in PAIRS.values():
            poison(device, 1 << 24)
            y = ours(x, -1)
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert y.isfinite().all() and dx.isfinite().all(), f"{dtype}, {n} columns"


@both
def test_compiles_once_for_all_shapes(name: str, device: str):
    import torch._dynamo.testing

    torch._dynamo.reset()
    ours, theirs = PAIRS[name]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: ours(x, -1), fullgraph=True, dynamic=True, backend=counter)
    for rows, cols in ((3, 37), (5, 64), (2, 1000), (7, 5001)):
        check(compiled, lambda x: theirs(x, -1), (torch.randn(rows, cols, device=device),), label=f"{rows} x {cols}")
    assert counter.frame_count == 1, "recompiled for a shape"


@both
def test_many_shapes_lose_no_memory(name: str, device: str):
    """Plans are bounded in number, and so are the kernels that they need."""

    marks = []
    for widths in (range(1, 3000), range(3000, 9000)):
        for n in widths:
            PAIRS[name][0](torch.empty(2, n, device=device), -1)
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        marks.append(resident_kib())
    assert marks[1] - marks[0] < 60 * 1024, f"{marks[1] - marks[0]} KiB more after 6000 more shapes"


# --- arguments of a wrong kind -----------------------------------------------------------------------------------------


@both
def test_argument_of_a_wrong_kind_is_named(name: str):
    ours = PAIRS[name][0]
    x = torch.ones(2, 3, device="meta")
    for named, call in (
        ("input", lambda: ours([1.0, 2.0], 0)),
        ("input", lambda: ours([1.0, 2.0], 0, out=x)),
        ("out", lambda: ours(x, 0, out=[1.0])),
        ("dtype", lambda: ours(x, 0, dtype="float32")),
    ):
        with pytest.raises(TypeError, match=f"'{named}'"):
            call()


@both
def test_a_dim_refused_spoils_no_later_call(name: str, device: str):
    """True, 1 and 1.0 are one key of a dict, and three different dims."""
    ours, theirs = PAIRS[name]
    x = torch.randn(3, 5, device=device, requires_grad=True)
    for dim in (True, 1.0, [1], 5):
        with pytest.raises((TypeError, IndexError)):
            ours(x, dim)
    judged(name, x.detach(), 1, label="afterwards")
    with pytest.raises(TypeError):
        ours(x, True)
    assert_close(ours(x, torch.tensor(1)), theirs(x.double(), 1), theirs(x, 1))


@both
def test_out_in_the_inputs_memory_is_written_after_it_is_read(name: str, device: str):
    ours, theirs = PAIRS[name]
    base = torch.randn(4 * 64, device=device)
    x = base.view(torch.half)[: 4 * 64].view(4, 64)
    x.copy_(torch.randn(4, 64))
    want, like = theirs(x.double(), -1), theirs(x.float(), -1)
    assert_close(ours(x, -1, dtype=torch.float32, out=base.view(4, 64)), want, like, label="as another dtype")
    a = torch.randn(9, 64, device=device)
    want, like = theirs(a[:8].double(), -1), theirs(a[:8], -1)
    assert_close(ours(a[:8], -1, out=torch.from_dlpack(a[1:])), want, like, label="a row further on")
    a = torch.randn(9, 64, device=device)
    want, like = theirs(a[4:8].double(), -1), theirs(a[4:8], -1)
    assert_close(ours(a[4:8], -1, out=a[:4]), want, like, label="beside it")


@both
def test_out_has_no_forward_mode(name: str, device: str):
    ours = PAIRS[name][0]
    x, t = torch.randn(3, device=device), torch.randn(3, device=device)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        ours(torch.autograd.forward_ad.make_dual(x, t), 0, out=torch.empty(3, device=device))


def test_backward_op_refuses_what_does_not_belong_together(device: str):
    backward = torch.ops.tkjit.softmax_backward
    y = torch.rand(30, device=device)
    for dy in (torch.ones(3, device=device), torch.ones(30, device=device, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="softmax_backward"):
            backward(dy, y, 0, False, y.dtype)
    with pytest.raises(RuntimeError, match="no kernel"):
        backward(y, y, 0, False, torch.float64)
