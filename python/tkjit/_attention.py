"""Attention's plans: which kernels of csrc/templates/attention*.cuh a call runs, with which tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ._device import Device, device_of
from ._errors import DeviceError
from ._plan import Clear, Spec, bool_, f64, i32, i64, plan, planned, scratch, struct, u32
from ._rows import DTYPES, ceil_div
from ._template import CTYPES, Template, template

NAME = "scaled_dot_product_attention"

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
        tiles: Of a warp, 16 rows each; without tensor cores rows of a thread.
        out: Columns of its output that a block computes.
        scalar: Without tensor cores.
    """

    step: int
    warps: int
    tiles: int
    out: int
    scalar: bool = False

    @property
    def rows(self) -> int:
        """That a block keeps: queries, of bwd_dkv keys."""
        return (2 if self.scalar else 16) * self.warps * self.tiles

    def engine(self, ctype: str, tf32: bool) -> str:
        """Of parts/tile.cuh. tf32: float's low bits don't count."""
        split = ", false" if tf32 and not self.scalar else ""
        return f"tile::{'Scalar' if self.scalar else 'Tensor'}<{ctype}, {self.warps}, {self.tiles}{split}>"

    def columns(self, width: int) -> int:
        """Of a width that blocks share: the most up to ``out`` that divide it."""
        return next(n for n in range(min(self.out, width), 0, -16) if width % n == 0)

    def scores(self, kernel: str) -> tuple[int, int]:
        """Queries and keys of a tile of scores."""
        kept, walked = self.rows, self.step
        return (walked, kept) if kernel == "bwd_dkv" else (kept, walked)

    def shared_bytes(self, kernel: str, size: int, kd: int, kdv: int, mask: int = 0) -> int:
        """sizeof of the kernel's Shared, or a little more. ``mask``: bytes of its tile's elements."""
        rows, acc = self.rows, max(size, 4)
        queries, keys = self.scores(kernel)
        tile = functools.partial(_tile_bytes, size=size)
        masked = _tile_bytes(queries, keys, mask) if mask else 16
        if kernel == "fwd":
            return tile(rows + self.step, kd) + tile(self.step, self.columns(kdv)) + masked
        total = tile(rows + self.step, kd) + tile(rows + self.step, kdv) + 3 * queries * acc + 16 + masked
        return total + (rows * (self.step + 1) * acc if kernel == "bwd_dmask" else 0)

    @classmethod
    def pick(cls, kernel: str, size: int, kd: int, kdv: int, rows: int, device: Device, masked: bool = False) -> Config:
        """The first that the device has shared memory for."""
        width = max(kd, kdv)
        tiles = _MASKED_TILES if masked and (kernel, size) == ("fwd", 2) else _TILES[kernel, size]
        for most, *choices in tiles:
            if width > most:
                continue
            for choice in choices:
                c = cls(*choice)
                last = choice == choices[-1]
                # More rows than there are, by half or more, are work for nothing.
                idle = c.rows >= 2 * rows and c.rows > 16
                if c.shared_bytes(kernel, size, kd, kdv) <= device.smem_block and (last or not idle):
                    return c
        raise NotImplementedError(
            f"{NAME}: {device.arch} has too little shared memory for {size}-byte heads of {width}"
        )


@dataclass(frozen=True)
class FusedConfig:
    """The tiles of attention::bwd."""

    BLOCK_M: int  # queries of a step
    BLOCK_N: int  # keys of a block
    warps: int
    across: int  # warps that share rows of dk and dv
    stages: int  # steps whose queries there is room for

    def shared_bytes(self, kd: int, kdv: int, mask: int = 0) -> int:
        """``mask``: bytes of its tile's elements."""
        m, n = self.BLOCK_M, self.BLOCK_N
        tile = functools.partial(_tile_bytes, size=2)
        stage = tile(m, kd) + tile(m, kdv) + 3 * m * 4 + 16 + (_tile_bytes(m, n, mask) if mask else 16)
        return tile(n, kd) + tile(n, kdv) + 2 * tile(n, m) + self.stages * stage

    @classmethod
    def pick(cls, kd: int, kdv: int, device: Device, dmask: bool = False) -> FusedConfig | None:
        """None where the two gradients have no room in registers or shared memory. dmask: there is a third."""
        width = max(kd, kdv)
        # 10.1 ms beside 15.0 at 64 columns: 4096 queries and keys, 16k of each. NVIDIA H200, 2026-12-01.
        for most, *choices in _FUSED[1 if dmask else 0 :]:
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

