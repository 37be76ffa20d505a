"""The threads that copy, on two ranks: they agree what to copy, and fail and end together."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import Remote
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.ranks import SINGLE_PROCESS
from resume_adapters.core.tiers import mirror as tier_mirror
from resume_adapters.core.tiers.mirror import Job, TierMirror, close_all, finish_all
from resume_adapters.core.tiers.tier import LocalFile, TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, FencedOff, TierUnavailable
from waiting import LIMIT, until, until_ended


class Meeting:
    """Two ranks in one process."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.values: list[Any] = [None, None]


class ThreadRanks:
    """One of two ranks, each on its own thread."""

    world_size = 2

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self._meeting = meeting
        self.is_closed = False

    def gather(self, value: Any) -> list[Any]:
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait(LIMIT)
        found = list(self._meeting.values)
        self._meeting.barrier.wait(LIMIT)
        return found

    def close(self) -> None:
        self.is_closed = True


class ListTier:
    """A tier that is a list; ``problem`` is raised by a copy of rank one."""

    label, unreadable = "list://", ()

    def __init__(self, rank: int, there: list[TierCheckpoint]) -> None:
        self.rank = rank
        self.there = there
        self.problem: Exception | None = None
        self.is_given_up = False

    def give_up(self) -> None:
        self.is_given_up = True

    def copy(self, place: str, files: Sequence[LocalFile]) -> None:
        if self.problem is not None:
            raise self.problem

    def commit(self, found: TierCheckpoint, generation: int) -> None:
        self.there.append(found)

    def checkpoints(self) -> list[TierCheckpoint]:
        return self.there[::-1]


def job(step: int, *, may_be_there: bool = False, written: float = 0.0) -> Job:
    entry = FileEntry("a", 1, "")
    manifest = Manifest(step=step, epoch=0.0, world_size=2, generation=1, written=written, reason="", files=(entry,))
    found = TierCheckpoint(f"place-{step}", f"checkpoint-{step}", manifest)
    return Job(found, (LocalFile(Path("a"), entry),), may_be_there)


Pair = tuple[TierMirror, TierMirror]


@pytest.fixture
def there() -> list[TierCheckpoint]:
    return []


@pytest.fixture
def asked() -> list[str]:
    return []


class FullJournal:
    """A journal whose disk is full as long as a test says so."""

    def __init__(self) -> None:
        self.is_full = False
        self.events: list[str] = []

    def append(self, event: str, **facts: Any) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "no space left")
        self.events.append(event)


@pytest.fixture
def journal() -> FullJournal:
    return FullJournal()


@pytest.fixture
def pair(there: list[TierCheckpoint], asked: list[str], journal: FullJournal) -> Iterator[Pair]:
    meeting = Meeting()
    settings = Remote("memory://pair")

    def made(rank: int) -> TierMirror:
        tier: Any = ListTier(rank, there)
        ranks: Any = ThreadRanks(rank, meeting)
        return TierMirror(tier, settings, LIMIT, ranks, journal.append, asked.append, time.time)

    found = made(0), made(1)
    for mirror in found:
        mirror.start(1)
    yield found
    meeting.barrier.abort()
    close_all(found, LIMIT)


def together(pair: Pair, work: Callable[[TierMirror], object]) -> None:
    threads = [threading.Thread(target=work, args=(mirror,)) for mirror in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        until_ended(thread)


def submit(pair: Pair, step: int) -> None:
    for mirror in pair:
        mirror.submit(job(step))


def steps(there: list[TierCheckpoint]) -> list[int]:
    return [each.manifest.step for each in there]


def test_a_rank_that_has_committed_less_is_waited_for(pair: Pair, there: list[TierCheckpoint]) -> None:
    """Rank zero has step two already; then they copy the newest that both have."""
    pair[0].submit(job(1))
    pair[0].submit(job(2))
    time.sleep(0.05)
    pair[1].submit(job(1))
    pair[1].submit(job(2))
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there)[-1] == 2 and pair[0].behind == pair[1].behind == 0
    together(pair, lambda mirror: close_all([mirror], LIMIT))


