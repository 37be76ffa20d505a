"""What a training call does to the process and to the trainer's objects; each test trains in the test's own process."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from resume_adapters import KeepBest
from resume_adapters.core.session import finished
from resume_adapters.errors import NotSerialisable, UnsupportedSetting
from resume_adapters.hf import ResumeCallback


class Dying(TrainerCallback):
    """Ends a training after a step as a kill does: nothing is saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Line(torch.nn.Module):
    """Two layers, of which a script may freeze one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.second(self.first(x))
        return {"loss": (found - y).square().mean(), "logits": found}


def samples(count: int = 16) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.tensor([i / 16]), "y": torch.tensor([i / 8])} for i in range(count)]


def arguments(directory: Path, kind: type[TrainingArguments] = TrainingArguments, **options: Any) -> TrainingArguments:
    return kind(
        **{
            "output_dir": str(directory),
            "max_steps": 4,
            "save_steps": 2,
            "per_device_train_batch_size": 2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "label_names": ["y"],
            **options,
        }
    )


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """A process has finished nothing when it starts; what it draws is the same in each test."""
    finished._FINISHED.clear()
    torch.manual_seed(1)
    yield
    finished._FINISHED.clear()


def trainer(directory: Path, *, data: Any = None, model: Any = None, callback: Any = None, **options: Any) -> Trainer:
    return Trainer(
        model=model or Line(),
        args=arguments(directory, **options),
        train_dataset=data or samples(),
        eval_dataset=samples(4),
        callbacks=[callback or ResumeCallback()],
    )


# ---- What a file may hold


def by_numpy(directory: Path, callbacks: list[TrainerCallback]) -> Trainer:
    """Make a trainer whose learning rates are numpy's numbers."""
    model = Line()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 9))
    return Trainer(
        model, arguments(directory), train_dataset=samples(), callbacks=callbacks, optimizers=(optimizer, schedule)
    )


def test_learning_rates_that_numpy_computes_are_resumed(tmp_path: Path) -> None:
    """The bare Trainer refuses to load such a file."""
    whole = by_numpy(tmp_path / "never", [])
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        by_numpy(tmp_path / "run", [ResumeCallback(), Dying(3)]).train()
    torch.manual_seed(1)
    last = by_numpy(tmp_path / "run", [ResumeCallback()])
    last.train()
    assert last.state.global_step == 4
    assert all(
        torch.equal(one, other) for one, other in zip(last.model.parameters(), whole.model.parameters(), strict=True)
    )