# (step, warps, tiles, columns of the output, whether without tensor cores) by the kernel, the bytes of an element and the wider
# of the two heads. The first of fwd and bwd_dq for two bytes, and all of _FUSED's first, are the fastest of some five each at
# 16k tokens, 4096 a sequence, causal and not. NVIDIA H200, 2026-12-01. The others are what smaller shared memories hold.
_TILES: dict[tuple[str, int], list[tuple[Any, ...]]] = {
    ("fwd", 2): [
        (64, (128, 4, 2, 64), (64, 4, 1, 64), (32, 1, 1, 64)),
        (128, (64, 4, 2, 128), (64, 4, 1, 128), (32, 1, 1, 128)),
        (256, (64, 4, 1, 256), (32, 4, 1, 256), (32, 1, 1, 256)),
        (512, (32, 4, 1, 256), (32, 2, 1, 256), (16, 1, 1, 256)),
    ],
    ("fwd", 4): [
        (64, (32, 4, 2, 64), (32, 4, 1, 64), (32, 1, 1, 64)),
        (128, (32, 4, 2, 128), (32, 4, 1, 128), (32, 1, 1, 128)),
        (256, (32, 8, 1, 256), (32, 4, 1, 128), (32, 2, 1, 128), (16, 1, 1, 128)),
        (512, (16, 4, 1, 128), (16, 2, 1, 128), (16, 1, 1, 64), (16, 8, 1, 128, True), (16, 4, 1, 64, True)),
    ],
    ("fwd", 8): [
        (128, (32, 8, 2, 128, True), (16, 4, 1, 128, True)),
        (256, (16, 8, 1, 128, True), (16, 4, 1, 64, True)),
        (512, (16, 8, 1, 128, True), (16, 4, 1, 64, True)),
    ],
    ("bwd_dkv", 2): [
        (64, (32, 4, 2, 64), (32, 1, 1, 64)),
        (128, (32, 4, 1, 128), (32, 1, 1, 128)),
        (256, (32, 8, 1, 256), (32, 4, 1, 256), (16, 4, 1, 256), (16, 1, 1, 256)),
        (512, (32, 4, 1, 256), (32, 2, 1, 256), (16, 1, 1, 256)),
    ],
    ("bwd_dkv", 4): [
        (64, (32, 4, 2, 64), (32, 2, 1, 64), (16, 1, 1, 64)),
        (128, (32, 4, 1, 128), (16, 4, 1, 128), (16, 1, 1, 128)),
        (256, (16, 4, 1, 256), (16, 2, 1, 128), (16, 1, 1, 128)),
        (512, (16, 2, 1, 128), (16, 1, 1, 128), (16, 2, 1, 64, True)),
    ],
    ("bwd_dkv", 8): [
        (128, (16, 8, 1, 128, True), (16, 4, 1, 128, True)),
        (256, (16, 8, 1, 128, True), (16, 4, 1, 128, True), (16, 2, 1, 64, True)),
        (512, (16, 4, 1, 128, True), (16, 2, 1, 64, True), (16, 1, 1, 64, True)),
    ],
}
# With masks 2.36 and 2.70 ms (bool, bias) at 64 columns, 1.97 and 2.04 at 128: see above.
_MASKED_TILES: list[tuple[Any, ...]] = [(64, (64, 4, 2, 64), (64, 4, 1, 64), (32, 1, 1, 64)), *_TILES["fwd", 2][1:]]
_TILES |= {(kernel, size): _TILES["bwd_dkv", size] for kernel in ("bwd_dq", "bwd_dmask") for size in (2, 4, 8)}
_TILES["bwd_dq", 2] = [
    (128, (32, 4, 2, 128), (32, 1, 1, 128)),
    (256, (32, 4, 1, 256), (16, 4, 1, 256), (16, 1, 1, 256)),
    *_TILES["bwd_dkv", 2][-1:],
]


