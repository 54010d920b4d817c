"""The emulator's side of Python: its compiler, a kernel's text for it, and what a fault's places are in that text.

A kernel is the same text as for a GPU, compiled by the system's C++ compiler with csrc/templates/tk/emu in the place of
tk/ptx; csrc/emulator.c runs it.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from . import _core, _env
from ._errors import DeviceError, EmulatorError

if TYPE_CHECKING:
    from ._template import Template

DEFAULT_ARCH = "sm_90a"
FLAGS = (
    "-std=c++17", "-O1", "-gdwarf-4", "-fPIC", "-w", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing",
    "-ffp-contract=off", "-DTK_EMULATE",
)  # fmt: skip
CHECK_FLAGS = ("-fsanitize=thread", "-DTKEMU_CHECK")


def arch() -> str:
    """The architecture whose kernels run on the CPU."""
    return _env.get("TKJIT_EMULATE") or DEFAULT_ARCH


def checking() -> int:
    """How much kernels that are compiled now are checked: 0, not; 1, for faults; 2, and their accesses are counted."""
    level = _env.number("TKJIT_EMULATE_CHECK", 0)
    if level > 2:
        raise ValueError(f"TKJIT_EMULATE_CHECK is 0, 1 or 2, not {level}")
    return level


# --- The compiler ----------------------------------------------------------------------------------------------------


@functools.cache
def _identity(path: str) -> str:
    """What the compiler says of itself: part of the key of what it compiles."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise DeviceError(f"{path}, the emulator's C++ compiler, cannot be run: {error.strerror}") from None
    machine = os.uname().machine
    return f"{done.stdout.splitlines()[0] if done.stdout else path} {machine}"


def compiler() -> tuple[str, str]:
    """Path of the C++ compiler and its identity. Raises DeviceError where there is none."""
    chosen = _env.get("TKJIT_CXX")
    names = (chosen,) if chosen else ("g++", "c++", "clang++")
    for name in names:
        path = shutil.which(name)
        if path:
            return path, _identity(path)
    raise DeviceError(
        f"tensors on the CPU run through the emulator, which needs a C++ compiler; none of {', '.join(names)} is there. Install "
        "one (apt install g++), name one in TKJIT_CXX, or move the tensors to a GPU"
    )


# --- A kernel's text -------------------------------------------------------------------------------------------------

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"')


def source_of(template: Template, expression: str) -> str:
    """The kernel as one file, each line known by its file's name and number; the entry comes last."""
    lines: list[str] = []
    _inline(f"{template.name}.cuh", template.source, template.headers, set(), lines)
    return "\n".join([*lines, f"TKEMU_ENTRY(({expression}))", ""])


def _inline(name: str, source: str, headers: dict[str, str], seen: set[str], out: list[str]) -> None:
    out.append(f'#line 1 "{name}"')
    for number, line in enumerate(source.split("\n"), 1):
        match = _INCLUDE.match(line)
        if match is None or match[1] not in headers:
            out.append("" if line.strip() == "#pragma once" else _cpp(line))
            continue
        # Only the CPU's versions of the primitives: what they stand in for is no part of this text.
        if match[1] not in seen and not match[1].startswith("tk/ptx/"):
            seen.add(match[1])
            _inline(match[1], headers[match[1]], headers, seen, out)
        out.append(f'#line {number + 1} "{name}"')


def _cpp(line: str) -> str:
    """The line with its ``__shared__`` variables as a C++ compiler takes them: tk/emu/cuda.cuh has the word's meaning."""
    line = re.sub(r"\b(__shared__\s+)alignas\b", r"\1__align__", line)
    line = re.sub(r"\bextern(\s+)__shared__", r"extern __attribute__((weak))\1__thread", line)
    return re.sub(r"\bstatic\s+__shared__", "__shared__", line)


def options(target: str, check: int) -> tuple[str, ...]:
    """A folder to work in, the compiler and its options: what csrc/host_compiler.c takes."""
    number = int(re.sub(r"\D", "", target)) * 10
    path, identity = compiler()
    # Thread-local variables by way of __tls_get_addr: clang knows no other on x86-64.
    tls = () if "clang" in identity else (f"-mtls-dialect={'trad' if os.uname().machine == 'aarch64' else 'gnu'}",)
    return (tempfile.gettempdir(), path, *FLAGS, *tls, f"-D__CUDA_ARCH__={number}", *(CHECK_FLAGS if check else ()))


