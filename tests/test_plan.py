"""Launch plans without a GPU: the key, the cache, the planner's answer, and what a planner is written with.

Plans without steps run on CPU tensors; launches go to a driver of the tests' own (fake_cuda.c) that says what it was given.
"""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import ensure, fresh_source, kernel, run
from memory import resident_kib
from mutants import mutated
from tkjit import DeviceError, _core, _plan, _template, cache

ROOT = Path(__file__).resolve().parent.parent


def made(*shape: int, dtype: torch.dtype = torch.float32) -> tuple:
    """An output, as a planner's answer has it: arguments of torch.empty_strided."""
    return ((shape, _plan._contiguous(shape)), {"dtype": dtype})


NEW = (0, (made(2),), (), ())


class Op:
    """A Planned that counts what its planner was asked; by default its plan is one new tensor."""

    def __init__(self, answer: Any = NEW, limit: int = 1024):
        self.asked: list[tuple[tuple, tuple]] = []
        self.answer = answer
        self.core = _core.Planned(self.plan, limit)

    def plan(self, scalars: tuple, tensors: tuple) -> tuple:
        self.asked.append((scalars, tensors))
        return self.answer(scalars, tensors) if callable(self.answer) else self.answer

    def __call__(self, *args: Any) -> Any:
        return self.core.raw(*args)

    def distinct(self, *calls: tuple) -> int:
        """How many plans these calls need."""
        for call in calls:
            self(*call)
            self(*call)
        return len(self.asked)


# --- The key ----------------------------------------------------------------------------------------------------------

X = torch.zeros(64, 64)

TENSORS = {
    "dtype": X.to(torch.int32),
    "another dtype of the size": X.view(torch.int32),
    "shape": X[:32],
    "rank": X[None],
    "order of the shape": torch.zeros(32, 128),
    "strides": X.t(),
    "a stride of a dim of one": torch.zeros(64, 64).as_strided((64, 64, 1), (64, 1, 7)),
    "expanded": X[:1].expand(64, 64),
    "alignment": torch.zeros(64 * 64 + 1)[1:].view(64, 64),
    "0-d": torch.zeros(()),
    "empty": torch.zeros(0, 64),
    "empty otherwise": torch.zeros(64, 0),
}


@pytest.mark.parametrize("other", TENSORS.values(), ids=TENSORS)
def test_the_key_sees_a_tensors(other: torch.Tensor) -> None:
    assert Op().distinct((X,), (other,)) == 2


def test_every_alignment_up_to_16_is_a_key_of_its_own() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    assert memory.data_ptr() % 64 == 0
    op = Op()
    for offset in range(64):
        op(memory[offset : offset + 8])
    assert len(op.asked) == 5
    assert sorted({tensors[0][7] for _, tensors in op.asked}) == [1, 2, 4, 8, 16]
    for offset, align in ((0, 16), (1, 1), (2, 2), (4, 4), (8, 8), (24, 8), (48, 16)):
        assert _core.describe(memory[offset : offset + 8])[7] == align


def test_the_key_does_not_see_the_address_nor_the_values() -> None:
    others = [(X.clone(),), (X + 1,), (torch.zeros(65 * 64)[64:].view(64, 64),), (X.clone().requires_grad_(),)]
    assert Op().distinct((X,), *others, (torch.nn.Parameter(X.clone()),)) == 1


def test_the_key_sees_which_argument_is_which() -> None:
    y = X[:32]
    assert Op().distinct((X, y), (y, X), (X, y, X), (X,), (y,)) == 5


SCALARS = [
    0,
    1,
    -1,
    2**62,
    -(2**62),
    True,
    False,
    0.0,
    -0.0,
    1.0,
    math.nan,
    math.inf,
    5e-324,
    None,
    torch.float32,
    torch.int32,
]


def test_the_key_sees_type_and_value_of_a_scalar() -> None:
    assert Op().distinct(*((X, scalar) for scalar in SCALARS)) == len(SCALARS)


def test_equal_scalars_are_one_key_whatever_object_they_are() -> None:
    big = 10**15
    assert Op().distinct((big + 1,), (int("1000000000000001"),)) == 1
    assert Op().distinct((0.1 + 0.2,), (float("0.30000000000000004"),)) == 1


def test_the_planner_is_given_the_scalars_as_they_are() -> None:
    op = Op()
    for scalar in SCALARS:
        op(scalar)
        assert op.asked[-1][0][0] is scalar and op.asked[-1][1] == (None,)


def test_the_planner_is_given_none_for_a_tensor_and_its_description() -> None:
    op = Op()
    op(X.t()[3:], 5)
    assert op.asked == [((None, 5), ((2, 32, 1, 1, 0, (61, 64), (1, 64), 4), None))]


def test_an_integer_beyond_64_bits_is_an_error() -> None:
    op = Op()
    for scalar in (2**63, -(2**63) - 1, 10**30):
        with pytest.raises(OverflowError):
            op(X, scalar)
    assert op.asked == [] and op.core.size == 0


