"""The module can be dropped and imported again, and its state goes with it."""

import gc
import sys
import weakref

import torch

import tkjit._core
from memory import resident_kib, room_kib


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
assert blocks < 500 and kib < room_kib(2048), (blocks, kib)
