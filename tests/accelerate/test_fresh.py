"""Laws in interpreters of their own, which have imported nothing before the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import contract

CONFIG = {"augment": True, "ema": True}


@pytest.mark.thorough
def test_the_laws_hold_in_fresh_interpreters(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.laws_in_fresh_interpreters(
        bench,
        tmp_path,
        CONFIG,
        reference(CONFIG),
        commit=contract.Operation("os.rename", rf"checkpoint_15/resume/{contract.temporary('manifest.json')}", 10),
        damaged="checkpoint_10/optimizer.bin",
        send={"event": "backward", "step": 13},
    )