def test_an_object_that_a_key_names_stays_alive() -> None:
    class Thing:
        pass

    op = Op()
    thing = Thing()
    gone = weakref.ref(thing)
    op(thing)
    op.asked.clear()
    del thing
    gc.collect()
    assert gone() is not None  # else another object could come to lie at its address, and be taken for it
    op.core.clear()
    gc.collect()
    assert gone() is None


def test_a_key_longer_than_the_inline_buffer_works() -> None:
    deep = torch.zeros((1,) * 60)
    op = Op()
    for _ in range(3):
        op(*[deep] * 32)
    op(*[deep] * 31, X)
    assert len(op.asked) == 2 and op.core.hits == 2


def test_more_arguments_than_a_plan_has_room_for_are_an_error() -> None:
    with pytest.raises(TypeError, match="at most 32 arguments"):
        Op()(*range(33))
    assert Op()(*range(32)).shape == (2,)


def test_a_call_without_arguments_has_a_plan_too() -> None:
    assert Op().distinct(()) == 1


# --- The cache --------------------------------------------------------------------------------------------------------


def test_hits_and_misses_are_counted() -> None:
    op = Op()
    before = cache.stats()
    for n in (1, 2, 1, 1, 3):
        op(n)
    after = cache.stats()
    assert (op.core.hits, op.core.misses, op.core.evictions, op.core.size) == (2, 3, 0, 3)
    assert after["plan_hits"] - before["plan_hits"] == 2 and after["plan_misses"] - before["plan_misses"] == 3


def test_the_least_recently_used_plan_goes_first() -> None:
    op = Op(limit=3)
    for n in (1, 2, 3, 1, 4):  # 2 goes
        op(n)
    assert (op.core.size, op.core.evictions) == (3, 1)
    asked = len(op.asked)
    for n in (1, 3, 4):
        op(n)
    assert len(op.asked) == asked
    op(2)  # 1 goes
    op(3)
    assert len(op.asked) == asked + 1
    op(1)
    assert len(op.asked) == asked + 2
    assert op.core.size == 3


@pytest.mark.parametrize("limit", [1, 2, 3, 16, 17, 100])
def test_the_cache_behaves_as_a_list_by_last_use(limit: int) -> None:
    rng = random.Random(limit)
    op, model = Op(limit=limit), []
    for _ in range(2000):
        n = rng.randrange(int(limit * 1.5) + 2)
        asked = len(op.asked)
        op(n)
        assert (len(op.asked) == asked) == (n in model)
        model = [*(m for m in model if m != n), n][-limit:]
        assert op.core.size == len(model)


def test_clear_forgets_every_plan() -> None:
    op = Op()
    for n in range(100):
        op(n)
    op.core.clear()
    op.core.clear()
    assert op.core.size == 0
    op(5)
    assert len(op.asked) == 101


@pytest.mark.parametrize("wrong", [(None,), (5,), (print, 0), (print, -1), (print, "x"), ()], ids=repr)
def test_a_planned_made_of_the_wrong_things_is_refused(wrong: tuple) -> None:
    with pytest.raises(TypeError):
        _core.Planned(*wrong)


# --- Errors of the planner --------------------------------------------------------------------------------------------


def test_the_planners_error_comes_through_and_is_not_cached() -> None:
    class Special(Exception):
        pass

    error = Special("shapes differ")

    def answer(scalars: tuple, tensors: tuple) -> tuple:
        if len(op.asked) < 3:
            raise error
        return (0, (0,), (), ())

    op = Op(answer)
    for _ in range(2):
        with pytest.raises(Special) as caught:
            op(X)
        assert caught.value is error
    assert op.core.size == 0
    assert op(X) is X and op(X) is X
    assert (op.core.misses, op.core.hits, op.core.size) == (3, 1, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, StopIteration])
def test_any_exception_comes_through(error: type[BaseException]) -> None:
    def answer(scalars: tuple, tensors: tuple) -> tuple:
        raise error

    with pytest.raises(error):
        Op(answer)(X)


# --- Outputs ----------------------------------------------------------------------------------------------------------


def test_one_output_comes_as_it_is_and_several_as_a_tuple() -> None:
    one = Op((0, (made(3, dtype=torch.float16),), (), ()))(X)
    assert type(one) is torch.Tensor and one.shape == (3,) and one.dtype == torch.float16
    two = Op((0, (made(3), made(4, 5)), (made(100),), ()))(X)
    assert type(two) is tuple and [tuple(t.shape) for t in two] == [(3,), (4, 5)]


def test_outputs_are_new_tensors_each_time_with_the_strides_asked_for() -> None:
    op = Op((0, ((((2, 3), (1, 2)), {"dtype": torch.float64}),), (), ()))
    first, second = op(X), op(X)
    assert first is not second and first.data_ptr() != second.data_ptr()
    assert first.stride() == (1, 2) and not first.requires_grad


