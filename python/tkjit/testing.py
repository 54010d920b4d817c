"""What an op brings for its tests and benchmarks, and the tools to judge it.

An op's file ends with ``CASES = op_cases(...)`` (or a tuple of them). The contract test, the benchmark harness and the
plots find it there through :func:`all_cases`; no list names the ops. What is timed only, such as a model's layer around an
op, is ``TIMED``.

The second half is for any kernel's tests, a user's own too: the rule of closeness (:func:`assert_close`), inputs with
NaN on both sides (:func:`fenced`), recycled memory full of NaN (:func:`poison`), and the layouts that a tensor may come
in (:func:`as_layout`).

Needs torch; touches neither CUDA nor tkjit's compiled core until a case is made.
"""

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DTYPE_NAMES",
    "FLOOR",
    "LAYOUTS",
    "ROW_VALUES",
    "BenchCase",
    "Closeness",
    "OpCases",
    "Sample",
    "all_cases",
    "all_timed",
    "as_layout",
    "as_tuple",
    "assert_close",
    "closeness",
    "error",
    "fence_intact",
    "fenced",
    "in_float64",
    "inner_bench",
    "op_cases",
    "poison",
    "row_bench",
    "row_inputs",
    "row_values",
]

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}

# --- What an op brings -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One small call for the contract test: ``public(*args, **kwargs)``; the reference takes the same."""

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchCase:
    """One call to time.

    ``group`` gathers the cases that belong on one line of a plot; ``x`` is this one's place on the axis.
    ``make(device)`` returns fresh random arguments. The bytes are what the call must move at least, each input read
    once and each output written once; they are what GB/s counts. ``batch`` is the size of dimension 0 where each slice
    along it is independent of the others, so that a check may look at some of them; None means check everything.
    ``grad_of`` lists the arguments that the backward differentiates; without any there is no backward. ``flops`` of
    forward and backward: where it is they that bound the call, and TFLOP/s that count.
    """

    label: str
    group: str
    x: float
    dtype: torch.dtype
    make: Callable[[str], tuple[Any, ...]]
    forward_bytes: int
    backward_bytes: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    grad_of: tuple[int, ...] = (0,)
    flops: tuple[int, int] | None = None


@dataclass(frozen=True)
class OpCases:
    """An op as its tests and benchmarks see it; made by :func:`op_cases`."""

    name: str
    public: Callable[..., Any]
    reference: Callable[..., Any]
    peers_key: str
    inputs: Callable[[str, torch.dtype], Iterable[Sample]]
    bench: tuple[BenchCase, ...]
    dtypes: tuple[torch.dtype, ...]
    slack: tuple[float, float] = (1.0, 1.0)
    dim: int | None = None
    random: bool = False

    def samples(self, device: str, dtype: torch.dtype) -> list[Sample]:
        """Small calls on ``device``; the first is the one whose host time the harness measures."""
        return list(self.inputs(device, dtype))


def op_cases(
    *,
    public: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Callable[[str, torch.dtype], Iterable[Sample]],
    bench: Iterable[BenchCase] = (),
    name: str | None = None,
    peers_key: str | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    slack: tuple[float, float] = (1.0, 1.0),
    dim: int | None = None,
    random: bool = False,
) -> OpCases:
    """Describe an op.

    Args:
        public: The function that users call.
        reference: torch's function of the same arguments; called in float64 it gives the values that count.
        inputs: ``(device, dtype) -> samples`` for the contract test; see :func:`row_inputs`.
        bench: What to time; see :func:`row_bench`. Labels are unique.
        name: The op's name; by default ``public``'s.
        peers_key: Under which name ``benchmarks/peers.py`` lists this op's peers; by default ``name``. torch,
            torch.compile and the copy are peers of every op without being listed.
        dtypes: What the op accepts.
        slack: How many times what the rule of closeness allows the error of an output, and of a gradient, may be: more than 1
            where it is summed from terms that were rounded, or is the difference of larger ones.
        dim: By the size of which neighbours the benchmarks measure an entry's error, where entries differ in size: see
            :func:`error`.
        random: The bench cases draw random numbers, so that nothing can be held against the reference's result there.
    """
    called = name or public.__name__
    cases = tuple(bench)
    seen: set[str] = set()
    for case in cases:
        if case.label in seen:
            raise ValueError(f"op {called!r}: two bench cases are labelled {case.label!r}")
        seen.add(case.label)
    return OpCases(called, public, reference, peers_key or called, inputs, cases, tuple(dtypes), slack, dim, random)


