"""What a training call asks of the attempt that it is part of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.recovery.attempt import Attempt, RunningAttempt
from resume_adapters.core.recovery.memory import MemoryDirectory
from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.plan import Failure, HeldCheckpoint, Level, Moment, Report
from resume_adapters.core.recovery.updates import UpdateWatch
from resume_adapters.core.storage.local import LocalStorage

FAILURE = Failure(0, 1, "RuntimeError", "lost", "")


def running(number: int = 0, memory: dict[Path, HeldCheckpoint] | None = None, **calls: Any) -> RunningAttempt:
    given = {"announce": lambda: True, "cut": lambda: None, "forget": lambda: None, **calls}
    attempt = Attempt(number, Level.MEMORY if number else None, FAILURE if number else None)
    return RunningAttempt(attempt, memory or {}, UpdateWatch(), began=time.monotonic() - 2, **given)


def test_only_the_first_attempt_starts_from_scratch() -> None:
    assert running(0).resume_option("scratch") == "scratch"
    assert [running(1).resume_option(given) for given in ("scratch", "scratch!", "auto", "path")] == [
        "auto", "auto", "auto", "path",
    ]  # fmt: skip


class Call:
    """A training call that holds a step, or none yet."""

    directory, generation, progress, has_committed = Path("run"), 1, 4, False

    def __init__(self, step: int | None, *, is_over: bool = False) -> None:
        self.step, self.is_over = step, is_over

    def report(self, *, is_updating: bool) -> Report:
        return Report("run", self.step and Moment(self.step))


@pytest.mark.parametrize(
    ("others", "is_used"),
    [([], True), ([Call(18, is_over=True)], True), ([Call(None)], True), ([Call(3)], False)],
)
def test_of_two_trainings_at_once_none_is_held_alone(others: list[Any], is_used: bool) -> None:
    """The next attempt would go on with the other from the disk."""
    attempt = running()
    for each in (*others, Call(4)):
        attempt.add(each)
    found = attempt.report(None, lambda held: True)
    assert found.moment == Moment(4) and bool(found.objection) is not is_used


def test_a_directory_in_memory_is_removed_but_for_what_is_used(tmp_path: Path) -> None:
    memory = MemoryDirectory(LocalStorage(), Launch(name="one"), "token", tmp_path)
    memory.clear()
    memory.make()
    assert memory.of_attempt(0).parent.stat().st_mode & 0o777 == 0o700, "other users could read the weights"
    for number in range(3):
        memory.of_attempt(number).mkdir(parents=True)
        (memory.of_attempt(number) / "file").write_text("x")
    memory.clear(but=[memory.of_attempt(1)])
    assert [each.name for each in memory.of_attempt(1).parent.iterdir()] == ["0.1"]
    memory.clear()
    assert list(tmp_path.iterdir()) == []
    for launch, token in ((Launch(name="two"), "token"), (Launch(name="one"), "other")):
        assert MemoryDirectory(LocalStorage(), launch, token, tmp_path).of_attempt(0) != memory.of_attempt(0)