def test_an_argument_can_be_the_output() -> None:
    y = X.clone()
    assert Op((0, (1,), (), ()))(X, y) is y
    both = Op((0, (1, made(2), 0), (), ()))(X, y)
    assert both[0] is y and both[2] is X
    assert Op((0, (0, 0), (), ()))(X) == (X, X)


def test_an_output_can_be_made_like_an_argument() -> None:
    x = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    y = Op((0, (~1,), (), ()))(X, x)
    assert y is not x and (y.shape, y.dtype, y.stride(), y.requires_grad) == (x.shape, x.dtype, x.stride(), False)
    assert y.data_ptr() != x.data_ptr()
    with pytest.raises(TypeError):
        Op((0, (~1,), (), ()))(X, "text")


def test_a_scalar_argument_returned_as_output_is_no_crash() -> None:
    assert Op((0, (1,), (), ()))(X, "text") == "text"


def test_torchs_error_on_an_output_comes_through() -> None:
    with pytest.raises(RuntimeError, match="negative"):
        Op((0, ((((-1,), (1,)), {"dtype": torch.float32}),), (), ()))(X)
    with pytest.raises(TypeError):
        Op((0, (((2,), {"nothing": 1}),), (), ()))(X)


def test_no_reference_is_kept_or_lost() -> None:
    y, scalar = X.clone(), object()
    op = Op((0, (0, made(2), 1), (made(3),), ()))
    op(X, y, scalar)  # the plan keeps the scalar from here on
    counts = [sys.getrefcount(thing) for thing in (X, y, scalar, torch.float32, op.answer)]
    one = torch.zeros(2)
    counts_of_one = sys.getrefcount(one)
    results = [op(X, y, scalar) for _ in range(100)]
    assert [sys.getrefcount(thing) for thing in (X, y)] == [counts[0] + 100, counts[1] + 100]
    new = results[0][1]
    del results
    assert sys.getrefcount(new) == counts_of_one
    assert [sys.getrefcount(thing) for thing in (X, y, scalar, torch.float32, op.answer)] == counts
    held = sys.getrefcount(scalar)
    op.core.clear()
    let_go = sys.getrefcount(scalar)
    assert let_go == held - 1


def test_an_error_keeps_no_reference() -> None:
    y, scalar = X.clone(), object()
    wrong = (0, (0,), (), ("no step",))
    op = Op(wrong)
    counts = [sys.getrefcount(thing) for thing in (y, scalar)]
    for _ in range(100):
        with pytest.raises((TypeError, SystemError, ValueError)):
            op(y, scalar)
    op.asked.clear()
    assert [sys.getrefcount(thing) for thing in (y, scalar)] == counts


# --- Answers that are no plans ----------------------------------------------------------------------------------------

MEMSET = (None, 0, 0, 0)

MALFORMED = {
    "nothing": None,
    "a number": 5,
    "a list": [0, (0,), (), ()],
    "too short": (0, (0,), ()),
    "too long": (0, (0,), (), (), ()),
    "no device": (None, (0,), (), ()),
    "a device beyond int": (2**40, (0,), (), ()),
    "no outputs": (0, (), (), ()),
    "outputs as a list": (0, [0], (), ()),
    "scratch as a list": (0, (0,), [made(1)], ()),
    "steps as a list": (0, (0,), (), [MEMSET]),
    "an output beyond the arguments": (0, (1,), (), ()),
    "an output like no argument": (0, (-2,), (), ()),
    "an output like an argument far away": (0, (-(2**40),), (), ()),
    "an output far beyond": (0, (2**40,), (), ()),
    "an output beyond 64 bits": (0, (2**70,), (), ()),
    "an output of text": (0, ("x",), (), ()),
    "an output of one part": (0, ((((2,), (1,)),),), (), ()),
    "an output of lists": (0, (([(2,), (1,)], {}),), (), ()),
    "an output without a dict": (0, ((((2,), (1,)), ()),), (), ()),
    "too many outputs": (0, (0,) * 33, (), ()),
    "too many buffers": (0, (0,) * 16, (made(1),) * 17, ()),
    "scratch of a number too large": (0, (0,), (7,), ()),
    "a step of nothing": (0, (0,), (), (None,)),
    "a step of text": (0, (0,), (), ("abcd",)),
    "an empty step": (0, (0,), (), ((),)),
    "a memset of no slot": (0, (0,), (), ((None, 2, 0, 0),)),
    "a memset of slot -1": (0, (0,), (), ((None, -1, 0, 0),)),
    "a memset of slot 2**31": (0, (0,), (), ((None, 2**31, 0, 0),)),
    "a memset of slot 2**32 - 1": (0, (0,), (), ((None, 2**32 - 1, 0, 0),)),
    "a memset of text": (0, (0,), (), ((None, "0", 0, 0),)),
    "a memset of a large value": (0, (0,), (), ((None, 0, 256, 0),)),
    "a memset of a length of text": (0, (0,), (), ((None, 0, 0, "0"),)),
    "a launch of no kernel": (0, (0,), (), ((None, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, b"", (), (), ()),)),
    "a launch of another object": (0, (0,), (), ((X, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, b"", (), (), ()),)),
    "a launch with a flat grid": (0, (0,), (), ((None, 1, 1, 1, 0, b"", (), (), ()),)),
}


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_plan_is_an_exception_and_not_cached(answer: Any) -> None:
    op = Op(answer)
    for _ in range(2):
        with pytest.raises((TypeError, ValueError, OverflowError, SystemError)):
            op(X)
    assert op.core.size == 0


