"""A state that stays what it is while the training goes on."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch

from resume_adapters.core.state.frozen import FrozenBuffers, FrozenState, TakenBuffer
from resume_adapters.core.state.records import FRESH, Record

LARGE = 1 << 17


class Pair(NamedTuple):
    left: list[int]
    right: int


def test_what_is_small_is_copied() -> None:
    tensor, array, nested = torch.zeros(3), np.zeros(2), {"a": [1, (Pair([1], 2), {3})], "b": None, "c": True}
    losses = [0.5, 1, None]
    live = {"tensor": tensor, "array": array, "nested": nested, "words": random.getstate()[1], "losses": losses}
    frozen = FrozenState(live)
    losses.append(2)
    tensor.add_(1)
    array += 1
    nested["a"].append(2)  # type: ignore[union-attr]
    nested["a"][1][0].left.append(5)  # type: ignore[index]
    tree = frozen.tree
    assert tree["tensor"].tolist() == [0, 0, 0]
    assert tree["array"].tolist() == [0, 0]
    assert tree["nested"] == {"a": [1, (Pair([1], 2), {3})], "b": None, "c": True}
    assert isinstance(tree["nested"]["a"][1][0], Pair)
    assert tree["words"] == live["words"]
    assert tree["losses"] == [0.5, 1, None]
    assert frozen.is_intact


@dataclass
class Place(Record):
    loss: torch.Tensor
    words: dict[str, int]
    index: Annotated[int, FRESH]


def test_containers_stay_what_they_are() -> None:
    tensor, counted = torch.zeros(3), Counter(a=1)
    live = {"c": counted, "o": OrderedDict(t=tensor), "d": defaultdict(list, {1: [2]}), "q": deque([1], 2)}
    frozen = FrozenState(live)
    counted.update(["a"])
    tensor.add_(1)
    found = frozen.tree
    assert [*map(type, found.values())] == [Counter, OrderedDict, defaultdict, deque]
    assert found["c"] == Counter(a=1) and found["o"]["t"].tolist() == [0.0] * 3
    assert found["d"][3] == [] and found["q"].maxlen == 2


def test_records_are_copied_and_become_trees_when_they_are_asked_for() -> None:
    place = Place(torch.zeros(2), {"words": 1}, 3)
    frozen = FrozenState([place])
    place.loss += 1
    (tree,) = frozen.tree
    assert tree["loss"].tolist() == [0, 0] and tree["words"] == place.words and tree["index"] == 3


def test_what_is_large_is_kept_as_it_is_and_watched() -> None:
    large = torch.zeros(LARGE)
    frozen = FrozenState([large])
    assert frozen.tree[0] is large
    assert frozen.is_intact
    large.add_(1)
    assert not frozen.is_intact


def test_buffers_are_restored_whatever_changed_them() -> None:
    norm = torch.nn.BatchNorm1d(2)
    norm.register_buffer("replaced", torch.zeros(1))
    norm.register_buffer("large", torch.zeros(LARGE))
    norm.register_buffer("absent", None)
    held = FrozenBuffers([norm, torch.nn.Sequential(norm)])
    held.take()
    first = held.take()
    for _ in range(2):
        norm(torch.randn(4, 2))
        norm.replaced = norm.replaced + 1
        norm.large += 1
        held.restore(first)
        assert norm.running_mean.tolist() == [0, 0]
        assert norm.running_var.tolist() == [1, 1]
        assert norm.num_batches_tracked == 0
        assert norm.replaced.item() == 0
        assert norm.large.sum() == 0
    norm(torch.randn(4, 2))
    second = held.take()
    mean = norm.running_mean.clone()
    norm(torch.randn(4, 2))
    held.restore(second)
    assert torch.equal(norm.running_mean, mean)
    held.restore(first)
    assert norm.running_mean.tolist() == [0, 0] and norm.large.sum() == 0


def test_buffers_of_a_scripted_module_are_restored() -> None:
    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(2)
            self.register_buffer("replaced", torch.zeros(1))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.replaced = self.replaced + 1
            return self.norm(rows)

    module = torch.jit.script(Counted())
    held = FrozenBuffers([torch.nn.Sequential(module)])
    first = held.take()
    module(torch.randn(4, 2))
    held.restore(first)
    assert module.norm.running_mean.tolist() == [0, 0] and module.replaced.item() == 0


def contents(taken: Mapping[str, TakenBuffer]) -> dict[str, object]:
    return {key: each.content for key, each in taken.items()}


def test_a_large_buffer_that_changes_unnoticed_is_none_of_a_step_before() -> None:
    """It is found at the fourth time; what was taken before may be of any step before that."""
    module = torch.nn.Module()
    module.register_buffer("book", torch.zeros(LARGE))
    buffers, taken = FrozenBuffers([module]), []
    for step in range(6):
        module.book.data.fill_(step * (step > 1))
        taken.append(buffers.take())
    assert [buffers.is_intact(each) for each in taken] == [False, False, False, True, True, True]
    buffers.restore(taken[4])
    assert module.book[0] == 4


class Caching(torch.nn.Module):
    """Its buffers come and go: one is filled later, one is emptied, and one is deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filled", None)
        self.register_buffer("emptied", torch.ones(2))
        self.register_buffer("deleted", torch.ones(3))

    def go_on(self) -> None:
        self.filled, self.emptied = torch.ones(1), None
        del self.deleted


def held(module: Caching) -> list[object]:
    return [
        None if each is None else each.tolist() for each in map(module._buffers.get, ("filled", "emptied", "deleted"))
    ]


def test_buffers_that_come_and_go_are_restored() -> None:
    module = Caching()
    buffers = FrozenBuffers([module])
    taken = buffers.take()
    module.go_on()
    buffers.restore(taken)
    assert held(module) == [None, [1, 1], [1, 1, 1]]
    module.go_on()
    taken = buffers.take()
    module.filled += 1
    module.emptied = torch.zeros(2)
    module.deleted = torch.zeros(3)
    other = Caching()
    FrozenBuffers([other]).load(contents(taken))
    buffers.restore(taken)
    assert held(module) == held(other) == [[1], None, None]
