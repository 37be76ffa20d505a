"""Lightning's ModelCheckpoints: where they save, what they remember and do not save, and which is the best."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.patching import wrapped
from resume_adapters.core.session.numbered import Training, choose_directory
from resume_adapters.core.session.options import run_directory_override
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.lightning import observed
from resume_adapters.lightning.compat import pl

_FIELD = re.compile(r"\{([^:}]+)")


def saving(trainer: Any) -> list[Any]:
    """Return every ModelCheckpoint that saves the whole state."""
    found = [each for each in trainer.checkpoint_callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]
    return [each for each in found if not each.save_weights_only]


def place(callback: Any, trainer: Any) -> str:
    """Return the directory in which a callback that saves checkpoints would save, as Lightning resolves it."""
    resolve = getattr(callback, "_ModelCheckpoint__resolve_ckpt_dir", None)  # seam: lightning 2.4-2.6
    return str(callback.dirpath if resolve is None else resolve(trainer))  # OnExceptionCheckpoint is none


def move_directories(trainer: Any) -> frozenset[Path]:
    """Move the directory of each checkpoint callback to that of the environment, if it names one.

    The first ModelCheckpoint saves into that directory, others that had another directory beside it; so does what
    Lightning writes below ``default_root_dir``. Loggers keep their directories: they are made before.

    Returns:
        The directories that they had.
    """
    directory = run_directory_override()
    if directory is None:
        return frozenset()
    trainer._default_root_dir = str(directory)  # seam: lightning 2.4-2.6
    others = [each for each in trainer.checkpoint_callbacks if hasattr(each, "dirpath")]
    moved: dict[str | None, Path] = {}
    for each in [*saving(trainer), *others]:
        former = None if each.dirpath is None else os.path.realpath(each.dirpath)
        if former is None or directory not in (Path(former), *Path(former).parents):
            beside = directory / f"checkpoints-{len(moved) + 1}" if moved else directory
            each.dirpath = str(moved.setdefault(former, beside))
    return frozenset(Path(former) for former in moved if former is not None)


def assign_directories(trainer: Any, resume: str) -> Training | None:
    """Give each ModelCheckpoint without a ``dirpath`` one that the next launch finds again.

    Lightning would put it below the logger's version, which is a new one at every launch. An earlier version that holds
    this run is used instead.

    Returns:
        The training, where its directory has the number of a version.
    """
    placeless = [each for each in saving(trainer) if each.dirpath is None]
    if not placeless:
        return None
    fresh, training = Path(os.path.realpath(place(placeless[0], trainer))), None
    if trainer.loggers and trainer.is_global_zero:
        parent = fresh.parents[1]
        versions = parent.glob("version_*/" + fresh.name)
        earlier = sorted((path for path in versions if (path / CONTROL).is_dir()), key=_version)
        given, is_scratch = observed.training(trainer), resume.startswith("scratch")
        fresh, training = choose_directory(LocalStorage(), fresh, earlier, parent, given, is_scratch=is_scratch)
    directory, training = trainer.strategy.broadcast((str(fresh), training))
    for each in placeless:
        each.dirpath = directory
    return cast("Training | None", training)


def named_by_rank_zero(callback: Any, trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Return the context in which a ModelCheckpoint has the file names of rank zero on all ranks.

    Metrics in a name differ between ranks, if they were logged without ``sync_dist``. Lightning then writes the file
    under the name that rank zero gives it.

    Args:
        callback: the ModelCheckpoint.
    """

    def format_name(
        native: Callable[..., str], metrics: Any, filename: str | None = None, *rest: Any, **more: Any
    ) -> str:
        name = native(metrics, filename, *rest, **more)
        fields = set(_FIELD.findall(filename or callback.filename or ""))
        return str(trainer.strategy.broadcast(name)) if fields - {"epoch", "step"} else name

    return wrapped(callback, "format_checkpoint_name", format_name)


def _version(directory: Path) -> int:
    number = directory.parent.name.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


def best(trainer: Any) -> str | None:
    """Return the name of the best checkpoint."""
    monitoring = [each for each in saving(trainer) if each.monitor is not None]
    path = next((each.best_model_path for each in monitoring if each.best_model_path), None)
    return None if path is None else Path(path).name


def wanted(trainer: Any) -> frozenset[str]:
    """Return the names of the checkpoints that a ModelCheckpoint removes when it wants them no longer."""
    paths: set[str] = set()
    for each in saving(trainer):
        paths |= {each.last_model_path, *each.best_k_models}
        paths |= {each.best_model_path} if each.save_top_k == 1 else set()
    return frozenset(Path(path).name for path in paths if path)


def may_have_saved(trainer: Any, path: str) -> bool:
    """Return whether a path is one that a ModelCheckpoint of this trainer could have saved to: within its directory.

    A ModelCheckpoint knows its earlier checkpoints from the one that is resumed, which somebody else may have written.
    """
    places = [each for each in trainer.checkpoint_callbacks if getattr(each, "dirpath", None)]
    return any(
        path.endswith(each.FILE_EXTENSION) and _real(path).startswith(os.path.join(_real(each.dirpath), ""))
        for each in places
    )


def _real(path: str | os.PathLike[str]) -> str:
    """Return a path without links and dots; a URL as it is."""
    return str(path) if "://" in str(path) else os.path.realpath(path)


def capture(trainer: Any, path: Path) -> dict[str, dict[str, Any]]:
    """Capture what each ModelCheckpoint does not save, by its ``state_key``, as it is after the save under way."""
    found = {}
    for each in saving(trainer):
        kept = _unsaved(each)
        if str(path) in (each.best_model_path, each.last_model_path, *each.best_k_models):
            kept |= {"_last_global_step_saved": trainer.global_step, "_last_checkpoint_saved": str(path)}
        checked = each._last_time_checked  # seam: lightning 2.4-2.6
        found[each.state_key] = {**kept, "elapsed": None if checked is None else time.monotonic() - checked}
    return found


def _unsaved(callback: Any) -> dict[str, Any]:
    names = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}  # seam: lightning 2.4-2.6


def restore(trainer: Any, saved: Mapping[str, dict[str, Any]]) -> None:
    """Restore what :func:`capture` returned."""
    for each in saving(trainer):
        of_each = saved.get(each.state_key, {})
        for attribute in _unsaved(each).keys() & of_each.keys():
            setattr(each, attribute, of_each[attribute])
        name = each.format_checkpoint_name(dict(trainer.callback_metrics), each.CHECKPOINT_NAME_LAST)
        if each.save_last and not each.last_model_path and os.path.lexists(name):
            each.last_model_path = name  # made right after the first checkpoint, which does not know of it
        if of_each.get("elapsed") is not None:
            each._last_time_checked = time.monotonic() - of_each["elapsed"]  # seam: lightning 2.4-2.6


def mark_saved(trainer: Any, step: int) -> None:
    """Mark a step as saved, so that no ModelCheckpoint saves it once more in the middle of the next."""
    for each in saving(trainer):
        each._last_global_step_saved = step  # seam: lightning 2.4-2.6


def relocated(saved: Any, old: str, new: str) -> Any:
    """Return a ModelCheckpoint's state with the paths of a directory that was renamed."""
    if isinstance(saved, dict):
        return {relocated(key, old, new): relocated(value, old, new) for key, value in saved.items()}
    if isinstance(saved, str) and (saved == old or saved.startswith(f"{old}{os.sep}")):
        return new + saved[len(old) :]
    return saved