def test_a_kernel_that_is_not_compiled_is_refused() -> None:
    launch = (kernel(fresh_source()), (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, b"", (), (), ())
    with pytest.raises(ValueError, match="before it was compiled"):
        Op((0, (0,), (), (launch,)))(X)


def test_mutated_plans_are_never_a_crash() -> None:
    rng = random.Random(5)
    # Device 99 is nobody's: a mutant that is a plan after all fails before it touches memory.
    whole = (99, (0, made(2)), (made(4),), ((None, 3, 0, 4), (None, 2, 255, 8)))
    raised = 0
    for _ in range(3000):
        answer = mutated(rng, whole)
        try:
            Op(answer)(X, 1)
        except Exception:
            raised += 1
    assert raised > 2000


# --- Planners that call back ------------------------------------------------------------------------------------------


def test_a_planner_may_call_the_op_itself() -> None:
    def answer(scalars: tuple, tensors: tuple) -> tuple:
        n = scalars[0]
        if n > 0:
            op(n - 1)
        return (0, (made(n + 1),), (), ())

    op = Op(answer, limit=4)
    assert op(20).shape == (21,)
    assert op.core.misses == 21 and op.core.size == 4
    assert op(0).shape == (1,)


def test_a_planner_may_plan_its_own_call() -> None:
    def answer(scalars: tuple, tensors: tuple) -> tuple:
        if len(op.asked) < 5:
            op(X)
        return (0, (made(len(op.asked)),), (), ())

    op = Op(answer)
    op(X)
    assert op.core.size == 1 and len(op.asked) == 5


def test_a_planner_may_clear_the_cache() -> None:
    def answer(scalars: tuple, tensors: tuple) -> tuple:
        op.core.clear()
        return (0, (made(1),), (), ())

    op = Op(answer)
    for n in range(5):
        op(n)
    assert op.core.size == 1


def test_an_object_that_calls_the_op_when_it_dies_does_no_harm() -> None:
    class Last:
        def __del__(self) -> None:
            op(X, len(op.asked))

    op = Op(limit=2)
    for _ in range(50):
        op(Last())
        op.asked.clear() if len(op.asked) > 1000 else None
    op.asked.clear()
    op.core.clear()
    assert op.core.size <= 2


def test_threads_that_plan_the_same_call_agree() -> None:
    inside = threading.Barrier(4, timeout=30)

    def answer(scalars: tuple, tensors: tuple) -> tuple:
        inside.wait()  # all four have missed
        return (0, (made(3),), (), ())

    op = Op(answer)
    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(op, X) for _ in range(4)]]
    assert [tuple(result.shape) for result in results] == [(3,)] * 4
    assert (op.core.size, op.core.misses) == (1, 4)
    assert op(X).shape == (3,) and op.core.hits == 1


def test_threads_that_evict_each_others_plans_do_no_harm() -> None:
    op = Op(lambda scalars, tensors: (0, (made(scalars[0] + 1),), (), ()), limit=3)

    def hammer(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(2000):
            n = rng.randrange(8)
            assert op(n).shape == (n + 1,)
            if rng.random() < 0.01:
                op.core.clear()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(hammer, seed) for seed in range(4)]:
            future.result()
    assert op.core.size <= 3


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_memory_levels_off_over_10000_distinct_shapes() -> None:
    core = _core.Planned(lambda scalars, tensors: (0, (made(2), made(3)), (made(4),), ()), 256)
    memory = torch.zeros(1)
    sizes = iter(range(1, 100_000))

    def call(count: int) -> None:
        for _ in range(count):
            core.raw(memory.as_strided((next(sizes), 1), (0, 1)), object(), *[None] * 24)

    call(2000)
    before = resident_kib()
    call(10_000)
    assert core.size == 256 and core.misses == 12_000
    assert resident_kib() - before < 2048  # a plan with its key takes 1.5 KiB


