"""Every command works on a run directory whose checkpoints are single files."""

from __future__ import annotations

import torch


def test_files_are_listed_verified_and_pruned_like_directories(command, tmp_path, make_run, flip):
    run_dir = tmp_path / "run"
    make_run(run_dir, {step: {"metrics": {"val_loss": 1.0 / step}} for step in (10, 20, 30)}, files=True)
    (run_dir / "last.ckpt").symlink_to("step=30.ckpt")
    torch.save({}, run_dir / "epoch=0-step=5.ckpt")
    rows = command("ls", run_dir, "--json").json["checkpoints"]
    assert [(row["name"], row["state"]) for row in rows] == [
        ("epoch=0-step=5.ckpt", "foreign"),
        ("step=10.ckpt", "committed"),
        ("step=20.ckpt", "committed"),
        ("step=30.ckpt", "committed"),
    ]
    assert rows[-1]["marks"] == ["anchor", "latest"]
    assert command("verify", run_dir).code == 0
    assert command("status", run_dir, "--json").json["last_commit"] == 30
    assert command("prune", run_dir, "--keep-last", "1", "--force").code == 0
    left = {path.name for path in run_dir.iterdir()}
    assert left == {".resume", "latest", "last.ckpt", "epoch=0-step=5.ckpt", "step=30.ckpt", "step=30.ckpt.resume"}
    flip(run_dir / "step=30.ckpt")
    done = command("verify", run_dir, "--json")
    assert done.code == 1
    assert "step=30.ckpt" in done.out and "digest" in done.out
