"""A CheckpointIO that replaces a file in one step, and reads data only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from resume_adapters.core.log import logger
from resume_adapters.core.state import safe_load
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import SaveFailed, UnsupportedSetting
from resume_adapters.integrations.lightning_files import write
from resume_adapters.lightning import files
from resume_adapters.lightning.compat import io, pl

_MISSING = (
    "Without ResumeCallback, ResumeCheckpointIO only writes each file whole and reads data only. Nothing saves random "
    "state, the position in the data and what is left of a step, and nothing finds a damaged checkpoint: add "
    "ResumeCallback() to the callbacks"
)


def _is_used(place: str) -> bool:
    """Return whether somebody may use what a checkpoint has at a place: hyperparameters only make a module."""
    return place.partition(".")[0] not in files.HYPERPARAMETERS


def data_only() -> contextlib.AbstractContextManager[None]:
    """Return the context in which ``torch.load`` reads data only, and what hyperparameters often hold."""
    return safe_load.data_only(safe_load.data_classes())


def require_data(strategy: Any, path: Path) -> None:
    """Refuse a file that a strategy would read with an unpickler of its own, which runs the code that a file names.

    Raises:
        CheckpointDamaged: it holds more than data.
    """
    if isinstance(strategy, pl.strategies.FSDPStrategy) and path.is_file():  # seam: lightning 2.4-2.6
        files.read(path)


class ResumeCheckpointIO(io.TorchCheckpointIO):  # type: ignore[misc]  # known at run time
    """Writes checkpoints so that a crash leaves the former file or the whole new one, and reads data only.

    It writes in the checkpoint's own directory (Lightning writes in ``TMPDIR``, from where a file may have to be
    copied), forces the file onto the disk, and renames it into place. :class:`ResumeCallback` does the rest: it commits
    each checkpoint, finds damage, and knows which files may be removed.
    """

    def __init__(self) -> None:
        self._is_managed = False
        self._is_read: Callable[[str], bool] = _is_used
        self._error: OSError | None = None
        self._has_warned = False

    @contextlib.contextmanager
    def reading(self, is_read: Callable[[str], bool]) -> Iterator[None]:
        """Return the context in which a callback loads a checkpoint.

        Args:
            is_read: see :func:`files.read`.
        """
        self._is_read = is_read
        try:
            yield
        finally:
            self._is_read = _is_used

    @contextlib.contextmanager
    def managed(self) -> Iterator[None]:
        """Return the context in which a callback commits what is written.

        Within it an error waits for :meth:`raise_error`: other ranks wait for this one in the middle of a save.
        """
        self._is_managed = True
        try:
            yield
        finally:
            self._is_managed, self._error = False, None

    def raise_error(self) -> None:
        """Raise what went wrong in a managed save.

        Raises:
            OSError: the file could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint's file.

        Raises:
            TypeError: storage options are given, of which there are none.
            UnsupportedSetting: the path is a URL.
            SaveFailed: it could not be written.
        """
        if storage_options is not None:
            raise TypeError("ResumeCheckpointIO takes no storage_options: a checkpoint is a file on a mounted disk")
        if "://" in str(path):
            raise UnsupportedSetting(f"ResumeCheckpointIO writes to mounted file systems; got {path}: leave it out")
        target = Path(os.path.abspath(path))
        try:
            # What a callback commits is forced onto the disk there, in a directory that no reader knows yet.
            write(checkpoint, target) if self._is_managed else _replace(checkpoint, target)
        except OSError as error:
            if not self._is_managed:
                raise SaveFailed(f"{target} could not be written: {error}", path=target) from error
            self._error = error
        if not self._is_managed and not self._has_warned and "optimizer_states" in checkpoint:
            self._has_warned = True
            logger.warning(_MISSING)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint without running code; of objects, only hyperparameters may be in it.

        Raises:
            CheckpointDamaged: it would have to run code elsewhere.
        """
        with data_only(), files.standing_in([Path(path)], self._is_read):
            content: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return content


def _replace(checkpoint: dict[str, Any], target: Path) -> None:
    """Write a file beside its place, force it onto the disk, and put it there."""
    import torch

    storage, temporary = LocalStorage(), target.with_name(f".{target.name}.tmp")
    storage.make_directory(target.parent)
    with open(temporary, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    storage.replace(temporary, target)
