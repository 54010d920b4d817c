"""What the tests of ops are judged by says what differs, and where."""

from __future__ import annotations

import pytest
import torch

from judge import assert_same, same_bits
from tkjit.testing import FLOOR, closeness


@pytest.mark.parametrize("dtype", (torch.int64, torch.uint8, torch.bool, torch.float16, torch.float64), ids=str)
def test_tensors_of_any_number_of_dims_are_compared(dtype: torch.dtype):
    for shape in ((), (0,), (3,), (2, 3)):
        a, b = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        assert_same([a], [b])
        if a.numel():
            b.view(-1)[-1] = 1
            last = tuple(n - 1 for n in shape)
            with pytest.raises(AssertionError) as error:
                assert_same([a], [b], "these")
            assert f"these, tensor 0: 1 of {a.numel()} differ, first at {last}" in str(error.value)


def test_nan_is_nan_and_zero_has_a_sign():
    nan, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(nan, other) and not same_bits(torch.tensor(0.0), torch.tensor(-0.0))


def test_what_was_rounded_on_the_way_is_held_to_that_types_floor():
    """However close torch came by chance; and no result is held to less than its own type's."""
    want = torch.ones(3, dtype=torch.float64)
    for got in (torch.float32, torch.float16, torch.bfloat16):
        for rounded_to in (None, torch.float32, torch.float16, torch.bfloat16):
            verdict = closeness(want.to(got), want, want.to(got), rounded_to=rounded_to)
            assert verdict.bound == max(FLOOR[got], FLOOR[rounded_to or got])
