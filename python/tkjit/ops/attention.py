"""scaled_dot_product_attention and its gradients.

    t = scale * q k^T, capped (+ mask)    p = softmax(t)    o = dropout(p) v
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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .._device import Device, device_of
from .._errors import DeviceError
from .._library import define
from .._plan import Spec, f64, i32, i64, plan, planned, scratch, struct, u32
from .._rows import DTYPES, ceil_div
from .._template import CTYPES, template
from .._torch import Op, compiling, routed
from ..testing import DTYPE_NAMES, BenchCase, Sample, as_tuple, op_cases

MAX_HEAD_DIM = 512

# torch.nn.functional's, whose name there may lead to ours: see tkjit.attention.enable.
_torchs = torch._C._nn.scaled_dot_product_attention

# --- tiles -----------------------------------------------------------------------------------------------------------

# The widths that a kernel is compiled for: columns beyond the head's are zeros. Above 256 a block computes some of the output's.
_WIDTHS = (32, 64, 96, 128, 192, 256, 512)


def _width(d: int) -> int:
    return next(width for width in _WIDTHS if d <= width)


def _tile_bytes(rows: int, cols: int, size: int) -> int:
    """sizeof(tile::Tile)."""
    return rows * (cols * size + 16)


@dataclass(frozen=True)
class Config:
    """A kernel's tiles: see attention.cuh.

    Attributes:
        step: Rows of the tiles that a block walks over: keys, of bwd_dkv queries.
        warps: Of a block.
        tiles: Of a warp, 16 rows each; for the types without tensor cores rows of a thread.
        out: Columns of its output that a block computes.
    """

    step: int
    warps: int
    tiles: int
    out: int

    def rows(self, size: int) -> int:
        """That a block keeps: queries, of bwd_dkv keys."""
        return (16 if size == 2 else 2) * self.warps * self.tiles

    def columns(self, width: int) -> int:
        """Of a width that blocks share: the most up to ``out`` that divide it."""
        return next(n for n in range(min(self.out, width), 0, -16) if width % n == 0)

    def shared_bytes(self, kernel: str, size: int, kd: int, kdv: int) -> int:
        """sizeof of the kernel's Shared, or a little more."""
        rows, acc = self.rows(size), max(size, 4)
        tile = functools.partial(_tile_bytes, size=size)
        if kernel == "fwd":
            return tile(rows + self.step, kd) + tile(self.step, self.columns(kdv))
        kept = self.step if kernel == "bwd_dkv" else rows
        total = tile(rows + self.step, kd) + tile(rows + self.step, kdv) + 3 * kept * acc + 16
        return total + (rows * (self.step + 1) * acc if kernel == "bwd_dmask" else 0)

    @classmethod
    def pick(cls, kernel: str, size: int, kd: int, kdv: int, rows: int, device: Device, masked: bool = False) -> Config:
        """The first that the device has shared memory for."""
        width = max(kd, kdv)
        for most, *choices in _TILES[kernel, size]:
            if width > most:
                continue
            for choice in choices:
                c = cls(*choice)
                last = choice == choices[-1]
                # More rows than there are, by half or more, are work for nothing. A mask takes the registers of a warp's second
                # tile: 2.63 ms beside 2.95 with a bias at 128 columns, 4096 queries and keys. NVIDIA H200, 2026-12-01.
                idle = c.rows(size) >= 2 * rows and c.rows(size) > 16
                full = masked and kernel == "fwd" and size == 2 and c.tiles > 1
                if c.shared_bytes(kernel, size, kd, kdv) <= device.smem_block and (last or not (idle or full)):
                    return c
        raise NotImplementedError(
            f"scaled_dot_product_attention: {device.arch} has too little shared memory for {size}-byte heads of {width}"
        )


@dataclass(frozen=True)
class FusedConfig:
    """The tiles of attention::bwd."""

    BLOCK_M: int  # queries of a step
    BLOCK_N: int  # keys of a block
    warps: int
    across: int  # warps that share rows of dk and dv
    stages: int  # steps whose queries there is room for

    def shared_bytes(self, kd: int, kdv: int) -> int:
        m, n = self.BLOCK_M, self.BLOCK_N
        tile = functools.partial(_tile_bytes, size=2)
        stage = tile(m, kd) + tile(m, kdv) + 3 * m * 4 + 16
        return tile(n, kd) + tile(n, kdv) + 2 * tile(n, m) + self.stages * stage

    @classmethod
    def pick(cls, kd: int, kdv: int, device: Device) -> FusedConfig | None:
        """None where the two gradients have no room in registers or shared memory."""
        width = max(kd, kdv)
        for most, *choices in _FUSED:
            for c in (cls(*choice) for choice in choices):
                columns = 16 * c.across
                whole = kd % columns == 0 and kdv % columns == 0 and kd * c.BLOCK_M // 16 % (16 * c.warps) == 0
                if width <= most and whole and c.shared_bytes(kd, kdv) <= device.smem_block:
                    return c
        return None


