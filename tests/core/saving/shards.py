"""What the ranks of a test of sharded saves do: they train with FSDP2, and ``torch.distributed.checkpoint`` saves."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from resume_adapters import KeepAll
from resume_adapters.core.checkpoint.layout import rank_file
from resume_adapters.core.checkpoint.writer import Captured
from resume_adapters.core.ranks import current_ranks
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.copied import CopiedSave
from resume_adapters.core.saving.staging import StagingOptions
from resume_adapters.core.session.context import shard_digests
from resume_adapters.core.state import encoding
from resume_adapters.core.state.sharded_digest import ShardDigests
from waiting import LIMIT

from contract import without_checksums
from miniature import GivenContent

WIDTH, ODD = 256, 301
"""Widths of layers. Of the odd one the last rank has a smaller shard, which torch copies when it saves."""


class Content(GivenContent):
    """What a checkpoint of a training is to hold, with the files of each rank, and digests."""

    def __init__(self, training: Training) -> None:
        super().__init__(lambda path: dcp.save(training.state(), storage_writer=dcp.FileSystemWriter(path)))
        self.training = training

    def capture(self) -> Captured:
        digests = ShardDigests(self.training.state(), dist.get_rank(), self.training.run.saver.copy_of)
        rest = lambda: {} if digests.is_complete else digests.complete()  # noqa: E731
        return replace(super().capture(), rank_state=digests.known, complete=rest)

    def owner_of(self, file: Path) -> int:
        return int(file.name.split("_")[2]) if file.suffix == ".distcp" else 0


class Training:
    """A model that trains and saves in shards, as a framework would.

    What is copied is written once :attr:`go_on` is set.

    Args:
        directory: the run directory, and beside it what the bare library saves.
        stage: how saves leave the training.
    """

    def __init__(self, directory: Path, stage: Any) -> None:
        torch.manual_seed(0)
        self.directory = directory
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, ODD))
        for each in (*self.model, self.model):
            fully_shard(each, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.run = ResumableRun(
            directory / "run", RunOptions(staging=StagingOptions(stage), keep=KeepAll()), ranks=current_ranks()
        )
        self.run.open()
        self.go_on = threading.Event()
        self.copied: list[int] = []
        self._hold()
        self.number = 0 if self.run.resumed is None else self.run.resumed.step
        self.run.begin(self.number, 0.0)

    def _hold(self) -> None:
        native = CopiedSave.write

        def write(copied: CopiedSave, *arguments: Any) -> Any:
            assert self.go_on.wait(LIMIT)
            self.copied.append(sum(len(each.pieces) for each in copied._files))
            return native(copied, *arguments)

        CopiedSave.write = write  # type: ignore[method-assign]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.number += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self) -> str:
        """Save with the bare library, and with the package; return the checkpoint's name."""
        name = f"checkpoint-{self.number}"
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(self.directory / "bare" / name))
        self.go_on.clear()
        self.digests = shard_digests(self.state(), dist.get_rank())
        self.run.saver.save(name, self.number, Content(self))
        return name

    def commit(self) -> None:
        """Save, and change everything before the commit; require that the files are those of the bare library."""
        name = self.save()
        self.step()
        self.go_on.set()
        self.run.saver.flush()
        self.require_native(name)

    def require_native(self, name: str) -> None:
        ours, bare = (self.directory / each / name for each in ("run", "bare"))
        files = sorted(each.name for each in bare.iterdir())
        assert files == [".metadata", *(f"__{rank}_0.distcp" for rank in range(dist.get_world_size()))]
        for each in files[1:]:
            found, wanted = (without_checksums((where / each).read_bytes()) for where in (ours, bare))
            assert found == wanted, each
        index, expected = (pickle.loads((each / files[0]).read_bytes()) for each in (ours, bare))
        assert index.storage_data == expected.storage_data
        assert index.state_dict_metadata == expected.state_dict_metadata
        saved = (ours / "resume" / f"{rank_file('', dist.get_rank())}.json").read_bytes()
        assert encoding.decode(saved, {}) == self.digests
        self.run.require_valid(ours)

    def result(self) -> dict[str, Any]:
        return {"copied": self.copied, "decision": self.run.saver.staging.decision, "committed": self.run.last_commit}


def exact(rank: int, directory: str, stage: str) -> dict[str, Any]:
    """Save after each of five steps."""
    training = Training(Path(directory), stage)
    training.step()
    for _ in range(5):
        training.commit()
    training.run.close()
    return training.result()


def kill(rank: int, directory: str, stage: str) -> dict[str, Any]:
    """Die with a save that is copied, and whose files are not written."""
    training = Training(Path(directory), stage)
    training.step()
    for _ in range(3):
        training.commit()
    training.save()
    training.step()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def resume(rank: int, directory: str, stage: str) -> dict[str, Any]:
    """Load what is committed with the bare library, and save again."""
    training = Training(Path(directory), stage)
    resumed = training.number
    state = training.state()
    dcp.load(state, checkpoint_id=training.directory / "run" / f"checkpoint-{resumed}")
    training.step()
    training.commit()
    training.run.close()
    return {"resumed": resumed, **training.result()}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    work = {each.__name__: each for each in (exact, kill, resume)}[sys.argv[1]]
    Path(f"result.{rank}").write_text(json.dumps(work(rank, *sys.argv[2:])))
    dist.barrier()


main()
