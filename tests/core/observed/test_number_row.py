"""Which values are a row of numbers, and what comes back of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from resume_adapters.core.observed.leaves import is_packed, is_row, packed, row_digest, unpacked
from resume_adapters.core.state import encoding


@pytest.mark.parametrize(
    "row",
    [[1, 2], [1.5, float("nan")], [np.int64(1), np.int64(2)], np.arange(2), np.ones(2, bool), torch.ones(2)],
    ids=lambda row: f"{type(row).__name__} of {type(row[0]).__name__}",
)
def test_a_row(row: Any) -> None:
    assert is_row(row, 2) and not is_row(row, 1)
    assert row_digest(row) == row_digest(row) != row_digest(row[::-1] if isinstance(row, list) else row[:1])


@pytest.mark.parametrize(
    "value",
    [
        *([], [True], ["one"], [1, 2.0], [1, None], [2**63], [-(2**63) - 1], (1, 2), {1: 2}, 3),
        *(np.ones((2, 2)), np.array(["one"]), np.array(1), torch.ones(2, 2), torch.tensor(1)),
    ],
    ids=str,
)
def test_no_row(value: Any) -> None:
    assert not is_row(value, 10)


@pytest.mark.parametrize("row", [[1, -(2**63)], [0.1, -0.0], [np.int64(3), np.int64(2)]], ids=str)
def test_a_list_comes_back_as_it_was(row: list[Any]) -> None:
    saved = encoding.decode(*encoding.encode(packed(row)))
    assert is_packed(saved) and not is_packed(row) and not is_packed({"numbers": 1})
    found = unpacked(saved)
    assert [(type(each), repr(each)) for each in found] == [(type(each), repr(each)) for each in row]