def test_ranks_that_have_nothing_in_common_wait(pair: Pair, there: list[TierCheckpoint]) -> None:
    pair[0].submit(job(1))
    pair[1].submit(job(2))
    time.sleep(0.15)
    pair[0].submit(job(2))
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [2]


def test_what_was_saved_last_is_copied_last_whatever_the_clock_said(pair: Pair, there: list[TierCheckpoint]) -> None:
    """A clock that is set back makes a step that is saved again look older; its files are those that are there."""
    tier: Any = pair[1].tier
    tier.problem = TierUnavailable("it is down")
    for mirror in pair:
        mirror.submit(job(5, written=100.0))
        mirror.submit(job(5, written=90.0))
    until(lambda: pair[0]._problem)
    tier.problem = None
    together(pair, lambda mirror: finish_all([mirror]))
    assert there[-1].manifest.written == 90.0


def test_where_one_rank_fails_both_try_again(
    pair: Pair, there: list[TierCheckpoint], caplog: pytest.LogCaptureFixture
) -> None:
    tier: Any = pair[1].tier
    tier.problem = TierUnavailable("rank one cannot reach it")
    for mirror in pair:
        mirror.submit(job(1))
    until(lambda: "rank one cannot reach it" in caplog.text)
    assert there == []
    tier.problem = None
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [1]


def test_a_journal_whose_disk_is_full_keeps_no_copy_back(
    pair: Pair, there: list[TierCheckpoint], journal: FullJournal
) -> None:
    """What it did not take is in it once there is room again."""
    tier: Any = pair[0].tier
    tier.problem = TierUnavailable("it is down")
    journal.is_full = True
    submit(pair, 1)
    until(lambda: pair[0]._problem, lambda: pair[0]._thread.is_alive())
    tier.problem = None
    until(lambda: steps(there) == [1] and pair[0].behind == 0, lambda: pair[0]._thread.is_alive())
    journal.is_full = False
    submit(pair, 2)
    together(pair, lambda mirror: finish_all([mirror]))
    assert journal.events == ["mirror-behind", "mirror", "mirror"]


@pytest.mark.parametrize("problem", [RuntimeError("can't start new thread"), MemoryError("no room for a part")])
def test_a_machine_that_is_short_of_something_is_a_failure_like_any_other(
    pair: Pair, there: list[TierCheckpoint], problem: Exception
) -> None:
    tier: Any = pair[1].tier
    tier.problem = problem
    for mirror in pair:
        mirror.submit(job(1))
    until(lambda: pair[0]._problem == str(problem), lambda: pair[0]._thread.is_alive())
    tier.problem = None
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [1]


def test_where_the_file_of_one_rank_is_gone_both_leave_the_checkpoint_out(
    pair: Pair, there: list[TierCheckpoint]
) -> None:
    tier: Any = pair[1].tier
    tier.problem = CheckpointDamaged("it is gone")
    for mirror in pair:
        mirror.submit(job(1))
    together(pair, lambda mirror: finish_all([mirror]))
    assert there == [] and pair[0].behind == pair[1].behind == 0


def test_both_learn_that_a_later_start_owns_the_tier(pair: Pair, asked: list[str]) -> None:
    tier: Any = pair[0].tier
    tier.problem = FencedOff("another start owns it")
    for mirror in pair:
        mirror.submit(job(1))
    for mirror in pair:
        until_ended(mirror._thread)
    assert asked == ["another start owns it"] * 2
    for mirror in pair:
        with pytest.raises(FencedOff):
            mirror.require_owned()


def test_what_an_earlier_start_has_copied_is_not_copied_again(pair: Pair, there: list[TierCheckpoint]) -> None:
    there.append(job(1).checkpoint)
    for mirror in pair:
        mirror.submit(job(1, may_be_there=True))
        mirror.submit(job(3))
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [1, 3]


