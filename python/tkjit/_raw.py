"""Plans for a user's own CUDA text: its kernel's parameters, and which of several candidates is the fastest."""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _core, _env, cache
from ._device import Device
from ._plan import Scalar, compiled_for
from ._template import CTYPES, Instance, Template, digest, without_comments

_HEAD = '#include "tk/cuda_math.cuh"\n#include "tk/tk.cuh"\n#line 1 "{name}"\n'


@dataclass(frozen=True)
class Signature:
    """A kernel as its text declares it.

    Attributes:
        parameters: Names of the template's parameters, in their order.
        writes: For each of the kernel's own whether it is a pointer through which it may write; None where that can't be read.
    """

    parameters: tuple[str, ...]
    writes: tuple[bool, ...] | None

    @classmethod
    def of(cls, source: str, name: str) -> Signature:
        bare = without_comments(source)
        found = re.search(
            rf"(?:template\s*<([^>]*)>\s*)?(?:extern\s+\"C\"\s*)?__global__[^;{{}}]*?\b{re.escape(name)}\s*\(([^{{}}]*?)\)\s*\{{",
            bare,
        )
        if found is None:
            return cls((), None)
        names = [part.split("=")[0].split()[-1].strip(".") for part in (found[1] or "").split(",") if part.strip()]
        own = [part.strip() for part in found[2].split(",") if part.strip()]
        if "<" in found[2]:
            return cls(tuple(names), None)
        return cls(tuple(names), tuple("*" in part and not part.startswith("const ") for part in own))


_UNSIGNED = {"uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long long"}


def ctype(dtype: str) -> str:
    """A torch.dtype's text as C++ has it."""
    name = dtype.removeprefix("torch.")
    found = CTYPES.get(name) or _UNSIGNED.get(name)
    if found is None:
        raise TypeError(f"Kernel(): there is no C++ type for {dtype}")
    return found


def template_of(source: str, name: str) -> Template:
    return Template.from_source(_HEAD.format(name=name) + source, name, {name: source})


class Struct:
    """What a kernel takes as one struct by value; see :func:`tkjit.struct`."""

    def __init__(self, fields: Sequence[Any], writes: Sequence[Any]) -> None:
        self.fields, self.writes = tuple(fields), tuple(writes)

    def __repr__(self) -> str:
        return f"tkjit.struct of {len(self.fields)} fields"


class Parameters:
    """A kernel's parameters as bytes, and the tensors whose addresses belong in them."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.blob = bytearray()
        self.offsets: list[int] = []
        self.places: list[int] = []
        self.tensors: list[Any] = []
        for arg in args:
            if isinstance(arg, Struct):
                widest = max(map(_alignment, arg.fields), default=1)
                self.offsets.append(self._align(widest))
                for field in arg.fields:
                    self._add(field)
                self._align(widest)
            else:
                self.offsets.append(self._align(_alignment(arg)))
                self._add(arg)

    def _align(self, to: int) -> int:
        self.blob += bytes(-len(self.blob) % to)
        return len(self.blob)

    def _add(self, item: Any) -> None:
        at = self._align(_alignment(item))
        if isinstance(item, Scalar):
            self.blob += struct.pack(f"={item.format}", item.value)
        elif isinstance(item, list | tuple):
            for i, one in enumerate(item):
                if one is not None:
                    self.places.append(at + 8 * i)
                    self.tensors.append(one)
            self.blob += bytes(8 * len(item))
        elif item is None:
            self.blob += bytes(8)
        elif isinstance(item, _BUFFERS):
            self.blob += memoryview(item).cast("B")
        else:
            self.places.append(at)
            self.tensors.append(item)
            self.blob += bytes(8)


_BUFFERS = (bytes, bytearray, memoryview, array.array)


def _alignment(item: Any) -> int:
    if isinstance(item, Scalar):
        return struct.calcsize(f"={item.format}")
    return memoryview(item).itemsize if isinstance(item, _BUFFERS) else 8


def launcher(instance: Instance) -> Callable[..., None]:
    """What launches one kernel: (device, grid, block, cluster, smem, parameters)."""
    loaded: dict[int, Any] = {}  # by device, of GPUs: what the emulator stands for may change

    def launch(device: int, grid: Any, block: Any, cluster: Any, smem: int, given: Parameters) -> None:
        kernel = loaded.get(device)
        if kernel is None or smem > 48 << 10:
            facts = Device.of(device)
            if device < 0:
                _core.emulator_seed(_env.number("TKJIT_EMULATE_SEED", 0))
            kernel = compiled_for(facts, instance, smem)
            if device >= 0:
                loaded[device] = kernel
        _core.launch(
            kernel, device, grid, block, cluster, smem, bytes(given.blob), tuple(given.offsets), tuple(given.places),
            tuple(given.tensors),
        )  # fmt: skip

    return launch


# --- tuning ----------------------------------------------------------------------------------------------------------

ROUNDS = 5  # of each candidate, after one that does not count


def fastest(
    key: Sequence[str],
    candidates: Sequence[Mapping[str, object]],
    device: Device,
    trial: Callable[[int], bool],
    run: Callable[[int], None],
    wait: Callable[[], None],
) -> int:
    """The candidate that takes the least time, by what the cache's folders know or by trying.

    ``trial`` runs one and tells whether it does what the first does; ``run`` is what is timed.
    """
    identity = digest(
        ["tkjit tuning 1", device.arch, str(device.sms), *key, *(json.dumps(c, default=str) for c in candidates)]
    )
    folders = cache.folders()
    for folder in folders.all:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads((Path(folder) / "tuned" / f"{identity}.json").read_text())
            if isinstance(known["best"], int) and 0 <= known["best"] < len(candidates):
                return known["best"]
    times = []
    for i in range(len(candidates)):
        right = trial(i)
        wait()
        if not right:
            warnings.warn(
                f"tune: {dict(candidates[i])} does not give what {dict(candidates[0])} gives", RuntimeWarning, 5
            )
        best = float("inf")
        for _ in range(ROUNDS if right else 0):
            begin = time.perf_counter()
            run(i)
            wait()
            best = min(best, time.perf_counter() - begin)
        times.append(best)
    choice = times.index(min(times))
    if folders.home is not None:
        with contextlib.suppress(OSError):
            _publish(
                Path(folders.home) / "tuned",
                identity,
                {
                    "best": choice,
                    "seconds": [t if t < float("inf") else None for t in times],
                    "of": [dict(c) for c in candidates],
                },
            )
    return choice


def _publish(folder: Path, identity: str, found: Mapping[str, object]) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(found, file, default=str)
    os.replace(file.name, folder / f"{identity}.json")
