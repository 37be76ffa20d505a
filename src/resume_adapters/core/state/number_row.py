"""A row of numbers, as many as a dataset has samples: an order that a script shuffles, a weight for each sample."""

from __future__ import annotations

from typing import Any

from resume_adapters.core.state.fingerprint import value_digest

_SMALLEST, _LARGEST = -(2**63), 2**63 - 1
"""Whole numbers that an array can hold."""

_NUMBERS, _KIND = "numbers of a row", "kind"


def is_row(value: Any, longest: int) -> bool:
    """Return whether a value is a list of numbers of one type, or an array or a tensor of one dimension.

    Args:
        value: the value.
        longest: numbers that it has at most.
    """
    import numpy as np
    import torch

    if type(value) is list:
        # A list of anything else, however long, is told by its first item.
        if not 0 < len(value) <= longest or type(value[0]) not in (int, float, np.int64):
            return False
        if len(set(map(type, value))) > 1:
            return False
        return type(value[0]) is float or (min(value) >= _SMALLEST and max(value) <= _LARGEST)
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and 0 < len(value) <= longest and value.dtype.kind in "biuf"
    return isinstance(value, torch.Tensor) and value.ndim == 1 and 0 < len(value) <= longest


def row_digest(row: Any) -> str:
    """Return a digest of all numbers of a row."""
    return value_digest(packed(row) if type(row) is list else row)


def packed(row: list[Any]) -> dict[str, Any]:
    """Return a list that is a row as data which is encoded at once, not number by number."""
    import numpy as np

    kind = type(row[0])
    return {_NUMBERS: np.array(row, dtype=np.float64 if kind is float else np.int64), _KIND: kind.__name__}


def is_packed(saved: Any) -> bool:
    """Return whether data are a list that was packed."""
    return isinstance(saved, dict) and saved.keys() == {_NUMBERS, _KIND}


def unpacked(saved: dict[str, Any]) -> list[Any]:
    """Return the list that was packed."""
    numbers = saved[_NUMBERS]
    return list(numbers) if saved[_KIND] == "int64" else list(numbers.tolist())
