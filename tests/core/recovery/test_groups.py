"""Who waits for a peer gets an error as soon as the groups are cut, whatever it waits for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed import GroupMember

from resume_adapters.core.recovery.groups import BlockGroups
from waiting import LIMIT

from launch import LONG, Server
from recovering import agent_store

JOB = Path(__file__).parent / "cut_job.py"


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (10, 4),
        # What failed before, in one round of thirty: gloo loses an operation where a write fails or a transfer is half
        # done, and its thread waits for half an hour.
        pytest.param(80, 30, marks=pytest.mark.thorough),
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


def test_a_group_of_which_this_rank_is_no_member_is_none_of_its_groups() -> None:
    """In its place torch gives a number, which has no operations."""
    groups = BlockGroups()
    groups._watching(lambda: (GroupMember.NON_GROUP_MEMBER, None))()
    assert groups.operations() == 0
