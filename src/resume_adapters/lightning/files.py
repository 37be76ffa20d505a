"""Lightning's checkpoint files: written in one step, read without running code, recognised."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.catalog import FILE_SUFFIX
from resume_adapters.core.checkpoint.native_files import UNREADABLE, require_intact, require_plain
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.log import logger
from resume_adapters.core.patching import replaced
from resume_adapters.core.state import safe_load, stand_ins
from resume_adapters.core.state.loading import copied
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged, SaveFailed, UnsupportedSetting
from resume_adapters.integrations.lightning_files import write
from resume_adapters.lightning.compat import io, pl

OWN_NAME = "resume-step={step}" + FILE_SUFFIX
"""Name of a checkpoint that no ModelCheckpoint asked for: at a stop, at the end, and for ``save_every``."""

OF_OPTIMIZERS = ("optimizer_states", "lr_schedulers")
"""What a checkpoint has of optimizers and schedules."""

HYPERPARAMETERS = (
    *("hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
)  # seam: lightning 2.4-2.6
"""What ``save_hyperparameters()`` adds to a checkpoint."""


def read(file: Path, is_read: Callable[[str], bool] = lambda place: True) -> dict[str, Any]:
    """Read a checkpoint file without running code.

    Args:
        is_read: returns whether what is at a place must be data; elsewhere stand-ins take the place of objects.

    Raises:
        CheckpointDamaged: it is not whole, would run code, or becomes larger where it is read.
    """
    return _read(file, is_read)[0]


def _read(file: Path, is_read: Callable[[str], bool]) -> tuple[dict[str, Any], set[str]]:
    """Return what a file holds, and the names of what stand-ins took the place of; see :func:`read`."""
    import torch

    require_plain(file)
    try:
        with safe_load.allowing(safe_load.data_classes()), stand_ins.standing_in() as names:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except UNREADABLE as error:
        raise CheckpointDamaged(f"{file.name} cannot be read: {error}", path=file) from error
    if not isinstance(content, dict):
        raise CheckpointDamaged(f"{file.name} holds a {type(content).__name__}, not a checkpoint", path=file)
    odd = stand_ins.stand_ins(content, is_read)
    if odd:
        found = ", ".join(f"{name} at {place}" for name, place in sorted(odd.items()))
        raise CheckpointDamaged(f"{file.name} would have to run code to be loaded: it holds {found}", path=file)
    return content, names


@contextlib.contextmanager
def standing_in(files: Iterable[Path], is_read: Callable[[str], bool]) -> Iterator[None]:
    """Return the context in which Lightning reads stand-ins in place of objects that are not used.

    Args:
        files: what it reads. Whatever else it reads may have stand-ins for no more than what these hold; one of torch's
            older format is not looked at.
        is_read: see :func:`read`.

    Raises:
        CheckpointDamaged: one is not whole, or would run code.
    """
    names: set[str] = set()
    for file in files:
        if zipfile.is_zipfile(file):
            names |= _read(file, is_read)[1]
    with stand_ins.standing_in(names) if names else contextlib.nullcontext():
        yield


class ForeignCheckpoints:
    """Recognises the files that bare Lightning saved."""

    def step(self, path: Path) -> ForeignStep | None:
        """Return the step of a checkpoint; ``None`` for anything else, and for weights alone.

        Raises:
            CheckpointDamaged: it cannot be read, or has shards of FSDP1.
        """
        if _is_flattened(path):
            merge = (
                f"python -m {pl.__name__}.utilities.consolidate_checkpoint {path} --output_file {path.stem}-whole.ckpt"
            )
            raise CheckpointDamaged(
                f"FSDPStrategy (FSDP1) has sharded it, and no other strategy loads it so: `{merge}` makes a file of it "
                "from which a run under any strategy can start",
                path=path,
            )
        if path.is_symlink() or not path.is_file() or not path.name.endswith(FILE_SUFFIX):
            return None
        content = read(path, is_read=lambda place: False)  # only its keys and its step are looked at
        if "optimizer_states" not in content or "loops" not in content:
            return None
        try:
            return ForeignStep(int(content["global_step"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointDamaged(f"{path.name} has no global_step that is a number", path=path) from error

    def require_whole(self, path: Path) -> None:
        """Check that the file is complete.

        Raises:
            CheckpointDamaged: it is torn.
        """
        require_intact(path)


def _is_flattened(path: Path) -> bool:
    """Return whether a directory has the shards that Lightning saves under FSDP1; under FSDP2 they have other names."""
    index = path / distributed_metadata.NAME
    if not index.is_file():
        return False
    try:
        found = distributed_metadata.load(BytesIO(LocalStorage().read(index)))
    except UNREADABLE:
        return False
    return any(name.startswith("model.") for name in found.state_dict_metadata)  # seam: lightning 2.4-2.6


def is_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return whether two paths lead to the same file or directory."""
    return os.path.realpath(one) == os.path.realpath(other)


_MISSING = (
    "Without ResumeCallback, ResumeCheckpointIO only writes each file whole and reads data only. Nothing saves random "
    "state, the position in the data and what is left of a step, and nothing finds a damaged checkpoint: add "
    "ResumeCallback() to the callbacks"
)


def _is_used(place: str) -> bool:
    """Return whether somebody may use what a checkpoint has at a place: hyperparameters only make a module."""
    return place.partition(".")[0] not in HYPERPARAMETERS


def data_only() -> contextlib.AbstractContextManager[None]:
    """Return the context in which ``torch.load`` reads data only, and what hyperparameters often hold."""
    return safe_load.data_only(safe_load.data_classes())


def require_data(strategy: Any, path: Path) -> None:
    """Refuse a file that a strategy would read with an unpickler of its own, which runs the code that a file names.

    Raises:
        CheckpointDamaged: it holds more than data.
    """
    if isinstance(strategy, pl.strategies.FSDPStrategy) and path.is_file():  # seam: lightning 2.4-2.6
        read(path)


class ResumeCheckpointIO(io.TorchCheckpointIO):  # type: ignore[misc]  # known at run time
    """Writes checkpoints so that a crash leaves the former file or the whole new one, and reads data only.

    It writes in the checkpoint's own directory (Lightning writes in ``TMPDIR``, from where a file may have to be
    copied), forces the file onto the disk, and renames it into place. :class:`ResumeCallback` does the rest: it commits
    each checkpoint, finds damage, and knows which files may be removed.
    """

    def __init__(self) -> None:
        self._is_managed = False
        self._is_read: Callable[[str], bool] = _is_used
        self._uncopied: tuple[str, ...] = ()
        self._error: OSError | None = None
        self._has_warned = False

    @contextlib.contextmanager
    def reading(self, is_read: Callable[[str], bool]) -> Iterator[None]:
        """Return the context in which a callback loads a checkpoint, and copies :data:`OF_OPTIMIZERS` itself.

        Args:
            is_read: see :func:`read`.
        """
        with replaced(self, "_is_read", is_read), replaced(self, "_uncopied", OF_OPTIMIZERS):
            yield

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
        with data_only():
            if zipfile.is_zipfile(path) and not args and kwargs.keys() <= {"weights_only"}:
                # Read once. What trains must not lie in the file: it gets copies of the mapped tensors.
                found = read(Path(path), self._is_read)
                uncopied = {name: found.pop(name) for name in self._uncopied if name in found}
                return {**copied(found), **uncopied}
            with standing_in([Path(path)], self._is_read):
                return dict(super().load_checkpoint(path, *args, **kwargs))


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
