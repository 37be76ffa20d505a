"""A block of training that is run again when it fails: the loop of its attempts."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import gc
import itertools
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from resume_adapters.core.devices import require_device
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks, current_ranks
from resume_adapters.core.recovery.attempt import (
    Attempt,
    LeftByPeer,
    RunningAttempt,
    reset_process,
    running_attempt,
    under_way,
)
from resume_adapters.core.recovery.groups import BlockGroups
from resume_adapters.core.recovery.hang import HangWatch, describe_threads
from resume_adapters.core.recovery.meeting import Meeting
from resume_adapters.core.recovery.memory import MemoryDirectory
from resume_adapters.core.recovery.options import BlockOptions, Hook, read_launch
from resume_adapters.core.recovery.plan import Failure, HeldCheckpoint, Level, Plan, Report, decide
from resume_adapters.core.recovery.updates import UpdateWatch
from resume_adapters.core.recovery.watch import LATER, PeerWatch, end_process_after, limited
from resume_adapters.core.run_directory.discovery import ranks_by_directory
from resume_adapters.core.state import rng
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.storage.groups import StorageGroup, shared_by_all, shared_by_some
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import PeerFailed, UnsupportedSetting

T = TypeVar("T")

_numbers = itertools.count()
"""The blocks of this process, which are alike on all ranks."""


class Block:
    """A block, from its first attempt to its end.

    Args:
        options: how it is run again.

    Raises:
        UnsupportedSetting: it is within another block; or the launch cannot be brought together after a failure.
        PeerFailed: the launcher's store cannot be reached; on several nodes, a rank does not come.
    """

    def __init__(self, options: BlockOptions) -> None:
        if running_attempt() is not None:
            raise UnsupportedSetting("a restartable block is within another one: leave one of the two out")
        self._options = options
        launch = read_launch(next(_numbers))
        self._meeting = Meeting(launch, options.meeting_timeout, grace=options.grace)
        self._launch = launch = dataclasses.replace(launch, start=self._meeting.start)
        self._groups = BlockGroups()
        if launch.world_size > 1:
            self._groups.use_store(functools.partial(self._meeting.groups_store, "0"))
        self._memory = MemoryDirectory(LocalStorage(), launch, self._meeting.token)
        self._memory_group: StorageGroup | None = None
        self._updates = UpdateWatch()
        self._failures: list[Failure] = []
        self._must_end = False
        self._flags: dict[Path, StopFlag] = {}
        self._random_state = rng.capture()

    def run(self, function: Callable[[Attempt], T]) -> T:
        """Call a function until it returns, and return what it does.

        Raises:
            Exception: its error, where the block is given up.
            PeerFailed: this process must end, for the launcher to start all again; if it does not, it is ended.
        """
        try:
            return self._attempts(function)
        finally:
            if self._must_end:
                end_process_after(self._options.grace)

    def _attempts(self, function: Callable[[Attempt], T]) -> T:
        attempt, held, began = Attempt(), dict[Path, HeldCheckpoint](), 0.0
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._groups.watched())
            self._updates.begin()
            stack.callback(self._updates.close)
            self._clear_memory()  # a start before this one may have been killed while it wrote there
            stack.callback(self._clear_memory)
            while True:
                running = self._begin(attempt, held, began)
                watch = self._watching(running)
                with under_way(running), contextlib.closing(watch), self._leaving(running):
                    result, error = self._try(function, running, watch)
                    if error is None:
                        return result  # type: ignore[return-value]  # without an error there is one
                    attempt, held = self._recover(running, error, watch)
                began = running.left
                del running, watch, error

    # ---- One attempt

    def _begin(self, attempt: Attempt, held: dict[Path, HeldCheckpoint], began: float) -> RunningAttempt:
        def announce() -> bool:
            try:
                return self._meeting.announce(f"{attempt.number}")
            except PeerFailed:  # the launcher is gone: this rank says so when it is to meet the others
                return True

        def cut() -> None:
            self._groups.cut()
            try:
                _call(self._options.abort, attempt)
            except Exception:  # of any kind: the ranks meet whatever a hook does
                logger.error("The hook abort has failed:\n%s", traceback.format_exc())

        return RunningAttempt(attempt, held, self._updates, announce, cut, self._clear_memory, began, flags=self._flags)

    def _watching(self, running: RunningAttempt) -> PeerWatch:
        topic, meeting, options = f"{running.attempt.number}", self._meeting, self._options

        def on_hang(found: Failure) -> None:
            self._log_stacks(found)  # before anything is cut
            running.fail_by_hang(found)

        hang = HangWatch(
            meeting, topic, running.pulse, threading.get_ident(), options.hang_after, self._groups.operations, on_hang
        )

        def is_announced() -> bool:
            return running.is_left or meeting.is_announced(topic)

        def leave() -> None:
            found = hang.found
            if found is not None and running.hang is None:
                self._log_stacks(found)
            running.leave()

        limit = options.grace + options.meeting_timeout
        return PeerWatch(is_announced, leave, self._groups.cut, self._abandon, limit, hang.look)

    def _log_stacks(self, hang: Failure) -> None:
        found, rank, stacks = _capitalised(hang.message), self._meeting.rank, describe_threads()
        logger.error("%s. The threads of rank %d are at:\n%s", found, rank, stacks)

    def _try(
        self, function: Callable[[Attempt], T], running: RunningAttempt, watch: PeerWatch
    ) -> tuple[T | None, BaseException | None]:
        """Return what a function returns, or the error with which this rank leaves the attempt."""
        self._updates.begin_holding()
        watch.start()
        try:
            with watch.leading_out(self._options.grace):
                _call(self._options.initialize, running.attempt)
                result = function(running.attempt)
                if self._meeting.finish(f"{running.attempt.number}"):
                    return result, None
                raise LeftByPeer
        except LeftByPeer as error:
            running.leave()
            return None, running.error or error
        except Exception as error:  # of any kind: the block is run again
            running.fail(error)
            return None, running.error

    # ---- After it

    def _limited(self, doing: str, more: float = 0.0) -> contextlib.AbstractContextManager[None]:
        return limited(doing, self._options.meeting_timeout + more, self._abandon)

    @contextlib.contextmanager
    def _leaving(self, running: RunningAttempt) -> Iterator[None]:
        """Leave no group that was cut, where the block ends with an error: the process could not end."""
        try:
            yield
        except BaseException:
            if running.is_left:
                self._close(running)
            raise

    def _close(self, running: RunningAttempt) -> None:
        with self._limited("close what it trained with"):
            running.close()
            self._groups.destroy()

    def _recover(
        self, running: RunningAttempt, error: BaseException, watch: PeerWatch
    ) -> tuple[Attempt, dict[Path, HeldCheckpoint]]:
        """Agree on how to go on; return the next attempt, and the checkpoints in memory that it goes on from.

        Raises:
            Exception: the error, where the block is given up.
            PeerFailed: not all ranks can go on in their processes.
        """
        number = running.attempt.number
        with self._ending():
            plan = self._agree(running, error)
        if plan.level is Level.GIVEN_UP:
            with self._limited("write that the run has failed"):
                leaving = self._given_up(running, plan, error)
            if plan.moment is not None or plan.kept:
                self._close(running)
                watch.close()
                self._save_last(running, plan)
            raise leaving
        self._close(running)
        traceback.clear_frames(error.__traceback__)
        watch.close()
        with self._ending():
            held = running.kept(plan.kept)
            if plan.level is Level.MEMORY and not held:
                plan, held = self._write_memory(running, plan)
            self._say(plan, number)
            self._flags = running.flags()
            running.release()
            attempt = Attempt(number + 1, plan.level, plan.failure, plan.reason)
            with self._limited("let go of what the attempt has left behind"):
                reset_process()
                _call(self._options.finalize, running.attempt)
                gc.collect()
            self._failures.append(plan.failure)
            self._require_health(attempt)
        self._groups.use_store(functools.partial(self._meeting.groups_store, f"{attempt.number}"))
        rng.restore(self._random_state)
        return attempt, held

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End this process soon, whatever it still waits for, where not all ranks can go on in theirs."""
        try:
            yield
        except PeerFailed:
            self._must_end = self._launch.world_size > 1
            raise

    def _agree(self, running: RunningAttempt, error: BaseException) -> Plan:
        failure = running.failure(error, self._meeting.rank) if running.is_origin else None

        def must_end() -> bool:
            return any(each.reason == signal.SIGTERM.name for each in running.flags().values())

        number = running.attempt.number
        with self._limited("meet the others", more=self._options.grace + LATER):
            report = running.report(failure, self._memory.has)
            reports = self._meeting.exchange(f"{number}/report", report, Report, must_end)
        return decide(reports, restarts=number, max_restarts=self._options.max_restarts, former=self._failures)

    def _given_up(self, running: RunningAttempt, plan: Plan, error: BaseException) -> BaseException:
        """Write that the run has failed, and return the error to raise."""
        if self._meeting.rank == 0 and self._options.max_restarts:
            logger.error("%s. It is not tried again: %s.", plan.failure, plan.reason)
        if running.training is not None:
            running.training.give_up(plan.failure)
        return error if running.is_origin else PeerFailed(f"{plan.failure}. {_capitalised(plan.reason)}")

    # ---- To memory

    def _write_memory(self, running: RunningAttempt, plan: Plan) -> tuple[Plan, dict[Path, HeldCheckpoint]]:
        """Write what the ranks hold as a checkpoint; where that fails on one of them, they resume from the disk."""
        training, number = running.training, running.attempt.number
        assert training is not None, "a training call holds the state"

        def write(ranks: Ranks) -> Path:
            group = self._sharing_memory(ranks)
            found = training.write(self._memory.of_attempt(number + 1), ranks, group, plan.moment, plan.source)
            group.close()
            return found

        path, problem = self._write_together(f"{number}/memory", write)
        if path is None:
            return replace(plan, level=Level.DISK, moment=None, reason=problem), {}
        if self._leads_memory:
            self._memory.clear(but=[path.parent])
        return plan, {training.directory: HeldCheckpoint(str(path), training.generation)}

    def _save_last(self, running: RunningAttempt, plan: Plan) -> None:
        """Commit the last step that all ranks hold, before the error leaves; where that fails, it is said."""
        training = running.training
        assert training is not None, "a training call holds the state"

        def write(ranks: Ranks) -> str:
            return training.save(ranks, plan.moment, plan.source)

        name, problem = self._write_together(f"{running.attempt.number}/last", write)
        if self._meeting.rank == 0 and name is not None:
            logger.info("%s has the last whole step: the same launch goes on from it.", name)
        elif self._meeting.rank == 0:
            logger.error("The last whole step could not be saved: %s.", problem)

    def _write_together(self, topic: str, write: Callable[[Ranks], T]) -> tuple[T | None, str]:
        """Return what all ranks have written, in groups that are made for it; or ``None``, and why one could not."""
        seconds, result = self._options.meeting_timeout, None
        timeout = datetime.timedelta(seconds=seconds)
        self._groups.use_store(functools.partial(self._meeting.groups_store, topic), timeout)
        cut, is_announced = self._groups.cut, functools.partial(self._meeting.is_announced, topic)
        watch = PeerWatch(is_announced, cut, cut, self._abandon, seconds)
        problem = ""
        with contextlib.closing(watch), self._limited("write its state"):
            watch.start()
            try:
                with self._groups.remade():
                    ranks = current_ranks()
                    result = write(ranks)
                    ranks.close()
            except (Exception, LeftByPeer) as error:  # of any kind: the others must learn of it
                self._meeting.announce(topic)
                cut()
                problem = f"its state could not be written: {type(error).__name__}: {error}"
        problems = self._meeting.exchange(f"{topic}/written", problem, str)
        found = next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each), None)
        return (result, "") if found is None else (None, found)

    def _sharing_memory(self, ranks: Ranks) -> StorageGroup:
        """Make the directory in memory, and return the ranks that see it where this one does. Every rank calls it."""
        self._memory.make()
        if self._launch.is_one_node:
            return shared_by_all(ranks)
        group = shared_by_some(ranks, ranks_by_directory(LocalStorage(), ranks, self._memory.path))
        self._memory_group = group
        return group

    @property
    def _leads_memory(self) -> bool:
        """Whether this rank is the first of those that see this node's memory."""
        return self._launch.local_rank == 0 if self._memory_group is None else self._memory_group.is_leader

    def _clear_memory(self) -> None:
        if self._leads_memory:
            self._memory.clear()

    def _say(self, plan: Plan, number: int) -> None:
        if self._meeting.rank != 0:
            return
        step = "the same step" if plan.moment is None else f"step {plan.moment.step}"
        how = f"from {step}, in memory" if plan.level is Level.MEMORY else f"from the disk: {plan.reason}"
        logger.warning(
            "%s. The block is run again (%d of %d), %s.", plan.failure, number + 1, self._options.max_restarts, how
        )

    def _require_health(self, attempt: Attempt) -> None:
        """Refuse to go on in this process where the device or the user's check says so, on any rank.

        Raises:
            PeerFailed: one cannot go on.
        """
        problem = ""
        with self._limited("pass its health check"):
            try:
                require_device(self._options.meeting_timeout / 2)
                _call(self._options.health_check, attempt)
            except Exception as error:  # of any kind: the others must learn of it
                problem = f"{type(error).__name__}: {error}"
        problems = self._meeting.exchange(f"{attempt.number}/health", problem, str)
        for rank, each in enumerate(problems):
            if each:
                raise PeerFailed(
                    f"rank {rank} cannot go on in its process: {each}. All processes end, and new ones resume from the "
                    "newest checkpoint, if a restart is left (--max-restarts of torchrun)"
                )

    def _abandon(self, doing: str, seconds: float) -> None:
        """End this process: its main thread waits for what nobody can interrupt, and the others do not wait for it."""
        logger.error(
            "rank %d did not %s within %g s after a failure. Its process ends, so that torchrun starts all again and "
            "they resume from the newest checkpoint (--max-restarts). Its threads were at:\n%s",
            self._meeting.rank,
            doing,
            seconds,
            describe_threads(),
        )
        os._exit(1)


def _call(hook: Hook | None, attempt: Attempt) -> None:
    if hook is not None:
        hook(attempt)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
