"""A hand-written loop whose script registers nothing: what is found anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, SequentialLR

from resume_adapters.core.loop.observed import subjects

from plain_torch import Killed, Launch, killed_after


class Counting(torch.nn.Linear):
    """Counts its calls, and learns to have no bias after some of them."""

    def __init__(self) -> None:
        super().__init__(1, 4)
        self.calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            self.bias.requires_grad_(False)
            self.bias.grad = None
        return super().forward(values) * (1 + self.calls / 100)


def launch(directory: Path, *rest: Any) -> Launch:
    """Return a launch with a counting layer, and with schedulers that only the script knows."""
    found = Launch(directory, *rest)
    framework = found.framework
    framework.model[0] = Counting()
    framework.optimizer = torch.optim.SGD(framework.model.parameters(), lr=0.01, momentum=0.9)
    framework.schedule = torch.optim.lr_scheduler.LambdaLR(framework.optimizer, lambda step: 1.0)
    unknown = MultiStepLR(framework.optimizer, [4, 9, 14], gamma=0.5)
    train = framework.train

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = train(batch)
        unknown.step()
        return loss

    framework.train = step  # type: ignore[method-assign]
    return found


def test_a_scheduler_a_counter_and_frozen_weights_that_nobody_registered_resume(tmp_path: Path) -> None:
    undisturbed = launch(tmp_path / "whole")()
    for after in (5, 6):
        with pytest.raises(Killed):
            launch(tmp_path / "killed", killed_after(after))()
    resumed = launch(tmp_path / "killed")()
    assert resumed.end == undisturbed.end
    assert resumed.trace == undisturbed.trace[-len(resumed.trace) :]


def test_schedulers_are_found_from_their_optimizers_unless_they_cannot_be_told_apart() -> None:
    first, second, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(3))
    registered = LinearLR(first)
    sequence = SequentialLR(first, [LinearLR(first), MultiStepLR(first, [1])], milestones=[1])
    single, *_alike = CosineAnnealingLR(second, 3), MultiStepLR(second, [1]), MultiStepLR(second, [2])
    foreign = LinearLR(other)
    model = torch.nn.Linear(1, 1)

    class Engine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def backward(self) -> None: ...

    found = subjects([torch.compile(model), Engine()], [first, second], [registered])
    assert found.roots["schedulers"] == {
        "SequentialLR of optimizer 0": sequence,
        "CosineAnnealingLR of optimizer 1": single,
    }
    assert found.roots["model"] is found.roots["model 1"] is model
    del foreign
