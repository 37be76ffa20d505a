"""What the ranks of the tests of groups do: operations without end, which are cut. Forked by the server."""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from resume_adapters.core.recovery.attempt import LeftByPeer
from resume_adapters.core.recovery.groups import BlockGroups
from waiting import LIMIT

RANK = int(os.environ["RANK"])


def store(name: str) -> Any:
    timeout = datetime.timedelta(seconds=LIMIT)
    return PrefixStore(name, TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout))


MEETING = store("meeting")


def gather() -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": RANK, "text": "x" * 100})


def reduce() -> None:
    dist.all_reduce(torch.ones(3_000_000))


def until_it_fails(work: Any) -> None:
    try:
        while True:
            work()
    except (RuntimeError, LeftByPeer):
        return


def seconds_to_leave(groups: BlockGroups, work: Any) -> float:
    """Cut the groups while a thread works, until it is gone; return how long that takes."""
    thread = threading.Thread(target=until_it_fails, args=(work,), daemon=True)
    thread.start()
    time.sleep(0.02)
    began = time.monotonic()
    while thread.is_alive() and time.monotonic() < began + LIMIT:
        groups.cut()
        thread.join(0.02)
    return time.monotonic() - began


def rounds(groups: BlockGroups, name: str, work: Any, count: int) -> list[float]:
    found = []
    for number in range(count):
        groups.use_store(lambda number=number: store(f"{name}/{number}"))
        dist.init_process_group("gloo")
        gather()
        found.append(seconds_to_leave(groups, work))
        if found[-1] > LIMIT:
            break  # a group in which a thread is lost cannot be destroyed
        MEETING.add(f"{name}/{number}", 1)
        while MEETING.add(f"{name}/{number}", 0) < dist.get_world_size():
            time.sleep(0.005)
        groups.destroy()
    return found


def make_alone(groups: BlockGroups) -> float:
    """Make a group that the other rank does not make, and cut it; return how long it takes to leave."""
    groups.use_store(lambda: store("alone"))
    if RANK == 1:
        return 0.0
    seconds = seconds_to_leave(groups, lambda: dist.init_process_group("gloo"))
    groups.destroy()  # the names of groups begin again, as on the other rank
    return seconds


def main() -> None:
    groups = BlockGroups()
    with groups.watched():
        found = {
            "alone": [make_alone(groups)],
            "small": rounds(groups, "small", gather, int(sys.argv[1])),
            "large": rounds(groups, "large", reduce, int(sys.argv[2])),
        }
    Path(f"result.{RANK}").write_text(json.dumps(found))


main()
