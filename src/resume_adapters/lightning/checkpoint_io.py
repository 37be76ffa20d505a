"""A CheckpointIO that replaces a file in one step, commits what it wrote, and proves what it reads."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, PartEntry
from resume_adapters.core.checkpoint.remove import delete
from resume_adapters.core.checkpoint.retention import KeepUnless
from resume_adapters.core.checkpoint.validity import check_digests, check_sizes, read_manifest
from resume_adapters.core.log import enable_logging, logger
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run_directory.prune import plan_prune
from resume_adapters.core.run_directory.upkeep import set_aside
from resume_adapters.core.state import safe_load
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged
from resume_adapters.lightning import files
from resume_adapters.lightning.compat import VERSION, io, pl

_STORAGE = LocalStorage()

_LACKING = (
    "ResumeCheckpointIO alone writes, commits and checks files. Random state, the position in the data and what "
    "remains of a step are lost with a kill, and a damaged checkpoint ends the launch: add ResumeCallback() to the "
    "callbacks"
)


def without_code() -> contextlib.AbstractContextManager[None]:
    """Return the context in which ``torch.load`` reads data only, and what hyperparameters often hold."""
    return safe_load.data_only(files.harmless())


def require_data(strategy: Any, path: Path) -> None:
    """Refuse a file that a strategy would read with an unpickler of its own, which runs the code that a file names.

    Raises:
        CheckpointDamaged: it holds more than data.
    """
    if isinstance(strategy, pl.strategies.FSDPStrategy) and path.is_file():  # seam: lightning 2.4-2.6
        files.read(path)


class ResumeCheckpointIO(io.TorchCheckpointIO):  # type: ignore[misc]  # known at run time
    """Writes checkpoints so that a crash leaves the file before or the whole new one, and finds damage when it reads.

    It writes in the checkpoint's own directory (Lightning writes in ``TMPDIR``, from where a file may have to be
    copied), forces it onto the disk, and renames it into place. Without :class:`ResumeCallback` it also commits each
    checkpoint by itself, checks the digests of what is loaded, and removes nothing that a restart would need.

    Attributes:
        is_managed: a :class:`ResumeCallback` commits, checks and removes.
        error: what went wrong in a managed save; the callback raises it, on all ranks together.
    """

    def __init__(self) -> None:
        self.is_managed = False
        self.error: OSError | None = None
        self._said = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint's file and, without a callback, commit it.

        Raises:
            TypeError: storage options are given, of which there are none.
            SaveFailed: it could not be written.
        """
        if storage_options is not None:
            raise TypeError("ResumeCheckpointIO takes no storage_options: a checkpoint is a file on a mounted disk")
        target = Path(os.path.abspath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if self.is_managed:
            try:
                _write(checkpoint, target)
            except OSError as error:
                self.error = error
        elif "optimizer_states" in checkpoint:
            self._commit(checkpoint, target)
        else:
            _write(checkpoint, target)

    def _commit(self, checkpoint: dict[str, Any], target: Path) -> None:
        if not self._said:
            self._said = True
            enable_logging()
            logger.warning(_LACKING)

        def describe(entries: tuple[FileEntry, ...]) -> Manifest:
            return Manifest(
                step=int(checkpoint["global_step"]),
                epoch=float(checkpoint["epoch"]),
                world_size=1,
                generation=0,
                written=time.time(),
                reason="scheduled",
                files=entries,
                parts=(PartEntry("rng", "missing", "ResumeCallback captures it"),),
                framework=VERSION,
            )

        pending = PendingCheckpoint(
            _STORAGE, SingleProcess(), target, int(checkpoint["global_step"]), _nobody, is_file=True
        )
        pending.open(lambda path: set_aside(_STORAGE, path))
        pending.write(lambda: _write(checkpoint, target))
        pending.commit([(Path(target.name), target)], describe)
        _STORAGE.remove_file(layout.pending_path(target))
        if layout.root_paths(layout.superseded_path(target)):
            delete(_STORAGE, layout.superseded_path(target))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint without running code, after comparing it with its manifest where it has one.

        Raises:
            CheckpointDamaged: it is not what was saved.
        """
        target = Path(os.path.abspath(path))
        if not self.is_managed and layout.is_committed(target):
            _require_whole(target)
        with without_code():
            content: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return content

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, but not the newest valid one of its directory."""
        target = Path(os.path.abspath(path))
        if self.is_managed or not layout.is_committed(target):
            super().remove_checkpoint(path)
            return
        plan = plan_prune(_STORAGE, target.parent, KeepUnless({target.name}), now=time.time())
        if target.name in plan.remove:
            delete(_STORAGE, target)


def _nobody() -> None:
    """Fence nobody off: without a callback no start owns the run directory."""


def _write(checkpoint: dict[str, Any], target: Path) -> None:
    """Write a file beside its place, force it onto the disk, and put it there."""
    import torch

    temporary = target.with_name(f".{target.name}.tmp")
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)


def _require_whole(path: Path) -> None:
    try:
        manifest = read_manifest(_STORAGE, path)
        check_sizes(path, manifest)
        for _ in check_digests(_STORAGE, path, manifest.files):
            pass
    except CheckpointDamaged as damage:
        raise CheckpointDamaged(
            f"{path.name} is damaged: {damage}. Name an earlier checkpoint, or add ResumeCallback(), which takes it by "
            "itself",
            path=path,
        ) from damage
