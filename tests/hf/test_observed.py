"""What a trainer holds and nobody has declared: found in real trainings, and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from resume_adapters.hf import observed

import contract

KILLS = [
    {"event": "on_step_end", "step": 8},
    {"event": "on_step_end", "step": 18},
    {"event": "on_step_end", "step": 28},
]
HOLDING = {"holding": True, "samples": 100, "layers": 2}


def test_what_a_subclass_and_a_callback_hold_resumes_though_nobody_saves_it(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    contract.interrupted_equals_uninterrupted(bench, tmp_path, HOLDING, reference(HOLDING), KILLS)


def test_between_two_epochs_a_callback_hears_of_the_next_one_as_it_would_have(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {**HOLDING, "args": {"save_strategy": "epoch"}}
    kills = [{"event": "on_step_end", "step": 15}, {"event": "on_step_end", "step": 30}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), kills)


def test_weights_that_the_optimizer_updates_beside_those_of_the_model_are_known(tmp_path: Path) -> None:
    head = torch.nn.Linear(2, 2)
    trainer = Trainer(model=torch.nn.Linear(2, 2), args=TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    trainer.create_optimizer().add_param_group({"params": head.parameters()})
    subjects = observed.subjects(trainer)
    for tensors in (subjects.trained, subjects.stepped):
        assert {id(each) for each in head.parameters()} <= {id(each) for each in tensors}


def test_it_is_named_and_a_plain_trainer_holds_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    bench.run(tmp_path / "holding", HOLDING).require_success()
    found = contract.parts(tmp_path / "holding" / bench.run_directory)["observed"]
    for path in ("trainer._step", "trainer._buffered_inputs", "trainer._metrics", "trainer._logs"):
        assert path in found, path
    assert "tensors of trainer.reference" in found and "requires_grad of model.transformer" in found
    config = {"args": {"eval_strategy": "steps", "eval_steps": 4, "include_num_input_tokens_seen": True}}
    plain = bench.run(tmp_path / "plain", config).require_success()
    found = contract.parts(tmp_path / "plain" / bench.run_directory)["observed"]
    assert found == "core: trainer.micro, trainer.previous", "what the job itself holds"
    assert "MISSING" not in plain.output


def test_each_entry_that_is_passed_over_would_be_reported(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"looks_at_all": True, "args": {"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4}}
    bench.run(tmp_path, config).require_success()
    entries = set(observed.IGNORED)
    if not hasattr(Trainer, "_has_mixed_mesh_grads"):  # an older one clips no gradients of several meshes
        entries.remove("trainer._mixed_mesh_grads")
    found = contract.parts(tmp_path / bench.run_directory)["observed"]
    assert not [each for each in entries if each.removeprefix("*.").removeprefix("trainer.") not in found], found
