"""The step trace of a DeepSpeed loop: that of a killed and resumed run is that of an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import contract


def test_the_trace_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    """ZeRO keeps the weights that are stepped in flat partitions, and the gradient norm is the engine's."""
    config = {"stage": 2, "augment": True, "epochs": 2, "save_every": None}
    quantities = ("batches", "rng", "loss", "lr", "grad_norm")
    kill = {"event": "step_end", "step": 13}
    contract.traces_are_equal(bench, reference, tmp_path, config, kill, quantities=quantities)
