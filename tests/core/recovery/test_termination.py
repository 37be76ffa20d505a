"""SIGTERM in a block waits while the ranks agree."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from resume_adapters.core.recovery.termination import Termination


@pytest.fixture
def received() -> Iterator[list[int]]:
    """What a handler of the program has received."""
    found: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        found.append(number)

    before = signal.signal(signal.SIGTERM, handle)
    yield found
    assert signal.getsignal(signal.SIGTERM) == handle, "it was not restored"
    signal.signal(signal.SIGTERM, before)


def test_it_comes_at_once_where_nothing_has_failed(received: list[int]) -> None:
    termination = Termination()
    termination.release()
    termination.arm()
    termination.arm()
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_it_comes_later_where_the_ranks_are_agreeing(received: list[int]) -> None:
    termination = Termination()
    termination.arm()
    termination.defer()
    os.kill(os.getpid(), signal.SIGTERM)
    assert not received
    termination.release()
    assert received == [signal.SIGTERM]
    termination.arm()
    termination.defer()
    termination.release()
    assert received == [signal.SIGTERM], "it came once"


def test_another_thread_leaves_the_handler_alone(received: list[int]) -> None:
    termination = Termination()
    for method in (termination.arm, termination.release):
        thread = threading.Thread(target=method)
        thread.start()
        thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_a_handler_that_was_installed_since_stays(received: list[int]) -> None:
    termination = Termination()
    before = signal.getsignal(signal.SIGTERM)
    termination.arm()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    termination.release()
    assert signal.signal(signal.SIGTERM, before) == signal.SIG_IGN


@pytest.mark.parametrize(("handler", "status"), [(signal.SIG_DFL, -signal.SIGTERM), (signal.SIG_IGN, 0)])
def test_it_ends_the_process_unless_that_ignores_it(handler: signal.Handlers, status: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, handler)
            Termination().arm()
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        finally:
            os._exit(1)  # nothing that it raises may reach the tests that the parent runs
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
