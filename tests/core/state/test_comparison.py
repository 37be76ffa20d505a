"""State dict trees compared: every difference has its place, and what is equal has none."""

from __future__ import annotations

import collections
import copy
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from resume_adapters.core.checkpoint.native_files import read_native
from resume_adapters.core.state.comparison import copied, first_difference, load_verified, same_bits
from resume_adapters.errors import NotRestored


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


class Halving(torch.optim.SGD):
    """Changes in place what it has loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["momentum_buffer"].mul_(0.5)


class Uncopied(TwoTensor):
    """As quantized moments: torch cannot clone it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            raise NotImplementedError
        return super().__torch_dispatch__(func, types, args, kwargs)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return Uncopied(inner["a"], inner["b"])


def test_a_tensor_that_torch_cannot_copy_is_copied() -> None:
    state = {"state": {0: [Uncopied(torch.ones(2), torch.zeros(2))]}, "lr": 0.1}
    with pytest.raises(NotImplementedError):
        copy.deepcopy(state)
    found = copied(state)
    assert first_difference(state, found) is None
    found["state"][0][0].a.zero_()
    assert first_difference(state, found) is not None


def test_what_shares_memory_shares_it_in_a_copy_too() -> None:
    bank, alone = torch.ones(200, 200), torch.arange(40000.0).reshape(200, 200).t()
    state = {"bank": bank, "row": bank[3], "queue": deque([bank[5:7]]), "alone": alone, "again": [alone]}
    found = copied(state)
    found["bank"].zero_()
    found["alone"][0, 1] = 5
    assert found["row"].sum() == found["queue"][0].sum() == 0 and found["again"][0] is found["alone"]
    assert found["alone"].stride() == alone.stride() and (found["alone"][1:] == alone[1:]).all()
    assert bank.sum() == 40000 and alone[0, 1] == 200


def test_what_trains_neither_lies_in_the_file_nor_proves_itself(tmp_path: Path) -> None:
    def trained(kind: type[torch.optim.SGD]) -> torch.optim.SGD:
        weight = torch.ones(3, requires_grad=True)
        optimizer = kind([weight], lr=0.1, momentum=0.9)
        weight.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return optimizer

    torch.save(trained(torch.optim.SGD).state_dict(), tmp_path / "optimizer.pt")
    saved, live = read_native(tmp_path / "optimizer.pt"), trained(torch.optim.SGD)
    load_verified("optimizer", live, saved)
    for moments in (next(iter(live.state.values()))["momentum_buffer"], saved["state"][0]["momentum_buffer"]):
        assert moments.tolist() == [1.0, 1.0, 1.0]
        moments.zero_()
    with pytest.raises(NotRestored, match="optimizer was loaded, but its state is not the saved one"):
        load_verified("optimizer", trained(Halving), read_native(tmp_path / "optimizer.pt"))
