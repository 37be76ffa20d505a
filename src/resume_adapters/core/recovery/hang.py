"""No step for too long: whether a rank hangs, or is slow, and which one.

Each rank looks at itself. One that has ended no step for ``hang_after`` asks all ranks how they are. A rank that does
not answer, hangs: its process is stopped, or a library keeps the interpreter lock. Of ranks that answer, one is slow
whose main thread computes, or is found at different places: the others wait for it. Where none moves, those hang that
have begun the fewest collective operations: the others wait for them in the next one.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

import msgspec

from resume_adapters.core.devices import kind_in_use
from resume_adapters.core.log import logger
from resume_adapters.core.recovery.meeting import Meeting
from resume_adapters.core.recovery.plan import Failure

_LEAST = 300.0
"""Seconds without a step that are allowed in any case, where the user gives no number."""

_TIMES = 10
"""How many times as long as the slowest step so far a step may take, where the user gives no number."""

_ANSWER_WITHIN = 10.0
"""Seconds in which a rank answers that is asked."""

_COMPUTING = 0.02
"""The share of the time that a thread computes which is at work; on a machine that is busy it may be small."""


class Condition(msgspec.Struct, frozen=True):
    """What a rank says of itself.

    Attributes:
        is_moving: its main thread is not where it was.
        operations: how many collective operations it has begun.
        place: where its main thread is.
    """

    is_moving: bool
    operations: int
    place: str


def judge(conditions: Sequence[Condition | None]) -> tuple[bool, list[int]]:
    """Return whether nothing moves, and the ranks that hang then; else those that are slow.

    Args:
        conditions: what each rank says of itself; ``None``: it does not answer.
    """
    silent = [rank for rank, each in enumerate(conditions) if each is None]
    if silent:
        return True, silent
    answers = dict(enumerate(each for each in conditions if each is not None))
    moving = [rank for rank, each in answers.items() if each.is_moving]
    if moving:
        return False, moving
    least = min(each.operations for each in answers.values())
    return True, [rank for rank, each in answers.items() if each.operations == least]


class Pulse:
    """The signs of life of one attempt: the ends of its steps, and what it does between two of them.

    Attributes:
        slowest: seconds from one end of a step to the next, at most.
    """

    def __init__(self) -> None:
        self.slowest = 0.0
        self._last: float | None = None
        self._last_step: float | None = None

    def end_step(self) -> None:
        """Count the end of a step."""
        now = time.monotonic()
        if self._last_step is not None:
            self.slowest = max(self.slowest, now - self._last_step)
        self._last = self._last_step = now

    def beat(self) -> None:
        """Count something else that shows that the training goes on: a batch of an evaluation, a save."""
        if self._last is not None:
            self._last = time.monotonic()

    def stop(self) -> None:
        """The training has ended: no step is to come."""
        self._last = None

    def silence(self, now: float) -> float | None:
        """Return the seconds since the last sign of life; ``None`` before the first step, and after the training."""
        last = self._last
        return None if last is None else now - last


class HangWatch:
    """Looks for a hang during one attempt, on the thread that watches over it.

    Args:
        meeting: where the ranks ask each other.
        topic: of the attempt.
        pulse: when the training has last done something.
        watched: the thread that trains.
        hang_after: seconds without a step; ``None``: measured.
        operations: returns how many collective operations this rank has begun.
        on_hang: is called on the rank that finds a hang, once.
    """

    def __init__(
        self,
        meeting: Meeting,
        topic: str,
        pulse: Pulse,
        watched: int,
        hang_after: float | None,
        operations: Callable[[], int],
        on_hang: Callable[[Failure], object],
    ) -> None:
        self._meeting = meeting
        self._topic = topic
        self._pulse = pulse
        self._watched = watched
        self._hang_after = hang_after
        self._operations = operations
        self._on_hang = on_hang
        self._inquiry = 0
        self._asked_at: float | None = None
        self._looked = self._moved = self._computed = self._computed_at = 0.0
        self._place: tuple[object, ...] = ()

    @property
    def limit(self) -> float:
        """Seconds without a step that are allowed."""
        return max(_LEAST, _TIMES * self._pulse.slowest) if self._hang_after is None else self._hang_after

    @property
    def found(self) -> Failure | None:
        """The hang that a rank has found in this attempt."""
        said = self._meeting.read(f"{self._topic}/hang")
        return None if said is None else msgspec.json.decode(said, type=Failure)

    def look(self) -> float | None:
        """Look whether this rank, or a peer that asks, has ended no step for too long. Call it often.

        Returns:
            Seconds in which a call must follow, or this rank counts as one that hangs; ``None``: it trains nothing.
        """
        now = time.monotonic()
        allowed = None if self._pulse.silence(now) is None else self.limit + _ANSWER_WITHIN
        if now < self._looked + min(max(self.limit / 50, 0.02), 1.0):
            return allowed
        self._looked = now
        self._look_at_main_thread(now)
        self._read_inquiry()
        silence = self._pulse.silence(now)
        if silence is not None and silence > self.limit and self._asked_at is None:
            self._asked_at = now
            self._meeting.write(self._key("asked"), b"")
        if self._asked_at is not None or self._meeting.read(self._key("asked")) is not None:
            self._answer(now)
        if self._asked_at is not None:
            self._conclude(is_over=now > self._asked_at + _ANSWER_WITHIN)
        return allowed

    def _read_inquiry(self) -> None:
        """Begin to wait again where a peer has found that a rank is slow."""
        number = int(self._meeting.read(f"{self._topic}/inquiry") or b"0")
        if number != self._inquiry:
            self._inquiry, self._asked_at = number, None
            self._pulse.beat()

    def _key(self, name: str) -> str:
        return f"{self._topic}/inquiry/{self._inquiry}/{name}"

    def _look_at_main_thread(self, now: float) -> None:
        frame = sys._current_frames().get(self._watched)
        place = []
        while frame is not None:
            place.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        if tuple(place) != self._place or self._is_computing(now):
            self._place, self._moved = tuple(place), now

    def _is_computing(self, now: float) -> bool:
        """Return whether the thread has computed since the last call; who waits for an accelerator may do so too."""
        seconds = time.clock_gettime(time.pthread_getcpuclockid(self._watched))
        used, self._computed = seconds - self._computed, seconds
        passed, self._computed_at = now - self._computed_at, now
        return used > _COMPUTING * passed and kind_in_use() is None

    def _answer(self, now: float) -> None:
        frame = sys._current_frames().get(self._watched)
        is_moving = now < self._moved + self.limit / 2
        condition = Condition(is_moving, self._operations(), _described(frame))
        self._meeting.write(self._key(str(self._meeting.rank)), msgspec.json.encode(condition))

    def _conclude(self, *, is_over: bool) -> None:
        """Judge where all ranks have answered, or the time is over in which they do."""
        answers = [self._meeting.read(self._key(str(rank))) for rank in range(self._meeting.world_size)]
        if None in answers and not is_over:
            return
        conditions = [None if each is None else msgspec.json.decode(each, type=Condition) for each in answers]
        is_hang, ranks = judge(conditions)
        names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        # It does not answer where it is stopped, or a library keeps Python's lock.
        asked = [conditions[rank] for rank in ranks]
        places = ["in a process that does not answer" if each is None else each.place for each in asked]
        # In words that are the same whenever the same rank hangs.
        allowed = "ten times the slowest step" if self._hang_after is None else f"{self._hang_after:g} s"
        if is_hang:
            message = f"{names} hang{'s' * (len(ranks) == 1)} {places[0]}: no step has ended for {allowed}"
            failure = Failure(ranks[0], None, "Hung", message, places[0])
            self._meeting.write(f"{self._topic}/hang", msgspec.json.encode(failure))
            self._on_hang(failure)
            return
        self._meeting.write(f"{self._topic}/inquiry", str(self._inquiry + 1).encode())
        verb = "is" if len(ranks) == 1 else "are"
        logger.warning(
            "%s %s slow: no step has ended for %s; at work %s. It is waited for.",
            names,
            verb,
            allowed,
            ", ".join(places),
        )


def _described(frame: FrameType | None) -> str:
    return "" if frame is None else f"in {frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def describe_threads() -> str:
    """Return the stack of each thread, the main thread's first, each with the innermost call last."""
    names = {each.ident: each.name for each in threading.enumerate()}
    first = threading.main_thread().ident
    found = sorted(sys._current_frames().items(), key=lambda each: each[0] != first)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in found
    )
