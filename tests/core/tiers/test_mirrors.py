"""The threads that copy, on two ranks: the first says what to copy, and they fail and end together."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import Remote
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.ranks import SINGLE_PROCESS
from resume_adapters.core.tiers import mirrors as tier_mirrors
from resume_adapters.core.tiers.mirrors import TierMirror, close_all, finish_all
from resume_adapters.core.tiers.tier import TierCheckpoint
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

    def broadcast(self, value: Any, root: int) -> Any:
        return self.gather(value)[root]

    def close(self) -> None:
        self.is_closed = True


Wanted = Callable[[], object]


class ListTier:
    """A tier that is a list; ``problem`` is raised by a copy of rank one."""

    label, unreadable = "list://", ()

    def __init__(self, rank: int, there: list[TierCheckpoint]) -> None:
        self.rank = rank
        self.there = there
        self.problem: Exception | None = None

    def copy(self, place: str, checkpoint: Path, entries: Sequence[FileEntry], require_wanted: Wanted) -> None:
        if self.problem is not None:
            raise self.problem

    def flush(self) -> None:
        pass

    def commit(self, found: TierCheckpoint, generation: int) -> None:
        self.there.append(found)

    def checkpoints(self) -> list[TierCheckpoint]:
        return self.there[::-1]


def saved(step: int, *, written: float = 0.0) -> TierCheckpoint:
    entry = FileEntry("a", 1, "")
    manifest = Manifest(step=step, epoch=0.0, world_size=2, generation=1, written=written, reason="", files=(entry,))
    return TierCheckpoint(f"place-{step}", f"checkpoint-{step}", manifest)


def own_files(found: TierCheckpoint) -> tuple[Path, Sequence[FileEntry]]:
    return Path(found.name), found.manifest.files


def single(tier: Any, seconds: float = LIMIT, **options: Any) -> TierMirror:
    """A thread of a run of one process, whose journal takes nothing down."""
    ask = options.pop("ask", print)
    settings = Remote("memory://x", timeout=timedelta(seconds=seconds), **options)
    return TierMirror(tier, settings, SINGLE_PROCESS, own_files, lambda *_, **__: None, ask, time.time)


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
        self.refused: list[str] = []
        self.events: list[str] = []

    def append(self, event: str, **facts: Any) -> None:
        if self.is_full:
            self.refused.append(event)
            raise OSError(errno.ENOSPC, "no space left")
        self.events.append(event)


@pytest.fixture
def journal() -> FullJournal:
    return FullJournal()


@pytest.fixture
def pair(there: list[TierCheckpoint], asked: list[str], journal: FullJournal) -> Iterator[Pair]:
    meeting = Meeting()
    settings = Remote("memory://pair", timeout=timedelta(seconds=LIMIT))

    def made(rank: int) -> TierMirror:
        tier: Any = ListTier(rank, there)
        ranks: Any = ThreadRanks(rank, meeting)
        return TierMirror(tier, settings, ranks, own_files, journal.append, asked.append, time.time)

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
        mirror.submit(saved(step))


def steps(there: list[TierCheckpoint]) -> list[int]:
    return [each.manifest.step for each in there]


def test_the_first_rank_says_what_is_copied_also_to_one_that_has_seen_fewer_commits(
    pair: Pair, there: list[TierCheckpoint]
) -> None:
    tier: Any = pair[1].tier
    tier.problem = TierUnavailable("it is down")
    submit(pair, 1)
    until(lambda: pair[1].state.problem)
    pair[0].submit(saved(2))
    tier.problem = None
    until(lambda: steps(there) == [2] and not pair[1].state.behind)
    pair[1].submit(saved(2))
    assert pair[1].state.behind == 0, "it was copied before it was told of"
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [2]
    together(pair, lambda mirror: close_all([mirror], LIMIT))


def test_the_last_save_that_the_first_rank_has_copied_is_not_due_when_another_one_ends(
    pair: Pair, there: list[TierCheckpoint]
) -> None:
    for mirror in pair:
        mirror.settings = Remote("memory://pair", every=2, timeout=timedelta(seconds=LIMIT))
    tier: Any = pair[1].tier
    tier.problem = TierUnavailable("it is down")
    for step in (1, 2):
        submit(pair, step)
    until(lambda: pair[0].state.problem)
    pair[0].ask_to_finish(None)
    # If a copy of the first was under way, and succeeded, the other rank would have nothing due until it ends, too.
    until(lambda: pair[0]._copying is not None and pair[0]._copying.number == 2)
    tier.problem = None
    until(lambda: steps(there) == [2])
    together(pair, lambda mirror: finish_all([mirror]))
    assert pair[1].state.behind == 0 and steps(there) == [2]


def test_what_was_saved_last_is_copied_last_whatever_the_clock_said(pair: Pair, there: list[TierCheckpoint]) -> None:
    """A clock that is set back makes a step that is saved again look older; its files are those that are there."""
    tier: Any = pair[1].tier
    tier.problem = TierUnavailable("it is down")
    for mirror in pair:
        mirror.submit(saved(5, written=100.0))
        mirror.submit(saved(5, written=90.0))
    until(lambda: pair[0]._problem)
    tier.problem = None
    together(pair, lambda mirror: finish_all([mirror]))
    assert there[-1].manifest.written == 90.0


def test_a_journal_whose_disk_is_full_keeps_no_copy_back(
    pair: Pair, there: list[TierCheckpoint], journal: FullJournal
) -> None:
    tier: Any = pair[0].tier
    tier.problem = TierUnavailable("it is down")
    journal.is_full = True
    submit(pair, 1)
    until(lambda: pair[0]._problem, lambda: pair[0]._thread.is_alive())
    tier.problem = None
    until(lambda: journal.refused == ["mirror-behind", "mirror"], lambda: pair[0]._thread.is_alive())
    assert steps(there) == [1] and pair[0].state.behind == 0
    journal.is_full = False
    submit(pair, 2)
    together(pair, lambda mirror: finish_all([mirror]))
    assert journal.events == ["mirror"]


@pytest.mark.parametrize(
    "problem",
    [
        TierUnavailable("it cannot be reached"),
        RuntimeError("can't start new thread"),
        MemoryError("no room for a part"),
    ],
)
def test_where_one_rank_fails_both_try_again(pair: Pair, there: list[TierCheckpoint], problem: Exception) -> None:
    tier: Any = pair[1].tier
    tier.problem = problem
    for mirror in pair:
        mirror.submit(saved(1))
    until(lambda: pair[0]._problem == str(problem), lambda: pair[0]._thread.is_alive())
    assert there == []
    tier.problem = None
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [1]


def test_where_the_file_of_one_rank_is_gone_both_leave_the_checkpoint_out(
    pair: Pair, there: list[TierCheckpoint]
) -> None:
    tier: Any = pair[1].tier
    tier.problem = CheckpointDamaged("it is gone")
    for mirror in pair:
        mirror.submit(saved(1))
    together(pair, lambda mirror: finish_all([mirror]))
    assert there == [] and pair[0].state.behind == pair[1].state.behind == 0


def test_both_learn_that_a_later_start_owns_the_tier(pair: Pair, asked: list[str]) -> None:
    tier: Any = pair[0].tier
    tier.problem = FencedOff("another start owns it")
    for mirror in pair:
        mirror.submit(saved(1))
    for mirror in pair:
        until_ended(mirror._thread)
    assert asked == ["another start owns it"] * 2
    for mirror in pair:
        assert isinstance(mirror.fenced_off, FencedOff)


def test_what_cannot_be_looked_for_is_not_copied_until_it_can(pair: Pair, there: list[TierCheckpoint]) -> None:
    """The store may answer again a moment later, and have what an earlier start has copied."""
    there.append(saved(1))
    tier: Any = pair[0].tier
    looked: list[int] = []

    def look() -> list[TierCheckpoint]:
        looked.append(1)
        if len(looked) == 1:
            raise TierUnavailable("it is down")
        return there

    tier.checkpoints = look
    for mirror in pair:
        mirror.submit(saved(1), may_be_there=True)
    until(lambda: looked)
    together(pair, lambda mirror: finish_all([mirror]))
    assert steps(there) == [1] and len(looked) == 2


def test_a_rank_that_fails_closes_without_the_other(pair: Pair) -> None:
    """The other one may train on, or wait for the first in a collective of the training."""
    pair[0].submit(saved(1))
    ranks: Any = pair[0].ranks
    until(lambda: ranks._meeting.barrier.n_waiting == 1)
    began = time.monotonic()
    close_all([pair[0]], LIMIT)
    assert time.monotonic() - began < LIMIT / 2
    assert not ranks.is_closed, "its thread is in a collective"
    with pytest.raises(TierUnavailable, match="this run ends"):
        pair[0]._require_wanted()
    pair[1]._require_wanted()


def test_a_mirror_that_never_began_closes(there: list[TierCheckpoint]) -> None:
    tier: Any = ListTier(0, there)
    ranks: Any = ThreadRanks(0, Meeting())
    mirror = TierMirror(tier, Remote("memory://x"), ranks, own_files, print, print, time.time)
    close_all([mirror], LIMIT)
    assert ranks.is_closed


def test_two_stores_that_hang_keep_a_run_no_longer_than_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are told that the run ends before the first is waited for, at its end and at its close.

    The process is ended from outside three seconds later, and needs two of them to leave.
    """
    released = threading.Event()
    begun: list[str] = []

    class Hanging(ListTier):
        def copy(self, place: str, checkpoint: Path, entries: Sequence[FileEntry], require_wanted: Wanted) -> None:
            begun.append(place)
            released.wait(LIMIT)

    def made() -> TierMirror:
        tier: Any = Hanging(0, [])
        return single(tier, 60.0)

    monkeypatch.setattr(tier_mirrors, "_LONGEST_GOODBYE", 1.0)
    mirrors = made(), made()
    for mirror in mirrors:
        mirror.start(1)
        mirror.submit(saved(1))
    until(lambda: len(begun) == 2)
    waited: list[float] = []
    asked: list[float] = []
    for mirror in mirrors:
        join = mirror._thread.join

        def timed(seconds: float, join: Callable[[float], None] = join) -> None:
            asked.append(seconds)
            began = time.monotonic()
            join(seconds)
            waited.append(time.monotonic() - began)

        mirror._thread.join = timed  # type: ignore[assignment, method-assign]
    finish_all(mirrors, 3.0)
    assert waited[0] > 0.5 and waited[1] < 0.5 and asked[0] <= 1.0 and "mirror behind" in caplog.text
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
        def copy(self, place: str, checkpoint: Path, entries: Sequence[FileEntry], require_wanted: Wanted) -> None:
            meeting.wait(5.0)

    def made() -> TierMirror:
        tier: Any = Slow(0, there)
        return single(tier, every=2)

    mirrors = made(), made()
    for mirror in mirrors:
        mirror.submit(saved(1))
        mirror.start(1)
    until(lambda: mirrors[0].state.behind == mirrors[1].state.behind == 0)
    for mirror in mirrors:
        mirror.submit(saved(2))
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
        assert mirror.state.problem.startswith("the copies have ended: KeyError: 'ETag of ***' (test_mirrors.py:")
    assert journal.events == ["mirror-ended"] and asked == []
    assert caplog.text.count("Training goes on, without copies") == 1


def test_a_channel_that_is_cut_ends_the_copies_and_is_said(pair: Pair, journal: FullJournal, asked: list[str]) -> None:
    """Another rank is gone. A block that is run again copies again, so nothing is asked to stop."""
    pair[0].settings = Remote("memory://pair", on_behind="stop")
    ranks: Any = pair[0].ranks
    pair[0].submit(saved(1))
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
    mirror = single(tier, on_behind="stop", ask=asked.append)
    mirror.submit(saved(1))
    mirror.start(1)
    until_ended(mirror._thread)
    assert len(asked) == 1 and asked[0].startswith("list:// gets no more copies: KeyError: 'ETag'")
    close_all([mirror], LIMIT)
