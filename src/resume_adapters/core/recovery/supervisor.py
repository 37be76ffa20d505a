"""A process of each rank that outlives the training: where a training process dies, it forks the next one.

A new process spends most of its time on imports: of torch, of the framework, of the script. So the process that
the launcher has started forks the one that trains, when the block begins, and waits. It has imported what the script
had imported by then; what the training has imported by the end of its first step (torch's compiler, with the first
optimizer), it imports then, too. When the process that trains has died on any rank, the others leave
what they hold in memory and end, and each supervisor forks a new one, which goes on from there. The launcher learns
nothing of it; where a supervisor dies too, it starts all processes again, as it does without them.

A forked process lacks the threads of its parent and cannot use its devices. So there is no supervisor where there are
any when the block begins.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

from resume_adapters.core.recovery import forked
from resume_adapters.core.recovery.meeting import SupervisorMeeting
from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.signal_relay import PASSED_ON, Arrivals, Pipe, SignalRelay
from resume_adapters.core.state import rng
from resume_adapters.core.storage.threads import devices_in_use, other_threads

_LOOK_EVERY = 0.01
"""Seconds between two looks whether the other supervisors have said something."""

_HARMLESS_THREADS = {"jemalloc_bg_thd"}
"""Threads that a forked process starts again by itself: that of the allocator which pyarrow brings."""

_ATTEMPT, _IMPORTED, _REPLACE, _OVER = "attempt", "imported", "replace", "over"


class Supervised:
    """What the process that trains tells its supervisor. Without a supervisor it tells nobody.

    Args:
        words: the descriptor to write to; ``None`` without a supervisor.
        restarts: how often the block was run again in the processes before this one.
        restarts_left: how often the supervisor still forks another process.

    Attributes:
        restarts: see above.
        restarts_left: see above.
    """

    def __init__(self, words: int | None = None, restarts: int = 0, restarts_left: int = 0) -> None:
        self._words = words
        self._modules = frozenset() if words is None else frozenset(sys.modules)
        self.restarts = restarts
        self.restarts_left = restarts_left

    def begin_attempt(self, number: int) -> None:
        """Say which attempt is under way: who dies in it is announced as a failure of that attempt."""
        self._say(f"{_ATTEMPT} {number}")

    def say_imports(self) -> None:
        """Say which modules of libraries were imported in this process: the next one begins with them."""
        if self._words is None:
            return
        found = [
            name
            for name, module in list(sys.modules.items())
            if name not in self._modules and _is_library(getattr(module, "__spec__", None))
        ]
        if found:
            self._say(f"{_IMPORTED} {','.join(found)}")

    def replace(self) -> None:
        """Let another process go on when this one has ended."""
        self._say_at_last(_REPLACE)

    def end(self) -> None:
        """Let the supervisor end as this process does, from now on."""
        self._say_at_last(_OVER)

    def _say_at_last(self, word: str) -> None:
        if self._words is not None:
            self._say(word)
            os.close(self._words)
            self._words = None

    def _say(self, word: str) -> None:
        text = f"{word}\n".encode()
        while self._words is not None and text:
            text = text[os.write(self._words, text) :]


_supervisors: list[int] = []
"""The process that has forked this one to train in it, if one has."""


def supervised(launch: Launch, max_restarts: int) -> tuple[Launch, Supervised]:
    """Return in a process that trains: one that was forked for it, or this one where it cannot be replaced.

    Args:
        launch: the processes of the launch.
        max_restarts: how often another one may be forked.

    Returns:
        The launch, as the block of this process is to know it; and what the process tells its supervisor.
    """
    if not max_restarts or not launch.is_one_node or launch.world_size == 1 or not _can_fork():
        return launch, Supervised()
    return Supervisor(launch, max_restarts).run()


def _can_fork() -> bool:
    """Return whether a process that is forked now could do all that this one can, and is not such a process itself."""
    import psutil

    if os.getppid() in _supervisors:
        return False
    threads = other_threads()
    if threads is None or not _HARMLESS_THREADS.issuperset(threads):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an older kernel
        return False
    return not devices_in_use() and not psutil.Process().children()


class Supervisor:
    """Forks the process that trains, and waits for it.

    Args:
        launch: the processes of the launch.
        max_restarts: how often another one is forked.
    """

    def __init__(self, launch: Launch, max_restarts: int) -> None:
        self._launch = launch
        self._max_restarts = max_restarts
        self._forks = self._restarts = 0
        self._random_state = rng.capture()
        self._relay = SignalRelay()

    def run(self) -> tuple[Launch, Supervised]:
        """Return in each process that is to train. The supervisor itself ends as the last of them does."""
        while True:
            left = max(0, self._max_restarts - self._restarts)
            start = f"{self._launch.start}.{self._forks}"
            launch = replace(self._launch, start=start, restarts_left=self._launch.restarts_left + left)
            trainer = _Trainer()
            if trainer.fork():  # pragma: no cover  # of frames that are forked, coverage sees nothing more
                self._relay.leave(trainer.signals.writing)
                _supervisors.append(os.getppid())
                rng.restore(self._random_state)  # Python gives its generator another seed in each forked process
                return launch, Supervised(trainer.words.writing, self._restarts, left)
            with contextlib.closing(trainer):
                status = self._wait(trainer, launch)
                self._restarts += trainer.attempt + 1
                is_allowed = self._restarts <= self._max_restarts and _can_fork()
                wants_another = is_allowed and (trainer.is_left or trainer.has_died(status))
                if trainer.is_over or not self._is_replaced(trainer, launch, wants_another=wants_another):
                    _end_with(status)
            self._forks += 1

    def _wait(self, trainer: _Trainer, launch: Launch) -> int:
        """Wait until a process has ended, and return its status; pass on what signals it has not got by itself."""
        self._relay.enter()
        arrivals, own = Arrivals(), self._relay.own
        descriptors = [trainer.process, trainer.words.reading, trainer.signals.reading, own.reading]
        while True:
            ready, _, _ = select.select(descriptors, [], [], arrivals.seconds(time.monotonic()))
            now = time.monotonic()
            for number in trainer.signals.read():
                arrivals.add_seen(number, now)
            for number in own.read():
                arrivals.add(number, now)
            for number in arrivals.take_due(now):
                signal.pidfd_send_signal(trainer.process, number)
            was_over = trainer.is_over
            trainer.read()
            _import(trainer.take_imports())
            if trainer.is_over and not was_over:
                self._is_replaced(trainer, launch, wants_another=False)  # who waits for this rank need not
            if trainer.process in ready:
                return trainer.status()

    def _is_replaced(self, trainer: _Trainer, launch: Launch, *, wants_another: bool) -> bool:
        """Agree with the supervisors of the other ranks; return whether all of them fork another process."""
        try:
            meeting = SupervisorMeeting(launch)
            if wants_another and not trainer.is_left:
                meeting.announce_death(f"{trainer.attempt}")
            meeting.say(wants_another=wants_another)
            while wants_another and (found := meeting.all_want_another()) is None:
                if select.select([self._relay.own.reading], [], [], _LOOK_EVERY)[0]:
                    return False
            return wants_another and bool(found)
        except RuntimeError:  # the launcher is gone, and its store
            return False


class _Trainer:
    """A process that trains, as its supervisor sees it.

    Attributes:
        words: what it says.
        signals: the numbers of the signals that it has got, as bytes.
        process: the descriptor of the process, which can be read when it has ended.
        attempt: the last one that it has begun.
        is_left: it ends so that another process goes on.
        is_over: the block is over in it.
    """

    def __init__(self) -> None:
        self.words, self.signals = Pipe(is_patient=True), Pipe()
        self.attempt = 0
        self.is_left = self.is_over = False
        self._imports: list[str] = []
        self.process = self._pid = -1
        self._text = b""

    def fork(self) -> bool:
        """Fork the process, and return whether this is it."""
        sys.stdout.flush()
        sys.stderr.flush()
        supervisor, pid = os.getpid(), os.fork()
        if pid == 0:  # pragma: no cover  # as above
            forked.end_with(supervisor)  # which is the process that the launcher has started, and ends
            os.close(self.words.reading)
            os.close(self.signals.reading)
            return True
        self._pid, self.process = pid, os.pidfd_open(pid)
        return False

    def read(self) -> None:
        """Read what it has said."""
        *lines, self._text = (self._text + self.words.read()).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == _IMPORTED:
                self._imports = rest.split(",")
                continue
            self.attempt = int(rest or self.attempt)
            self.is_left, self.is_over = word == _REPLACE, word == _OVER

    def take_imports(self) -> list[str]:
        """Return the modules that it has imported, once."""
        found, self._imports = self._imports, []
        return found

    def status(self) -> int:
        """Return the status with which it has ended; its last words are read."""
        _, status = os.waitpid(self._pid, 0)
        self.read()
        return status

    def has_died(self, status: int) -> bool:
        """Return whether it was killed, or has crashed, within the block."""
        return not self.is_over and os.WIFSIGNALED(status) and os.WTERMSIG(status) not in PASSED_ON

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.process)
        self.words.close()
        self.signals.close()


def _is_library(spec: ModuleSpec | None) -> bool:
    """Return whether a module is an installed one: what the script's own do when they are imported is its affair."""
    return spec is not None and spec.has_location and "site-packages" in Path(str(spec.origin)).parts


def _import(modules: Sequence[str]) -> None:
    """Import modules as far as that can be done here; the next process imports the others itself."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:  # of any kind: what a module does when it is imported is not known
            return


def _end_with(status: int) -> NoReturn:
    """End as another process has ended."""
    if os.WIFSIGNALED(status):  # pragma: no cover  # a process that a signal ends says nothing of what it has run
        import resource  # not on Windows

        most = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # one that has crashed has left its own
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)
