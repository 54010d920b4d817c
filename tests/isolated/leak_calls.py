"""Calls keep no memory: hits, misses, errors of the planner, errors of a plan, and the slow way."""

import sys

import torch

from memory import resident_kib, room_kib
from tkjit import _core

CALLS = 20_000
ROOM_KIB = room_kib(512)


def made(*shape: int) -> tuple:
    return ((shape, (1,) * len(shape)), {"dtype": torch.float32})


def fails(scalars: tuple, tensors: tuple) -> tuple:
    raise ValueError("no plan")


x = torch.zeros(4, 4)
hit = _core.Planned(lambda scalars, tensors: (0, (made(2), 0, ~0), (made(64),), ()))
miss = _core.Planned(lambda scalars, tensors: (0, (made(2), made(3)), (made(64),), ()), 4)
no_plan = _core.Planned(fails)
bad_plan = _core.Planned(lambda scalars, tensors: (0, (0, made(2)), (made(3),), ((None, 0, 0, 0), (None, 77, 0, 0))))
slow = _core.Planned(fails)
slow.autograd = slow.slow = lambda *args: args

serial = iter(range(10**9))


def expect(error: type[Exception], call, *args) -> None:
    try:
        call(*args)
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


WAYS = {
    "hit": lambda: hit.raw(x, 1, 2.0, None, True, torch.float32),
    "miss": lambda: miss.raw(x, next(serial), object()),
    "error of the planner": lambda: expect(ValueError, no_plan.raw, x),
    "error of the plan": lambda: expect(ValueError, bad_plan.raw, x, object()),
    "error of the output": lambda: expect(OverflowError, hit.raw, x, 2**70),
    "slow way": lambda: slow.call(x, 1, object()),
    "description": lambda: _core.describe(x),
    "no description": lambda: expect(RuntimeError, _core.describe, None),
    "statistics": _core.stats,
    "digest": lambda: _core.sha256(b"x" * 1000),
}

ill = []
for name, way in WAYS.items():
    for _ in range(CALLS // 10):
        way()
    blocks, kib = sys.getallocatedblocks(), resident_kib()
    for _ in range(CALLS):
        way()
    blocks, kib = sys.getallocatedblocks() - blocks, resident_kib() - kib
    # One object of 64 bytes kept by each call would be 20,000 blocks and 1250 KiB.
    if blocks > CALLS // 100 or kib > ROOM_KIB:
        ill.append((name, blocks, kib))
assert not ill, ill