_FUSED: list[tuple[Any, ...]] = [
    (64, (64, 128, 4, 1, 1), (64, 64, 4, 1, 1)),
    (128, (64, 128, 8, 2, 2), (64, 128, 8, 2, 1), (64, 64, 8, 2, 1), (32, 64, 4, 1, 1)),
    (256, (64, 64, 8, 4, 2), (64, 64, 8, 4, 1), (32, 64, 8, 2, 1)),
]

# (step, warps, tiles, columns of the output) by the kernel, the bytes of an element and the wider of the two heads. The first of
# fwd and bwd_dq for two bytes, and all of _FUSED's first, are the fastest of some five each at 16k tokens, 4096 a sequence,
# causal and not. NVIDIA H200, 2026-12-01. The others are what smaller shared memories hold; for 4 and 8 bytes nothing was tuned.
_TILES: dict[tuple[str, int], list[tuple[Any, ...]]] = {
    ("fwd", 2): [
        (64, (128, 4, 2, 64), (64, 4, 1, 64), (32, 1, 1, 64)),
        (128, (64, 4, 2, 128), (64, 4, 1, 128), (32, 1, 1, 128)),
        (256, (64, 4, 1, 256), (32, 4, 1, 256), (32, 1, 1, 256)),
        (512, (32, 4, 1, 256), (32, 2, 1, 256), (16, 1, 1, 256)),
    ],
    ("fwd", 4): [
        (64, (64, 8, 4, 64), (32, 4, 2, 64)),
        (128, (32, 8, 4, 128), (32, 4, 2, 128)),
        (256, (32, 8, 2, 256), (16, 8, 2, 128), (16, 4, 1, 128)),
        (512, (16, 8, 1, 128), (16, 4, 1, 64)),
    ],
    ("fwd", 8): [
        (128, (32, 8, 2, 128), (16, 4, 1, 128)),
        (256, (16, 8, 1, 128), (16, 4, 1, 64)),
        (512, (16, 8, 1, 128), (16, 4, 1, 64)),
    ],
    ("bwd_dkv", 2): [
        (64, (32, 4, 2, 64), (32, 1, 1, 64)),
        (128, (32, 4, 1, 128), (32, 1, 1, 128)),
        (256, (32, 8, 1, 256), (32, 4, 1, 256), (16, 4, 1, 256), (16, 1, 1, 256)),
        (512, (32, 4, 1, 256), (32, 2, 1, 256), (16, 1, 1, 256)),
    ],
    ("bwd_dkv", 4): [
        (64, (32, 8, 2, 64), (16, 4, 2, 64)),
        (128, (32, 8, 2, 128), (16, 4, 2, 128)),
        (256, (16, 8, 1, 128), (16, 4, 1, 128)),
        (512, (16, 8, 1, 128), (16, 4, 1, 128), (16, 2, 1, 64)),
    ],
    ("bwd_dkv", 8): [
        (128, (16, 8, 1, 128), (16, 4, 1, 128)),
        (256, (16, 8, 1, 128), (16, 4, 1, 128), (16, 2, 1, 64)),
        (512, (16, 4, 1, 128), (16, 2, 1, 64), (16, 1, 1, 64)),
    ],
}
_TILES |= {(kernel, size): _TILES["bwd_dkv", size] for kernel in ("bwd_dq", "bwd_dmask") for size in (2, 4, 8)}
_TILES["bwd_dq", 2] = [
    (128, (32, 4, 2, 128), (32, 1, 1, 128)),
    (256, (32, 4, 1, 256), (16, 4, 1, 256), (16, 1, 1, 256)),
    *_TILES["bwd_dkv", 2][-1:],
]