def test_a_planned_in_a_cycle_is_collected() -> None:
    class Planner:
        def __call__(self, scalars: tuple, tensors: tuple) -> tuple:
            return (0, (made(2),), (), ())

    planner = Planner()
    planner.core = _core.Planned(planner)  # type: ignore[attr-defined]
    planner.core.raw(X)  # type: ignore[attr-defined]
    gone = weakref.ref(planner)
    del planner
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("place", ["autograd", "slow", "an argument"])
def test_a_planned_that_holds_what_holds_it_is_collected(place: str) -> None:
    class Holder:
        def __call__(self, *args: Any) -> None: ...

    holder = Holder()
    holder.core = _core.Planned(lambda scalars, tensors: (0, (made(2),), (), ()))  # type: ignore[attr-defined]
    if place == "an argument":
        holder.core.raw(holder)  # type: ignore[attr-defined]
    else:
        setattr(holder.core, place, holder)  # type: ignore[attr-defined]
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


# --- What a planner is written with -----------------------------------------------------------------------------------


def spec(
    shape: tuple, strides: tuple | None = None, dtype: str = "float32", device: int = 0, argument: int = 0
) -> _plan.Spec:
    return _plan.Spec(dtype, shape, _plan._contiguous(shape) if strides is None else strides, device, 16, argument)


def test_a_spec_knows_its_size() -> None:
    s = spec((2, 3, 4), dtype="bfloat16")
    assert (s.ndim, s.numel, s.itemsize, s.is_contiguous) == (3, 24, 2, True)
    assert (spec(()).ndim, spec(()).numel) == (0, 1)


STRIDED = [X, X.t(), X[:1], X[:, :1], X[:, 1:], X[:0], X[:, :0], X[None], X.expand(3, 64, 64), X[0], X[0, 0], X[::2]]


@pytest.mark.parametrize("i", range(len(STRIDED)))
def test_a_spec_is_contiguous_where_torch_says_so(i: int) -> None:
    x = STRIDED[i]
    assert spec(tuple(x.shape), x.stride()).is_contiguous == x.is_contiguous()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3), (3, 0, 2), (1, 1)], ids=repr)
def test_outputs_have_torchs_contiguous_strides(shape: tuple) -> None:
    y = _plan.empty(shape, "float16", spec((1,), device=3))
    assert y.strides == torch.empty(shape).stride() and (y.device, y.align, y.argument, y.dtype) == (
        3,
        16,
        -1,
        "float16",
    )
    z = _plan.empty_like(spec(shape, dtype="float64", argument=4))
    assert (z.shape, z.dtype, z.argument) == (shape, "float64", -1) and z != _plan.empty_like(z)
    assert _plan.empty_like(z, "float32").dtype == "float32"


DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
]
DTYPES += [torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex32, torch.complex64, torch.complex128]
DTYPES += [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_spec_names_torchs_dtype(dtype: torch.dtype) -> None:
    code, bits, lanes, *rest = _core.describe(torch.empty(2, dtype=dtype))
    view = (code, bits, lanes, _plan._CUDA, *rest[1:])
    s = _plan._spec(view, 0)
    assert f"torch.{s.dtype}" == str(dtype) and s.itemsize == dtype.itemsize


@pytest.mark.parametrize(("dim", "ndim", "expected"), [(0, 0, 0), (-1, 0, 0), (-1, 3, 2), (2, 3, 2), (-3, 3, 0)])
def test_a_dimension_counts_from_the_end_too(dim: int, ndim: int, expected: int) -> None:
    assert _plan.canonical(dim, ndim) == expected


@pytest.mark.parametrize(("dim", "ndim"), [(1, 0), (-2, 0), (3, 3), (-4, 3)])
def test_a_dimension_out_of_range_is_torchs_error(dim: int, ndim: int) -> None:
    with pytest.raises(IndexError) as theirs:
        torch.zeros((1,) * ndim).sum(dim)
    with pytest.raises(IndexError) as ours:
        _plan.canonical(dim, ndim)
    assert str(ours.value) == str(theirs.value)


def test_tensors_on_two_gpus_are_torchs_error() -> None:
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*cuda:0 and cuda:2"):
        _plan._check_devices([spec((1,)), spec((1,), device=2), spec((1,))])


def test_a_raw_op_takes_tensors_of_the_cpu() -> None:
    op = _plan.planned(lambda x: _plan.plan(_plan.empty_like(x)))
    assert op(X).device.type == "cpu" and op(X).shape == X.shape


def test_a_raw_op_refuses_tensors_of_other_devices() -> None:
    with pytest.raises(DeviceError, match="argument 0 is neither on a GPU nor on the CPU"):
        _plan._spec((2, 32, 1, 7, 0, (4,), (1,), 16), 0)


SCALAR_KINDS: dict[str, tuple[str, Callable, Any]] = {
    "i32": ("int32_t", _plan.i32, -123456),
    "i64": ("int64_t", _plan.i64, -(2**60)),
    "u32": ("uint32_t", _plan.u32, 2**32 - 5),
    "u64": ("uint64_t", _plan.u64, 2**64 - 5),
    "f32": ("float", _plan.f32, 1.5),
    "f64": ("double", _plan.f64, -2.25),
    "bool": ("bool", _plan.bool_, True),
}


def c_literal(kind: str) -> str:
    value = SCALAR_KINDS[kind][2]
    return {"u64": f"{value}ull", "u32": f"{value}u", "bool": "true"}.get(kind, str(value))


def packed_by_c(folder: Path, kinds: list[list[str]]) -> list[tuple[int, int, list[int], bytes]]:
    """For each list of kinds what the compiler makes of a struct of them: size, alignment, offsets, bytes."""
    parts = []
    for n, names in enumerate(kinds):
        fields = "".join(f"{SCALAR_KINDS[kind][0]} f{i}; " for i, kind in enumerate(names))
        sets = "".join(f"s{n}.f{i} = {c_literal(kind)}; " for i, kind in enumerate(names))
        offsets = "".join(f'printf("%zu,", offsetof(struct S{n}, f{i})); ' for i in range(len(names)))
        parts.append((f"struct S{n} {{ {fields}}};\n", f"static struct S{n} s{n}; {sets}", n, offsets))
    main = "".join(
        f'{sets} printf("%zu %zu ", sizeof s{n}, _Alignof(struct S{n})); {offsets} printf(" ");'
        f'for (size_t i = 0; i < sizeof s{n}; i++) printf("%02x", ((unsigned char *)&s{n})[i]); printf("\\n");\n'
        for _, sets, n, offsets in parts
    )
    head = "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n"
    (folder / "pack.c").write_text(
        head + "".join(part[0] for part in parts) + f"int main(void) {{\n{main}return 0; }}\n"
    )
    subprocess.run(["cc", "-o", folder / "pack", folder / "pack.c"], check=True)
    lines = subprocess.run([folder / "pack"], check=True, capture_output=True, text=True).stdout.splitlines()
    answers = []
    for line in lines:
        size, align, offsets, data = line.split()
        answers.append((int(size), int(align), [int(part) for part in offsets.split(",") if part], bytes.fromhex(data)))
    return answers


def test_parameters_are_laid_out_as_c_lays_out_a_struct(tmp_path: Path) -> None:
    rng = random.Random(7)
    lists = [[kind] for kind in SCALAR_KINDS] + [
        rng.choices(list(SCALAR_KINDS), k=rng.randint(2, 9)) for _ in range(60)
    ]
    for names, (size, align, offsets, data) in zip(lists, packed_by_c(tmp_path, lists), strict=True):
        scalars = [SCALAR_KINDS[kind][1](SCALAR_KINDS[kind][2]) for kind in names]
        parameters = _plan._Parameters({})
        for scalar in scalars:  # each as a parameter of its own
            parameters.add(scalar)
        assert parameters.offsets == offsets
        assert bytes(parameters.blob) == data[: len(parameters.blob)]

        parameters = _plan._Parameters({})
        parameters.add(_plan.bool_(False))
        parameters.add(_plan.struct(*scalars))  # all as one struct, behind a byte
        parameters.add(_plan.bool_(True))
        assert parameters.offsets == [0, align, align + size], names
        assert bytes(parameters.blob) == b"\0" * align + data + b"\1"


def test_pointers_take_eight_aligned_bytes_and_are_patched() -> None:
    x, y, buffer = spec((1,)), _plan.empty((1,), "float32", spec((1,))), _plan.scratch(64)
    parameters = _plan._Parameters({id(x.serial): 0, id(y.serial): 3, id(buffer.serial): 4})
    for arg in (_plan.bool_(True), x, None, _plan.i32(1), y, buffer, x):
        parameters.add(arg)
    assert parameters.offsets == [0, 8, 16, 24, 32, 40, 48]
    assert parameters.patches == [(8, 0, 0), (32, 3, 0), (40, 4, 0), (48, 0, 0)]
    assert bytes(parameters.blob[16:24]) == bytes(8)


@pytest.mark.parametrize(
    "wrong",
    [_plan.i32(2**31), _plan.i32(-(2**31) - 1), _plan.u32(-1), _plan.i64(2**63), _plan.u64(-1), _plan.i32(1.5)],
    ids=repr,
)
def test_a_number_that_does_not_fit_its_type_is_an_error(wrong: _plan.Scalar) -> None:
    import struct

    with pytest.raises(struct.error):
        _plan._Parameters({}).add(wrong)


def test_a_plan_of_specs_freezes_to_slots() -> None:
    x, y = spec((4,), argument=0), spec((4,), argument=2)
    new, other = _plan.empty_like(x), _plan.empty((5, 2), "float16", x)
    device, outputs, buffers, steps = _plan._freeze(_plan.plan((y, new, other)), [x, y], 3)
    assert (device, outputs[:2], buffers, steps) == (0, (2, ~0), (), ())  # an argument, and one like it
    assert outputs[2] == (((5, 2), (2, 1)), {"dtype": torch.float16, "device": torch.device("cuda", 0)})


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def explained(monkeypatch) -> Callable[..., list[str]]:
    """Notes misses of an op ``test_plan.f`` and explains them."""
    monkeypatch.setattr(_plan, "_misses", _plan.deque(maxlen=_plan._KEPT))

    def f() -> None: ...

    f.__name__ = "_f"

    def note(*calls: tuple) -> list[str]:
        for call in calls:
            _plan._note(f, call, _plan.plan(_plan.empty((1,), "float32", spec((1,)))))
        return cache.explain()

    return note


def test_explain_says_in_what_a_call_differs_from_the_nearest(explained) -> None:
    x = spec((4, 4))
    lines = explained((x, 1), (x, 2), (spec((4, 5)), 2), (x, 2), (x, None, 3), (spec((4, 4), device=1), 1))
    assert lines == [
        "test_plan.f: the first call of its kind -> no launch",
        "test_plan.f: argument 1 is 2, was 1 -> no launch",
        "test_plan.f: argument 0's shape is (4, 5), was (4, 4); argument 0's strides is (5, 1), was (4, 1) -> no launch",
        "test_plan.f: its plan was evicted -> no launch",
        "test_plan.f: the first call of its kind -> no launch",
        "test_plan.f: argument 0's device is 1, was 0 -> no launch",
    ]


def test_explain_tells_of_one_op_and_names_its_launches(explained) -> None:
    x = spec((4,))
    explained((x,))
    launch = (
        _template.Template("user", "", {}, "user").kernel("g", T="float16", N=3).launch(grid=7, block=32, args=(x,))
    )

    def other() -> None: ...

    _plan._note(other, (x,), _plan.plan(x, launch))
    assert len(cache.explain()) == 2
    assert cache.explain("test_plan.other") == [
        "test_plan.other: the first call of its kind -> user::g<tk::f16, 3> grid (7, 1, 1)"
    ]
    assert cache.explain("nothing") == []


def test_explain_remembers_a_bounded_number_of_misses(explained) -> None:
    assert len(explained(*((n,) for n in range(_plan._KEPT + 50)))) == _plan._KEPT


# --- Launches, to a driver that is not there --------------------------------------------------------------------------

no_cuda_build = pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch wants the real driver")


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory) -> dict[str, str]:
    """The environment of a process that uses it. Its kernel is compiled already: NVRTC wants a driver with more to it."""
    folder = tmp_path_factory.mktemp("fake-cuda")
    source = Path(__file__).with_name("fake_cuda.c")
    include = ROOT / "csrc" / "abi"
    subprocess.run(["cc", "-shared", "-fPIC", "-I", include, "-o", folder / "libcuda.so.1", source], check=True)
    assert ensure(kernel("// fake\n" + SOURCE), folder) == "nvrtc"
    return {"LD_LIBRARY_PATH": str(folder), "FOLDER": str(folder)}


