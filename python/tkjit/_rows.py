"""How the kernels on the row skeleton are given their tensors: layouts, and how a row or column is held.

csrc/templates/parts/{row,columns}.cuh say what the numbers mean. Any op that reduces one dimension plans with these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ._device import Device
from ._plan import Arg, Launch, Spec, i32, i64, scratch, struct
from ._template import Instance

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DTYPES = tuple(ITEMSIZE)
THREADS = 512  # of a block whose row takes all of it


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


# --- layout ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The tensors of a call, all of one shape, with the output first: the reduced dim, and the others collapsed.

    ``dims`` lists (size, stride in each tensor) from the outermost to the innermost; dims that are steps of one stride in
    every tensor are one.
    """

    tensors: tuple[Spec, ...]
    dim: int
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
        return cls(tuple(tensors), dim, n, strides, collapse(range(dim)), collapse(range(dim + 1, len(shape))))

    @property
    def rows(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """All dims but the reduced one."""
        outer, inner = self.outer, self.inner
        if outer and inner and outer[-1][1] == tuple(s * inner[0][0] for s in inner[0][1]):
            outer, inner = outer[:-1], ((outer[-1][0] * inner[0][0], inner[0][1]), *inner[1:])
        return outer + inner

    @property
    def n_rows(self) -> int:
        return count(self.outer) * count(self.inner)

    @property
    def unit(self) -> bool:
        """Whether the reduced dim is contiguous in every tensor."""
        return all(s == 1 for s in self.strides)

    @property
    def nbytes(self) -> int:
        return sum(self.n * self.n_rows * t.itemsize for t in self.tensors)

    def aligned(self, vec: int) -> bool:
        """Whether each row of each tensor is whole vectors of ``vec`` elements from 16-byte boundaries on.

        Strides of dims of size 1 count too: a row alone is taken as it would be among others.
        """
        return self.n % vec == 0 and all(
            t.align >= 16 and all(s * t.itemsize % 16 == 0 for d, s in enumerate(t.strides) if d != self.dim)
            for t in self.tensors
        )

    def extent(self, i: int) -> int:
        """Elements of tensor ``i``'s memory from its first to its last one."""
        return 1 + (self.n - 1) * self.strides[i] + sum((size - 1) * strides[i] for size, strides in self.rows)


def count(dims: Sequence[tuple[int, tuple[int, ...]]]) -> int:
    return math.prod(size for size, _ in dims)


def rows_struct(dims: Sequence[tuple[int, tuple[int, ...]]], n_tensors: int) -> tuple[int, list[Any]]:
    """kDims and the fields of row::Rows: few counts of dims, so that few kernels are compiled."""
    n_dims = power_of_two(max(len(dims), 1))
    padded = [(1, (0,) * n_tensors)] * (n_dims - len(dims)) + list(dims)
    fields = [i64(size) for size, _ in padded]
    fields += [i64(strides[i]) for i in range(n_tensors) for _, strides in padded]
    return n_dims, fields


# --- rows in registers -----------------------------------------------------------------------------------------------


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

# The same for rows off 16 bytes, at 781, 1023, 4097 and 50257 columns. What the ratio lacks to 1 at two bytes forward are
# instructions: each element is its own in registers, and every second row of an odd width is read and written by halves.
_MEASURED_UNALIGNED = {
    (1, 2): [
        (2048, 32, 2, 1, 0),  # 0.83
        (4096, 128, 1, 1, 6),  # 0.95
        (16384, 256, 1, 1, 2),
        (51200, 128, 1, 8, 5),  # 0.79; clusters of 4 with 256 threads: 0.74
        (65536, 256, 1, 4, 2),
        *_MEASURED[1, 2][-2:],
    ],
    (1, 4): [
        (1024, 32, 2, 1, 0),  # 0.97
        (8192, 256, 1, 1, 3),  # 0.97
        (16384, 512, 1, 1, 1),
        (65536, 256, 1, 8, 3),  # 0.93
        (131072, 512, 1, 8, 1),
        (262144, 512, 1, 16, 1),
    ],
    (2, 2): [
        (1024, 32, 2, 1, 0),  # 0.92
        (4096, 128, 1, 1, 6),  # 0.99
        (8192, 256, 1, 1, 2),
        (16384, 512, 1, 1, 1),
        (65536, 128, 1, 8, 4),  # 0.88
        *_MEASURED[2, 2][-2:],
    ],
    (2, 4): [
        (1024, 64, 4, 1, 0),  # 0.99
        (4096, 256, 1, 1, 2),  # 1.01
        (51200, 256, 1, 8, 3),  # 0.97
        (65536, 512, 1, 8, 1),
        *_MEASURED[2, 4][-2:],
    ],
}


@dataclass(frozen=True)
class RowConfig:
    """How a row of contiguous elements is held: see row::Geometry in parts/row.cuh.

    A function of the row's length, the types and whether rows are aligned, so that a row's bits don't depend on the batch.
    """

    vec: int
    team: int
    teams: int
    cluster: int
    vecs: int
    chunk_vecs: int
    blocks_per_sm: int = 0
    direct: bool = False  # rows are loaded without a ring, however many

    @classmethod
    def pick(
        cls, n: int, in_size: int, out_size: int, streams: int, max_cluster: int, aligned: bool
    ) -> RowConfig | None:
        """None if the row is longer than a cluster's registers."""
        wide = 16 // min(in_size, out_size)  # elements of a vector of 16 bytes
        vec = wide if aligned else 2 if in_size == out_size == 2 else 1

        def made(team: int, teams: int, cluster: int, blocks: int) -> RowConfig:
            vecs = ceil_div(n, team * cluster * vec)
            if team < 32:
                vecs = power_of_two(vecs)
            if not aligned:
                return cls(vec, team, teams, cluster, vecs, vecs, blocks)
            if team == THREADS and vec == 8 and streams == 1 and vecs > 4:
                vecs = 8  # at 5 to 7 ptxas 13.0 spills float16's log_softmax, at 8 it does not
            return cls(vec, team, teams, cluster, vecs, chunk_of(vecs, streams, team), blocks)

        # Short rows: 64 bytes a thread. 0.97-0.99 of the copy at 256 and 1024 columns. Off alignment 32: element by element
        # they are as many instructions, which take as long to compile.
        for team in (1, 2, 4, 8, 16, 32) if aligned else (1, 2, 4, 8, 16):
            if n <= team * wide * (4 if aligned else 2) and (in_size == out_size or streams == 1):
                return made(team, 256 // team, 1, 0)
        if in_size == out_size or (streams == 1 and aligned):
            measured = _MEASURED if aligned else _MEASURED_UNALIGNED
            for columns, team, teams, cluster, blocks in measured.get((streams, min(in_size, out_size)), ()):
                if n <= columns and cluster <= max_cluster:
                    return made(team, teams, cluster, blocks)
        # What was not measured by length: 64 registers of a thread for the row.
        most = {(1, 2): 8, (1, 4): 16, (1, 8): 8, (2, 2): 8, (2, 4): 8, (2, 8): 4}[streams, in_size]
        if in_size != out_size:
            most = 8 if streams == 1 else 2
        if not aligned:
            wide, most = vec, {(1, 4): 32, (1, 8): 16, (2, 8): 8}.get((streams, max(in_size, out_size)), 24 // streams)
        for team in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            if n <= team * wide * min(most, 4 if aligned else 16):
                return made(team, 256 // team, 1, 0)
        for cluster in (1, 2, 4, 8, 16):
            if n <= cluster * THREADS * wide * most and cluster <= max_cluster:
                return made(THREADS, 1, cluster, 1)
        return None

    @property
    def threads(self) -> int:
        return self.team * self.teams

    def live_blocks(self, device: Device) -> int:
        """As many as live at once."""
        # Large clusters find no place on the multiprocessors that their GPC has to spare: of 132, 120 take clusters of 4
        # and of 8, 112 clusters of 16. A cluster more than that would start when the others are done.
        sms = device.sms if self.cluster <= 2 else device.sms * 10 // 11
        return max(sms // self.cluster, 1) * self.cluster * self.blocks_per_sm


def chunk_of(vecs: int, streams: int, team: int) -> int:
    """Vectors of a chunk. A warp's part of a row is one of up to 4 KB (0.94 of the copy at 128k columns, forward, where chunks of 4
    vectors gave 0.92), or, when it is more, chunks of 4 vectors."""
    return vecs if streams * vecs <= 8 or vecs % 4 or team < 32 else 4


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
    def pick(
        cls,
        cfg: RowConfig,
        layout: Layout,
        streams: int,
        device: Device,
        aligned: bool,
        dealt: bool = False,
        spared: int = 0,
    ) -> RingConfig | None:
        """None where rows are better loaded directly.

        Args:
            dealt: Rows are dealt out in turn, never drawn.
            spared: Bytes of each block's shared memory that are not for its ring.
        """
        size = layout.tensors[1].itemsize
        # Bulk copies begin with sm_90; a double's exp costs more than its bytes; a small tensor is over before a ring is
        # full.
        if cfg.direct or not device.bulk_copy or size == 8 or layout.nbytes < RING_BYTES:
            return None
        if cfg.team < 32:
            pitch = ceil_div(layout.n * size + (0 if aligned else 16), 16) * 16
            slot = 32 // cfg.team * pitch
        else:
            slot = 32 * cfg.chunk_vecs * cfg.vec * size
        slot += 0 if aligned else 64
        chunks = cfg.vecs // cfg.chunk_vecs
        if not cfg.blocks_per_sm:
            return cls(chunks, slot, 0, False)
        blocks = cfg.live_blocks(device)
        # All but 16 KB of the shared memory, which the blocks' own slots and barriers need; a drawn row is known one row
        # ahead, so a ring holds a row at most. Of rows that are dealt out it holds two (not measured).
        room = (device.smem_sm - (16 << 10)) // cfg.blocks_per_sm - spared
        stages = room // (cfg.threads // 32 * slot * streams)
        if stages < 1:
            return None
        if dealt:
            return cls(min(stages, 2 * chunks), slot, blocks, False)
        return cls(min(stages, chunks), slot, blocks, layout.nbytes >= DRAW_BYTES)


@dataclass(frozen=True)
class RowKernel:
    """Everything that a launch of fwd or bwd needs."""

    cfg: RowConfig
    ring: RingConfig | None

    @classmethod
    def pick(cls, layout: Layout, device: Device) -> RowKernel | None:
        out, *inputs = layout.tensors
        sizes = inputs[0].itemsize, out.itemsize
        aligned = layout.aligned(16 // min(sizes))
        cfg = RowConfig.pick(layout.n, *sizes, len(inputs), device.max_cluster, aligned)
        if cfg is None:
            return None
        return cls(cfg, RingConfig.pick(cfg, layout, len(inputs), device, aligned))

    @property
    def draws(self) -> bool:
        """Whether blocks draw their rows: row::Geometry's kDraws, and a counter."""
        return self.ring is not None and self.ring.draws and self.cfg.teams == 1 and self.cfg.threads > 32

    def params(self, dims: int) -> dict[str, Any]:
        """The template arguments that every kernel on the skeleton ends with."""
        c = self.cfg
        # Blocks that live at once are given the registers for it, where finding a row takes few.
        resident = max(c.blocks_per_sm, 1) if self.ring is not None and dims == 1 else 1
        return dict(
            kTeam=c.team, kTeams=c.teams, kCluster=c.cluster, kVecs=c.vecs, kChunkVecs=c.chunk_vecs,
            kRing=self.ring is not None, kVec=c.vec, kResident=resident, kDims=dims,
        )  # fmt: skip

    def launch(
        self,
        kernel: Instance,
        layout: Layout,
        value_bytes: int,
        tensors: Sequence[Arg],
        more: Sequence[Arg] = (),
        spare_extents: int = 0,
        blocks: int = 0,
        rows: Layout | None = None,
        spared: int = 0,
    ) -> Launch:
        """One launch over the rows of ``layout``: its output first, then what is streamed.

        Args:
            value_bytes: Of what a row is reduced to.
            tensors: The kernel's first arguments.
            more: Its last ones.
            spare_extents: Of inputs that the kernel has room for and this call lacks.
            blocks: That live at once and take row after row, where there is no ring to say it.
            rows: The same rows with the tensors besides that have a value for each of them.
            spared: See RingConfig.pick.
        """
        c, ring = self.cfg, self.ring
        _, fields = rows_struct((rows or layout).rows, len((rows or layout).tensors))
        streams = len(layout.tensors) - 1
        smem = shared_bytes(c.threads, value_bytes, c.cluster, ring is not None) + spared
        tiles = ceil_div(layout.n_rows, c.teams)
        if ring is not None:
            smem += c.threads // 32 * ring.stages * streams * ring.slot_bytes
            blocks = ring.blocks
        if blocks:
            tiles = min(tiles, max(blocks // c.cluster, 1))
        return kernel.launch(
            grid=min(tiles, (2**31 - 1) // c.cluster) * c.cluster,
            block=c.threads,
            cluster=c.cluster,
            smem=smem,
            args=(
                *tensors, struct(*fields), i64(layout.n_rows), i32(layout.n),
                *(i64(layout.extent(i + 1)) for i in range(streams)), *[i64(0)] * spare_extents,
                i32(ring.stages if ring else 0), i32(ring.slot_bytes if ring else 0),
                scratch(8, zeroed=True) if ring is not None and ring.draws else None, *more,
            ),
        )  # fmt: skip


# --- columns in registers --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnConfig:
    """A tile of columns: see columns::Geometry in parts/columns.cuh."""

    vec: int
    across: int
    down: int
    rows: int
    loop: bool
    prefetch: bool
    cluster: int = 1
    blocks_per_sm: int = 0  # that live at once and take tile after tile; 0: a block a tile

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
            across = min(width // (vec * size), power_of_two(ceil_div(n_inner, vec)))
            down = threads // across
            if layout.n <= down * most:
                break
        loop = layout.n > down * most
        down = min(down, max(power_of_two(ceil_div(layout.n, most)), ceil_div(32, across)))
        rows = most if loop else min(power_of_two(ceil_div(layout.n, down)), most)
        # A tile ahead pays where the exps of 16-bit elements take as long as their bytes: 0.82 beside 0.62. For 4 bytes,
        # more blocks at once do better: 0.89 beside 0.87, backward 0.95 beside 0.85.
        prefetch = not loop and size == 2 and vec * size >= 4 and rows * across * down >= 4096
        # Finding the next tile among many outer dims takes more registers than there are.
        prefetch = prefetch and device.smem_block >= 160 << 10 and len(layout.outer + layout.inner) <= 3
        return cls(vec, across, down, rows, loop, prefetch, 1, 1 if prefetch else 0)

    def params(self, dtype: str, out_dtype: str, log: bool, dims: int) -> dict[str, Any]:
        return dict(
            T=dtype, Out=out_dtype, kLog=log, kLoop=self.loop, kVec=self.vec, kAcross=self.across, kDown=self.down,
            kRows=self.rows, kCluster=self.cluster, kPrefetch=self.prefetch, kDims=dims,
        )  # fmt: skip

    def shared_bytes(self, size: int, streams: int) -> int:
        """sizeof(columns::Shared), or a little more."""
        cols = self.across * self.vec
        groups = max(self.threads // max(self.across, 32), 1)
        ahead = streams * self.rows * self.threads * self.vec * size if self.prefetch else 4 * self.threads
        return (groups + 2 * self.cluster) * cols * max(size, 4) + ahead + 256

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.across * self.down // self.cluster


# --- two reads -------------------------------------------------------------------------------------------------------


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
        span = max(32768, power_of_two(ceil_div(layout.n, 4096)))
        return cls(vec, layout.n // vec, span // vec, ceil_div(layout.n, span))


def any_team(n: int) -> int:
    """Threads for a row of any strides: enough for four loads each, a warp or a block for long ones."""
    return 256 if n > 2048 else min(power_of_two(ceil_div(n, 4)), 32)


def acc_of(dtype: str) -> str:
    """The dtype of a row's sums and statistics."""
    return "float64" if dtype == "float64" else "float32"


def shared_bytes(threads: int, value_size: int, cluster: int = 1, ring: bool = False) -> int:
    """sizeof(row::Shared): barriers, drawn tiles, and two sets of the values that a reduction exchanges."""
    warps = threads // 32
    return ceil_div((warps if ring else 1) * 16 * 8 + 6 * 8 + 2 * warps * cluster * value_size, 128) * 128
