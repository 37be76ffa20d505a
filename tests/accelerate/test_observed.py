"""What a script holds and has not registered: found in real trainings, and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import contract

UNREGISTERED = {"unregistered": True}


def test_a_scheduler_that_nobody_registered_resumes(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    kills = [{"event": "step_end", "step": 8}, {"event": "step_end", "step": 13}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, UNREGISTERED, reference(UNREGISTERED), kills)


def test_accumulation_that_the_loop_changes_stays_changed(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    changes = {"accumulate_later": 3}
    kills = [{"event": "step_end", "step": 8}, {"event": "step_end", "step": 11}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, changes, reference(changes), kills)


def test_it_is_named_and_a_plain_loop_holds_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    bench.run(tmp_path / "unregistered", UNREGISTERED).require_success()
    found = contract.parts(tmp_path / "unregistered" / bench.run_directory)
    assert found["observed"] == "core: schedulers['MultiStepLR of optimizer 0']"
    plain = bench.run(tmp_path / "plain", {}).require_success()
    assert "observed" not in contract.parts(tmp_path / "plain" / bench.run_directory)
    assert "MISSING" not in plain.output
