"""Run by test_hostile.py with a hostile build: lets the n-th visit of a place fail, for every n there is.

    hostile_build.py <place> <scenario>

Whatever fails, an operation gives its right result or raises MemoryError or tkjit.Error, the cache holds whole entries only, and
the same operation works at the next attempt.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import tkjit
from engine import entry_path, facts, fresh_source, instance
from tkjit import _core, _nvrtc, _template, cache

PLACES = {"alloc": 0, "read": 1, "write": 2, "nvrtc": 3}
MOST = 400  # visits of a place in one scenario: a bound against going on for ever

Operation = Callable[[], None]


def compile_cold(n: int) -> Operation:
    """A kernel that no cache has."""
    source = fresh_source()

    def run() -> None:
        k = instance(source, 5).compiled("sm_90a")
        assert k.lowered_name == "_Z4fillILi5EEvPf" and k.image[:4] == b"\x7fELF" and k.facts["registers"] > 0

    return run


def read_warm(n: int) -> Operation:
    """A kernel that the disk has."""
    source = fresh_source()
    known = facts(instance(source).compiled("sm_90a"))

    def run() -> None:
        _template._kernels.clear()
        assert facts(instance(source).compiled("sm_90a")) == known

    return run


def replace_damaged(n: int) -> Operation:
    """A kernel whose entry is damaged."""
    source = fresh_source()
    k = instance(source).compiled("sm_90a")
    path = entry_path(os.environ["TKJIT_CACHE_DIR"], k.key)

    def run() -> None:
        if path.exists():
            path.write_bytes(path.read_bytes()[:-1])
        _template._kernels.clear()
        assert facts(instance(source).compiled("sm_90a")) == facts(k)

    return run


def broken_source(n: int) -> Operation:
    """A kernel that does not compile: the error itself must come through."""

    def run() -> None:
        try:
            instance("int x = nowhere;").compiled("sm_90a")
        except tkjit.CompileError as error:
            if "nowhere" not in error.log:  # NVRTC itself was made to fail
                raise
        else:
            raise AssertionError("it compiled")

    return run


def with_headers(n: int) -> Operation:
    """A kernel with headers, that many threads could ask for."""
    source = '#include "tk/tk.cuh"\n' + fresh_source()

    def run() -> None:
        assert instance(source).compiled("sm_90a").image

    return run


def look_after_cache(n: int) -> Operation:
    """ls, verify and prune."""
    if n == 1:
        instance().compiled("sm_90a")

    def run() -> None:
        whole = len(cache.entries())
        assert whole >= 1
        cache.verify(remove=False)
        cache.prune()
        assert len(cache.entries()) == whole

    return run


def plan_calls(n: int) -> Operation:
    """Misses, hits and evictions, with a key that needs the heap."""
    import torch

    x = torch.zeros((1,) * 60)

    def run() -> None:
        made = (((2,), (1,)), {"dtype": torch.float32})
        op = _core.Planned(lambda scalars, tensors: (0, (made, 0), (made,), ((None, 0, 0, 0),) * scalars[1]), 2)
        for i in (0, 0, 1, 2, 0):
            y = op.raw(*[x] * 1, 0, i + 10, *[x] * 20)
            assert y[1] is x and y[0].shape == (2,)
        assert op.size == 2

    return run


def use_torch_first(n: int) -> Operation:
    import torch

    x = torch.zeros(3)

    def run() -> None:
        assert _core.describe(x)[5] == (3,)

    return run


def open_first(n: int) -> Operation:
    def run() -> None:
        assert _nvrtc.open_library().version >= (12, 0)

    return run


# Scenarios of things that a process does once start anew in a child each time.
ONCE = {"use_torch_first": use_torch_first, "open_first": open_first}
SCENARIOS: dict[str, Callable[[int], Operation]] = {
    scenario.__name__: scenario
    for scenario in (
        compile_cold,
        read_warm,
        replace_damaged,
        broken_source,
        with_headers,
        look_after_cache,
        plan_calls,
    )
} | ONCE


def attempt(operation: Operation, place: int, n: int) -> tuple[bool, str]:
    """(whether the failure was reached, what came of it)"""
    _core.hostile(place, n)
    outcome = "ok"
    try:
        operation()
    except (MemoryError, tkjit.Error) as error:
        outcome = type(error).__name__
    return _core.hostile(place, 0) >= n, outcome


def check_cache() -> None:
    folder = Path(os.environ["TKJIT_CACHE_DIR"])
    damaged = [path for path in folder.glob("??/*.tkc") if _core.read_entry(str(path)) is None]
    assert not damaged, damaged
    assert not list((folder / "tmp").glob("*")), "leftovers"


def step(make: Callable[[int], Operation], place: int, n: int) -> tuple[bool, str]:
    operation = make(n)
    reached, outcome = attempt(operation, place, n)
    if make is not replace_damaged:  # whose damage stays where the failure came before the publish
        check_cache()
    operation()  # the second attempt works
    check_cache()
    return reached, outcome


def step_in_child(make: Callable[[int], Operation], place: int, n: int) -> tuple[bool, str]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            reached, outcome = step(make, place, n)
            os.write(write, f"{int(reached)} {outcome}".encode())
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0 and len(answer) == 2, (place, n, answer)
    return answer[0] == "1", answer[1]


def main(place: str, scenario: str) -> None:
    make = SCENARIOS[scenario]
    outcomes: list[str] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a publish that failed says so
        os.environ["TKJIT_CACHE_DIR"] = folder
        cache.folders()
        if scenario not in ONCE:
            instance().compiled("sm_90a")
        for n in range(1, MOST):
            reached, outcome = (step_in_child if scenario in ONCE else step)(make, PLACES[place], n)
            if not reached:
                assert outcome == "ok", f"failed without a failure: {outcome}"
                break
            outcomes.append(outcome)
        else:
            raise AssertionError(f"more than {MOST} visits")
    print(len(outcomes), *sorted(set(outcomes)))


if __name__ == "__main__":
    main(*sys.argv[1:])