SOURCE = "template <int N> __global__ void fill(float *x) { x[threadIdx.x] = N; }"

FAKE_OP = f"""
import os, random, sys
import torch
from concurrent.futures import ThreadPoolExecutor
from engine import ensure, kernel
from tkjit import DeviceError, Error, LaunchError, _core

k = kernel("// fake\\n" + {SOURCE!r})
assert ensure(k, os.environ["FOLDER"], compile=False) == "disk"
"""
FAKE_OP += """
made = (((32,), (1,)), {"dtype": torch.int64})
scratch = (((64,), (1,)), {"dtype": torch.uint8})

def launch(tag, grid=(1, 2, 3), block=(4, 5, 6), cluster=(1, 1, 1), smem=7, out=1, at=0, maps=True):
    # (int64_t *out, CUtensorMap map, int64_t tag)
    blob = bytes(8) + bytes(120) + bytes(128) + tag.to_bytes(8, "little")
    box = ((128, 0, 7, (16,), (), (16,), (1,), 0, 0, 0),) if maps else ()
    return (k, grid, block, cluster, smem, blob, (0, 128, 256), ((0, out, at),), box)
"""


@no_cuda_build
def test_a_launch_is_given_what_the_plan_says(fake_driver: dict) -> None:
    run(
        FAKE_OP
        + """
x = torch.zeros(32)
op = _core.Planned(lambda s, t: (0, (made,), (scratch,), ((None, 2, 255, 64), launch(77))))
for x in (torch.zeros(32), torch.zeros(32), x):
    y = op.raw(x)
    assert y.tolist()[:11] == [x.data_ptr(), 77, 1, 2, 3, 4, 5, 6, 7, 0, 0], y
assert (op.hits, op.misses, _core.stats()["launches"]) == (2, 1, 3)
op = _core.Planned(lambda s, t: (1, (made,), (), (launch(5, cluster=(4, 2, 1), smem=100_000), launch(6, at=88, cluster=(2, 1, 1)))))
y = op.raw(x)
assert y.tolist()[0:2] == [x.data_ptr(), 5] and y.tolist()[11:13] == [x.data_ptr(), 6]
assert y.tolist()[9:11] == [4, 2]
op = _core.Planned(lambda s, t: (0, (0,), (), ((None, 0, 255, 8),)))
x = torch.zeros(4)
assert op.raw(x) is x and x.view(torch.uint8).tolist() == [255] * 8 + [0] * 8
""",
        **fake_driver,
    )


