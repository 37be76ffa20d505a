"""A hand-written loop whose script registers nothing: what is found anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, MultiStepLR, SequentialLR, StepLR

from resume_adapters.core.loop.guard import Trained
from resume_adapters.core.loop.observed import in_places, subjects
from resume_adapters.core.observed.walk import Subjects

import contract
import plain_torch
from plain_torch import Killed, Launch, PlainTorch, killed_after


def killed_equals_whole(directory: Path, made: Callable[..., Launch]) -> None:
    """Launch until it is killed, twice, and then to the end; it has the steps and the end of one that never was."""
    undisturbed = made(directory / "whole")()
    for after in (5, 6):
        with pytest.raises(Killed):
            made(directory / "killed", killed_after(after))()
    resumed = made(directory / "killed")()
    assert resumed.end == undisturbed.end
    assert resumed.trace == undisturbed.trace[-len(resumed.trace) :]


class ByGroup(Launch):
    """Sets the learning rate in a group of the optimizer that it took before it resumes, as many do."""

    def _plain(self, data: Any) -> None:
        group = self.framework.optimizer.param_groups[0]
        for _ in self._epochs():
            for batch in self.loop.batches(data):
                group["lr"] = 0.005 / (1 + self.loop.global_step)
                self._step(batch)


def test_a_group_that_the_script_holds_is_that_of_the_optimizer_after_a_resume(tmp_path: Path) -> None:
    killed_equals_whole(tmp_path, ByGroup)


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
    killed_equals_whole(tmp_path, launch)


class Adversarial(PlainTorch):
    """The generator's backward leaves gradients in the critic, which adds its own to them in the next step."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.optimizer = torch.optim.SGD(self.model[0].parameters(), lr=0.01)
        self.of_critic = torch.optim.SGD(self.model[2].parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def trained(self) -> Trained:
        return Trained([self.optimizer, self.of_critic], [self.model])

    def subjects(self) -> Subjects:
        optimizers = [self.optimizer, self.of_critic]
        return subjects([self.model], optimizers, [self.schedule, *optimizers, *self.model.buffers()])

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        values, critic = batch.float().reshape(-1, 1), self.model[2]
        self._step(self.of_critic, (critic(self.model[0](values).detach()) - values).square().mean())
        self._stepped = True
        return self._step(self.optimizer, critic(self.model[0](values)).mean())

    def _step(self, optimizer: Any, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def test_gradients_that_a_step_leaves_to_the_next_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_torch, "PlainTorch", Adversarial)
    killed_equals_whole(tmp_path, Launch)


class OtherScheduler:
    """The shape of timm's: no subclass of torch's, stepped with the number of the epoch or the update."""

    def __init__(self, optimizer: Any, decay: float = 0.9) -> None:
        self.optimizer, self.decay, self.updates = optimizer, decay, 0
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def step_update(self) -> None:
        self.updates += 1
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.decay**self.updates

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_a_scheduler_of_another_library_resumes(tmp_path: Path) -> None:
    def made(directory: Path, *rest: Any) -> Launch:
        found = Launch(directory, *rest, given={"lr": 0.01})
        framework = found.framework
        other, train = OtherScheduler(framework.optimizer), framework.train
        framework.schedule = torch.optim.lr_scheduler.LambdaLR(
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), lambda step: 1.0
        )

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = train(batch)
            other.step_update()
            return loss + 0 * framework.optimizer.param_groups[0]["lr"]

        framework.train = step  # type: ignore[method-assign]
        return found

    killed_equals_whole(tmp_path, made)
    assert "schedulers['OtherScheduler of optimizer 0']" in contract.parts(tmp_path / "killed")["observed"]


def test_schedulers_that_nothing_tells_apart_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch(tmp_path, epochs=1)
    alike = [OtherScheduler(launch.framework.optimizer, decay) for decay in (0.9, 0.8)]
    with caplog.at_level("INFO", "resume_adapters"):
        launch()
    assert caplog.text.count("2 schedulers, each a OtherScheduler of optimizer 0, cannot be told apart") == 1
    del alike


def test_schedulers_are_found_from_their_optimizers() -> None:
    first, second, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(3))
    registered = LinearLR(first)
    sequence = SequentialLR(first, [LinearLR(first), MultiStepLR(first, [1])], milestones=[1])
    single, *several = CosineAnnealingLR(second, 3), MultiStepLR(second, [1]), MultiStepLR(second, [2])
    alike = [ExponentialLR(second, 0.9) for _ in range(2)]
    foreign = LinearLR(other)
    model = torch.nn.Linear(1, 1)

    class Engine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

    Engine.__module__ = "deepspeed.runtime.engine"

    found = subjects([torch.compile(model), Engine()], [first, second], [registered])
    schedulers = found.roots["schedulers"]
    assert schedulers.pop("SequentialLR of optimizer 0") is sequence
    assert schedulers.pop("CosineAnnealingLR of optimizer 1") is single
    names = {name: each for name, each in schedulers.items() if name.startswith("MultiStepLR of optimizer 1 (")}
    assert len(names) == 2 and set(map(id, names.values())) == set(map(id, several))
    assert not schedulers.keys() - names
    assert len(found.unnamed) == 1 and "2 schedulers, each a ExponentialLR of optimizer 1" in found.unnamed[0]
    for each in several:
        each.step()
    assert subjects([model], [first, second], [registered]).roots["schedulers"].keys() >= names.keys()
    assert found.roots["model"] is found.roots["model 1"] is model
    del alike
    del foreign


def test_schedulers_that_have_changed_places_are_known_by_their_settings(caplog: pytest.LogCaptureFixture) -> None:
    def made(*steps: int) -> list[Any]:
        first, second = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1) for _ in range(2))
        return [StepLR(first, steps[0]), StepLR(second, steps[1])]

    saved = made(3, 7)
    for count, each in enumerate(saved, 2):
        for _ in range(count):
            each.step()
    states = [each.state_dict() for each in saved]
    with caplog.at_level("INFO", "resume_adapters"):
        assert in_places(states, made(3, 7)) == in_places(states, made(3, 8)) == states
        assert in_places([states[0], states[0]], made(3, 3)) == [states[0], states[0]]
        assert not caplog.text
        assert in_places(states, made(7, 3)) == states[::-1]
    assert "in another order than when they were saved" in caplog.text
