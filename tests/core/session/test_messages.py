"""What a run logs for its user, and the settings that it refuses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from resume_adapters.core.checkpoint.checkpoint import Checkpoint, RejectedCheckpoint, ResumeChoice
from resume_adapters.core.requirements import refuse
from resume_adapters.core.run_directory.launches import WastedLaunch
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.session.messages import (
    log_extra,
    log_passed_over,
    log_sibling,
    log_start,
    log_wasted,
)
from resume_adapters.errors import UnsupportedSetting

import miniature
from miniature import Miniature


def test_a_start_says_what_it_takes_and_what_it_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    rejected = (RejectedCheckpoint(Path("run/checkpoint-20"), "model.bin is torn"),)
    with caplog.at_level(logging.INFO, "resume_adapters"):
        log_start(ResumeChoice(Checkpoint(Path("run/checkpoint-10"), 10, None), rejected))
        log_start(ResumeChoice(None, rejected))
    first, second, third = caplog.messages
    assert first == "checkpoint-20 is damaged: model.bin is torn. It was set aside. Resuming from checkpoint-10."
    assert second.startswith("checkpoint-10 was made without this package")
    assert third == "checkpoint-20 is damaged: model.bin is torn. It was set aside. Starting from step 0."


def test_an_unfinished_run_in_a_directory_of_another_time_is_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Once the run has a checkpoint of its own, or was told where to start, it has found what it looks for."""
    earlier = Miniature(tmp_path / "run_2026-01-01")
    earlier.commit(3)
    earlier.run.set_state(RunState.STOPPED, step=3, epoch=0.1)
    earlier.run.close()
    caplog.clear()
    again = Miniature(tmp_path / "run_2026-01-01").run
    log_sibling(again)
    again.close()  # or it is running
    log_sibling(Miniature(tmp_path / "run_2026-01-02", resume="scratch").run)
    assert not caplog.messages
    log_sibling(Miniature(tmp_path / "run_2026-01-03").run)
    assert (
        "run_2026-01-01 differs in its digits alone, and the run in it is not finished: stopped at step" in caplog.text
    )


def test_launches_without_progress_are_said_with_how_each_ended(caplog: pytest.LogCaptureFixture) -> None:
    killed = WastedLaunch(4, 10, RunState.KILLED)
    stopped = WastedLaunch(5, 10, RunState.STOPPED, 10, "SIGTERM")
    with caplog.at_level(logging.INFO, "resume_adapters"):
        log_wasted(())
        log_wasted((killed,))
        log_wasted((killed, stopped))
        log_wasted((stopped,) * 7)
    one, two, many = caplog.records
    assert (one.levelname, two.levelname) == ("INFO", "WARNING")
    assert one.message == "The last launch committed no step: start 4 was killed."
    ends = "start 4 was killed; start 5 stopped at step 10 (SIGTERM)"
    assert two.message == f"The last 2 launches in a row committed no step: {ends}."
    assert many.message.startswith("The last 7 launches in a row committed no step, the last 5 of which: start 5 ")
    assert many.message.count("SIGTERM") == 5


def test_what_somebody_else_has_put_into_a_checkpoint_is_named(caplog: pytest.LogCaptureFixture) -> None:
    log_extra("checkpoint-10", [])
    log_extra("checkpoint-10", ["notes.txt"])
    (said,) = caplog.messages
    assert "notes.txt" in said and "not in the manifest of checkpoint-10" in said


@pytest.mark.parametrize(("step", "said"), [(12, True), (13, False)])
def test_memory_that_ends_at_the_same_step_again_is_said(
    step: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "OutOfMemoryError: CUDA out of memory"
    log_wasted([WastedLaunch(each, 10, RunState.FAILED, at, reason) for each, at in enumerate((12, step))])
    assert ("Each of them ran out of memory at step 12; this launch will too" in caplog.text) == said


def test_the_first_setting_that_is_found_is_refused_with_its_remedy() -> None:
    refuse({"one": False, "two": None, "three": 0, "four": ""})
    with pytest.raises(UnsupportedSetting, match="two is on, so this run cannot be resumed exactly: turn it off"):
        refuse({"one is on": False, "two is on": 1, "three is on": True}, "turn it off")


def test_a_given_path_that_loses_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Miniature(tmp_path)
    job.commit(1)
    job.commit(2)
    job.run.close()
    chosen, other = (tmp_path / miniature.name(step) for step in (2, 1))
    (tmp_path / "link").symlink_to(chosen)
    for given, is_named in (("auto", False), (chosen, False), (tmp_path / "link", False), (other, True)):
        caplog.clear()
        again = Miniature(tmp_path, resume=given)
        log_passed_over(again.run)
        assert (f"Not resuming from the given {other}: " in caplog.text) is is_named
        again.run.close()
    fresh = Miniature(tmp_path / "b")
    log_passed_over(fresh.run)
    assert caplog.text.count("Not resuming") == 1
    fresh.run.close()
