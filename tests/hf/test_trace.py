"""The step trace of the Trainer: that of a killed and resumed run is that of an uninterrupted one, line by line."""

from __future__ import annotations

from pathlib import Path

import contract


def test_the_trace_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    """DDP on two ranks, a worker and augmentation; run directory and cadence are those of the environment."""
    args = {"dataloader_num_workers": 1, "save_steps": 1000, "num_train_epochs": 2}
    config = {"augment": True, "samples": 100, "args": args}
    quantities = ("batches", "rng", "loss", "lr", "grad_norm")
    kill = {"event": "on_step_end", "step": 12}
    contract.traces_are_equal(bench, reference, tmp_path, config, kill, quantities=quantities, ranks=2)
