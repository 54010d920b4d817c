"""softmax and log_softmax along one dimension, with their gradients.

    fwd   y = exp(x - max(x)) / sum(exp(x - max(x)))           log: y = (x - max(x)) - log(sum(exp(x - max(x))))
    bwd   dx = y * (dy - sum(dy * y))                          log: dx = dy - exp(y) * sum(dy)

Four kernels a direction, by what the strides allow (csrc/templates/softmax.cuh): rows held in registers, columns held in
registers, rows too long for that (two passes through scratch), and any strides whatever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._device import Device, device_of
from .._library import define
from .._plan import Spec, canonical, empty, i32, i64, plan, planned, require_dtype, scratch, struct
from .._template import template
from .._torch import Op, compiling, may_write_directly, routed, write_into
from ..testing import inner_bench, op_cases, row_bench, row_inputs

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DTYPES = tuple(ITEMSIZE)
THREADS = 512  # of a block whose row takes all of it


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# ---- layout --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The tensors of a call, all of one shape, with the output first: the reduced dim, and the others collapsed.

    ``dims`` lists (size, stride in each tensor) from the outermost to the innermost; dims that are steps of one stride in
    every tensor are one.
    """

    tensors: tuple[Spec, ...]
    n: int
    strides: tuple[int, ...]
    outer: tuple[tuple[int, tuple[int, ...]], ...]
    inner: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Sequence[Spec], dim: int) -> Layout:
        shape = tuple(tensors[0].shape) or (1,)
        all_strides = [tuple(t.strides) or (1,) for t in tensors]
        dim %= len(shape)

        def collapse(which: range) -> tuple[tuple[int, tuple[int, ...]], ...]:
            dims: list[tuple[int, tuple[int, ...]]] = []
            for d in which:
                size, strides = shape[d], tuple(s[d] for s in all_strides)
                if size == 1:
                    continue
                if dims and dims[-1][1] == tuple(s * size for s in strides):
                    dims[-1] = (dims[-1][0] * size, strides)
                else:
                    dims.append((size, strides))
            return tuple(dims)

        n = shape[dim]
        strides = tuple(1 if n == 1 else s[dim] for s in all_strides)
        return cls(tuple(tensors), n, strides, collapse(range(dim)), collapse(range(dim + 1, len(shape))))

    @property
    def rows(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """All dims but the reduced one."""
        outer, inner = self.outer, self.inner
        if outer and inner and outer[-1][1] == tuple(s * inner[0][0] for s in inner[0][1]):
            outer, inner = outer[:-1], ((outer[-1][0] * inner[0][0], inner[0][1]), *inner[1:])
        return outer + inner

    @property
    def n_rows(self) -> int:
        return _count(self.outer) * _count(self.inner)

    @property
    def unit(self) -> bool:
        """Whether the reduced dim is contiguous in every tensor."""
        return all(s == 1 for s in self.strides)

    @property
    def nbytes(self) -> int:
        return sum(self.n * self.n_rows * t.itemsize for t in self.tensors)

    def aligned(self, vec: int) -> bool:
        """Whether each row of each tensor is whole vectors of ``vec`` elements from 16-byte boundaries on."""
        return self.n % vec == 0 and all(
            t.align >= 16 and all(strides[i] * t.itemsize % 16 == 0 for _, strides in self.rows)
            for i, t in enumerate(self.tensors)
        )

    def extent(self, i: int) -> int:
        """Elements of tensor ``i``'s memory from its first to its last one."""
        return 1 + (self.n - 1) * self.strides[i] + sum((size - 1) * strides[i] for size, strides in self.rows)


def _count(dims: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    n = 1
    for size, _ in dims:
        n *= size
    return n


def _rows_struct(dims: Sequence[tuple[int, tuple[int, ...]]], n_tensors: int) -> tuple[int, list[Any]]:
    """kDims and the fields of row::Rows: few counts of dims, so that few kernels are compiled."""
    count = _power_of_two(max(len(dims), 1))
    padded = [(1, (0,) * n_tensors)] * (count - len(dims)) + list(dims)
    fields = [i64(size) for size, _ in padded]
    fields += [i64(strides[i]) for i in range(n_tensors) for _, strides in padded]
    return count, fields


# ---- rows in registers -----------------------------------------------------------------------------------------------------


# Geometries by count of inputs, size of an element, and the longest row they are for: (columns, team, teams, cluster, blocks
# a multiprocessor). Shorter rows take fewer vectors a thread. Blocks 0: as many blocks as tiles, which end with their rows;
# otherwise persistent blocks that draw their rows. NVIDIA H200, 2026-11-30, 256 MB, the best of ~100 settings a length by
# ratio to the copy of the same bytes. A static deal of the rows in place of the draw costs 2-4 % there: 2048 rows on 62
# clusters are 33.03 each, and 34 for some.
_MEASURED = {
    (1, 2): [
        (2048, 32, 4, 1, 0),  # 0.969
        (4096, 128, 1, 1, 4),  # 0.963
        (8192, 256, 1, 1, 3),  # 0.965
        (16384, 256, 1, 1, 2),  # 0.951
        (32768, 512, 1, 1, 1),  # 0.951; clusters of 4: 0.955
        (65536, 256, 1, 4, 2),  # 0.934
        (131072, 256, 1, 8, 2),  # 0.944
        (262144, 256, 1, 16, 2),  # 0.893; clusters of 8 with 512 threads: 0.880
    ],
    (1, 4): [
        (1024, 64, 4, 1, 0),  # 0.988
        (2048, 128, 2, 1, 0),  # 0.992
        (4096, 256, 1, 1, 0),  # 0.978
        (8192, 256, 1, 1, 2),  # 0.947
        (16384, 512, 1, 1, 1),  # 0.953
        (32768, 256, 1, 4, 2),  # 0.938
        (65536, 256, 1, 8, 2),  # 0.945
        (131072, 512, 1, 8, 1),  # 0.936
        (262144, 512, 1, 8, 1),  # 0.912
    ],
    (2, 2): [
        (2048, 128, 4, 1, 0),  # 0.997
        (4096, 256, 1, 1, 3),  # 1.035
        (8192, 256, 1, 1, 2),  # 1.022
        (16384, 512, 1, 1, 1),  # 1.023
        (32768, 256, 1, 4, 2),  # 1.020
        (65536, 256, 1, 8, 2),  # 1.015
        (131072, 512, 1, 8, 1),  # 1.015
        (262144, 512, 1, 8, 1),  # 0.994
    ],
    (2, 4): [
        (1024, 128, 2, 1, 0),  # 1.049
        (2048, 256, 1, 1, 0),  # 1.036
        (4096, 256, 1, 1, 0),  # 1.034
        (8192, 512, 1, 1, 1),  # 1.015
        (16384, 512, 1, 1, 1),  # 1.018
        (32768, 512, 1, 4, 1),  # 1.012
        (65536, 512, 1, 8, 1),  # 1.011
        (131072, 512, 1, 8, 1),  # 1.005
        (262144, 512, 1, 16, 1),  # 0.985
    ],
}


@dataclass(frozen=True)
class RowConfig:
    """How a row of contiguous elements is held: see row::Geometry in parts/row.cuh.

    A function of the row's length, the types and the alignment alone, so that a row's bits don't depend on the batch.
    """

    vec: int
    team: int
    teams: int
    cluster: int
    vecs: int
    chunk_vecs: int
    blocks_per_sm: int = 0

    @classmethod
    def pick(
        cls, n: int, in_size: int, out_size: int, streams: int, max_cluster: int, aligned: bool
    ) -> RowConfig | None:
        """None if the row is longer than a cluster's registers."""
        vec = (16 if aligned else 8) // min(in_size, out_size)
        unit = 1 if aligned else 2  # vectors to 16 bytes

        def made(team: int, teams: int, cluster: int, vecs: int, blocks: int) -> RowConfig:
            if team == THREADS and vec == 8 and streams == 1 and vecs > 4:
                vecs = 8  # at 5 to 7 ptxas 13.0 spills float16's log_softmax, at 8 it does not
            # A warp's part of a row is one chunk of up to 4 KB (0.94 of the copy at 128k columns, forward, where chunks of
            # 4 vectors gave 0.92), or, when it is more, chunks of 4 vectors.
            chunk = vecs if streams * vecs <= 8 * unit or vecs % (4 * unit) or team < 32 else 4 * unit
            return cls(vec, team, teams, cluster, vecs, chunk, blocks)

        # Short rows: 4 vectors a thread. 0.97-0.99 of the copy at 256 and 1024 columns.
        for team in (1, 2, 4, 8, 16, 32):
            if n <= team * vec * 4 * unit and (in_size == out_size or streams == 1):
                vecs = _ceil_div(n, team * vec)
                return made(team, 256 // team, 1, _power_of_two(vecs) if aligned else vecs, 0)
        if streams == 1 or in_size == out_size:
            for columns, team, teams, cluster, blocks in _MEASURED.get((streams, min(in_size, out_size)), ()):
                if n <= columns and cluster <= max_cluster:
                    return made(team, teams, cluster, _ceil_div(n, team * cluster * vec), blocks)
        # What was not measured by length: 64 registers of a thread for the row.
        most = {(1, 2): 8, (1, 4): 16, (1, 8): 8, (2, 2): 8, (2, 4): 8, (2, 8): 4}[streams, in_size]
        if in_size != out_size:
            most = 8 if streams == 1 else 2
        for team in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            vecs = _ceil_div(n, team * vec)
            if vecs <= min(most, 4) * unit:
                return made(team, 256 // team, 1, vecs if team >= 32 else _power_of_two(vecs), 0)
        for cluster in (1, 2, 4, 8, 16):
            vecs = _ceil_div(n, cluster * THREADS * vec)
            if vecs <= most * unit and cluster <= max_cluster:
                return made(THREADS, 1, cluster, vecs, 1)
        return None

    @property
    def threads(self) -> int:
        return self.team * self.teams

    def shared_bytes(self, value_size: int, ring: bool) -> int:
        """sizeof(row::Shared)."""
        warps = self.threads // 32
        return _ceil_div((warps if ring else 1) * 16 * 8 + 6 * 8 + 2 * warps * self.cluster * value_size, 128) * 128


RING_BYTES = 16 << 20  # of all tensors: below, a kernel is over before a ring pays
DRAW_BYTES = 64 << 20  # from here on, the counter's memset (some 2 us) is less than what an uneven deal costs


@dataclass(frozen=True)
class RingConfig:
    """The ring of chunks that a block reads rows through: see row::Input."""

    stages: int
    slot_bytes: int
    blocks: int  # that live at once; 0: a block ends with its first rows
    draws: bool

    @classmethod
    def pick(cls, cfg: RowConfig, layout: Layout, streams: int, device: Device, aligned: bool) -> RingConfig | None:
        """None where rows are better loaded directly."""
        size = layout.tensors[1].itemsize
        # Bulk copies begin with sm_90; a double's exp costs more than its bytes; a small tensor is over before a ring is
        # full.
        if not device.bulk_copy or size == 8 or layout.nbytes < RING_BYTES:
            return None
        if cfg.team < 32:
            pitch = _ceil_div(layout.n * size + (0 if aligned else 16), 16) * 16
            slot = 32 // cfg.team * pitch
        else:
            slot = 32 * cfg.chunk_vecs * cfg.vec * size
        slot += 0 if aligned else 64
        chunks = cfg.vecs // cfg.chunk_vecs
        if not cfg.blocks_per_sm:
            return cls(chunks, slot, 0, False)
        # Large clusters find no place on the multiprocessors that their GPC has to spare: of 132, 120 take clusters of 4
        # and of 8, 112 clusters of 16. A cluster more than that would start when the others are done.
        sms = device.sms if cfg.cluster <= 2 else device.sms * 10 // 11
        blocks = max(sms // cfg.cluster, 1) * cfg.cluster * cfg.blocks_per_sm
        # All but 16 KB of the shared memory, which the blocks' own slots and barriers need; a drawn row is known one row
        # ahead, so a ring holds a row at most.
        stages = (device.smem_sm - (16 << 10)) // (cfg.blocks_per_sm * cfg.threads // 32 * slot * streams)
        if stages < 1:
            return None
        return cls(min(stages, chunks), slot, blocks, layout.nbytes >= DRAW_BYTES)


@dataclass(frozen=True)
class RowKernel:
    """Everything that a launch of fwd or bwd needs."""

    cfg: RowConfig
    ring: RingConfig | None
    aligned: bool

    @classmethod
    def pick(cls, layout: Layout, device: Device) -> RowKernel | None:
        out, *inputs = layout.tensors
        aligned = layout.aligned(16 // min(inputs[0].itemsize, out.itemsize))
        cfg = RowConfig.pick(layout.n, inputs[0].itemsize, out.itemsize, len(inputs), device.max_cluster, aligned)
        if cfg is None:
            return None
        return cls(cfg, RingConfig.pick(cfg, layout, len(inputs), device, aligned), aligned)

    def params(self, dtype: str, out_dtype: str, log: bool, dims: int) -> dict[str, Any]:
        c = self.cfg
        return dict(
            T=dtype, Out=out_dtype, kLog=log, kTeam=c.team, kTeams=c.teams, kCluster=c.cluster, kVecs=c.vecs,
            kChunkVecs=c.chunk_vecs, kRing=self.ring is not None, kAligned=self.aligned, kHint=0, kDims=dims,
        )  # fmt: skip


def _row_launch(name: str, log: bool, layout: Layout, k: RowKernel, device: Device) -> Any:
    out, *inputs = layout.tensors
    c, ring = k.cfg, k.ring
    dims, fields = _rows_struct(layout.rows, len(layout.tensors))
    value = (8 if name == "fwd" else 4) * (2 if inputs[0].itemsize == 8 else 1)
    smem = c.shared_bytes(value, ring is not None)
    tiles = _ceil_div(layout.n_rows, c.teams)
    if ring is not None:
        smem += c.threads // 32 * ring.stages * len(inputs) * ring.slot_bytes
        if ring.blocks:
            tiles = min(tiles, ring.blocks // c.cluster)
    kernel = template("softmax").kernel(name, **k.params(inputs[0].dtype, out.dtype, log, dims))
    return kernel.launch(
        grid=min(tiles, (2**31 - 1) // c.cluster) * c.cluster,
        block=c.threads,
        cluster=c.cluster,
        smem=smem,
        args=(
            out, *inputs, struct(*fields), i64(layout.n_rows), i32(layout.n),
            *(i64(layout.extent(i + 1)) for i in range(len(inputs))),
            i32(ring.stages if ring else 0), i32(ring.slot_bytes if ring else 0),
            scratch(8, zeroed=True) if ring is not None and ring.draws else None,
        ),
    )  # fmt: skip


# ---- columns in registers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnConfig:
    """A tile of columns: see columns::Geometry in parts/columns.cuh."""

    vec: int
    across: int
    down: int
    rows: int
    loop: bool
    prefetch: bool

    @classmethod
    def pick(cls, layout: Layout, device: Device) -> ColumnConfig | None:
        """None if no dim inside the reduced one is contiguous in every tensor."""
        out, *inputs = layout.tensors
        if not layout.inner or any(s != 1 for s in layout.inner[-1][1]) or layout.inner[-1][0] < 8:
            return None
        size = inputs[0].itemsize
        n_inner = layout.inner[-1][0]
        vec = 16 // max(size, min(size, out.itemsize))

        def fits(v: int) -> bool:
            every = [layout.strides, *(s for _, s in layout.outer), *(s for _, s in layout.inner[:-1])]
            return n_inner % v == 0 and all(
                t.align >= min(v * t.itemsize, 16) and all(s[i] % v == 0 for s in every)
                for i, t in enumerate(layout.tensors)
            )

        if not fits(vec):
            vec = 1  # whole lines all the same; in between there is little to gain, and many kernels to compile
        # Forward: 256 threads with 16 vectors each, most of their 255 registers; 0.82 of the copy for bfloat16 (64, 1024, 512)
        # over dim 1, where 512 threads with 8 vectors gave 0.77. Backward: two tensors are held, so 512 threads with 8.
        # 128 bytes across, or 64 where only that holds the dim. NVIDIA H200, 2026-11-30.
        forward = len(inputs) == 1
        threads = 256 if forward else 512
        most = (
            4 if size == 8 else 16 if forward and size == out.itemsize else 8 if forward or size == out.itemsize else 4
        )
        for width in (128, 64):
            across = min(width // (vec * size), _power_of_two(_ceil_div(n_inner, vec)))
            down = threads // across
            if layout.n <= down * most:
                break
        loop = layout.n > down * most
        down = min(down, max(_power_of_two(_ceil_div(layout.n, most)), _ceil_div(32, across)))
        rows = most if loop else min(_power_of_two(_ceil_div(layout.n, down)), most)
        # A tile ahead pays where the exps of 16-bit elements take as long as their bytes: 0.82 beside 0.62. For 4 bytes,
        # more blocks at once do better: 0.89 beside 0.87, backward 0.95 beside 0.85.
        prefetch = not loop and size == 2 and vec * size >= 4 and rows * across * down >= 4096
        # Finding the next tile among many outer dims takes more registers than there are.
        prefetch = prefetch and device.smem_block >= 160 << 10 and len(layout.outer + layout.inner) <= 3
        return cls(vec, across, down, rows, loop, prefetch)

    def params(self, dtype: str, out_dtype: str, log: bool, dims: int) -> dict[str, Any]:
        return dict(
            T=dtype, Out=out_dtype, kLog=log, kLoop=self.loop, kVec=self.vec, kAcross=self.across, kDown=self.down,
            kRows=self.rows, kPrefetch=self.prefetch, kDims=dims,
        )  # fmt: skip

    def shared_bytes(self, size: int, streams: int) -> int:
        """sizeof(columns::Shared), or a little more."""
        threads, cols = self.across * self.down, self.across * self.vec
        groups = max(threads // max(self.across, 32), 1)
        ahead = streams * self.rows * threads * self.vec * size if self.prefetch else 4 * threads
        return (groups + 2) * cols * max(size, 4) + ahead + 16


def _column_launch(name: str, log: bool, layout: Layout, c: ColumnConfig, device: Device) -> Any:
    out, *inputs = layout.tensors
    n_inner = layout.inner[-1][0]
    dims, fields = _rows_struct(layout.outer + layout.inner[:-1], len(layout.tensors))
    n_across = _ceil_div(n_inner, c.across * c.vec)
    tiles = n_across * _count(layout.outer + layout.inner[:-1])
    fields += [i64(s) for s in layout.strides]
    fields += [i64(layout.n), i64(n_inner), i64(n_across), i64(tiles)]
    kernel = template("softmax").kernel(f"{name}_cols", **c.params(inputs[0].dtype, out.dtype, log, dims))
    return kernel.launch(
        grid=min(tiles, device.sms if c.prefetch else 2**31 - 1),
        block=c.across * c.down,
        smem=c.shared_bytes(inputs[0].itemsize, len(inputs)),
        args=(out, *inputs, struct(*fields)),
    )


# ---- two reads -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpanConfig:
    """Rows that are read twice, in spans of cells, one block each."""

    vec: int
    cells: int  # of a row
    span: int  # cells
    spans: int

    @classmethod
    def pick(cls, layout: Layout) -> SpanConfig:
        vec = 16 // max(t.itemsize for t in layout.tensors) if layout.unit else 1
        while vec > 1 and not (
            layout.n % vec == 0
            and all(
                t.align >= vec * t.itemsize and all(s[i] % vec == 0 for _, s in layout.rows)
                for i, t in enumerate(layout.tensors)
            )
        ):
            vec //= 2
        # Spans of 32k to 64k elements keep 132 multiprocessors busy from 4M elements on; at most 4096 of them, so that
        # combining them stays a small part.
        span = max(32768, _power_of_two(_ceil_div(layout.n, 4096)))
        return cls(vec, layout.n // vec, span // vec, _ceil_div(layout.n, span))


def _span_launches(name: str, log: bool, layout: Layout, c: SpanConfig) -> tuple[Any, Any]:
    out, *inputs = layout.tensors
    dims, fields = _rows_struct(layout.rows, len(layout.tensors))
    value = (8 if name == "fwd" else 4) * (2 if inputs[0].itemsize == 8 else 1)
    partial = scratch(layout.n_rows * c.spans * value)
    sizes = (i64(layout.n_rows), i64(c.cells))
    strides = [i64(c.vec if layout.unit else s) for s in layout.strides]
    spans = (i64(c.span), i32(c.spans))
    common: dict[str, Any] = dict(
        grid=min(layout.n_rows * c.spans, 2**31 - 1), block=THREADS, smem=_any_shared(THREADS, value)
    )
    k = template("softmax")
    types = dict(T=inputs[0].dtype, Out=out.dtype)
    logs = dict(kLog=log) if name == "bwd" else {}
    part = k.kernel(f"{name}_part", **types, **logs, kVec=c.vec, kDims=dims)
    apply = k.kernel(f"{name}_apply", **types, kLog=log, kVec=c.vec, kDims=dims)
    return (
        part.launch(args=(partial, *inputs, struct(*fields), *sizes, *strides[1:], *spans), **common),
        apply.launch(args=(out, *inputs, partial, struct(*fields), *sizes, *strides, *spans), **common),
    )


def _any_shared(threads: int, value: int) -> int:
    """sizeof(row::Shared) of AnyGeometry."""
    return _ceil_div(2 * 16 * 8 + 6 * 8 + 2 * (threads // 32) * value, 128) * 128


def _any_team(n: int) -> int:
    """Threads for a row of any strides: enough for four loads each, a warp or a block for long ones."""
    return 256 if n > 2048 else min(_power_of_two(_ceil_div(n, 4)), 32)


def _any_launch(name: str, log: bool, layout: Layout) -> Any:
    out, *inputs = layout.tensors
    dims, fields = _rows_struct(layout.rows, len(layout.tensors))
    team = _any_team(layout.n)
    value = (8 if name == "fwd" else 4) * (2 if inputs[0].itemsize == 8 else 1)
    kernel = template("softmax").kernel(
        f"{name}_any", T=inputs[0].dtype, Out=out.dtype, kLog=log, kTeam=team, kDims=dims
    )
    return kernel.launch(
        grid=min(_ceil_div(layout.n_rows, 256 // team), 2**31 - 1),
        block=256,
        smem=_any_shared(256, value),
        args=(out, *inputs, struct(*fields), i64(layout.n_rows), i64(layout.n), *(i64(s) for s in layout.strides)),
    )


# ---- planners --------------------------------------------------------------------------------------------------------------------

SHORT = 16  # rows below it are left to the kernels for any strides: there is no vector to speak of
LONG = 1 << 18  # columns from which on a strided row is worth several blocks


def _launches(name: str, log: bool, layout: Layout, device: Device) -> tuple[Any, ...]:
    if layout.unit and layout.n >= SHORT:
        row = RowKernel.pick(layout, device)
        if row is not None:
            return (_row_launch(name, log, layout, row, device),)
        return _span_launches(name, log, layout, SpanConfig.pick(layout))
    columns = ColumnConfig.pick(layout, device)
    if columns is not None:
        return (_column_launch(name, log, layout, columns, device),)
    if layout.n >= LONG:
        return _span_launches(name, log, layout, SpanConfig.pick(layout))
    return (_any_launch(name, log, layout),)


# Element types of the inputs and the output: equal, or as torch's dtype=float32 has it for float16 and bfloat16.
_TYPES = {
    "fwd": [*((t, t) for t in DTYPES), ("float16", "float32"), ("bfloat16", "float32")],
    "bwd": [*((t, t) for t in DTYPES), ("float32", "float16"), ("float32", "bfloat16")],
}


def all_kernels(device: Device, dims: Sequence[int] = (1,)) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kernel and its template arguments that the planners can ask for, with these counts of outer dims."""
    for name, log, d in ((name, log, d) for name in _TYPES for log in (False, True) for d in dims):
        for dtype, out_dtype in _TYPES[name]:
            sizes = ITEMSIZE[dtype], ITEMSIZE[out_dtype]
            streams = 1 if name == "fwd" else 2
            # A config changes where a row outgrows it: at multiples of a vector of a warp, or of small teams.
            lengths = [*range(SHORT, 2048), *range(2048, 16 * THREADS * 64 + 1, 512)]
            for aligned in (False, True):
                configs = (RowConfig.pick(n, *sizes, streams, device.max_cluster, aligned) for n in lengths)
                for cfg in dict.fromkeys(configs):
                    for ringed in (False, True) if device.bulk_copy and sizes[0] < 8 else (False,):
                        if cfg is not None:
                            ring = RingConfig(1, 0, 0, False) if ringed else None
                            yield name, RowKernel(cfg, ring, aligned).params(dtype, out_dtype, log, d)
            for columns in dict.fromkeys(_column_configs(dtype, out_dtype, streams, device)):
                yield f"{name}_cols", columns.params(dtype, out_dtype, log, d)
            types = dict(T=dtype, Out=out_dtype)
            for team in dict.fromkeys(_any_team(n) for n in (1, 5, 9, 17, 33, 65, 2049)):
                yield f"{name}_any", dict(**types, kLog=log, kTeam=team, kDims=d)
            vec = 16 // max(sizes)
            while vec >= 1:
                if name == "bwd" or not log:
                    yield f"{name}_part", dict(**types, **(dict(kLog=log) if name == "bwd" else {}), kVec=vec, kDims=d)
                yield f"{name}_apply", dict(**types, kLog=log, kVec=vec, kDims=d)
                vec //= 2


def _column_configs(dtype: str, out_dtype: str, streams: int, device: Device) -> Iterator[ColumnConfig]:
    for n in (2**k for k in range(15)):
        for n_inner in (8, 9, 16, 17, 32, 33, 64, 65, 128):
            for align in (1, 16):
                tensors = [Spec(t, (n, n_inner), (n_inner, 1), 0, align) for t in (out_dtype, *[dtype] * streams)]
                config = ColumnConfig.pick(Layout.of(tensors, 0), device)
                if config is not None:
                    yield config


@planned
def _forward(x: Spec, dim: int, log: bool, dtype: str | None = None, out: Spec | None = None) -> Any:
    """y (``out``, or new) of ``x``; ``dtype`` is the output's, where it isn't x's: float32 from float16 or bfloat16."""
    dim = canonical(dim, x.ndim)
    require_dtype("log_softmax" if log else "softmax", x.dtype, DTYPES)
    y = empty(x.shape, dtype or x.dtype, x) if out is None else out
    if x.numel == 0:
        return plan(y)
    layout = Layout.of((y, x), dim)
    return plan(y, *_launches("fwd", log, layout, device_of(x)))


@planned
def _backward(dy: Spec, y: Spec, dim: int, log: bool, dtype: str | None = None) -> Any:
    """dx of ``dy`` and ``y``; ``dtype`` is dx's, where it isn't y's."""
    dim = canonical(dim, y.ndim)
    require_dtype("softmax_backward", dy.dtype, DTYPES)
    dx = empty(y.shape, dtype or y.dtype, y)
    if y.numel == 0:
        return plan(dx)
    layout = Layout.of((dx, dy, y), dim)
    return plan(dx, *_launches("bwd", log, layout, device_of(y)))


# --- autograd ----------------------------------------------------------------------------------------------------------


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dim, log, dtype = ctx.scalars
        y = _forward(x, dim, log, dtype)
        ctx.save_for_backward(y)  # not x: y is enough
        if dtype is not None:
            ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dim, log, dtype = ctx.scalars
        return _gradient(dy, y, dim, log, y.dtype if dtype is None else ctx.dtype)


class _SoftmaxBackward(torch.autograd.Function):
    """The gradient as a function of dy and y, so that it has a gradient itself."""

    @staticmethod
    def forward(ctx, dy, y):
        ctx.save_for_backward(dy, y)
        return _backward(dy, y, *ctx.scalars)

    @staticmethod
    def backward(ctx, ddx):
        dy, y = ctx.saved_tensors
        dim, log, _ = ctx.scalars
        return _second(ddx, dy, y, dim, log)


def _second(ddx: Tensor, dy: Tensor, y: Tensor, dim: int, log: bool) -> tuple[Tensor, Tensor]:
    """Gradients of _backward for dy and y, of torch's own ops, which torch can differentiate on."""
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    g, u, v = ddx.to(wide), dy.to(wide), y.to(wide)
    if log:
        p = v.exp()
        to_dy = g - (g * p).sum(dim, keepdim=True)
        to_y = -g * p * u.sum(dim, keepdim=True)
    else:
        to_dy = v * (g - (g * v).sum(dim, keepdim=True))
        to_y = g * (u - (u * v).sum(dim, keepdim=True)) - u * (g * v).sum(dim, keepdim=True)
    return to_dy.to(dy.dtype), to_y.to(y.dtype)


# --- torch.ops ---------------------------------------------------------------------------------------------------------


def _setup_forward(ctx, inputs, output):
    x, ctx.dim, ctx.log, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _library_backward(ctx, dy):
    (y,) = ctx.saved_tensors
    return _backward_op(dy, y, ctx.dim, ctx.log, ctx.dtype), None, None, None


def _setup_backward(ctx, inputs, output):
    dy, y, ctx.dim, ctx.log, _ = inputs
    ctx.save_for_backward(dy, y)


def _library_second(ctx, ddx):
    dy, y = ctx.saved_tensors
    return (*_second(ddx, dy, y, ctx.dim, ctx.log), None, None, None)


def _fake(x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    canonical(dim, x.dim())
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


_forward_op = define(
    "softmax(Tensor x, int dim, bool log, ScalarType? dtype) -> Tensor",
    run=_forward,
    fake=lambda x, dim, log, dtype: _fake(x, dim, dtype),
    setup_context=_setup_forward,
    backward=_library_backward,
)
_backward_op = define(
    "softmax_backward(Tensor dy, Tensor y, int dim, bool log, ScalarType dtype) -> Tensor",
    run=_backward,
    fake=lambda dy, y, dim, log, dtype: _fake(y, dim, dtype),
    setup_context=_setup_backward,
    backward=_library_second,
)


def _to_float32(x, dim, log, dtype):
    """torch's autocast: half in, float out, unless a dtype was asked for or x is double."""
    return x, dim, log, dtype or (torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None)


def _torch_forward(x, dim, log, dtype):
    return (F.log_softmax if log else F.softmax)(x, dim, dtype=dtype)


def _torch_backward(dy, y, dim, log, dtype):
    op = torch.ops.aten._log_softmax_backward_data if log else torch.ops.aten._softmax_backward_data
    return op(dy, y, dim, dtype)


def _public(x, dim, log, dtype):
    return (log_softmax if log else softmax), (x, dim, dtype)


_OPS = tuple(Op(name, _public, _forward_op, _torch_forward, _to_float32) for name in ("softmax", "log_softmax"))
_BACKWARD_OP = Op(
    "softmax_backward", lambda *args: (_backward_op, args), _backward_op, _torch_backward, autocast=lambda *args: args
)

_call = routed(_forward, _Softmax, lambda x, dim, log, dtype: _OPS[log])
_gradient = routed(_backward, _SoftmaxBackward, lambda *args: _BACKWARD_OP)


# --- public ------------------------------------------------------------------------------------------------------------


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Softmax along a dimension: ``y = exp(x - max(x)) / sum(exp(x - max(x)))``.

    Args:
        input: Any shape and strides; float16 and bfloat16 (computed in float32), float32 or float64.
        dim: The dimension whose values sum to 1.
        dtype: If given, the dtype of the result; the input counts as cast to it first. Half to float32 costs no extra pass.
        out: Where to write; of any strides, may be ``input`` itself. Has no gradient.

    Returns:
        A contiguous tensor of the input's shape. A slice that is -inf throughout, or holds a NaN or +inf, is all NaN.

    Raises:
        IndexError: ``dim`` is out of range.
        TypeError: ``input`` isn't a tensor.
        NotImplementedError: ``input`` is integer, bool, complex or float8 and ``dtype`` is not given.
        RuntimeError: ``out`` has another dtype or device, or overlaps itself.
        DeviceError: ``input`` is not on a CUDA device.

    Same as ``torch.softmax``. Forward and backward are one kernel each; the backward keeps the result only.
    """
    if dtype is None and out is None and not compiling():  # the usual call, without another frame
        return _call(input, dim, False, None)
    return _softmax(input, dim, False, dtype, out)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """Logarithm of the softmax along a dimension: ``y = (x - max(x)) - log(sum(exp(x - max(x))))``.

    Exact at large offsets: adding 1e4 to every ``x`` changes no bit that the input's own rounding has not changed.
    Arguments, result and errors are those of :func:`softmax`. Same as ``torch.log_softmax``.
    """
    if dtype is None and out is None and not compiling():
        return _call(input, dim, True, None)
    return _softmax(input, dim, True, dtype, out)


def _softmax(x, dim, log, dtype, out):
    if dtype is not None:
        x, dtype = _cast(x, dtype)
    if out is not None:
        return _into(out, x, dim, log, dtype)
    if compiling():
        if x.is_cuda and torch.is_autocast_enabled("cuda"):
            x, dim, log, dtype = _to_float32(x, dim, log, dtype)
        return _forward_op(x, dim, log, dtype)
    return _call(x, dim, log, dtype)


def _cast(x, dtype):
    """The cast that ``dtype`` asks for, unless the kernel does it on the way."""
    if not isinstance(x, Tensor) or x.dtype == dtype:
        return x, None
    if dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16):
        return x, dtype
    return x.to(dtype), None


def _into(out, x, dim, log, dtype):
    def compute(target):
        if may_write_directly(target, x):
            return _forward(x.detach(), dim, log, dtype, target)
        return _softmax(x.detach(), dim, log, dtype, None)

    return write_into(out, "log_softmax" if log else "softmax", dtype or x.dtype, x, compute)


# --- cases -----------------------------------------------------------------------------------------------------------

CASES = (
    op_cases(
        public=softmax,
        reference=F.softmax,
        inputs=row_inputs(),
        bench=[*row_bench(), *row_bench((4096,), group="offset view", offset=1), *inner_bench((64, 1024, 512), dim=1)],
    ),
    op_cases(
        public=log_softmax,
        reference=F.log_softmax,
        inputs=row_inputs(),
        bench=row_bench((1024, 4096, 32768, 131072)),
    ),
)
