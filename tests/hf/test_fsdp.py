"""FSDP2 under the Trainer, on two ranks: with sharded state and with full state, a kill changes nothing."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import accelerate
import pytest
from packaging.version import Version
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import fsdp1
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.hf import files
from resume_adapters.hf.supported import require_supported

import contract

EARLY = {"event": "on_step_end", "step": 8, "rank": 1}
MIDDLE = {"event": "on_step_end", "step": 12, "rank": 0}

CHOICE = "FSDP1 flattens the parameters: use FSDP2, .*" + (
    'fsdp_config={"fsdp_version": 2}' if hasattr(TrainingArguments, "_process_fsdp_args") else "--fsdp_version 2"
)
IS_OLD = Version(accelerate.__version__) < Version("1.13")


@pytest.mark.thorough
@pytest.mark.skipif(IS_OLD, reason="an Accelerate before 1.13 does not load the optimizer of FSDP2")
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("FULL_STATE_DICT", [EARLY]),
        ("SHARDED_STATE_DICT", [EARLY, MIDDLE]),
    ],
)
def test_killed_equals_never(
    kind: str, kills: list[Any], bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {"fsdp": kind, "samples": 100, "args": {"save_steps": 5, "remove_unused_columns": False}}
    expected = reference(config, 2)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, kills, ranks=2)
    names = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1)).state_dict()
    contract.export_is_the_model(tmp_path, "out", names, ranks=2)


@pytest.mark.thorough
@pytest.mark.skipif(IS_OLD, reason="an Accelerate before 1.13 does not load the optimizer of FSDP2")
def test_shards_that_are_copied_are_those_of_the_bare_trainer(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    args = {"save_steps": 5, "remove_unused_columns": False}
    config = {
        "fsdp": "SHARDED_STATE_DICT",
        "width": 128,
        "samples": 100,
        "args": args,
        "callback": {"stage": "memory"},
    }
    contract.staged_equals_bare(bench, reference, config, ranks=2, timeless=contract.without_place)
    kills = [MIDDLE, {"event": "on_step_end", "step": 18, "rank": 1}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, 2), kills, ranks=2)


@pytest.mark.skipif(IS_OLD, reason="an Accelerate before 1.13 does not load the optimizer of FSDP2")
def test_a_sharded_run_under_way_is_taken_over(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"fsdp": "SHARDED_STATE_DICT", "samples": 100, "args": {"save_steps": 5, "remove_unused_columns": False}}
    assert bench.run(tmp_path, {**config, "bare": True, "kill": EARLY}, ranks=2).killed
    outcome = bench.run(tmp_path, {**config, "args": {**config["args"], "max_steps": 7}}, ranks=2).require_success()
    assert "checkpoint-5 was made without this package" in outcome.output
    assert contract.read_trace(tmp_path, 2).first_step == 5


@pytest.mark.parametrize(
    ("is_fsdp2", "version", "found"),
    [(False, "1.15.0", CHOICE), (True, "1.12.0", "accelerate 1.12.0, older than")],
)
def test_what_cannot_be_resumed_is_refused(
    is_fsdp2: bool, version: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = types.SimpleNamespace(
        args=arguments,
        is_fsdp_enabled=True,
        is_deepspeed_enabled=False,
        accelerator=types.SimpleNamespace(is_fsdp2=is_fsdp2),
    )
    monkeypatch.setattr(accelerate, "__version__", version)
    with pytest.raises(UnsupportedSetting, match=found):
        require_supported(trainer, None)
    trainer.accelerator.is_fsdp2 = True
    monkeypatch.setattr(accelerate, "__version__", "1.13.0")
    require_supported(trainer, None)


@pytest.mark.skipif(IS_OLD, reason="an Accelerate before 1.13 does not load the optimizer of FSDP2")
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, {"CP": 2}), pytest.param(4, {"DP_REPLICATE": 2, "DP_SHARD": 2}, marks=pytest.mark.thorough)],
    ids=["context", "hybrid"],
)
def test_what_the_ranks_share_is_exact_or_refused_by_its_name(
    ranks: int, parallel: dict[str, int], bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    args = {"save_steps": 5, "remove_unused_columns": False}
    config = {"fsdp": "SHARDED_STATE_DICT", "parallel": parallel, "samples": 100, "args": args}
    if "CP" in parallel:
        outcome = bench.run(tmp_path, config, ranks=ranks)
        assert "spread over 2 ranks in `cp`" in outcome.output and "UnsupportedSetting" in outcome.output
        assert not any(contract.read_trace(tmp_path, ranks).steps)
    else:
        expected = reference(config, ranks)
        contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, [EARLY], ranks=ranks)


def test_a_shard_belongs_to_the_rank_that_wrote_it() -> None:
    paths = ("pytorch_model_fsdp_0/__2_0.distcp", "rng_state_1.pth", "pytorch_model_fsdp_0/.metadata", "scheduler.pt")
    assert [files.owner(Path(path)) for path in paths] == [2, 1, 0, 0]


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


@pytest.mark.skipif(IS_OLD, reason="an Accelerate before 1.13 does not load the optimizer of FSDP2")
@pytest.mark.parametrize(
    ("kinds", "ranks"),
    [
        ((SHARDED, SHARDED), 2),
        pytest.param((SHARDED, FULL), 2, marks=pytest.mark.thorough),
        pytest.param((FULL, SHARDED), 1, marks=pytest.mark.thorough),
    ],
)
def test_a_checkpoint_of_fsdp1_starts_a_run(
    kinds: tuple[str, str], ranks: int, bench: contract.Bench, tmp_path: Path
) -> None:
    config = {"samples": 100 * ranks // 2, "args": {"save_steps": 5, "remove_unused_columns": False, "max_steps": 9}}
    fsdp1.starts_a_run(bench, tmp_path, config, "on_step_end", kinds, ranks)
