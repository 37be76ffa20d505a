"""What this process has finished: it may train a run further, but not begin another training in its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resume_adapters.core.recovery.attempt import between_attempts
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.run_directory.upkeep import usable
from resume_adapters.errors import UnsupportedSetting


@dataclass(frozen=True)
class Extent:
    """How far a training call asks to train, and what it trains.

    Attributes:
        epochs: epochs of the whole run; ``None`` where only its steps are limited.
        steps: optimizer steps of the whole run; ``None`` where only its epochs are limited.
        content: what stays as it is where a run is trained further, by the words for it.
        begins: why the framework alone would begin at step 0, in words; empty where it would train further.
    """

    epochs: float | None
    steps: int | None
    content: Mapping[str, Any] = field(default_factory=dict)
    begins: str = ""

    def __str__(self) -> str:
        found = {"epochs": self.epochs, "steps": self.steps}
        return " and ".join(f"{value:g} {unit}" for unit, value in found.items() if value is not None)

    def is_beyond(self, other: Extent) -> bool:
        """Return whether it asks for more epochs or steps than another one."""
        pairs = ((self.epochs, other.epochs), (self.steps, other.steps))
        return any(mine is not None and theirs is not None and mine > theirs for mine, theirs in pairs)


_FINISHED: dict[Path, tuple[int, float | None, int | None, dict[str, Any]]] = {}
"""What this process has finished: the generation of its start and the fields of its extent, by run directory."""

between_attempts(_FINISHED.clear)


def mark_finished(run: ResumableRun, extent: Extent, epochs: float, steps: int) -> None:
    """Remember that this process has finished a run.

    Args:
        run: the run.
        extent: what was asked for.
        epochs: the epochs of the run, where its extent does not say.
        steps: the steps of the run, likewise.
    """
    asked = (epochs if extent.epochs is None else extent.epochs, steps if extent.steps is None else extent.steps)
    _FINISHED[run.directory] = (run.generation, *asked, dict(extent.content))


def require_continuation(run: ResumableRun, extent: Extent, directory_option: str) -> None:
    """Refuse another training in a directory that this process has finished, unless it continues that run.

    It would resume from the end of the finished run and train nothing: the second fold of a cross-validation would get
    the weights of the first.

    Args:
        run: the run, opened or not.
        extent: what is asked for now.
        directory_option: what sets the run directory, as a user writes it.

    Raises:
        UnsupportedSetting: it asks for no more epochs or steps, trains something else, or would begin at step 0.
        RunDirectoryUnusable: the directory cannot be read.
    """
    with usable(run.directory):
        former = run.previous if run.generation else run.control.status.read()
    if run.context.options.resume == "scratch!" or former is None or former.state is not RunState.FINISHED:
        return
    generation, epochs, steps, content = _FINISHED.get(run.directory, (0, None, None, {}))
    if generation != former.generation:
        return
    finished = Extent(epochs, steps, content)
    differences = [
        f"{value} {name}, {finished.content[name]} then"
        for name, value in extent.content.items()
        if finished.content.get(name) != value
    ] + [extent.begins] * bool(extent.begins)
    if extent.is_beyond(finished) and not differences:
        return
    if run.generation:  # opened meanwhile: it is left as it was
        run.set_state(former.state, step=former.step, epoch=former.epoch, horizon=former.horizon, result=former.result)
        _FINISHED[run.directory] = (run.generation, epochs, steps, content)
    found = f" with {'; '.join(differences)}" if differences else ""
    raise UnsupportedSetting(
        f"this process has finished a training of {finished} in {run.directory}, and begins another one of {extent} "
        f"there{found}: it would resume from the end of the first one. Give each training its own run directory: "
        f"{directory_option}. To train the same run further, ask for more epochs or steps"
    )
