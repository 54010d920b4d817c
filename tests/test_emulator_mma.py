"""Matrix products: ldmatrix and stmatrix, mma of a warp, wgmma of a warpgroup from shared memory in every layout.

The same kernels run in the emulator and, where there is one, on a GPU; the answers come from numpy in float64. The numbers are
small integers, so that no sum rounds and results are exact whatever the order. What the emulator alone can find (faults) is
tested on the CPU alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import tkjit
from emulate import run, text
from tkjit._plan import i32

SOURCE = text("mma")
NUMBERS = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of an atom's row
K, MN = 0, 1


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    return request.param


def whole(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Integers that every type holds, e5m2 (two bits behind the point) too."""
    return rng.integers(-4, 5, shape).astype(np.float64)


def words(values: np.ndarray, number: str, place: str) -> torch.Tensor:
    """The numbers as the kernels take them."""
    made = torch.from_numpy(np.ascontiguousarray(values)).to(NUMBERS[number])
    return made.view(torch.uint8).view(torch.int32).to(place)


def per_word(number: str) -> int:
    return 4 // NUMBERS[number].itemsize


# --- Rows of 16 bytes ------------------------------------------------------------------------------------------------


def fragments(rows: np.ndarray, count: int, transpose: bool) -> np.ndarray:
    """What each lane holds, [32, count, 2] elements of two bytes, of [count, 8, 8]."""
    lane = np.arange(32)
    g, q = lane // 4, lane % 4
    found = np.empty((32, count, 2), rows.dtype)
    for i in range(count):
        for e in range(2):
            found[:, i, e] = rows[i, 2 * q + e, g] if transpose else rows[i, g, 2 * q + e]
    return found


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(place: str, count: int, transpose: bool) -> None:
    rows = np.arange(32 * 8, dtype=np.int16)
    given = torch.from_numpy(rows.view(np.int32).reshape(32, 4).copy()).to(place)
    found = torch.zeros((32, count), dtype=torch.int32, device=place)
    run(SOURCE, f"probe::load_matrix<{count}, {str(transpose).lower()}>", 1, 32, [given, found], smem=32 * 5 * 16)
    expected = fragments(rows.reshape(4, 8, 8), count, transpose)
    assert np.array_equal(found.cpu().numpy().view(np.int16).reshape(32, count, 2), expected)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(place: str, count: int, transpose: bool) -> None:
    rows = np.arange(count * 64, dtype=np.int16).reshape(count, 8, 8)
    held = np.ascontiguousarray(fragments(rows, count, transpose)).view(np.int32).reshape(32, count)
    found = torch.zeros((8 * count, 4), dtype=torch.int32, device=place)
    given = torch.from_numpy(held.copy()).to(place)
    run(SOURCE, f"probe::store_matrix<{count}, {str(transpose).lower()}>", 1, 32, [given, found], smem=32 * 5 * 16)
    assert np.array_equal(found.cpu().numpy().view(np.int16).reshape(count, 8, 8), rows)


# --- Products of a warp ----------------------------------------------------------------------------------------------

PAIRS = [
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("tf32", "tf32"),
    ("e4m3", "e4m3"),
    ("e4m3", "e5m2"),
    ("e5m2", "e4m3"),
    ("e5m2", "e5m2"),
]


def mma(a: np.ndarray, b: np.ndarray, c: np.ndarray, left: str, right: str, n_words: int, place: str) -> np.ndarray:
    found = torch.from_numpy(c.astype(np.float32)).to(place)
    expression = f"probe::mma<tk::{left}, tk::{right}, {n_words}>"
    arch = "sm_89" if "e" in left else "sm_80"
    run(SOURCE, expression, 1, 32, [words(a, left, place), words(b, right, place), found], arch=arch)
    return found.cpu().numpy()


