"""What follows a save that failed: the run ends, or goes on and tries again."""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import KeepAll, KeepLast
from resume_adapters.core.checkpoint.writer import Captured
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run.saver import SaveFailures
from resume_adapters.core.saving.cadence import Cadence
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import FencedOff, NotSerialisable, SaveFailed, Stopped, UnsupportedSetting

import miniature
from faults import Disturbed, refuse
from launch import Server
from miniature import Miniature, MiniatureContent
from plain_torch import Launch, Still, manifest, reasons

JOB = Path(__file__).parents[1] / "job.py"


class Failing(Disturbed):
    """A disk that refuses some kind of work, once for each time that is allowed.

    Attributes:
        writes: how many writes of a rank's state are refused; that is in a save, before the commit.
        syncs: how many times the framework's file is not forced onto the disk; that is in the commit.
        number: the errno.
    """

    def __init__(self, number: int = errno.EIO) -> None:
        super().__init__(self._look)
        self.number, self.writes, self.syncs = number, 0, 0

    def _look(self, operation: str, path: Path) -> None:
        if operation == "write" and path.name == "rank-00000.json" and self.writes:
            self.writes -= 1
            refuse(self.number)
        if operation == "sync" and path.name in ("model.bin", "weights.pt") and self.syncs:
            self.syncs -= 1
            refuse(self.number)


