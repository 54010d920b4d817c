"""Kernels keep no memory when they are gone: never compiled, read from the disk, damaged, compiled, failed."""

import gc
import sys
import tempfile
from pathlib import Path

from engine import ensure, entry_path, fresh_source, kernel
from memory import resident_kib, room_kib
from tkjit import CompileError

ROOM_KIB = room_kib(256)

folder = tempfile.mkdtemp()
source = fresh_source()
whole = kernel(source)
ensure(whole, folder)
spoilt = kernel(fresh_source())
entry_path(folder, spoilt.key).parent.mkdir(exist_ok=True)
entry_path(folder, spoilt.key).write_bytes(entry_path(folder, whole.key).read_bytes())  # of another key


def never_compiled() -> None:
    kernel(source, headers=(("a.cuh", "text"),))


def from_disk() -> None:
    k = kernel(source, key=whole.key)
    assert ensure(k, folder, compile=False) == "disk"
    assert k.image and k.log and k.lowered_name and k.facts and ensure(k, folder) == "memory"


def damaged() -> None:
    assert ensure(kernel(source, key=spoilt.key), folder, compile=False) == "nowhere"


def wrong() -> None:
    try:
        kernel(source, headers=((1, 2),)).ensure((folder,), folder, False, False, 0)
    except TypeError:
        return
    raise AssertionError("no TypeError")


def compiled() -> None:
    Path(entry_path(folder, whole.key)).unlink()
    assert ensure(kernel(source, key=whole.key), folder) == "nvrtc"


def failed() -> None:
    try:
        ensure(kernel("int x = nowhere;"), folder)
    except CompileError:
        return
    raise AssertionError("no CompileError")


ill = []
for way, count, room in (
    (never_compiled, 2000, ROOM_KIB),
    (from_disk, 2000, ROOM_KIB),
    (damaged, 2000, ROOM_KIB),
    (wrong, 2000, ROOM_KIB),
    (compiled, 60, 8192),  # NVRTC's own memory settles late; a kernel with its log takes 8 KiB
    (failed, 60, 8192),
):
    for _ in range(count // 4):
        way()
    gc.collect()
    blocks, kib = sys.getallocatedblocks(), resident_kib()
    for _ in range(count):
        way()
    gc.collect()
    blocks, kib = sys.getallocatedblocks() - blocks, resident_kib() - kib
    if blocks > 64 or kib > room:
        ill.append((way.__name__, blocks, kib))
assert not ill, ill
