"""scaled_dot_product_attention on the grids of torch's own tests of its fused backends, held to torch's own rule.

The rule: an output's or a gradient's largest error is at most ``fudge * e``, or 1e-5, where e is that of torch's math backend
in the inputs' dtype, and both are against the math backend in a wider one. Its products are in full float32 here; torch's suite
allows them TF32, which widens the bound.

Of torch's test_transformers.py, with its numbers for sm_80 and later, by dtype:

    grid           cases  run here         test_...
    flash           2592  104, every 25th  flash_attention_vs_math_ref_grads: fp16, bf16
    mem_efficient   1024   94, every 11th  mem_efficient_attention_vs_math_ref_grads: fp16, bf16, fp32
    attn_mask        512  103, every 5th   mem_efficient_attention_attn_mask_vs_math_ref_grads: fp16, bf16, fp32
    biases             8    8              causal_variants of TestAttnBias: fp16
    masked rows        6    6              fully_masked_out_rows: fp16, fp32

These are 9812 cases, of which 816 are run: each further dtype begins one case later, and mem_efficient's second and third and
attn_mask's third have one fewer for that. In each sample every two values of two parameters meet. ``EVERY_CASE`` runs all.

Repetitions are left out: torch's flash test has two pairs of head counts even where it has no use for them. What torch leaves out
because its kernels can't do it is in: causal attention of other lengths in flash, dropout of more than 1024 queries in
mem_efficient, and a lower right bias with more queries than keys. Nested tensors are torch's own business.

torch reads back what its dropout kept; here it is seen in a second call from the same seed, whose value is columns of the identity:
its output is the weights, 0 where dropped.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tkjit
from emulate import emulating
from judge import SEED, Answer, answer

EVERY_CASE = False

FLOOR = 1e-5  # of the bound
MOST_BYTES = 2**29  # of a reference's scores at a time; it holds some six such matrices

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAMES = {FP16: "fp16", BF16: "bf16", FP32: "fp32"}
TENSORS = ("output", "dq", "dk", "dv", "dmask")


@dataclass(frozen=True)
class Case:
    batch: int
    length: int
    keys: int
    dim: int
    causal: bool
    dropout: float
    unit_scale: bool  # the scale is 1 / dim, not its root
    heads: tuple[int, int]  # of query, of key and value

    @property
    def scale(self) -> float | None:
        return 1 / self.dim if self.unit_scale else None


@dataclass(frozen=True)
class Grid:
    """Values of a case's parameters, in the order of Case; the last changes fastest."""

    values: tuple[tuple, ...]
    dtypes: tuple[torch.dtype, ...]
    wide: dict[torch.dtype, torch.dtype]  # the dtype that counts
    fudges: tuple[float, ...]  # of TENSORS
    step: int
    masked: bool = False  # with a float mask (length, keys) that wants its gradient

    def cases(self, dtype: torch.dtype) -> list[Case]:
        every = [Case(*values) for values in itertools.product(*self.values)]
        return every if EVERY_CASE else every[self.dtypes.index(dtype) % self.step :: self.step]


BOOLS = (False, True)
GRIDS = {
    "flash": Grid(
        values=(
            (1, 8), (4, 143, 2048), (4, 127, 579, 2048), (8, 203, 256), BOOLS, (0.0, 0.22, 0.48), BOOLS,
            ((4, 4), (16, 8), (10, 2)),
        ),
        dtypes=(FP16, BF16), wide={FP16: FP32, BF16: FP32}, fudges=(4, 180, 16, 4), step=25,
    ),
    "mem_efficient": Grid(
        values=(
            (1, 8), (8, 103, 1024, 2048), (8, 103, 1024, 2048), (8, 16, 96, 128), BOOLS, (0.0, 0.22), BOOLS, ((4, 4),),
        ),
        dtypes=(FP16, BF16, FP32), wide=dict.fromkeys(NAMES, FP64), fudges=(3, 150, 25, 8.5), step=11,
    ),
    "attn_mask": Grid(
        values=(
            (1, 8), (8, 312, 1024, 2048), (8, 408, 1024, 2048), (8, 16, 96, 128), (False,), (0.0, 0.22), BOOLS, ((4, 4),),
        ),
        dtypes=(FP16, BF16, FP32), wide={FP16: FP32, BF16: FP32, FP32: FP64}, fudges=(4, 160, 25, 8, 45), step=5, masked=True,
    ),
}  # fmt: skip

# Small enough for the emulator, and ragged in every direction.
TINY = {
    "flash": replace(
        GRIDS["flash"],
        values=((1,), (4, 21), (4, 37), (8, 27), BOOLS, (0.0, 0.48), BOOLS, ((1, 1), (2, 1))),
        step=25,
    ),
    "mem_efficient": replace(
        GRIDS["mem_efficient"],
        values=((1,), (8, 19), (8, 33), (8, 16), BOOLS, (0.0, 0.22), BOOLS, ((1, 1),)),
        step=19,
    ),
    "attn_mask": replace(
        GRIDS["attn_mask"],
        values=((1,), (8, 19), (8, 34), (8, 16), (False,), (0.0, 0.22), BOOLS, ((2, 2),)),
        step=11,
    ),
}