# --- a call ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """What every kernel of a call is told: shapes, strides, and which scores count.

    Packed entries, of ``q_starts`` and ``k_starts``, are one batch entry of q, or of k and v, in which they lie one behind the
    other. Pages are k's and v's first dimension.
    """

    q: Spec
    k: Spec
    v: Spec
    mask: Spec | None
    seed: Spec | None
    sinks: Spec | None
    slopes: Spec | None
    q_starts: Spec | None
    k_starts: Spec | None
    k_lens: Spec | None
    pages: Spec | None
    extra: tuple[Spec | None, ...]
    mod: str | None  # of score_mod_text
    upper: int | None  # query i sees the keys up to i + upper; is_varlen: the last query's last key is 0
    lower: int | None  # and from i + lower on
    q_most: int | None  # of an entry's queries and keys, where they are packed
    k_most: int | None
    softcap: float  # 0: none
    scale: float
    dropout: float
    tf32: bool  # float32's products have 11 bits

    @classmethod
    def of(cls, args: Sequence[Any]) -> Call:
        """Of the arguments of _forward."""
        return cls(*args[:11], tuple(args[11:14]), *args[14:23])  # type: ignore[call-arg]

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        if q.dtype not in DTYPES:
            kind = NotImplementedError if q.dtype.startswith(("float", "complex")) else RuntimeError
            raise kind(f"{NAME}: Expected query, key, and value of type {', '.join(DTYPES)}, but got {q.dtype}")
        if not q.dtype == k.dtype == v.dtype:
            raise RuntimeError(
                f"{NAME}: Expected query, key, and value to have the same dtype, but got query.dtype: {q.dtype}, key.dtype: "
                f"{k.dtype}, and value.dtype: {v.dtype} instead."
            )
        shapes = f"query {q.shape}, key {k.shape}, value {v.shape}"
        batches = self.is_varlen or q.shape[0] == k.shape[0]
        if k.shape[:3] != v.shape[:3] or not batches or q.shape[3] != k.shape[3]:
            raise RuntimeError(f"{NAME}: these shapes do not go together: {shapes}")
        if (k.shape[1] == 0) != (q.shape[1] == 0) or (k.shape[1] and q.shape[1] % k.shape[1]):
            raise RuntimeError(f"{NAME}: query has no multiple of key's heads: {shapes}")
        if self.mask is not None:
            if self.mask.dtype not in ("bool", "float32", q.dtype):
                raise RuntimeError(
                    f"{NAME}: Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
                    f"{self.mask.dtype} and  query.dtype: {q.dtype} instead."
                )
            whole = self.scores_shape
            sizes = self.mask.shape
            if len(sizes) > 4 or any(n not in (1, all_) for n, all_ in zip(sizes[::-1], whole[::-1])):
                raise RuntimeError(f"{NAME}: attn_mask of {sizes} does not broadcast to the scores' {whole}")
        self._check_more()

    def _check_more(self) -> None:
        """What torch's signature has no word for."""
        n, heads, acc = self.entries, self.q.shape[1], "float64" if self.size == 8 else "float32"
        wanted = {
            "sinks": (acc, (heads,)), "slopes": ("float32", (n, heads)), "q_starts": ("int32", (n + 1,)),
            "k_starts": ("int32", (n + 1,)), "k_lens": ("int32", (n,)),
            "pages": ("int32", (n, self.pages.shape[-1] if self.pages is not None else 0)),
        }  # fmt: skip
        for name, (dtype, shape) in wanted.items():
            spec: Spec | None = getattr(self, name)
            if spec is not None and (spec.dtype != dtype or spec.shape != shape or not spec.is_contiguous):
                raise RuntimeError(
                    f"attention: {name} must be {dtype} of {shape}, contiguous, but is {spec.dtype} of {spec.shape}"
                )
        if self.k_starts is None and self.pages is None and self.k.shape[0] != n:
            raise RuntimeError(f"attention: {n} entries of queries, but keys of {self.k.shape[0]}")
        if max(self.scores_shape[2:]) >= 2**30:
            raise NotImplementedError(
                f"attention: {self.scores_shape[2]} queries and {self.scores_shape[3]} keys; 2**30 are too many"
            )

    @property
    def is_varlen(self) -> bool:
        return self.q_starts is not None or self.k_starts is not None or self.k_lens is not None

    @property
    def is_plain(self) -> bool:
        """Without what tells heads or queries apart."""
        return self.sinks is None and self.slopes is None and self.mod is None and self.q_starts is None

    @property
    def entries(self) -> int:
        return self.q_starts.shape[0] - 1 if self.q_starts is not None else self.q.shape[0]

    @property
    def keys(self) -> int:
        """All that the tensor has for an entry, or for all if they are packed."""
        return self.pages.shape[1] * self.k.shape[2] if self.pages is not None else self.k.shape[2]

    @property
    def most(self) -> tuple[int, int]:
        """Queries and keys that an entry has at most."""
        q = self.q_most if self.q_most is not None and self.q_starts is not None else self.q.shape[2]
        return q, self.k_most if self.k_most is not None and self.k_starts is not None else self.keys

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        b, h, length, _ = self.q.shape
        return b, h, length, self.keys

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

    def mask_tile(self, rows: int, cols: int) -> int:
        """Bytes of an element, if the mask's tiles of so many queries and keys can be loaded as vectors; else 0."""
        mask = self.mask
        if mask is None or mask.strides[-1] != 1 or mask.shape[-1] == 1 or mask.align < 16 or cols * mask.itemsize % 32:
            return 0
        steps = [self.keys, *(s for n, s in zip(mask.shape[:-1], mask.strides[:-1]) if n > 1)]
        return mask.itemsize if all(s * mask.itemsize % 16 == 0 for s in steps) else 0

    def score(self, rows: int, cols: int, tiles: bool = False) -> str:
        """The scores::Scores of a kernel with tiles of so many queries and keys. tiles: so are the mask's."""
        mask = "scores::None" if self.mask is None else CTYPES[self.mask.dtype]
        pairs = self.mask is not None and (
            self.mask.strides[-1] == 1
            and self.keys % 2 == 0
            and self.mask.shape[-1] > 1
            and self.mask.align >= 2 * self.mask.itemsize
            and all(n <= 1 or s % 2 == 0 for n, s in zip(self.mask.shape[:-1], self.mask.strides[:-1]))
        )
        mods = [
            name
            for name, there in (
                ("scores::Softcap", self.softcap > 0),
                ("scores::Alibi", self.slopes is not None),
                ("scores::User", self.mod is not None),
            )
            if there
        ]
        mod = functools.reduce(lambda a, b: f"scores::Then<{a}, {b}>", mods) if mods else "scores::Plain"
        fold = (
            self.size == 2
            and not mods
            and 0 < self.scale < math.inf
            and (self.mask is None or self.mask.dtype == "bool")
        )
        flags = {
            "kHasPairs": pairs,
            "kHasTiles": tiles,
            "kIsCausal": self.upper is not None,
            "kIsWindow": self.lower is not None,
            "kIsRagged": self.is_varlen or self.q.shape[2] % rows != 0 or self.keys % cols != 0,
            "kHasDropout": self.dropout > 0,
            "kIsFold": fold,
            "kHasSink": self.sinks is not None,
            "kIsVarlen": self.is_varlen,
            "kIsPaged": self.pages is not None,
        }
        named = " | ".join(f"scores::{name}" for name, there in flags.items() if there) or "0"
        return f"scores::Scores<{CTYPES[self.q.dtype]}, {mask}, {mod}, {named}>"

    def template(self, name: str) -> Template:
        """The package's, with the user's change of scores if there is one."""
        if self.mod is None:
            return template(name)
        return _with_mod(name, self.mod, tuple(t.dtype for t in self.extra if t is not None))

    def problem(self, o: Spec | None = None, g: Spec | None = None) -> Any:
        """attention::Problem."""
        own: tuple[int, ...] = (0, 0, 0, 0)
        if self.mask is not None:
            own = tuple(0 if n == 1 else s for n, s in zip(self.mask.shape, self.mask.strides))
            own = (0,) * (4 - len(own)) + own

        def strides(t: Spec | None, packed: Spec | None = None) -> tuple[int, ...]:
            if t is None:
                return (0, 0, 0, 0)
            return t.strides if packed is None else (0, *t.strides[1:])

        q = self.q_starts
        four = (
            strides(self.q, q),
            *(strides(t, self.k_starts) for t in (self.k, self.v)),
            strides(o, q),
            strides(g, q),
            own,
        )
        kept = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
        n_pages, page_len = (self.pages.shape[1], self.k.shape[2]) if self.pages is not None else (0, 1)
        q_most, k_most = self.most
        return struct(
            *(i64(s) for strides in four for s in strides),
            self.mask, self.seed, self.sinks, self.q_starts, self.k_starts, self.k_lens, self.pages, self.slopes, *self.extra,
            f64(self.scale), f64(kept), f64(self.softcap), i32(self.q.shape[1]), i32(self.group), i32(self.q.shape[2]),
            i32(self.keys), i32(self.q.shape[3]), i32(self.v.shape[3]), i32(_limit(self.upper)), i32(_limit(self.lower)),
            i32(self.q.shape[2]), i32(q_most), i32(k_most), i32(n_pages), i32(page_len),
            u32(min(round(self.dropout * 2**32), 2**32 - 1)), i32(0), i32(0),
        )  # fmt: skip


