"""Tensor maps and what moves by them: loads, stores and additions of boxes, bulk stores, vector additions, random numbers.

The same kernels run in the emulator and, where there is one, on a GPU; the answers come from numpy. What the emulator alone
can find (faults) is tested on the CPU alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

import tkjit
from emulate import run, text
from tkjit._plan import Spec, TensorMap, i32, struct, u32

SOURCE = text("tensor")
DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64)

# What the engine adds.
CTYPES = {
    torch.float32: "float", torch.float16: "tk::f16", torch.bfloat16: "tk::bf16", torch.int32: "int32_t",
    torch.uint32: "uint32_t", torch.uint64: "uint64_t",
}  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    return request.param


# --- The reference ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A tensor that lies in some bytes, a box, and where the box begins. Innermost dimension first; strides in bytes."""

    dtype: torch.dtype
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: int = 0
    promotion: int = 0
    nan: bool = False
    offset: int = 0  # of the box in shared memory

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def steps(self) -> tuple[int, ...]:
        """Of the box's elements: the innermost dimension has none but 1."""
        return (1, *(self.element_strides or (1,) * len(self.dims))[1:])

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that move."""
        return tuple(-(-n // step) for n, step in zip(self.box, self.steps))

    @property
    def bytes(self) -> int:
        return prod(self.counts) * self.itemsize

    @property
    def memory(self) -> int:
        """Bytes that the tensor spans."""
        last = (self.dims[0] - 1) * self.itemsize
        last += sum((n - 1) * stride for n, stride in zip(self.dims[1:], self.strides))
        return -(-(last + self.itemsize) // 16) * 16

    def map(self, spec: Spec) -> TensorMap:
        steps = self.element_strides or (1,) * len(self.dims)
        fields = (spec, self.dims, self.strides, self.box, steps, self.swizzle, self.promotion)
        return TensorMap(*fields, nan=True) if self.nan else TensorMap(*fields)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each element of the box, in order: its byte in the tensor (-1: outside), its byte in shared memory."""
        index = np.indices(self.counts[::-1]).reshape(len(self.dims), -1)[::-1]
        x = np.array(self.at)[:, None] + index * np.array(self.steps)[:, None]
        inside = ((x >= 0) & (x < np.array(self.dims)[:, None])).all(axis=0)
        tensor = (x * np.array((self.itemsize, *self.strides))[:, None]).sum(axis=0)
        shared = self.offset + np.arange(prod(self.counts)) * self.itemsize
        rows = {0: 0, 32: 1, 64: 3, 128: 7}[self.swizzle]
        shared ^= (shared >> 7 & rows) << 4
        return np.where(inside, tensor, -1), shared - self.offset

    def loaded(self, memory: np.ndarray) -> np.ndarray:
        """The box's bytes after a load; what is outside as zeros."""
        out = np.zeros(self.bytes, np.uint8)
        for tensor, shared in zip(*self.pairs()):
            if tensor >= 0:
                out[shared : shared + self.itemsize] = memory[tensor : tensor + self.itemsize]
        return out


