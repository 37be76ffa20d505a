"""The step trace of Lightning: that of a killed and resumed run is that of an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import contract


def test_the_trace_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    """The directory of the script holds no file in the end, also none of the second ModelCheckpoint."""
    checkpoints = [{"every_n_train_steps": 100}, {"every_n_train_steps": 3, "save_top_k": 1, "dirpath": "out/more"}]
    config = {"augment": True, "samples": 100, "checkpoints": checkpoints, "trainer": {"max_epochs": 2}}
    config["trace_files"] = False
    contract.traces_are_equal(bench, reference, tmp_path, config, {"event": "on_train_batch_end", "step": 18})