# --- planning --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What every kernel of a call is told: shapes, strides, and which scores count."""

    q: Spec
    k: Spec
    v: Spec
    mask: Spec | None
    seed: Spec | None
    upper: int | None  # query i sees the keys up to i + upper
    lower: int | None  # and from i + lower on
    softcap: float  # 0: none
    scale: float
    dropout: float

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        name = "scaled_dot_product_attention"
        if q.dtype not in DTYPES:
            kind = NotImplementedError if q.dtype.startswith(("float", "complex")) else RuntimeError
            raise kind(f"{name}: Expected query, key, and value of type {', '.join(DTYPES)}, but got {q.dtype}")
        if not q.dtype == k.dtype == v.dtype:
            raise RuntimeError(
                f"{name}: Expected query, key, and value to have the same dtype, but got query.dtype: {q.dtype}, key.dtype: "
                f"{k.dtype}, and value.dtype: {v.dtype} instead."
            )
        shapes = f"query {q.shape}, key {k.shape}, value {v.shape}"
        if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
            raise RuntimeError(f"{name}: these shapes do not go together: {shapes}")
        if (k.shape[1] == 0) != (q.shape[1] == 0) or (k.shape[1] and q.shape[1] % k.shape[1]):
            raise RuntimeError(f"{name}: query has no multiple of key's heads: {shapes}")
        if self.mask is not None:
            if self.mask.dtype not in ("bool", "float32", q.dtype):
                raise RuntimeError(
                    f"{name}: Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
                    f"{self.mask.dtype} and  query.dtype: {q.dtype} instead."
                )
            whole = self.scores_shape
            sizes = self.mask.shape
            if len(sizes) > 4 or any(n not in (1, all_) for n, all_ in zip(sizes[::-1], whole[::-1])):
                raise RuntimeError(f"{name}: attn_mask of {sizes} does not broadcast to the scores' {whole}")

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        b, h, length, _ = self.q.shape
        return b, h, length, self.k.shape[2]

    @property
    def size(self) -> int:
        return self.q.itemsize

    @property
    def widths(self) -> tuple[int, int]:
        return _width(self.q.shape[3]), _width(self.v.shape[3])

    @property
    def group(self) -> int:
        return self.q.shape[1] // max(self.k.shape[1], 1)

    @property
    def n_rows(self) -> int:
        return math.prod(self.q.shape[:3])

    @property
    def mask_sizes(self) -> tuple[int, ...]:
        """Of the mask's four dims; 1 where it is broadcast."""
        assert self.mask is not None
        return (1,) * (4 - self.mask.ndim) + self.mask.shape

    def score(self, rows: int, cols: int) -> str:
        """The scores::Scores of a kernel with tiles of so many queries and keys."""
        mask = "scores::None" if self.mask is None else CTYPES[self.mask.dtype]
        pairs = self.mask is not None and (
            self.mask.strides[-1] == 1
            and self.k.shape[2] % 2 == 0
            and self.mask.shape[-1] > 1
            and self.mask.align >= 2 * self.mask.itemsize
            and all(n <= 1 or s % 2 == 0 for n, s in zip(self.mask.shape[:-1], self.mask.strides[:-1]))
        )
        ragged = self.q.shape[2] % rows != 0 or self.k.shape[2] % cols != 0
        fold = (
            self.size == 2
            and self.softcap == 0
            and 0 < self.scale < math.inf
            and (self.mask is None or self.mask.dtype == "bool")
        )
        flags = (
            pairs,
            self.upper is not None,
            self.lower is not None,
            ragged,
            self.dropout > 0,
            fold,
            self.softcap > 0,
        )
        return f"scores::Scores<{CTYPES[self.q.dtype]}, {mask}, {', '.join(str(f).lower() for f in flags)}>"

    def problem(self, o: Spec | None = None, g: Spec | None = None) -> Any:
        """attention::Problem."""
        mask: tuple[int, ...] = (0, 0, 0, 0)
        if self.mask is not None:
            own = tuple(0 if n == 1 else s for n, s in zip(self.mask.shape, self.mask.strides))
            mask = (0,) * (4 - len(own)) + own
        strides = [*(t.strides if t is not None else (0, 0, 0, 0) for t in (self.q, self.k, self.v, o, g)), mask]
        kept = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
        return struct(
            *(i64(s) for four in strides for s in four), f64(self.scale), f64(kept), f64(self.softcap),
            i32(self.q.shape[1]), i32(self.group), i32(self.q.shape[2]), i32(self.k.shape[2]), i32(self.q.shape[3]),
            i32(self.v.shape[3]), i32(_limit(self.upper)), i32(_limit(self.lower)),
            u32(min(round(self.dropout * 2**32), 2**32 - 1)),
        )  # fmt: skip


def _limit(bound: int | None) -> int:
    """Lengths are below 2**30, so what lies further away is no other limit; and sums of two stay within 32 bits."""
    return min(max(bound or 0, -(2**30)), 2**30)


def _vectors(*specs: Spec) -> bool:
    """Whether every row begins on 16 bytes and has whole vectors."""
    return all(
        t.align >= 16
        and (t.strides[3] == 1 or t.shape[3] <= 1)
        and t.shape[3] * t.itemsize % 16 == 0
        and all(n <= 1 or s * t.itemsize % 16 == 0 for n, s in zip(t.shape[:3], t.strides[:3]))
        for t in specs
    )


def _like(shape: tuple[int, int, int, int], source: Spec) -> Spec:
    """A new tensor laid out in the source's order: (batch, heads, length, d), or with the lengths before the heads."""
    _, h, n, d = shape
    contiguous = (h * n * d, n * d, d, 1)
    tokens_first = (n * h * d, d, h * d, 1)
    strides = tokens_first if _tokens_first(source.shape, source.strides) else contiguous
    return Spec(source.dtype, shape, strides, source.device, 16)


def _tokens_first(shape: Any, strides: Any) -> bool:
    return shape[1] > 1 and shape[2] > 1 and strides[1] < strides[2]


