"""What a run says while it trains, and how often."""

from __future__ import annotations

import logging

import pytest

from resume_adapters.core.run.context import RunMessages


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resume_adapters")


def test_saves_are_said_at_most_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 30.0, 59.0, 61.0, 130.0])
    messages = RunMessages(speaks=True, clock=lambda: next(times))
    for step in range(5):
        messages.committed(f"checkpoint-{step}", "epoch 0")
    assert caplog.messages == [
        "checkpoint-0 saved at epoch 0.",
        "checkpoint-3 saved at epoch 0 (2 more since the last such line).",
        "checkpoint-4 saved at epoch 0.",
    ]


def test_a_stop_is_said_once_and_then_where_it_stopped(caplog: pytest.LogCaptureFixture) -> None:
    messages = RunMessages(speaks=True)
    for _ in range(3):
        messages.stopping("SIGTERM")
    messages.stopped(96, "checkpoint-96")
    messages.stopped(0, None)
    messages.halted(7, "look at this", "resume-adapters stop --undo run")
    assert caplog.messages == [
        "SIGTERM: saving at the end of this step ...",
        "stopped at step 96 (checkpoint-96); the same command resumes",
        "stopped at step 0, before anything was saved; the same command starts again",
        "halted at step 7: look at this. To continue it, run `resume-adapters stop --undo run`",
    ]


def test_what_becomes_of_saves_is_said(caplog: pytest.LogCaptureFixture) -> None:
    messages = RunMessages(speaks=True)
    messages.staging("off: 1 MB are written at once")
    messages.waited(0.9)
    messages.waited(3.21)
    assert caplog.messages == [
        'stage="memory" is off: 1 MB are written at once.',
        "waited 3.2 s for the commit of the save before this one.",
    ]


def test_one_rank_speaks_for_all(caplog: pytest.LogCaptureFixture) -> None:
    messages = RunMessages(speaks=False)
    messages.committed("checkpoint-1", "epoch 0")
    messages.stopping("SIGTERM")
    messages.stopped(1, "checkpoint-1")
    messages.halted(1, "look", "resume")
    messages.staging("off")
    messages.waited(9)
    assert not caplog.messages
