"""Two tensors are compared by bits, and measured as numbers."""

from __future__ import annotations

import math

import pytest
import torch

from resume_adapters.core.state.tensor_difference import TensorDifference, measure

NAN, INFINITE = float("nan"), float("inf")


def found(a, b, dtype=torch.float32):
    return measure([(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))])


def test_equal_bits_are_equal_also_where_they_are_no_numbers() -> None:
    assert found([1.0, NAN, -0.0], [1.0, NAN, -0.0]) is None
    assert measure([]) is None


def test_counts_and_measures_over_all_pieces() -> None:
    pieces = [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])),
        (torch.tensor([3.0]), torch.tensor([3.0])),
        (torch.tensor([-1.0, 8.0]), torch.tensor([1.0, 8.5])),
    ]
    assert measure(pieces) == TensorDifference(5, 3, 2.0, 2.0, 0, 0)


def test_counts_what_is_nan_on_one_side() -> None:
    assert found([NAN, 1.0, NAN, 5.0], [1.0, NAN, NAN, 4.0]) == TensorDifference(4, 3, 1.0, 0.2, 1, 1)
    assert found([NAN], [1.0]) == TensorDifference(1, 1, None, None, 1, 0)


def test_a_zero_of_another_sign_differs_by_nothing() -> None:
    assert found([0.0], [-0.0]) == TensorDifference(1, 1, 0.0, 0.0, 0, 0)


def test_an_infinite_number_is_infinitely_far_away() -> None:
    difference = found([INFINITE], [1.0])
    assert difference == TensorDifference(1, 1, INFINITE, INFINITE, 0, 0)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64]
)
def test_measures_every_type_of_number(dtype: torch.dtype) -> None:
    assert found([1, 0, 1], [1, 1, 1], dtype) == TensorDifference(3, 1, 1.0, 1.0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_measures_complex_numbers(dtype: torch.dtype) -> None:
    difference = found([1 + 0j, 3 + 4j], [1 + 0j, 0j], dtype)
    assert difference is not None
    assert (difference.differing, difference.max_absolute) == (1, 5.0)
    assert difference.max_relative is not None and math.isclose(difference.max_relative, 1.0)
