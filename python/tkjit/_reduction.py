"""Plans for reductions: an op's texts, the dims of a call and who steps along them.

csrc/templates/parts/reduction.cuh says what the kernel's arguments mean. Types, promotion and layouts are _elementwise's.
"""

from __future__ import annotations

import functools
import math
import re
import struct as _struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import _elementwise as ew
from ._plan import Launch, Scratch, Spec, empty, i64, plan, scratch, u32
from ._plan import struct as by_value
from ._rows import ceil_div, power_of_two
from ._template import CTYPES, Template, without_comments

THREADS = 256  # reduction::kThreads
WIDE = 2**31  # places from which their indices have 64 bits

# An input besides the user's own: the element's place among those it is reduced with.
POSITION = ("i64", "index")
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Text:
    """A reduction as its user wrote it.

    Attributes:
        map, combine, identity, finish: Expressions separated by commas, or statements that return: of the accumulators, of
            the outputs in ``finish``.
        inputs: (type, name) of each; the letter ``A`` stands for what sums of the inputs are kept in.
        accumulators: The same; in ``combine`` they are ``a`` and ``b``, or their members if there are several.
        outputs: The same.
        preamble: Functions that the texts call.
        kept: Accumulators that are outputs besides, for the gradient.
    """

    name: str
    map: str
    combine: str
    identity: str | None
    finish: str
    inputs: Pairs
    accumulators: Pairs
    outputs: Pairs
    preamble: str = ""
    kept: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        map: str,
        combine: str,
        identity: str | None,
        finish: str | None,
        inputs: str | None,
        accumulators: str,
        outputs: str | None,
        preamble: str,
        name: str | None,
    ) -> Text:
        for what, text in (("map", map), ("combine", combine), ("identity", identity), ("finish", finish)):
            if not (isinstance(text, str) and text.strip()) and (text is not None or what in ("map", "combine")):
                raise TypeError(f"reduction(): {what} must be CUDA expressions, not {text!r}")
        state = ew.declarations("reduction", "accumulators", accumulators)
        if inputs is not None:
            ins = ew.declarations("reduction", "inputs", inputs)
        else:
            ins = ew.named(map, {what for _, what in ew.declared(map)} | {"index"})
        if not ins:
            raise ValueError(f"reduction(): {map!r} has no input")
        outs = ew.declarations("reduction", "outputs", outputs) if outputs else ((ins[0][0], "y"),)
        if finish is None:
            if len(state) > 1 or len(outs) > 1:
                raise ValueError("reduction(): several accumulators or outputs need finish=")
            finish = state[0][1]
        names = [what for _, what in (*ins, *state, *outs)] + ["index", "count"]
        if twice := sorted({what for what in names if names.count(what) > 1}):
            raise ValueError(
                f"reduction(): {', '.join(twice)} names two things among inputs, accumulators ({accumulators}), outputs, index "
                "and count"
            )
        if any(kind == "A" for kind, _ in ins):
            raise ValueError("reduction(): the type A is the accumulators'; no input has it")
        ew.require_types("reduction", ins, (*state, *outs), {"A", *(kind for kind, _ in ins)})
        return cls(name or "reduction", map, combine, identity, finish, ins, state, outs, preamble)

    @property
    def letters(self) -> tuple[str, ...]:
        """Of the inputs."""
        return tuple(sorted({kind for kind, _ in self.inputs if ew.is_letter(kind)}))

    @functools.cached_property
    def has_position(self) -> bool:
        return "index" in ew.words_of(self.map)

    @functools.cached_property
    def template(self) -> Template:
        own = f"{self.name}.source.cuh"
        texts = {f"{self.name}.{what}": text for what, text in self._texts if text}
        state = [(ew.value_of(kind), what) for kind, what in self.accumulators]
        results = [(ew.value_of(kind), what) for kind, what in self.outputs]

        def function(head: str, made: str, what: str, unpacked: str = "") -> str:
            file = f"{self.name}.{what}"
            text = texts[file]
            bare = without_comments(text)
            if ";" in bare or re.search(r"\breturn\b", bare):
                end = "" if bare.rstrip().endswith((";", "}")) else "\n;"
                body = f'#line 1 "{file}"\n{text}{end}'
            else:  # both lines are the text's first: an error may be told at either
                body = f'#line 1 "{file}"\nreturn {made}(\n#line 1 "{file}"\n{text}\n);'
            return f"""    TK_DEVICE static {made} {head}
    {{
{unpacked}{body}
#line 1 "{own}"
    }}
"""

        def record(name: str, fields: list[tuple[str, str]]) -> str:
            return f"""    struct {name} {{
{"".join(f"        {kind} {what};" + chr(10) for kind, what in fields)}
        {name}() = default;
        TK_DEVICE {name}({", ".join(f"{kind} {what}_" for kind, what in fields)})
            : {", ".join(f"{what}({what}_)" for _, what in fields)} {{}}
    }};
"""

        def members(of: str) -> str:
            return "".join(f"        [[maybe_unused]] const {kind} {what} = {of}.{what};\n" for kind, what in state)

        single = f"        const {state[0][0]} a = a_.{state[0][1]}, b = b_.{state[0][1]};\n" if len(state) == 1 else ""
        mark = "_" if single else ""
        values = [f"[[maybe_unused]] const {ew.value_of(kind)} {what}" for kind, what in self.inputs]
        values += ["[[maybe_unused]] const int64_t index"] if self.has_position else []
        stores = [f"result_.{what}" for _, what in results] + [f"value_.{what}" for what in self.kept]
        head = f'#line 1 "{self.name}.preamble"\n{self.preamble}\n#line 1 "{own}"' if self.preamble else ""
        source = f"""#include "parts/reduction.cuh"
{head}
namespace reduction {{

template <{", ".join(f"class {letter}" for letter in (*self.letters, "A"))}, bool kFast_>
struct Op {{
    static constexpr bool kFast = kFast_, kIdentity = {"true" if self.identity else "false"};

{record("Value", state)}
{record("Result", results)}
{function("identity()", "Value", "identity") if self.identity else ""}
{function(f"map({', '.join(values)})", "Value", "map")}
{function(f"combine(const Value& a{mark}, const Value& b{mark})", "Value", "combine", single)}
{function("finish(const Value& value_, [[maybe_unused]] const int64_t count)", "Result", "finish", members("value_"))}
    template <{", ".join(f"class Out{i}" for i, _ in enumerate(stores))}>
    TK_DEVICE static void apply(
        const Value& value_, const int64_t count_, {", ".join(f"Out{i}& out{i}_" for i, _ in enumerate(stores))})
    {{
        const Result result_ = finish(value_, count_);
{"".join(f"        out{i}_ = {value};" + chr(10) for i, value in enumerate(stores))}    }}
}};

}}  // namespace reduction
"""
        return Template.from_source(source, self.name, texts)

    @property
    def _texts(self) -> tuple[tuple[str, str | None], ...]:
        return (
            ("map", self.map), ("combine", self.combine), ("identity", self.identity), ("finish", self.finish),
            ("preamble", self.preamble),
        )  # fmt: skip