def test_what_cannot_be_looked_for_is_not_copied_until_it_can(pair: Pair, there: list[TierCheckpoint]) -> None:
    """The store may answer again a moment later, and have what an earlier start has copied."""
    there.append(job(1).checkpoint)
    tier: Any = pair[0].tier
    looked: list[int] = []

    def look() -> list[TierCheckpoint]:
        looked.append(1)
        if len(looked) == 1:
            raise TierUnavailable("it is down")
        return there

    tier.checkpoints = look
    for mirror in pair:
        mirror.submit(job(1, may_be_there=True))
    until(lambda: looked)
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [1] and len(looked) == 2


def test_a_rank_that_fails_closes_without_the_other(pair: Pair) -> None:
    """The other one may train on, or wait for the first in a collective of the training."""
    pair[0].submit(job(1))
    ranks: Any = pair[0]._ranks
    until(lambda: ranks._meeting.barrier.n_waiting == 1)
    began = time.monotonic()
    close_all([pair[0]], LIMIT)
    assert time.monotonic() - began < LIMIT / 2
    assert not ranks.is_closed, "its thread is in a collective"
    assert pair[0].tier.is_given_up and not pair[1].tier.is_given_up  # type: ignore[attr-defined]


def test_a_mirror_that_never_began_closes(there: list[TierCheckpoint]) -> None:
    tier: Any = ListTier(0, there)
    ranks: Any = ThreadRanks(0, Meeting())
    mirror = TierMirror(tier, Remote("memory://x"), 5.0, ranks, print, print, time.time)
    close_all([mirror], LIMIT)
    assert ranks.is_closed


def test_a_store_that_hangs_keeps_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The process is ended from outside three seconds later, and needs two of them to leave."""
    released = threading.Event()

    class Hanging(ListTier):
        def copy(self, place: str, files: Sequence[LocalFile]) -> None:
            released.wait(LIMIT)

    tier: Any = Hanging(0, [])
    mirror = TierMirror(tier, Remote("memory://x"), 60.0, SINGLE_PROCESS, lambda *_, **__: None, print, time.time)
    mirror.start(1)
    mirror.submit(job(1))
    waited: list[float] = []
    join = mirror._thread.join

    def timed_join(seconds: float) -> None:
        waited.append(seconds)
        join(seconds)

    mirror._thread.join = timed_join  # type: ignore[assignment, method-assign]
    finish_all([mirror], 3.0)
    assert waited[0] <= 1.0 and "mirror behind" in caplog.text
    released.set()
    close_all([mirror], LIMIT)


def test_two_stores_that_hang_keep_a_run_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are told that the run ends before the first is waited for, at its end and at its close."""
    released = threading.Event()
    begun: list[str] = []

    class Hanging(ListTier):
        def copy(self, place: str, files: Sequence[LocalFile]) -> None:
            begun.append(place)
            released.wait(LIMIT)

    def made() -> TierMirror:
        tier: Any = Hanging(0, [])
        return TierMirror(tier, Remote("memory://x"), 60.0, SINGLE_PROCESS, lambda *_, **__: None, print, time.time)

    monkeypatch.setattr(tier_mirror, "_LONGEST_GOODBYE", 1.0)
    mirrors = made(), made()
    for mirror in mirrors:
        mirror.start(1)
        mirror.submit(job(1))
    until(lambda: len(begun) == 2)
    waited: list[float] = []
    for mirror in mirrors:
        join = mirror._thread.join

        def timed(seconds: float, join: Callable[[float], None] = join) -> None:
            began = time.monotonic()
            join(seconds)
            waited.append(time.monotonic() - began)

        mirror._thread.join = timed  # type: ignore[assignment, method-assign]
    finish_all(mirrors, 3.0)
    assert waited[0] > 0.5 and waited[1] < 0.5
    del waited[:]
    close_all(mirrors, 3.0)
    assert waited[0] > 0.5 and waited[1] < 0.5 and sum(waited[2:]) < 0.9
    released.set()
    for mirror in mirrors:
        until_ended(mirror._thread)


