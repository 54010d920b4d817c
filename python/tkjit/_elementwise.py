"""Plans for what is done element by element: an op's text, the dtypes of a call, its layout and its kernel.

csrc/templates/parts/elementwise.cuh says what the kernel's arguments mean.
"""

from __future__ import annotations

import functools
import math
import re
import struct as _struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._plan import Launch, Spec, i64, plan, u32, u64
from ._plan import struct as by_value
from ._rows import ceil_div, power_of_two
from ._template import CTYPES, Template, without_comments

if TYPE_CHECKING:
    from . import _reduction

# elementwise::kThreads. Sums of two tensors of 256 MB at 1.02 of copy_'s rate (torch's 1.03), silu 1.00, gelu of float32 0.99, with
# loads that L1 keeps; with loads that it doesn't 0.98, 0.97, 0.96, and with 512 threads 0.93, 0.96, 0.93. NVIDIA H200, 2026-12-03.
THREADS = 128

# What a declaration may name besides type letters.
_NAMES = {
    "float": "float32", "double": "float64", "int": "int32", "bool": "bool", "f16": "float16", "bf16": "bfloat16", "f32": "float32",
    "f64": "float64", "i8": "int8", "u8": "uint8", "i16": "int16", "i32": "int32", "i64": "int64",
}  # fmt: skip
_DECLARATION = re.compile(r"\s*(\w+)\s+(\w+)\s*")
_DECLARED = re.compile(r"\b(?:const\s+)?(\w+)\s+(\w+)\s*(?==[^=])")
_COPIED = re.compile(r"\b(?:const\s+)?\w+\s+(\w+)\s*=\s*([A-Za-z_]\w*)\s*;")
_IDENTIFIER = re.compile(r"(?<![\w.])(?<!->)(?<!::)[A-Za-z_]\w*(?!\w)(?!\s*(?:\(|::))")
_WORDS = {
    "auto", "bool", "break", "case", "char", "const", "constexpr", "continue", "default", "do", "double", "else", "false", "float",
    "for", "if", "int", "long", "return", "short", "signed", "sizeof", "static", "switch", "true", "unsigned", "void", "while",
    "INFINITY", "NAN", "kFast", "random", "random_bits", "random_halves", *_NAMES,
}  # fmt: skip

# The input behind random numbers: a seed, one int64 on the device, that the call draws. Always the last one.
RANDOM = ("seed", "random_bits")
RANDOM_NAMES = {"random", "random_bits", "random_halves"}