def test_a_training_that_a_notebook_has_interrupted_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        by_numpy(tmp_path, [ResumeCallback(), Dying(3)]).train()
    status = json.loads((tmp_path / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["step"], status["reason"]) == ("failed", 3, "KeyboardInterrupt")


def test_what_no_resume_could_load_is_refused_at_the_first_save(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    trained.create_optimizer()
    trained.optimizer.param_groups[0]["kept"] = Dying(9)
    words = r"optimizer\.pt holds \S*test_process\.Dying \(at param_groups\.0\.kept\), which would have to run code"
    with pytest.raises(NotSerialisable, match=words):
        trained.train()
    assert trained.state.global_step == 2 and not list(tmp_path.glob("*/resume/manifest.json"))


REFUSED: dict[str, dict[str, Any]] = {
    "save_only_model": {"save_only_model": True},
    "save_strategy": {"save_strategy": "no"},
    "ignore_data_skip": {"ignore_data_skip": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "enable_jit_checkpoint": {"enable_jit_checkpoint": True},
    "in_order": {"dataloader_in_order": False, "dataloader_num_workers": 2},
}
KNOWN = {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("setting", [setting for setting, args in REFUSED.items() if args.keys() <= KNOWN])
def test_settings_without_an_exact_resume_are_refused(setting: str, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    made = trainer(tmp_path, **REFUSED[setting])
    with pytest.raises(UnsupportedSetting, match=setting):
        made.train()
    signal.signal(signal.SIGTERM, before)  # transformers takes it where a trainer is made with enable_jit_checkpoint
    assert made.state.global_step == 0 and not list(tmp_path.glob("*/resume/manifest.json"))


# ---- Two trainings in one process


def test_a_second_training_in_a_finished_directory_is_refused(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.train()
    again = trainer(tmp_path)
    with pytest.raises(UnsupportedSetting, match=r"output_dir=\.\.\.\), or ResumeCallback\(run_dir=\.\.\.\)"):
        again.train()
    with pytest.raises(UnsupportedSetting, match="ask for more epochs or steps"):
        first.train()
    first.args.max_steps = 6
    assert first.train().global_step == 6


def test_a_second_training_of_something_else_is_refused(tmp_path: Path) -> None:
    """Further steps on other data, and with layers that were frozen before, are no further steps of the same run."""
    model = Line()
    model.first.requires_grad_(False)
    trainer(tmp_path, model=model).train()
    with pytest.raises(UnsupportedSetting, match="with 12 samples in the dataset, 16 then"):
        trainer(tmp_path, model=model, data=samples(12), max_steps=6).train()
    model.first.requires_grad_(True)
    with pytest.raises(UnsupportedSetting, match="with 4 trained tensors, 2 then"):
        trainer(tmp_path, model=model, max_steps=6).train()


def test_intervals_are_those_of_the_launch(tmp_path: Path) -> None:
    """The trainer itself goes by those in ``trainer_state.json``, which a callback may have set, too."""
    killed = trainer(tmp_path, max_steps=8, save_steps=2, logging_steps=2)
    killed.add_callback(Dying(5))
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    last = trainer(tmp_path, max_steps=8, save_steps=1, logging_steps=2)
    last.train()
    assert sorted(int(each.name.partition("-")[2]) for each in tmp_path.glob("checkpoint-*")) == [2, 4, 5, 6, 7, 8]
    assert [each["step"] for each in last.state.log_history if "loss" in each] == [2, 4, 6, 8]
    assert last.state.save_steps == 1


def test_each_training_may_have_a_directory_of_its_own(tmp_path: Path) -> None:
    """The arguments, which folds may share, are as they were afterwards."""
    shared = arguments(tmp_path / "out")
    for fold in (1, 2):
        callback = ResumeCallback(run_dir=tmp_path / f"fold-{fold}")
        of_fold = Trainer(model=Line(), args=shared, train_dataset=samples(), callbacks=[callback])
        assert of_fold.train().global_step == 4
        assert shared.output_dir == str(tmp_path / "out")
        assert (tmp_path / f"fold-{fold}" / "checkpoint-4" / "resume" / "manifest.json").is_file()
    assert not list((tmp_path / "out").iterdir())


# ---- Evaluations


def untimed(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("runtime", "per_second")
    return [{name: value for name, value in each.items() if not any(word in name for word in timed)} for each in log]


def interrupted(make: Any, directory: Path, *steps: int) -> Trainer:
    """Train in several launches, each but the last of which dies after a step; return the last one's trainer."""
    for step in steps:
        launch = make(directory)
        launch.add_callback(Dying(step))
        with pytest.raises(KeyboardInterrupt):
            launch.train()
    last: Trainer = make(directory)
    last.train()
    return last


def test_an_evaluation_on_start_is_not_done_again(tmp_path: Path) -> None:
    """Neither the log nor the patience of early stopping has a second one."""

    def make(directory: Path) -> Trainer:
        options = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.0, "metric_for_best_model": "loss"}
        made = trainer(directory, max_steps=8, eval_on_start=True, greater_is_better=False, **options)
        made.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        return made

    undisturbed = make(tmp_path / "a")
    undisturbed.train()
    resumed = interrupted(make, tmp_path / "b", 3, 5)
    assert untimed(resumed.state.log_history) == untimed(undisturbed.state.log_history)
    assert [each["step"] for each in resumed.state.log_history if "eval_loss" in each] == [0, 2, 4, 6]


@pytest.mark.thorough
@pytest.mark.parametrize(("on_start", "died"), [(False, 7), (True, 5)])
def test_generation_is_configured_as_it_was(on_start: bool, died: int, tmp_path: Path) -> None:
    """The first generation changes the model's ``generation_config``; it comes after two saves, or before the first."""
    words = [torch.randint(2, 32, (6,), generator=torch.Generator().manual_seed(i)) for i in range(16)]
    data = [{"input_ids": each, "labels": each[:5]} for each in words]

    def make(directory: Path) -> Trainer:
        torch.manual_seed(0)
        size = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0))
        args = arguments(
            directory,
            Seq2SeqTrainingArguments,
            max_steps=12,
            learning_rate=1e-2,
            eval_on_start=on_start,
            eval_strategy="steps",
            eval_steps=6,
            predict_with_generate=True,
            label_names=None,
        )
        return Seq2SeqTrainer(
            model=model,
            args=args,
            train_dataset=data,
            eval_dataset=data[:8],
            compute_metrics=lambda found: {"sum": int(abs(found.predictions).sum()), "to": found.predictions.shape[1]},
            callbacks=[ResumeCallback()],
        )

    undisturbed = make(tmp_path / "a")
    undisturbed.train()
    resumed = interrupted(make, tmp_path / "b", died)
    assert untimed(resumed.state.log_history) == untimed(undisturbed.state.log_history)


class Noisy(torch.utils.data.Dataset):
    """Each sample draws random numbers where it is fetched: in a worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(1), "y": torch.tensor([index / 8])}


@pytest.mark.thorough
def test_persistent_evaluation_workers_have_the_random_state_that_they_had(tmp_path: Path) -> None:
    """Also after a second kill, before which the launch had not evaluated."""

    def make(directory: Path) -> Trainer:
        made = trainer(
            directory,
            data=Noisy(),
            max_steps=8,
            eval_strategy="steps",
            eval_steps=4,
            dataloader_num_workers=1,
            dataloader_persistent_workers=True,
        )
        made.eval_dataset = {"a": Noisy(), "b": Noisy()}
        return made

    undisturbed = make(tmp_path / "a")
    undisturbed.train()
    resumed = interrupted(make, tmp_path / "b", 5, 7)
    assert untimed(resumed.state.log_history) == untimed(undisturbed.state.log_history)
    weights, expected = resumed.model.state_dict(), undisturbed.model.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


_SHARED = torch.Generator()


class Drawing(Noisy):
    """Draws from a generator of the file."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.rand(1, generator=_SHARED), "y": torch.tensor([index / 8])}


class Shaken(Line):
    """Draws from it, too, as it trains."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, **ignored: Any) -> dict[str, torch.Tensor]:
        return super().forward(x + (torch.rand((), generator=_SHARED) if self.training else 0.0), y)


@pytest.mark.thorough
def test_a_generator_of_the_training_and_of_an_evaluation_is_restored_before_the_first_step(tmp_path: Path) -> None:
    def make(directory: Path) -> Trainer:
        _SHARED.manual_seed(3)
        torch.manual_seed(3)
        callback = ResumeCallback(noise=_SHARED)
        options = {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 2}
        made = trainer(directory, model=Shaken(), callback=callback, **options)
        made.eval_dataset = Drawing()
        return made

    undisturbed = make(tmp_path / "a")
    undisturbed.train()
    resumed = interrupted(make, tmp_path / "b", 7)
    assert untimed(resumed.state.log_history) == untimed(undisturbed.state.log_history)
    weights, expected = resumed.model.state_dict(), undisturbed.model.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


class Evaluating(Trainer):
    """Draws the order of its evaluations from a generator, of one loader or of one for each evaluation."""

    is_made_once = True

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        if not self.is_made_once or not hasattr(self, "own"):
            order = torch.Generator().manual_seed(5)
            self.own: Any = torch.utils.data.DataLoader(self.eval_dataset, 3, shuffle=True, generator=order)  # type: ignore[arg-type]
        return self.own if self.is_made_once else self.__dict__.pop("own")


@pytest.mark.parametrize("is_made_once", [pytest.param(True), pytest.param(False, marks=pytest.mark.thorough)])
def test_evaluations_go_on_in_their_order(is_made_once: bool, tmp_path: Path) -> None:
    def make(directory: Path) -> Trainer:
        torch.manual_seed(3)
        options = {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 2}
        made = Evaluating(
            Line(),
            arguments(directory, **options),
            train_dataset=samples(),
            eval_dataset=samples(8),
            callbacks=[ResumeCallback()],
        )
        made.is_made_once = is_made_once
        return made

    undisturbed = make(tmp_path / "a")
    undisturbed.train()
    resumed = interrupted(make, tmp_path / "b", 7)
    assert untimed(resumed.state.log_history) == untimed(undisturbed.state.log_history)
    found = {row["eval_loss"] for row in resumed.state.log_history if "eval_loss" in row}
    assert len(found) == 3


@pytest.mark.thorough
def test_evaluation_workers_that_run_already_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer(tmp_path, dataloader_num_workers=1, dataloader_persistent_workers=True)
    made.evaluate()
    made.args.eval_strategy, made.args.eval_steps = "steps", 2
    made.train()
    assert "MISSING: the random state of the persistent workers of a loader of `list`: after a" in caplog.text


# ---- The trainer's objects


class Registered(Trainer):
    """A trainer whose subclasses are registered, as some libraries do."""

    names: ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.names.append(cls.__name__)


class Copying(TrainerCallback):
    """Copies the trainer in the middle of its training, and uses the copy."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            copied = copy.deepcopy(self.trainer())
            with torch.no_grad():
                copied.model.first.weight.fill_(7.0)
            random_state = torch.get_rng_state()
            batches = len(list(copied.get_train_dataloader()))
            self.found = [type(self.trainer()), copied.evaluate()["eval_loss"], batches]
            torch.set_rng_state(random_state)


def test_the_class_of_a_trainer_stays_what_it_is(tmp_path: Path) -> None:
    copying = Copying()
    made = Registered(
        model=Line(),
        args=arguments(tmp_path, eval_strategy="steps", eval_steps=2),
        train_dataset=samples(),
        eval_dataset=samples(4),
        callbacks=[copying, ResumeCallback()],
    )
    copying.trainer = lambda: made
    before = set(vars(made))
    made.train()
    assert copying.found[0] is type(made) is Registered and Registered.names == []
    assert abs(copying.found[1] - made.evaluate()["eval_loss"]) > 0.1, "the copy evaluates its own model"
    assert copying.found[2] == 8
    assert not [name for name in set(vars(made)) - before if callable(getattr(Trainer, name, None))]


def test_a_trainer_and_its_loader_can_be_copied_after_a_training(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train()
    copied = copy.deepcopy(made)
    assert copied.evaluate()["eval_loss"] == made.evaluate()["eval_loss"]
    loaders = made.callback_handler.train_dataloader, copied.callback_handler.train_dataloader
    read = []
    for loader in loaders:
        torch.manual_seed(5)
        read.append(torch.cat([batch["x"] for batch in loader]))
    assert torch.equal(*read) and type(loaders[1].base_dataloader) is torch.utils.data.DataLoader


def test_a_misspelt_option_is_a_question() -> None:
    with pytest.raises(UnsupportedSetting, match=r"save_evry=10 is no option: did you mean `save_every`\?"):
        ResumeCallback(save_evry=10)
    with pytest.raises(UnsupportedSetting, match="did you mean `run_dir`"):
        ResumeCallback(run_dr="a")


def test_a_misspelt_metric_is_an_error_at_the_first_evaluation(tmp_path: Path) -> None:
    """Of several datasets, the metrics of all are an evaluation; nothing is deleted for one that is not there."""
    for metric, question in (("eval_a_los", "eval_a_loss"), ("a_loss", "eval_a_loss")):
        made = trainer(
            tmp_path / metric,
            callback=ResumeCallback(keep=KeepBest(1, metric)),
            save_steps=1,
            eval_strategy="steps",
            eval_steps=2,
        )
        made.eval_dataset = {"a": samples(4), "b": samples(4)}
        with pytest.raises(UnsupportedSetting, match=f"the best by '{metric}', .* did you mean `{question}`"):
            made.train()
        assert made.state.global_step == 2
    made = trainer(
        tmp_path / "c", callback=ResumeCallback(keep=KeepBest(1, "eval_a_loss")), eval_strategy="steps", eval_steps=2
    )
    made.eval_dataset = {"a": samples(4), "b": samples(4)}
    made.train()
    manifest = json.loads((tmp_path / "c" / "checkpoint-4" / "resume" / "manifest.json").read_text())
    assert {"eval_a_loss", "eval_b_loss"} <= manifest["manifest"]["metrics"].keys()


class Understated(torch.utils.data.BatchSampler):
    """Says that it has fewer batches than it yields, as the samplers of several datasets in turn do."""

    def __len__(self) -> int:
        return super().__len__() - 3


class InTurns(Trainer):
    def get_train_dataloader(self) -> Any:
        order = torch.utils.data.SequentialSampler(self.train_dataset)
        batches = Understated(order, self.args.train_batch_size, drop_last=False)
        loader = torch.utils.data.DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_epoch_has_no_more_batches_than_its_loader_says(accumulation: int, tmp_path: Path) -> None:
    def trained(directory: Path, *callbacks: Any) -> list[Any]:
        options = {"max_steps": -1, "num_train_epochs": 2, "logging_steps": 1, "save_steps": 1}
        options["gradient_accumulation_steps"] = accumulation
        made = InTurns(
            model=Line(), args=arguments(directory, **options), train_dataset=samples(), callbacks=[*callbacks]
        )
        finished._FINISHED.clear()
        made.train()
        return [each.get(name) for each in made.state.log_history for name in ("step", "epoch", "loss", "train_loss")]

    for step in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path / "killed", ResumeCallback(), Dying(step))
    assert trained(tmp_path / "killed", ResumeCallback()) == trained(tmp_path / "bare")


# ---- Trainings that the callback does not see


class Late(TrainerCallback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer().add_callback(ResumeCallback())


class Unreached(Trainer):
    """Trains by itself: its loop calls the trainer's events."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)


class Logging(Trainer):
    """Trains by itself: its loop only logs."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.state.global_step = 3
        self.log({"loss": 1.0})


class Silent(Trainer):
    """Trains by itself: its loop calls nothing of the trainer."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.step()


class SilentWithin(Trainer):
    """Has a loop of its own within train(), which calls nothing of the trainer."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        Silent.train(self)  # type: ignore[arg-type]
        return TrainOutput(4, 0.0, {"train_loss": 0.0})


class Announcing(Trainer):
    """Has a loop of its own within train(), which calls the trainer's events and resumes nothing."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.create_optimizer_and_scheduler(4)
        for event in ("on_train_begin", "on_epoch_begin", "on_step_begin"):
            self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)
        return TrainOutput(0, 0.0, {"train_loss": 0.0})


class Copied(Trainer):
    """Has a loop of its own within train(), made of what a loop of the Trainer's is made of, but for how it begins."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.create_optimizer_and_scheduler(4)
        self.model_wrapped, self._total_loss_scalar, self._globalstep_last_logged = self.model, 0.0, 0
        self._tr_loss, self.current_gradient_accumulation_steps = torch.tensor(0.0), 1
        self.state.compute_steps(self.args, 4)
        self.state.max_steps, self.state.epoch, loader, logged = 4, 0.0, self.get_train_dataloader(), []
        self._announce("train_begin")
        for _ in range(2):
            self._announce("epoch_begin")
            for _, batch in zip(range(2), loader, strict=False):
                self._announce("step_begin")
                loss = self.training_step(self.model, batch, None)
                self.optimizer.step()
                self.state.global_step += 1
                self.state.epoch += 0.5
                self._announce("step_end")
                self._maybe_log_save_evaluate(loss + 1, None, self.model, None, self.state.epoch, None, 0.0)
                logged.append(loss.item() + 1)
            self._announce("epoch_end")
            self._maybe_log_save_evaluate(torch.tensor(0.0), None, self.model, None, self.state.epoch, None, 0.0)
        assert [round(each["loss"], 4) for each in self.state.log_history] == [round(each, 4) for each in logged]
        return TrainOutput(4, 0.0, {"train_loss": 0.0})

    def _announce(self, event: str) -> None:
        self.control = getattr(self.callback_handler, f"on_{event}")(self.args, self.state, self.control)


def test_a_loop_of_its_own_logs_and_saves_as_it_says(tmp_path: Path) -> None:
    made = Copied(
        model=Line(),
        args=arguments(tmp_path, logging_steps=1),
        train_dataset=samples(),
        callbacks=[ResumeCallback()],
    )
    made.train()
    assert made.state.max_steps == 4
    assert [each.name for each in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-2", "checkpoint-4"]


def test_a_loop_of_its_own_that_resumes_nothing_is_refused_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    Announcing(model=Line(), args=arguments(tmp_path), train_dataset=samples(), callbacks=[ResumeCallback()]).train()
    assert not finished._FINISHED, "how far it trained is unknown"
    trainer(tmp_path, save_steps=2, max_steps=2).train()
    finished._FINISHED.clear()
    again = Announcing(model=Line(), args=arguments(tmp_path), train_dataset=samples(), callbacks=[ResumeCallback()])
    with pytest.raises(UnsupportedSetting, match=r"Announcing trains in a loop of its own, .* checkpoint-2 was found"):
        again.train()


def test_a_training_that_neither_saves_nor_resumes_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warned() -> list[str]:
        found = [each.getMessage() for each in caplog.records]
        caplog.clear()
        return [each for each in found if "neither saves with ResumeCallback" in each]

    late = Late()
    made = Trainer(model=Line(), args=arguments(tmp_path / "a"), train_dataset=samples(), callbacks=[late])
    late.trainer = lambda: made
    made.train()
    assert len(found := warned()) == 1 and "was not there when train() began" in found[0]
    kinds = {Unreached: "did not begin it", Logging: "its loop logs"}
    kinds |= {each: f"{each.__name__} trains in a loop of its own" for each in (Silent, SilentWithin)}
    for kind, reason in kinds.items():
        made = kind(model=Line(), args=arguments(tmp_path / kind.__name__), callbacks=[ResumeCallback()])
        optimizer = torch.optim.SGD(Line().parameters(), lr=0.1)
        for _ in range(3):
            optimizer.step()
        assert warned() == [], "the optimizer has nothing to do with the trainer"
        made.train()
        assert len(found := warned()) == 1 and reason in found[0]
    trainer(tmp_path / "c", eval_strategy="steps", eval_steps=2, logging_steps=1).train()
    trainer(tmp_path / "d").evaluate()
    assert warned() == []


def test_a_script_that_trains_on_by_itself_is_not_warned_once_its_run_has_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As SetFit does, which trains a head in a loop of its own after the trainer's: each launch is told the same."""
    for _ in range(2):
        finished._FINISHED.clear()  # as in another process
        made = trainer(tmp_path, max_steps=2)
        made.train()
        optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.step()
        assert "neither saves with ResumeCallback" not in caplog.text
    assert "This run finished at step 2" in caplog.text


@pytest.mark.parametrize(
    "strategies",
    [
        {"eval_strategy": "epoch", "save_strategy": "epoch"},
        {"eval_strategy": "steps", "save_strategy": "steps"},
        {"eval_strategy": "epoch", "save_strategy": "steps"},
        {"eval_strategy": "epoch", "save_strategy": "steps", "logging_strategy": "epoch"},
        {"eval_strategy": "epoch", "callback": {"save_every": 1}},
    ],
    ids=["by epochs", "by steps", "evaluated after the last save", "logged after the last save", "save_every"],
)
def test_a_finished_run_leaves_what_its_training_had_left(tmp_path: Path, strategies: dict[str, Any]) -> None:
    """A script reads the log, or draws for what it trains next."""
    left: list[Any] = []
    for _ in range(3):
        finished._FINISHED.clear()
        callback = ResumeCallback(**strategies.get("callback", {}))
        options = {"max_steps": -1, "num_train_epochs": 1, "eval_steps": 2, **strategies, "callback": callback}
        made = trainer(tmp_path, **options)
        output = made.train()
        left.append((made.state.log_history, output, torch.rand(1), np.random.rand(), random.random()))
    assert left[0] == left[1] == left[2]
    assert ["eval_loss" in left[0][0][-2], "train_loss" in left[0][0][-1]] == [True, True]


def test_what_cannot_be_linked_is_copied_into_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", lambda *_: exec("raise PermissionError"))
    left = []
    for _ in range(2):
        finished._FINISHED.clear()
        made = trainer(tmp_path, max_steps=-1, num_train_epochs=1, eval_strategy="epoch")
        made.train()
        left.append((made.state.log_history, [each.tolist() for each in made.model.parameters()], torch.rand(1)))
    assert left[0] == left[1]


class Evaluated(TrainerCallback, ExportableState):
    """Counts evaluations, and saves how many there were as the trainer's callbacks do."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"count": self.count}, "attributes": {"count": self.count}}


@pytest.mark.parametrize("steps", [8, 12], ids=["at the end of an epoch", "within an epoch"])
def test_a_finished_run_that_trains_on_equals_a_longer_one(tmp_path: Path, steps: int) -> None:
    """At its end it evaluates after the save of its last step: as a longer run does, or not."""
    options = {"save_steps": 4, "eval_strategy": "epoch", "lr_scheduler_type": "constant", "logging_steps": 3}
    found = []
    for directory, launches in (("whole", [24]), ("longer", [steps, steps, 24])):
        torch.manual_seed(1)
        for last in launches:
            finished._FINISHED.clear()
            counted = Evaluated()
            made = trainer(tmp_path / directory, **{**options, "max_steps": last})
            made.add_callback(counted)
            made.train()
        wanted = ("step", "loss", "eval_loss")
        rows = [{name: row[name] for name in wanted if name in row} for row in made.state.log_history]
        weights = [each.tolist() for each in made.model.parameters()]
        found.append((rows, counted.count, made.state.num_train_epochs, weights, torch.rand(1)))
    assert found[0] == found[1]
    assert [row["step"] for row in found[0][0] if "eval_loss" in row] == [8, 16, 24]


class Heads(Line):
    """A model of which the script chooses a head, as those of ``adapters``; it counts what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.active = ["two"]
        self.setup = SimpleNamespace(factors={"one": 1.0, "two": 2.0}, gain=1.0)
        self.extra: Any = None
        self.computed = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.computed += self.training
        factor = self.setup.factors[self.active[-1]] * self.setup.gain + 0.01 * self.computed
        return super().forward(factor * x, y)


class ActivatingLoader(Trainer):
    """Its loader leaves active what it has loaded last."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.model.active.append("one")
        self.model.setup.gain, self.model.setup.factors["two"] = 3.0, 4.0
        self.model.computed = 100
        self.model.extra = torch.nn.Identity()
        self.model.requires_grad_(False)


@pytest.mark.parametrize("kills", [[], [3], [3, 3]])
def test_a_loader_changes_nothing_but_weights(tmp_path: Path, kills: list[int]) -> None:
    def launch(directory: Path, *callbacks: TrainerCallback) -> Trainer:
        torch.manual_seed(1)
        made = ActivatingLoader(Heads(), arguments(directory, save_steps=1), None, samples(), callbacks=[*callbacks])
        made.train()
        return made

    whole = launch(tmp_path / "bare")
    for kill in kills:
        with pytest.raises(KeyboardInterrupt):
            launch(tmp_path / "run", ResumeCallback(), Dying(kill))
    last = launch(tmp_path / "run", ResumeCallback())
    assert all(torch.equal(*each) for each in zip(last.model.parameters(), whole.model.parameters(), strict=True))
    assert last.model.active == ["two"] and last.model.computed == 4
    assert isinstance(last.model.extra, torch.nn.Identity) == bool(kills), "what it makes stays"
    assert vars(last.model.setup) == vars(whole.model.setup)


def test_a_callback_that_never_trained_leaves_no_hook(tmp_path: Path) -> None:
    """Objects are collected at any moment: within a step of an optimizer torch goes through its hooks, and it stays."""
    gc.collect()
    before = list(optimizer_hooks())
    optimizer = torch.optim.SGD(Line().parameters(), lr=0.1)
    made = [trainer(tmp_path)]
    watched = len(optimizer_hooks())
    last = register_optimizer_step_post_hook(lambda *_: (made.clear(), gc.collect()))
    after = register_optimizer_step_post_hook(lambda *_: None)
    optimizer.step()
    assert len(optimizer_hooks()) == watched + 2
    last.remove()
    after.remove()
    del made[:]
    trainer(tmp_path)
    gc.collect()
    assert list(optimizer_hooks()) == before


def optimizer_hooks() -> dict[int, Any]:
    return torch_optimizer._global_optimizer_post_hooks


def test_a_given_path_that_loses_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path / "a").train()
    for given, is_named in ((2, True), (4, False)):
        finished._FINISHED.clear()
        caplog.clear()
        path = tmp_path / "a" / f"checkpoint-{given}"
        trainer(tmp_path / "a").train(resume_from_checkpoint=str(path))
        assert (f"Not resuming from the given {path}: " in caplog.text) is is_named