def _limit(bound: int | None) -> int:
    """Lengths are below 2**30, so what lies further away is no other limit; and sums of two stay within 32 bits."""
    return min(max(bound or 0, -(2**30)), 2**30)


_USER = """#include "{name}.cuh"
namespace scores {{

struct User {{
    static constexpr bool kChanges = true;
{functions}
}};

}}  // namespace scores
"""
_FUNCTION = """
    template <class Acc>
    TK_DEVICE static Acc {function}([[maybe_unused]] Acc score, [[maybe_unused]] const At& at)
    {{
        using tk::max;
        using tk::min;
        using tk::tanh;
        [[maybe_unused]] const int batch = at.batch, head = at.head, query = at.query, key = at.key;
        [[maybe_unused]] const int q_len = at.q_len, k_len = at.k_len;
{tensors}
        return Acc(
#line 1 "score_mod"
{expression}
        );
    }}
"""


@functools.cache
def _with_mod(name: str, mod: str, dtypes: tuple[str, ...]) -> Template:
    score, slope, *names = mod.split("\x1f")
    tensors = "".join(
        f"        [[maybe_unused]] const auto* {tensor} = static_cast<const {CTYPES[dtype]}*>(at.extra[{i}]);\n"
        for i, (tensor, dtype) in enumerate(zip(names, dtypes))
    )
    # Without a slope nothing asks for one.
    made = {"score": score, "slope": slope or "1"}
    functions = "".join(
        _FUNCTION.format(function=function, tensors=tensors, expression=expression)
        for function, expression in made.items()
    )
    source = _USER.format(name=name, functions=functions)
    return replace(Template.from_source(source, f"{name} with a score_mod"), namespace=name)


