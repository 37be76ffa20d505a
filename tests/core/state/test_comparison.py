"""State dict trees compared: every difference has its place, and what is equal has none."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from resume_adapters.core.state.comparison import first_difference, same_bits


@pytest.mark.parametrize(
    ("saved", "live", "place"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, "a.1"),
        ({"a": 1}, {}, "a: not restored"),
        ({}, {"a": 1}, "a: was not saved"),
        ([1], [1, 2], "1 items saved, 2 restored"),
        (1, True, "saved 1, restored True"),
        (1, 1.0, "saved 1, restored 1.0"),
        (0.0, -0.0, "saved 0.0"),
        ("1", 1, "saved '1'"),
        (None, 0, "saved None"),
        (b"x", b"y", "saved b'x'"),
        ({1}, {2}, "saved {1}"),
        (np.float32(1), np.float32(2), "float32"),
        (np.float32(1), np.float64(1), "float32"),
        (np.zeros(2), np.zeros((1, 2)), "float64 (2,)"),
        (np.zeros(1), np.array([-0.0]), "float64"),
        (torch.zeros(1), torch.tensor([-0.0]), "torch.float32 (1,)"),
        (torch.zeros(1), torch.zeros(1, dtype=torch.float64), "torch.float64"),
        (torch.zeros(1), torch.zeros(1, 1), "(1, 1)"),
        (torch.zeros(1), 0.0, "saved tensor"),
        (torch.float32, torch.float64, "torch.float32"),
        ({1: {"a": (0, 1)}}, {1: {"a": (0, 2)}}, "1.a.1"),
    ],
)
def test_every_kind_of_difference_is_found_and_placed(saved: Any, live: Any, place: str) -> None:
    difference = first_difference(saved, live)
    assert difference is not None
    assert place in difference


@pytest.mark.parametrize(
    "make",
    [
        lambda: math.nan,
        lambda: np.float32("nan"),
        lambda: torch.tensor([math.nan]),
        lambda: np.array([math.nan]),
        lambda: collections.UserDict(a=torch.ones(2)),
        lambda: {"b": (1, [2.5, None])},
    ],
)
def test_equal_states_have_no_difference(make: Callable[[], Any]) -> None:
    assert first_difference(make(), make()) is None


def test_an_object_is_what_it_holds() -> None:
    """A script may trust a class of its own; what is loaded is another object of it."""

    class Projector:
        def __init__(self, value: float) -> None:
            self.matrix = torch.full((2,), value)

    assert first_difference({"a": Projector(1.0)}, {"a": Projector(1.0)}) is None
    assert (first_difference({"a": Projector(1.0)}, {"a": Projector(2.0)}) or "").startswith("a.matrix: ")
    assert first_difference({"a": math.sqrt}, {"a": math.floor}) is not None
    assert first_difference({"a": Projector}, {"a": Another}) is not None


class Another:
    pass


@pytest.mark.parametrize("size", [1, 7, 8, 9, 24])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_each_byte_of_any_length_and_place_is_compared(size: int, start: int) -> None:
    memory = torch.arange(start + size, dtype=torch.uint8)
    one = memory[start:]
    assert same_bits(one, one.clone())
    for index in range(size):
        other = one.clone()
        other[index] += 1
        assert not same_bits(one, other)


def test_large_trees_are_compared_in_threads() -> None:
    """The first difference in the order of the tree is named, whichever is found first."""
    saved = {str(index): torch.zeros(1 << 20) for index in range(6)}
    live = {name: each.clone() for name, each in saved.items()}
    assert first_difference(saved, live) is None
    live["4"][-1] = live["2"][0] = 1.0
    assert (first_difference(saved, live) or "").startswith("2: saved torch.float32 (1048576,)")
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (3,))
    assert first_difference([sparse], [sparse.clone()]) is None


def test_a_tensor_that_wraps_others_is_what_they_are() -> None:
    """As the quantized moments of torchao are."""
    one, other = torch.ones(3), torch.tensor([1.0, 1.0, 2.0])
    assert first_difference({"m": TwoTensor(one, one)}, {"m": TwoTensor(one, one.clone())}) is None
    found = first_difference({"m": TwoTensor(one, one)}, {"m": TwoTensor(one, other)})
    assert found is not None and found.startswith("m.b: ")
