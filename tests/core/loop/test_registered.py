"""Objects without names get the states of those that they were."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from resume_adapters.core.loop.registered import RegisteredObjects
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
    return StatefulGroup(registered, announce=registered.log_order)


def test_objects_of_one_class_are_paired_by_order_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    saved = group(Average().train(3), Average().train(5), Average(3)).state_dict()
    first, second, third = Average(), Average(), Average(3)
    with caplog.at_level(logging.INFO, "resume_adapters"):
        group(first, second, third).load_state_dict(saved)
    assert (first.updates, second.updates, third.updates) == (3, 5, 0)
    assert "objects of class Average get their states in the order in which they were registered" in caplog.text


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
