"""What a planner is written with: specs in place of tensors, and the plan it returns.

A planner runs once per kind of call. It sees dtype, shape, strides and alignment of each tensor, never its address or values,
and answers with outputs and launches; csrc/plan.c freezes that and repeats it.
"""

from __future__ import annotations

import math
import struct as _struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _core, _env
from ._device import Device
from ._errors import DeviceError, LaunchError
from ._template import Instance

# (DLPack's code, bits) -> name
_DTYPES = {
    (0, 8): "int8", (0, 16): "int16", (0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (1, 16): "uint16", (1, 32): "uint32",
    (1, 64): "uint64", (2, 16): "float16", (2, 32): "float32", (2, 64): "float64", (4, 16): "bfloat16", (6, 8): "bool",
    (5, 32): "complex32", (5, 64): "complex64", (5, 128): "complex128", (10, 8): "float8_e4m3fn", (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2", (13, 8): "float8_e5m2fnuz", (14, 8): "float8_e8m0fnu",
}  # fmt: skip
_ITEMSIZE = {name: bits // 8 for (_, bits), name in _DTYPES.items()}
_CPU, _CUDA = 1, 2  # DLPack's device types
_FRESH_ALIGN = 16  # torch's allocator gives 512; more than 16 is nothing to a kernel


# --- Tensors as a planner sees them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A tensor without its address.

    Attributes:
        dtype: Such as ``"bfloat16"``.
        shape: Sizes.
        strides: In elements.
        device: Index of the GPU; -1: the CPU, where the emulator runs the kernels.
        align: Largest power of two, up to 16, that divides the address in bytes.
        argument: Which argument of the call it is; -1 for an output.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    align: int
    argument: int = -1
    # Outputs of one plan may be alike and are still two.
    serial: object = field(default_factory=object, repr=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        return (
            all(n == 1 or s == c for n, s, c in zip(self.shape, self.strides, _contiguous(self.shape)))
            or self.numel == 0
        )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def empty(shape: Sequence[int], dtype: str, like: Spec) -> Spec:
    """An output: a new contiguous tensor on the device of ``like``."""
    shape = tuple(shape)
    return Spec(dtype, shape, _contiguous(shape), like.device, _FRESH_ALIGN)


def empty_like(spec: Spec, dtype: str | None = None) -> Spec:
    """An output of the same shape, contiguous."""
    return empty(spec.shape, dtype or spec.dtype, spec)


@dataclass(frozen=True)
class Scratch:
    """Memory of one call, gone when its kernels are done. ``zeroed``: filled with 0 first."""

    bytes: int
    zeroed: bool = False
    serial: object = field(default_factory=object, repr=False)


def scratch(size: int, zeroed: bool = False) -> Scratch:
    return Scratch(size, zeroed)


# --- Arguments of kernels --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scalar:
    """A number with the type that the kernel declares."""

    format: str  # of the struct module
    value: Any


def i32(value: int) -> Scalar:
    return Scalar("i", value)


def i64(value: int) -> Scalar:
    return Scalar("q", value)


def u32(value: int) -> Scalar:
    return Scalar("I", value)


def u64(value: int) -> Scalar:
    return Scalar("Q", value)


def f32(value: float) -> Scalar:
    return Scalar("f", value)


def f64(value: float) -> Scalar:
    return Scalar("d", value)


def bool_(value: bool) -> Scalar:
    return Scalar("?", value)


@dataclass(frozen=True)
class Struct:
    """What a kernel takes as one struct by value, laid out as C lays it out; tensors are pointers, None is a null one."""

    fields: tuple[Scalar | Spec | Scratch | None, ...]


def struct(*fields: Scalar | Spec | Scratch | None) -> Struct:
    return Struct(fields)


@dataclass(frozen=True)
class TensorMap:
    """A tensor as the copy engine sees it: what cuTensorMapEncodeTiled is given, innermost dimension first."""

    tensor: Spec
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; of dims[1:]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int  # bytes: 0, 32, 64, 128
    l2_promotion: int  # bytes: 0, 64, 128, 256
    nan: bool = False  # outside reads as NaN rather than as 0


# CUtensorMapDataType of each dtype
_MAP_TYPES = {
    "uint8": 0, "int8": 0, "bool": 0, "float8_e4m3fn": 0, "float8_e5m2": 0, "uint16": 1, "int16": 1, "uint32": 2, "int32": 3,
    "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip


def tensor_map(
    tensor: Spec,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 0,
    l2_promotion: int = 256,
    element_strides: Sequence[int] | None = None,
    nan: bool = False,
) -> TensorMap:
    """A tensor map argument (``const __grid_constant__ tk::TensorMap``); sizes in elements, strides in bytes."""
    steps = tuple(element_strides or (1,) * len(dims))
    return TensorMap(tensor, tuple(dims), tuple(strides), tuple(box), steps, swizzle, l2_promotion, nan)


Arg = Spec | Scratch | Scalar | Struct | TensorMap | None


# --- The plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One kernel launch; made by Instance.launch."""

    instance: Instance
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    args: tuple[Arg, ...]


@dataclass(frozen=True)
class Clear:
    """An output that is filled with 0 bytes: for kernels that leave some of it."""

    output: Spec


@dataclass(frozen=True)
class Plan:
    outputs: tuple[Spec, ...]
    launches: tuple[Launch | Clear, ...]


def plan(outputs: Spec | Sequence[Spec], *launches: Launch | Clear) -> Plan:
    """A planner's answer: what the call returns, and what fills it, in this order."""
    return Plan((outputs,) if isinstance(outputs, Spec) else tuple(outputs), launches)


class _Parameters:
    """A kernel's parameters as bytes, with the places that each call patches."""

    def __init__(self, slots: dict[int, int]):
        self.slots = slots
        self.blob = bytearray()
        self.offsets: list[int] = []
        self.patches: list[tuple[int, int, int]] = []
        self.maps: list[tuple] = []

    def add(self, arg: Arg) -> None:
        if isinstance(arg, (Spec, Scratch)):
            self.patches.append((self._place(b"\0" * 8, 8), self.slots[id(arg.serial)], 0))
        elif arg is None:
            self._place(b"\0" * 8, 8)
        elif isinstance(arg, Scalar):
            data = _struct.pack(f"={arg.format}", arg.value)
            self._place(data, len(data))
        elif isinstance(arg, Struct):
            self._add_struct(arg)
        else:
            self._add_map(arg)

    def _add_struct(self, arg: Struct) -> None:
        formats = "".join(item.format if isinstance(item, Scalar) else "P" for item in arg.fields)
        # "0q" closes with the alignment of the widest field, as C does.
        widest = max(formats, key=_struct.calcsize)
        values = (item.value if isinstance(item, Scalar) else 0 for item in arg.fields)
        at = self._place(_struct.pack(f"@{formats}0{widest}", *values), _struct.calcsize(widest))
        for i, item in enumerate(arg.fields):
            if isinstance(item, (Spec, Scratch)):
                field = _struct.calcsize(f"@{formats[: i + 1]}") - _struct.calcsize("P")
                self.patches.append((at + field, self.slots[id(item.serial)], 0))

    def _place(self, data: bytes, align: int) -> int:
        at = -(-len(self.blob) // align) * align
        self.blob += b"\0" * (at - len(self.blob)) + data
        self.offsets.append(at)
        return at

    def _add_map(self, arg: TensorMap) -> None:
        at = self._place(b"\0" * 128, 128)
        slot = self.slots[id(arg.tensor.serial)]
        swizzle = (0, 32, 64, 128).index(arg.swizzle)
        promotion = (0, 64, 128, 256).index(arg.l2_promotion)
        kind = _MAP_TYPES[arg.tensor.dtype]
        self.maps.append(
            (at, slot, kind, arg.dims, arg.strides, arg.box, arg.element_strides, swizzle, promotion, int(arg.nan))
        )


def _alike(a: Spec, b: Spec) -> bool:
    return a.shape == b.shape and a.strides == b.strides and a.dtype == b.dtype


def _made(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int) -> tuple:
    """Arguments of torch.empty_strided."""
    import torch

    place = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    return ((shape, strides), {"dtype": getattr(torch, dtype), "device": place})


def _freeze(answer: Plan, inputs: Sequence[Spec], n_args: int) -> tuple:
    """The plan as csrc/plan.c reads it, its kernels compiled."""
    index = inputs[0].device
    if index < 0:
        _core.emulator_seed(_env.number("TKJIT_EMULATE_SEED", 0))
    slots = {id(spec.serial): spec.argument for spec in inputs}
    outputs: list[int | tuple] = []
    for spec in answer.outputs:
        twin = next((other.argument for other in inputs if _alike(spec, other)), None)
        if spec.argument >= 0:
            outputs.append(spec.argument)
        elif twin is not None:
            outputs.append(~twin)
        else:
            outputs.append(_made(spec.shape, spec.strides, spec.dtype, spec.device))
        slots.setdefault(id(spec.serial), n_args + len(outputs) - 1)
    buffers: list[tuple] = []
    steps: list[tuple] = []
    for launch in answer.launches:
        given = launch.args if isinstance(launch, Launch) else ()
        fields = [field for arg in given if isinstance(arg, Struct) for field in arg.fields]
        for arg in (*given, *fields):
            if isinstance(arg, Scratch) and id(arg.serial) not in slots:
                slots[id(arg.serial)] = n_args + len(outputs) + len(buffers)
                buffers.append(_made((arg.bytes,), (1,), "uint8", index))
                if arg.zeroed:
                    steps.append((None, slots[id(arg.serial)], 0, arg.bytes))
    if answer.launches:
        device = Device.of(index)
        for launch in answer.launches:
            if isinstance(launch, Clear):
                out = launch.output
                steps.append((None, slots[id(out.serial)], 0, out.numel * out.itemsize))
            else:
                steps.append(_frozen_launch(launch, slots, device))
    return (index, tuple(outputs), tuple(buffers), tuple(steps))


_MOST_VARIABLES = 48 << 10  # before sm_90 ptxas 13.0 takes no more, whatever a block has


def compiled_for(device: Device, instance: Instance, smem: int) -> _core.Kernel:
    """The kernel, if a block of the device has room for its shared memory, ``smem`` bytes of it dynamic."""
    kernel = instance.compiled(device.arch, device.emulated)
    variables = max(kernel.facts["shared_bytes"], 0)  # -1: not known
    if smem + variables > device.smem_block:
        raise LaunchError(
            f"{instance.expression} wants {smem + variables} bytes of shared memory, a block of this GPU has {device.smem_block}"
        )
    if variables > _MOST_VARIABLES and device.cc < (9, 0):
        raise LaunchError(
            f"{instance.expression} has {variables} bytes of __shared__ variables; more than {_MOST_VARIABLES} have to be dynamic "
            f"shared memory on {device.arch}"
        )
    return kernel


def _frozen_launch(launch: Launch, slots: dict[int, int], device: Device) -> tuple:
    kernel = compiled_for(device, launch.instance, launch.smem)
    parameters = _Parameters(slots)
    for arg in launch.args:
        parameters.add(arg)
    return (
        kernel,
        launch.grid,
        launch.block,
        launch.cluster,
        launch.smem,
        bytes(parameters.blob),
        tuple(parameters.offsets),
        tuple(parameters.patches),
        tuple(parameters.maps),
    )


# --- What a planner checks -------------------------------------------------------------------------------------------


def canonical(dim: int, ndim: int) -> int:
    """The dimension counted from the front. Raises what torch raises; a 0-d tensor has the dimensions -1 and 0."""
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"argument 'dim' must be int, not {type(dim).__name__}")
    reach = max(ndim, 1)
    if not -reach <= dim < reach:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-reach}, {reach - 1}], but got {dim})")
    return dim % reach


def require_dtype(op: str, dtype: str, accepted: Sequence[str]) -> None:
    """Raise what torch raises for a dtype that an op's kernels lack."""
    if dtype not in accepted:
        raise NotImplementedError(
            f"\"{op}\" not implemented for '{_SCALAR_NAMES.get(dtype, dtype)}' (argument 'input')"
        )


# As torch's messages name them.
_SCALAR_NAMES = {
    "int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "float16": "Half",
    "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "complex32": "ComplexHalf", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}  # fmt: skip


# --- planned ---------------------------------------------------------------------------------------------------------

_all: list[_core.Planned] = []


def planned(function: Callable[..., Plan]) -> Callable[..., Any]:
    """Make an op of a planner: called with tensors and scalars, it runs the plan for their kind. No autograd."""

    def miss(scalars: tuple, views: tuple) -> tuple:
        args = [
            _scalar(scalar) if view is None else _spec(view, i) for i, (scalar, view) in enumerate(zip(scalars, views))
        ]
        inputs = [arg for arg in args if isinstance(arg, Spec)]
        _check_devices(inputs)
        answer = function(*args)
        frozen = _freeze(answer, inputs, len(args))
        _note(function, args, answer)
        return frozen

    core = _core.Planned(miss)
    _all.append(core)
    return core.raw


def clear() -> None:
    """Forget every plan."""
    for core in _all:
        core.clear()


def _scalar(value: object) -> object:
    """A torch.dtype comes by its name, like the dtype of a spec."""
    return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def _spec(view: tuple, argument: int) -> Spec:
    code, bits, lanes, kind, device, shape, strides, align = view
    if kind not in (_CPU, _CUDA):
        raise DeviceError(f"argument {argument} is neither on a GPU nor on the CPU")
    name = _DTYPES.get((code, bits * lanes), f"dtype {code}:{bits}x{lanes}")
    return Spec(name, shape, strides, device if kind == _CUDA else -1, align, argument)


def _check_devices(inputs: Sequence[Spec]) -> None:
    devices = sorted({spec.device for spec in inputs})
    if len(devices) > 1:
        names = " and ".join(f"cuda:{i}" if i >= 0 else "cpu" for i in devices)
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {names}!")


# --- explain ---------------------------------------------------------------------------------------------------------

_KEPT = 512  # misses
_misses: deque[tuple[str, tuple[tuple[str, str], ...], str]] = deque(maxlen=_KEPT)
_misses_lock = threading.Lock()


def _fields(args: Sequence[object]) -> tuple[tuple[str, str], ...]:
    """The parts of a key, named."""
    parts: list[tuple[str, str]] = []
    for i, arg in enumerate(args):
        if isinstance(arg, Spec):
            for name in ("dtype", "shape", "strides", "device", "align"):
                parts.append((f"argument {i}'s {name}", str(getattr(arg, name))))
        else:
            parts.append((f"argument {i}", repr(arg)))
    return tuple(parts)


def _note(function: Callable, args: Sequence[object], answer: Plan) -> None:
    op = function.__module__.rsplit(".", 1)[-1].strip("_") + "." + function.__name__.strip("_")
    launches = ", ".join(
        f"{launch.instance.expression} grid {launch.grid}" for launch in answer.launches if isinstance(launch, Launch)
    )
    with _misses_lock:
        _misses.append((op, _fields(args), launches or "no launch"))


def explain(op: str | None = None) -> list[str]:
    """See cache.explain."""
    with _misses_lock:
        misses = list(_misses)
    lines: list[str] = []
    for i, (name, fields, launches) in enumerate(misses):
        if op is not None and not name.startswith(op):
            continue
        before = [
            earlier for earlier_name, earlier, _ in misses[:i] if earlier_name == name and len(earlier) == len(fields)
        ]
        nearest = max(before, key=lambda other: sum(a == b for a, b in zip(fields, other)), default=None)
        if nearest is None:
            reason = "the first call of its kind"
        else:
            differs = [f"{a[0]} is {a[1]}, was {b[1]}" for a, b in zip(fields, nearest) if a != b]
            reason = "; ".join(differs) or "its plan was evicted"
        lines.append(f"{name}: {reason} -> {launches}")
    return lines
