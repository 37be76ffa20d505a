"""Shards on disks that each node has alone: two ranks as two nodes, with a run directory each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.errors import CheckpointDamaged
from resume_adapters.integrations.deepspeed_engine.files import ForeignCheckpoints

import contract
import faults

CONFIG: dict[str, Any] = {
    "stage": 1,
    "precision": "bf16",
    "rank_seeds": True,
    "save_every": 2,
    "max_steps": 13,
    "keep": "KeepLast(2)",
}
NODES = {**CONFIG, "nodes": True}
SHARD = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def steps(*numbers: int) -> dict[str, int]:
    return {f"global_step{number}": number for number in numbers}


@pytest.mark.thorough
def test_nodes_that_disagree_go_on_from_what_all_have(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Killed where one node has committed and the other has not; then, killed again, a shard of one node is damaged."""
    expected = reference(CONFIG, 2)
    disks = [tmp_path / "out", tmp_path / "node-1" / "out"]
    outcome = bench.run(tmp_path, {**NODES, "dies_committing": "global_step6"}, ranks=2)
    assert outcome.killed, outcome.output
    assert [contract.committed(disk) for disk in disks] == [steps(2, 4, 6), steps(2, 4)]

    outcome = bench.run(tmp_path, {**NODES, "kill": {"event": "step_end", "step": 11, "rank": 1}}, ranks=2)
    assert outcome.killed and "global_step6 is damaged: rank 1: was begun and never committed" in outcome.output
    contract.require_same_steps(contract.read_trace(tmp_path, 2), expected, start=4)
    assert [contract.committed(disk) for disk in disks] == [steps(8, 10)] * 2
    assert (disks[0] / ".resume" / "set-aside" / "global_step6.1").is_dir(), "nothing may be lost"

    faults.flip(disks[1] / "global_step10" / SHARD.format(1))
    outcome = bench.run(tmp_path, NODES, ranks=2).require_success()
    assert f"global_step10 is damaged: rank 1: {SHARD.format(1)}" in outcome.output
    trace = contract.read_trace(tmp_path, 2)
    contract.require_same_steps(trace, expected, start=8)
    contract.require_same_end(trace, expected)
    for rank, disk in enumerate(disks):
        assert contract.committed(disk) == steps(12, 13)
        assert (disk / "latest").read_text() == "global_step13\n", "the bare engine looks there, on each node"
        assert sorted(file.name for file in (disk / "global_step13").glob("*.pt")) == [
            SHARD.format(rank),
            "mp_rank_00_model_states.pt",
        ]
    shell(disks[1])
    refused = bench.run(tmp_path, CONFIG)
    assert refused.statuses == (1,) and "the ranks 0 of 2, and this process is rank 0 of 1" in refused.output
    assert contract.committed(disks[0]) == steps(12, 13)


def shell(disk: Path) -> None:
    """The commands see a run directory like any other."""
    status, listed, verified, exported = (
        subprocess.run(
            [sys.executable, "-m", "resume_adapters.cli", each, str(disk)], cwd=disk, capture_output=True, text=True
        )
        for each in ("status", "ls", "verify", "export")
    )
    assert "finished" in status.stdout and status.returncode == 0
    assert all(name in listed.stdout for name in steps(12, 13)) and listed.returncode == 0
    assert verified.returncode == 0, verified.stdout
    assert exported.returncode == 2 and "the disks of other nodes hold the others" in exported.stderr


def test_a_bare_checkpoint_on_a_disk_of_the_node_needs_the_files_of_its_rank(tmp_path: Path) -> None:
    torch.save({"global_steps": 15}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({}, tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    assert ForeignCheckpoints(2, 1, rank=1).step(tmp_path) == ForeignStep(15)
    for absent in (ForeignCheckpoints(2, 1, rank=0), ForeignCheckpoints(2, 1)):
        with pytest.raises(CheckpointDamaged, match="optimizer states of the ranks"):
            absent.step(tmp_path)
    torch.save({"global_steps": 15}, tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    (tmp_path / "mp_rank_00_model_states.pt").unlink()
    assert ForeignCheckpoints(2, 3, rank=1).step(tmp_path) == ForeignStep(15)