@planned
def _forward(
    q: Spec, k: Spec, v: Spec, mask: Spec | None, seed: Spec | None,
    upper: int | None, lower: int | None, softcap: float, scale: float, dropout: float,
    with_stats: bool = False,
) -> Any:  # fmt: skip
    """o; with_stats: and the rows' maxima and sums, (2, batch, heads, q_len)."""
    call = Call(q, k, v, mask, seed, upper, lower, softcap, scale, dropout)
    device = _require_arch(device_of(q))
    b, h, length, _ = q.shape
    o = _like((b, h, length, v.shape[3]), q)
    acc = "float64" if q.dtype == "float64" else "float32"
    stats = Spec(acc, (2, b, h, length), (b * h * length, h * length, length, 1), q.device, 16)
    outputs = (o, stats) if with_stats else o
    if o.numel == 0:
        return plan(outputs)
    # What each query sees all keys of is no limit.
    upper = None if upper is not None and upper >= k.shape[2] - 1 else upper
    lower = None if lower is not None and lower <= 1 - q.shape[2] else lower
    call = Call(q, k, v, mask, seed, upper, lower, softcap, scale, dropout)
    limited = upper is not None or lower is not None
    packed = None if limited or dropout > 0 else _packed(call, o)
    call, view = packed or (call, o)
    return plan(outputs, *_forward_launches(call, view, o, stats if with_stats else None, device))


def _forward_launches(call: Call, view: Spec, o: Spec, stats: Spec | None, device: Device) -> list:
    """view: o as the call's heads have it."""
    q, k, v = call.q, call.k, call.v
    b, h, length, _ = q.shape
    kd, kdv = call.widths
    c = Config.pick("fwd", call.size, kd, kdv, length, device, call.mask is not None)
    columns = c.columns(kdv)
    chunks = kdv // columns
    blocks = ceil_div(length, c.rows(call.size)) * b * h * chunks
    parts = _parts(length, k.shape[2])
    kernel = template("attention").kernel(
        "fwd", T=q.dtype, S=call.score(c.rows(call.size), c.step), kVector=_vectors(q, k, v), kStats=stats is not None or parts > 1,
        kParts=parts > 1, BLOCK_N=c.step, kD=kd, kDv=columns, kWarps=c.warps, kTiles=c.tiles,
    )  # fmt: skip
    n_rows, problem = call.n_rows, call.problem(view)
    to: Any = o
    to_stats: Any = stats
    if parts > 1:
        size = max(call.size, 4)
        to, to_stats = scratch(parts * n_rows * v.shape[3] * size), scratch(parts * 2 * n_rows * size)
    launches = [
        kernel.launch(
            grid=blocks * parts, block=32 * c.warps, smem=c.shared_bytes("fwd", call.size, kd, kdv),
            args=(to, to_stats, q, k, v, call.mask, call.seed, problem, i64(n_rows), i32(chunks), i32(parts)),
        )
    ]  # fmt: skip
    if parts > 1:
        combine = template("attention").kernel("combine", T=q.dtype, kStats=stats is not None)
        args = (o, stats, to, to_stats, problem, i64(n_rows), i32(parts))
        launches.append(combine.launch(grid=ceil_div(n_rows, 4), block=128, args=args))
    return launches


def _packed(call: Call, o: Spec) -> tuple[Call, Spec] | None:
    """Call and output with the heads that share keys as further queries of one head: few queries are little work for a tile, and
    the keys are then read once. None where strides or mask don't allow it."""
    b, _, length, _ = call.q.shape
    heads, group = call.k.shape[1], call.group

    def fold(t: Spec) -> Spec | None:
        if length > 1 and t.strides[1] != length * t.strides[2]:
            return None
        strides = (t.strides[0], group * t.strides[1], t.strides[1] if length == 1 else t.strides[2], t.strides[3])
        return replace(t, shape=(b, heads, group * length, t.shape[3]), strides=strides)

    if group < 2 or group * length > 64:
        return None
    if call.mask is not None and (call.mask_sizes[1] != 1 or (call.mask_sizes[2] != 1 and length > 1)):
        return None  # heads that differ in their mask; a mask of one head's queries
    q, view = fold(call.q), fold(o)
    return None if q is None or view is None else (replace(call, q=q), view)


# Of the keys of one block, where there are many keys and few queries; the same for any batch, so that an entry's bits don't
# depend on its neighbours. 32 heads of 128 on 8 of 8192 keys, batches of 32 and 1: 0.309 and 0.046 ms; with 256 0.331 and 0.049,
# with 1024 0.297 and 0.055. NVIDIA H200, 2026-12-01.
PART_KEYS = 512


def _parts(rows: int, keys: int) -> int:
    """Among how many blocks the keys of a tile of queries are shared out."""
    return max(min(ceil_div(keys, PART_KEYS), 128), 1) if rows <= 64 else 1


# Up to here the backward computes delta from the weights: where few keys share them, the rounding of the output that it is else
# computed from is the largest error of the gradients, by half.
FEW_KEYS = 192


def _require_arch(device: Device) -> Device:
    if device.cc < (8, 0):
        raise DeviceError(f"scaled_dot_product_attention: its kernels need sm_80 or later, this GPU is {device.arch}")
    return device


