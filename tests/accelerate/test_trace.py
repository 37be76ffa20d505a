"""The step trace of an Accelerate loop: that of a killed and resumed run is that of an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from selection import often

import contract


@pytest.mark.parametrize("device", often(["cpu", "walled"], "cpu"))
def test_the_trace_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    device: str, bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    """The loop iterates over the prepared loader itself, which fetches a batch ahead."""
    config = {"device": device, "augment": True, "wrapped": False, "second": True, "epochs": 2, "save_every": None}
    contract.traces_are_equal(bench, reference, tmp_path, config, {"event": "step_end", "step": 13})
