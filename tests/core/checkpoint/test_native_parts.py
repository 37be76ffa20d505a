"""Every file of a framework belongs to a part of the state."""

from __future__ import annotations

import pytest

from resume_adapters.core.checkpoint.native_parts import holds_state, order, part_of_file, parts_of_file


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("model.safetensors", "model"),
        ("model-00001-of-00005.safetensors", "model"),
        ("model_1.safetensors", "model"),
        ("pytorch_model.bin", "model"),
        ("adapter_model.safetensors", "model"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "model"),
        ("mp_rank_00_model_states.pt", "counters"),
        ("optimizer.pt", "optimizer"),
        ("optimizer_1.bin", "optimizer"),
        ("optimizer_0/.metadata", "optimizer"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "optimizer"),
        ("scheduler_1.bin", "scheduler"),
        ("rng_state_3.pth", "rng"),
        ("random_states_0.pkl", "rng"),
        ("scaler.pt", "scaler"),
        ("dl_state_dict_0.bin", "data"),
        ("custom_checkpoint_0.pkl", "registered"),
        ("training_args.bin", "settings"),
        ("generation_config.json", "settings"),
        ("tokenizer.json", "settings"),
        ("model.safetensors.index.json", "settings"),
        ("resume/rank-00003.json", "counters"),
        ("resume/ema.rank-00001.safetensors", "ema"),
        ("notes.txt", "files"),
    ],
)
def test_a_file_belongs_to_a_part(file: str, part: str) -> None:
    assert part_of_file(file) == part
    assert part in parts_of_file(file)


def test_weights_and_optimizers_make_a_directory_a_checkpoint() -> None:
    assert [
        file for file in ("model.safetensors", "optimizer.bin", "config.json", "notes.txt") if holds_state(file)
    ] == [
        "model.safetensors",
        "optimizer.bin",
    ]


def test_what_is_no_state_comes_last() -> None:
    assert sorted(["settings", "ema", "optimizer", "model", "trackers"], key=order) == [
        *("model", "optimizer", "ema"),
        *("settings", "trackers"),
    ]
