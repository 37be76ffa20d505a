"""What the ranks of a test of groups do: gather a distributed tensor whose groups are gone. Forked by the server."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from resume_adapters.core.recovery.groups import BlockGroups
from waiting import LIMIT

RANK = int(os.environ["RANK"])


def store(name: str) -> Any:
    timeout = datetime.timedelta(seconds=LIMIT)
    return PrefixStore(name, TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timeout))


def main() -> None:
    groups = BlockGroups()
    with groups.watched():
        groups.use_store(lambda: store("attempt"))
        dist.init_process_group("gloo")
        dist.new_group([1])
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        of_default = distribute_tensor(torch.arange(4), mesh["a"], [Shard(0)])
        of_group = distribute_tensor(torch.arange(3), mesh["b"], [Shard(0)])
        made = dist.get_process_group_ranks(mesh["b"].get_group())
        expected = list(groups._made)
        dist.new_group([0, 1])
        groups.destroy()
        groups.use_store(lambda: store("saving"))
        with groups.remade():
            assert of_default.full_tensor().tolist() == [0, 1, 2, 3]
            assert of_group.full_tensor().tolist() == [0, 1, 2]
            assert dist.get_process_group_ranks(mesh["b"].get_group()) == made == [RANK]
            assert groups._made == expected, "the last is of no mesh"
    Path(f"result.{RANK}").touch()


main()