# --- dtypes ----------------------------------------------------------------------------------------------------------


def types_of(text: Text, given: Sequence[Any]) -> dict[str, str]:
    """The dtype of each letter; A: float64 for float64, int64 for whole numbers and bool, else float32."""
    letters = ew.types_of(text, given)
    dtype = ew.result_type(given)
    if dtype not in CTYPES:
        raise NotImplementedError(f"{text.name}: there are no kernels for {dtype}")
    letters["A"] = dtype if dtype == "float64" else "float32" if dtype.startswith(("float", "bfloat")) else "int64"
    return letters


def output_dtypes(text: Text, letters: dict[str, str]) -> list[str]:
    kinds = {what: kind for kind, what in text.accumulators}
    kept = [ew.dtype_of(kinds[what], letters) for what in text.kept]
    return [ew.dtype_of(kind, letters) for kind, _ in text.outputs] + [
        "float32" if dtype in ("float16", "bfloat16") else dtype for dtype in kept
    ]


# As the struct module has what the kernel computes with.
_FORMATS = {
    "float": "f", "double": "d", "signed char": "b", "unsigned char": "B", "short": "h", "int": "i", "long long": "q", "bool": "?",
}  # fmt: skip


def total_bytes(text: Text, letters: dict[str, str]) -> int:
    """sizeof(reduction::Total)."""
    fields = [_FORMATS[ew.value_type(ew.dtype_of(kind, letters))] for kind, _ in text.accumulators]
    end = f"0{max(fields, key=_struct.calcsize)}"  # with the alignment of the widest, as C does
    return _struct.calcsize("@" + "".join(fields) + end + ("" if text.identity else f"?{end}"))


# --- layout ----------------------------------------------------------------------------------------------------------


def reduced_dims(dims: int, ndim: int) -> list[int]:
    """The dims whose bits are set."""
    return [d for d in range(ndim) if dims >> d & 1]


