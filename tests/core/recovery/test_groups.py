"""Who waits for a peer gets an error as soon as the groups are cut, whatever it waits for."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from resume_adapters.core.recovery.attempt import LeftByPeer
from resume_adapters.core.recovery.groups import BlockGroups
from waiting import LIMIT

from launch import LONG, Server
from recovering import agent_store

JOB = Path(__file__).parent / "cut_job.py"
MESH_JOB = Path(__file__).parent / "mesh_job.py"


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (10, 4),
        # What failed before, in one round of thirty: gloo loses an operation where a write fails or a transfer is half
        # done, and its thread waits for half an hour.
        pytest.param(80, 30, marks=[pytest.mark.thorough, pytest.mark.long]),
    ],
)
def test_no_operation_is_lost_where_groups_are_cut(server: Server, tmp_path: Path, small: int, large: int) -> None:
    with agent_store() as environment:
        env = {**environment, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        server.start(JOB, [str(small), str(large)], tmp_path, 2, env).wait(LONG).require_success()
    for rank in range(2):
        found = json.loads((tmp_path / f"result.{rank}").read_text())
        assert [len(found[name]) for name in ("alone", "small", "large")] == [1, small, large], found
        assert max(max(each) for each in found.values()) < LIMIT, found


def test_a_distributed_tensor_is_gathered_in_groups_that_are_made_again(server: Server, tmp_path: Path) -> None:
    with agent_store() as environment:
        env = {**environment, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        server.start(MESH_JOB, [], tmp_path, 2, env).wait(LONG).require_success()
    assert all((tmp_path / f"result.{rank}").exists() for rank in range(2))


def test_no_group_is_made_once_they_are_cut_until_the_next_attempt() -> None:
    of_block = BlockGroups()
    with of_block.watched():
        of_block.cut()
        with pytest.raises(LeftByPeer):
            dist.init_process_group("gloo")
        of_block.destroy()
        of_block.use_store(HashStore)
        dist.init_process_group("gloo")
        dist.barrier()
        assert of_block.operations() == 1
        of_block.destroy()


def test_a_group_of_processes_that_the_block_does_not_know_is_made_as_the_script_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where MPI has started them, and the environment is told only within the block."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    of_block, store = BlockGroups(), HashStore()
    with of_block.watched():
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=5))
        assert dist.get_world_size() == 1 and store.num_keys() > 0
        of_block.destroy()


PROGRAM = """
import datetime, os, sys, time
import torch.distributed as dist
from resume_adapters.core.recovery import groups

groups._REST, groups._LONGEST_DROP = 0.2, 100.0
statuses = set()
for child in range(40):
    pid = os.fork()
    if pid == 0:
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        held = [dist.new_group([0]) for _ in range(20)]
        for each in held:
            dist.barrier(each)
        dist.destroy_process_group()
        groups._let_rest(held, [])
        del each, held
        time.sleep(0.19 + child % 8 * 0.003)
        sys.exit()
    statuses.add(os.waitpid(pid, 0)[1])
print(statuses)
"""


@pytest.mark.thorough
@pytest.mark.long
def test_a_process_that_ends_while_its_groups_are_dropped_ends_well() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert found.stdout == "{0}\n", found.stderr[-2000:]