@planned
def _backward(
    g: Spec, q: Spec, k: Spec, v: Spec, o: Spec, stats: Spec, mask: Spec | None, seed: Spec | None,
    upper: int | None, lower: int | None,
    softcap: float, scale: float, dropout: float, wanted: int, fixed_order: bool,
) -> Any:  # fmt: skip
    """The wanted of dq, dk, dv (bits 0 to 2) and the mask's gradient (bit 3), in parts that are to be summed.

    fixed_order: the same bits every time.
    """
    call = Call(q, k, v, mask, seed, upper, lower, softcap, scale, dropout)
    device = _require_arch(device_of(q))
    if g.shape != o.shape or g.dtype != o.dtype:
        raise RuntimeError(
            f"attention_backward: the gradient is {g.dtype} of {g.shape}, the output {o.dtype} of {o.shape}"
        )
    dq, dk, dv = (_like(t.shape, t) for t in (q, k, v))  # type: ignore[arg-type]
    outputs = [spec for bit, spec in enumerate((dq, dk, dv)) if wanted >> bit & 1]
    size, (kd, kdv), n_rows = call.size, call.widths, call.n_rows
    b, h, length, _ = q.shape
    keys = k.shape[2]
    vector = _vectors(q, k, v, g)
    problem = call.problem(o, g)
    rows = scratch(max(3 * n_rows * max(size, 4), 1))
    k_of = template("attention")
    launches = []
    if n_rows:
        launches.append(
            k_of.kernel("bwd_rows", T=q.dtype, S=call.score(1, 1), kDelta=keys > FEW_KEYS).launch(
                grid=ceil_div(n_rows, 8), block=256, args=(rows, stats, o, g, problem, i64(n_rows))
            )
        )

    def strides(spec: Spec) -> Any:
        return struct(*(i64(s) for s in spec.strides))

    def launch(name: str, c: Config, grid: int, args: tuple, **more: Any) -> None:
        if grid:
            tile = (c.rows(size), c.step)[:: -1 if name == "bwd_dkv" else 1]
            kernel = k_of.kernel(name, T=q.dtype, S=call.score(*tile), **more)
            launches.append(
                kernel.launch(grid=grid, block=32 * c.warps, smem=c.shared_bytes(name, size, kd, kdv), args=args)
            )

    tensors = (rows, q, k, v, g, mask, seed, problem)
    if 0 < keys <= FEW_KEYS:
        c = Config.pick("bwd_dq", size, kd, kdv, length, device)
        launch(
            "bwd_delta", c, ceil_div(length, c.rows(size)) * b * h if q.numel else 0, (*tensors, i64(n_rows)),
            kVector=vector, BLOCK_N=c.step, kD=kd, kDv=kdv, kWarps=c.warps, kTiles=c.tiles,
        )  # fmt: skip
    fused = (
        FusedConfig.pick(kd, kdv, device)
        if wanted & 7 == 7 and size == 2 and not fixed_order and n_rows and keys
        else None
    )
    if fused is not None:
        sums = scratch(n_rows * kd * 4, zeroed=True)
        kernel = k_of.kernel(
            "bwd", T=q.dtype, S=call.score(fused.BLOCK_M, fused.BLOCK_N), kVector=vector, BLOCK_M=fused.BLOCK_M,
            BLOCK_N=fused.BLOCK_N, kD=kd, kDv=kdv, kWarps=fused.warps, kAcross=fused.across, kStages=fused.stages,
        )  # fmt: skip
        launches.append(
            kernel.launch(
                grid=ceil_div(keys, fused.BLOCK_N) * b * k.shape[1], block=32 * fused.warps, smem=fused.shared_bytes(kd, kdv),
                args=(dk, dv, sums, *tensors, strides(dk), strides(dv), i64(n_rows)),
            )
        )  # fmt: skip
        launches.append(
            k_of.kernel("bwd_round", T=q.dtype).launch(
                grid=ceil_div(n_rows, 8), block=256, args=(dq, sums, problem, strides(dq), i64(n_rows), i32(kd))
            )
        )
        wanted &= 8
    if wanted & 0b110:
        c = Config.pick("bwd_dkv", size, kd, kdv, keys, device)
        both = wanted & 0b110 == 0b110 and max(kd, kdv) <= (128 if size == 2 else 64)
        apart = ((True, False),) * (wanted >> 1 & 1) + ((False, True),) * (wanted >> 2 & 1)
        for want_k, want_v in ((True, True),) if both else apart:
            width = kd if want_k else kdv
            columns = c.columns(width)
            chunks = 1 if both else width // columns
            launch(
                "bwd_dkv", c, ceil_div(keys, c.rows(size)) * b * k.shape[1] * chunks,
                (dk if want_k else None, dv if want_v else None, *tensors, strides(dk), strides(dv), i64(n_rows), i32(chunks)),
                kVector=vector, kDK=want_k, kDV=want_v, BLOCK_M=c.step, kD=kd, kDv=kdv,
                kOut=columns, kWarps=c.warps, kTiles=c.tiles,
            )  # fmt: skip
    if wanted & 1:
        c = Config.pick("bwd_dq", size, kd, kdv, length, device)
        columns = c.columns(kd)
        chunks = kd // columns
        launch(
            "bwd_dq", c, ceil_div(length, c.rows(size)) * b * h * chunks if q.numel else 0,
            (dq, *tensors, strides(dq), i64(n_rows), i32(chunks)),
            kVector=vector, BLOCK_N=c.step, kD=kd, kDv=kdv, kOut=columns, kWarps=c.warps, kTiles=c.tiles,
        )  # fmt: skip
    if wanted & 8:
        assert mask is not None
        c = Config.pick("bwd_dmask", size, kd, kdv, length, device)
        sizes = call.mask_sizes
        tiles = (ceil_div(sizes[2], c.rows(size)) * ceil_div(sizes[3], c.step)) * sizes[0] * sizes[1]
        shared_by = (b if sizes[0] == 1 else 1) * (h if sizes[1] == 1 else 1)
        shared_by *= ceil_div(length, c.rows(size)) if sizes[2] == 1 else 1
        # Two blocks a multiprocessor, if there is that much to share out.
        parts = max(min(ceil_div(2 * device.sms, max(tiles, 1)), shared_by), 1)
        out = mask.dtype if parts == 1 else "float64" if size == 8 else "float32"
        whole = (parts, *sizes)
        dmask = Spec(out, whole, tuple(math.prod(whole[i + 1 :]) for i in range(5)), q.device, 16)
        outputs.append(dmask)
        launch(
            "bwd_dmask", c, tiles * parts,
            (dmask, *tensors, struct(*map(i32, sizes)), i32(b), i64(n_rows), i32(parts)),
            Out=out, kVector=vector, BLOCK_N=c.step, kD=kd, kDv=kdv, kWarps=c.warps, kTiles=c.tiles,
        )  # fmt: skip
    return plan(tuple(outputs), *launches)