@dataclass(frozen=True)
class Text:
    """An op as its user wrote it.

    Attributes:
        body: CUDA statements that give each output its value.
        inputs: (type, name) of each; a type is a letter, which stands for one dtype, or names a dtype. RANDOM behind them if
            the body names random numbers.
        outputs: The same.
        preamble: Functions that the body calls.
        declares: Whether the body declares the outputs itself.
    """

    name: str
    body: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    preamble: str = ""
    declares: bool = True

    @classmethod
    def of(cls, text: str, inputs: str | None, outputs: str | None, preamble: str, name: str | None) -> Text:
        if not isinstance(text, str) or not text.strip():
            raise TypeError(f"elementwise(): the text must be CUDA statements, not {text!r}")
        body = text if text.rstrip().endswith((";", "}")) else f"{text};"
        made = declared(body)
        if outputs is not None:
            outs = declarations("elementwise", "outputs", outputs)
        elif made:
            outs = (made[-1],)
        else:
            raise ValueError(
                f"elementwise(): nothing is declared in {text!r}; write it as 'T y = ...', or give outputs="
            )
        if inputs is not None:
            ins = declarations("elementwise", "inputs", inputs)
        else:
            ins = named(body, {what for _, what in (*made, *outs)})
        if not ins:
            raise ValueError(f"elementwise(): {text!r} has no input")
        taken = {what for _, what in (*ins, *outs, *made)}
        if drawn := RANDOM_NAMES & {*words_of(body)} - taken:
            if RANDOM_NAMES & taken:
                raise ValueError(
                    "elementwise(): one of random, random_bits and random_halves is a name of the text's own"
                )
            if "random_halves" in drawn and len(drawn) > 1:
                raise ValueError("elementwise(): random_halves goes with neither random nor random_bits")
            ins = (*ins, RANDOM)
        if clash := {what for _, what in ins} & {what for _, what in outs}:
            raise ValueError(f"elementwise(): {', '.join(sorted(clash))} is both an input and an output")
        require_types("elementwise", [pair for pair in ins if pair != RANDOM], outs, {kind for kind, _ in ins})
        declares = {what for _, what in outs} <= {what for _, what in made}
        return cls(name or outs[-1][1], body, ins, outs, preamble, declares)

    @property
    def is_random(self) -> bool:
        return self.inputs[-1] == RANDOM

    @functools.cached_property
    def shares_words(self) -> bool:
        """Whether two elements have a word of random bits together."""
        return self.is_random and "random_halves" in words_of(self.body)

    @functools.cached_property
    def letters(self) -> tuple[str, ...]:
        return tuple(sorted({kind for kind, _ in (*self.inputs, *self.outputs) if is_letter(kind)}))

    @functools.cached_property
    def copies(self) -> dict[str, str]:
        """Outputs that are an input or another output as it is: ``T da = dy;``. Name -> of what."""
        words = words_of(self.body)
        kinds = {what: kind for kind, what in (*self.inputs, *self.outputs)}
        found: dict[str, str] = dict(_COPIED.findall(without_comments(self.body)))
        found = {
            name: of
            for name, of in found.items()
            if name in kinds and kinds[name] == kinds.get(of) and words.count(name) == 1
        }
        inputs = {what for _, what in self.inputs}
        # An output that is assigned to again may not be what it was at the copy.
        names = list(found.values())
        found = {n: of for n, of in found.items() if of in inputs or words.count(of) == 1 + names.count(of)}
        return {n: found[of] if of in found else of for n, of in found.items()}  # noqa: SIM401

    @functools.cached_property
    def template(self) -> Template:
        letters = ", ".join([*(f"class {letter}" for letter in self.letters), "bool kFast_"])
        # Outputs are of the storage's value type, which a letter may be narrower or wider than.
        types = ", ".join(f"class Out{i}" for i in range(len(self.outputs)))
        values = [f"[[maybe_unused]] const {value_of(kind)} {name}" for kind, name in self.inputs]
        mark = "_" if self.declares else ""
        values += [f"Out{i}& {name}{mark}" for i, (_, name) in enumerate(self.outputs)]
        random = (
            "unsigned random_halves = random_bits" if self.shares_words else "float random = tk::below_one(random_bits)"
        )
        random = f"        [[maybe_unused]] const {random};\n" if self.is_random else ""
        stores = "".join(f"        {name}_ = {name};\n" for _, name in self.outputs if self.declares)
        source = f"""#include "parts/elementwise.cuh"
{self.preamble}
namespace elementwise {{

template <{letters}>
struct Op {{
    static constexpr bool kFast = kFast_;

    template <{types}>
    TK_DEVICE static void apply({", ".join(values)})
    {{
{random}#line 1 "{self.name}.elementwise"
{self.body}
#line 1 "{self.name}.source.cuh"
{stores}    }}
}};

}}  // namespace elementwise
"""
        return Template.from_source(source, self.name, {f"{self.name}.elementwise": self.body})


def declared(body: str) -> list[tuple[str, str]]:
    """Type and name of what a text declares with a value."""
    return [(kind, what) for kind, what in _DECLARED.findall(without_comments(body)) if kind not in ("return", "else")]


def named(body: str, known: set[str]) -> tuple[tuple[str, str], ...]:
    """What a text names besides what is known: each a T."""
    found = [word for word in words_of(body) if word not in known | _WORDS and not word.startswith("M_")]
    return tuple(("T", word) for word in dict.fromkeys(found) if not is_letter(word))


def words_of(text: str) -> list[str]:
    """The names of values in a text."""
    return _IDENTIFIER.findall(without_comments(text))


def require_types(
    op: str, inputs: Sequence[tuple[str, str]], more: Sequence[tuple[str, str]], letters: set[str]
) -> None:
    """Every type is known; those letters that are not an input's are among the given ones."""
    for kind, what in (*inputs, *more):
        if not is_letter(kind) and kind not in _NAMES:
            raise ValueError(f"{op}(): {what} is of type {kind!r}; a type is a letter, or one of {', '.join(_NAMES)}")
    for kind, what in more:
        if is_letter(kind) and kind not in letters:
            raise ValueError(f"{op}(): no input has the type {kind} of the output {what}")


