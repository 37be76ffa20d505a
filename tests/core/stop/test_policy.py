"""A stop: signals only set a flag, and all ranks see it at the same step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.stop import signals
from resume_adapters.core.stop.policy import SIGNALS, StopOn
from resume_adapters.core.stop.signals import StopFlag
from resume_adapters.core.stop.vote import StopVote, common_reason

from launch import Server

JOB = Path(__file__).parents[1] / "job.py"


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    flag = StopFlag(StopOn())
    flag.install()
    yield flag
    flag.uninstall()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag_and_nothing_else(flag: StopFlag, number: signal.Signals) -> None:
    assert flag.reason is None
    os.kill(os.getpid(), number)
    assert flag.reason == number.name
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.reason == number.name, "the first reason stays"


def in_a_child(work: Callable[[], int]) -> int:
    """Run ``work`` in a forked child, and return the exit status, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        try:
            os._exit(work())
        finally:
            os._exit(1)  # nothing that it raises may reach the tests that the parent runs
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child did not end")


def end_by(number: signal.Signals) -> int:
    os.kill(os.getpid(), number)
    time.sleep(0.0 if number is signal.SIGWINCH else 60.0)
    return 0


def test_a_forked_child_has_the_previous_handlers(flag: StopFlag) -> None:
    """As a worker of multiprocessing.Pool does, which Pool.terminate() ends by SIGTERM."""
    assert in_a_child(lambda: end_by(signal.SIGTERM)) == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.reason == "SIGTERM", "in the parent they stay"


def inherit_and_end_by(number: signal.Signals) -> int:
    """Be a child that has inherited the handlers, and has not restored the previous ones yet."""
    StopFlag(StopOn(signals=(number,))).install()
    signals._HANDLERS._process = -1
    return end_by(number)


@pytest.mark.parametrize("previous", [signal.SIG_DFL, signal.SIG_IGN])
def test_where_none_was_installed_before_a_signal_has_the_effect_that_the_system_gives_it(previous: Any) -> None:
    before = signal.signal(signal.SIGWINCH, previous)  # which has none; one that ends a process ends a child here
    assert inherit_and_end_by(signal.SIGWINCH) == 0
    assert signal.getsignal(signal.SIGWINCH) == previous
    signal.signal(signal.SIGWINCH, before)
    assert in_a_child(lambda: inherit_and_end_by(signal.SIGTERM)) == -signal.SIGTERM


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_signal_reaches_every_run_whatever_order_they_close_in(order: tuple[int, ...]) -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    flags = [StopFlag(StopOn()) for _ in order]
    for each in flags:
        each.install()
    closed = []
    for position in order:
        os.kill(os.getpid(), signal.SIGTERM)
        assert [each.reason for each in flags if each not in closed] == ["SIGTERM"] * (len(flags) - len(closed))
        flags[position].uninstall()
        closed.append(flags[position])
        for each in flags:
            each.reason = None
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_handler_that_came_later_stays_and_may_forward_to_one_of_a_closed_run(flag: StopFlag) -> None:
    """As a framework does that installs its own, calls the previous one in it and restores it at its end."""
    heard: list[str] = []
    flag.uninstall()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append("before"))
    flag.install()
    ours: Any = signal.getsignal(signal.SIGUSR1)

    def later(number: int, frame: Any) -> None:
        heard.append("later")
        signal.signal(number, ours)
        ours(number, frame)

    signal.signal(signal.SIGUSR1, later)
    flag.uninstall()
    assert signal.getsignal(signal.SIGUSR1) is later
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (heard, flag.reason) == (["later", "before"], None)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("order", [1, -1])
def test_a_forked_child_of_several_runs_has_the_handlers_of_before_the_first(flag: StopFlag, order: int) -> None:
    later = [StopFlag(StopOn()) for _ in range(8)]
    for each in later:
        each.install()
    assert in_a_child(lambda: end_by(signal.SIGTERM)) == -signal.SIGTERM
    for each in later[::order]:
        each.uninstall()


def test_the_previous_handlers_are_put_back() -> None:
    def own(number: int, frame: Any) -> None:
        pass

    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGUSR1, own)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    flag = StopFlag(StopOn())
    flag.install()
    flag.install()  # a second time changes nothing
    assert signal.getsignal(signal.SIGUSR1) != own
    flag.uninstall()
    flag.uninstall()
    assert signal.getsignal(signal.SIGUSR1) is own
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    for number, handler in before.items():
        signal.signal(number, handler)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_only_the_signals_that_were_named_are_taken_over() -> None:
    before = signal.getsignal(signal.SIGINT)
    flag = StopFlag(StopOn(signals=(signal.SIGUSR1,)))
    flag.install()
    assert signal.getsignal(signal.SIGINT) is before
    flag.uninstall()


