"""Laws in interpreters of their own, which have imported nothing before the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import contract

CONFIG = {"stage": 2, "augment": True, "ema": True}


@pytest.mark.thorough
def test_the_laws_hold_in_fresh_interpreters(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.laws_in_fresh_interpreters(
        bench,
        tmp_path,
        CONFIG,
        reference(CONFIG),
        commit=contract.Operation("os.rename", rf"global_step15/resume/{contract.temporary('manifest.json')}", 10),
        damaged="global_step10/mp_rank_00_model_states.pt",
        send={"event": "backward", "step": 17},
    )