def _vectors(call: Call, *more: Spec) -> bool:
    """Whether every row of the tensors begins on 16 bytes and has whole vectors."""
    return all(
        t.align >= 16
        and (t.strides[3] == 1 or t.shape[3] <= 1)
        and t.shape[3] * t.itemsize % 16 == 0
        and all(n <= 1 or s * t.itemsize % 16 == 0 for n, s in zip(t.shape[:3], t.strides[:3]))
        for t in (call.q, call.k, call.v, *more)
    )


def _like(shape: tuple[int, int, int, int], source: Spec) -> Spec:
    """A new tensor laid out in the source's order: (batch, heads, length, d), or with the lengths before the heads."""
    _, h, n, d = shape
    contiguous = (h * n * d, n * d, d, 1)
    strides = (n * h * d, d, h * d, 1) if tokens_first(source.shape, source.strides) else contiguous
    return Spec(source.dtype, shape, strides, source.device, 16)


def tokens_first(shape: Any, strides: Any) -> bool:
    return shape[1] > 1 and shape[2] > 1 and strides[1] < strides[2]


def _require_arch(device: Device) -> Device:
    if device.cc < (8, 0):
        raise DeviceError(f"{NAME}: its kernels need sm_80 or later, this GPU is {device.arch}")
    return device


# --- forward ---------------------------------------------------------------------------------------------------------


@planned
def forward(*args: Any) -> Any:
    """o; and, if the last argument is True, the rows' maxima and sums, (2, batch, heads, q_len). The others: see Call."""
    call, with_stats = Call.of(args), args[23:] == (True,)
    q, v = call.q, call.v
    device = _require_arch(device_of(q))
    b, h, length, _ = q.shape
    o = _like((b, h, length, v.shape[3]), q)
    acc = "float64" if q.dtype == "float64" else "float32"
    stats = Spec(acc, (2, b, h, length), (b * h * length, h * length, length, 1), q.device, 16)
    outputs = (o, stats) if with_stats else o
    q_most, k_most = call.most
    if o.numel == 0:
        return plan(outputs)
    # What each query sees all keys of is no limit.
    upper, lower = call.upper, call.lower
    if call.is_varlen:
        upper = None if upper is not None and upper >= q_most - 1 else upper
        lower = None if lower is not None and lower <= 1 - k_most else lower
    else:
        upper = None if upper is not None and upper >= k_most - 1 else upper
        lower = None if lower is not None and lower <= 1 - q_most else lower
    call = replace(call, upper=upper, lower=lower)
    limited = upper is not None or lower is not None
    grouped = None if limited or call.dropout > 0 or not call.is_plain else _grouped(call, o)
    call, view = grouped or (call, o)
    kept = stats if with_stats else None
    # Rows between entries, and behind the last.
    clear = [Clear(t) for t in (o, kept) if t is not None] if call.q_starts is not None else []
    return plan(outputs, *clear, *_forward_launches(call, view, o, kept, device))


