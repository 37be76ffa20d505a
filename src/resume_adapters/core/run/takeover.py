"""The start of a run: taking its directory over, and choosing what to resume from, on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from resume_adapters.core.checkpoint.catalog import candidates
from resume_adapters.core.checkpoint.checkpoint import Checkpoint, ResumeChoice
from resume_adapters.core.checkpoint.layout import LATEST, is_committed, is_pending, root_paths
from resume_adapters.core.checkpoint.resolve import latest_valid, open_checkpoint
from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.discovery import discover_groups
from resume_adapters.core.run_directory.status import RunStatus
from resume_adapters.core.run_directory.upkeep import is_checkpoint, prepare, set_aside, sweep
from resume_adapters.core.storage.base import Pointer, Storage, point_to
from resume_adapters.core.storage.groups import shared_by_all
from resume_adapters.errors import (
    CheckpointsExist,
    NoValidCheckpoint,
    ResumeError,
    RunDirectoryUnusable,
    RunHalted,
    StateMismatch,
)

T = TypeVar("T")


class Takeover:
    """One start of a run directory.

    Args:
        storage: the file operations.
        ranks: the ranks of the run.
        run_directory: where the run's checkpoints live.
        control: the ``.resume`` directory.
        resume: ``"auto"``, ``"scratch"``, ``"scratch!"`` or a path.
        foreign: recognises whole checkpoints that this package did not write.
        latest: how ``latest`` names the newest checkpoint.
        local_rank: this rank on its node, where each node has a run directory of its own.

    Attributes:
        sharing: which ranks share the run directory.
        generation: which start of the run directory this is, once it has been taken over.
        previous: how the run was left by the start before.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        run_directory: Path,
        control: ControlDirectory,
        resume: str | os.PathLike[str],
        foreign: ForeignDetector,
        latest: Pointer,
        local_rank: int | None = None,
    ) -> None:
        self.storage = storage
        self.ranks = ranks
        self.directory = run_directory
        self.control = control
        self.resume = resume
        self.foreign = foreign
        self.latest = latest
        self.local_rank = local_rank
        self.sharing = shared_by_all(ranks)
        self.generation = 0
        self.previous: RunStatus | None = None

    def choose(self) -> ResumeChoice:
        """Take the directory over, and return what to resume from; see :meth:`ResumableRun.open`."""
        if self.local_rank is not None:
            self.sharing = discover_groups(self.storage, self.ranks, self.directory, self.local_rank)
        self._on_leaders(self._prepare, "use the run directory")
        before = self._committed()
        try:
            choice = self._choose()
        except NoValidCheckpoint:
            if self._committed() == before:
                raise
            choice = self._choose()  # an earlier start pruned what was being checked
        self._take_over()
        if self._committed() != before:
            # An earlier start committed or pruned while this one chose. From now on it can do neither.
            choice = self._choose()
        return self._on_leaders(lambda: self._tidy(choice), "tidy the run directory")[self.sharing.leader]

    def _on_leaders(self, work: Callable[[], T], doing: str) -> dict[int, T]:
        """Do where a run directory is led what belongs to it as a whole; return the results by rank, on every rank."""

        def unusable(cause: Exception) -> ResumeError:
            return RunDirectoryUnusable(
                f"could not {doing}: {cause}. Nothing committed is lost: mend permissions or free space, then launch "
                "the same command again",
                path=self.directory,
            )

        results = run_on_all_ranks(self.ranks, lambda: [work()] if self.sharing.leads else [], doing, unusable)
        return {rank: result[0] for rank, result in enumerate(results) if result}

    def _committed(self) -> dict[int, list[str]]:
        """Return the names of the committed checkpoints of each run directory."""

        def names() -> list[str]:
            return [path.name for path in candidates(self.directory) if is_committed(path)]

        return self._on_leaders(names, "list the run directory")

    def _prepare(self) -> None:
        prepare(self.storage, self.directory)
        self._require_going_on()
        if self.resume == "scratch!":
            for path in candidates(self.directory):
                if is_checkpoint(path, self.foreign):
                    set_aside(self.storage, path)

    def _require_going_on(self) -> None:
        status = self.control.status.read()
        if status is not None and status.state == "halted":
            raise RunHalted(
                f"{self.directory} was halted at step {status.step}: {status.reason}. Look at it; if it may go on, run "
                f"`resume-adapters resume {self.directory}` and launch the same command again",
                path=self.directory,
                step=status.step,
            )

    def _choose(self) -> ResumeChoice:
        if self.resume == "scratch!":
            return ResumeChoice(None, ())
        if self.resume == "scratch":
            committed = max(self._committed().values(), key=len)
            if committed:
                raise CheckpointsExist(
                    f"{self.directory} holds {len(committed)} committed checkpoints, {committed[0]} the newest, and "
                    'resume="scratch" would train over them: use another directory, or resume="scratch!" to set them '
                    "aside first",
                    path=self.directory,
                )
            return ResumeChoice(None, ())
        choice = latest_valid(self.storage, self.ranks, self.sharing, self.directory, self.foreign)
        if choice.checkpoint is None and self.resume != "auto":
            choice = ResumeChoice(self._named(Path(self.resume)), ())
        run_on_all_ranks(self.ranks, lambda: self._require_own_files(choice.checkpoint), "find its own files")
        return choice

    def _named(self, path: Path) -> Checkpoint:
        found = run_on_all_ranks(
            self.ranks, lambda: open_checkpoint(self.storage, path, self.foreign), f"start from {path}"
        )
        if len({checkpoint.step for checkpoint in found}) > 1:
            steps = [checkpoint.step for checkpoint in found]
            raise StateMismatch(f"the ranks see different checkpoints at {path}: steps {steps}", path=path)
        return found[self.ranks.rank]

    def _require_own_files(self, checkpoint: Checkpoint | None) -> None:
        """Check that this rank finds what it saved, where the nodes have a part of the checkpoint each.

        Raises:
            StateMismatch: it was saved on another node, or by another number of ranks.
        """
        manifest = checkpoint.manifest if checkpoint else None
        if checkpoint is None or manifest is None or manifest.ranks is None:
            return
        if manifest.world_size != self.ranks.world_size or self.ranks.rank not in manifest.ranks:
            raise StateMismatch(
                f"{checkpoint.path} is a part of a checkpoint: it holds the files of the ranks "
                f"{', '.join(map(str, manifest.ranks))} of {manifest.world_size}, and this process is rank "
                f"{self.ranks.rank} of {self.ranks.world_size}. Launch as many processes as before, on the same nodes "
                "in the same order (torchrun: --node-rank), or start another run directory",
                path=checkpoint.path,
                step=checkpoint.step,
            )

    def _take_over(self) -> None:
        """Take the next generation: of several directories, one that is later than any of them has seen."""
        seen = self._on_leaders(self.control.fencing.generation, "read the generation")

        def take() -> tuple[int, RunStatus | None]:
            return self.control.fencing.take_over(max(seen.values())), self.control.status.read()

        self.generation, self.previous = self._on_leaders(take, "take the run directory over")[0]

    def _tidy(self, choice: ResumeChoice) -> ResumeChoice:
        """Set aside what was rejected, remove what crashed saves left, and say where the chosen checkpoint is now."""
        taken = choice.checkpoint.path if choice.checkpoint else None
        for each in choice.rejected:
            # Another node may see what this one does not, or has not committed, or has not moved aside.
            if root_paths(each.path) and each.path != taken and not is_pending(each.path):
                set_aside(self.storage, each.path)
        self.control.stop_file.withdraw()  # an earlier start was asked
        put_back = sweep(self.storage, self.directory)
        chosen = choice.checkpoint
        self.control.journal.append(
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
