"""The module can be dropped and imported again, and its state goes with it."""

import gc
import os
import resource
import sys
import weakref

import torch

import tkjit._core

# AddressSanitizer keeps what was freed for a while: 200 modules' worth.
ROOM_KIB = 8192 if "libasan" in os.environ.get("LD_PRELOAD", "") else 2048


def resident_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def once() -> weakref.ref:
    sys.modules.pop("tkjit._core")
    vars(tkjit).pop("_core", None)
    import tkjit._core as core

    x = torch.zeros(3)
    op = core.Planned(lambda scalars, tensors: (0, (0,), (), ()))
    assert op.raw(x) is x and core.stats()["plan_misses"] == 1  # a state of its own
    assert core.describe(x)[5] == (3,)
    return weakref.ref(core.Planned)


kept = [once() for _ in range(20)]
gc.collect()
assert sum(ref() is not None for ref in kept) <= 1, "old modules stay"
blocks, kib = sys.getallocatedblocks(), resident_kib()
for _ in range(200):
    once()
    gc.collect(0)
gc.collect()
blocks, kib = sys.getallocatedblocks() - blocks, resident_kib() - kib
assert blocks < 500 and kib < ROOM_KIB, (blocks, kib)