def _gradients(g, q, k, v, o, stats, mask, seed, scalars, wanted):
    """Of q, k, v and the mask; None where none is wanted."""
    # A hook may have given the statistics other strides, which the kernels don't ask for.
    found = _backward(
        g, q, k, v, o, stats.contiguous(), mask, seed, *scalars, wanted, torch.are_deterministic_algorithms_enabled()
    )
    grads = _spread(as_tuple(found), wanted)
    if grads[3] is not None:
        parts = grads[3]
        grads[3] = (parts[0] if parts.shape[0] == 1 else parts.sum(0)).to(mask.dtype).view(mask.shape)
    return grads


def _wanted(needs, mask):
    """Which of q, k, v and the mask, by the first four of needs_input_grad: bits 0 to 3."""
    return needs[0] | needs[1] << 1 | needs[2] << 2 | (mask is not None and needs[3]) << 3


def _spread(found, wanted):
    """Of q, k, v and the mask what was wanted; None for the others."""
    found = iter(found)
    return [next(found) if wanted >> bit & 1 else None for bit in range(4)]


# --- autograd --------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *more):
        upper, lower, softcap, scale, dropout = ctx.scalars[-5:]
        seed = more[-1] if dropout > 0 else None
        mask = more[0] if len(more) > (seed is not None) else None
        o, stats = _forward(q, k, v, mask, seed, upper, lower, softcap, scale, dropout, True)
        ctx.save_for_backward(q, k, v, o, stats, mask, seed)
        return o

    @staticmethod
    def backward(ctx, g):
        q, k, v, o, stats, mask, seed = ctx.saved_tensors
        scalars = ctx.scalars[-5:]
        wanted = _wanted(ctx.needs_input_grad, mask)
        if torch.is_grad_enabled():
            grads = _differentiable(g, q, k, v, mask, scalars, wanted)
        else:
            grads = _gradients(g, q, k, v, o, stats, mask, seed, scalars, wanted)
        return (*grads[:3], *((grads[3],) if mask is not None else ()), *((None,) if seed is not None else ()))


def _differentiable(g, q, k, v, mask, scalars, wanted):
    """The gradients as torch's own ops make them, which have gradients themselves."""
    if scalars[-1] > 0:
        raise RuntimeError("scaled_dot_product_attention: with dropout it has no second derivative")
    # Each by itself: a key that was computed from the query is no way for the query's gradient here.
    q, k, v, mask = (t.view_as(t) if t is not None else None for t in (q, k, v, mask))
    inputs = [t for bit, t in enumerate((q, k, v, mask)) if wanted >> bit & 1]
    o = _composite(q, k, v, mask, None, *scalars)
    return _spread(torch.autograd.grad(o, inputs, g, create_graph=True), wanted)


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


def _composite(q, k, v, mask, seed, upper, lower, softcap, scale, dropout, gqa=None):
    """torch's own, of plain ops: for what the kernels don't do. gqa: by default whether the heads ask for it."""
    if softcap > 0:
        return _capped(q, k, v, mask, upper, lower, softcap, scale, dropout)
    mask, causal = materialized(q, k, mask, upper, lower)
    if gqa is None:
        # Not the comparison itself, which may be symbolic.
        gqa = True if k.shape[-3] != q.shape[-3] else False  # noqa: SIM210
    with sdpa_kernel(SDPBackend.MATH):
        return _torchs(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)


