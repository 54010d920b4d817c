"""The cache of compiled kernels: where it lies, what is in it, how large it may grow.

``python -m tkjit cache ls|verify|prune|export`` calls the functions below. The format of an entry is csrc/cubin_cache.c's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import _core, _env

MEMO = "nvrtc.json"  # in a folder: which compiler its entries were made with; see _nvrtc.py

__all__ = ["Entry", "Folders", "clear_plans", "entries", "explain", "export", "folders", "prune", "stats", "verify"]


# --- Where it lies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folders:
    """The folders in use.

    Attributes:
        home: The one that is written to, or None: compiled kernels live in memory only.
        all: All that are looked through, ``home`` first.
        refused: Folders that are not used, each with the reason.
    """

    home: str | None
    all: tuple[str, ...]
    refused: tuple[tuple[str, str], ...] = ()


def _wanted() -> tuple[str, ...]:
    """The folders that the environment asks for; none where there is no home."""
    chosen = _env.get("TKJIT_CACHE_DIR")
    if chosen:
        return tuple(os.path.abspath(part) for part in chosen.split(":") if part)
    base = os.environ.get("XDG_CACHE_HOME")
    if base and os.path.isabs(base):
        return (os.path.join(base, "tkjit"),)
    home = os.environ.get("HOME")
    return (os.path.join(home, ".cache", "tkjit"),) if home and os.path.isabs(home) else ()


def _distrust(path: str) -> str | None:
    """Why a folder's kernels must not be run; None where they may."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if _env.flag("TKJIT_CACHE_TRUST"):
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (uid {status.st_uid}); TKJIT_CACHE_TRUST=1 uses it all the same"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to it; TKJIT_CACHE_TRUST=1 uses it all the same"
    return None


def _open_home(path: str) -> str | None:
    """Make the folder that is written to; returns what is wrong with it, or None."""
    try:
        if not os.path.isdir(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.makedirs(path, mode=0o700, exist_ok=True)
        wrong = _distrust(path)
        if wrong:
            return wrong
        os.makedirs(os.path.join(path, "tmp"), mode=0o777 if _env.flag("TKJIT_CACHE_TRUST") else 0o700, exist_ok=True)
        if not os.access(os.path.join(path, "tmp"), os.W_OK | os.X_OK):
            return "it cannot be written to"
    except OSError as error:
        return error.strerror or str(error)
    return None


def _choose(wanted: tuple[str, ...]) -> Folders:
    home, usable, refused = None, [], []
    for path in wanted:
        wrong = _open_home(path) if home is None else None
        if home is None and wrong is None:
            home = path
            usable.append(path)
            continue
        try:  # not a home: may still be read
            wrong_to_read = _distrust(path)
        except OSError as error:
            wrong_to_read = error.strerror or str(error)
        if wrong_to_read is None:
            usable.append(path)
        reason = wrong or wrong_to_read
        if reason:
            refused.append((path, reason))
    ordered = ([home] if home else []) + [path for path in usable if path != home]
    return Folders(home, tuple(ordered), tuple(refused))


_lock = threading.Lock()
_chosen: dict[tuple, Folders] = {}
_warned: set[str] = set()


def folders() -> Folders:
    """The folders in use now; warns once where none can be written to."""
    wanted = _wanted()
    key = (wanted, _env.get("TKJIT_CACHE_TRUST"), os.getpid())
    found = _chosen.get(key)
    if found is None:
        with _lock:
            found = _chosen.get(key) or _choose(wanted)
            _chosen[key] = found
        if found.home is None:
            reasons = "; ".join(f"{path}: {reason}" for path, reason in found.refused) or "HOME is not set"
            _tell_once(f"tkjit keeps compiled kernels in memory only, since it has no folder for them ({reasons})")
    return found


def _tell_once(message: str) -> None:
    """One RuntimeWarning for each message."""
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    emit = warnings.warn
    emit(message, RuntimeWarning, stacklevel=3)


# --- What is in it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A file of the cache. ``meta`` is None where the file is damaged."""

    path: Path
    size: int
    used: float
    meta: dict[str, str] | None


def _files(folder: str) -> Iterator[Path]:
    yield from sorted(Path(folder).glob("[0-9a-f][0-9a-f]/*.tkc"))


def entries(folder: str | None = None) -> list[Entry]:
    """The entries of a folder, or of all folders in use, least recently used first."""
    found = []
    for place in (folder,) if folder else folders().all:
        for path in _files(place):
            try:
                status = path.lstat()
            except FileNotFoundError:  # another process has just removed it
                continue
            entry = _core.read_entry(os.fspath(path))
            meta = entry and dict(line.partition(": ")[::2] for line in entry[0].split("\n") if line)
            found.append(Entry(path, status.st_size, status.st_mtime, meta))
    return sorted(found, key=lambda entry: entry.used)


def verify(remove: bool = True) -> tuple[int, list[Path]]:
    """Check every entry's digest. Returns how many are whole, and the damaged ones, removed from the home folder."""
    home = folders().home
    found = entries()
    damaged = [entry.path for entry in found if entry.meta is None]
    for path in damaged:
        if remove and home and path.is_relative_to(home):
            _discard(path)
    return len(found) - len(damaged), damaged


def _discard(path: Path) -> None:
    try:
        path.unlink()
    except IsADirectoryError:
        with contextlib.suppress(OSError):
            path.rmdir()
    except OSError:
        pass


_STALE_S = 60  # nothing takes a minute to write


def _sweep(home: str) -> None:
    """Remove what killed processes left half written. By age: a process number says nothing across containers and hosts."""
    try:
        left = list(os.scandir(os.path.join(home, "tmp")))
    except OSError:
        return
    for file in left:
        with contextlib.suppress(OSError):  # another process was first, or it is none of ours
            if time.time() - file.stat(follow_symlinks=False).st_mtime > _STALE_S:
                os.unlink(file.path)


def prune(max_bytes: int | None = None) -> list[Path]:
    """Remove the least recently used entries of the home folder until it is small enough, and leftovers of killed processes.

    Args:
        max_bytes: Size to come down to; by default TKJIT_CACHE_MAX_MB.

    Returns:
        The files removed.
    """
    limit = _env.number("TKJIT_CACHE_MAX_MB", 1024) << 20 if max_bytes is None else max_bytes
    if limit < 0:
        raise ValueError(f"max_bytes must not be negative: {limit}")
    home = folders().home
    if home is None:
        return []
    _sweep(home)
    aged = []
    for path in _files(home):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        aged.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in aged)
    removed = []
    for _, size, path in sorted(aged):
        if total <= limit:
            break
        _discard(path)
        removed.append(path)
        total -= size
    return removed