def drawn(rank: int, seed: int, stored: bool = False) -> Case:
    """A random case of so many dimensions; stored: rows of multiples of 16 bytes, and a box that begins inside."""
    r = random.Random(f"{rank} {seed}")
    dtype = r.choice(DTYPES)
    size = dtype.itemsize
    swizzle = r.choice((0, 32, 64, 128))
    row = swizzle or r.choice((16, 16 * r.randint(1, min(16, 16 * size))))
    dims = (r.randint(1, 2 * row // size + 3), *(r.randint(1, 9) for _ in range(rank - 1)))
    dims = (-(-dims[0] * size // 16) * 16 // size if stored else dims[0], *dims[1:])
    # Any dimension but the first may be the next to lie outside those before.
    strides, step = [0] * (rank - 1), -(-dims[0] * size // 16) * 16 + 16 * r.randint(0, 2)
    for i in r.sample(range(1, rank), rank - 1):
        strides[i - 1] = step
        step *= dims[i]
        step += 16 * r.randint(0, 1)
    box = (row // size, *(r.randint(1, max(1, (12, 12, 8, 4, 3)[rank - 1])) for _ in range(rank - 1)))
    steps = (1, *(r.choice((1, 1, 2, 3, 8)) for _ in range(rank - 1))) if r.random() < 0.4 else ()
    at = tuple(r.choice((0, 1, -1, r.randint(-n, size + 2), r.randint(-3, 3))) for n, size in zip(box, dims))
    at = (at[0] * size // 16 * 16 // size, *at[1:])
    at = tuple(max(x, 0) for x in at) if stored else at
    return Case(
        dtype, dims, tuple(strides), box, at, steps, swizzle, r.choice((0, 64, 128, 256)), offset=128 * r.randint(0, 9)
    )


def memory_of(case: Case, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, case.memory, np.uint8)


def on(place: str, values: np.ndarray, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor of these bytes."""
    return torch.from_numpy(values.view(np.uint8).copy()).view(dtype).to(place)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().view(torch.uint8).numpy()


def start(case: Case) -> Any:
    return struct(*(i32(x) for x in case.at))


# --- Loads -----------------------------------------------------------------------------------------------------------


def load(
    place: str, case: Case, memory: np.ndarray, hint: int = 0, room: int | None = None, **options: Any
) -> np.ndarray:
    tensor, out = on(place, memory, case.dtype), on(place, np.zeros(case.bytes, np.uint8))
    args = [tensor, lambda specs: case.map(specs[0]), start(case), out, i32(case.bytes), i32(case.offset)]
    smem = case.offset + case.bytes + 8 if room is None else room
    run(SOURCE, f"probe::load<{len(case.dims)}, {hint}>", 1, 64, args, smem=smem, **options)
    return bytes_of(out)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rank", (1, 2, 3, 4, 5))
def test_load(place: str, rank: int, seed: int) -> None:
    case = drawn(rank, seed)
    memory = memory_of(case, seed)
    np.testing.assert_array_equal(load(place, case, memory, hint=seed % 3), case.loaded(memory), str(case))


@pytest.mark.parametrize(
    "at", ((0, 0), (-8, -1), (24, 7), (32, 0), (0, 8), (-64, 0), (0, -4), (1000, -1000), (-(2**31), 2**31 - 1))
)
def test_load_outside(place: str, at: tuple[int, int]) -> None:
    """A box half or wholly outside the tensor still counts all its bytes."""
    case = Case(torch.float16, (32, 8), (64,), (64, 4), at, swizzle=128)
    memory = memory_of(case)
    np.testing.assert_array_equal(load(place, case, memory), case.loaded(memory))


def test_load_has_no_innermost_element_stride(place: str) -> None:
    case = Case(torch.float16, (64, 8), (128,), (32, 6), (8, 1), (4, 2))
    assert case.counts == (32, 3)
    memory = memory_of(case)
    np.testing.assert_array_equal(load(place, case, memory), case.loaded(memory))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32, torch.float64))
def test_load_fills_with_nan(place: str, dtype: torch.dtype) -> None:
    case = Case(dtype, (5, 3), (64,), (16, 4), (-16 // dtype.itemsize, 1), nan=True)
    values = torch.ones(case.memory // dtype.itemsize, dtype=dtype)
    loaded = torch.from_numpy(load(place, case, bytes_of(values))).view(dtype)
    inside = torch.from_numpy(case.pairs()[0] >= 0)
    assert 0 < inside.sum() < inside.numel()
    assert bool((loaded[inside] == 1).all())
    assert bool(loaded[~inside].isnan().all())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("blocks", "source", "mask"), ((2, 0, 0b11), (2, 1, 0b01), (4, 2, 0b1101)))
def test_multicast(place: str, blocks: int, source: int, mask: int, seed: int) -> None:
    case = replace(drawn(2, 100 + seed), offset=0)
    memory = memory_of(case, seed)
    tensor, out = on(place, memory, case.dtype), on(place, np.zeros(blocks * case.bytes, np.uint8))
    args = [tensor, lambda specs: case.map(specs[0]), start(case), out, i32(case.bytes), i32(source), u32(mask)]
    run(SOURCE, "probe::multicast<2>", blocks, 32, args, smem=case.bytes + 8, cluster=blocks)
    expected = [case.loaded(memory) if mask >> i & 1 else np.zeros(case.bytes, np.uint8) for i in range(blocks)]
    np.testing.assert_array_equal(bytes_of(out), np.concatenate(expected), str(case))


# --- Stores and additions --------------------------------------------------------------------------------------------


def store(
    place: str, case: Case, memory: np.ndarray, shared: np.ndarray, add: bool = False, **options: Any
) -> np.ndarray:
    fenced = "true" if options.pop("fenced", True) else "false"
    tensor, box = on(place, memory, case.dtype), on(place, shared)
    args = [tensor, lambda specs: case.map(specs[0]), start(case), box, i32(case.bytes), i32(case.offset)]
    kernel = f"probe::store<{len(case.dims)}, {'true' if add else 'false'}, {fenced}>"
    run(SOURCE, kernel, 1, 64, args, smem=case.offset + case.bytes, **options)
    return bytes_of(tensor)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rank", (1, 2, 3, 4, 5))
def test_store(place: str, rank: int, seed: int) -> None:
    case = drawn(rank, 200 + seed, stored=True)
    memory, box = memory_of(case, seed), np.random.default_rng(seed).integers(0, 256, case.bytes, np.uint8)
    expected = memory.copy()
    for tensor, shared in zip(*case.pairs()):
        if tensor >= 0:
            expected[tensor : tensor + case.itemsize] = box[shared : shared + case.itemsize]
    np.testing.assert_array_equal(store(place, case, memory, box), expected, str(case))


def numbers(rng: np.random.Generator, bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Small ones: sums of 7 are exact in any type."""
    values = torch.from_numpy(rng.integers(0, 36, bytes // dtype.itemsize))
    return values.to(torch.int64).to(dtype)


@pytest.mark.parametrize("dtype", CTYPES)
@pytest.mark.parametrize("rank", (1, 2, 3, 4, 5))
def test_tensor_reduce_add(place: str, rank: int, dtype: torch.dtype) -> None:
    seed = 300 + list(CTYPES).index(dtype)
    case = drawn(rank, seed, stored=True)
    # The same bytes, or fewer, as elements of this type.
    wide, row = (n * case.itemsize // dtype.itemsize for n in (case.dims[0], case.box[0]))
    at = (case.at[0] * case.itemsize // dtype.itemsize, *case.at[1:])
    case = replace(case, dtype=dtype, dims=(max(wide, 1), *case.dims[1:]), box=(row, *case.box[1:]), at=at)
    rng = np.random.default_rng(seed)
    before, box = numbers(rng, case.memory, dtype), numbers(rng, case.bytes, dtype)
    expected = before.to(torch.float64).numpy().copy()
    for tensor, shared in zip(*case.pairs()):
        if tensor >= 0:
            expected[tensor // case.itemsize] += float(box[shared // case.itemsize])
    after = store(place, case, bytes_of(before), bytes_of(box), add=True)
    np.testing.assert_array_equal(torch.from_numpy(after).view(dtype).to(torch.float64).numpy(), expected, str(case))


@pytest.mark.parametrize("dtype", CTYPES)
@pytest.mark.parametrize("add", (False, True))
def test_bulk(place: str, dtype: torch.dtype, add: bool) -> None:
    n, blocks = 1040, 3
    rng = np.random.default_rng(1)
    first, second, before = (numbers(rng, n, dtype) for _ in range(3))
    out, both = before.clone().to(place), on(place, np.concatenate([bytes_of(first), bytes_of(second)]))
    kernel = f"probe::bulk<{CTYPES[dtype]}, {'true' if add else 'false'}, true>"
    run(SOURCE, kernel, blocks if add else 1, 64, [out, both, i32(n)], smem=n)
    if add:
        expected = before.double() + blocks * (first.double() + second.double())
        assert torch.equal(out.cpu().double(), expected)
    else:
        # Two stores of one thread to one place are not ordered by their issue.
        done = out.cpu().view(torch.uint8).numpy()
        assert ((done == bytes_of(first)) | (done == bytes_of(second))).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("size", (4, 8, 16))
def test_vector_additions(place: str, dtype: torch.dtype, size: int) -> None:
    threads, warps, n = 128, 2, size // dtype.itemsize
    # Sums of 64 numbers below 4 are exact in bfloat16 too.
    values = torch.randint(0, 4, (threads, n), generator=torch.Generator().manual_seed(size)).to(dtype)
    out = torch.ones(warps, n, dtype=dtype, device=place)
    args = [out, values.to(place).view(torch.uint8).flatten()]
    run(SOURCE, f"probe::vectors<{CTYPES[dtype]}, {size}>", threads // (32 * warps), 32 * warps, args)
    expected = 1 + values.double().reshape(-1, warps, 32, n).sum(dim=(0, 2))
    assert torch.equal(out.cpu().double(), expected)


@pytest.mark.parametrize("how", ("tensor", "bulk", "vector"))
def test_sums_of_small_numbers(place: str, how: str) -> None:
    """Of float32 under 2^-126 atomics on global memory make zeros; the copy engine keeps them."""
    tiny = np.array([2.0**-127, -(2.0**-140), 2.0**-126, 1.0], np.float32)
    out = on(place, tiny, torch.float32)
    zeros = np.zeros(4, np.float32)
    if how == "tensor":
        case = Case(torch.float32, (4,), (), (4,), (0,))
        out = on(place, store(place, case, tiny, bytes_of(torch.from_numpy(zeros)), add=True), torch.float32)
    elif how == "bulk":
        run(SOURCE, "probe::bulk<float, true, true>", 1, 32, [out, on(place, np.zeros(32, np.uint8)), i32(16)], smem=16)
    else:
        run(SOURCE, "probe::vectors<float, 16>", 1, 32, [out, on(place, np.zeros(32 * 16, np.uint8))])
    kept = np.array([0, 0, 2.0**-126, 1], np.float32) if how == "vector" else tiny
    np.testing.assert_array_equal(out.cpu().numpy(), kept)


def test_tickets_and_election(place: str) -> None:
    counter, seen = torch.zeros(1, device=place), torch.zeros(192, device=place)
    elected = torch.full((6, 2), -1, dtype=torch.int32, device=place)
    run(SOURCE, "probe::tickets", 2, 96, [counter, seen, elected])
    assert counter.item() == 192
    assert seen.cpu().sort().values.tolist() == list(range(192))
    assert bool((elected[:, 0] == elected[:, 1]).all() and (elected >= 0).all() and (elected < 32).all())


# --- Random numbers --------------------------------------------------------------------------------------------------


def philox(key: Sequence[int], counter: Sequence[int]) -> list[int]:
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


# Random123's known answers: key, counter, words.
ONES = 0xFFFFFFFF
KNOWN = (
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def test_philox(place: str) -> None:
    rng = np.random.default_rng(0)
    n = 64
    keys, counters = rng.integers(0, 2**32, (n, 2), np.uint32), rng.integers(0, 2**32, (n, 4), np.uint32)
    for i, (key, counter, _) in enumerate(KNOWN):
        keys[i], counters[i] = key, counter
    tensors = [on(place, keys, torch.int32), on(place, counters, torch.int32)]
    words, sequence = (torch.zeros(n, 4, dtype=torch.int32, device=place) for _ in range(2))
    numbers = torch.zeros(n, 4, device=place)
    run(SOURCE, "probe::random", 1, 32, [*tensors, words, sequence, numbers, i32(n)])
    got = words.cpu().numpy().view(np.uint32)
    for i, (_, _, answer) in enumerate(KNOWN):
        assert tuple(got[i]) == answer
    expected = np.array([philox(k, c) for k, c in zip(keys.tolist(), counters.tolist())], np.uint32)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(sequence.cpu().numpy().view(np.uint32), expected)
    rounded = got.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    np.testing.assert_array_equal(numbers.cpu().numpy(), rounded)
    assert rounded.min() > 0 and rounded.max() <= 1


# --- What a map may be -----------------------------------------------------------------------------------------------

GOOD = Case(torch.float16, (64, 32, 16), (128, 4096), (64, 8, 1), (0, 0, 0), (1, 1, 1), 128)
RULES = (
    ("as it is", {}, True),
    ("one dimension", {"dims": (64,), "strides": (), "box": (64,), "element_strides": (1,)}, True),
    ("no dimension", {"dims": (), "strides": (), "box": (), "element_strides": ()}, False),
    ("an empty dimension", {"dims": (64, 0, 16)}, False),
    ("2^32 elements", {"dims": (64, 2**32, 16)}, True),
    ("more than 2^32 elements", {"dims": (64, 2**32 + 1, 16)}, False),
    ("a stride of 24", {"strides": (24, 4096)}, False),
    ("a stride of 0", {"strides": (128, 0)}, True),
    ("rows that overlap", {"strides": (16, 16)}, True),
    ("strides that shrink", {"strides": (4096, 128)}, True),
    ("strides that wrap around", {"dims": (64, 2**30, 2**31 - 1), "strides": (128, 2**35 - 128)}, True),
    ("a stride of 2^40 - 16", {"strides": (128, 2**40 - 16)}, True),
    ("a stride of 2^40", {"strides": (128, 2**40)}, False),
    ("a box of 0", {"box": (64, 0, 1)}, False),
    ("a box of 256", {"box": (64, 256, 1)}, True),
    ("a box of 257", {"box": (64, 257, 1)}, False),
    ("a box larger than the tensor", {"dims": (8, 2, 1)}, True),
    ("a row of 256 elements", {"box": (256, 8, 1), "swizzle": 0}, True),
    ("a row of 24 bytes", {"box": (12, 8, 1)}, False),
    ("a row of 24 bytes, swizzled by 32", {"box": (12, 8, 1), "swizzle": 32}, False),
    ("a row as wide as the swizzle", {"box": (32, 8, 1), "swizzle": 64}, True),
    ("a row narrower than the swizzle", {"box": (16, 8, 1), "swizzle": 64}, True),
    ("a row wider than 128", {"box": (72, 8, 1)}, False),
    ("a row wider than 64", {"swizzle": 64}, False),
    ("a row wider than 32", {"box": (24, 8, 1), "swizzle": 32}, False),
    ("an element stride of 0", {"element_strides": (1, 0, 1)}, False),
    ("an element stride of 8", {"element_strides": (1, 8, 1)}, True),
    ("an element stride of 9", {"element_strides": (1, 9, 1)}, False),
    ("an innermost element stride", {"element_strides": (2, 1, 1)}, True),
    ("an innermost element stride of 9", {"element_strides": (9, 1, 1)}, False),
    ("NaN for float16", {"nan": True}, True),
    ("NaN for int32", {"nan": True, "dtype": torch.int32, "box": (32, 8, 1)}, False),
    ("a row of 8 bytes of int64", {"dtype": torch.int64, "box": (1, 8, 1)}, False),
    ("bool", {"dtype": torch.bool, "box": (128, 8, 1)}, True),
)


@pytest.mark.parametrize(("change", "valid"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
def test_rules(place: str, change: dict[str, Any], valid: bool) -> None:
    case = replace(GOOD, **change)
    tensor = torch.zeros(64, device=place).view(torch.uint8).view(case.dtype)
    args = [tensor, lambda specs: case.map(specs[0])]
    if valid:
        run(SOURCE, "probe::takes", 1, 32, args)
    else:
        with pytest.raises(tkjit.LaunchError):
            run(SOURCE, "probe::takes", 1, 32, args)


@pytest.mark.parametrize("off", (2, 8, 16))
def test_rule_of_the_address(place: str, off: int) -> None:
    tensor = torch.zeros(256, dtype=torch.float16, device=place)[off // 2 :]
    args = [tensor, lambda specs: GOOD.map(specs[0])]
    if off % 16 == 0:
        run(SOURCE, "probe::takes", 1, 32, args)
    else:
        with pytest.raises(tkjit.LaunchError):
            run(SOURCE, "probe::takes", 1, 32, args)


def test_refusals_name_the_rule() -> None:
    def refused(**change: Any) -> str:
        case = replace(GOOD, **change)
        with pytest.raises(tkjit.LaunchError) as caught:
            run(SOURCE, "probe::takes", 1, 32, [torch.zeros(64).half(), lambda specs: case.map(specs[0])])
        return str(caught.value)

    assert "stride of its dimension 2 is 4104 bytes" in refused(strides=(128, 4104))
    assert "257 elements in dimension 1" in refused(box=(64, 257, 1))
    assert "more than the 128 that are swizzled" in refused(box=(72, 8, 1))


# --- What the emulator finds -----------------------------------------------------------------------------------------


def found(what: str, act: Any, **options: Any) -> None:
    with pytest.raises(tkjit.EmulatorError, match=what):
        act("cpu", **options)


def test_faults_of_loads() -> None:
    case = Case(torch.float16, (64, 8), (128,), (64, 4), (0, 0), swizzle=128)
    memory = memory_of(case)
    found("aligned to 128", load, case=replace(case, offset=64), memory=memory)
    found("no narrower ones", load, case=replace(case, box=(32, 4)), memory=memory)
    found("innermost coordinate of a box is not a multiple of 16", load, case=replace(case, at=(1, 0)), memory=memory)
    found("outside every tensor", load, case=replace(case, dims=(64, 64), at=(0, 9)), memory=memory)
    found("no such instruction", load, case=case, memory=memory, arch="sm_80")
    found("shared memory", load, case=case, memory=memory, room=case.bytes // 2)


def test_fault_of_another_rank() -> None:
    case = Case(torch.float16, (64, 8), (128,), (64, 4), (0, 0))
    tensor, out = torch.zeros(512).half(), torch.zeros(case.bytes, dtype=torch.uint8)
    args = [tensor, lambda specs: case.map(specs[0]), struct(i32(0), i32(0), i32(0)), out, i32(case.bytes), i32(0)]
    with pytest.raises(tkjit.EmulatorError, match="number of dimensions"):
        run(SOURCE, "probe::load<3, 0>", 1, 32, args, smem=case.bytes + 8)


def test_faults_of_stores() -> None:
    case = Case(torch.float16, (64, 8), (128,), (64, 4), (0, 0))
    memory, box = memory_of(case), np.zeros(case.bytes, np.uint8)
    for at in ((-8, 0), (0, -1)):
        found("coordinate of a stored box is negative", store, case=replace(case, at=at), memory=memory, shared=box)
    found("not whole pieces of 16", store, case=replace(case, dims=(60, 8)), memory=memory, shared=box)
    found("fence_async", store, case=case, memory=memory, shared=box, fenced=False)
    found("outside every tensor", store, case=replace(case, dims=(64, 64), at=(0, 9)), memory=memory, shared=box)
    for dtype in (torch.uint8, torch.int64, torch.float64):
        wrong = replace(case, dtype=dtype, dims=(128 // dtype.itemsize, 8), box=(128 // dtype.itemsize, 4))
        found("the engine adds", store, case=wrong, memory=memory, shared=box, add=True)


def test_faults_of_bulk_stores() -> None:
    def bulk(place: str, n: int, waits: str = "true") -> None:
        tensors = [torch.zeros(n // 4), torch.zeros(2 * n, dtype=torch.uint8)]
        run(SOURCE, f"probe::bulk<float, false, {waits}>", 1, 32, [*tensors, i32(n)], smem=n)

    found("race", bulk, n=64, waits="false")
    found("multiple of 16", bulk, n=72)


def test_every_schedule() -> None:
    """Whatever thread runs first, boxes are the same."""
    case = drawn(3, 7)
    memory = memory_of(case)
    for seed, check in itertools.product(range(4), (True, False)):
        np.testing.assert_array_equal(load("cpu", case, memory, seed=seed, check=check), case.loaded(memory))


# --- The rules of maps, beside the driver's --------------------------------------------------------------------------

NOTHING = """
#include "tk/tk.cuh"
#include "tk/tensor.cuh"
__global__ void nothing(float*, const __grid_constant__ tk::TensorMap) {}
"""


def random_map(rng: random.Random) -> dict[str, Any]:
    """What a map is made of: mostly right, with something off now and then."""
    itemsize = rng.choice((1, 2, 4, 8))
    rank = rng.choice((1, 2, 2, 3, 3, 4, 5))
    dims = [rng.choice((1, 2, 3, 16, 33, 64, 100, 256, 300, 1000)) for _ in range(rank)]
    box = [rng.choice((1, 2, 4, 8, 16, 32, 64, 100, 128, 256)) for _ in range(rank)]
    if rng.random() < 0.8:
        box[0] = rng.choice([n for n in (16, 32, 64, 128, 256) if n * itemsize % 16 == 0])
    strides, step = [], dims[0] * itemsize
    for n in dims[1:]:
        step = -(-step // 16) * 16 + rng.choice((0, 0, 16, 32, 8))
        strides.append(step)
        step *= n
    element_strides = [1] * rank
    if rng.random() < 0.3:
        element_strides[rng.randrange(rank)] = rng.choice((1, 2, 3, 8, 9))
    if rng.random() < 0.1:
        box[rng.randrange(rank)] = rng.choice((257, 300))
    return {
        "dtype": {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize],
        "dims": tuple(dims), "strides": tuple(strides), "box": tuple(box), "element_strides": tuple(element_strides),
        "swizzle": rng.choice((0, 0, 32, 64, 128)), "offset": rng.choice((0, 0, 0, 16, 8)), "nan": rng.random() < 0.2,
    }  # fmt: skip


def is_taken(made: dict[str, Any], place: str) -> bool:
    y = torch.zeros(1, device=place)
    x = torch.zeros(64 // made["dtype"].itemsize, dtype=made["dtype"], device=place)
    x = x[made["offset"] // made["dtype"].itemsize :]

    def build(specs: Sequence[Spec]) -> TensorMap:
        m = made
        return TensorMap(specs[1], m["dims"], m["strides"], m["box"], m["element_strides"], m["swizzle"], 256, m["nan"])

    try:
        run(NOTHING, "nothing", 1, 32, [y, build], also=(x,))
    except tkjit.LaunchError:
        return False
    return True


def large_map(box: tuple[int, int, int], step: int) -> dict[str, Any]:
    """A map of bytes with this box."""
    return {
        "dtype": torch.uint8, "dims": (256, 256, 256), "strides": (256, 65536), "box": box, "element_strides": (1, step, 1),
        "swizzle": 0, "offset": 0, "nan": False,
    }  # fmt: skip


LARGE = {((256, 228, 4), 1): True, ((256, 229, 4), 1): False, ((256, 256, 4), 2): True, ((256, 256, 8), 2): False}


def test_boxes_are_no_larger_than_shared_memory(place: str) -> None:
    """By what is loaded: of an element stride of 2 half."""
    assert {case: is_taken(large_map(*case), place) for case in LARGE} == LARGE


@pytest.mark.gpu
def test_the_driver_takes_the_maps_that_the_emulator_takes() -> None:
    rng = random.Random(7)
    maps = [random_map(rng) for _ in range(400)]
    differ = [m for m in maps if is_taken(m, "cuda") != is_taken(m, "cpu")]
    taken = sum(is_taken(m, "cuda") for m in maps)
    print(f"{len(maps)} maps, {taken} taken by the driver, {len(differ)} judged otherwise by the emulator")
    assert 50 < taken < 350
    assert not differ, "\n".join(map(str, differ[:5]))