@no_cuda_build
def test_threads_that_share_a_plan_launch_with_maps_of_their_own_tensors(fake_driver: dict) -> None:
    # The memset blocks without the GIL between the encoding of the maps and the launch that takes them.
    run(
        FAKE_OP
        + """
op = _core.Planned(lambda s, t: (0, (made,), (scratch,), ((None, 2, 0, 64), launch(1), launch(2, at=16))))
def hammer(i):
    for _ in range(150):
        x = torch.zeros(32)
        y = op.raw(x).tolist()
        assert y[0] == y[2] == x.data_ptr(), (y, x.data_ptr())
with ThreadPoolExecutor(4) as pool:
    for future in [pool.submit(hammer, i) for i in range(4)]:
        future.result()
""",
        **fake_driver,
    )


@no_cuda_build
def test_mutated_launches_are_never_a_crash(fake_driver: dict) -> None:
    run(
        FAKE_OP
        + """
from mutants import mutated
rng = random.Random(9)
x = torch.zeros(32)
raised = 0
for n in range(6000):
    bad = mutated(rng, launch(1))
    # The first launch fails in the driver, so that a mutant that is a launch after all never runs.
    op = _core.Planned(lambda s, t: (0, (made,), (scratch,), (launch(1), bad)))
    try:
        op.raw(x, 1)
    except Exception as error:
        raised += "cuLaunchKernelEx" not in str(error) and "launch of" not in str(error)
assert raised > 3000, raised
for maps in (16, 17):
    many = (*launch(1)[:-1], launch(1)[-1] * maps)
    try:
        _core.Planned(lambda s, t: (0, (made,), (scratch,), (many,))).raw(x, 1)
    except ValueError as error:
        assert maps == 17 and "at most 16 tensor maps" in str(error)
    except LaunchError:
        assert maps == 16
""",
        **fake_driver,
        FAKE_CUDA_FAIL="cuLaunchKernelEx",
    )


FAILING = {
    "cuInit": "DeviceError",
    "cuDeviceGet": "DeviceError",
    "cuDevicePrimaryCtxRetain": "DeviceError",
    "cuCtxPushCurrent_v2": "DeviceError",
    "cuModuleLoadData": "DeviceError",
    "cuModuleGetFunction": "DeviceError",
    "cuFuncLoad": "DeviceError",
    "cuFuncSetAttribute": "DeviceError",
    "cuThreadExchangeStreamCaptureMode": "DeviceError",
    "cuTensorMapEncodeTiled": "LaunchError",
    "cuMemsetD8Async": "DeviceError",
    "cuLaunchKernelEx": "LaunchError",
}


@no_cuda_build
def test_every_failure_of_the_driver_is_an_error_that_names_it(fake_driver: dict) -> None:
    run(
        FAKE_OP
        + f"""
for function, kind in {FAILING!r}.items():
    child = os.fork()
    if child == 0:
        os.environ["FAKE_CUDA_FAIL"] = function
        steps = ((None, 2, 0, 64), launch(3, smem=100_000, grid=(9, 8, 7)))
        op = _core.Planned(lambda s, t: (0, (made,), (scratch,), steps))
        try:
            op.raw(torch.zeros(32))
        except Error as error:
            name = function.removesuffix("_v2")
            ok = type(error).__name__ == kind and "CUDA_ERROR_FAKE (as was asked for)" in str(error)
            if function == "cuLaunchKernelEx":
                ok = ok and all(part in str(error) for part in ("fill<1>", "(9, 8, 7)", "(4, 5, 6)", "100000", "232448"))
            else:
                ok = ok and str(error).startswith(name)
            if ok:
                del os.environ["FAKE_CUDA_FAIL"]
                ok = op.raw(torch.zeros(32)).tolist()[1] == 3  # a second attempt works
            os._exit(0 if ok else print(function, error, file=sys.stderr) or 1)
        os._exit(print(function, "no error", file=sys.stderr) or 1)
    assert os.waitpid(child, 0)[1] == 0, function
""",
        **fake_driver,
    )


@no_cuda_build
def test_a_child_of_a_process_that_used_the_driver_gets_a_clear_error(fake_driver: dict) -> None:
    run(
        FAKE_OP
        + """
op = _core.Planned(lambda s, t: (0, (made,), (), (launch(1),)))
op.raw(torch.zeros(32))
child = os.fork()
if child == 0:
    try:
        op.raw(torch.zeros(32))
    except DeviceError as error:
        os._exit(0 if "forked" in str(error) and "spawn" in str(error) else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
assert op.raw(torch.zeros(32)).tolist()[1] == 1
""",
        **fake_driver,
    )