def all_cases() -> dict[str, OpCases]:
    """The cases of every module of ``tkjit.ops``, by the op's name. A module without ``CASES`` brings none."""
    return _brought("CASES")


def all_timed() -> dict[str, OpCases]:
    """What the benchmarks time: :func:`all_cases`, and the modules' ``TIMED``, which are no ops that keep the contract."""
    return _brought("CASES", "TIMED")


def _brought(*attributes: str) -> dict[str, OpCases]:
    package = importlib.import_module("tkjit.ops")
    found: dict[str, OpCases] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"tkjit.ops.{info.name}")
        for cases in (getattr(module, attribute, ()) for attribute in attributes):
            for op in (cases,) if isinstance(cases, OpCases) else cases:
                if op.name in found:
                    raise ValueError(f"two ops are named {op.name!r}; the second is in tkjit.ops.{info.name}")
                found[op.name] = op
    return found


def as_tuple(value: Any) -> tuple[Any, ...]:
    """``value`` if it is a tuple, its items if it is a list, else a tuple of it alone."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


# --- Rows: the inputs of ops that reduce along one dimension ---------------------------------------------------------

#: Kinds of row that :func:`row_values` makes.
ROW_VALUES = ("random", "huge range", "offset", "constant", "minus inf")


def row_values(kind: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Values that have broken row reductions: drawn from torch's global generator.

    ``random``: normal. ``huge range``: signs and magnitudes from 1e-3 to 1e30 (1e4 in float16). ``offset``: normal
    around 1e4. ``constant``: all alike. ``minus inf``: half the entries are -inf, those with index 0 along the last
    dimension are not.
    """
    x = torch.randn(tuple(shape), device=device, dtype=torch.float32).to(torch.float64)
    if kind == "huge range":
        top = 4.0 if dtype == torch.float16 else 30.0
        x = x.sign() * 10.0 ** (torch.rand_like(x) * (top + 3.0) - 3.0)
    elif kind == "offset":
        x = x + 1e4
    elif kind == "constant":
        x = torch.full_like(x, 3.0)
    elif kind == "minus inf":
        drop = torch.rand_like(x) < 0.5
        if drop.ndim and drop.shape[-1]:
            drop[..., 0] = False
        x = x.masked_fill(drop, -math.inf)
    elif kind != "random":
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(ROW_VALUES)}")
    return x.to(dtype)


def row_inputs() -> Callable[[str, torch.dtype], Iterator[Sample]]:
    """Samples for ops called as ``f(x, dim)``: any number of dimensions, widths on and off the vector, hard values."""
    shapes = (
        ("small", (4, 8), -1),
        ("odd width", (3, 37), -1),
        ("first dim", (6, 4), 0),
        ("inner dim", (2, 5, 7), 1),
        ("4-D", (2, 3, 4, 5), -2),
        ("one row", (1000,), 0),
        ("one column", (5, 1), -1),
        ("wide", (2, 5000), -1),
        ("0-D", (), -1),
        ("no rows", (0, 8), -1),
        ("no columns", (4, 0), -1),
    )

    def samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
        for label, shape, dim in shapes:
            yield Sample(label, (row_values("random", shape, dtype, device), dim))
        for kind in ROW_VALUES[1:]:
            yield Sample(kind, (row_values(kind, (4, 50), dtype, device), -1))

    return samples


#: Widths to time: short rows, widths off the vector (781, 1023, 50257), and powers of two until no block holds a row.
ROW_WIDTHS = (256, 781, 1023, 1024, 2048, 4096, 8192, 16384, 32768, 50257, 65536, 131072, 262144)

#: Input data of a case. Far beyond any L2, and enough that a launch's start and end don't count.
ROW_BYTES = 512 * 10**6


