"""Law 7 for a DeepSpeed loop: another number of ranks or workers, the same samples and rates in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import contract

MAP = {"elastic": True, "augment": True, "dropout": 0.0, "samples": 48, "batch": 2, "accumulate": 2}


def on(ranks: int, kill: int | None = None, **config: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch on some ranks, which is killed after a step."""
    strike = {"event": "step_end", "step": kill, "rank": 0} if kill else None
    return ranks, {**MAP, **config, "kill": strike}


LAUNCHES = {
    "stage 0, 2 to 1 to 2": [on(2, 8, accumulate=1), on(1, 13, workers=2), on(2, accumulate=1)],
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_every_step_has_the_samples_that_it_would_have_had(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    contract.same_samples_on_any_topology(bench, tmp_path, reference(MAP), LAUNCHES[case], tolerance=1e-4)