def test_two_slow_stores_both_get_the_last_copy_in_the_time_of_the_slower(there: list[TierCheckpoint]) -> None:
    """The second begins while the first copies: the one that is only due at the end too."""
    meeting = threading.Barrier(2)

    class Slow(ListTier):
        def copy(self, place: str, files: Sequence[LocalFile]) -> None:
            meeting.wait(5.0)

    def made() -> TierMirror:
        tier: Any = Slow(0, there)
        settings = Remote("memory://x", every=2)
        return TierMirror(tier, settings, LIMIT, SINGLE_PROCESS, lambda *_, **__: None, print, time.time)

    mirrors = made(), made()
    for mirror in mirrors:
        mirror.submit(job(1))
        mirror.start(1)
    until(lambda: mirrors[0].behind == mirrors[1].behind == 0)
    for mirror in mirrors:
        mirror.submit(job(2))
    finish_all(mirrors)
    assert steps(there) == [1, 1, 2, 2]
    close_all(mirrors, LIMIT)


def test_a_store_that_is_down_for_a_day_is_still_tried(pair: Pair, there: list[TierCheckpoint]) -> None:
    """After a thousand attempts the pause that doubles is larger than a float."""
    tier: Any = pair[1].tier
    tier.problem = TierUnavailable("it is down")
    submit(pair, 1)
    until(lambda: pair[0]._problem)
    for mirror in pair:
        mirror._attempts = 2000
    until(lambda: pair[0]._attempts > 2001, lambda: pair[0]._thread.is_alive())
    tier.problem = None
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [1]


def test_what_nobody_expected_ends_the_copies_of_all_ranks_and_is_said(
    pair: Pair,
    journal: FullJournal,
    asked: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error in a client, or here: it is no reason to end the run, and none to say nothing."""
    tier: Any = pair[1].tier
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-for-a-log")
    tier.problem = KeyError("ETag of not-for-a-log")
    submit(pair, 1)
    for mirror in pair:
        until_ended(mirror._thread)
    submit(pair, 2)
    for mirror in pair:
        assert mirror.state.behind == 2
        assert mirror.state.problem.startswith("the copies have ended: KeyError: 'ETag of ***' (test_mirror.py:")
    assert journal.events == ["mirror-ended"] and asked == []
    assert caplog.text.count("Training goes on, without copies") == 1


def test_a_channel_that_is_cut_ends_the_copies_and_is_said(pair: Pair, journal: FullJournal, asked: list[str]) -> None:
    """Another rank is gone. A block that is run again copies again, so nothing is asked to stop."""
    pair[0]._settings = Remote("memory://pair", on_behind="stop")
    ranks: Any = pair[0]._ranks
    pair[0].submit(job(1))
    until(lambda: ranks._meeting.barrier.n_waiting == 1)
    ranks._meeting.barrier.abort()
    until_ended(pair[0]._thread)
    assert "the copies have ended: BrokenBarrierError" in pair[0].state.problem
    assert journal.events == ["mirror-ended"] and asked == []


def test_copies_that_have_ended_stop_a_run_where_that_is_asked_for() -> None:
    class Broken(ListTier):
        def commit(self, found: TierCheckpoint, generation: int) -> None:
            raise KeyError("ETag")

    tier: Any = Broken(0, [])
    asked: list[str] = []
    settings = Remote("memory://x", on_behind="stop")
    mirror = TierMirror(tier, settings, 60.0, SINGLE_PROCESS, lambda *_, **__: None, asked.append, time.time)
    mirror.submit(job(1))
    mirror.start(1)
    until_ended(mirror._thread)
    assert len(asked) == 1 and asked[0].startswith("list:// gets no more copies: KeyError: 'ETag'")
    close_all([mirror], LIMIT)