each_kind_and_dtype = pytest.mark.parametrize(
    ("kind", "dtype"),
    [pytest.param(k, d, id=f"{k}-{NAMES[d]}") for k, grid in GRIDS.items() for d in grid.dtypes],
)

# --- Judging -----------------------------------------------------------------------------------------------------------


def math_backend(
    args: Sequence[Tensor],
    g: Tensor,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    kept: Tensor | None = None,
) -> Answer:
    """torch's math backend, some batch entries at a time. With a mask all at once: its gradient is a sum over the batch."""
    q, k, v, *mask = args
    entry = math.prod(q.shape[1:3]) * k.shape[2] * max(q.element_size(), 4)
    step = len(q) if mask else max(MOST_BYTES // entry, 1)
    gqa = q.shape[1] != k.shape[1]

    def attention(keep: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        op = torch.ops.aten._scaled_dot_product_attention_math
        if mask is not None and mask.dtype == torch.bool:  # torch does this before
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
        return op(q, k, v, mask, dropout, causal, keep, scale=scale, enable_gqa=gqa)[0]

    parts = []
    for first in range(0, len(q), step):
        some = slice(first, first + step)
        function = functools.partial(attention, None if kept is None else kept[some])
        parts.append(answer(function, [q[some], k[some], v[some], *mask], grads=[g[some]]))
    if len(parts) == 1:
        return parts[0]
    gradients = [torch.cat(grads) for grads in zip(*(part.gradients for part in parts), strict=True)]
    return Answer((torch.cat([part.outputs[0] for part in parts]),), tuple(gradients))


def beyond_the_fudge(
    ours: Callable[..., Tensor],
    args: Sequence[Tensor],
    g: Tensor,
    wide: torch.dtype,
    fudges: Sequence[float],
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    kept: Tensor | None = None,
) -> list[str]:
    """What is further from the math backend in ``wide`` than the rule allows."""
    torch.manual_seed(SEED)
    got = answer(ours, args, grads=[g])
    low = math_backend(args, g, causal, dropout, scale, kept)
    widened = [t.to(wide) if t.is_floating_point() else t for t in args]
    gold = math_backend(widened, g.to(wide), causal, dropout, scale, kept)
    found = []
    for name, fudge, mine, own, want in zip(TENSORS, fudges, got.tensors, low.tensors, gold.tensors):
        error, allowed = (float((t.to(wide) - want).abs().max()) for t in (mine, own))
        if mine.dtype != own.dtype or mine.shape != own.shape:
            found.append(f"{name} is {mine.dtype} of {tuple(mine.shape)}, torch's {own.dtype} of {tuple(own.shape)}")
        elif not error <= max(FLOOR, fudge * allowed):
            found.append(f"{name}: error {error:.3g}, torch's own {allowed:.3g}, allowed {fudge} times that")
    return found


def kept_by(ours: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
    """Which weights a call from the same seed keeps, (batch, heads, length, keys). The identity's columns come in as many as
    make it the kernel of the call itself, and with gradients wanted for the same reason."""
    keys, dim = k.shape[2], q.shape[3]
    width = next(n for n in (32, 64, 96, 128, 192, 256) if dim <= n)
    kept = torch.empty(*q.shape[:3], keys, dtype=torch.bool, device=q.device)
    q = q.detach().requires_grad_()
    rows, columns = (torch.arange(n, device=q.device) for n in (keys, width))
    for first in range(0, keys, width):
        identity = (rows[:, None] == first + columns).to(q.dtype)
        torch.manual_seed(SEED)
        out = ours(q, k, identity.expand(*v.shape[:2], keys, width), *mask)
        kept[..., first : first + width] = out.detach()[..., : keys - first] != 0
    return kept


def wrong_share(kept: Tensor, case: Case) -> list[str]:
    """That a share far from 1 - dropout is kept of the weights that count."""
    seen = torch.ones(kept.shape[2:], dtype=torch.bool)
    count = kept.shape[0] * kept.shape[1] * int((seen.tril() if case.causal else seen).sum())
    share, due = int(kept.sum()) / count, 1 - case.dropout
    off = abs(share - due) / math.sqrt(due * (1 - due) / count)
    return [f"dropout keeps {share:.4f} of {count} weights, {off:.1f} deviations from {due}"] if off > 5 else []


def faults_of(case: Case, grid: Grid, dtype: torch.dtype, place: str) -> list[str]:
    """What the rule finds in one case."""
    torch.manual_seed(SEED)
    (hq, hk), make = case.heads, {"device": place, "dtype": dtype}
    q = torch.rand(case.batch, hq, case.length, case.dim, **make)
    k, v = (torch.rand(case.batch, hk, case.keys, case.dim, **make) for _ in range(2))
    args = [q, k, v, *([torch.rand(case.length, case.keys, **make)] if grid.masked else [])]
    g = torch.rand(q.shape, **make)
    call = dict(dropout_p=case.dropout, is_causal=case.causal, scale=case.scale, enable_gqa=hq != hk)
    ours = functools.partial(tkjit.scaled_dot_product_attention, **call)
    kept = kept_by(ours, *args) if case.dropout else None
    rest = (case.causal, case.dropout, case.scale, kept)
    share = [] if kept is None else wrong_share(kept, case)
    return share + beyond_the_fudge(ours, args, g, grid.wide[dtype], grid.fudges, *rest)


def report(cases: Iterable[tuple[object, Callable[[], list[str]]]]) -> None:
    """Runs every case, then fails with all that was found."""
    lines, count = [], 0
    for label, run in cases:
        count += 1
        try:
            found = run()
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        lines += [f"{label}: {fault}" for fault in found]
    assert count and not lines, f"{len(lines)} faults in {count} cases\n" + "\n".join(lines)


def report_grid(grid: Grid, dtype: torch.dtype, place: str) -> None:
    report((case, functools.partial(faults_of, case, grid, dtype, place)) for case in grid.cases(dtype))


# --- The grids ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_kind_and_dtype
def test_grid(kind: str, dtype: torch.dtype, device: str) -> None:
    report_grid(GRIDS[kind], dtype, device)


@each_kind_and_dtype
def test_tiny_grid(kind: str, dtype: torch.dtype) -> None:
    with emulating("sm_90a"):
        report_grid(TINY[kind], dtype, "cpu")


@pytest.mark.parametrize("kind", GRIDS)
def test_sample_has_every_two_values_together(kind: str) -> None:
    grid = GRIDS[kind]
    for dtype in grid.dtypes:
        rows = [tuple(vars(case).values()) for case in grid.cases(dtype)]
        for a, b in itertools.combinations(range(len(grid.values)), 2):
            assert {(row[a], row[b]) for row in rows} == set(itertools.product(grid.values[a], grid.values[b]))


# --- Biases and masked rows --------------------------------------------------------------------------------------------


def faults_of_bias(lower: bool, sizes: tuple[int, ...], place: str) -> list[str]:
    """Of a causal bias: it is the mask that it stands for."""
    b, h, length, keys, dim = sizes
    torch.manual_seed(SEED)
    q, k, v = (torch.rand(b, h, n, dim, device=place, dtype=FP16) for n in (length, keys, keys))
    g = torch.randn_like(q)
    bias = (causal_lower_right if lower else causal_upper_left)(length, keys)
    seen = torch.ones(length, keys, dtype=torch.bool, device=place).tril(keys - length if lower else 0)

    def ours(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
        return tkjit.scaled_dot_product_attention(q, k, v, bias)

    return beyond_the_fudge(ours, [q, k, v, seen], g, FP32, GRIDS["flash"].fudges)


def report_biases(sizes: Sequence[tuple[int, ...]], place: str) -> None:
    cases = itertools.product(BOOLS, sizes)
    report((f"lower right {c[0]}, {c[1]}", functools.partial(faults_of_bias, *c, place)) for c in cases)


# torch's kernels make NaN of a query that sees no key, and warn.
no_warning = pytest.mark.filterwarnings("ignore:Lower right causal bias")


@pytest.mark.gpu
@no_warning
def test_biases(device: str) -> None:
    report_biases(((16, 16, 128, 128, 16), (16, 16, 128, 256, 32), (16, 16, 256, 128, 32), (1, 1, 23, 56, 15)), device)


@no_warning
def test_tiny_biases() -> None:
    with emulating("sm_90a"):
        report_biases(((1, 1, 23, 40, 15), (1, 1, 33, 16, 16)), "cpu")


def faults_of_masked_rows(length: int, dim: int, dtype: torch.dtype, place: str) -> list[str]:
    """Every fourth query sees no key: its output and gradient are 0. The others see every fifth."""
    torch.manual_seed(SEED)
    q, k, v = (torch.rand(1, 1, length, dim, device=place, dtype=dtype) for _ in range(3))
    at = torch.arange(length, device=place)
    seen = at[:, None] % 5 == at % 5
    seen[::4] = False
    grid = GRIDS["attn_mask"]
    g = torch.ones_like(q)
    found = beyond_the_fudge(tkjit.scaled_dot_product_attention, [q, k, v, seen], g, grid.wide[dtype], grid.fudges)
    got = answer(tkjit.scaled_dot_product_attention, [q, k, v, seen], grads=[g])
    for name, t in zip(TENSORS[:2], got.tensors):
        if t[..., ::4, :].any():
            found.append(f"{name} of a query that sees no key is not 0")
    return found


def report_masked_rows(lengths: Sequence[int], dims: Sequence[int], place: str) -> None:
    cases = itertools.product(lengths, dims, (FP32, FP16))
    report((c, functools.partial(faults_of_masked_rows, *c, place)) for c in cases)


@pytest.mark.gpu
def test_masked_rows(device: str) -> None:
    report_masked_rows((32, 64, 128), (16, 32), device)


def test_tiny_masked_rows() -> None:
    with emulating("sm_90a"):
        report_masked_rows((32,), (16,), "cpu")
