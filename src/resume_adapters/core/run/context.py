"""What the parts of one start of a run have in common: made once, and handed on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import Pointer
from resume_adapters.core.checkpoint.remove import Fence
from resume_adapters.core.checkpoint.retention import KeepAll, Policy
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.checkpoint.validity import ForeignDetector, NoForeign
from resume_adapters.core.choices import OnSaveError
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.recovery.attempt import running_attempt
from resume_adapters.core.requirements import require_type
from resume_adapters.core.run.monitor import THREAD_NAME
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.upkeep import Placeholder
from resume_adapters.core.saving.cadence import Cadence
from resume_adapters.core.saving.staging import StagingOptions
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all
from resume_adapters.core.tiers.memory import MemoryTier
from resume_adapters.core.tiers.mirrors import MIRROR_THREAD, Mirrors
from resume_adapters.core.tiers.options import Memory, Mirror, Remote
from resume_adapters.core.tiers.tier import Fetch
from resume_adapters.core.trace.log import open_trace
from resume_adapters.errors import UnsupportedSetting

_PERIOD = 60.0
"""Least seconds between two messages of saves."""

_LONG = 1.0
"""Seconds of a wait that is worth a message."""


class RunMessages:
    """Says each thing once, on the rank that speaks for all.

    Args:
        speaks: this is that rank.
        clock: returns seconds, from any start.
    """

    def __init__(self, *, speaks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._speaks = speaks
        self._clock = clock
        self._stopping = threading.Lock()
        self._said: float | None = None
        self._unsaid = 0

    def committed(self, name: str, place: str) -> None:
        """Log that a checkpoint is committed; at most once a minute. Called on the thread that commits.

        Args:
            place: where in the data it is, in words.
        """
        if not self._speaks:
            return
        now = self._clock()
        if self._said is not None and now - self._said < _PERIOD:
            self._unsaid += 1
            return
        since = f" ({self._unsaid} more since the last such line)" if self._unsaid else ""
        self._said, self._unsaid = now, 0
        logger.info("%s saved at %s%s.", name, place or "its step", since)

    def staging(self, decision: str) -> None:
        """Log that saves are not copied in memory, as the user has asked, and why."""
        if self._speaks:
            logger.warning('stage="memory" is %s.', decision)

    def waited(self, seconds: float) -> None:
        """Log how long a save has waited for the commit before it, where that is long."""
        if self._speaks and seconds >= _LONG:
            logger.info("waited %.1f s for the commit of the save before this one.", seconds)

    def stopping(self, reason: str) -> None:
        """Log that the run will save and leave. Called on any thread, as soon as this rank knows."""
        if self._speaks and self._stopping.acquire(blocking=False):
            logger.info("%s: saving at the end of this step ...", reason)

    def stopped(self, step: int, checkpoint: str | None) -> None:
        """Log where the run has stopped.

        Args:
            checkpoint: the newest one, from which the next launch resumes; ``None`` where there is none.
        """
        if not self._speaks:
            return
        if checkpoint is None:
            logger.info("stopped at step %d, before anything was saved; the same command starts again", step)
        else:
            logger.info("stopped at step %d (%s); the same command resumes", step, checkpoint)

    def halted(self, step: int, reason: str, release: str) -> None:
        """Log where the run was halted, and what lets it continue.

        Args:
            reason: what a human should look at.
            release: the command that lets the run start again.
        """
        if self._speaks:
            logger.warning("halted at step %d: %s. To continue it, run `%s`", step, reason, release)


@dataclass(frozen=True)
class RunOptions:
    """What the user has set of a run, and what the framework determines.

    Attributes:
        framework: framework and version, for the manifests.
        resume: ``"auto"``, ``"scratch"``, ``"scratch!"`` or a path.
        keep: the retention policy.
        stop: what asks the run to stop.
        cadence: when to save; ``None`` where the framework decides that.
        on_save_error: ``"stop"``: a save that fails ends the run; ``"continue"``: training goes on, and the next save
            tries again.
        staging: how saves leave the training thread; by default they do not.
        foreign: recognises checkpoints that the bare framework wrote; none by default.
        latest: how ``latest`` names the newest checkpoint, so that the bare framework understands it.
        placeholder: name of an empty checkpoint that stands in the run directory until one is committed; ``None`` where
            the framework's scripts need none.
        is_node_local: the framework was told that each node has a run directory of its own: it writes there what the
            ranks of that node read. Else each of such directories gets the files of all ranks.
        mirror: where committed checkpoints are copied to, beyond the run directory.
        weights: where the framework's checkpoints hold the weights; ``None`` where these cannot be kept alone.

    Raises:
        TypeError: ``keep`` or ``stop`` is of another class.
        UnsupportedSetting: ``keep`` asks for weights alone, and these cannot be.
    """

    framework: str = ""
    resume: str | os.PathLike[str] = "auto"
    keep: Policy = KeepAll()  # noqa: RUF009  # it cannot be changed
    stop: StopOn = StopOn()  # noqa: RUF009
    cadence: Cadence | None = None
    on_save_error: OnSaveError = "stop"
    staging: StagingOptions = StagingOptions()  # noqa: RUF009
    foreign: ForeignDetector = NoForeign()  # noqa: RUF009
    latest: Pointer = "link"
    placeholder: str | None = None
    is_node_local: bool = False
    mirror: Sequence[Mirror] = ()
    weights: WeightsFiles | None = None

    def __post_init__(self) -> None:
        require_type("keep", self.keep, Policy, "KeepLast(3)")
        if self.keep.of_weights is not None and self.weights is None:
            raise UnsupportedSetting(
                f"KeepWeights: {self.framework} spreads its state over files of which the weights alone are of no use. "
                f"Keep these checkpoints whole, with {self.keep.of_weights}; `resume-adapters export` writes the "
                "weights of one to a file"
            )
        require_type("stop", self.stop, StopOn, "StopOn(exit_code=85)")

    @property
    def memory(self) -> Memory | None:
        """What was set of the copies in memory; ``None``: there are none."""
        return next((each for each in self.mirror if isinstance(each, Memory)), None)


class RunContext:
    """What the parts of one start of a run have in common, and whether a later start has taken that from it.

    Args:
        run_directory: the run directory.
        options: what was set; within a restartable block, that decides from what the run resumes.
        ranks: the ranks of the run.
        files: the file operations.
        clock: returns seconds since 1970.

    Attributes:
        directory: the run directory, absolute.
        options: what was set.
        ranks: the ranks of the run.
        storage: the file operations; they are counted while the run is watched.
        clock: returns seconds since 1970.
        trace: what is written of the run while it is watched; ``None``: it is not.
        messages: what the run says.
        flag: this rank's stop flag.
        control: the ``.resume`` directory.
        catalog: remembers the checkpoints of the run directory.
        placeholder: stands there until a checkpoint is committed.
        mirrors: the tiers that hold copies of the run's checkpoints.
        memory: the memory of this rank's node; ``None``: nothing is kept there.
        storage_group: the ranks that share the run directory, as far as that is known before it is opened.
        generation: the number of this start of the run directory; 0 before it is opened.
    """

    def __init__(
        self,
        run_directory: str | os.PathLike[str],
        options: RunOptions,
        ranks: Ranks,
        files: Storage,
        clock: Callable[[], float],
    ) -> None:
        attempt = running_attempt()
        if attempt is not None:
            options = replace(options, resume=attempt.resume_option(options.resume))
        self.directory = directory = Path(os.path.abspath(run_directory))
        self.options = options
        self.ranks = ranks
        self.clock = clock
        self.trace = open_trace(os.environ, ranks.rank, clock=clock, uncounted=(THREAD_NAME, MIRROR_THREAD))
        self.storage = storage = files if self.trace is None else self.trace.counting(files)
        self.messages = RunMessages(speaks=ranks.rank == 0)
        self.flag = StopFlag(options.stop)
        self.control = ControlDirectory(storage, directory, clock)
        self.catalog = Catalog(storage, directory)
        self.placeholder = Placeholder(storage, directory, options.placeholder)
        stores, memory = [each for each in options.mirror if isinstance(each, Remote)], options.memory
        self.mirrors = Mirrors(stores, files, directory, self.control.journal, self.flag.request, clock)
        self.memory = (
            None if memory is None else MemoryTier(memory, files, os.geteuid(), self.require_owned_on_node, clock)
        )
        self.storage_group = shared_by_all(ranks)
        self.generation = 0

    def own(self, storage_group: StorageGroup, generation: int) -> None:
        """Own the run directory, which has been taken over and opened."""
        self.storage_group, self.generation = storage_group, generation

    def pending(self, path: Path, step: int, ranks: Ranks, group: StorageGroup, *, is_file: bool) -> PendingCheckpoint:
        """Return a checkpoint that is to be written into the run directory; see there."""
        return PendingCheckpoint(
            self.storage, ranks, path, step, self.require_owned, is_file=is_file, storage_group=group
        )

    def fetch(self, ranks: Ranks, group: StorageGroup, fence: Fence) -> Fetch:
        """Return what copies checkpoints into the run directory; see there."""
        return Fetch(self.storage, ranks, group, self.directory, fence, self.control.journal, self.options.latest)

    def require_owned(self) -> None:
        """Check on a rank that leads the run directory that no later start has taken it over, nor a tier.

        Raises:
            FencedOff: a later start has.
        """
        self.control.fencing.require_owned(self.generation)
        self.mirrors.require_owned()

    def require_owned_on_node(self) -> None:
        """Check it on a rank that leads a node, and perhaps not the run directory.

        Raises:
            FencedOff: a later start has taken it over.
        """
        if self.storage_group.is_leader or not self.generation:
            self.require_owned()
        else:
            self.control.fencing.require_latest(self.generation)
