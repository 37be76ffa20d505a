"""The start of a run: taking its directory over, and choosing what to resume from, on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from resume_adapters.core import directory
from resume_adapters.core.journal import Journal, Status
from resume_adapters.core.listing import Foreign, candidates
from resume_adapters.core.place import LATEST, is_committed, names
from resume_adapters.core.ranks import Ranks, everywhere
from resume_adapters.core.resolve import Checkpoint, Choice, latest_valid, named
from resume_adapters.core.storage import Pointer, Storage, point_to
from resume_adapters.errors import (
    CheckpointsExist,
    NoValidCheckpoint,
    ResumeError,
    RunDirectoryUnusable,
    RunHalted,
    StateMismatch,
)

T = TypeVar("T")


class Start:
    """One start of a run directory.

    Args:
        storage: the file operations.
        ranks: the ranks of the run.
        run_directory: where the run's checkpoints live.
        journal: what the run directory remembers.
        resume: ``"auto"``, ``"scratch"``, ``"scratch!"`` or a path.
        foreign: recognises whole checkpoints that this package did not write.
        latest: how ``latest`` names the newest checkpoint.

    Attributes:
        generation: which start of the run directory this is, once it has been taken over.
        previous: how the run was left by the start before.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        run_directory: Path,
        journal: Journal,
        resume: str | os.PathLike[str],
        foreign: Foreign,
        latest: Pointer,
    ) -> None:
        self.storage = storage
        self.ranks = ranks
        self.directory = run_directory
        self.journal = journal
        self.resume = resume
        self.foreign = foreign
        self.latest = latest
        self.generation = 0
        self.previous: Status | None = None

    def choose(self) -> Choice:
        """Take the directory over, and return what to resume from; see :meth:`ResumableRun.open`."""
        self._on_rank_zero(self._prepare, "use the run directory")
        before = self._on_rank_zero(self._committed_names, "list the run directory")
        try:
            choice = self._choose()
        except NoValidCheckpoint:
            if self._on_rank_zero(self._committed_names, "list the run directory") == before:
                raise
            choice = self._choose()  # an earlier start pruned what was being checked
        self.generation, self.previous = self._on_rank_zero(self._take_over, "take the run directory over")
        if self._on_rank_zero(self._committed_names, "list the run directory") != before:
            # An earlier start committed or pruned while this one chose. From now on it can do neither.
            choice = self._choose()
        choice = self._on_rank_zero(lambda: self._tidy(choice), "tidy the run directory")
        return choice

    def _on_rank_zero(self, work: Callable[[], T], doing: str) -> T:
        """Do on rank zero what belongs to the run directory as a whole, and return the result on every rank."""

        def unusable(cause: Exception) -> ResumeError:
            return RunDirectoryUnusable(
                f"could not {doing}: {cause}. Nothing committed is lost: mend permissions or free space, then launch "
                "the same command again",
                path=self.directory,
            )

        results = everywhere(self.ranks, lambda: work() if self.ranks.rank == 0 else None, doing, unusable)
        return cast("T", results[0])

    def _committed_names(self) -> list[str]:
        return [path.name for path in candidates(self.directory) if is_committed(path)]

    def _prepare(self) -> None:
        directory.prepare(self.storage, self.directory)
        self._require_going_on()
        if self.resume == "scratch!":
            for path in candidates(self.directory):
                if directory.is_checkpoint(path, self.foreign):
                    directory.set_aside(self.storage, path)

    def _require_going_on(self) -> None:
        status = self.journal.status()
        if status is not None and status.state == "halted":
            raise RunHalted(
                f"{self.directory} was halted at step {status.step}: {status.reason}. Look at it; if it may go on, run "
                f"`resume-adapters resume {self.directory}` and launch the same command again",
                path=self.directory,
                step=status.step,
            )

    def _choose(self) -> Choice:
        if self.resume == "scratch!":
            return Choice(None, ())
        if self.resume == "scratch":
            committed = self._on_rank_zero(self._committed_names, "list the run directory")
            if committed:
                raise CheckpointsExist(
                    f"{self.directory} holds {len(committed)} committed checkpoints, {committed[0]} the newest, and "
                    'resume="scratch" would train over them: use another directory, or resume="scratch!" to set them '
                    "aside first",
                    path=self.directory,
                )
            return Choice(None, ())
        choice = latest_valid(self.storage, self.ranks, self.directory, self.foreign)
        if choice.checkpoint is None and self.resume != "auto":
            return Choice(self._named(Path(self.resume)), ())
        return choice

    def _named(self, path: Path) -> Checkpoint:
        found = everywhere(self.ranks, lambda: named(self.storage, path, self.foreign), f"start from {path}")
        if len({checkpoint.step for checkpoint in found}) > 1:
            steps = [checkpoint.step for checkpoint in found]
            raise StateMismatch(f"the ranks see different checkpoints at {path}: steps {steps}", path=path)
        return found[self.ranks.rank]

    def _take_over(self) -> tuple[int, Status | None]:
        return self.journal.next_generation(), self.journal.status()

    def _tidy(self, choice: Choice) -> Choice:
        """Set aside what was rejected, remove what crashed saves left, and say where the chosen checkpoint is now."""
        for each in choice.rejected:
            if names(each.path):  # else only another rank sees it
                directory.set_aside(self.storage, each.path)
        self.journal.withdraw_stop()  # an earlier start was asked
        put_back = directory.sweep(self.storage, self.directory)
        chosen = choice.checkpoint
        self.journal.note(
            "start",
            generation=self.generation,
            step=chosen.step if chosen else 0,
            rejected=[f"{each.path.name}: {each.reason}" for each in choice.rejected],
        )
        if chosen is None:
            return choice
        path = put_back.get(chosen.path, chosen.path)
        if path.parent == self.directory and chosen.manifest is not None:
            # A crash may have left it behind the last commit, or at what was set aside.
            point_to(self.storage, self.directory / LATEST, path.name, self.latest)
        return replace(choice, checkpoint=replace(chosen, path=path))
