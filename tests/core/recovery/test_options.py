"""What a user may set, and how a launch is read."""

from __future__ import annotations

from typing import Any

import pytest

from resume_adapters.core.recovery.options import BlockOptions, read_launch
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.recovery import restartable


@pytest.mark.parametrize(
    "given",
    [
        {"max_restarts": -1}, {"max_restarts": 1.5}, {"max_restarts": True}, {"meeting_timeout": 0},
        {"meeting_timeout": "60"}, {"grace": float("inf")}, {"grace": float("nan")}, {"abort": 3},
        {"initialize": "x"}, {"finalize": ()}, {"health_check": 1},
    ],
)  # fmt: skip
def test_a_bad_setting_is_one_clear_error(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedSetting, match=f"{next(iter(given))}=.*; expected"):
        restartable(**given)


def test_the_defaults_are_allowed() -> None:
    assert BlockOptions().max_restarts == 10


def test_one_process_needs_no_launcher() -> None:
    assert read_launch(0, {}).world_size == 1
    assert read_launch(0, {}).name != read_launch(1, {}).name


def test_several_processes_need_torchrun() -> None:
    with pytest.raises(UnsupportedSetting, match="needs torchrun where there are several processes"):
        read_launch(0, {"WORLD_SIZE": "2", "RANK": "0"})


def test_a_launch_by_torchrun_is_read() -> None:
    given = {
        "WORLD_SIZE": "4", "RANK": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0",
        "MASTER_ADDR": "host", "MASTER_PORT": "1234",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_RUN_ID": "job",
    }  # fmt: skip
    launch = read_launch(5, given)
    assert (launch.rank, launch.world_size, launch.host, launch.port) == (2, 4, "host", 1234)
    assert not launch.is_one_node
    assert (launch.name, launch.start) == ("job/5", "3")
