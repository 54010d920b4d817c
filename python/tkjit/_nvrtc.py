"""Where NVRTC is, which version it is, and what to ask of it for a GPU."""

from __future__ import annotations

import functools
import glob
import importlib.util
import json
import os
from dataclasses import dataclass

from . import _core, _env
from ._errors import DeviceError


@dataclass(frozen=True)
class Nvrtc:
    """What the cache key and the choice of an architecture need to know of the compiler."""

    path: str
    version: tuple[int, int]
    archs: tuple[int, ...]


def _loaded() -> list[str]:
    """NVRTC libraries this process has already mapped."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[-1].strip() for line in maps if "libnvrtc.so" in line}
    return sorted(path for path in paths if path.startswith("/"))


def _from_pip() -> list[str]:
    """NVRTC in the nvidia packages beside torch."""
    spec = importlib.util.find_spec("nvidia")
    found: list[str] = []
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for pattern in ("cu*/lib/libnvrtc.so.*", "cuda_nvrtc/lib/libnvrtc.so.*"):
            found += sorted(glob.glob(os.path.join(folder, pattern)), reverse=True)
    return [path for path in found if not path.endswith(".alt.so")]


def _from_pathfinder() -> list[str]:
    """Whatever else cuda-pathfinder knows: conda, system packages, CUDA_HOME."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return [str(load_nvidia_dynamic_lib("nvrtc").abs_path)]
    except Exception:  # it is not there, or it found nothing: the loader's own path is left
        return []


def _from_cuda_home() -> list[str]:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    return [path for home in homes if home for path in sorted(glob.glob(os.path.join(home, "lib64", "libnvrtc.so*")))]


def candidates() -> tuple[str, ...]:
    """Paths to try, best first."""
    chosen = _env.get("TKJIT_NVRTC")
    if chosen:
        return (chosen,)
    for source in (_loaded, _from_pip):  # the usual places are cheap to look at
        found = source()
        if found:
            return tuple(found)
    return _rest()


def _rest() -> tuple[str, ...]:
    return (*_from_pathfinder(), *_from_cuda_home(), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def open_library() -> Nvrtc:
    """Open NVRTC unless it is open. Raises DeviceError with all that was tried."""
    if _core.nvrtc_info() is None:
        paths = (*_identified, *candidates())
        try:
            _core.nvrtc_open(paths)
        except DeviceError:  # what is usual does not open: look further
            if _env.get("TKJIT_NVRTC"):
                raise
            _core.nvrtc_open((*paths, *_from_pip(), *_rest()))
    return Nvrtc(*_core.nvrtc_info())


# The path that identify() has answered for, first: the keys of the cache are made for its version.
_identified: list[str] = []


def _memo_path() -> str | None:
    from . import cache

    home = cache.folders().home
    return home and os.path.join(home, cache.MEMO)


def _stamp(path: str) -> list:
    status = os.stat(path)
    return [path, status.st_size, status.st_mtime_ns]


def _read_memo(memo: str) -> tuple[list, Nvrtc] | None:
    """The stamp of a library, and what was learnt of it; None where the file is not whole."""
    try:
        with open(memo) as file:
            seen = json.load(file)
        major, minor = map(int, seen["version"])
        archs = tuple(map(int, seen["archs"]))
        return (seen["stamp"], Nvrtc(str(seen["stamp"][0]), (major, minor), archs)) if archs else None
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        return None


def _remembered(path: str) -> Nvrtc | None:
    """What an earlier process learnt of this very file, which spares a new one from opening 100 MB of library."""
    memo = _memo_path()
    known = _read_memo(memo) if memo else None
    try:
        return known[1] if known and known[0] == _stamp(path) else None
    except OSError:
        return None


def _shipped() -> Nvrtc | None:
    """The compiler that a folder's entries were made with: where there is no compiler, they can still be used."""
    from . import cache

    for folder in cache.folders().all:
        known = _read_memo(os.path.join(folder, cache.MEMO))
        if known:
            return known[1]
    return None


def _remember(nvrtc: Nvrtc) -> None:
    memo = _memo_path()
    if memo is None or not os.path.isabs(nvrtc.path):
        return
    aside = os.path.join(os.path.dirname(memo), "tmp", f"{os.getpid()}-nvrtc")
    try:
        write_memo(nvrtc, aside)
        os.replace(aside, memo)
    except OSError:  # it only saves time
        pass


def write_memo(nvrtc: Nvrtc, path: str) -> None:
    """Note the compiler in a file, for processes that have not opened it, or cannot."""
    try:
        stamp = _stamp(nvrtc.path)
    except OSError:  # it came from such a note itself
        stamp = [nvrtc.path, 0, 0]
    with open(path, "w") as file:
        json.dump({"stamp": stamp, "version": nvrtc.version, "archs": nvrtc.archs}, file)


@functools.cache
def identify() -> Nvrtc:
    """The compiler's version and architectures, without opening it where an earlier process has noted them."""
    if _core.nvrtc_info() is not None:
        return open_library()
    paths = candidates()
    if os.path.isabs(paths[0]):
        known = _remembered(paths[0])
        if known:
            _identified[:] = [known.path]
            return known
    try:
        nvrtc = open_library()
    except DeviceError:
        shipped = _shipped()
        if shipped is None:
            raise
        return shipped
    _remember(nvrtc)
    return nvrtc


def forget() -> None:
    """The library that opened is not the one that was identified: identify again."""
    identify.cache_clear()
    _identified.clear()


# Architectures whose own instructions need the suffix "a".
_SPECIFIC = {90: "90a", 100: "100a", 103: "103a", 120: "120a", 121: "121a"}


def arch_of(cc: tuple[int, int]) -> str:
    """The exact architecture of a compute capability, such as ``sm_90a``."""
    number = cc[0] * 10 + cc[1]
    return f"sm_{_SPECIFIC.get(number, number)}"


def target_of(arch: str) -> tuple[str, bool]:
    """The compiler's architecture option for a GPU, and whether it gives PTX.

    PTX is made only for a GPU newer than the compiler, and only if the driver is new enough to read it.
    """
    nvrtc = identify()
    number = int(arch[3:].rstrip("af"))
    if number in nvrtc.archs:
        return arch, False
    newest = max(nvrtc.archs)
    if number < newest:
        raise DeviceError(
            f"NVRTC {nvrtc.version[0]}.{nvrtc.version[1]} does not compile for {arch}; it supports {nvrtc.archs}"
        )
    driver, _ = _core.driver_info()
    if driver < nvrtc.version[0] * 1000 + nvrtc.version[1] * 10:
        raise DeviceError(
            f"{arch} is newer than NVRTC {nvrtc.version[0]}.{nvrtc.version[1]}, and the driver (CUDA {driver // 1000}."
            f"{driver % 1000 // 10}) is too old for its PTX: update NVRTC with `pip install -U nvidia-cuda-nvrtc`, or the driver"
        )
    return f"compute_{newest}", True
