"""Read a run directory for the commands. This needs no framework."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from resume_adapters.core.checkpoint.catalog import list_checkpoints
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import CONTROL, LATEST, CheckpointState, state_of
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.retention import Candidate, KeepBest
from resume_adapters.core.checkpoint.validity import ForeignStep, is_alias
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunStatus
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged, RunDirectoryUnusable, UnsupportedSetting

STORAGE = LocalStorage()

_FOREIGN = re.compile(r"checkpoint-(\d+)|.*step=(\d+).*\.ckpt")
"""The names of checkpoints that the Trainer and Lightning saved."""


class ForeignNames:
    """Recognises by their names what the bare Trainer and Lightning saved.

    Only the framework's adapter can check that such a checkpoint is complete.
    """

    def step(self, path: Path) -> ForeignStep | None:
        """Return the step in ``trainer_state.json``, or else the number in the name; ``None`` for another path.

        Raises:
            CheckpointDamaged: the path is a dangling link.
        """
        named = _FOREIGN.fullmatch(path.name)
        if named and not path.exists():
            raise CheckpointDamaged(f"is a link to {os.readlink(path)}, which is not there", path=path)
        if named is None:
            return None
        try:
            return ForeignStep(int(json.loads(STORAGE.read(path / "trainer_state.json"))["global_step"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return ForeignStep(int(named[1] or named[2]), is_content=False)

    def require_whole(self, path: Path) -> None:
        """No-op."""


@dataclass(frozen=True)
class RunDirectory:
    """What a run directory contained when it was read.

    Attributes:
        path: the directory, absolute.
        rows: its checkpoints, oldest first, without links to them.
        latest: the name of the checkpoint that ``latest`` points to, if there is one.
    """

    path: Path
    rows: tuple[CheckpointInfo, ...]
    latest: str | None

    @property
    def anchor(self) -> CheckpointInfo | None:
        """The checkpoint that a restart would resume from now, if its files' content is intact."""
        usable = [row for row in reversed(self.rows) if row.step is not None]
        return max(usable, key=lambda row: (row.is_ranked, row.step or 0), default=None)

    @property
    def newest(self) -> Manifest | None:
        """The manifest of the newest committed checkpoint."""
        manifests = [row.manifest for row in reversed(self.rows) if row.manifest is not None]
        return max(manifests, key=lambda manifest: manifest.step, default=None)

    @property
    def damaged(self) -> list[CheckpointInfo]:
        """The checkpoints whose files disagree with their manifest."""
        return [row for row in self.rows if row.state == "damaged"]

    def best(self, wanted: KeepBest | None) -> str | None:
        """Return the name of the best checkpoint: by a metric, or according to the run.

        Raises:
            UnsupportedSetting: no checkpoint has that metric.
        """
        if wanted is None:
            return self.newest.best if self.newest else None
        self.require_metric(wanted.metric)
        candidates = [
            Candidate(row.path.name, row.manifest.step, row.manifest.written, row.manifest.metrics)
            for row in self.rows
            if row.manifest is not None
        ]
        return next(iter(wanted.keeps(candidates, now=0.0)), None)

    def require_metric(self, metric: str) -> None:
        """Refuse a metric that no checkpoint has: with a misspelt name, none would be the best.

        Raises:
            UnsupportedSetting: no checkpoint has that metric.
        """
        known = sorted({name for row in self.rows if row.manifest is not None for name in row.manifest.metrics})
        if metric not in known:
            raise UnsupportedSetting(
                f"no checkpoint of {self.path} has the metric {metric!r}; they have {', '.join(known) or 'no metrics'}"
            )

    def control(self) -> ControlDirectory:
        """Return the run's ``.resume`` directory."""
        return ControlDirectory(STORAGE, self.path, time.time)

    def status(self) -> tuple[RunStatus | None, str]:
        """Return the run's last status, or ``None`` and the reason why it cannot be read."""
        file = self.path / CONTROL / "status.json"
        try:
            status = self.control().status.read()
        except OSError as error:
            return None, f"{CONTROL}/status.json cannot be read: {error.strerror}"
        if status is None and os.path.lexists(file):
            return None, f"{CONTROL}/status.json is not a status of this package"
        return status, "" if status else f"there is no {CONTROL}/status.json"


def read(path: Path) -> RunDirectory:
    """Read a run directory.

    Raises:
        RunDirectoryUnusable: the path does not exist, cannot be read, or is not a run directory.
    """
    path = Path(os.path.abspath(path))
    try:
        empty = not os.listdir(path)
        history = ControlDirectory(STORAGE, path, time.time).journal.committed()
        found = list_checkpoints(STORAGE, path, ForeignNames(), history)
        rows = tuple(row for row in found if not is_alias(STORAGE, row.path))
    except FileNotFoundError as error:
        raise RunDirectoryUnusable(
            f"there is no {path}; expected a run's directory of checkpoints", path=path
        ) from error
    except NotADirectoryError as error:
        raise RunDirectoryUnusable(f"{path} is a file; expected a run's directory of checkpoints", path=path) from error
    except PermissionError as error:
        raise RunDirectoryUnusable(f"{error.filename} cannot be read: change its permissions", path=path) from error
    if state_of(STORAGE, path) in (CheckpointState.COMMITTED, CheckpointState.PENDING):
        raise RunDirectoryUnusable(f"{path} is a checkpoint; name its run directory, {path.parent}", path=path)
    if not rows and not (path / CONTROL).is_dir():
        holds = "is empty" if empty else f"has neither {CONTROL}/ nor a checkpoint"
        raise RunDirectoryUnusable(
            f"{path} {holds}, so it is not a run directory; expected the directory that a run saves into", path=path
        )
    return RunDirectory(path, rows, _latest(path))


def _latest(path: Path) -> str | None:
    """Return the name in ``latest``: a link, or a line of text on a file system without links."""
    link = path / LATEST
    if link.is_symlink():
        return os.path.basename(os.readlink(link))
    return link.read_text(errors="replace").strip() if link.is_file() else None
