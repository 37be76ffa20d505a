"""Read a run directory, or its copies in an object store, for the commands. This needs no framework."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from resume_adapters.core.checkpoint.catalog import list_checkpoints
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import CONTROL, CheckpointState, latest_name, state_of
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.checkpoint.retention import Candidate, KeepBest
from resume_adapters.core.checkpoint.validity import ForeignStep, check_digests, check_sizes, is_alias
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.launches import Launch, launches
from resume_adapters.core.run_directory.status import RunStatus, observed_state
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers.mirrors import open_tier
from resume_adapters.core.tiers.options import Remote
from resume_adapters.core.tiers.remote import RemoteTier
from resume_adapters.core.tiers.tier import TierCheckpoint
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
    """What a run directory, or a URL, contained when it was read.

    Attributes:
        path: the directory, absolute.
        rows: its checkpoints, oldest first, without links to them.
        latest: the name of the checkpoint that ``latest`` points to, if there is one.
        url: where the checkpoints are, if not in a directory.
    """

    path: Path
    rows: tuple[CheckpointInfo, ...]
    latest: str | None
    url: str = ""

    @property
    def place(self) -> str:
        """The directory or the URL, as text."""
        return self.url or str(self.path)

    @property
    def anchor(self) -> CheckpointInfo | None:
        """The checkpoint that a restart would resume from now, if its files' content is intact."""
        usable = [row for row in reversed(self.rows) if row.step is not None and row.state != "weights-only"]
        return max(usable, key=lambda row: (row.manifest is not None, row.is_ranked, row.step or 0), default=None)

    @property
    def newest(self) -> Manifest | None:
        """The manifest of the newest committed checkpoint."""
        manifests = [row.manifest for row in reversed(self.rows) if row.manifest is not None]
        return max(manifests, key=lambda manifest: manifest.step, default=None)

    @property
    def refused(self) -> CheckpointInfo | None:
        """The newest checkpoint, if a later version wrote it: this version refuses to resume, from an older one too."""
        newest = next((row for row in reversed(self.rows) if row.step is not None or row.state == "newer"), None)
        return newest if newest is not None and newest.state == "newer" else None

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
        manifests = {row.path.name: row.manifest for row in self.rows if row.manifest is not None}
        candidates = [Candidate.of(name, each) for name, each in manifests.items()]
        return next(iter(wanted.keeps(candidates, now=0.0)), None)

    def require_metric(self, metric: str) -> None:
        """Refuse a metric that no checkpoint has: with a misspelt name, none would be the best.

        Raises:
            UnsupportedSetting: no checkpoint has that metric.
        """
        known = sorted({name for row in self.rows if row.manifest is not None for name in row.manifest.metrics})
        if metric not in known:
            raise UnsupportedSetting(
                f"no checkpoint of {self.place} has the metric {metric!r}; they have {', '.join(known) or 'no metrics'}"
            )

    def checkpoint(self, named: str) -> CheckpointInfo:
        """Return a checkpoint by its name, its path, or its step.

        Raises:
            UnsupportedSetting: there is none.
        """
        name = Path(named).name
        found = [row for row in self.rows if row.path.name == name]
        if not found and name.isdecimal():  # of one step, a committed one
            found = sorted(
                (row for row in self.rows if row.step == int(name)), key=lambda row: row.manifest is not None
            )
        if not found:
            known = ", ".join(row.path.name for row in self.rows)
            raise UnsupportedSetting(f"there is no checkpoint {named} in {self.path}; it holds {known or 'none'}")
        return found[-1]

    def control(self) -> ControlDirectory:
        """Return the run's ``.resume`` directory."""
        return ControlDirectory(STORAGE, self.path, time.time)

    def status(self) -> RunStatus | None:
        """Return the run's last status; ``None`` if there is none that can be read."""
        with contextlib.suppress(OSError):
            return self.control().status.read()
        return None

    def launches(self, history: Iterable[Mapping[str, Any]], status: RunStatus | None) -> list[Launch]:
        """Return the launches of the run, oldest first, as the entries of its journal and its last status have them."""
        resumes_from = self.anchor.step if self.anchor else 0
        return launches(history, status, observed_state(status), resumes_from or 0)


