"""What a module and its callbacks hold and nobody has declared: found in real trainings, and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract

KILLS = [{"event": "on_train_batch_end", "step": step} for step in (8, 18, 28)]
CASES: dict[str, dict[str, Any]] = {
    "steps": {},
    "epochs": {"checkpoints": [{"every_n_train_steps": None, "every_n_epochs": 1}]},
    "validations": {"validate": True, "trainer": {"val_check_interval": 7}},
}


@pytest.mark.parametrize("case", often(CASES, "validations"))
def test_counters_and_a_layer_that_a_callback_unfreezes_resume_though_nobody_saves_them(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {"holding": True, "samples": 100, **CASES[case]}
    kills = KILLS[1:] if case == "epochs" else KILLS
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), kills)


def test_it_is_said_and_a_plain_module_holds_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path / "holding", {"holding": True}).require_success()
    for path in ("module.batches", "module.recent", "callbacks.Unfreezing.0.batches", "requires_grad of module.body"):
        assert path in outcome.output, path
    plain = bench.run(tmp_path / "plain", {"validate": True, "plateau": {"monitor": "val_loss"}}).require_success()
    assert "observed" not in plain.output and "MISSING" not in plain.output
