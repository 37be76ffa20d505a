"""Whether a rank hangs or is slow, and which one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from resume_adapters.core.recovery import hang
from resume_adapters.core.recovery.hang import Condition, HangWatch, Pulse, judge
from resume_adapters.core.recovery.meeting import Meeting
from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.plan import Failure
from waiting import LIMIT, until

STILL, MOVING, BEHIND = Condition(False, 7, "a"), Condition(True, 7, "b"), Condition(False, 6, "c")


@pytest.mark.parametrize(
    ("conditions", "verdict"),
    [
        ([STILL, BEHIND], (True, [1])),
        ([STILL, STILL], (True, [0, 1])),
        ([BEHIND, STILL, BEHIND], (True, [0, 2])),
        ([STILL, MOVING], (False, [1])),
        ([MOVING, BEHIND, MOVING], (False, [0, 2])),
        ([STILL, None, BEHIND], (True, [1])),
        ([MOVING, None], (True, [1])),
    ],
)
def test_who_does_not_answer_or_is_waited_for_hangs_unless_somebody_moves(
    conditions: list[Condition | None], verdict: tuple[bool, list[int]]
) -> None:
    assert judge(conditions) == verdict


def alone() -> Meeting:
    return Meeting(Launch(), LIMIT)


def watching(meeting: Meeting, hang_after: float | None) -> tuple[HangWatch, Pulse, list[Failure]]:
    pulse, found = Pulse(), list[Failure]()
    return HangWatch(meeting, "0", pulse, threading.get_ident(), hang_after, lambda: 3, found.append), pulse, found


def rest(over: Any) -> None:
    over.acquire()


def work(over: Any) -> None:
    while over.locked():
        sum(range(20))


def look(watch: HangWatch, do: Callable[[Any], None], condition: Callable[[], object]) -> None:
    """Look from another thread until a condition holds, while this one rests or works."""
    begun, over = threading.Lock(), threading.Lock()
    begun.acquire()
    over.acquire()

    def run() -> None:
        begun.acquire()  # what this thread does before is no rest, and may take long

        def is_seen() -> bool:
            watch.look()
            return bool(condition())

        try:
            until(is_seen)
        finally:
            over.release()

    thread = threading.Thread(target=run)
    thread.start()
    begun.release()
    do(over)
    thread.join()
    assert condition()


def after(seconds: float) -> Callable[[], bool]:
    """Return what holds after some time."""
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() > ends


def test_a_thread_that_rests_hangs() -> None:
    watch, pulse, found = watching(alone(), 0.3)
    look(watch, rest, after(0.5))
    assert not found, "no step has ended yet"
    pulse.end_step()
    look(watch, rest, lambda: found)
    assert found[0].rank == 0
    assert found[0].message.startswith("rank 0 hangs in rest (")
    assert found[0].message.endswith("no step has ended for 0.3 s")
    assert watch.found == found[0]
    found.clear()
    pulse.stop()
    look(watch, rest, after(0.5))
    assert not found, "the training is over"


def test_a_thread_that_works_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    watch, pulse, found = watching(alone(), 1.0)
    pulse.end_step()
    look(watch, work, lambda: "is slow" in caplog.text or found)
    assert not found and not watch.found
    assert "rank 0 is slow: no step has ended for 1 s; at work in work" in caplog.text


def test_a_peer_that_does_not_answer_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang, "_ANSWER_WITHIN", 0.2)
    meeting = alone()
    meeting.world_size = 2
    watch, pulse, found = watching(meeting, 0.3)
    pulse.end_step()
    look(watch, work, lambda: found)
    assert found[0].rank == 1
    assert "rank 1 hangs in a process that does not answer" in found[0].message