def is_letter(kind: str) -> bool:
    return len(kind) == 1 and kind.isupper()


def value_of(kind: str) -> str:
    """A type of the text as the kernel computes with it."""
    if kind == RANDOM[0]:
        return "uint32_t"
    return kind if is_letter(kind) else value_type(_NAMES[kind])


def value_type(dtype: str) -> str:
    return "float" if dtype in ("float16", "bfloat16") else CTYPES[dtype]


def declarations(op: str, what: str, text: str) -> tuple[tuple[str, str], ...]:
    """(type, name) of each."""
    found = []
    for part in text.split(","):
        match = _DECLARATION.fullmatch(part)
        if match is None:
            raise ValueError(f"{op}(): {what} has {part!r}; write 'T x, float alpha'")
        found.append((match[1], match[2]))
    return tuple(found)


# --- dtypes ----------------------------------------------------------------------------------------------------------

_KINDS = {"bool": 0, "uint8": 1, "int8": 1, "int16": 1, "int32": 1, "int64": 1}


def _kind(dtype: str) -> int:
    return _KINDS.get(dtype, 2)


@functools.cache
def _promoted(a: str, b: str) -> str:
    import torch

    return str(torch.promote_types(getattr(torch, a), getattr(torch, b))).removeprefix("torch.")


def result_type(values: Sequence[Any]) -> str:
    """torch.result_type of specs and numbers: a number, and after it a tensor without dims, only counts by its kind."""
    import torch

    found: list[str | None] = [None, None, None]  # with dims, without, numbers
    for value in values:
        if isinstance(value, Spec):
            rank, dtype = (0 if value.ndim else 1), value.dtype
        elif isinstance(value, bool):
            rank, dtype = 2, "bool"
        else:
            default = str(torch.get_default_dtype()).removeprefix("torch.")
            rank, dtype = 2, "int64" if isinstance(value, int) else default
        so_far = found[rank]
        found[rank] = dtype if so_far is None else _promoted(so_far, dtype)
    result = found[0]
    for dtype in filter(None, found):
        if result is None or _kind(dtype) > _kind(result):
            result = dtype
    assert result is not None
    return result


