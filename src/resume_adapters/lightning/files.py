"""Lightning's checkpoint files: reading them without running code, recognising them, and what they hold."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.catalog import FILE_SUFFIX
from resume_adapters.core.checkpoint.native_files import UNREADABLE, require_intact
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.state import safe_load, stand_ins
from resume_adapters.errors import CheckpointDamaged

OWN_NAME = "resume-step={step}" + FILE_SUFFIX
"""Name of a checkpoint that no ModelCheckpoint asked for: at a stop, at the end, and for ``save_every``."""

HYPERPARAMETERS = (
    *("hyper_parameters", "hparams_name", "hparams_type"),
    *("datamodule_hyper_parameters", "datamodule_hparams_name", "datamodule_hparams_type"),
)  # seam: lightning 2.4-2.6
"""What ``save_hyperparameters()`` adds to a checkpoint."""


def read(file: Path, is_read: Callable[[str], bool] = lambda place: True) -> dict[str, Any]:
    """Read a checkpoint file without running code.

    Args:
        file: the file.
        is_read: returns whether what is at a place must be data; elsewhere stand-ins take the place of objects.

    Raises:
        CheckpointDamaged: it is not whole, or would run code.
    """
    content, _ = _read(file, is_read)
    return content


def _read(file: Path, is_read: Callable[[str], bool]) -> tuple[dict[str, Any], set[str]]:
    """Return what a file holds, and the names of what stand-ins took the place of; see :func:`read`."""
    import torch

    try:
        with safe_load.allowing(safe_load.data_classes()), stand_ins.standing_in() as names:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
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
            CheckpointDamaged: it cannot be read.
        """
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


def is_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return whether two paths lead to the same file or directory."""
    return os.path.realpath(one) == os.path.realpath(other)


def is_hpc(path: Path) -> bool:
    """Return whether a path has the name of what Lightning's handler of Slurm's signals saves."""
    return path.name.startswith("hpc_ckpt_")