@pytest.mark.parametrize(
    ("left", "right", "n_words"), [*((*pair, 8) for pair in PAIRS), *((*pair, 4) for pair in PAIRS[:2])]
)
def test_mma(place: str, left: str, right: str, n_words: int) -> None:
    rng = np.random.default_rng(1)
    k = n_words * per_word(left)
    a, b, c = whole(rng, 16, k), whole(rng, 8, k), whole(rng, 16, 8)
    assert np.array_equal(mma(a, b, c, left, right, n_words, place), c + a @ b.T)


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_mma_of_any_numbers(place: str, left: str, right: str) -> None:
    """Sums that round: within what sums of float32 that are cut off could lose."""
    rng = np.random.default_rng(2)
    k = 8 * per_word(left)
    a, b = (
        torch.from_numpy(rng.standard_normal(shape)).to(NUMBERS[number]).double().numpy()
        for shape, number in (((16, k), left), ((8, k), right))
    )
    c = rng.standard_normal((16, 8)).astype(np.float32).astype(np.float64)
    exact_a, exact_b = a, b
    if left == "tf32":
        exact_a, exact_b = (
            (v.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for v in (a, b)
        )
    found = mma(a, b, c, left, right, 8, place)
    bound = (
        (np.abs(c) + np.abs(exact_a) @ np.abs(exact_b).T) * 2.0**-13
        if "e" in left
        else k * 2.0**-22 * (np.abs(c) + np.abs(exact_a) @ np.abs(exact_b).T)
    )
    assert (np.abs(found - (c + exact_a @ exact_b.T)) <= bound).all()


@pytest.mark.parametrize("number", ["e4m3", "e5m2", "f16"])
def test_every_number_of_a_type(place: str, number: str) -> None:
    """Each value of an 8-bit type, and values of f16 that cover its exponents: times 1, plus 0."""
    itemsize = NUMBERS[number].itemsize
    k = 32 // itemsize
    n, step = (256, 1) if itemsize == 1 else (65536, 509)
    bits = np.arange(0, n, step).astype(np.uint8 if itemsize == 1 else np.uint16)
    values = torch.from_numpy(bits.view(np.int8 if itemsize == 1 else np.int16)).view(NUMBERS[number])
    finite = torch.isfinite(values.float())
    if place == "cpu":
        finite = finite | torch.isnan(values.float()) | torch.isinf(values.float())
    values = values[finite].double().numpy()
    for start in range(0, len(values), 16):
        part = values[start : start + 16]
        a = np.zeros((16, k))
        a[: len(part), start % k] = part
        b = np.zeros((8, k))
        b[:, start % k] = 1.0
        found = mma(a, b, np.zeros((16, 8)), number, number, 8, place)[: len(part)]
        assert np.array_equal(found, np.repeat(part[:, None], 8, 1), equal_nan=True)


def test_mma_f16_sums(place: str) -> None:
    rng = np.random.default_rng(3)
    a, b, c = whole(rng, 16, 16), whole(rng, 8, 16), whole(rng, 16, 8)
    found = words(c, "f16", place)
    run(SOURCE, "probe::mma_f16<tk::f16>", 1, 32, [words(a, "f16", place), words(b, "f16", place), found], arch="sm_80")
    assert np.array_equal(found.cpu().view(torch.float16).double().numpy().reshape(16, 8), c + a @ b.T)


def test_mma_f64(place: str) -> None:
    rng = np.random.default_rng(4)
    a, b, c = (
        torch.from_numpy(rng.integers(-(2**20), 2**20, shape).astype(np.float64)) for shape in ((8, 4), (8, 4), (8, 8))
    )
    found = c.clone().to(place)
    run(SOURCE, "probe::mma_f64<double>", 1, 32, [a.to(place), b.to(place), found], arch="sm_80")
    assert torch.equal(found.cpu(), c + a @ b.T)


def test_what_tf32_ignores(place: str) -> None:
    """High part and rest, without the bits that tf32 ignores, are the float but for its last; of NaN and infinity no rest."""
    special = [np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4028235e38, -3.4028235e38, 1.1754944e-38]
    values = np.array([*special, *np.random.default_rng(5).standard_normal(24)], np.float32)
    given = torch.from_numpy(values.copy().view(np.int32)).to(place)
    run(SOURCE, "probe::rest<unsigned int>", 1, 32, [given], arch="sm_80")
    high, rest = ((v.view(np.uint32) & 0xFFFFE000).view(np.float32) for v in (values, given.cpu().numpy()))
    assert (np.abs(rest[:3]) < 1e-38).all() and (rest[3:5] == 0).all()
    assert np.array_equal(high[:2], values[:2]) and np.isnan(high[2])
    sums = high[3:].astype(np.float64) + rest[3:]
    assert (np.abs(sums - values[3:]) <= np.abs(values[3:]) * 2.0**-22).all()


# --- Products of a warpgroup -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One wgmma, or `steps` of them along k."""

    left: str = "f16"
    right: str = "f16"
    n: int = 64
    steps: int = 4
    majors: tuple[int, int] = (K, K)
    swizzles: tuple[int, int] = (1, 1)
    in_registers: bool = False
    start: int = 0  # of an operand, behind an address that 1024 divides

    @property
    def expression(self) -> str:
        numbers = (self.n, self.steps, *self.majors, *self.swizzles, str(self.in_registers).lower(), self.start)
        return f"probe::wgmma<tk::{self.left}, tk::{self.right}, {', '.join(map(str, numbers))}>"

    @property
    def smem(self) -> int:
        """As the kernel's Tile reckons."""
        total = 0
        for rows, major, swizzle in zip((64, self.n), self.majors, self.swizzles, strict=True):
            width = SWIZZLES[swizzle]
            panels = -(-(self.steps * 32 if major == K else rows * 2) // width)
            size = panels * (rows if major == K else self.steps * 16) * width
            total += -(-(size + self.start) // 1024) * 1024
        return total

    def __str__(self) -> str:
        majors = "".join("kn"[major] for major in self.majors)
        swizzles = "-".join(str(SWIZZLES[swizzle]) for swizzle in self.swizzles)
        more = "-registers" * self.in_registers + f"-at{self.start}" * (self.start > 0)
        return f"{self.left}-{self.right}-n{self.n}-{self.steps}-{majors}-{swizzles}{more}"


def check_wgmma(case: Case, place: str) -> None:
    rng = np.random.default_rng(5)
    k = case.steps * 8 * per_word(case.left)
    a, b, c = whole(rng, 64, k), whole(rng, case.n, k), whole(rng, 64, case.n)
    given_a, given_b = (
        words(values.T if major == MN else values, number, place)
        for values, major, number in zip((a, b), case.majors, (case.left, case.right), strict=True)
    )
    for accumulate in (False, True):
        found = torch.from_numpy(c.astype(np.float32)).to(place)
        run(SOURCE, case.expression, 1, 128, [given_a, given_b, found, i32(accumulate)], smem=case.smem)
        assert np.array_equal(found.cpu().numpy(), a @ b.T + accumulate * c)


CASES = [
    # Each type from both places, with K longer than an atom's row too.
    *(Case(left, right, 16, 6) for left, right in PAIRS),
    *(Case(left, right, 16, 2, in_registers=True) for left, right in PAIRS),
    # Each width.
    *(Case(n=n, steps=1) for n in (8, *range(16, 257, 16))),
    *(Case(n=n, steps=1, in_registers=True) for n in (8, 96, 256)),
    # Each layout of each operand.
    *(Case("bf16", "bf16", 64, 4, (major, K), (swizzle, 1)) for major in (K, MN) for swizzle in SWIZZLES),
    *(Case("bf16", "bf16", 128, 4, (K, major), (1, swizzle)) for major in (K, MN) for swizzle in SWIZZLES),
    Case("f16", "f16", 128, 4, (MN, MN), (1, 1)),
    Case("f16", "f16", 96, 8, (MN, MN), (2, 2)),
    *(Case("bf16", "bf16", 192, 8, (K, MN), (1, swizzle), in_registers=True) for swizzle in (1, 0)),
    *(Case("e4m3", "e4m3", 32, 4, (K, K), (swizzle, swizzle)) for swizzle in SWIZZLES),
    *(Case("tf32", "tf32", 32, 4, (K, K), (swizzle, swizzle)) for swizzle in SWIZZLES),
    # Patterns that begin elsewhere than at their usual multiple of bytes: the descriptor's base offset.
    *(
        Case("f16", "f16", 64, 4, (major, major), (swizzle, swizzle), start=384)
        for major in (K, MN)
        for swizzle in (1, 2, 3)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wgmma(place: str, case: Case) -> None:
    check_wgmma(case, place)


def test_groups_of_wgmma(place: str) -> None:
    rng = np.random.default_rng(6)
    a, b = whole(rng, 64, 16), whole(rng, 2, 32, 16)
    found = torch.zeros((3, 64, 32), device=place)
    run(
        SOURCE,
        "probe::groups<32>",
        1,
        128,
        [words(a, "f16", place), words(b, "f16", place), found],
        smem=2048 + 2 * 1024,
    )
    first, second = (a @ part.T for part in b)
    assert np.array_equal(found.cpu().numpy(), np.stack([first, second, 2 * first + second]))


def swizzled(values: np.ndarray) -> np.ndarray:
    """A matrix of two-byte numbers as pieces of 64 along k, each as it lies in shared memory: 16 bytes at a time change places."""
    rows, k = values.shape
    pieces = values.reshape(rows, k // 64, 8, 8).transpose(1, 0, 2, 3)  # [tile, row, 16 bytes, element]
    row, at = np.arange(rows)[:, None], np.arange(8)[None, :]
    return pieces[:, row, at ^ row % 8]


def pipeline(pending: int, early: bool, place: str) -> tuple[np.ndarray, np.ndarray]:
    """What came out, and what should."""
    n, tiles, stages = 48, 7, 3
    rng = np.random.default_rng(8)
    a, b = whole(rng, 64, tiles * 64), whole(rng, n, tiles * 64)
    found = torch.zeros((64, n), device=place)
    given = [words(swizzled(a), "bf16", place), words(swizzled(b), "bf16", place), found]
    expression = f"probe::pipeline<{n}, {tiles}, {stages}, {pending}, {str(early).lower()}>"
    run(SOURCE, expression, 1, 160, given, smem=stages * (64 * 128 + n * 128 + 16))
    return found.cpu().numpy(), a @ b.T


@pytest.mark.parametrize("pending", [0, 1])
def test_pipeline(place: str, pending: int) -> None:
    assert np.array_equal(*pipeline(pending, False, place))


# --- Faults ----------------------------------------------------------------------------------------------------------

FAULTS = [
    "none", "no fence", "touched after fence", "touched in flight", "early read", "no async fence", "no barrier", "overwritten",
    "outside", "stray bits", "lanes differ", "misaligned", "wrong swizzle", "wrong stride", "not named",
]  # fmt: skip
SAID = {
    "no fence": "no wgmma_fence has named",
    "touched after fence": "were written to",
    "touched in flight": "were written to",
    "no async fence": "fence_async",
    "no barrier": "race on shared memory|before anything is written|fence_async",
    "overwritten": "race on shared memory",
    "outside": "outside the block's shared memory",
    "stray bits": "bits set that mean nothing",
    "lanes differ": "name different operands",
    "misaligned": "not aligned to 16 bytes",
}


def run_fault(
    name: str, threads: int = 128, arch: str = "sm_90a", kernel: str = "", place: str = "cpu", seed: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """What came out, and what should."""
    rng = np.random.default_rng(7)
    a, b = whole(rng, 64, 16), whole(rng, 32, 16)
    found = torch.zeros((64, 32), device=place)
    given = [words(a, "f16", place), words(b, "f16", place), found]
    expression = kernel or f"probe::fault<{FAULTS.index(name)}>"
    run(SOURCE, expression, 1, threads, given, smem=4096, arch=arch, seed=seed)
    return found.cpu().numpy(), a @ b.T


@pytest.mark.parametrize("name", SAID)
def test_faults_are_found(name: str) -> None:
    with pytest.raises(tkjit.EmulatorError, match=SAID[name]):
        run_fault(name)


@pytest.mark.parametrize("fault", ["kWrittenInFlight", "kWrittenAfterAnotherGroup"])
def test_planted_write_to_a_fragment_under_way_is_found_in_every_schedule(fault: str) -> None:
    for seed in range(50):
        with pytest.raises(tkjit.EmulatorError, match="fragment A was written to while a wgmma was under way"):
            run_fault("", kernel=f"probe::fragments<probe::{fault}>", seed=seed)


@pytest.mark.parametrize("twin", ["kNoFault", "kVariablesOfALoop"])
def test_planted_writes_clean_twins_pass_in_every_schedule(twin: str, place: str) -> None:
    for seed in range(50 if place == "cpu" else 1):
        assert np.array_equal(*run_fault("", kernel=f"probe::fragments<probe::{twin}>", place=place, seed=seed))


def test_the_kernel_of_the_faults_is_right_without_one() -> None:
    assert np.array_equal(*run_fault("none"))


@pytest.mark.parametrize("name", ["early read", "not named"])
def test_accumulators_are_nan_until_they_are_waited_for(name: str) -> None:
    found, _ = run_fault(name)
    assert np.isnan(found).all()


@pytest.mark.parametrize("name", ["wrong swizzle", "wrong stride"])
def test_a_wrong_descriptor_gives_a_wrong_answer(name: str) -> None:
    found, expected = run_fault(name)
    assert not np.array_equal(found, expected)


def test_a_place_that_is_given_back_too_early_is_found() -> None:
    with pytest.raises(tkjit.EmulatorError, match="race on shared memory"):
        pipeline(1, True, "cpu")


def test_a_warpgroup_has_four_warps() -> None:
    with pytest.raises(tkjit.EmulatorError, match="fewer than four warps"):
        run_fault("none", threads=96)


def test_only_hopper_has_wgmma() -> None:
    with pytest.raises(tkjit.EmulatorError, match="no wgmma"):
        run_fault("none", arch="sm_100a")