# --- layout ----------------------------------------------------------------------------------------------------------


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that all have room in. Raises what torch raises."""
    ndim = max(map(len, shapes), default=0)
    out = [1] * ndim
    for shape in shapes:
        for i, n in enumerate(shape, ndim - len(shape)):
            if n != 1:
                if out[i] not in (1, n):
                    raise RuntimeError(
                        f"The size of tensor a ({out[i]}) must match the size of tensor b ({n}) at non-singleton dimension {i}"
                    )
                out[i] = n
    return tuple(out)


def expanded(shape: Sequence[int], strides: Sequence[int], to: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor that is broadcast to a shape."""
    new = len(to) - len(shape)
    return (0,) * new + tuple(0 if n == 1 and m != 1 else s for n, s, m in zip(shape, strides, to[new:]))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def output_strides(shape: Sequence[int], tensors: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Strides of a new output: dense, its dims in the order of the (broadcast) inputs', as TensorIterator has it."""

    def before(a: int, b: int) -> int:
        """1: dim a belongs inside dim b. -1: the other way round."""
        for strides in tensors:
            if strides[a] == 0 or strides[b] == 0:
                continue
            if strides[a] != strides[b]:
                return 1 if strides[a] < strides[b] else -1
            if shape[b] > shape[a]:
                return 1
        return 0

    order = list(range(len(shape)))[::-1]  # from the innermost out
    for i in range(1, len(order)):
        at = i
        for j in range(i - 1, -1, -1):
            which = before(order[at], order[j])
            if which > 0:
                order[at], order[j] = order[j], order[at]
                at = j
            elif which < 0:
                break
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def collapsed(
    shape: Sequence[int], all_strides: Sequence[Sequence[int]], by: int = 0
) -> list[tuple[int, tuple[int, ...]]]:
    """(size, stride in each tensor), outermost first by one of them; dims that are one step in all are one."""
    dims = [(n, tuple(s[d] for s in all_strides)) for d, n in enumerate(shape) if n != 1]
    dims.sort(key=lambda dim: dim[1][by], reverse=True)
    found: list[tuple[int, tuple[int, ...]]] = []
    for size, strides in dims:
        if found and found[-1][1] == tuple(s * size for s in strides):
            found[-1] = (found[-1][0] * size, strides)
        else:
            found.append((size, strides))
    return found or [(1, (0,) * len(all_strides))]


def fits(vec: int, size: int, others: Sequence[Sequence[int]], moved: Sequence[tuple[int, Spec]]) -> bool:
    """Whether a contiguous dim is whole vectors that begin at multiples of their size: others has the other dims' strides."""
    return size % vec == 0 and all(
        spec.align >= min(vec * spec.itemsize, 16)
        and all(strides[t] * spec.itemsize % min(vec * spec.itemsize, 16) == 0 for strides in others)
        for t, spec in moved
    )


@dataclass(frozen=True)
class Config:
    """Vectors of a thread and elements of a vector: see elementwise::run."""

    vec: int
    unroll: int
    splat: int  # bit t: tensor t has one element for all of the innermost dim

    @classmethod
    def pick(cls, dims: Sequence[tuple[int, tuple[int, ...]]], tensors: Sequence[Spec]) -> Config:
        size, inner = dims[-1]
        splat = sum(1 << t for t, s in enumerate(inner) if s == 0)
        moved = [(t, spec) for t, spec in enumerate(tensors) if not splat >> t & 1]
        sizes = [spec.itemsize for _, spec in moved] or [1]
        # 16 bytes of the narrowest, but no more than 32 of the widest.
        vec = min(16 // min(sizes), 32 // max(sizes))
        ok = all(inner[t] == 1 for t, _ in moved) and bool(moved) and not splat & 1
        while vec > 1 and not (ok and fits(vec, size, [strides for _, strides in dims[:-1]], moved)):
            vec //= 2
        # One vector of 16 bytes a thread: with 2, 4 and 8 vectors copies of 512 MB had 0.95 to 0.97 of its rate, with vectors of 32
        # bytes 0.77 to 0.97. NVIDIA H200, 2026-12-02.
        # Elements by themselves: not measured.
        return cls(vec, 1 if vec > 1 else 4, splat if vec > 1 else 0)


def launch(
    text: Text, outs: Sequence[Spec], given: Sequence[Any], letters: dict[str, str], shape: Sequence[int]
) -> Launch:
    """The launch that fills the outputs. given: a spec or a number for each input."""
    seed, given = (given[-1], given[:-1]) if text.is_random else (None, given)
    tensors = [*outs, *(value for value in given if isinstance(value, Spec))]
    strides = [expanded(t.shape, t.strides, shape) for t in tensors]
    if seed is not None:
        strides.append(row_major(shape))
    dims = collapsed(shape, strides)
    c = Config.pick(dims, tensors)
    vectors = math.prod(size for size, _ in dims) // c.vec
    n_dims = power_of_two(len(dims))
    padded = [(1, (0,) * len(strides))] * (n_dims - len(dims)) + list(dims)
    sizes = [size for size, _ in padded[:-1]] + [padded[-1][0] // c.vec]
    steps = [[strides[t] for _, strides in padded[:-1]] + [padded[-1][1][t] * c.vec] for t in range(len(strides))]
    wide = vectors >= 2**31
    numbers = numbers_of(text.inputs, given, letters)
    index = i64 if wide else u32
    arguments = by_value(
        *tensors,
        *(() if seed is None else (seed,)),
        *numbers,
        *(i64(s) for strides in steps for s in strides),
        *map(index, sizes),
        index(vectors),
    )
    ins = element_types(text.inputs, given, letters)
    if seed is not None:
        consecutive = dims[-1][1][-1] == 1
        # Words take longer than the bytes of two-byte elements, of which a vector is eight; not longer than those of wider ones.
        shared = text.shares_words and all(letters[letter] in ("float16", "bfloat16") for letter in text.letters)
        ins.append(f"elementwise::Random<{str(consecutive).lower()}, {str(shared).lower()}>")
    fast = all(spec.itemsize == 2 for spec in outs)
    types = [value_type(letters[letter]) for letter in text.letters]
    kernel = text.template.kernel(
        "elementwise::run",
        Op=f"elementwise::Op<{', '.join([*types, 'true' if fast else 'false'])}>",
        Outs=f"elementwise::List<{', '.join(CTYPES[spec.dtype] for spec in outs)}>",
        Ins=f"elementwise::List<{', '.join(ins)}>",
        kVec=c.vec, kUnroll=c.unroll, kDims=n_dims, kSplat=f"{c.splat}u", Index="int64_t" if wide else "uint32_t",
    )  # fmt: skip
    return kernel.launch(grid=ceil_div(vectors, THREADS * c.unroll), block=THREADS, args=(arguments,))


def dtype_of(kind: str, letters: dict[str, str]) -> str:
    return letters[kind] if is_letter(kind) else _NAMES[kind]


Inputs = Sequence[tuple[str, str]]


def element_types(inputs: Inputs, given: Sequence[Any], letters: dict[str, str]) -> list[str]:
    """What the kernel's List of inputs has for each."""
    return [
        CTYPES[value.dtype]
        if isinstance(value, Spec)
        else f"elementwise::Number<{value_type(dtype_of(kind, letters))}>"
        for (kind, _), value in zip(inputs, given)
    ]


def numbers_of(inputs: Inputs, given: Sequence[Any], letters: dict[str, str]) -> list[Any]:
    """The kernel's array of the numbers among the inputs."""
    found = [
        _number(value, dtype_of(kind, letters))
        for (kind, _), value in zip(inputs, given)
        if not isinstance(value, Spec)
    ]
    return found or [u64(0)]


def _number(value: Any, dtype: str) -> Any:
    """8 bytes: of a double where the input is a floating type, else of an integer."""
    if _kind(dtype) == 2:
        return u64(int.from_bytes(_struct.pack("=d", float(value)), "little"))
    if isinstance(value, float):
        raise TypeError(f"elementwise(): {value} is given where {dtype} is asked for")
    return u64(int(value) % 2**64)


def values_of(text: Text, given: Sequence[Any]) -> Sequence[Any]:
    """Without the seed."""
    return given[:-1] if text.is_random else given


def types_of(text: Text | _reduction.Text, given: Sequence[Any]) -> dict[str, str]:
    """The dtype of each letter: what the inputs of that type are promoted to."""
    found: dict[str, str] = {}
    for letter in text.letters:
        values = [value for (kind, _), value in zip(text.inputs, given) if kind == letter]
        found[letter] = result_type(values)
        if found[letter] not in CTYPES:
            raise NotImplementedError(f"{text.name}: there are no kernels for {found[letter]}")
    return found


def output_dtypes(text: Text, letters: dict[str, str]) -> list[str]:
    return [dtype_of(kind, letters) for kind, _ in text.outputs]


def planner_of(text: Text) -> Callable[..., Any]:
    """The planner of an op: of a spec or a number for each input, behind which may follow the outputs to write."""

    def planner(*args: Any) -> Any:
        given, outs = args[: len(text.inputs)], args[len(text.inputs) :]
        specs = [value for value in values_of(text, given) if isinstance(value, Spec)]
        if text.is_random and (given[-1].dtype != "int64" or given[-1].numel != 1):
            raise TypeError(f"{text.name}(): the seed must be a tensor of one int64")
        for spec in (*specs, *outs):
            if spec.dtype not in CTYPES:
                raise NotImplementedError(f"{text.name}: there are no kernels for {spec.dtype}")
        letters = types_of(text, given)
        shape = broadcast([spec.shape for spec in specs])
        if not outs:
            strides = output_strides(shape, [expanded(spec.shape, spec.strides, shape) for spec in specs])
            outs = tuple(Spec(dtype, shape, strides, specs[0].device, 16) for dtype in output_dtypes(text, letters))
        elif any(out.shape != shape for out in outs):
            raise RuntimeError(f"{text.name}: the output is of {outs[0].shape}, the result of {shape}")
        return plan(outs) if 0 in shape else plan(outs, launch(text, outs, given, letters, shape))

    planner.__name__ = text.name
    return planner