def _forward_launches(call: Call, view: Spec, o: Spec, stats: Spec | None, device: Device) -> list:
    """view: o as the call's heads have it."""
    q, k, v = call.q, call.k, call.v
    kd, kdv = call.widths
    q_most, k_most = call.most
    c = Config.pick("fwd", call.size, kd, kdv, q_most, device, call.mask is not None)
    columns = c.columns(kdv)
    chunks = kdv // columns
    blocks = ceil_div(q_most, c.rows) * call.entries * q.shape[1] * chunks
    if blocks == 0:
        return []  # no sequence has queries
    parts = _parts(q_most, k_most)
    tile = c.scores("fwd")
    mask = _fitting(call.mask_tile(*tile), functools.partial(c.shared_bytes, "fwd", call.size, kd, kdv), device)
    kernel = call.template("attention").kernel(
        "fwd", T=q.dtype, S=call.score(*tile, mask > 0), kVector=_vectors(call), kStats=stats is not None or parts > 1,
        kParts=parts > 1, BLOCK_N=c.step, kD=kd, kDv=columns, E=c.engine(CTYPES[q.dtype], call.tf32),
    )  # fmt: skip
    n_rows, problem = call.n_rows, call.problem(view)
    to: Any = o
    to_stats: Any = stats
    if parts > 1:
        size, packed = max(call.size, 4), call.q_starts is not None
        to, to_stats = (scratch(parts * n_rows * n * size, zeroed=packed) for n in (v.shape[3], 2))
    launches = [
        kernel.launch(
            grid=blocks * parts, block=32 * c.warps, smem=c.shared_bytes("fwd", call.size, kd, kdv, mask),
            args=(to, to_stats, q, k, v, problem, i64(n_rows), i32(chunks), i32(parts)),
        )
    ]  # fmt: skip
    if parts > 1:
        combine = template("attention").kernel("combine", T=q.dtype, kStats=stats is not None, kWarps=4)
        args = (o, stats, to, to_stats, problem, i64(n_rows), i32(parts))
        launches.append(combine.launch(grid=n_rows, block=128, args=args))
    return launches


def _fitting(mask: int, shared_bytes: Any, device: Device) -> int:
    """The bytes of a mask's element, if there is room for its tile; else 0."""
    return mask if mask and shared_bytes(mask) <= device.smem_block else 0


def _grouped(call: Call, o: Spec) -> tuple[Call, Spec] | None:
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


# --- backward --------------------------------------------------------------------------------------------------------

# Up to here the backward computes delta from the weights: where few keys share them, the rounding of the output that it is else
# computed from is the largest error of the gradients, by half.
FEW_KEYS = 192

DQ, DK, DV, DMASK, DSINKS = 1, 2, 4, 8, 16


class _Backward:
    """The launches of a backward, one after the other."""

    def __init__(self, call: Call, g: Spec, o: Spec, device: Device):
        self.call, self.device = call, device
        self.vector = _vectors(call, g)
        self.problem = call.problem(o, g)
        self.rows = scratch(max(3 * call.n_rows * max(call.size, 4), 1))
        self.tensors = (self.rows, call.q, call.k, call.v, g, self.problem)
        self.template = call.template("attention_backward")
        self.launches: list = []

    def kernel(self, name: str, grid: int, block: int, args: tuple, smem: int = 0, **arguments: Any) -> None:
        if grid:
            kernel = self.template.kernel(name, T=self.call.q.dtype, **arguments)
            self.launches.append(kernel.launch(grid=grid, block=block, smem=smem, args=args))

    def tiled(
        self,
        name: str,
        c: Config,
        grid: int,
        args: tuple,
        kinds: dict[str, object] | None = None,
        columns: int | None = None,
    ) -> None:
        """A kernel with an engine. kinds: template arguments that it has and others don't; columns: of its output, of a block."""
        call = self.call
        tile = c.scores(name)
        shared = functools.partial(c.shared_bytes, name, call.size, *call.widths)
        mask = _fitting(call.mask_tile(*tile), shared, self.device)
        kd, kdv = call.widths
        kinds = kinds or {}
        arguments = {
            **{key: value for key, value in kinds.items() if key == "Out"},
            "kVector": self.vector,
            **{key: value for key, value in kinds.items() if key != "Out"},
            "step": c.step,
            "kD": kd,
            "kDv": kdv,
            **({"kOut": columns} if columns is not None else {}),
            "E": c.engine(CTYPES[call.q.dtype], call.tf32),
        }
        self.kernel(name, grid, 32 * c.warps, args, shared(mask), S=call.score(*tile, mask > 0), **arguments)

    def pick(self, name: str, rows: int) -> Config:
        return Config.pick(name, self.call.size, *self.call.widths, rows, self.device)