def reduced_shape(shape: Sequence[int], gone: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    return tuple(1 if d in gone else n for d, n in enumerate(shape) if keepdim or d not in gone)


Dims = Sequence[tuple[int, tuple[int, ...]]]  # (size, stride in each tensor)

BLOCKS = 2048  # a launch of fewer splits its cells into spans


@dataclass(frozen=True)
class Config:
    """Who steps along what: see reduction::run. A function of the layout alone, as the order of a sum depends on it."""

    vec: int
    along: bool
    inner: int
    team: int
    unroll: int
    span: int
    spans: int

    @classmethod
    def pick(
        cls, kept: Dims, reduced: Dims, tensors: Sequence[Spec], lead: int, first: int, total_bytes: int
    ) -> Config:
        """tensors: the outputs, then from ``first`` on the inputs; ``lead`` has the most elements."""

        def step(dims: Dims) -> float:
            size, strides = dims[-1]
            return strides[lead] if size > 1 and strides[lead] else math.inf

        along = step(reduced) < step(kept)
        *others, (size, inner) = [*kept, *reduced] if along else [*reduced, *kept]
        moved = [(t, spec) for t, spec in enumerate(tensors) if t >= first and inner[t] != 0]
        sizes = [spec.itemsize for _, spec in moved] or [1]
        vec = min(16 // min(sizes), 32 // max(sizes))
        while not along and vec > 1 and vec * total_bytes > 64:
            vec //= 2
        ok = bool(moved) and all(inner[t] == 1 for t, _ in moved)
        while vec > 1 and not (ok and ew.fits(vec, size, [strides for _, strides in others], moved)):
            vec //= 2
        n, cells = math.prod(m for m, _ in reduced), math.prod(m for m, _ in kept)
        n, cells = (n // vec, cells) if along else (n, cells // vec)
        # 8 loads of a thread on their way, over all inputs.
        return cls.of(vec, along, cells, n, max(8 // power_of_two(max(len(moved), 1)), 1))

    @classmethod
    def of(cls, vec: int, along: bool, cells: int, n: int, unroll: int, most_spans: int = 4096) -> Config:
        inner = 1 if along else min(32, power_of_two(cells))
        # Threads for whole lines along a row, and for the loads that each is to have on their way.
        team = max(power_of_two(ceil_div(n, unroll)), min(power_of_two(n), 8) if along else 1)
        team = min(team, THREADS // inner)
        unroll = min(unroll, power_of_two(ceil_div(n, team)))
        # Not measured yet: fewer blocks than are alive at once, and a few more, leave multiprocessors idle in the end; a
        # block's span is two rounds of loads at least.
        blocks, round_ = ceil_div(cells, THREADS // team), team * unroll
        spans = min(ceil_div(BLOCKS, blocks), max(n // (2 * round_), 1), most_spans)
        span = max(ceil_div(ceil_div(n, spans), round_), 1) * round_
        return cls(vec, along, inner, team, unroll, span, max(ceil_div(n, span), 1))


def launches(
    text: Text,
    outs: Sequence[Spec],
    given: Sequence[Any],
    letters: dict[str, str],
    shape: Sequence[int],
    gone: Sequence[int],
) -> list[Launch]:
    """What fills the outputs. given: a spec or a number for each input."""
    stay = [d for d in range(len(shape)) if d not in gone]
    tensors = [*outs, *(value for value in given if isinstance(value, Spec))]
    results = iter(ew.row_major([shape[d] for d in stay]))
    own = tuple(0 if d in gone else next(results) for d in range(len(shape)))
    strides = [own for _ in outs]
    strides += [ew.expanded(t.shape, t.strides, shape) for t in tensors[len(outs) :]]
    # Dims are in the order of the largest input, or, where it is broadcast, as they are given.
    lead = max(range(len(outs), len(tensors)), key=lambda t: (tensors[t].numel, tensors[t].itemsize))
    ins = ew.element_types(text.inputs, given, letters)
    memory: list[Spec | None] = [*tensors[len(outs) :]]
    if text.has_position:
        places = iter(ew.row_major([shape[d] for d in gone]))
        strides.append(tuple(next(places) if d in gone else 0 for d in range(len(shape))))
        ins.append("reduction::Position")
        memory.append(None)
    kept, reduced = (
        ew.collapsed([shape[d] for d in dims], [[s[d] for d in dims] for s in strides], lead) for dims in (stay, gone)
    )
    size = total_bytes(text, letters)
    c = Config.pick(kept, reduced, tensors, lead, len(outs), size)
    inner = (reduced if c.along else kept)[-1][1]
    splat = sum(1 << t for t in range(len(outs), len(tensors)) if inner[t] == 0) if c.vec > 1 else 0
    numbers = ew.numbers_of(text.inputs, given, letters)
    count = math.prod(n for n, _ in reduced)
    if c.spans == 1:
        return [_launch(text, letters, c, outs, ins, memory, numbers, kept, reduced, count, splat=splat)]
    cells = math.prod(n for n, _ in kept)
    totals = scratch(c.spans * cells * size)
    drop = len(outs)
    kept_ins, reduced_ins = ([(n, s[drop:]) for n, s in dims] for dims in (kept, reduced))
    part = _launch(
        text, letters, c, (), ins, memory, numbers, kept_ins, reduced_ins, count, totals=totals, splat=splat >> drop
    )
    # The totals' columns are the outputs, in the order of the cells.
    columns = [(n, (*s[:drop], at)) for (n, s), at in zip(kept, ew.row_major([n for n, _ in kept]))]
    spans = [(c.spans, (0,) * drop + (cells,))]
    whole = _launch(
        text, letters, Config.of(1, False, cells, c.spans, 8, most_spans=1), outs, ["reduction::Total<{op}>"], [totals],
        ew.numbers_of((), (), {}), columns, spans, count, mapped="reduction::Spans<{op}>",
    )  # fmt: skip
    return [part, whole]


def _launch(
    text: Text,
    letters: dict[str, str],
    c: Config,
    outs: Sequence[Spec],
    ins: Sequence[str],
    memory: Sequence[Spec | Scratch | None],
    numbers: Sequence[Any],
    kept: Dims,
    reduced: Dims,
    count: int,
    totals: Scratch | None = None,
    splat: int = 0,
    mapped: str = "{op}",
) -> Launch:
    """ins: what the kernel's List has for each input; memory: of the tensors among them. Strides are of outs and memory."""
    kept, reduced = (
        _vectors(dims, c.vec if along == c.along else 1) for along, dims in ((False, kept), (True, reduced))
    )
    cells, n = (math.prod(size for size, _ in dims) for dims in (kept, reduced))
    wide = max(cells, n) >= WIDE
    index = i64 if wide else u32
    strides = [strides[t] for dims in (kept, reduced) for t in range(len(kept[0][1])) for _, strides in dims]
    sizes = [*(size for size, _ in (*kept, *reduced)), cells, n, c.span, c.spans]
    arguments = by_value(*outs, *memory, totals, *numbers, *map(i64, strides), i64(count), *map(index, sizes))
    dense = 1 < c.vec <= 32 // max([spec.itemsize for spec in outs], default=32) and not c.along
    types = [ew.value_type(letters[letter]) for letter in (*text.letters, "A")]
    fast = "true" if all(spec.itemsize == 2 for spec in outs) else "false"
    op = f"reduction::Op<{', '.join([*types, fast])}>"
    size = total_bytes(text, letters)
    kernel = text.template.kernel(
        "reduction::run",
        Op=op,
        Map=mapped.format(op=op),
        Outs=f"elementwise::List<{', '.join(CTYPES[spec.dtype] for spec in outs)}>",
        Ins=f"elementwise::List<{', '.join(ins).format(op=op)}>",
        kVec=c.vec, kAlong=c.along, kDense=dense and all(kept[-1][1][t] == c.vec for t in range(len(outs))),
        kInner=c.inner, kTeam=c.team, kUnroll=c.unroll, kKept=len(kept), kReduced=len(reduced), kSplat=f"{splat}u",
        kPart=totals is not None, kBytes=size, Index="int64_t" if wide else "uint32_t",
    )  # fmt: skip
    return kernel.launch(
        grid=min(ceil_div(cells, THREADS // c.team) * c.spans, 2**31 - 1),
        block=THREADS,
        smem=THREADS // 32 * c.inner * (1 if c.along else c.vec) * size,
        args=(arguments,),
    )


def _vectors(dims: Dims, vec: int) -> Dims:
    """The innermost in vectors, and dims of one step before them: so that few kernels are compiled."""
    size, strides = dims[-1]
    n = power_of_two(len(dims))
    return [(1, (0,) * len(strides))] * (n - len(dims)) + [*dims[:-1], (size // vec, tuple(s * vec for s in strides))]


def planner_of(text: Text) -> Callable[..., Any]:
    """The planner of an op: of a spec or a number for each input, the reduced dims as bits, and keepdim."""

    def planner(*args: Any) -> Any:
        *given, dims, keepdim = args
        specs = [value for value in given if isinstance(value, Spec)]
        for spec in specs:
            if spec.dtype not in CTYPES:
                raise NotImplementedError(f"{text.name}: there are no kernels for {spec.dtype}")
        letters = types_of(text, given)
        shape = ew.broadcast([spec.shape for spec in specs])
        gone = reduced_dims(dims, len(shape))
        made = reduced_shape(shape, gone, keepdim)
        outs = tuple(empty(made, dtype, specs[0]) for dtype in output_dtypes(text, letters))
        if 0 in made:
            return plan(outs)
        if 0 in shape and text.identity is None:
            raise IndexError(f"{text.name}(): cannot reduce a dimension of size 0 without an identity, shape {shape}")
        return plan(outs, *launches(text, outs, given, letters, shape, gone))

    planner.__name__ = text.name
    return planner
