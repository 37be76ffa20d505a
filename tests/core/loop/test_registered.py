"""Objects without names get the states of those that they were."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from resume_adapters.core.loop.registered import RegisteredObjects, tell_apart
from resume_adapters.core.state.stateful import StatefulGroup


class Average:
    """An average of weights, as scripts write it."""

    def __init__(self, width: int = 2, decay: float = 0.9) -> None:
        self.decay, self.updates, self.shadow, self.history = decay, 0, torch.zeros(width), []

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "history": list(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def train(self, steps: int) -> Average:
        for _ in range(steps):
            self.updates, self.shadow = self.updates + 1, self.shadow + self.updates
            self.history.append(self.updates)
        return self


def group(*objects: Average) -> StatefulGroup:
    registered = RegisteredObjects(objects)
    return StatefulGroup(registered, pair=registered.pair)


@pytest.mark.parametrize("kinds", [((2, 0.9), (3, 0.9)), ((2, 0.9), (2, 0.99))], ids=["shapes", "settings"])
def test_objects_that_have_changed_places_are_known_by_what_they_hold(
    kinds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved = group(Average(*kinds[0]).train(3), Average(*kinds[1]).train(5)).state_dict()
    second, first = Average(*kinds[1]), Average(*kinds[0])
    resumed = group(second, first)
    with caplog.at_level(logging.INFO, "resume_adapters"):
        resumed.load_state_dict(saved)
    assert (first.updates, second.updates) == (3, 5)
    assert resumed.state_dict() == saved  # a later launch finds them under the names that they had
    assert "class Average have another order" in caplog.text and "not tell all of them apart" not in caplog.text


def test_objects_that_are_alike_are_paired_by_order_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    saved = group(Average().train(3), Average().train(5), Average(3)).state_dict()
    first, second, third = Average(), Average(), Average(3)
    with caplog.at_level(logging.INFO, "resume_adapters"):
        group(first, second, third).load_state_dict(saved)
    assert (first.updates, second.updates, third.updates) == (3, 5, 0)
    assert "3 objects of class Average were registered" in caplog.text and "another order" not in caplog.text


def test_one_of_a_class_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "resume_adapters"):
        group(Average()).load_state_dict(group(Average()).state_dict())
        group(Average(), Average()).load_state_dict({})
    assert not caplog.text


def test_objects_that_come_later_have_names_too() -> None:
    objects = [Average()]
    registered = RegisteredObjects(objects)
    assert list(registered) == ["Average"]
    objects.append(Average(3))
    assert list(registered) == ["Average", "Average.1"] and len(registered) == 2
    assert registered["Average.1"] is objects[1]


def test_values_that_only_happen_to_be_alike_tell_nothing_apart() -> None:
    """The second began at 100, and the first has come there."""
    before, now = tell_apart([{"count": 100}, {"count": 200}], [{"count": 0}, {"count": 100}])
    assert before == now == [(), ()]


def test_places_that_contradict_each_other_tell_nothing_apart() -> None:
    saved = [{"a": 1, "b": 1}, {"a": 2, "b": 2}]
    before, now = tell_apart(saved, [{"a": 1, "b": 2}, {"a": 2, "b": 1}])
    assert before == now == [(), ()]


def test_a_list_and_an_entry_that_only_one_has_tell_apart() -> None:
    saved = [{"sizes": [1, 2]}, {"sizes": [1]}]
    before, now = tell_apart(saved, [{"sizes": (1,)}, {"sizes": (1, 2)}])
    assert before == [*reversed(now)] and len(set(before)) == 2
