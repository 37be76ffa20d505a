"""Batches that a script counts by itself: the run's count goes on, and a count that begins again is noticed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from resume_adapters.core.loop.loop import ResumableLoop
from resume_adapters.core.loop.windows import StepWindows, TakenAhead
from resume_adapters.errors import UnsupportedSetting

from plain_torch import Killed, Launch, killed_after

Numbered = Callable[[ResumableLoop, Any], Iterable[tuple[int, Any]]]


def by_run(loop: ResumableLoop, loader: Any) -> Iterable[tuple[int, Any]]:
    return loop.enumerate(loader)


def by_builtin(loop: ResumableLoop, loader: Any) -> Iterable[tuple[int, Any]]:
    return enumerate(loop.batches(loader))


def logged(batches: Iterable[Any]) -> Iterable[Any]:
    """Hand batches on, as a logger of metrics does."""
    count = len(batches)  # type: ignore[arg-type]
    for batch in batches:
        yield batch
        print("one of", count)


class Counting(Launch):
    """Accumulates over windows that the script counts, as many do: of 3 batches, but for the first of an epoch."""

    numbered: Numbered

    def _plain(self, data: Any) -> None:
        framework = self.framework
        for _ in self._epochs():
            for index, batch in self.numbered(self.loop, data):
                # Step with this batch, or only accumulate.
                framework.accumulation = framework._held + 1 if index % 3 == 0 else 1000
                self._step(batch)
            framework.optimizer.zero_grad()
            framework._held = 0


def counting(directory: Path, numbered: Numbered, *rest: Any, **options: Any) -> Counting:
    launch = Counting(directory, *rest, **{"save_every": 2, "accumulation": 3, **options})
    launch.numbered = numbered
    launch.loader = lambda: DataLoader(range(40), 4, shuffle=True)  # type: ignore[method-assign]
    return launch


@pytest.mark.parametrize("after", [9, 16, 22])
def test_a_window_that_the_run_counts_goes_on(tmp_path: Path, after: int) -> None:
    whole = counting(tmp_path / "whole", by_run)()
    with pytest.raises(Killed):
        counting(tmp_path / "killed", by_run, killed_after(after))()
    rest = counting(tmp_path / "killed", by_run)()
    assert rest.end == whole.end and rest.trace == whole.trace[-len(rest.trace) :]


def test_a_window_that_begins_again_is_refused_at_its_step(tmp_path: Path) -> None:
    """Saved after 11 batches of 10 an epoch: in the second, between two windows."""
    with pytest.raises(Killed):
        counting(tmp_path, by_builtin, killed_after(15))()
    launch = counting(tmp_path, by_builtin)
    with pytest.raises(UnsupportedSetting, match=r"for index, batch in run\.enumerate\(loader\):"):
        launch()
    assert len(launch.trace) == 0


def test_an_accumulation_that_this_launch_changes_is_not_taken_for_a_count_of_the_script(tmp_path: Path) -> None:
    """Two batches of 4 a step until the kill, between two steps of the second epoch; then one batch of 8."""
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(9), data="elastic", accumulation=2, save_every=1)()
    rest = Launch(tmp_path, data="elastic", batch=8)()
    assert rest.loop.global_step == 9 and len(rest.trace) == 5


def add(windows: StepWindows, *lengths: int) -> list[bool]:
    ends = [at == length for length in lengths for at in range(1, length + 1)]
    return [windows.add(1, has_stepped=each, is_last=False) for each in ends]


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [([1, 4, 4], 4, False), ([1, 4, 4], 2, True), ([4, 4], 5, True), ([2, 4, 3], 1, False), ([1, 1, 1], 2, False)],
)
def test_windows_that_were_alike_stay_so(before: list[int], after: int, refused: bool) -> None:
    """The first of an epoch does not count, and of windows of one batch nothing follows."""
    former, resumed = StepWindows(), StepWindows()
    assert not any(add(former, *before))
    resumed.resume(former.lengths())
    assert any(add(resumed, after)) == refused
    assert not any(add(resumed, 7)), "only the first tells"


def test_a_window_that_ends_with_its_pass_is_short_and_one_that_is_open_says_nothing() -> None:
    windows = StepWindows()
    windows.resume([4])
    assert not windows.add(1, has_stepped=True, is_last=True) and windows.lengths() == [4]
    windows.add(1, has_stepped=False, is_last=False)
    assert windows.lengths() == []
    windows.begin_epoch()
    assert not windows.add(1, has_stepped=True, is_last=False)


# ---- Passes that are cut short


class Cutting(Launch):
    """Trains on the first batches of each pass."""

    cut: Callable[[ResumableLoop, Any], Iterator[Any]]

    def _plain(self, data: Any) -> None:
        for _ in self._epochs():
            for batch in self.cut(self.loop, data):
                self._step(batch)


def limited(loop: ResumableLoop, data: Any) -> Iterator[Any]:
    return loop.batches(data, limit=5)


def sliced(loop: ResumableLoop, data: Any) -> Iterator[Any]:
    return itertools.islice(loop.batches(data), 5)


def cutting(directory: Path, cut: Callable[[ResumableLoop, Any], Iterator[Any]], *rest: Any, **options: Any) -> Cutting:
    launch = Cutting(directory, *rest, **{"save_every": 2, "epochs": 4, **options})
    launch.cut = cut
    generator = torch.Generator().manual_seed(1)
    data = DataLoader(range(40), 4, shuffle=True, generator=generator)
    launch.loader = lambda: data  # type: ignore[method-assign]
    return launch


@pytest.mark.thorough
def test_a_limit_counts_the_batches_of_earlier_launches(tmp_path: Path) -> None:
    """Some of these saves are within the last batch that the limit lets through."""
    whole = cutting(tmp_path / "whole", limited)()
    expected = cutting(tmp_path / "sliced", sliced)()
    assert (whole.trace, whole.end) == (expected.trace, expected.end) and len(whole.trace) == 20
    for save_every, after in itertools.product([1, 2, 5], [6, 11, 16]):
        directory = tmp_path / f"{save_every}-{after}"
        with pytest.raises(Killed):
            cutting(directory, limited, killed_after(after), save_every=save_every)()
        rest = cutting(directory, limited)()
        assert rest.end == whole.end and rest.trace == whole.trace[-len(rest.trace) :], directory.name
        assert rest.framework.skipped_passes == 0


def test_a_resumed_pass_that_goes_on_beyond_the_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        cutting(tmp_path, sliced, killed_after(14))()
    launch = cutting(tmp_path, sliced)
    with pytest.raises(UnsupportedSetting, match=r"past 5 batches, where (.|\n)*batches\(loader, limit"):
        launch()
    assert len(launch.trace) == 3, "the rest of the pass"


# ---- What is said at the first save


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (lambda loop, data: (batch for _, batch in enumerate(loop.batches(data))), "run.enumerate(loader)"),
        (lambda loop, data: (each for _, (each,) in enumerate(zip(loop.batches(data)))), "run.enumerate("),
        (lambda loop, data: (batch for _, batch in enumerate(logged(loop.batches(data)))), "run.enumerate("),
        (
            lambda loop, data: (each for _, each in zip(range(99), loop.batches(data), strict=False)),
            "range() and count()",
        ),
        (lambda loop, data: (each for each, _ in zip(loop.batches(data), itertools.count(), strict=False)), "count()"),
        (sliced, "run.batches(loader, limit=...)"),
        (lambda loop, data: (each for _, each in itertools.islice(loop.enumerate(data), 5)), "limit=..."),
        (limited, ""),
        (lambda loop, data: (batch for _, batch in loop.enumerate(data)), ""),
    ],
    ids=[
        "enumerate",
        "enumerate of zip",
        "enumerate of a generator",
        "range",
        "count",
        "islice",
        "islice of run.enumerate",
        "limit",
        "run.enumerate",
    ],
)
def test_a_count_that_begins_again_is_said(
    tmp_path: Path, count: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "resume_adapters"):
        cutting(tmp_path, count, epochs=1)()
    found = [message for message in caplog.messages if "MISSING" in message]
    assert [said in message for message in found] == ([True] if said else [])


class ByRange(Launch):
    """Takes batches by ``next()`` in a loop of the script within each epoch."""

    kind = ""

    def _plain(self, data: Any) -> None:
        start = self.loop.resume(data) if self.kind == "external" else None
        for _ in self.loop.epochs(1) if start is None else range(start.epoch, 1):
            batches = iter(self.loop.batches(data)) if start is None else iter(data)
            getattr(self, f"_{self.kind}")(batches, len(data), start)

    def _plainly(self, batches: Iterator[Any], count: int, _: Any) -> None:
        for _ in range(count):
            self._step(next(batches))

    def _external(self, batches: Iterator[Any], count: int, start: Any) -> None:
        for _ in range(start.batches, count):
            self._step(next(batches))

    def _one_by_one(self, batches: Iterator[Any], count: int, _: Any) -> None:
        for _ in range(count // 3):
            for _ in range(3):
                batch = next(batches)
                self._step(batch)

    def _in_parts(self, batches: Iterator[Any], count: int, _: Any) -> None:
        for batch in batches:
            for _ in range(1):
                self._step(batch)

    def _from_a_variable(self, batches: Iterator[Any], count: int, _: Any) -> None:
        first = self.loop.resume().batches
        for _ in enumerate(range(first, count)):
            self._step(next(batches))

    def _from_another(self, batches: Iterator[Any], count: int, _: Any) -> None:
        zero = 0
        for _ in range(zero, count):
            self._step(next(batches))

    def _from_one(self, batches: Iterator[Any], count: int, _: Any) -> None:
        for _ in enumerate(range(1, count + 1)):
            self._step(next(batches))

    def _from_the_run(self, batches: Iterator[Any], count: int, _: Any) -> None:
        for _ in range(self.loop.resume().batches, count):
            self._step(next(batches))


@pytest.mark.parametrize(
    ("kind", "is_said"),
    [
        *(("plainly", True), ("one_by_one", True), ("from_one", True), ("from_another", True)),
        *(("in_parts", False), ("from_the_run", False), ("from_a_variable", False), ("external", False)),
    ],
)
def test_a_loop_over_a_range_within_an_epoch_is_said(
    tmp_path: Path, kind: str, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    launch = ByRange(tmp_path)
    launch.kind = kind
    with caplog.at_level("INFO", "resume_adapters"):
        launch()
    found = [message for message in caplog.messages if "counters MISSING" in message]
    assert ["range() and count() start at 0" in message for message in found] == ([True] if is_said else [])


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("handed", [iter, logged], ids=["itself", "through a generator"])
def test_a_count_that_begins_again_is_said_in_a_loop_that_cannot_be_wrapped(
    tmp_path: Path, handed: Any, is_counted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    launch = Launch(tmp_path)
    data = launch.loader()
    launch.loop.resume(data)
    with caplog.at_level("INFO", "resume_adapters"):
        for each in enumerate(handed(data)) if is_counted else handed(data):
            launch._step(each[1] if is_counted else each)
        launch.loop.finish()
    found = [message for message in caplog.messages if "counters MISSING" in message]
    assert ["start at run.resume().batches" in message for message in found] == ([True] if is_counted else [])


def test_data_that_come_from_no_loader_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch = Launch(tmp_path)
    with caplog.at_level("INFO", "resume_adapters"), launch.loop:
        for _ in launch.loop.epochs(1):
            for batch in torch.arange(12.0).reshape(3, 4):
                launch._step(batch)
    found = [message for message in caplog.messages if message.startswith("data")]
    assert len(found) == 1 and "MISSING: no loader was given to run.batches()" in found[0]


TAKES = {
    "one by one": ([1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0]),
    "pairs": ([2, 2, 2], [None, 0, 0], [0, 0]),
    "as many as it likes": ([3, 2, 4, 1], [None, None, 0, 0], [0, 0]),
    "one ahead": ([2, 1, 1, 1, 1, 0], [None, None, None, 1, 1, 0], [1, 1]),
    "two ahead, of pairs": ([4, 2, 2, 2, 2, 0], [None, None, None, 2, 2, 0], [2, 2]),
    "one ahead, in a short pass": ([2, 1, 0], [None, 1, 0], [1, 1]),
    "all at once": ([5, 0, 0, 0, 0], [None, 3, 2, 1, 0], [1, 0]),
}


@pytest.mark.parametrize("case", TAKES)
def test_batches_that_are_taken_ahead_of_their_step(case: str) -> None:
    """While it is not known whether there are any, nothing can be saved."""
    takes, left, habit = TAKES[case]
    ahead, total = TakenAhead(), sum(takes)
    for number, taken in enumerate(takes):
        total -= taken
        ahead.add(taken, is_last=total == 0)
        assert (ahead.left if ahead.is_sure else None) == left[number], f"after step {number}"
        assert ahead.must_wait == (left[number] is None or (left[number] > 0 and case == "all at once"))
    assert ahead.habit == habit
    resumed = TakenAhead(habit)
    resumed.begin_pass()
    used = [resumed.add(taken, is_last=False) for taken in takes]
    assert sum(used) == sum(takes) and resumed.is_sure and resumed.left == 0
    assert case == "as many as it likes" or len(set(used)) == 1, "each step uses as many as another"


def test_a_script_that_takes_no_batch_ahead_any_more() -> None:
    ahead = TakenAhead([1, 1])
    assert [ahead.add(each, is_last=False) for each in (1, 1)] == [1, 1] and ahead.left == 0
    assert [ahead.add(each, is_last=False) for each in (3, 2)] == [3, 2] and ahead.left == 0
    assert not ahead.is_prefetching
