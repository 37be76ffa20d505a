"""Gradients that a step leaves are captured where a later one uses them, whatever the loop's habit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from resume_adapters.core.observed.gradients import LeftGradients
from resume_adapters.core.observed.steps import watch_steps


class Loop:
    def __init__(self, *, sparse: bool = False) -> None:
        self.model = torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=sparse), torch.nn.Linear(3, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.left = LeftGradients()
        self.close = watch_steps(self.left.after_step)

    def step(self) -> None:
        self.model(torch.tensor([1, 2])).sum().backward()
        self.optimizer.step()

    def needed(self) -> list[bool]:
        return [self.left.is_needed(each) for each in self.model.parameters()]

    def end_step(self) -> None:
        self.left.end_step(list(self.model.parameters()))


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def test_a_sparse_gradient_is_needed_whatever_was_seen() -> None:
    loop = Loop(sparse=True)
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.step()
        loop.end_step()
    loop.close()
    assert loop.needed() == [True, False, False]


def test_what_is_cleared_as_a_step_begins_is_of_no_use(loop: Loop) -> None:
    loop.step()
    assert all(loop.needed()), "nothing is known yet"
    loop.end_step()
    loop.optimizer.zero_grad()
    loop.step()
    assert not any(loop.needed())


def test_what_is_cleared_at_every_third_step_is_needed(loop: Loop) -> None:
    for step in range(5):
        if step % 3 == 0:
            loop.optimizer.zero_grad()
        loop.step()
        loop.end_step()
    assert all(loop.needed())
    loop.optimizer.zero_grad()
    assert not any(loop.needed()), "there is nothing"


def test_a_closure_that_clears_is_seen(loop: Loop) -> None:
    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.model(torch.tensor([1, 2])).sum()
        loss.backward()
        return loss

    for _ in range(2):
        loop.optimizer.step(closure)  # type: ignore[arg-type]  # torch's own annotation wants a float
        loop.end_step()
    assert not any(loop.needed())


def test_what_another_model_leaves_after_the_step_is_needed(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
        loop.optimizer.zero_grad()
        loop.model(torch.tensor([1, 2])).sum().backward()
        loop.end_step()
    assert all(loop.needed())


def test_a_habit_that_changes_is_seen_after_a_save(loop: Loop) -> None:
    for _ in range(20):
        loop.optimizer.zero_grad()
        loop.step()
        loop.end_step()
    loop.left.look(list(loop.model.parameters()))
    loop.step()
    assert all(loop.needed())