@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM", "another rank"])
def test_a_second_sigint_leaves_at_once_whatever_came_first(flag: StopFlag, first: str) -> None:
    if first == "another rank":
        flag.request("another rank was asked to stop")
    elif first == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.reason is not None
    with pytest.raises(KeyboardInterrupt, match="second SIGINT"):
        os.kill(os.getpid(), signal.SIGINT)


def test_in_an_interactive_interpreter_sigint_is_left_alone() -> None:
    program = (
        "import signal\n"
        "from resume_adapters.core.stop.policy import StopOn\n"
        "from resume_adapters.core.stop.signals import StopFlag\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "flag = StopFlag(StopOn()); flag.install()\n"
        "print(signal.getsignal(signal.SIGINT) is before, signal.getsignal(signal.SIGTERM) != signal.SIG_DFL)\n"
    )
    for arguments, expected in (["-i"], "True True"), ([], "False True"):
        done = subprocess.run(
            [sys.executable, *arguments, "-"] if not arguments else [sys.executable, "-i", "-c", program],
            input="" if arguments else program,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert expected in done.stdout, done


def test_off_the_main_thread_no_signal_is_taken_over() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    thread = threading.Thread(target=StopFlag(StopOn()).install)
    thread.start()
    thread.join()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_a_halt_of_another_rank_is_one_here_and_counts_for_more_than_a_stop() -> None:
    elsewhere, flag, halted = (StopFlag(StopOn()) for _ in range(3))
    flag.apply(elsewhere.level)
    assert flag.reason is None
    elsewhere.request("SIGTERM")
    flag.apply(elsewhere.level)
    assert (flag.reason, flag.halted) == ("another rank was asked to stop", False)
    elsewhere.halt("look at the loss")
    flag.reason = "SIGUSR1"
    flag.apply(elsewhere.level)
    assert (flag.reason, flag.halted, flag.level) == ("another rank was asked to stop", True, elsewhere.level)
    halted.halt("look at the data")
    halted.halt("look at the loss too")
    halted.apply(elsewhere.level)
    assert halted.reason == "look at the data", "a rank that was asked itself knows why"


def test_alone_the_flag_is_the_agreement_and_stays() -> None:
    flag = StopFlag(StopOn())
    agreement = StopVote(SingleProcess(), flag)
    assert not agreement.poll()
    flag.request("walltime")
    assert [agreement.poll() for _ in range(3)] == [True, True, True]


def test_a_signal_after_this_rank_has_answered_counts_at_the_next_vote() -> None:
    """The other ranks have only the answer: a rank that left by itself would wait for them for ever."""
    flag, other = StopFlag(StopOn()), StopFlag(StopOn())

    class SignalledAfterwards(SingleProcess):
        def gather(self, value: Any) -> list[Any]:
            flag.halt("look at the loss")
            return [value, value if isinstance(value, int) else (other.level, other.reason)]

        def new_channel(self, timeout: timedelta | None = None) -> SignalledAfterwards:
            return self

    ranks = SignalledAfterwards()
    agreement = StopVote(ranks, flag)
    assert not agreement.agree_now()
    assert agreement.agree_now()
    flag = StopFlag(StopOn())
    flag.request("SIGTERM")
    assert common_reason(ranks, flag) == "SIGTERM"


STOPS = [[3, 4], [0, None], [None, None, 2], [None, None]]
FURTHER = [[None, 3], [4, 3], [5, 5, 5], [2, 3, None], [7, None]]


@pytest.mark.parametrize(
    "asked", [*STOPS, *(pytest.param(each, marks=pytest.mark.thorough) for each in FURTHER)], ids=str
)
def test_all_ranks_see_a_stop_at_the_same_step(server: Server, tmp_path: Path, asked: list[int | None]) -> None:
    """A real SIGTERM reaches some ranks, at different steps or never; every rank leaves at the same one."""
    ranks = len(asked)
    server.start(JOB, ["agree", json.dumps(asked)], tmp_path, ranks, {}).wait().require_success()
    results = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(ranks)]
    steps = {result["stopped"] for result in results}
    assert len(steps) == 1
    earliest = min((step for step in asked if step is not None), default=None)
    expected = None if earliest is None or earliest == 7 else earliest + 1
    assert steps == {expected}
    if expected is not None:
        reasons = [result["reason"] for result in results]
        assert "SIGTERM" in reasons
        assert set(reasons) <= {"SIGTERM", "another rank was asked to stop"}
        assert all(result["still"] for result in results), "once agreed it stays agreed"


def test_short_steps_are_not_all_voted_on_and_the_ranks_still_agree(server: Server, tmp_path: Path) -> None:
    """Rank one is slower now and then; every rank votes as often and leaves at the same step."""
    server.start(JOB, ["hurry"], tmp_path, 2, {}).wait().require_success()
    results = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2)]
    assert results[0] == results[1]
    assert results[0]["stopped"] > 300
    assert results[0]["votes"] < results[0]["stopped"] / 3
    assert results[0]["stopped"] <= 300 + 2 * 8