def export(target: str) -> int:
    """Copy every whole entry into a folder, to be read as a later part of TKJIT_CACHE_DIR. Returns how many.

    The kernels are found there by the same version of tkjit with the same version of NVRTC, or with no NVRTC at all; those for the
    CPU by the same C++ compiler.
    """
    from . import _nvrtc

    if not target:
        raise ValueError("the folder to export to has no name")
    if os.path.abspath(target) in folders().all:
        raise ValueError(f"{target} is the cache itself")
    count, gpu = 0, False
    os.makedirs(target, mode=0o755, exist_ok=True)  # whatever the umask: a folder that others can write to is not used
    for entry in entries():
        if entry.meta is not None:
            place = Path(target, entry.path.parent.name)
            place.mkdir(mode=0o755, exist_ok=True)
            shutil.copy2(entry.path, place / entry.path.name)
            count += 1
            gpu = gpu or "nvrtc" in entry.meta
    if gpu:
        _nvrtc.write_memo(_nvrtc.identify(), os.path.join(target, MEMO))
    return count


# --- After a compile -------------------------------------------------------------------------------------------------

_PRUNE_EVERY = 16  # compiles: a look at every file of the folder costs a few milliseconds
_since_prune = -1


def after_compile(failed: int) -> None:
    """Keep the home folder small; say once if it could not be written (``failed`` is an errno)."""
    global _since_prune
    if failed:
        home = folders().home
        _tell_once(
            f"tkjit could not keep a compiled kernel in {home}: {os.strerror(failed)} ({errno.errorcode.get(failed)})"
        )
        return
    _since_prune = (_since_prune + 1) % _PRUNE_EVERY
    if _since_prune == 0:
        try:
            prune()
        except ValueError as error:  # the user's call is not the place to fail for that
            _tell_once(f"tkjit does not keep its cache small: {error}")


# --- Counters --------------------------------------------------------------------------------------------------------


def stats() -> dict[str, int]:
    """Counters of this process.

    ``compiles`` kernels compiled, ``disk_hits`` read from the cache, ``damaged`` files found damaged, ``published`` written,
    ``publish_failures`` not written, ``lock_waits`` waits for another process; ``plan_hits``, ``plan_misses`` and
    ``plan_evictions`` of the launch plans; ``launches`` of kernels.
    """
    return _core.stats()


def explain(op: str | None = None) -> list[str]:
    """Why calls were planned anew, oldest first: for each miss, what the call was and in what it differs from the nearest before.

    Args:
        op: Only this op, such as ``"softmax"``.
    """
    from . import _plan

    return _plan.explain(op)


def clear_plans() -> None:
    """Forget every launch plan of the process; the compiled kernels stay."""
    from . import _plan

    _plan.clear()