@planned
def backward(*args: Any) -> Any:
    """The wanted of dq, dk, dv, the mask's gradient, in float32 where blocks add to it, and the sinks'.

    Arguments: the gradients of the output and of the rows' logarithms of sums, or None; output, maxima and sums; the arguments
    of forward; what is wanted, of DQ to DSINKS; and whether with the same bits every time.
    """
    g, g_lse, o, stats, *rest, wanted, fixed_order = args
    call = Call.of(rest)
    device = _require_arch(device_of(call.q))
    if g.shape != o.shape or g.dtype != o.dtype:
        raise RuntimeError(
            f"attention_backward: the gradient is {g.dtype} of {g.shape}, the output {o.dtype} of {o.shape}"
        )
    if call.pages is not None:
        raise NotImplementedError("attention: there are no gradients through pages of keys")
    if call.mod is not None and not call.mod.split("\x1f")[1]:
        raise RuntimeError("attention: a gradient needs the score_mod's slope")
    q, k, v = call.q, call.k, call.v
    dq, dk, dv = (_like(t.shape, t) for t in (q, k, v))  # type: ignore[arg-type]
    outputs = [spec for bit, spec in enumerate((dq, dk, dv)) if wanted >> bit & 1]
    run = _Backward(call, g, o, device)
    if call.is_varlen:
        run.launches += [Clear(spec) for spec in outputs]
    n_rows, entries, heads = call.n_rows, call.entries, q.shape[1]
    q_most, k_most = call.most
    n_rows_, problem = i64(n_rows), run.problem

    few = k_most <= FEW_KEYS
    run.kernel(
        "bwd_rows", ceil_div(n_rows, 8), 256, (run.rows, stats, o, g, g_lse, problem, n_rows_), S=call.score(1, 1),
        kDelta=not few,
    )  # fmt: skip
    blocks = entries * heads if q.numel else 0
    if few and k_most:
        c = run.pick("bwd_dq", q_most)
        run.tiled("bwd_delta", c, ceil_div(q_most, c.rows) * blocks, (*run.tensors, g_lse, n_rows_))
    if wanted & DSINKS:
        assert call.sinks is not None
        dsinks = Spec(call.sinks.dtype, (heads,), (1,), q.device, 16)
        smem = 8 * max(call.size, 4)
        run.kernel("bwd_sink", heads, 256, (dsinks, stats, run.rows, problem, n_rows_), smem, kWarps=8)
    dmask = None
    if wanted & (DQ | DK | DV) == DQ | DK | DV and call.size == 2 and not fixed_order and n_rows and call.keys:
        dmask, done = _fused(run, dq, dk, dv, wanted)
        wanted &= ~done
    if wanted & (DK | DV):
        _keys(run, dk, dv, wanted)
    if wanted & DQ:
        c = run.pick("bwd_dq", q_most)
        columns = c.columns(call.widths[0])
        chunks = call.widths[0] // columns
        args = (dq, *run.tensors, _strides(dq, call.q_starts), n_rows_, i32(chunks))
        run.tiled("bwd_dq", c, ceil_div(q_most, c.rows) * blocks * chunks, args, columns=columns)
    if wanted & DMASK:
        dmask = _mask_gradient(run)
    outputs += [spec for spec in (dmask, dsinks if wanted & DSINKS else None) if spec is not None]
    return plan(tuple(outputs), *run.launches)


def _strides(spec: Spec | None, packed: Spec | None = None) -> Any:
    if spec is None:
        return struct(*(i64(0),) * 4)
    own = spec.strides[-4:]
    return struct(*(i64(0 if i == 0 and packed is not None else s) for i, s in enumerate(own)))