class Slow(Failing):
    """The same, and a commit waits until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def _look(self, operation: str, path: Path) -> None:
        if operation == "sync" and path.name == "file":
            assert self.released.wait(120)
            path = path.with_name("model.bin")
        super()._look(operation, path)


def start(directory: Path, storage: Failing, **options: Any) -> Miniature:
    return Miniature(directory, **{"storage": storage, "on_save_error": "continue", **options})


def save(job: Miniature, step: int, **options: Any) -> bool:
    content = MiniatureContent(job.run, f"state at {step}", step, None, None)
    return job.run.saver.save(f"checkpoint-{step}", step, content, **options)


@pytest.mark.parametrize("where", ["writes", "syncs"])
def test_a_run_goes_on_after_a_save_that_failed_and_the_next_one_is_committed(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Failing()
    job = start(tmp_path, storage)
    job.commit(10)
    setattr(storage, where, 1)
    with caplog.at_level(logging.ERROR):
        assert save(job, 20) == (where == "syncs")
        job.run.saver.drain()
    assert "Input/output error" in caplog.text and "Training continues" in caplog.text
    assert job.run.last_commit == 10
    assert save(job, 30)
    job.run.close()
    assert job.committed() == {"checkpoint-10": 10, "checkpoint-30": 30}
    assert not miniature.leftovers(tmp_path)


@pytest.mark.parametrize("where", ["writes", "syncs"])
def test_three_failures_in_a_row_end_the_run(tmp_path: Path, where: str) -> None:
    """A commit in between begins to count anew; whether a write or a commit failed counts alike."""
    storage = Failing()
    job = start(tmp_path, storage)
    setattr(storage, where, 2)
    for step in (10, 20, 30):
        save(job, step)
        job.run.saver.drain()
    assert job.committed() == {"checkpoint-30": 30}
    setattr(storage, where, 3)
    with pytest.raises(SaveFailed, match="checkpoint-60"):
        for step in (40, 50, 60):
            save(job, step)
            job.run.saver.drain()
    job.run.close()
    assert job.committed() == {"checkpoint-30": 30}


def test_the_last_save_of_a_run_raises(tmp_path: Path) -> None:
    storage = Failing()
    job = start(tmp_path, storage)
    storage.writes = 1
    with pytest.raises(SaveFailed):
        save(job, 10, is_last=True)
    job.run.close()


def test_what_would_fail_again_raises(tmp_path: Path) -> None:
    class Unserialisable(MiniatureContent):
        def capture(self) -> Captured:
            return replace(super().capture(), rank_state=object())

    job = start(tmp_path / "one", Failing())
    with pytest.raises(NotSerialisable):
        job.run.saver.save("checkpoint-10", 10, Unserialisable(job.run, "text", 10, None, None))
    job.run.close()
    earlier = start(tmp_path / "two", Failing())
    Miniature(tmp_path / "two")
    with pytest.raises(FencedOff):
        save(earlier, 10)
    earlier.run.close()


def test_by_default_a_save_that_fails_ends_the_run(tmp_path: Path) -> None:
    storage = Failing()
    job = start(tmp_path, storage, on_save_error="stop")
    storage.writes = 1
    with pytest.raises(SaveFailed):
        save(job, 10)
    job.run.close()
    with pytest.raises(UnsupportedSetting, match="on_save_error='go on'"):
        SaveFailures(SingleProcess(), "go on")  # type: ignore[arg-type]


@pytest.mark.parametrize("on_save_error", ["stop", "continue"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_pruned_and_the_save_tried_once_more(tmp_path: Path, number: int, on_save_error: str) -> None:
    storage = Failing(number)
    job = start(tmp_path, storage, keep=KeepAll(), on_save_error=on_save_error)
    for step in (10, 20):
        job.commit(step)
    job.run.pruner.keep = KeepLast(1)
    storage.writes = 1
    assert save(job, 30)
    job.run.close()
    assert job.committed() == {"checkpoint-30": 30}


def test_a_full_disk_that_stays_full_is_one_failure(tmp_path: Path) -> None:
    storage = Failing(errno.ENOSPC)
    job = start(tmp_path, storage)
    storage.writes = 4
    assert [save(job, step) for step in (10, 20, 30)] == [False, False, True]
    job.run.close()


def test_a_run_that_was_fenced_off_while_it_pruned_a_full_disk_ends(tmp_path: Path) -> None:
    storage = Failing(errno.ENOSPC)
    job = start(tmp_path, storage)
    later: list[Miniature] = []

    class Content(MiniatureContent):
        def capture(self) -> Captured:
            refuse(errno.ENOSPC)

    prune = job.run.saver.engine.submit_prune

    def taken_over(group: StorageGroup, best: str | None) -> None:
        later.append(Miniature(tmp_path))
        prune(group, best)

    job.run.saver.engine.submit_prune = taken_over  # type: ignore[method-assign]
    with pytest.raises(FencedOff):
        job.run.saver.save("checkpoint-10", 10, Content(job.run, "text", 10, None, None))
    job.run.close()


def test_a_save_by_time_that_failed_is_due_again_an_interval_later(tmp_path: Path) -> None:
    storage = Failing()
    cadence = Cadence(timedelta(hours=1))
    job = start(tmp_path, storage, cadence=cadence)
    job.run.begin(0, 0.0)
    cadence.start(time.monotonic() - 3601)
    assert job.run.steps.end_step(1, 0.0).save
    storage.writes = 1
    assert not save(job, 1)
    assert not job.run.steps.end_step(2, 0.0).save
    job.run.close()


# ---- A training loop


def launch(directory: Path, storage: Failing, **options: Any) -> Launch:
    return Launch(directory, storage=storage, on_save_error="continue", **options)


@pytest.mark.parametrize("where", ["writes", "syncs"])
def test_a_loop_that_cannot_save_for_a_while_ends_as_if_it_could(tmp_path: Path, where: str) -> None:
    expected = Launch(tmp_path / "never")()
    storage = Failing()
    setattr(storage, where, 2)
    run = launch(tmp_path / "run", storage)()
    assert (run.trace, run.end) == (expected.trace, expected.end)
    assert set(reasons(tmp_path / "run")) == {12, 16, 18}


def test_a_stop_right_after_a_save_whose_commit_fails_saves_that_step_again(tmp_path: Path) -> None:
    """As in the evaluation that follows a save: no step is between them."""
    storage, still = Slow(), Still()
    run = ResumableRun(tmp_path, RunOptions(on_save_error="continue"), ranks=SingleProcess(), storage=storage)
    session = still.session(run)
    storage.syncs = 1
    session.save("checkpoint-4", 4, still)
    run.flag.request("SIGTERM")
    storage.released.set()
    assert session.ask_to_stop() and run.last_commit is None
    session.save("checkpoint-4", 4, still)
    with pytest.raises(Stopped):
        run.leave(4, 1.0)
    assert miniature.committed(tmp_path) == {"checkpoint-4": 4}


@pytest.mark.parametrize("where", ["writes", "syncs"])
def test_a_stop_saves_though_the_save_before_it_failed(tmp_path: Path, where: str) -> None:
    storage = Failing()

    def die(of: Launch) -> None:
        if len(of.trace) == 4:
            setattr(storage, where, 1)
        if len(of.trace) == (5 if where == "syncs" else 4):
            of.run.flag.request("SIGTERM")

    with pytest.raises(Stopped):
        launch(tmp_path, storage, die=die)()
    saved = reasons(tmp_path)
    assert list(saved.values()) == ["stop: SIGTERM"]


def test_the_last_step_is_saved_again_where_its_commit_failed(tmp_path: Path) -> None:
    storage = Failing()

    def die(of: Launch) -> None:
        storage.syncs = int(len(of.trace) == 18)

    launch(tmp_path, storage, die=die, save_every=18)()
    assert reasons(tmp_path) == {18: "finished"}


def test_a_save_that_ends_the_run_leaves_the_status_failed(tmp_path: Path) -> None:
    """Also in a script that does not say `with run:`."""
    storage = Failing()
    storage.writes = 1
    run = Launch(tmp_path, storage=storage)
    data = run.loader()
    with pytest.raises(SaveFailed):
        for _ in run.loop.epochs(3):
            for batch in run.loop.batches(data):
                run._step(batch)
    status = json.loads((tmp_path / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["step"]) == ("failed", 4)
    assert "Input/output error" in status["reason"]
    run.run.close()


def test_a_disk_that_fails_altogether_does_not_hide_the_error_of_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Failing):
        dead = False

        def _look(self, operation: str, path: Path) -> None:
            if self.dead and operation == "sync" and (path.name == "weights.pt" or "status" in path.name):
                refuse(errno.EIO)

    storage = Broken()

    def die(of: Launch) -> None:
        if len(of.trace) == 5:
            raise ZeroDivisionError("the script is wrong")
        storage.dead = len(of.trace) >= 3

    with pytest.raises(ZeroDivisionError):
        Launch(tmp_path, die=die, storage=storage)()
    assert "A commit in flight failed too" in caplog.text
    assert "The status of the run, which is failed, could not be written" in caplog.text


def test_the_best_whose_save_failed_does_not_unprotect_the_one_before(tmp_path: Path) -> None:
    storage = Failing()
    values = {3: 2.0, 7: 1.0}

    def die(of: Launch) -> None:
        if of.loop.global_step in values:
            storage.writes = int(of.loop.global_step == 7)
            of.loop.best(values[of.loop.global_step])

    launch(tmp_path, storage, die=die, save_every=100, keep=KeepLast(1))()
    assert set(reasons(tmp_path)) == {3, 18}
    assert manifest(tmp_path / "checkpoint-18")["best"] == "checkpoint-3"
    again = launch(tmp_path, storage, epochs=4, keep=KeepLast(1))()
    assert set(reasons(tmp_path)) == {3, 24}
    assert manifest(tmp_path / "checkpoint-24")["best"] == "checkpoint-3"
    assert again.loop.global_step == 24


# ---- Several ranks


@pytest.mark.parametrize("where", ["write", "commit"])
def test_all_ranks_go_on_where_the_disk_of_one_fails(tmp_path: Path, server: Server, where: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    server.start(JOB, ["go_on", str(tmp_path / "run"), where], work, 2, {}).wait().require_success()
    results = [json.loads((work / f"result.{rank}").read_text()) for rank in range(2)]
    assert [each["saved"] for each in results] == [[where == "commit", True]] * 2
    assert results[0]["committed"] == {"checkpoint-10": 10, "checkpoint-30": 30}
