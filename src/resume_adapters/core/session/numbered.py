"""Which run a training continues whose framework would number a new directory at each launch.

The nth training of a process is the nth run. A finished run whose settings differ is another one, as it would be
without this package; how long it trains is no such setting.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.recovery.attempt import between_attempts
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState, observed_state
from resume_adapters.core.storage.base import Storage, write_atomically

_FILE = "training.json"


class Training(msgspec.Struct, frozen=True, omit_defaults=True):
    """A training in a numbered directory.

    Attributes:
        number: which training of its process it is, from 1, among those whose directories lie beside each other.
        settings: what it was given, as text; empty where the version that began it did not look.
        lengths: how long it was to train, likewise.
    """

    number: int = 1
    settings: dict[str, str] = {}
    lengths: dict[str, str] = {}

    def is_like(self, other: Training) -> bool:
        """Return whether another training has the same settings. One that has changed as a length has is the length."""
        lengths = _changes(self.lengths, other.lengths)
        return bool(other.settings) and _changes(self.settings, other.settings) <= lengths

    def write(self, storage: Storage, run_directory: Path) -> None:
        """Write it into its run directory, which this process owns."""
        write_atomically(storage, run_directory / CONTROL / _FILE, msgspec.json.encode(self))


def _changes(one: Mapping[str, str], other: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(one[name], other[name]) for name in one.keys() & other.keys() if one[name] != other[name]}


_LAST: dict[Path, tuple[Training, Path]] = {}
"""The last training of this process, by the directory in which its framework numbers directories."""

between_attempts(_LAST.clear)


def choose_directory(
    storage: Storage, fresh: Path, earlier: Sequence[Path], parent: Path, given: Training, *, is_scratch: bool
) -> tuple[Path, Training]:
    """Return the run directory of a training that begins, and the training with its number.

    Args:
        fresh: the directory that the framework would begin.
        earlier: the run directories beside it, oldest first.
        parent: where the framework numbers them.
        given: its settings and lengths.
        is_scratch: it continues no run.
    """
    training = msgspec.structs.replace(given, number=_number(storage, parent, given))
    found = None if is_scratch or fresh in earlier else _run_of(storage, earlier, training)
    chosen = fresh if found is None else found
    _LAST[parent] = training, chosen
    return chosen, training


def _number(storage: Storage, parent: Path, given: Training) -> int:
    """Return the number of a training: that of the last one, where that has failed and is tried again."""
    if parent not in _LAST:
        return 1
    last, directory = _LAST[parent]
    return last.number + (_state(storage, directory) is RunState.FINISHED or not given.is_like(last))


def _run_of(storage: Storage, earlier: Sequence[Path], training: Training) -> Path | None:
    runs = [(path, former) for path in reversed(earlier) if (former := _read(storage, path)).number == training.number]
    alike = [path for path, former in runs if training.is_like(former)]
    if alike or not runs:
        return alike[0] if alike else None
    path, former = runs[0]
    is_over = _state(storage, path) in (RunState.FINISHED, RunState.RUNNING)
    return None if former.settings and is_over else path


def _read(storage: Storage, run_directory: Path) -> Training:
    file = run_directory / CONTROL / _FILE
    try:
        return msgspec.json.decode(storage.read(file), type=Training) if storage.is_file(file) else Training()
    except msgspec.MsgspecError:
        return Training()


def _state(storage: Storage, run_directory: Path) -> RunState:
    return observed_state(ControlDirectory(storage, run_directory, time.time).status.read())
