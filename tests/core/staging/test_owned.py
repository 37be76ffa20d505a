"""Only what nothing but an optimizer of torch changes, between two calls of its hooks, is copied later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resume_adapters.core.staging.owned import owned_storages


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Unhooked(torch.optim.SGD):
    """It is not made as torch makes its optimizers, so torch does not call its hooks."""

    def __init__(self, parameters: list[Any]) -> None:
        self.param_groups = [{"params": parameters}]
        self.state: Any = {}

    def step(self, closure: Any = None) -> None:
        """Change the weights."""


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(200, 200)


def names(*optimizers: Any, restless: tuple[str, ...] = ()) -> list[str]:
    return [each.name for each in owned_storages(optimizers, restless, may_wait=True).values() if each.may_wait]


def test_parameters_and_moments_are_the_optimizers(model: torch.nn.Linear) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(200)).sum().backward()
    optimizer.step()
    owned = ["parameter 0 of AdamW", "exp_avg of parameter 0 of AdamW", "exp_avg_sq of parameter 0 of AdamW"]
    assert names(optimizer) == names(Wrapper(Wrapper(optimizer))) == owned, "the bias and the steps are too small"
    assert names(optimizer, restless=("exp_avg of parameter 0 of AdamW",)) == [owned[0], owned[2]]


def test_others_may_change_weights_at_any_time(model: torch.nn.Linear) -> None:
    assert names(Unhooked(list(model.parameters())), object()) == []


def test_what_is_not_on_the_cpu_is_copied_at_once() -> None:
    assert names(torch.optim.SGD([torch.nn.Parameter(torch.empty(200, 200, device="meta"))])) == []