def _capped(q, k, v, mask, upper, lower, softcap, scale, dropout):
    """The same with a cap, which torch's own has not."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) if t.shape[-3] != q.shape[-3] else t for t in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = softcap * torch.tanh(scale * (q.to(wide) @ k.to(wide).mT) / softcap)
    mask = _within(q, k, mask, upper, lower)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (torch.dropout(weights, dropout, dropout > 0) @ v.to(wide)).to(q.dtype)


# --- torch.ops -------------------------------------------------------------------------------------------------------


def _setup_forward(ctx, inputs, output):
    q, k, v, mask, seed, *ctx.scalars = inputs
    o, stats = output
    ctx.save_for_backward(q, k, v, o, stats, mask, seed)
    ctx.set_materialize_grads(False)


def _library_backward(ctx, g, _):
    if g is None:
        return (None,) * 10
    q, k, v, o, stats, mask, seed = ctx.saved_tensors
    wanted = _wanted(ctx.needs_input_grad, mask)
    found = _backward_op(g, q, k, v, o, stats, mask, seed, *ctx.scalars, wanted)
    return (*_spread(found, wanted), *(None,) * 6)


def _setup_backward(ctx, inputs, output):
    g, q, k, v, _, _, mask, _, *ctx.scalars, ctx.wanted = inputs
    ctx.save_for_backward(g, q, k, v, mask)


def _library_second(ctx, gradients):
    g, q, k, v, mask = ctx.saved_tensors
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (g, q, k, v)]
        mask = mask.detach().requires_grad_() if ctx.wanted & 8 else mask
        dy, dq, dk, dv = inputs
        first = [t for t in _differentiable(dy, dq, dk, dv, mask, ctx.scalars, ctx.wanted) if t is not None]
    sources = [*inputs, *([mask] if ctx.wanted & 8 else [])]
    found = list(torch.autograd.grad(first, sources, gradients, allow_unused=True))
    d_mask = found.pop() if ctx.wanted & 8 else None
    return (*found, None, None, d_mask, *(None,) * 7)


def _empty_like(shape, source):
    b, h, n, d = shape
    if _tokens_first(source.shape, source.stride()):
        return source.new_empty((b, n, h, d)).transpose(1, 2)
    return source.new_empty(shape)


def _fake(q, k, v, mask, seed, upper, lower, softcap, scale, dropout):
    if not q.is_floating_point():
        raise RuntimeError(
            f"scaled_dot_product_attention: Expected query, key, and value of a floating type, but got {q.dtype}"
        )
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_like((*q.shape[:3], v.shape[3]), q), q.new_empty((2, *q.shape[:3]), dtype=acc)


def _fake_backward(g, q, k, v, o, stats, mask, seed, upper, lower, softcap, scale, dropout, wanted):
    found = [_empty_like(t.shape, t) for bit, t in enumerate((q, k, v)) if wanted >> bit & 1]
    return found + ([torch.empty_like(mask, memory_format=torch.contiguous_format)] if wanted >> 3 & 1 else [])


def _run_backward(g, q, k, v, o, stats, mask, seed, upper, lower, softcap, scale, dropout, wanted):
    grads = _gradients(g, q, k, v, o, stats, mask, seed, (upper, lower, softcap, scale, dropout), wanted)
    return [t for t in grads if t is not None]


_forward_op = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, int? upper, int? lower, float softcap, float scale, "
    "float dropout) "
    "-> (Tensor, Tensor)",
    run=lambda *args: _forward(*args, True),
    fake=_fake,
    setup_context=_setup_forward,
    backward=_library_backward,
)
_backward_op = define(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor o, Tensor stats, Tensor? mask, Tensor? seed, int? upper, "
    "int? lower, float softcap, float scale, float dropout, int wanted) -> Tensor[]",
    run=_run_backward,
    fake=_fake_backward,
    setup_context=_setup_backward,
    backward=_library_second,
)


def _autocast(q, k, v, mask, seed, *scalars):
    dtype = torch.get_autocast_dtype(q.device.type)

    def cast(t):
        # torch casts what is floating and not double.
        return t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t

    return *map(cast, (q, k, v, mask)), seed, *scalars


def _public(q, k, v, mask, seed, *limits_and_scalars):
    return _again, (q, k, v, mask, *limits_and_scalars)


def _again(q, k, v, mask, upper, lower, softcap, scale, dropout):
    """The call once more, by what the kernels are told."""
    return _routed(q, k, v, mask, dropout, upper, lower, softcap, scale, True)


_OP = Op(
    "scaled_dot_product_attention",
    _public,
    lambda *args: _forward_op(*args)[0],
    _composite,
    _autocast,
    None,
)
_call = routed(_forward, _Attention, lambda *args: _OP)


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
    return _routed(query, key, value, attn_mask, dropout_p, upper, None, 0.0, scale, enable_gqa)


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


def _routed(query, key, value, mask, dropout, upper, lower, softcap, scale, gqa):
    """To a kernel, or to torch where none is for such tensors."""
    if _is_torchs(query, key, value, mask):
        tensors = isinstance(query, Tensor) and isinstance(key, Tensor)
        mask, causal = materialized(query, key, mask, upper, lower) if tensors else (mask, False)
        return _torchs(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=gqa)
    if query.is_complex():
        raise NotImplementedError(f"scaled_dot_product_attention: not implemented for {query.dtype}")
    if not compiling() and torch._C._is_tracing():
        return _composite(query, key, value, mask, None, upper, lower, softcap, scale, dropout, gqa)
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
        return _general(query, key, value, mask, dropout, upper, lower, softcap, scale, gqa)
    return _attend(query, key, value, mask, dropout, upper, lower, softcap, scale)


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
) -> Tensor:
    """Attention with what torch's signature has no word for: a window of keys, and a cap of the scores.

    Args:
        window: ``(left, right)``: query i of L sees the keys from ``i + S - L - left`` to ``i + S - L + right`` of S. None: no
            limit on that side; ``(n - 1, 0)`` is the causal window of n keys. Tiles of keys outside are not even loaded.
        softcap: If above 0, a scaled score s counts as ``softcap * tanh(s / softcap)``, before the mask is added.
        query, key, value, attn_mask, dropout_p, scale, enable_gqa: As of :func:`scaled_dot_product_attention`; a key counts that
            window and mask both let through.

    Returns:
        As :func:`scaled_dot_product_attention`; a query that sees no key gives 0.

    Raises:
        TypeError: What should be a tensor isn't.
        ValueError: ``softcap`` is negative.
        RuntimeError: Shapes or dtypes that don't go together; ``dropout_p`` outside [0, 1].

    Differentiable. Window and cap as FlashAttention's ``flash_attn_func`` has them, where -1 stands for None.
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"attend(): argument '{name}' must be Tensor, not {type(t).__name__}")
    if softcap < 0:
        raise ValueError(f"attend(): softcap is {softcap}; it must be 0 or above")
    attn_mask, corner = without_bias(query, key, attn_mask, False)
    left, right = window
    diagonal = key.shape[-2] - query.shape[-2]
    if corner is not None:
        right = corner - diagonal if right is None else min(right, corner - diagonal)
    if has_torch_function_variadic(query, key, value, attn_mask):
        given = (query, key, value, attn_mask, dropout_p, softcap, scale)
        return handle_torch_function(attend, given[:4], *given, window=(left, right), enable_gqa=enable_gqa)
    upper = None if right is None else diagonal + right
    lower = None if left is None else diagonal - left
    return _routed(query, key, value, attn_mask, dropout_p, upper, lower, softcap, scale, enable_gqa)


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


