"""Finders of a learning rate or a batch size: what they train is thrown away, and no launch resumes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

import contract

TUNED = {
    "lr_find": (8, 17),
    "learning rate": (8, 17),
    "learning rate of epochs": (8, 17),
    "scale_batch_size": (8, 12),
    "batch size": (8, 12),
}
"""What searches, a Tuner's method or a callback, and the steps of the kills."""


@pytest.mark.parametrize("tuned", TUNED)
def test_what_a_finder_trains_leaves_nothing_behind(tuned: str, bench: contract.Bench, tmp_path: Path) -> None:
    """It trains more steps than the first kill needs, so that a checkpoint of it would be resumed from."""
    config = {"tuned": tuned, "validate": True}
    bare = contract.uninterrupted(bench, tmp_path / "bare", {**config, "bare": True})
    ours = contract.uninterrupted(bench, tmp_path / "ours", config)
    contract.require_same_steps(ours, bare, start=0)
    contract.require_same_end(ours, bare, ignore=("files",))
    kills = [{"event": "on_train_batch_end", "step": step} for step in TUNED[tuned]]
    contract.interrupted_equals_uninterrupted(bench, tmp_path / "killed", config, ours, kills)
