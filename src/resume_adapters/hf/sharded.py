"""A model and an optimizer that are sharded over the processes by FSDP2: saved and loaded by the trainer.

With sharded state each process writes its shards, and torch reads them on any number of processes; with full state the
first process writes whole tensors. Either way what was loaded is verified by digests of all shards together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


def owner(file: Path) -> int | None:
    """Return the rank that wrote a shard; ``None`` for any other file."""
    found = _SHARD.fullmatch(file.name)
    return int(found[1]) if found else None


class ShardedModel:
    """What FSDP2 has sharded of a trainer's model and optimizer.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def parts(self) -> dict[str, Stateful]:
        """Return the buffers; each process has its own."""
        return {"buffers": ModuleBuffers({0: self._trainer.model})}

    def sharded_state(self) -> dict[str, Any]:
        """Return the parameters and the optimizer's state, by the name of the component."""
        trainer = self._trainer
        return {"model": dict(trainer.model.named_parameters()), "optimizer": trainer.optimizer.state_dict()}

    def load(self, files: CheckpointFiles, native: Callable[[], None]) -> None:
        """Load by the trainer what it has saved, without running code from it.

        Args:
            files: those of the checkpoint.
            native: the trainer's own way to load the model or the optimizer.
        """
        with distributed_metadata.reading(files):
            native()
