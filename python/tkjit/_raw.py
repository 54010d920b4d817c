"""Plans for a user's own CUDA text: its kernel's parameters, and which of several candidates is the fastest."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cache
from ._device import Device
from ._plan import Scalar, Spec, plan, planned
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
    return Template.from_source(_HEAD.format(name=name) + source, name, source)


def launcher(instance: Instance) -> Callable[..., Any]:
    """The raw op of one kernel: (grid, block, cluster, smem), the scalars' formats, then the arguments."""

    def planner(
        gx: int, gy: int, gz: int, bx: int, by: int, bz: int, cx: int, cy: int, cz: int, smem: int, *args: Any
    ) -> Any:
        formats, *values = args
        taken = [
            value if kind == "t" else None if kind == "0" else Scalar(kind, value % 2**64 if kind == "Q" else value)
            for kind, value in zip(formats, values)
        ]
        first = next(value for value in values if isinstance(value, Spec))
        return plan(first, instance.launch((gx, gy, gz), (bx, by, bz), taken, (cx, cy, cz), smem))

    planner.__name__ = instance.template.name
    return planned(planner)


def flat(grid: Sequence[int], block: Sequence[int], cluster: Sequence[int], smem: int, args: Sequence[Any]) -> tuple:
    """The arguments of a launcher."""
    formats = "".join("0" if a is None else a.format if isinstance(a, Scalar) else "t" for a in args)
    values = [
        (a.value - 2**64 if a.format == "Q" and a.value >= 2**63 else a.value) if isinstance(a, Scalar) else a
        for a in args
    ]
    return (*grid, *block, *cluster, smem, sys.intern(formats), *values)


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
