"""What the first save of a launch cannot bring back is kept beside the trainer's files, or refused, at that save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from resume_adapters.core.session import finished, rehearsal
from resume_adapters.errors import NotRestored, UnsupportedSetting
from resume_adapters.hf import ResumeCallback

ROWS = torch.randint(0, 16, (40, 4), generator=torch.Generator().manual_seed(1))


class Killed(TrainerCallback):
    """Ends the training after a step, as far as one process can."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8))


def trainer_of(directory: Path, kind: type[Trainer] = Trainer, make: Callable[[], Any] = gpt2, **options: Any) -> Any:
    arguments = TrainingArguments(
        str(directory), use_cpu=True, report_to=[], max_steps=6, save_steps=2, per_device_train_batch_size=2
    )
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    return kind(model=make(), args=arguments, train_dataset=data, **options)


def exact(directory: Path, kind: type[Trainer], make: Callable[[], Any] = gpt2) -> None:
    """Train undisturbed, and killed twice; both must end with the same weights."""
    bare = trainer_of(directory / "bare", kind, make)
    bare.train()
    for step in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            trainer_of(directory / "run", kind, make, callbacks=[ResumeCallback(), Killed(step)]).train()
    resumed = trainer_of(directory / "run", kind, make, callbacks=[ResumeCallback()])
    resumed.train()
    assert resumed.state.global_step == 6
    for name, value in bare.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


class Distilling(Trainer):
    """Trains on what transformers records by hooks, which a model gets at its first forward."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs, output_hidden_states=True).hidden_states[-1].pow(2).mean()


def test_what_a_model_records_by_hooks_of_its_first_forward_is_recorded_after_a_resume(tmp_path: Path) -> None:
    exact(tmp_path, Distilling)


def test_tensors_that_modules_keep_of_a_forward_are_copied_without_their_graph() -> None:
    """Such as the weight of weight_norm: torch's deepcopy refuses them."""
    model = torch.nn.utils.weight_norm(torch.nn.Linear(2, 2))
    model.losses = [model(torch.ones(2)).sum()]
    copied = rehearsal.copies({"model": model}, [])["model"]
    assert torch.equal(copied.weight, model.weight) and copied.losses[0].item() == model.losses[0].item()
    assert copied.weight_g is not model.weight_g and model.weight.grad_fn is not None


class Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return self.model(input_ids=input_ids, labels=labels)


class SavesWithinTheWrapper(Trainer):
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.model.save_pretrained(output_dir)


class SavesTheHead(Trainer):
    """Saves what it trains of a model that is frozen but for a part, as LLaVA saves its projector."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        Path(str(output_dir)).mkdir(exist_ok=True)
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        torch.save(trained, f"{output_dir}/mm_projector.bin")


def frozen_but_for_the_norm() -> Any:
    made = gpt2().requires_grad_(False)
    made.transformer.ln_f.requires_grad_(True)
    return made


@pytest.mark.parametrize(
    ("kind", "make"),
    [(SavesWithinTheWrapper, Wrapped), (SavesTheHead, frozen_but_for_the_norm)],
    ids=["within-the-wrapper", "head"],
)
def test_weights_that_do_not_come_back_are_kept(
    kind: type[Trainer], make: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        exact(tmp_path, kind, make)
    assert caplog.text.count("do not come back from the files") == 3, "once a launch"


class SavesNoOptimizer(Trainer):
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save nothing."""


def test_an_optimizer_that_is_not_saved_is_refused_at_the_save(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, SavesNoOptimizer, callbacks=[ResumeCallback()])
    with pytest.raises(UnsupportedSetting, match=r"SavesNoOptimizer has saved no optimizer\.pt, no scheduler\.pt"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert not (tmp_path / "latest").exists()


class Projector:
    """What GaLore keeps in the state of an optimizer: an object, which a script may trust."""

    def __init__(self) -> None:
        self.rank, self.matrix = 2, torch.ones(3)


class Projecting(torch.optim.AdamW):
    def step(self, *arguments: Any) -> Any:
        found = super().step(*arguments)
        for state in self.state.values():
            state.setdefault("projector", Projector()).matrix.add_(1)
        return found


class Rounding(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].half().float()


class WithOptimizer(Trainer):
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = self.optimizer_class(self.model.parameters(), lr=1e-2)
        return self.optimizer


def test_an_optimizer_whose_state_holds_a_trusted_object_resumes(tmp_path: Path) -> None:
    kind = type("Projected", (WithOptimizer,), {"optimizer_class": Projecting})
    with torch.serialization.safe_globals([Projector]):
        exact(tmp_path, kind)


def test_an_optimizer_that_converts_its_state_is_refused_at_the_save(tmp_path: Path) -> None:
    kind = type("Rounded", (WithOptimizer,), {"optimizer_class": Rounding})
    trainer = trainer_of(tmp_path, kind, callbacks=[ResumeCallback()])
    with pytest.raises(NotRestored, match="optimizer was loaded, but its state is not the saved one"):
        trainer.train()
    assert trainer.state.global_step == 2
    trainer_of(tmp_path / "other", kind, callbacks=[ResumeCallback(verify=False)]).train()


class Uncopyable(torch.nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one of me")


def uncopyable() -> Any:
    made = gpt2()
    made.lm_head.__class__ = Uncopyable
    return made


def test_a_model_that_cannot_be_copied_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        exact(tmp_path, Trainer, uncopyable)
    assert "what is trained cannot be copied (TypeError: there is one of me)" in caplog.text


def test_a_model_that_holds_a_dataset_is_not_copied() -> None:
    model = torch.nn.Linear(2, 2)
    model.rows = [[index] for index in range(200_000)]  # type: ignore[assignment]
    with pytest.raises(rehearsal.NotRehearsed, match="holds more than 100,000 objects"):
        rehearsal.copies({"model": model}, [])


def test_a_copy_for_which_there_is_no_room_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "available_memory", lambda storage: 1000)
    with caplog.at_level(logging.INFO):
        trainer_of(tmp_path, callbacks=[ResumeCallback()]).train()
    assert "does not fit into half of the memory left on cpu" in caplog.text


def test_the_training_is_not_touched(tmp_path: Path) -> None:
    """Of copies the tensors are overwritten, random numbers are drawn, methods are called; of what lives, none."""

    class Draws(Trainer):
        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            torch.rand(1)
            assert self.model is not trainer.model
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            self.model.eval().requires_grad_(False)

    bare = trainer_of(tmp_path / "bare", Draws)
    bare.train()
    trainer = trainer_of(tmp_path / "run", Draws, callbacks=[ResumeCallback()])
    trainer.train()
    assert trainer.model.training
    for name, value in bare.model.state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name]), name
    assert [each.get("loss") for each in bare.state.log_history] == [
        each.get("loss") for each in trainer.state.log_history
    ]


