"""The environment variables of tkjit, in one table. README's table is generated from it (``python -m tkjit env``)."""

from __future__ import annotations

import os

# Read by setup.py and the benchmarks only.
OF_BUILD = ("TKJIT_WERROR", "TKJIT_HOSTILE", "TKJIT_SANITIZE", "TKJIT_COMMIT")

VARIABLES = {
    "TKJIT_CACHE_DIR": "Folders of the kernel cache, separated by colons: the first that can be is written to, the rest are "
    "only read. Default: `$XDG_CACHE_HOME/tkjit`, else `~/.cache/tkjit`.",
    "TKJIT_CACHE_TRUST": "`1`: use cache folders and entries that belong to, or may be written by, other users. "
    "Whoever can write there can run code on your GPU.",
    "TKJIT_CACHE_MAX_MB": "Size of the cache above which the least recently used entries go. Default: 1024.",
    "TKJIT_NVRTC": "Path of the NVRTC library to use. Default: one that is loaded, then pip's, then `CUDA_HOME`'s.",
    "TKJIT_EMULATE": "Architecture whose kernels CPU tensors run through the emulator, such as `sm_80`. Default: `sm_90a`.",
    "TKJIT_EMULATE_CHECK": "`1`: the emulator looks for races, deadlocks, reads of unwritten shared memory, accesses outside the "
    "tensors. `2`: and counts bank conflicts and sectors by line; the table goes to stderr at the end.",
    "TKJIT_EMULATE_SEED": "With checks, the order in which threads take turns: a whole number. Default: 0.",
    "TKJIT_CXX": "The C++ compiler of the emulator. Default: `g++`, else `c++`, else `clang++`.",
    "TKJIT_NO_JIT": "`1`: never compile; a kernel that is not in the cache is an error.",
}


def get(name: str) -> str | None:
    """The variable's value; None where it is unset or empty."""
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name) or None


def flag(name: str) -> bool:
    """Whether the variable is set to something other than 0."""
    return get(name) not in (None, "0")


def number(name: str, default: int) -> int:
    """The variable as a whole number; the default where it is unset."""
    value = get(name)
    if value is None:
        return default
    if not value.isdecimal():
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def markdown() -> str:
    """The table of README."""
    rows = [f"| `{name}` | {text} |" for name, text in VARIABLES.items()]
    return "\n".join(["| variable | meaning |", "| --- | --- |", *rows])
