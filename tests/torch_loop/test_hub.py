"""A training whose mirror is a repository of the Hub, with real processes: the client's requests go to a stand-in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import contract
import hub_stand_in

pytest.importorskip("huggingface_hub", reason="the extra `hub` installs huggingface_hub")

CONFIG = {"augment": True, "ema": True}
KILLS = [{"event": "step_end", "step": 8}, {"event": "step_end", "step": 13}]


@pytest.mark.thorough
def test_an_empty_machine_resumes_from_the_hub(
    bench: contract.Bench, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laws 1 and 2, each launch on a machine that has nothing."""
    expected = reference(CONFIG)
    with hub_stand_in.running(monkeypatch) as hub:
        env = {**hub.environment, "RESUME_ADAPTERS_MIRROR": "hf://me/runs/{run}"}
        copied = 0
        for kill in [*KILLS, None]:
            outcome = bench.run(tmp_path, {**CONFIG, "kill": kill}, env=env)
            assert outcome.killed if kill else outcome.statuses == (0,), outcome.output[-6000:]
            trace = contract.read_trace(tmp_path)
            assert (trace.first_step or 0) == copied
            contract.require_same_steps(trace, expected, start=copied)
            keys = [key.split("/") for key in hub.files("models/me/runs") if key.endswith("/resume/manifest.json")]
            copied = max(int(name.rpartition("-")[2]) for _, name, *_ in keys)
            shutil.rmtree(tmp_path / bench.run_directory)
    contract.require_same_end(trace, expected, ["files"])