def row_bench(
    widths: Sequence[int] = ROW_WIDTHS,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    *,
    group: str = "last dim",
    data: int = ROW_BYTES,
    offset: int = 0,
    forward_passes: int = 2,
    backward_passes: int = 3,
    arguments: Callable[[Tensor], tuple[Any, ...]] | None = None,
    grad_of: tuple[int, ...] = (0,),
) -> list[BenchCase]:
    """Cases ``f(x, -1)``, or ``f(*arguments(x))``, over ``data`` bytes of rows of each width.

    ``offset`` starts the tensor that many elements past an aligned address. Passes count how often bytes of x's size
    must move: forward reads x and writes y (2), backward reads dy and one saved tensor and writes dx (3).
    """
    cases = [
        _row_case(
            (max(1, data // (width * dtype.itemsize)), width), -1, dtype, group, offset, forward_passes, backward_passes
        )
        for dtype in dtypes
        for width in widths
    ]
    if arguments is None:
        return cases

    def make(case: BenchCase) -> Callable[[str], tuple[Any, ...]]:
        return lambda device: arguments(case.make(device)[0])

    return [replace(case, make=make(case), grad_of=grad_of) for case in cases]


def inner_bench(
    shape: Sequence[int],
    dim: int,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    *,
    group: str = "inner dim",
    forward_passes: int = 2,
    backward_passes: int = 3,
) -> list[BenchCase]:
    """Cases ``f(x, dim)`` where ``dim`` is neither first nor last: neighbours along it aren't neighbours in memory."""
    if not 0 < dim < len(shape) - 1:
        raise ValueError(f"dim is {dim}; an inner dimension of {tuple(shape)} lies between 0 and {len(shape) - 1}")
    return [_row_case(tuple(shape), dim, dtype, group, 0, forward_passes, backward_passes) for dtype in dtypes]


def _row_case(
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    group: str,
    offset: int,
    forward_passes: int,
    backward_passes: int,
) -> BenchCase:
    numel = math.prod(shape)

    def make(device: str) -> tuple[Any, ...]:
        return torch.randn(numel + offset, device=device, dtype=dtype)[offset:].view(shape), dim

    return BenchCase(
        label=f"{group} {'x'.join(map(str, shape))} {DTYPE_NAMES[dtype]}",
        group=group,
        x=shape[dim],
        dtype=dtype,
        make=make,
        forward_bytes=forward_passes * numel * dtype.itemsize,
        backward_bytes=backward_passes * numel * dtype.itemsize,
        batch=shape[0],
    )


# --- The rule of closeness -------------------------------------------------------------------------------------------

#: Errors below this are never held against a kernel: about 2 roundings of the 16-bit types, about 16 of float32, whose sums
#: round as well, and about 90 of float64, where what it is held to sums thousands of terms in float64 too.
FLOOR: Mapping[torch.dtype, float] = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}

#: How much worse than torch's own result, at the same dtype, a result may be.
FUDGE = 2.0


@dataclass(frozen=True)
class Closeness:
    """A verdict: ``error`` against float64, the ``bound`` it was held to, torch's own error (NaN: none was given)."""

    error: float
    bound: float
    torch_error: float
    where: tuple[int, ...]
    got: float
    want: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    def __str__(self) -> str:
        at = f"at {self.where}: {self.got:.9g}, should be {self.want:.9g}"
        held = f"{'<=' if self.ok else '>'} {self.bound:.3g} (torch's own: {self.torch_error:.3g})"
        return f"error {self.error:.3g} {held}; worst {at}"


def in_float64(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """``function`` of the same arguments in float64, gradients kept; a ``dtype=`` that would round it is dropped."""
    wide = {
        key: _widen(value)
        for key, value in (kwargs or {}).items()
        if not (key == "dtype" and isinstance(value, torch.dtype))
    }
    return function(*map(_widen, args), **wide)


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def error(got: Tensor, want: Tensor, dim: int | None = None, scale: float | Tensor | None = None) -> float:
    """The largest ``|got - want| / (|want| + scale)``; infinite where they disagree about NaN, infinities or the shape.

    ``scale`` is by default the root mean square of ``want``, along ``dim`` or over all of it, so that an entry far
    smaller than its neighbours isn't held to digits that the sum over them doesn't have. Neighbours along ``dim`` that are
    all zero, such as the gradient of a query that sees one key, have no size of their own: all of it counts. Give it where
    the result itself cancels, e.g. a gradient that is zero but for rounding.
    """
    return _worst(got, want, dim, scale)[0]


def _worst(got: Tensor, want: Tensor, dim: int | None, scale: float | Tensor | None) -> tuple[float, int]:
    """The error, and the flat index of where it is."""
    if got.shape != want.shape:
        return math.inf, 0
    if got.numel() == 0:
        return 0.0, 0
    got, want, dtype = got.detach(), want.detach().double(), got.dtype
    # What float64 holds and this type rounds to an infinity must be that infinity.
    rounded = want.to(dtype).double()
    given = got.double()
    plain = rounded.isfinite()
    wrong = torch.where(plain, ~given.isfinite(), ~((given == rounded) | (given.isnan() & rounded.isnan())))
    if wrong.any():
        return math.inf, int(wrong.reshape(-1).to(torch.uint8).argmax())
    want = want.where(plain, torch.zeros_like(want))
    given = given.where(plain, torch.zeros_like(given))
    if scale is None:
        scale = whole = (want.square().sum() / plain.sum().clamp(min=1)).sqrt()
        if dim is not None and want.ndim:
            own = (want.square().sum(dim, keepdim=True) / plain.sum(dim, keepdim=True).clamp(min=1)).sqrt()
            scale = own.where(own > 0, whole)
    off = (given - want).abs()
    # 0 / 0 is no error: an exact zero where zero is due.
    relative = torch.where(off == 0, off, off / (want.abs() + scale)).reshape(-1)
    at = int(relative.argmax())
    return float(relative[at]), at


def closeness(
    got: Tensor,
    want: Tensor,
    torch_result: Tensor | None = None,
    *,
    dim: int | None = None,
    scale: float | Tensor | None = None,
    fudge: float = FUDGE,
    slack: float = 1.0,
    at_most: float | None = None,
    rounded_to: torch.dtype | None = None,
) -> Closeness:
    """Judge ``got`` by the rule of closeness: error against float64 at most ``max(FLOOR, fudge * torch's own error)``.

    Args:
        got: The result.
        want: The same computed in float64 from the same (already rounded) inputs.
        torch_result: torch's at ``got``'s dtype. Without one, or where torch is wrong outright, the floor counts.
        dim: See :func:`error`.
        scale: See :func:`error`.
        fudge: How much worse than torch is allowed.
        slack: How many times all that is allowed.
        at_most: A fixed bound on top, whatever torch's own error.
        rounded_to: A dtype that what the result is computed from was rounded to on the way, as autocast does: the floor is no
            lower than its. A mean of many is off by less, but by how much is chance, in torch's as in ours.
    """
    if got.dtype not in FLOOR:
        raise TypeError(f"got has dtype {got.dtype}; the rule of closeness covers {', '.join(map(str, FLOOR))}")
    own = math.nan if torch_result is None else error(torch_result, want, dim, scale)
    bound = max(FLOOR[dtype] for dtype in (got.dtype, rounded_to) if dtype is not None)
    if math.isfinite(own):
        bound = max(bound, fudge * own)
    bound *= slack
    if at_most is not None:
        bound = min(bound, at_most)
    worst, at = _worst(got, want, dim, scale)
    if got.shape != want.shape or got.numel() == 0:
        return Closeness(worst, bound, own, (), math.nan, math.nan)
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape)) if got.ndim else ()
    return Closeness(worst, bound, own, where, float(got.detach()[where]), float(want.detach()[where]))