def _fused(run: _Backward, dq: Spec, dk: Spec, dv: Spec, wanted: int) -> tuple[Spec | None, int]:
    """The three gradients at once, and the mask's where it isn't broadcast over a length: it, and what then is done."""
    call = run.call
    kd, kdv = call.widths
    whole_mask = call.mask is not None and call.mask_sizes[2:] == call.scores_shape[2:]
    c = FusedConfig.pick(kd, kdv, run.device, bool(wanted & DMASK) and whole_mask)
    if c is None:
        return None, 0
    done = DQ | DK | DV
    dmask, shared = None, False
    if wanted & DMASK and call.mask is not None and whole_mask:
        shared = call.mask_sizes[:2] != call.scores_shape[:2]
        sizes = call.mask_sizes
        dmask = Spec("float32" if shared else call.mask.dtype, sizes, _contiguous(sizes), call.q.device, 16)
        if shared or call.is_varlen or call.upper is not None or call.lower is not None:
            run.launches.append(Clear(dmask))
        done |= DMASK
    own = (0, 0, 0, 0)
    if dmask is not None:
        own = tuple(0 if n == 1 else s for n, s in zip(dmask.shape, dmask.strides))  # type: ignore[assignment]
    sums = scratch(call.n_rows * kd * 4, zeroed=True)
    mask = _fitting(call.mask_tile(c.BLOCK_M, c.BLOCK_N), functools.partial(c.shared_bytes, kd, kdv), run.device)
    run.kernel(
        "bwd", ceil_div(call.most[1], c.BLOCK_N) * call.entries * call.k.shape[1], 32 * c.warps,
        (dk, dv, sums, dmask, *run.tensors, _strides(dk, call.k_starts), _strides(dv, call.k_starts), struct(*map(i64, own)),
         i64(call.n_rows)),
        c.shared_bytes(kd, kdv, mask), S=call.score(c.BLOCK_M, c.BLOCK_N, mask > 0),
        Out=dmask.dtype if dmask is not None else "scores::None", kShared=shared, kVector=run.vector, BLOCK_M=c.BLOCK_M,
        BLOCK_N=c.BLOCK_N, kD=kd, kDv=kdv, kWarps=c.warps, kAcross=c.across, kStages=c.stages,
    )  # fmt: skip
    args = (dq, sums, run.problem, _strides(dq, call.q_starts), i64(call.n_rows), i32(kd))
    run.kernel("bwd_round", ceil_div(call.n_rows, 8), 256, args)
    return dmask, done


def _keys(run: _Backward, dk: Spec, dv: Spec, wanted: int) -> None:
    """dk and dv, at once where there are registers for both."""
    call = run.call
    k_most = call.most[1]
    c = run.pick("bwd_dkv", k_most)
    kd, kdv = call.widths
    both = wanted & DK and wanted & DV and max(kd, kdv) <= (64 if call.size == 8 else 128)
    apart = ((True, False),) * bool(wanted & DK) + ((False, True),) * bool(wanted & DV)
    blocks = ceil_div(k_most, c.rows) * call.entries * call.k.shape[1]
    for want_k, want_v in ((True, True),) if both else apart:
        width = kd if want_k else kdv
        columns = c.columns(width)
        chunks = 1 if both else width // columns
        args = (
            dk if want_k else None, dv if want_v else None, *run.tensors, _strides(dk, call.k_starts),
            _strides(dv, call.k_starts), i64(call.n_rows), i32(chunks),
        )  # fmt: skip
        run.tiled("bwd_dkv", c, blocks * chunks, args, {"kDK": want_k, "kDV": want_v}, columns)


def _mask_gradient(run: _Backward) -> Spec:
    """The mask's gradient in a fixed order, the same for each batch entry that has a mask of its own, whatever the batch."""
    call, sms = run.call, run.device.sms
    assert call.mask is not None
    b, h, length, _ = call.scores_shape
    c = run.pick("bwd_dmask", length)
    sizes = call.mask_sizes
    tiles = ceil_div(sizes[2], c.rows) * ceil_div(sizes[3], c.step) * sizes[1]  # of an entry
    shared_by = (b // max(sizes[0], 1)) * (h if sizes[1] == 1 else 1)
    shared_by *= ceil_div(length, c.rows) if sizes[2] == 1 else 1
    # Two blocks a multiprocessor for one entry, if there is that much to share out.
    parts = max(min(ceil_div(2 * sms, max(tiles, 1)), shared_by), 1)
    # Where all entries are as many blocks, one adds up its tile's parts: they may be many times the mask.
    each = parts > 1 and (1 in sizes[2:] or sizes[0] * tiles < 2 * sms)
    dmask = Spec(call.mask.dtype, sizes, _contiguous(sizes), call.q.device, 16)
    acc = "float64" if call.size == 8 else "float32"
    to: Any = scratch(parts * dmask.numel * max(call.size, 4)) if each else dmask
    args = (to, *run.tensors, struct(*map(i32, sizes)), i32(b), i64(call.n_rows), i32(parts), bool_(each))
    blocks = tiles * sizes[0] * (parts if each else 1)
    run.tiled("bwd_dmask", c, blocks, args, {"Out": acc if each else dmask.dtype})
    if each:
        run.kernel(
            "bwd_sum", ceil_div(dmask.numel, 256), 256, (dmask, to, i64(dmask.numel), i32(parts)), Out=dmask.dtype
        )
    return dmask


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
