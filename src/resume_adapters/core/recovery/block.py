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
from typing import Any, TypeVar

from msgspec.structs import replace

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
from resume_adapters.core.recovery.hang import HangWatch
from resume_adapters.core.recovery.meeting import Meeting, SoloMeeting, StoreMeeting
from resume_adapters.core.recovery.memory import Handover, HeldCheckpoint, MemoryDirectory
from resume_adapters.core.recovery.older_objects import OlderObjects
from resume_adapters.core.recovery.options import BlockOptions, Hook, read_launch
from resume_adapters.core.recovery.own_state import StepPlace
from resume_adapters.core.recovery.plan import Failure, Level, Plan, Report, decide
from resume_adapters.core.recovery.stacks import describe_threads
from resume_adapters.core.recovery.stand_in import assigned, start_stand_in
from resume_adapters.core.recovery.starts import agreed_start
from resume_adapters.core.recovery.supervisor import supervised
from resume_adapters.core.recovery.termination import Termination
from resume_adapters.core.recovery.updates import UpdateWatch
from resume_adapters.core.recovery.watch import PeerWatch
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
    """

    def __init__(self, options: BlockOptions) -> None:
        if running_attempt() is not None:
            raise UnsupportedSetting("a restartable block is within another one: leave one of the two out")
        self._options = options
        self._launch, self._process = supervised(read_launch(next(_numbers)), options.max_restarts)
        if not self._launch.is_one_node:
            self._launch = dataclasses.replace(self._launch, start=agreed_start(self._launch))
        self._meeting: Meeting = (
            SoloMeeting()
            if self._launch.world_size == 1
            else StoreMeeting(self._launch, options.meeting_timeout, grace=options.grace)
        )
        self._groups = BlockGroups()
        if self._launch.world_size > 1:
            self._groups.use_store(functools.partial(self._meeting.groups_store, "0"))
        self._memory = MemoryDirectory(LocalStorage(), self._launch, self._meeting.token)
        self._termination = Termination()
        self._memory_group: StorageGroup | None = None
        self._lost: list[int] = []
        self._is_replaced = False
        self._updates = UpdateWatch()
        self._failures: list[Failure] = []
        self._flags: dict[Path, StopFlag] = {}
        self._random_state = rng.capture()
        self._older = OlderObjects()

    def run(self, function: Callable[[Attempt], T]) -> T:
        """Call a function until it returns, and return what it does.

        Raises:
            Exception: its error, where the block is given up.
        """
        attempt, held, began = self._first()
        with contextlib.ExitStack() as stack:
            stack.callback(self._termination.release)
            stack.enter_context(self._groups.watched())
            self._updates.begin()
            stack.callback(self._updates.close)
            stack.callback(self._clear_memory)
            stack.callback(self._show_older)
            stack.enter_context(self._ending())
            self._older.hide()
            while True:
                running = self._begin(attempt, held, began)
                watch = self._watching(running)
                with under_way(running), contextlib.closing(watch), self._leaving(running, watch):
                    result, error = self._try(function, running, watch)
                    if error is None:
                        return result  # type: ignore[return-value]  # without an error there is one
                    attempt, held = self._recover(running, error, watch)
                began = running.left
                del running, watch, error
                self._carry_termination()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Tell the supervisor of this process, at the end of the block, whether another one is to go on."""
        try:
            yield
        except PeerFailed:
            self._process.replace()
            raise
        finally:
            self._process.end()

    # ---- One attempt

    def _first(self) -> tuple[Attempt, dict[Path, HeldCheckpoint], float]:
        """Return the first attempt of this process, the checkpoints that it goes on from, and when the last failed."""
        found = self._memory.handed_over()
        if found is None:
            return Attempt(), {}, 0.0
        held = {Path(directory): each for directory, each in found.held.items()}
        return Attempt(0, found.level, found.failure, found.reason), held, found.began

    def _begin(self, attempt: Attempt, held: dict[Path, HeldCheckpoint], began: float) -> RunningAttempt:
        self._process.begin_attempt(attempt.number)

        def cut() -> None:
            self._termination.defer()
            self._groups.cut()
            try:
                _call(self._options.abort, attempt)
            except Exception:  # of any kind: the ranks meet whatever a hook does
                logger.error("The hook abort has failed:\n%s", traceback.format_exc())

        def forget() -> None:
            if self._leads_memory:
                self._memory.forget(attempt.number)

        announce = functools.partial(self._meeting.announce, f"{attempt.number}")
        own_states = self._memory.own_states(attempt.number) if self._launch.can_replace_processes else None
        return RunningAttempt(
            attempt,
            held,
            self._updates,
            announce,
            cut,
            forget,
            began,
            own_states,
            resumed=self._resumed_from_memory,
            added=self._termination.arm,
            stepped=self._process.say_imports,
            flags=self._flags,
        )

    def _resumed_from_memory(self, held: dict[Path, HeldCheckpoint]) -> None:
        """Let the processes of the next start find under which generation it was resumed from what is in memory."""
        found = self._memory.handed_over()
        if found is not None and self._meeting.rank == 0:
            self._memory.hand_over(replace(found, held={str(path): each for path, each in held.items()}))

    def _watching(self, running: RunningAttempt) -> PeerWatch:
        topic, meeting = f"{running.attempt.number}", self._meeting

        def on_hang(found: Failure) -> None:
            self._keep_stacks(running, found.message)  # before anything is cut
            running.fail_by_hang(found)

        hang = HangWatch(
            meeting,
            topic,
            running.pulse,
            threading.get_ident(),
            self._options.hang_after,
            self._groups.operations,
            on_hang,
        )

        def leave() -> None:
            found = hang.found
            if found and running.hang is None:
                self._keep_stacks(running, found)
            running.leave()

        is_announced = functools.partial(meeting.is_announced, topic)
        return PeerWatch(is_announced, leave, self._groups.cut, self._abandon, hang.look)

    def _keep_stacks(self, running: RunningAttempt, hang: str) -> None:
        stacks = describe_threads()
        logger.error("%s. The threads of rank %d are at:\n%s", _capitalised(hang), self._meeting.rank, stacks)
        if running.training is not None:
            # On a thread of its own: it may be the disk that hangs.
            threading.Thread(target=running.training.keep_stacks, args=(stacks,), daemon=True).start()

    def _try(
        self, function: Callable[[Attempt], T], running: RunningAttempt, watch: PeerWatch
    ) -> tuple[T | None, BaseException | None]:
        """Return what a function returns, or the error with which this rank leaves the attempt."""
        options = self._options
        self._updates.begin_holding()
        watch.start()
        try:
            with watch.leading_out(options.grace, options.meeting_timeout):
                _call(options.initialize, running.attempt)
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

    @contextlib.contextmanager
    def _leaving(self, running: RunningAttempt, watch: PeerWatch) -> Iterator[None]:
        """Leave no group that was cut, where the block ends with an error: the process could not end."""
        try:
            yield
        except BaseException:
            if running.is_left:
                self._close(running, watch)
            raise

    def _close(self, running: RunningAttempt, watch: PeerWatch) -> None:
        with watch.limited("close what it trained with", self._options.meeting_timeout):
            running.close()
            self._groups.destroy()

    def _recover(
        self, running: RunningAttempt, error: BaseException, watch: PeerWatch
    ) -> tuple[Attempt, dict[Path, HeldCheckpoint]]:
        """Agree on how to go on; return the next attempt, and the checkpoints in memory that it goes on from.

        Raises:
            Exception: the error, where the block is given up.
            PeerFailed: a process has died, and this one ends, so that new ones go on.
        """
        number = running.attempt.number
        self._termination.begin_agreeing()
        plan = self._agree(running, error)
        if plan.level is Level.GIVEN_UP:
            with watch.limited("write that the run has failed", self._options.meeting_timeout):
                raise self._given_up(running, plan, error)
        self._close(running, watch)
        traceback.clear_frames(error.__traceback__)
        watch.close()
        if self._lost:
            raise self._replaced(running, plan)
        held: dict[Path, HeldCheckpoint] = {}
        if plan.level is Level.MEMORY:
            plan, held = self._write_memory(running, plan)
        if plan.level is Level.DISK:
            plan, held = self._keep_memory(running, plan)
        self._say(plan, number)
        self._flags = running.flags()
        running.release()
        self._reset(running.attempt)
        self._failures.append(plan.failure)
        attempt = Attempt(number + 1, plan.level, plan.failure, plan.reason)
        self._require_health(attempt)
        self._groups.use_store(functools.partial(self._meeting.groups_store, f"{attempt.number}"))
        rng.restore(self._random_state)
        return attempt, held

    def _agree(self, running: RunningAttempt, error: BaseException) -> Plan:
        failure = running.failure(error, self._meeting.rank) if running.is_origin else None
        number = running.attempt.number

        def is_to_end() -> bool:
            by_signal = any(each.reason == signal.SIGTERM.name for each in running.flags().values())
            return by_signal or self._termination.has_come

        said = self._meeting.reports(f"{number}/report", running.report(failure), Report, is_to_end)
        left = next(each for each in said if each is not None)
        self._lost = [rank for rank, each in enumerate(said) if each is None]
        return decide(
            [running.report_of(rank, left) if each is None else each for rank, each in enumerate(said)],
            restarts=self._process.restarts + number,
            max_restarts=self._options.max_restarts,
            former=self._failures,
            is_one_node=self._launch.is_one_node,
            lost=self._lost,
            restarts_left=self._launch.restarts_left - min(number, self._process.restarts_left),
        )

    @property
    def _leads(self) -> bool:
        """Whether this rank is the first of those whose process lives."""
        return self._meeting.rank == next(rank for rank in itertools.count() if rank not in self._lost)

    def _given_up(self, running: RunningAttempt, plan: Plan, error: BaseException) -> BaseException:
        """Write that the run has failed, and return the error to raise."""
        if self._leads and self._options.max_restarts:
            logger.error("%s. It is not tried again: %s.", plan.failure, plan.reason)
        self._process.end()
        if running.training is not None:
            running.training.give_up(plan.failure, leads=self._leads)
        return error if running.is_origin else PeerFailed(f"{plan.failure}. {_capitalised(plan.reason)}")

    # ---- Where a process has died

    def _replaced(self, running: RunningAttempt, plan: Plan) -> PeerFailed:
        """Hand over what the ranks hold to the processes that are started next; return with what to end."""
        self._is_replaced = True
        held: dict[Path, HeldCheckpoint] = {}
        training = running.training
        if plan.level is Level.PROCESS and training is not None and training.is_resumed:
            held = running.all_memory()
        elif plan.level is Level.PROCESS:
            plan, held = self._write_with_stand_ins(running, plan)
        if plan.level is Level.DISK and self._memory.has(running.all_memory().values()):
            # What this start has resumed from is still there, and later than what is on the disk.
            plan, held = replace(plan, level=Level.PROCESS), running.all_memory()
        if self._leads:
            paths = {str(path): each for path, each in held.items()}
            self._memory.hand_over(Handover(plan.level, plan.failure, plan.reason, running.left, paths))
        step = "the last step that was handed over" if plan.step is None else f"step {plan.step}"
        where = f"from {step}, in memory" if plan.level is Level.PROCESS else f"from the disk: {plan.reason}"
        ending = f"{plan.failure}. All processes end, and new ones go on {where}"
        if self._leads:
            logger.warning("%s.", ending)
        return PeerFailed(ending)

    def _write_with_stand_ins(self, running: RunningAttempt, plan: Plan) -> tuple[Plan, dict[Path, HeldCheckpoint]]:
        """Write what the ranks hold to memory; forked processes take the part of those whose process has died."""
        training, stand_ins = running.training, []
        assert training is not None and plan.step is not None, "a training call holds the state"
        moment = StepPlace(str(training.directory), plan.step, training.place)
        for rank in assigned(self._lost, self._launch.world_size, self._meeting.rank):
            own, _ = running.own_state_of(rank, moment)
            stand_ins.append(start_stand_in(rank, functools.partial(self._stand_in, rank, own, running, plan)))
        try:
            return self._write_memory(running, plan)
        except PeerFailed as error:  # another process has died meanwhile
            return replace(plan, level=Level.DISK, step=None, reason=error.message), {}
        finally:
            for each in stand_ins:
                each.join(self._options.meeting_timeout)

    def _stand_in(self, rank: int, own: Any, running: RunningAttempt, plan: Plan) -> None:
        """In a forked process: be another rank, and write what it held."""
        self._groups.keep_inherited()
        self._launch = dataclasses.replace(self._launch, rank=rank)
        self._meeting = StoreMeeting(self._launch, self._options.meeting_timeout, stands_in=True)
        assert running.training is not None, "a training call holds the state"
        running.training.stand_in(rank, own)
        self._write_memory(running, plan)

    # ---- To memory

    def _write_memory(self, running: RunningAttempt, plan: Plan) -> tuple[Plan, dict[Path, HeldCheckpoint]]:
        """Write what the ranks hold as a checkpoint; where that fails on one of them, they resume from the disk."""
        training, number = running.training, running.attempt.number
        assert training is not None, "a training call holds the state"
        topic = f"{number}/memory"
        timeout = datetime.timedelta(seconds=self._options.meeting_timeout)
        self._groups.use_store(functools.partial(self._meeting.groups_store, topic), timeout)
        cut, is_announced = self._groups.cut, functools.partial(self._meeting.is_announced, topic)
        watch = PeerWatch(is_announced, cut, cut, self._abandon)
        path, problem = Path(), ""
        with contextlib.closing(watch), watch.limited("write its state to memory", self._options.meeting_timeout):
            watch.start()
            try:
                with self._groups.remade():
                    ranks = current_ranks()
                    group = self._sharing_memory(ranks)
                    path = training.write(self._memory.of_attempt(number + 1), ranks, group)
                    group.close()
                    ranks.close()
            except (Exception, LeftByPeer) as error:  # of any kind: the others must learn of it
                self._meeting.announce(topic)
                cut()
                problem = f"its state could not be written to memory: {type(error).__name__}: {error}"
        problems = self._meeting.exchange(f"{number}/written", problem, str)
        found = next((f"rank {rank}: {each}" for rank, each in enumerate(problems) if each), None)
        if found is not None:
            return replace(plan, level=Level.DISK, step=None, reason=found), {}
        if self._leads_memory:
            self._memory.clear(but=[path.parent])
        return plan, {training.directory: HeldCheckpoint(str(path), training.generation)}

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
        """Whether this rank is the first of those whose process lives and that see this node's memory."""
        if self._memory_group is not None:
            return self._memory_group.is_leader
        return self._leads if self._launch.is_one_node else self._launch.local_rank == 0

    def _keep_memory(self, running: RunningAttempt, plan: Plan) -> tuple[Plan, dict[Path, HeldCheckpoint]]:
        """Go on from what this attempt has resumed from, where that is still in memory: it is later than the disk."""
        mine = running.all_memory() if self._memory.has(running.all_memory().values()) else {}
        named = {str(path): each for path, each in mine.items()}
        said = self._meeting.exchange(f"{running.attempt.number}/kept", named, dict[str, HeldCheckpoint])
        if not all(said):
            return plan, {}
        # A failure may have come before all ranks knew under which generation they have resumed.
        found = {Path(path): each for path, each in said[0].items()}
        kept = {path: HeldCheckpoint(mine.get(path, each).path, each.generation) for path, each in found.items()}
        return replace(plan, level=Level.MEMORY, reason=""), kept

    def _say(self, plan: Plan, number: int) -> None:
        if self._meeting.rank != 0:
            return
        step = "the same step" if plan.step is None else f"step {plan.step}"
        how = f"from {step}, in memory" if plan.level is Level.MEMORY else f"from the disk: {plan.reason}"
        logger.warning(
            "%s. The block is run again (%d of %d), %s.", plan.failure, number + 1, self._options.max_restarts, how
        )

    def _reset(self, attempt: Attempt) -> None:
        """Let go of what the attempt has left behind."""
        reset_process()
        _call(self._options.finalize, attempt)
        gc.collect()
        self._older.hide()

    def _carry_termination(self) -> None:
        """Let a SIGTERM that has come since the failure stop the next attempt, as it stops a training, if it does."""
        waiting = [each for each in self._flags.values() if signal.SIGTERM in each.on.signals]
        if self._termination.release(is_taken=bool(waiting)):
            for each in waiting:
                each.request(signal.SIGTERM.name)

    def _require_health(self, attempt: Attempt) -> None:
        """Refuse to go on in this process where the device or the user's check says so, on any rank.

        Raises:
            PeerFailed: one cannot go on.
        """
        problem = ""
        try:
            require_device(self._options.meeting_timeout)
            _call(self._options.health_check, attempt)
        except Exception as error:  # of any kind: the others must learn of it
            problem = f"{type(error).__name__}: {error}"
        problems = self._meeting.exchange(f"{attempt.number}/health", problem, str)
        for rank, each in enumerate(problems):
            if each:
                raise PeerFailed(
                    f"rank {rank} cannot go on in its process: {each}. All processes end, and new ones resume from the "
                    "latest checkpoint, if a restart is left (--max-restarts of torchrun)"
                )

    def _abandon(self, doing: str) -> None:
        """End this process: its main thread waits for what nobody can interrupt, and the others do not wait for it."""
        logger.error(
            "rank %d did not %s within %g s after a failure. Its process ends, so that torchrun starts all again and "
            "they resume from the latest checkpoint (--max-restarts). Its threads were at:\n%s",
            self._meeting.rank,
            doing,
            self._options.meeting_timeout,
            describe_threads(),
        )
        os._exit(1)

    def _show_older(self) -> None:
        """Hide nothing any longer from the collector; a process that others wait for ends sooner without that."""
        if not self._is_replaced:
            self._older.release()

    def _clear_memory(self) -> None:
        if self._leads_memory and not self._is_replaced:
            self._memory.clear()


def require_device(seconds: float) -> None:
    """Check that the accelerator that this process uses still answers.

    Args:
        seconds: within which it must.

    Raises:
        RuntimeError: it does not.
    """
    import torch

    if torch.cuda.is_available():  # pragma: no cover  # the tests run where there is no accelerator
        device = torch.cuda.current_device()

        def ask() -> None:
            torch.zeros(1, device=f"cuda:{device}").add_(1)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()

        require_answer(ask, seconds)


def require_answer(ask: Callable[[], object], seconds: float) -> None:
    """Check that a question is answered; a thread that waits for ever is left behind.

    Raises:
        RuntimeError: it is not answered in time, or with an error.
    """
    answers: list[Exception | None] = []

    def run() -> None:
        try:
            ask()
            answers.append(None)
        except Exception as error:  # of any kind: another thread raises it
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise RuntimeError(f"the device does not answer within {seconds:g} s")
    if answers[0] is not None:
        raise RuntimeError("the device does not answer") from answers[0]


def _call(hook: Hook | None, attempt: Attempt) -> None:
    if hook is not None:
        hook(attempt)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
