"""Running a kernel of a test's own, on CPU tensors through the emulator or on a GPU: the same text, the same arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tkjit import _core
from tkjit._plan import Spec, plan, planned
from tkjit._template import Template

KERNELS = Path(__file__).parent / "emulator"


@contextmanager
def emulating(arch: str | None = None, check: bool = True, seed: int | None = None) -> Iterator[None]:
    """What the emulator's environment variables say within the block; the seed is by default the run's, TKJIT_TEST_SEED."""
    chosen = os.environ.get("TKJIT_TEST_SEED", "0") if seed is None else str(seed)
    wanted = {"TKJIT_EMULATE": arch, "TKJIT_EMULATE_CHECK": "1" if check else "0", "TKJIT_EMULATE_SEED": chosen}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def text(name: str) -> str:
    """The kernels of tests/emulator/<name>.cuh."""
    return (KERNELS / f"{name}.cuh").read_text()


def run(
    source: str,
    expression: str,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    also: Sequence[Tensor] = (),
    smem: int = 0,
    cluster: int | Sequence[int] = 1,
    arch: str = "sm_90a",
    check: bool = True,
    seed: int | None = None,
    name: str = "test",
) -> None:
    """Launch a kernel once, on the tensors' device; it writes into the tensors that it is given.

    Args:
        source: CUDA text; may include the package's templates.
        expression: The kernel, such as ``"copy<float, 128>"``.
        args: The kernel's arguments: tensors, scalars of tkjit._plan (``i32(4)``), or functions of the list of the tensors'
            specs that return an argument (``lambda specs: tensor_map(specs[0], ...)``).
        also: Tensors that the kernel doesn't take itself, but whose specs the functions are given, behind the others.
        smem: Dynamic shared memory in bytes.
        arch: For CPU tensors: the architecture that is emulated.
        check: For CPU tensors: with all checks; ``seed`` is that of the schedule.
    """
    instance = Template.from_source(source, name)
    tensors = [*(arg for arg in args if isinstance(arg, Tensor)), *also]

    def planner(*specs: Spec) -> Any:
        at = iter(specs)
        given = [next(at) if isinstance(arg, Tensor) else _made(arg, specs) for arg in args]
        kernel = instance.kernel(expression)
        return plan(specs[0], kernel.launch(grid=grid, block=block, cluster=cluster, smem=smem, args=given))

    with emulating(arch, check, seed):
        planned(planner)(*tensors)


def _made(arg: Any, specs: Sequence[Spec]) -> Any:
    return arg(list(specs)) if isinstance(arg, Callable) else arg


def seeded(seed: int) -> None:
    """Another order of the threads for kernels that are planned already."""
    _core.emulator_seed(seed)
