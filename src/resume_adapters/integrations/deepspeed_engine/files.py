"""Write and read DeepSpeed's files without running code from their pickles."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import UNREADABLE, require_intact
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.state import safe_load
from resume_adapters.errors import CheckpointDamaged, NotSerialisable, ResumeError, UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine.names import MODEL, SHARD

DATA_CLASSES: list[Callable[..., Any]] = [
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
    *safe_load.data_classes(),
]
"""The classes that DeepSpeed's checkpoints hold. Instances of its own consist of numbers; unpickling one only assigns
them."""


class DataCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """Writes what DeepSpeed's own engine writes, and reads it as data: no file is unpickled freely.

    A rank that cannot write continues to the end of ``save_checkpoint``, because the other ranks wait at its barriers;
    :meth:`require_written` then raises the error.

    Args:
        config: DeepSpeed's configuration, of the engine that this one replaces.
        checked: names of files that an earlier save has checked; they are not checked again.

    Attributes:
        read: what was loaded, by the name of its file.
    """

    def __init__(self, config: Any, checked: set[str]) -> None:
        super().__init__(config)
        self._checked = checked
        self.read: dict[str, Any] = {}
        self._failures: list[Exception] = []

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file. The first time, check that it can be read again without running code."""
        self.attempt(lambda: self._save(state_dict, path))

    def _save(self, state_dict: Any, path: str) -> None:
        super().save(state_dict, path)
        name = Path(path).name
        foreign = _unreadable(Path(path)) if name not in self._checked else []
        self._checked.add(name)
        if foreign:
            raise NotSerialisable(
                f"{name} holds objects of {', '.join(foreign)}, and loading them could run code: keep "
                "functions and classes of your own out of what the model, the optimizer, the scheduler and the "
                "configuration save"
            )

    def attempt(self, work: Callable[[], None]) -> None:
        """Call ``work``, and keep an error for :meth:`require_written`."""
        try:
            work()
        except Exception as error:  # require_written raises it, when no other rank is waiting
            self._failures.append(error)

    def require_written(self) -> None:
        """Raise the first error of this rank's saves."""
        if self._failures:
            raise self._failures[0]

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file as data.

        Raises:
            UnsupportedSetting: it holds objects whose loading could run code.
        """
        content = self.read[Path(path).name] = read(Path(path), map_location)
        return content


def read(path: Path, map_location: Any = "cpu", *, mmap: bool = False) -> Any:
    """Read a file of DeepSpeed without running code from it.

    Raises:
        UnsupportedSetting: it holds objects whose loading could run code.
        CheckpointDamaged: it cannot be read.
    """
    try:
        with safe_load.allowing(DATA_CLASSES):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        found: list[str] = []
        with contextlib.suppress(*UNREADABLE):
            found = _unreadable(path)
        if not isinstance(error, UnpicklingError):
            raise CheckpointDamaged(f"{path.name} cannot be read: {error}", path=path) from error
        raise UnsupportedSetting(
            f"{path.parent.name}/{path.name} holds objects of {', '.join(found) or 'unknown classes'}, and loading "
            "them could run code. If you trust the file, load it with engine.load_checkpoint, and start another run "
            "directory",
            path=path,
        ) from error


def require_named(files: CheckpointFiles) -> None:
    """Refuse states that were not saved with a checkpoint: DeepSpeed counts the files of its names.

    Raises:
        CheckpointDamaged: naming the file.
    """
    for name in files.extra():
        if name.endswith("_states.pt"):
            raise CheckpointDamaged(
                f"{files.checkpoint.name} has a file {name} that is not in its manifest, and DeepSpeed might load it: "
                "move it out of the checkpoint",
                path=files.checkpoint,
            )


def as_data() -> contextlib.AbstractContextManager[None]:
    """Return a context in which ``torch.load`` reads data only, also if DeepSpeed asks it to unpickle freely."""
    return safe_load.data_only(DATA_CLASSES)


def _unreadable(path: Path) -> list[str]:
    """Return the names of the classes in a file that are not data."""
    if not zipfile.is_zipfile(path):  # the old format, which `"checkpoint": {"serialization": ...}` may choose
        return []
    with safe_load.allowing(DATA_CLASSES):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


class ForeignCheckpoints:
    """Recognises the checkpoints of the bare ``engine.save_checkpoint``.

    Args:
        stage: ZeRO's stage in this launch.
        rank: this rank, if each node has a disk of its own: then only this rank's files are required.
        within: the directory of DeepSpeed's files in a checkpoint, where another framework has its own beside them.
    """

    def __init__(self, world_size: int, stage: int, rank: int | None = None, within: str = "") -> None:
        self.world_size = world_size
        self.stage = stage
        self.rank = rank
        self._within = within

    def step(self, path: Path) -> ForeignStep | None:
        """Return the step of a checkpoint that DeepSpeed wrote; ``None`` for anything else.

        Raises:
            CheckpointDamaged: files are missing, or it was saved with a different number of ranks or stage of ZeRO.
        """
        path /= self._within
        names = {file.name for file in path.iterdir() if file.is_file()} if path.is_dir() else set()
        shards = [(found[2], int(found[1])) for name in names if (found := SHARD.fullmatch(name))]
        if not shards and MODEL not in names:
            return None
        ranks = set(range(self.world_size)) if self.rank is None else {self.rank}
        sharded = {kind: {rank for each, rank in shards if each == kind} for kind in ("model", "optim")}
        if self.rank is not None:
            sharded = {kind: found & ranks for kind, found in sharded.items()}
        model = sharded["model"] == ranks if self.stage == 3 else MODEL in names
        if not model or (self.stage > 0 and sharded["optim"] != ranks):
            raise CheckpointDamaged(
                f"it has {'a' if MODEL in names else 'no'} {MODEL}, model states of the ranks "
                f"{sorted(sharded['model'])} and optimizer states of the ranks {sorted(sharded['optim'])}; this launch "
                f"has {self.world_size} ranks with ZeRO stage {self.stage}",
                path=path,
            )
        states = path / (MODEL if MODEL in names else f"zero_pp_rank_{min(ranks)}_{MODEL}")
        try:
            return ForeignStep(int(read(states, mmap=True)["global_steps"]))
        except ResumeError:  # it holds objects: not damaged, so nothing older is taken in its place
            raise
        except UNREADABLE as error:
            raise CheckpointDamaged(f"{states.name} cannot be read: {error}", path=path) from error

    def require_whole(self, path: Path) -> None:
        """Check that the files of a checkpoint are complete.

        Raises:
            CheckpointDamaged: naming one that is not.
        """
        for file in (path / self._within).iterdir():
            if file.name == MODEL or SHARD.fullmatch(file.name):
                require_intact(file)