def assert_close(
    got: Tensor, want: Tensor, torch_result: Tensor | None = None, *, label: str = "", **rule: Any
) -> None:
    """Raise AssertionError, with the numbers, unless :func:`closeness` finds ``got`` close and of torch's dtype."""
    title = f"{label}: " if label else ""
    if got.shape != want.shape:
        raise AssertionError(f"{title}shape {tuple(got.shape)}, should be {tuple(want.shape)}")
    if torch_result is not None and got.dtype != torch_result.dtype:
        raise AssertionError(f"{title}dtype {got.dtype}, should be {torch_result.dtype}")
    verdict = closeness(got, want, torch_result, **rule)
    if not verdict.ok:
        raise AssertionError(f"{title}{got.dtype} {tuple(got.shape)}: {verdict}")


# --- Hostile memory --------------------------------------------------------------------------------------------------

# Elements on each side; a multiple of 512 bytes for every dtype, so that offset 0 is as aligned as a fresh tensor.
_FENCE = 4096


def fenced(shape: Sequence[int], dtype: torch.dtype, device: str, *, offset: int = 0) -> Tensor:
    """A normal random tensor in the middle of NaNs: a kernel that reads past either end and uses what it read shows it.

    ``offset`` elements (at most 1024) shift it off its alignment. :func:`fence_intact` tells whether anything wrote
    past an end.
    """
    shape = tuple(shape)
    numel = math.prod(shape)
    whole = torch.full((2 * _FENCE + numel,), math.nan, dtype=dtype, device=device)
    inside = whole[_FENCE + offset : _FENCE + offset + numel]
    inside.copy_(torch.randn(numel, device=device))
    return inside.view(shape)