# --- Faults ----------------------------------------------------------------------------------------------------------

_PLACE = re.compile(r"<at 0x([0-9a-f]+)>")


def fault(message: str, kernel: _core.Kernel) -> EmulatorError:
    """The error for a fault that the emulator found, its places told as lines of the kernel's text."""
    places = sorted({int(place, 16) for place in _PLACE.findall(message)})
    known = _lines(kernel, places)
    return EmulatorError(_PLACE.sub(lambda match: known[int(match[1], 16)], message).rstrip("\n"))


def _lines(kernel: _core.Kernel, places: list[int]) -> dict[int, str]:
    """Where in the text each place of the kernel's object is."""
    unknown = {place: f"address 0x{place:x}" for place in places}
    if not places or shutil.which("addr2line") is None:
        return unknown
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(kernel.image)
        file.flush()
        # A return address is the place behind the call.
        words = ["addr2line", "-a", "-i", "-f", "-C", "-s", "-e", file.name, *(hex(place - 1) for place in places)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = dict(unknown)
    for part in re.split(r"^0x", done.stdout, flags=re.MULTILINE)[1:]:
        head, *rest = part.strip().split("\n")
        frames = list(zip(rest[::2], rest[1::2], strict=False))
        found[int(head, 16) + 1] = _frame(frames) or unknown.get(int(head, 16) + 1, "")
    return found


# Files whose lines say how a primitive works: the reader wants to know who called it.
_PRIMITIVES = {"cuda.cuh", "abi.cuh", "async.cuh", "convert.cuh", "math.cuh", "memory.cuh", "sync.cuh", "types.cuh", "mma.cuh",
               "tensor.cuh", "tensor_map.cuh", "philox.cuh"}  # fmt: skip


def _frame(frames: list[tuple[str, str]]) -> str | None:
    """The innermost frame of a kernel's or a part's own text, with the primitive that it calls there."""
    called = None
    for function, place in frames:
        file, _, line = place.partition(":")
        short = re.sub(r"<.*", "", function.split("(")[0]).split(" ")[-1]
        if file not in _PRIMITIVES and line.split()[0].isdigit():
            inner = f", in {called}" if called else ""
            return f"{file}:{line.split()[0]} ({short}{inner})"
        if short.startswith("tk::"):
            called = short
    return None


# --- Counts ----------------------------------------------------------------------------------------------------------

_counted: list[_core.Kernel] = []


def count(kernel: _core.Kernel) -> None:
    """Have the kernel's accesses in the table that stderr gets at the end of the process."""
    if not _counted:
        atexit.register(lambda: print(table(), file=sys.stderr))
    _counted.append(kernel)


def table() -> str:
    """For each line of the kernels counted so far: requests of warps, wavefronts or sectors, and how many more than needed.

    A wavefront is a trip to shared memory, a sector 32 bytes of global memory. 1.0 is as few as bring the same bytes.
    """
    head = f"{'line':44} {'access':13} {'requests':>9} {'per request':>11} {'over the ideal':>14}"
    lines = ["accesses by line, as a GPU would make them (wavefronts of shared memory, sectors of global memory)", head]
    for kernel in _counted:
        found: dict[tuple[str, str], list[int]] = {}
        counts = kernel.counts()
        known = _lines(kernel, sorted({place for place, *_ in counts}))
        for place, shared, writes, requests, actual, ideal in counts:
            access = f"{'shared' if shared else 'global'} {'store' if writes else 'load'}"
            total = found.setdefault((known[place], access), [0, 0, 0])
            for i, number in enumerate((requests, actual, ideal)):
                total[i] += number
        lines.append(kernel.expression)
        for (line, access), (requests, actual, ideal) in sorted(found.items(), key=lambda item: -item[1][1]):
            each, over = actual / requests, actual / max(ideal, 1)
            lines.append(f"  {line[:42]:42} {access:13} {requests:9} {each:11.2f} {over:14.2f}")
    return "\n".join(lines)
