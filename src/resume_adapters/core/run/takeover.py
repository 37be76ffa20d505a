"""Start a run: take its directory over and choose the checkpoint to resume from, on all ranks together."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from resume_adapters.core.checkpoint.catalog import candidates
from resume_adapters.core.checkpoint.checkpoint import Checkpoint, RejectedCheckpoint, ResumeChoice
from resume_adapters.core.checkpoint.layout import CheckpointState, point_latest, state_of
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.remove import Fence, fenced_off, set_aside
from resume_adapters.core.checkpoint.resolve import latest_valid, no_valid, open_checkpoint
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import SINGLE_PROCESS, run_on_all_ranks
from resume_adapters.core.recovery.plan import HeldCheckpoint
from resume_adapters.core.run.context import RunContext
from resume_adapters.core.run_directory.discovery import discover_groups, read_identity, write_identity
from resume_adapters.core.run_directory.journal import SET_ASIDE
from resume_adapters.core.run_directory.launches import WastedLaunch, wasted_launches
from resume_adapters.core.run_directory.status import RunState, RunStatus, StatusPublisher, may_start
from resume_adapters.core.run_directory.upkeep import free_latest, is_checkpoint, prepare, sweep
from resume_adapters.core.storage.base import Stamp
from resume_adapters.core.storage.groups import shared_by_all
from resume_adapters.core.tiers.memory import MemoryTier
from resume_adapters.core.tiers.mirrors import LONGEST_COPY, group_ranks
from resume_adapters.core.tiers.resume import TierCandidates, bring_to_empty_nodes, identity_of
from resume_adapters.core.tiers.tier import Tier
from resume_adapters.errors import (
    CheckpointDamaged,
    CheckpointsExist,
    FormatTooNew,
    NoValidCheckpoint,
    ResumeError,
    RunDirectoryUnusable,
    RunHalted,
    StateMismatch,
    TierUnavailable,
)

T = TypeVar("T")

_SET_ASIDE = (CheckpointState.COMMITTED, CheckpointState.DAMAGED, CheckpointState.FOREIGN)
"""States in which a rejected checkpoint is set aside: it exists, and is not the leftover of a crashed save."""


class Takeover:
    """One start of a run directory.

    Args:
        context: what the parts of the run have in common.
        publisher: writes the status.
        attempt_checkpoint: the one from which a restartable block goes on; ``None``: the run directory says which.
        withdraws_stop: a stop file is one of an earlier start; else it may have been written for this block since.

    Attributes:
        attempt_checkpoint: see above; ``None`` where it cannot be used.
        storage_group: the ranks that share the run directory.
        generation: number of this start of the run directory, once it is taken over.
        previous: the status that the previous start left.
        wasted: the launches before this one that made no progress; alike on all ranks.
    """

    def __init__(
        self,
        context: RunContext,
        publisher: StatusPublisher,
        attempt_checkpoint: HeldCheckpoint | None = None,
        *,
        withdraws_stop: bool = True,
    ) -> None:
        self.context = context
        self.publisher = publisher
        self.storage = context.storage
        self.ranks = context.ranks
        self.directory = context.directory
        self.control = context.control
        self.catalog = context.catalog
        self.placeholder = context.placeholder
        self.mirrors = context.mirrors
        self.memory_tier = context.memory
        self.resume = context.options.resume
        self.foreign = context.options.foreign
        self.attempt_checkpoint = attempt_checkpoint
        self.withdraws_stop = withdraws_stop
        self.storage_group = shared_by_all(self.ranks)
        self.generation = 0
        self.previous: RunStatus | None = None
        self.wasted: tuple[WastedLaunch, ...] = ()
        self._moved: list[str] = []
        self._require_usable: Callable[[Checkpoint], object] = bool

    def choose(self, require_usable: Callable[[Checkpoint], object]) -> ResumeChoice:
        """Take the directory over, and return the checkpoint to resume from; see :meth:`ResumableRun.open`."""
        self._require_usable = require_usable
        is_node_local = self.context.options.is_node_local
        self.storage_group = discover_groups(self.storage, self.ranks, self.directory, is_node_local=is_node_local)
        self.mirrors.connect(self.ranks, self.storage_group, self.control.fencing.token)
        self._on_leaders(self._prepare, "use the run directory")
        if self.memory_tier is not None:
            self._open_memory(self.memory_tier)
        self._require_current()
        before = self._committed()
        choice, failure = ResumeChoice(None, ()), None
        try:
            choice = self._choose()
        except NoValidCheckpoint as error:
            if self._committed() != before:
                choice = self._choose()  # an earlier start pruned the checkpoint that was being checked
            elif self._tiers or self.storage_group.shares:
                failure = error
            else:
                raise
        self._take_over()
        if self._committed() != before:
            # An earlier start committed or pruned meanwhile. From now on it can do neither.
            choice, failure = self._choose(), None
        if failure is not None and self.storage_group.shares:
            choice, failure = self._from_another_node(failure)
        if self._tiers and self.attempt_checkpoint is None:
            choice = self._newest_of_all(choice, failure)
        elif failure is not None:
            raise failure
        tidied = self._on_leaders(lambda: self._tidy(choice), "tidy the run directory")
        _, self.wasted = tidied[0]
        # What is in memory is not moved, and each node has it in its own.
        return tidied[self.storage_group.leader][0] if self.attempt_checkpoint is None else choice

    def _require_current(self) -> None:
        """Use nothing in memory that is older than what another start has made of the run directory since."""
        if self.attempt_checkpoint is None:
            return
        found = self._on_leaders(self.control.fencing.generation, "read the generation")
        problem = ""
        if any(each != self.attempt_checkpoint.generation for each in found.values()):
            problem = f"another start has taken {self.directory} over"
        else:
            try:
                self._named(Path(self.attempt_checkpoint.path))
            except ResumeError as error:
                problem = error.message
        if problem:
            if self.ranks.rank == 0:
                logger.warning("What is held in memory is not used: %s.", problem)
            self.attempt_checkpoint = None

    @property
    def _tiers(self) -> list[Tier]:
        """What holds copies: the memory of this node, where it is asked first, and the mirrors."""
        return [*([] if self.memory_tier is None else [self.memory_tier]), *self.mirrors.tiers]

    def _open_memory(self, memory: MemoryTier) -> None:
        """Find what earlier starts of this run have left in memory; a node that is new gets the run's identity."""
        found = self._on_leaders(lambda: read_identity(self.storage, self.directory), "read the identity")
        identity = next(filter(None, found.values()), None) or self.ranks.gather(uuid.uuid4().hex[:16])[0]
        self._on_leaders(lambda: write_identity(self.storage, self.directory, identity), "write the identity")
        memory.connect(self.ranks, self.storage_group, identity)

    def _on_leaders(self, work: Callable[[], T], doing: str) -> dict[int, T]:
        """Run ``work`` on the leaders of all run directories; return their results by rank, on every rank."""

        def unusable(cause: Exception) -> ResumeError:
            if self.generation and (later := fenced_off(self._fence)) is not None:
                return later
            return RunDirectoryUnusable(
                f"could not {doing}: {cause}. Nothing committed is lost: fix permissions or free space, then launch "
                "the same command again",
                path=self.directory,
            )

        results = run_on_all_ranks(
            self.ranks, lambda: [work()] if self.storage_group.is_leader else [], doing, unusable
        )
        return {rank: result[0] for rank, result in enumerate(results) if result}

    def _fence(self) -> None:
        self.control.fencing.require_owned(self.generation)

    def _committed(self) -> dict[int, dict[str, Stamp]]:
        """Return the committed checkpoints of each run directory; one that was saved again has another stamp."""
        return self._on_leaders(self.catalog.committed, "list the run directory")

    def _prepare(self) -> None:
        self.placeholder.place(self.foreign, is_scratch=self.resume == "scratch!")
        prepare(self.storage, self.directory)
        self._require_startable()
        fence = self.control.fencing.no_start_from_now()
        copy = free_latest(self.storage, self.directory, fence)
        if copy is not None:
            logger.warning(copy)
        if self.resume == "scratch!":
            for path in candidates(self.storage, self.directory):
                if is_checkpoint(self.storage, path, self.foreign) and not self.placeholder.is_at(path):
                    self._set_aside(path, fence)

    def _set_aside(self, path: Path, fence: Fence) -> None:
        set_aside(self.storage, path, fence)
        self._moved.append(path.name)

    def _require_startable(self) -> None:
        status = self.control.status.read()
        if status is not None and not may_start(status.state):
            raise RunHalted(
                f"{self.directory} was halted at step {status.step}: {status.reason}. To continue it, run "
                f"`resume-adapters stop --undo {self.directory}` and launch the same command again",
                path=self.directory,
                step=status.step,
            )

    def _choose(self, proved: tuple[str, Manifest] | None = None) -> ResumeChoice:
        """Return the newest checkpoint of the run directory that is valid; for ``proved`` see :func:`latest_valid`."""
        if self.attempt_checkpoint is not None:
            return ResumeChoice(self._named(Path(self.attempt_checkpoint.path)), ())
        if self.resume == "scratch!":
            return ResumeChoice(None, ())
        if self.resume == "scratch":
            committed = max(map(list, self._committed().values()), key=len)
            if committed:
                raise CheckpointsExist(
                    f"{self.directory} holds {len(committed)} committed checkpoints, {committed[0]} the newest, and "
                    'resume="scratch" would train over them: use another directory, or resume="scratch!" to set them '
                    "aside first",
                    path=self.directory,
                )
            return ResumeChoice(None, ())
        histories = self._on_leaders(self.control.journal.committed, "read the journal")
        choice = latest_valid(
            self.catalog,
            self.ranks,
            self.storage_group,
            self.foreign,
            histories[self.storage_group.leader],
            self._require_usable,
            proved,
        )
        if choice.checkpoint is None and self.resume != "auto" and not self._is_own_pending():
            choice = ResumeChoice(self._named(Path(self.resume)), ())
        run_on_all_ranks(self.ranks, lambda: self._require_own_files(choice.checkpoint), "find its own files")
        return choice

    def _from_another_node(self, failure: NoValidCheckpoint) -> tuple[ResumeChoice, NoValidCheckpoint | None]:
        """Bring what the other nodes have to those that were replaced, and choose again."""
        everyone, group = self.ranks.new_channel(LONGEST_COPY), self.storage_group
        fetch = self.context.fetch(SINGLE_PROCESS, shared_by_all(SINGLE_PROCESS), self._fence)

        def bring() -> bool:
            return group.is_leader and bring_to_empty_nodes(self.catalog, group.leaders, fetch)

        found = run_on_all_ranks(everyone, bring, "bring a checkpoint from another node")
        everyone.close()
        if not any(found):
            return ResumeChoice(None, ()), failure
        try:
            return self._choose(), None
        except NoValidCheckpoint as error:
            return ResumeChoice(None, ()), error

    def _newest_of_all(self, choice: ResumeChoice, failure: NoValidCheckpoint | None) -> ResumeChoice:
        """Fetch what is newer on a tier than the choice, and choose again.

        Args:
            choice: what the run directory has.
            failure: why nothing in the run directory can be used, if that is so.
        """
        self._on_leaders(self._set_aside_on_tiers, "set aside the copies")
        if self.resume == "scratch!":
            return choice
        candidates = TierCandidates(self._tiers, self.catalog, self.ranks, self.storage_group, self._on_leaders)
        found = candidates.find(has_local=choice.checkpoint is not None)
        if self.resume == "scratch":
            if found:
                raise CheckpointsExist(
                    f"the mirror holds {len(found)} committed checkpoints, {found[0].name} the newest, and "
                    'resume="scratch" would train over them: use another URL, or resume="scratch!" to set them aside',
                    path=self.directory,
                )
            return choice
        everyone, channel = self.ranks.new_channel(LONGEST_COPY), group_ranks(self.ranks, self.storage_group)
        fetch = self.context.fetch(channel, self.storage_group, self._fence)
        rejected = list[RejectedCheckpoint]()
        unavailable: TierUnavailable | None = None
        for identity in found:
            mine = identity_of(choice.checkpoint, self.directory)
            if mine is not None and identity <= mine:
                break
            error = candidates.bring(identity, fetch, everyone)
            if error is not None:
                logger.warning("%s of the mirror is not used: %s", identity.name, error.message)
                rejected.append(RejectedCheckpoint(self.directory / identity.name, error.message))
                unavailable = error if isinstance(error, TierUnavailable) else unavailable
                continue
            try:
                choice, failure = self._choose(candidates.fetched), None
            except NoValidCheckpoint as none_valid:
                failure = none_valid
        channel.barrier()  # a rank may still be connecting to the one that has nothing to fetch
        for each in (channel, everyone):
            each.close()
        if choice.checkpoint is None and unavailable is not None:
            raise unavailable
        if failure is not None:
            raise failure
        if choice.checkpoint is None and rejected:
            raise no_valid(self.directory, rejected)
        return choice

    def _set_aside_on_tiers(self) -> None:
        """Set aside on the tiers what was set aside in the run directory, or a resume would fetch it."""
        if self.resume == "scratch!":
            self._set_aside_after(-1, self.generation)
        step, before, done = None, self.generation, set[str]()
        for entry in self.control.journal.history():
            if entry["event"] == "rewind" and entry.get("step") is not None:
                step, before, done = int(entry["step"]), self.generation, set()
            elif entry["event"] == "start":
                # It may not have used a tier. What it has saved since is not set aside.
                before = min(before, entry.get("generation", before))
            elif entry["event"] == SET_ASIDE:
                done.update(entry.get("tiers", ()))
        if step is not None:
            self._set_aside_after(step, before, done)

    def _set_aside_after(self, step: int, before: int, done: Collection[str] = ()) -> None:
        """Set aside on the tiers what starts before a generation have saved after a step, but where that is done."""
        # The memory last: what is set aside there is gone, and a mirror may not answer.
        lacking = [tier for tier in reversed(self._tiers) if tier.label not in done]
        for tier in lacking:
            tier.set_aside(step, before)
        if lacking:
            self.control.journal.append(SET_ASIDE, step=step, tiers=[tier.label for tier in lacking])

    def _is_own_pending(self) -> bool:
        """Return whether the given path is a checkpoint that this run has begun and not committed.

        A script has found it by its name. Nothing is committed, so the run starts from zero.
        """
        path = Path(self.resume)

        def is_pending() -> bool:
            is_here = self.storage.real_path(path).parent == self.storage.real_path(self.directory)
            return is_here and state_of(self.storage, path) is CheckpointState.PENDING

        return any(self._on_leaders(is_pending, f"look at {path}").values())

    def _named(self, path: Path) -> Checkpoint:
        found = run_on_all_ranks(
            self.ranks, lambda: open_checkpoint(self.storage, path, self.foreign), f"start from {path}"
        )
        if len({checkpoint.step for checkpoint in found}) > 1:
            steps = [checkpoint.step for checkpoint in found]
            raise StateMismatch(f"the ranks see different checkpoints at {path}: steps {steps}", path=path)
        return found[self.ranks.rank]

    def _there(self) -> set[str | int]:
        """Return the names of the checkpoints that still exist, and the steps of those that are committed."""
        found: set[str | int] = {path.name for path in candidates(self.storage, self.directory)}
        for name in self.catalog.committed():
            with contextlib.suppress(CheckpointDamaged, FormatTooNew):
                found.add(self.catalog.summary(self.directory / name).step)
        return found

    def _require_own_files(self, checkpoint: Checkpoint | None) -> None:
        """Check that this rank finds its own files, where each node has only a part of the checkpoint.

        Raises:
            StateMismatch: this rank was on another node, or the number of ranks has changed.
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
        """Take the next generation, later than that of any of the run's directories."""
        seen = self._on_leaders(self.control.fencing.generation, "read the generation")

        claimed = self._on_leaders(lambda: self.mirrors.claim(max(seen.values())), "claim the mirror")

        def take() -> tuple[int, RunStatus | None]:
            generation = self.control.fencing.take_over(max(claimed.values()) - 1)
            # Now, since what follows may take long: a request from here on means this start.
            if self.withdraws_stop:
                self.control.stop_file.withdraw()
            return generation, self.publisher.announce(generation, self.context.clock())

        self.generation, self.previous = self._on_leaders(take, "take the run directory over")[0]

    def _tidy(self, choice: ResumeChoice) -> tuple[ResumeChoice, tuple[WastedLaunch, ...]]:
        """Set aside rejected checkpoints, clean up after crashes, and add this start to the journal.

        Returns:
            The choice with its present path, and the launches before this one that made no progress.
        """
        chosen = choice.checkpoint
        step = chosen.step if chosen else 0
        for each in choice.rejected:
            # Of what one node rejects, another may have nothing, or something pending, or the chosen one.
            is_chosen = chosen is not None and each.path == chosen.path
            if state_of(self.storage, each.path) in _SET_ASIDE and not is_chosen:
                self._set_aside(each.path, self._fence)
        self._fence()
        restored = sweep(self.catalog, self.control, self._fence, self.placeholder.is_at)
        self._fence()
        wasted = wasted_launches(self.control.journal.history(), resumes_from=step)
        self.control.journal.trim(self._there)
        self.control.journal.append(
            "start",
            generation=self.generation,
            step=step,
            former=_last_seen(self.previous),
            rejected=[f"{each.path.name}: {each.reason}" for each in choice.rejected],
            memory=None if self.memory_tier is None else self.memory_tier.had_checkpoints,
            set_aside=[name for name in self._moved if self.directory / name not in restored.values()],
        )
        if chosen is None:
            return choice, wasted
        path = restored.get(chosen.path, chosen.path)
        if path.parent == self.directory and chosen.manifest is not None:
            # A crash may have left `latest` behind the last commit, or at a checkpoint that was set aside.
            point_latest(self.storage, self.directory, path.name, self.context.options.latest)
        return replace(choice, checkpoint=replace(chosen, path=path)), wasted


def _last_seen(status: RunStatus | None) -> dict[str, Any] | None:
    """Return how far a launch had come that did not live to say how it ended; ``None`` where it did."""
    if status is None or status.state is not RunState.RUNNING:
        return None
    return {"generation": status.generation, "step": status.step, "updated": status.updated}