def _attend(q, k, v, mask, dropout, upper, lower, softcap, scale):
    """Four dims, of heads that go together."""
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    seed = _draw(q) if dropout > 0 else None
    args = (q, k, v, mask, seed, upper, lower, float(softcap), scale, float(dropout))
    if compiling():
        if torch.is_autocast_enabled(q.device.type):
            args = _autocast(*args)
        return _forward_op(*args)[0]
    return _call(*args)


def _draw(like: Tensor) -> Tensor:
    """A seed from torch's generator, on the device: so that a captured graph draws another one at each replay."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=like.device)


def _general(q, k, v, mask, dropout, upper, lower, softcap, scale, gqa):
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
        return q[..., :0].sum(-1, keepdim=True).expand(*q.shape[:-1], v.shape[-1])
    if 0 in counts or q.shape[-1] == 0 or max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM or v.shape[-1] == 0:
        return _composite(q, k, v, mask, None, upper, lower, softcap, scale, dropout, gqa)
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
    return _attend(four(q), four(k), four(v), mask, dropout, upper, lower, softcap, scale).reshape(shape)


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


def _bench() -> Iterator[BenchCase]:
    """16k tokens and 2048 columns of heads, as FlashAttention's papers have them."""
    for d, causal in itertools.product((64, 128, 256), (False, True)):
        for length in (512, 1024, 2048, 4096, 8192):
            shape = (16384 // length, 2048 // d, length, d)
            size = 2 * math.prod(shape)
            flops = 4 * math.prod(shape) * length // (2 if causal else 1)
            group = f"d{d} {'causal' if causal else 'full'}"
            yield BenchCase(
                label=f"{group} {'x'.join(map(str, shape))} {DTYPE_NAMES[torch.bfloat16]}",
                group=group,
                x=length,
                dtype=torch.bfloat16,
                make=functools.partial(_heads_of, shape),
                forward_bytes=4 * size,
                backward_bytes=8 * size,
                kwargs={"is_causal": causal},
                batch=shape[0],
                grad_of=(0, 1, 2),
                flops=(flops, 5 * flops // 2),
            )


def _heads_of(shape: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))


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
