"""AdamW's step as a case of the harness: parameters, gradients and states in, parameters and states out.

An optimizer is no op, so no module of ``tkjit.ops`` brings these; its peers are in peers.py. Nothing here is differentiated,
and there is no small call for host times.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import tkjit
from tkjit.testing import DTYPE_NAMES, BenchCase, op_cases

NAME = "adamw"
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
#: So many that 1 - beta^step doesn't cancel in the float32 that some compute it in.
STEPS_BEFORE = 999

#: GPT-2's of 24 layers: 292 tensors, 355 million parameters.
GPT2_MEDIUM = (
    (50257, 1024), (1024, 1024),
    *((1024,), (1024,), (1024, 3072), (3072,), (1024, 1024), (1024,),
      (1024,), (1024,), (1024, 4096), (4096,), (4096, 1024), (1024,)) * 24,
    (1024,), (1024,),
)  # fmt: skip
#: 8 million parameters, so that launches count.
SMALL = ((8192,),) * 1024


def by_role(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
    """Parameters, gradients, exp_avg and exp_avg_sq, which lie one behind the other."""
    many = len(tensors) // 4
    return tuple(list(tensors[at : at + many]) for at in range(0, len(tensors), many))


def reference(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """torch's formulas, computed in float32 at least and rounded once; the inputs stay as they are."""
    (beta1, beta2), lr, step = SETTINGS["betas"], SETTINGS["lr"], STEPS_BEFORE + 1
    made: list[tuple[torch.Tensor, ...]] = []
    for given in zip(*by_role(tensors), strict=True):
        p, g, m, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in given)
        m = m + (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        scaled = m / ((v / (1 - beta2**step)).sqrt() + SETTINGS["eps"])
        p = p * (1 - lr * SETTINGS["weight_decay"]) - lr / (1 - beta1**step) * scaled
        made.append((p.to(given[0].dtype), m.to(given[2].dtype), v.to(given[3].dtype)))
    return tuple(itertools.chain(*zip(*made, strict=True)))


def _tensors(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, states: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    def random(scale: float, of: torch.dtype) -> list[torch.Tensor]:
        return [(torch.randn(shape, device=device) * scale).to(of) for shape in shapes]

    squares = [(1e-6 * (0.5 + torch.rand(shape, device=device))).to(states) for shape in shapes]
    return (*random(0.02, dtype), *random(1e-3, dtype), *random(1e-3, states), *squares)


def case(group: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, states: torch.dtype) -> BenchCase:
    many = sum(map(math.prod, shapes))
    apart = f", {DTYPE_NAMES[states]} states" if states != dtype else ""
    return BenchCase(
        label=f"{group}{apart} {DTYPE_NAMES[dtype]}",
        group=group + apart,
        x=len(shapes),
        dtype=dtype,
        make=functools.partial(_tensors, shapes, dtype, states),
        # p, g, m, v are read; p, m, v are written.
        forward_bytes=many * (3 * dtype.itemsize + 4 * states.itemsize),
        backward_bytes=0,
        grad_of=(),
    )


def _bench() -> Iterator[BenchCase]:
    for group, shapes in (("GPT-2 medium", GPT2_MEDIUM), ("small", SMALL)):
        for dtype, states in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.bfloat16),
        ):
            yield case(group, shapes, dtype, states)


CASES = op_cases(
    name=NAME, public=tkjit.optim.AdamW, reference=reference, inputs=lambda device, dtype: (), bench=_bench(), dtypes=()
)