def test_what_is_copied_is_not_shared() -> None:
    model = torch.nn.Linear(1, 1)
    assert rehearsal.copies({"model": model}, [model])["model"] is not model


def test_copies_refer_to_each_other() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.own = [1]  # type: ignore[attr-defined]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    shared = [object()]
    model.holder = shared  # type: ignore[assignment]
    made = rehearsal.copies({"model": model, "optimizer": optimizer, "schedule": schedule}, [shared])
    assert made["optimizer"].param_groups[0]["params"][0] is made["model"].weight is not model.weight
    assert made["schedule"].optimizer is made["optimizer"]
    assert made["optimizer"].own == [1]
    assert made["model"].holder is shared


def of_transformers() -> Any:
    from peft import LoraConfig

    made = gpt2()
    made.add_adapter(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    return made


def prefix() -> Any:
    from peft import PrefixTuningConfig, get_peft_model

    options = {"num_virtual_tokens": 2, "encoder_hidden_size": 4, "prefix_projection": True}
    return get_peft_model(gpt2(), PrefixTuningConfig(task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize("make", [of_transformers, prefix])
def test_adapters_are_kept_and_nothing_that_is_frozen(make: Callable[[], Any], tmp_path: Path) -> None:
    exact(tmp_path, Trainer, make)
    kept = load_file(tmp_path / "run" / "checkpoint-6" / "resume" / "live_weights.safetensors")
    assert sum(each.numel() for each in kept.values()) == sum(
        each.numel() for each in make().parameters() if each.requires_grad
    )


class Averages(torch.nn.Module):
    """Saves a key that the trainer does not load, and of its weights the average."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt2()
        self.mean, self.average = torch.zeros(1), torch.zeros(())

    def forward(self, input_ids: Any, labels: Any) -> Any:
        head = self.model.transformer.wte.weight.detach()
        self.mean, self.average = self.mean + head.sum(), (self.average + head) / 2
        return self.model(input_ids=input_ids, labels=labels)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        saved = super().state_dict(*arguments, **options)
        averaged = {"model.transformer.wte.weight": self.average} if self.average.ndim else {}
        return {**saved, **averaged, "mean": self.mean}

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        self.mean = torch.zeros(1)
        return super().load_state_dict(*arguments, **options)


def test_what_a_state_dict_changes_or_has_beside_tensors_comes_back(tmp_path: Path) -> None:
    exact(tmp_path, Trainer, Averages)


class Resets(TrainerCallback):
    """Does at each start what was done when a checkpoint was saved."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        torch.nn.init.ones_(kwargs["model"].model.transformer.ln_f.weight)


def test_they_come_back_where_a_start_changes_what_was_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = trainer_of(tmp_path / "bare", make=Averages, callbacks=[Resets()])
    bare.train()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path / "run", make=Averages, callbacks=[Resets(), ResumeCallback(), Killed(5)]).train()
    with caplog.at_level(logging.INFO):
        resumed = trainer_of(tmp_path / "run", make=Averages, callbacks=[Resets(), ResumeCallback()])
        resumed.train()
    assert "This start had changed what was loaded" in caplog.text
    assert all(
        torch.equal(each, dict(resumed.model.named_parameters())[name]) for name, each in bare.model.named_parameters()
    )
    assert torch.equal(bare.model.average, resumed.model.average) and torch.equal(bare.model.mean, resumed.model.mean)


def test_what_a_model_holds_is_there_when_a_finished_run_is_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> Any:
        trainer = trainer_of(tmp_path, make=Averages, callbacks=[ResumeCallback()])
        trainer.train()
        return trainer.model

    whole = trained()
    monkeypatch.setattr(finished, "_FINISHED", {})  # as in another process
    again = trained()
    assert whole.mean.item() and torch.equal(again.mean, whole.mean) and torch.equal(again.average, whole.average)