def resolved(path: Path) -> Path:
    """Return the absolute path of a run directory; of a project directory, that of ``checkpoints/`` in it."""
    path = Path(os.path.abspath(path))
    is_project = not (path / CONTROL).is_dir() and (path / _CHECKPOINTS / CONTROL).is_dir()
    return path / _CHECKPOINTS if is_project else path


def read(path: Path) -> RunDirectory:
    """Read a run directory; of a project directory, the run directory ``checkpoints/`` in it.

    Raises:
        RunDirectoryUnusable: the path does not exist, cannot be read, or is not a run directory.
    """
    path = resolved(path)
    try:
        holds = f"has neither {CONTROL}/ nor a checkpoint" if os.listdir(path) else "is empty"
        history = ControlDirectory(STORAGE, path, time.time).journal.committed()
        listed = list_checkpoints(STORAGE, path, ForeignNames(), history)
        rows = tuple(row for row in listed if not is_alias(STORAGE, row.path))
    except PermissionError as error:
        raise RunDirectoryUnusable(f"{error.filename} cannot be read: change its permissions", path=path) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        there = f"there is no {path}" if isinstance(error, FileNotFoundError) else f"{path} is a file"
        raise RunDirectoryUnusable(f"{there}; expected a run's directory of checkpoints", path=path) from error
    if state_of(STORAGE, path) in (CheckpointState.COMMITTED, CheckpointState.PENDING):
        raise RunDirectoryUnusable(f"{path} is a checkpoint; name its run directory, {path.parent}", path=path)
    if not rows and not (path / CONTROL).is_dir():
        raise RunDirectoryUnusable(
            f"{path} {holds}, so it is not a run directory; expected the directory that a run saves into", path=path
        )
    return RunDirectory(path, rows, latest_name(STORAGE, path))


def read_all(paths: list[Path]) -> list[RunDirectory]:
    """Read several run directories; what else is given is left out.

    Raises:
        RunDirectoryUnusable: there is none among them.
    """
    found, problems = [], []
    for path in paths:
        try:
            found.append(read(path))
        except RunDirectoryUnusable as error:
            problems.append(error)
    if not found:
        raise problems[0]
    return found


_CHECKPOINTS = "checkpoints"
"""Where Accelerate and Lightning put the run directory in a project directory."""


def require_intact(checkpoint: Path, manifest: Manifest, entries: tuple[FileEntry, ...]) -> None:
    """Check the sizes and the digests of some files of a checkpoint.

    Raises:
        CheckpointDamaged: naming the first file that is not as its manifest says.
    """
    check_sizes(STORAGE, checkpoint, msgspec.structs.replace(manifest, files=entries))
    check_digests(STORAGE, checkpoint, entries)


def open_url(url: str) -> RemoteTier:
    """Return the copies at a URL, without claiming them.

    Raises:
        MissingFramework: obstore is not installed.
        UnsupportedSetting: it is no URL of a store.
    """
    return open_tier(Remote(url, timeout=timedelta(minutes=1)), STORAGE, uuid.uuid4().hex)


def read_url(tier: RemoteTier, url: str) -> RunDirectory:
    """Return the checkpoints at a URL; one whose files lack their sizes is damaged.

    Raises:
        RunDirectoryUnusable: there is none.
    """
    rows = []
    for each in chosen_copies(tier, []):
        row = CheckpointInfo(Path(each.name), CheckpointState.COMMITTED, each.manifest.step, each.manifest)
        if missing := tier.missing(each):
            row = CheckpointInfo(row.path, CheckpointState.DAMAGED, None, None, missing)
        rows.append(row)
    return RunDirectory(Path(), tuple(rows), None, url)


def chosen_copies(tier: RemoteTier, names: list[str]) -> list[TierCheckpoint]:
    """Return some checkpoints at a URL by name or step, the newest of each; all, oldest first, if none is named.

    Raises:
        RunDirectoryUnusable: there is no checkpoint.
        UnsupportedSetting: there is none of that name or step.
    """
    found = tier.checkpoints()[::-1]
    if not found:
        raise RunDirectoryUnusable(f"there is no checkpoint at {tier.label}; expected the URL that a run copies to")
    by_name = {key: each for each in found for key in (each.name, str(each.manifest.step))}
    if missing := [name for name in names if name not in by_name]:
        known = ", ".join(each.name for each in found)
        raise UnsupportedSetting(f"there is no checkpoint {missing[0]} at {tier.label}; it holds {known}")
    return [by_name[name] for name in names] or found
