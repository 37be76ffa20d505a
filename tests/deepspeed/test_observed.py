"""What a script holds and has not registered: a plain loop holds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract


@pytest.mark.parametrize("stage", [0, 2])
def test_a_plain_loop_holds_nothing(stage: int, bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {"stage": stage, "samples": 48}).require_success()  # the last window is whole
    assert "observed" not in contract.parts(tmp_path / bench.run_directory) and "MISSING" not in outcome.output
