"""Weights that the trainer saves under other names than they have in memory, without a training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.parts import CheckpointReader, write_part
from resume_adapters.core.state import encoding
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import NotRestored, StateMismatch
from resume_adapters.hf.weights import LIVE_WEIGHTS, ModelWeights

SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}

CONVERTS = not hasattr(TrainingArguments, "save_safetensors")  # transformers 5
converted = pytest.mark.skipif(not CONVERTS, reason="transformers 4 saves weights under the names that they have")


class Experts(MixtralForCausalLM):
    """Draws a random number when it is made."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        random.random()


def experts(seed: int, **options: Any) -> Experts:
    torch.manual_seed(seed)
    sizes = {"intermediate_size": 16, "num_key_value_heads": 1, "num_local_experts": 3}
    return Experts(MixtralConfig(**{**SMALL, **sizes, **options}))


def trainer_of(model: Any, directory: Path, kind: type[Trainer] = Trainer) -> Trainer:
    return kind(model=model, args=TrainingArguments(str(directory), use_cpu=True, report_to=[]))


def saved(model: Any, checkpoint: Path) -> CheckpointReader:
    """Save a model as a checkpoint, with what the adapter adds to it; return its reader."""
    model.save_pretrained(checkpoint)
    digests = ModelWeights(trainer_of(model, checkpoint.parent)).beside_files(checkpoint)
    storage = LocalStorage()
    if digests is not None:
        (checkpoint / "resume").mkdir()
        write_part(storage.write, checkpoint / "resume", LIVE_WEIGHTS, *encoding.encode(digests))
    return CheckpointReader(storage, Checkpoint(checkpoint, 1, None), 0)


def load(model: Any, reader: CheckpointReader, *, verify: bool = True) -> None:
    """Load a checkpoint into a model in the trainer's own way, which must not be asked."""

    def native() -> None:
        raise AssertionError("the trainer's own way loads nothing here")

    weights = ModelWeights(trainer_of(model, reader.files.checkpoint.parent))
    weights.load(reader, native, has_own_loader=False)
    if verify:
        weights.verify(reader)


def test_digests_are_kept_only_where_the_files_do_not_say_it_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=4))
    assert saved(plain, tmp_path / "checkpoint-1").part(LIVE_WEIGHTS) is None
    found = saved(experts(0), tmp_path / "checkpoint-2").part(LIVE_WEIGHTS)
    assert not CONVERTS or found.keys() == experts(0).state_dict().keys()


def test_converted_weights_load_and_draw_no_random_number(tmp_path: Path) -> None:
    model, other = experts(0), experts(1)
    reader = saved(model, tmp_path / "checkpoint-1")
    before = random.getstate(), torch.get_rng_state().tolist()
    load(other, reader)
    assert before == (random.getstate(), torch.get_rng_state().tolist())
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert other.training


@converted
def test_without_digests_they_load_as_well(tmp_path: Path) -> None:
    """So does a checkpoint of the bare Trainer, or of a version that kept none."""
    model, other = experts(0), experts(1)
    model.save_pretrained(tmp_path / "checkpoint-1")
    load(other, CheckpointReader(LocalStorage(), Checkpoint(tmp_path / "checkpoint-1", 1, None), 0))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@converted
def test_a_weight_that_is_not_what_it_was_is_refused(tmp_path: Path) -> None:
    reader = saved(experts(0), tmp_path / "checkpoint-1")
    file = tmp_path / "checkpoint-1" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    save_file({**weights, name: weights[name].flip(0).contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(NotRestored, match=r"1 of \d+ tensors .* model\.layers\.0\.mlp\.experts\.down_proj first"):
        load(experts(1), reader)
    load(experts(1), reader, verify=False)


@converted
def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    reader = saved(experts(0), tmp_path / "checkpoint-1")
    with pytest.raises(StateMismatch, match="cannot be loaded through Experts"):
        load(experts(1, num_local_experts=4), reader)
    with pytest.raises(StateMismatch, match="missing_keys"):
        load(experts(1, num_hidden_layers=2), reader)


class OwnLoader(Trainer):
    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        self.model.load_state_dict(torch.load(f"{checkpoint_path}/own.pt", weights_only=True))


@pytest.mark.parametrize("loads", [True, False])
def test_a_trainer_of_its_own_format_loads_and_is_verified(tmp_path: Path, loads: bool) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), checkpoint / "own.pt")
    digests = ModelWeights(trainer_of(model, tmp_path, OwnLoader)).beside_files(checkpoint)
    (checkpoint / "resume").mkdir()
    write_part(LocalStorage().write, checkpoint / "resume", LIVE_WEIGHTS, *encoding.encode(digests))
    reader = CheckpointReader(LocalStorage(), Checkpoint(checkpoint, 1, None), 0)
    trainer: Any = trainer_of(other, tmp_path, OwnLoader)

    def native() -> None:
        if loads:
            trainer._load_from_checkpoint(str(checkpoint))

    def load() -> None:
        weights = ModelWeights(trainer)
        weights.load(reader, native, has_own_loader=True)
        weights.verify(reader)

    if loads:
        load()
        assert torch.equal(other.weight, model.weight)
    else:
        with pytest.raises(NotRestored):
            load()
