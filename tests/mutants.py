"""Tuples with one part replaced: what a planner with a mistake in it could answer."""

from __future__ import annotations

import random
from typing import Any

ODD = [None, 0, 1, -1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, -(2**63), 2**70, 1.5, "x", b"", b"12345678", (), (1,)]
ODD += [(1, 1, 1), [], {}, object]


def mutated(rng: random.Random, thing: Any) -> Any:
    """The thing with one part, somewhere inside, replaced, dropped or doubled."""
    if type(thing) is not tuple or not thing or rng.random() < 0.15:
        return rng.choice(ODD)
    i = rng.randrange(len(thing))
    part = rng.choice([(), (thing[i], thing[i]), *[(mutated(rng, thing[i]),)] * 3])
    return (*thing[:i], *part, *thing[i + 1 :])
