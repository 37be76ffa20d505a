"""Scripts that go past the run are refused within a few steps; loaders that are made in each epoch resume."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from resume_adapters.accelerate import register_for_resume
from resume_adapters.core.loop.loop import ResumableLoop
from resume_adapters.core.state import rng
from resume_adapters.errors import UnsupportedSetting


class Script:
    """What a script has at its top."""

    def __init__(self, directory: Path, *, samples: int = 24) -> None:
        torch.manual_seed(3)
        self.accelerator = Accelerator(cpu=True, project_dir=str(directory))
        self.model: Any = torch.nn.Linear(2, 1)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader: Any = self.of(samples)
        self.losses: list[float] = []

    def of(self, samples: int) -> DataLoader[Any]:
        values = torch.arange(2.0 * samples).reshape(samples, 2) / samples
        return DataLoader(TensorDataset(values), 4, shuffle=True)

    def prepare(self) -> None:
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.model, self.optimizer, self.loader)

    def register(self, **options: Any) -> ResumableLoop:
        return register_for_resume(self.accelerator, save_every=2, **options)

    def train(self, batch: Any) -> None:
        loss = self.model(batch[0]).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def test_run_batches_forgotten(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.prepare()
    run = script.register()
    with pytest.raises(UnsupportedSetting, match=r"for batch in run\.batches\(loader\):"), run:
        for _ in run.epochs(2):
            for batch in script.loader:
                script.train(batch)
                run.step()
    assert len(script.losses) == 2


def test_run_step_forgotten(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.prepare()
    run = script.register()
    with pytest.raises(UnsupportedSetting, match=r"run\.step\(loss=loss\)"), run:
        for _ in run.epochs(2):
            for batch in run.batches(script.loader):
                script.train(batch)
    assert len(script.losses) == 2


def test_registered_before_prepare(tmp_path: Path) -> None:
    script = Script(tmp_path)
    run = script.register()
    script.prepare()
    with pytest.raises(UnsupportedSetting, match=r"since then 1 model, 1 optimizer came(.|\n)*accelerator\.prepare\("):
        next(run.epochs(1))


def train(script: Script, run: ResumableLoop, until: int | None = None) -> None:
    for _ in run.epochs(1):
        for batch in run.batches(script.loader):
            script.train(batch)
            run.step()
            if len(script.losses) == until:
                return


def of_optimizer(script: Script) -> None:
    script.optimizer = script.accelerator.prepare(script.optimizer)


def of_model(script: Script) -> None:
    script.model = script.accelerator.prepare(script.model)


@pytest.mark.parametrize(
    ("prepare", "parts", "found"),
    [
        (of_model, (), r"AdamW of 2 tensors: .*pass it as a part: register_for_resume\(\.\.\., optimizer=optimizer\)"),
        (of_optimizer, (), r"AdamW trains 2 tensors that belong to no saved model"),
        (of_model, ("optimizer",), ""),
        (of_optimizer, ("model",), ""),
    ],
    ids=["optimizer", "model", "optimizer as a part", "model as a part"],
)
def test_what_was_not_prepared(
    prepare: Callable[[Script], None],
    parts: tuple[str, ...],
    found: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Refused at its second step, or captured as a part; never said to be captured where it is not."""
    script = Script(tmp_path)
    prepare(script)
    run = script.register(**{name: getattr(script, name) for name in parts})
    with caplog.at_level(logging.INFO, "resume_adapters"), run:
        if found:
            with pytest.raises(UnsupportedSetting, match=found):
                train(script, run)
        else:
            train(script, run)
    assert len(script.losses) == (1 if found else 6)
    assert " 0 prepared" not in caplog.text


def curriculum(directory: Path, until: int | None = None) -> list[float]:
    """Train on more data in each epoch; leave after some batches, as if killed."""
    script = Script(directory)
    script.prepare()
    run = script.register()
    for epoch in run.epochs(4):
        loader = script.accelerator.prepare(script.of(8 + 4 * epoch))
        for batch in run.batches(loader):
            script.train(batch)
            run.step()
            if len(script.losses) == until:
                run._run.saver.flush()
                run._session.close()
                return script.losses
    return script.losses


def test_a_loader_made_in_each_epoch_resumes(tmp_path: Path) -> None:
    whole = curriculum(tmp_path / "whole")
    assert len(whole) == 14
    for until in (4, 5, 3):
        found = curriculum(tmp_path / "killed", until)
    rest = curriculum(tmp_path / "killed")
    assert 0 < len(rest) < 10 and rest == whole[-len(rest) :] and found


def test_loaders_made_in_each_epoch_do_not_pile_up(tmp_path: Path) -> None:
    """What ``prepare`` returns is no ``DataLoader`` by its type, and is known as made in the loop all the same."""
    script = Script(tmp_path)
    script.prepare()
    run = script.register()
    for _ in run.epochs(3):
        for batch in run.batches(script.accelerator.prepare(script.of(8))):
            script.train(batch)
            run.step()
        assert [each.made_in_loop for each in run._passes.states(rng.capture())] == [True]


class Posed(Script):
    """Its optimizer also trains a plain tensor."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.pose = torch.zeros(2, requires_grad=True)
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), self.pose], lr=0.1)
        self.prepare()

    def train(self, batch: Any) -> None:
        super().train([batch[0] + self.pose])


def test_a_tensor_that_is_trained_beside_the_model_goes_on(tmp_path: Path) -> None:
    whole = Posed(tmp_path / "whole")
    with whole.register() as run:
        train(whole, run)
    killed = Posed(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), killed.register() as run:
        train(killed, run, 3)
        raise KeyboardInterrupt
    again = Posed(tmp_path / "run")
    with again.register() as run:
        train(again, run)
    assert again.losses == whole.losses[2:] and torch.equal(again.pose, whole.pose)
