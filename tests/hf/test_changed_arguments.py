"""Arguments, and values of the model's configuration, that a callback changes while it trains."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from resume_adapters.hf import ResumeCallback


class Interrupted(Exception):
    pass


class Config(PretrainedConfig):
    model_type = "scaled"
    scale: float = 1.0


class Model(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(rows) * self.config.scale - 1).square().mean()}


CHANGES: dict[str, Any] = {
    "max_grad_norm": lambda trainer: setattr(trainer.args, "max_grad_norm", 0.01),
    "gradient_accumulation_steps": lambda trainer: setattr(trainer.args, "gradient_accumulation_steps", 2),
    "end": lambda trainer: setattr(trainer.state, "max_steps", 17),
    "config": lambda trainer: setattr(trainer.model.config, "scale", 3.0),
}


class Changing(TrainerCallback):  # type: ignore[misc]
    def __init__(self, change: Any, kill: int) -> None:
        self._change, self._kill = change, kill

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 4:
            self._change(self.trainer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self._kill:
            raise Interrupted


def train(directory: Path, change: str, *, kill: int = -1, bare: bool = False) -> list[float]:
    torch.manual_seed(0)
    callback = Changing(CHANGES[change], kill)
    arguments = TrainingArguments(
        str(directory), num_train_epochs=3, per_device_train_batch_size=4, save_steps=2, learning_rate=0.1, optim="sgd",
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    losses: list[float] = []

    class Recording(Trainer):  # type: ignore[misc]
        def training_step(self, *given: Any, **more: Any) -> Any:
            losses.append(float(super().training_step(*given, **more)))
            return torch.tensor(losses[-1])

    data = [{"rows": torch.tensor([index / 8, 1 - index / 8])} for index in range(40)]
    callbacks = [callback] if bare else [callback, ResumeCallback()]
    trainer = callback.trainer = Recording(Model(Config()), arguments, train_dataset=data, callbacks=callbacks)
    with contextlib.suppress(Interrupted):
        trainer.train()
    return losses


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_changes_stays_changed(tmp_path: Path, change: str) -> None:
    expected = train(tmp_path / "bare", change, bare=True)
    assert train(tmp_path / "whole", change) == expected, "a run that is not killed is as without the callback"
    early = train(tmp_path / "killed", change, kill=7)
    late = train(tmp_path / "killed", change)
    assert early == expected[: len(early)] and late == expected[-len(late) :]
    assert 0 < len(late) < len(expected) <= len(early) + len(late)