def fence_intact(tensor: Tensor) -> bool:
    """Whether the NaNs around a tensor made by :func:`fenced` still stand."""
    whole = tensor._base
    if whole is None:
        raise ValueError("tensor isn't a view; give the tensor that fenced() returned")
    start = tensor.storage_offset()
    return bool(whole[:start].isnan().all() and whole[start + tensor.numel() :].isnan().all())


def poison(device: str, largest: int = 64 << 20) -> None:
    """Leave NaN in the memory that torch's allocator hands out next: an output that a kernel doesn't write shows it.

    Allocates blocks of every power of two from 512 bytes to ``largest``, writes all-ones (NaN in every floating-point
    type) and frees them.
    """
    held = []
    size = 512
    while size <= largest:
        held += [torch.full((size,), 255, dtype=torch.uint8, device=device) for _ in range(32 if size < 1 << 20 else 3)]
        size *= 2
    del held


# --- Layouts ---------------------------------------------------------------------------------------------------------

#: What :func:`as_layout` makes of a contiguous tensor.
LAYOUTS = ("contiguous", "offset", "transposed", "sliced", "padded", "expanded", "channels_last")


def as_layout(name: str, tensor: Tensor) -> Tensor:
    """``tensor``'s values in another layout; memory that isn't part of it holds NaN, or the largest integer.

    ``offset``: one element past an aligned address. ``transposed``: the first dimension is the innermost. ``sliced``:
    every second element of the last dimension. ``padded``: rows (last dimension) farther apart than they are long.
    ``expanded``: stride 0 along the first dimension, so its values are those of the first slice throughout.
    ``channels_last``: dimension 1 is the innermost (from three dimensions on; else contiguous).
    """
    tensor = tensor.detach().contiguous()
    shape = tuple(tensor.shape)
    if name == "contiguous" or not shape:
        return tensor.clone()
    hole = True if tensor.dtype == torch.bool else math.nan
    if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
        hole = torch.iinfo(tensor.dtype).max
    if name == "offset":
        return tensor.new_full((tensor.numel() + 1,), hole)[1:].view(shape).copy_(tensor)
    if name == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if name == "sliced":
        return tensor.new_full((*shape[:-1], 2 * shape[-1]), hole)[..., ::2].copy_(tensor)
    if name == "padded":
        return tensor.new_full((*shape[:-1], shape[-1] + 3), hole)[..., : shape[-1]].copy_(tensor)
    if name == "expanded":
        return tensor[:1].clone().expand(shape)
    if name == "channels_last":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if len(shape) > 2 else tensor.clone()
    raise ValueError(f"name is {name!r}; it must be one of {', '.join(LAYOUTS)}")
