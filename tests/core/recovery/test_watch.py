"""A thread that waits is led out when a peer fails, whatever it waits for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from resume_adapters.core.recovery.attempt import LeftByPeer
from resume_adapters.core.recovery.watch import THREAD_NAME, Interruption, PeerWatch, limited
from waiting import LIMIT, until, until_ended


class Peer:
    """A peer that fails when it is told to, and what a watch does then."""

    def __init__(self) -> None:
        self.has_failed = False
        self.calls: list[str] = []
        self.watch = PeerWatch(
            lambda: self.has_failed,
            lambda: self.calls.append("leave"),
            lambda: self.calls.append("cut"),
            self.abandon,
            2 * LIMIT,
        )

    def abandon(self, doing: str, seconds: float) -> None:
        self.calls.append(doing)

    def fail(self, seconds: float = 0.05) -> None:
        def fail() -> None:
            self.has_failed = True

        threading.Timer(seconds, fail).start()

    def wait(self, wait: Callable[[], object], grace: float = 0.05) -> float:
        """Fail while somebody waits; return how long it waits."""
        self.watch.start()
        self.fail()
        began = time.monotonic()
        with pytest.raises(LeftByPeer), self.watch.leading_out(grace):
            wait()
        seconds = time.monotonic() - began
        self.watch.close()
        return seconds


def loop() -> None:
    ends = time.monotonic() + LIMIT
    while time.monotonic() < ends:
        time.sleep(0.01)


WAITS: list[Callable[[], object]] = [
    lambda: time.sleep(LIMIT),
    lambda: threading.Event().wait(LIMIT),
    lambda: threading.Thread(target=time.sleep, args=(LIMIT,), daemon=True).run(),
    loop,
]


@pytest.mark.parametrize("wait", WAITS)
def test_the_main_thread_is_interrupted_in_what_it_waits_for(wait: Callable[[], object]) -> None:
    before, peer = signal.getsignal(signal.SIGURG), Peer()
    assert peer.wait(wait) < LIMIT / 2
    assert peer.calls[0] == "leave" and set(peer.calls[1:]) == {"cut"}
    assert signal.getsignal(signal.SIGURG) == before
    assert not [each for each in threading.enumerate() if each.name == THREAD_NAME]
    signal.raise_signal(signal.SIGURG)  # one that comes late changes nothing


def test_another_thread_than_the_main_one_is_not_interrupted() -> None:
    found: list[str] = []

    def work() -> None:
        interruption = Interruption()
        with interruption.allowed():
            interruption.interrupt()
            found.append("done")

    thread = threading.Thread(target=work)
    thread.start()
    until_ended(thread)
    assert found == ["done"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_hook_that_fails_does_not_end_the_watch() -> None:
    peer = Peer()

    def leave() -> None:
        raise ValueError("a hook of the user")

    peer.watch = PeerWatch(lambda: peer.has_failed, leave, lambda: peer.calls.append("cut"), peer.abandon, LIMIT)
    assert peer.wait(lambda: time.sleep(LIMIT)) < LIMIT / 2
    assert set(peer.calls) == {"cut"}


def test_who_cannot_look_for_a_hang_still_sees_that_a_peer_fails(caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()

    def look() -> None:
        peer.calls.append("look")
        raise AttributeError("no such group")

    def fails_after_two_looks() -> bool:
        return peer.has_failed and len(peer.calls) >= 2

    given = (fails_after_two_looks, lambda: peer.calls.append("leave"), lambda: peer.calls.append("cut"))
    peer.watch = PeerWatch(*given, peer.abandon, LIMIT, look)
    assert peer.wait(lambda: time.sleep(LIMIT)) < LIMIT / 2
    assert peer.calls[:2] == ["look", "look"] and "leave" in peer.calls
    assert caplog.text.count("Ranks that hang may not be found:") == caplog.text.count("AttributeError: no such") == 1


def test_who_leaves_by_itself_is_not_interrupted() -> None:
    peer = Peer()
    peer.watch.start()
    peer.fail(0)
    with peer.watch.leading_out(2 * LIMIT):
        until(lambda: len(peer.calls) > 2, lambda: "what it waits for is cut again and again")
    peer.watch.close()
    assert peer.calls[0] == "leave"


def test_a_process_ends_whose_thread_is_not_through_in_time() -> None:
    peer = Peer()
    peer.watch._limit = 0.1
    peer.watch.start()
    with peer.watch.leading_out(30):
        peer.fail(0)
        until(lambda: "leave its step" in peer.calls)
    peer.watch.close()
    peer.calls.clear()
    with limited("do one thing", 0.01, peer.abandon):
        until(lambda: peer.calls)
    with limited("do another thing", 2 * LIMIT, peer.abandon):
        time.sleep(0.05)
    assert peer.calls == ["do one thing"]


PROGRAM = """
import ctypes, time
from resume_adapters.core.recovery import watch
{given}
"""

KEEPS_THE_LOCK = "ctypes.PyDLL(None).sleep(60)"
"""A call of a library that keeps Python's lock."""


@pytest.mark.parametrize(
    "given",
    [
        f"watch.LATER = 0.0\nwith watch.limited('end', 1.0, print): {KEEPS_THE_LOCK}",
        "w = watch.PeerWatch(lambda: False, print, print, print, 9.0, lambda: 1.0)\nw.start()\ntime.sleep(1)\n"
        + KEEPS_THE_LOCK,
        "watch.LATER = 0.5\nw = watch.PeerWatch(lambda: True, lambda: time.sleep(60), print, print, 0.5)\nw.start()\n"
        "time.sleep(60)",
    ],
    ids=["what is limited", "a step", "a hook"],
)
def test_a_process_that_python_cannot_end_is_ended(given: str) -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(given=given)], capture_output=True, text=True)
    assert done.returncode == 1 and "most recent call first" in done.stderr
    assert time.monotonic() - began < 50


FORKS = """
import os, sys, time
from resume_adapters.core.recovery.watch import end_process_after

end_process_after(20.0)
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        sys.exit()
    os.waitpid(pid, 0)
print("forked", flush=True)
end_process_after(0.5)
pid = os.fork()
if pid == 0:
    time.sleep(2)
    print("a child goes on", flush=True)
    os._exit(0)
time.sleep(30)
"""


def test_a_process_that_is_forked_meanwhile_ends_as_it_would() -> None:
    """And is not ended. Python would let it wait for a thread that it lacks."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1 and "most recent call first" in done.stderr
    assert done.stdout == "forked\na child goes on\n"
