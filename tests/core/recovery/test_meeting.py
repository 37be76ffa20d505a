"""How ranks meet in the store of the launcher, and learn that one never comes."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from resume_adapters.core.recovery.launcher_store import connected
from resume_adapters.core.recovery.meeting import SoloMeeting, StoreMeeting, SupervisorMeeting
from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.starts import Starts, agreed_start
from resume_adapters.errors import PeerFailed
from waiting import LIMIT

from recovering import agent_store


@pytest.fixture
def launch() -> Iterator[Launch]:
    with agent_store() as environment:
        yield Launch(0, 2, True, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), "test")


@pytest.fixture
def rank_0(launch: Launch) -> StoreMeeting:
    return StoreMeeting(launch, timeout=LIMIT)


def enter_and_die(launch: Launch, topic: str | None = None) -> int:
    """Let a process enter as rank 1, say a word, and die; return its number, which is not reaped."""
    pid = os.fork()
    if pid == 0:
        try:
            meeting = StoreMeeting(dataclasses.replace(launch, rank=1), timeout=LIMIT)
            if topic is not None:
                meeting._set(topic, b"1")
            os._exit(9)
        finally:
            os._exit(1)  # nothing that it raises may reach the tests that the parent runs
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None and ended.si_status == 9, "it could not enter"
    return pid


def test_of_a_process_that_died_it_is_known_that_it_says_nothing(launch: Launch, rank_0: StoreMeeting) -> None:
    pid = enter_and_die(launch)
    began = time.monotonic()
    assert rank_0.reports("first", 7, int) == [7, None]
    with pytest.raises(PeerFailed, match="the process of rank 1 has died after a failure"):
        rank_0.exchange("second", 7, int)
    with pytest.raises(PeerFailed, match="the process of rank 1 has died before the end of the block"):
        rank_0.finish("0")
    os.waitpid(pid, 0)
    assert rank_0.reports("reaped", 7, int) == [7, None]
    assert time.monotonic() - began < LIMIT / 2, "it did not wait for what never comes"


def test_a_process_that_stands_in_for_one_that_died_does_not_hide_that(launch: Launch, rank_0: StoreMeeting) -> None:
    """Another rank may have begun to write already; what they write, they do together with the one that stands in."""
    os.waitpid(enter_and_die(launch), 0)
    stands_in = StoreMeeting(dataclasses.replace(launch, rank=1), timeout=LIMIT, stands_in=True)
    assert rank_0.reports("report", 7, int) == [7, None]
    later = threading.Timer(0.2, lambda: stands_in.exchange("written", 8, int))
    later.start()
    assert rank_0.exchange("written", 7, int) == [7, 8]
    later.join()


def test_the_last_word_of_a_process_counts(launch: Launch, rank_0: StoreMeeting) -> None:
    pid = enter_and_die(launch, "word")
    assert rank_0.reports("word", 7, int) == [7, 1]
    os.waitpid(pid, 0)


def test_a_process_that_took_the_number_of_another_is_not_that_one(launch: Launch, rank_0: StoreMeeting) -> None:
    rank_0._store.set("process/1", f'{{"pid":{os.getpid()},"started":1.0}}')
    assert rank_0.reports("word", 7, int) == [7, None]


@pytest.mark.parametrize("is_one_node", [True, False])
def test_a_rank_that_lives_or_is_not_seen_is_waited_for(launch: Launch, is_one_node: bool) -> None:
    """One that has not entered may still be starting; of other nodes nobody sees the processes."""
    rank_0 = StoreMeeting(dataclasses.replace(launch, is_one_node=is_one_node), timeout=LIMIT)
    rank_0._timeout = 0.2  # which is too short to connect on a loaded machine
    with pytest.raises(PeerFailed, match=r"rank 1 did not meet the others within 0\.2 s"):
        rank_0.reports("word", 7, int)


def test_a_rank_is_waited_for_as_long_as_it_may_take_to_leave_its_step(launch: Launch) -> None:
    rank_0 = StoreMeeting(launch, timeout=LIMIT, grace=LIMIT)
    rank_1 = StoreMeeting(dataclasses.replace(launch, rank=1), timeout=LIMIT)
    rank_0._timeout = 0.2  # which is too short to connect on a loaded machine
    later = threading.Timer(0.6, lambda: rank_1.reports("report", 8, int))
    later.start()
    assert rank_0.reports("report", 7, int) == [7, 8]
    later.join()
    with pytest.raises(PeerFailed, match=r"within 0\.2 s"):
        rank_0.exchange("later", 7, int)


def test_the_end_is_that_of_all_ranks(launch: Launch, rank_0: StoreMeeting) -> None:
    rank_1 = StoreMeeting(dataclasses.replace(launch, rank=1), timeout=LIMIT)
    later = threading.Timer(0.2, lambda: rank_1.finish("0"))
    later.start()
    assert rank_0.finish("0")
    later.join()
    assert rank_1.announce("1") and not rank_0.announce("1")
    assert not rank_0.finish("1")


def test_a_launch_has_one_token_whatever_restarts(launch: Launch, rank_0: StoreMeeting) -> None:
    again = StoreMeeting(dataclasses.replace(launch, start="1"), timeout=LIMIT)
    assert rank_0.token == again.token
    rank_0.announce("0")
    assert again.announce("0"), "each start has announcements of its own"


def test_one_process_meets_itself() -> None:
    meeting = SoloMeeting()
    assert meeting.reports("word", 7, int) == meeting.exchange("word", 7, int) == [7]


def test_where_the_launcher_is_gone_the_ranks_leave() -> None:
    with agent_store() as environment:
        launch = Launch(0, 2, True, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), "gone")
        meeting = StoreMeeting(launch, timeout=LIMIT)
        meeting.write("key", b"value")
        assert meeting.read("key") == b"value"
        assert meeting.read("other") is None
        assert not meeting.is_announced("0")
    meeting.write("key", b"another")
    assert meeting.read("key") is None
    assert meeting.is_announced("0")


def test_a_death_that_a_supervisor_says_is_known_though_the_process_never_came(
    launch: Launch, rank_0: StoreMeeting
) -> None:
    supervisor = SupervisorMeeting(dataclasses.replace(launch, rank=1))
    assert not rank_0.is_announced("2")
    supervisor.announce_death("2")
    assert rank_0.is_announced("2") and not rank_0.is_announced("1")
    assert rank_0.reports("first", 7, int) == [7, None]


def test_other_processes_follow_where_all_supervisors_want_them(launch: Launch) -> None:
    first, second = (SupervisorMeeting(dataclasses.replace(launch, rank=rank)) for rank in range(2))
    first.say(wants_another=True)
    assert first.all_want_another() is second.all_want_another() is None
    second.say(wants_another=True)
    assert first.all_want_another() is second.all_want_another() is True


def test_no_other_process_follows_where_one_supervisor_wants_none(launch: Launch) -> None:
    SupervisorMeeting(launch).say(wants_another=False)
    assert SupervisorMeeting(dataclasses.replace(launch, rank=1)).all_want_another() is False
    of_next = dataclasses.replace(launch, start="0.1")
    assert SupervisorMeeting(of_next).all_want_another() is None, "each start has its own words"


# ---- On several nodes, each of which counts its own restarts


@pytest.fixture
def two_nodes(launch: Launch) -> list[Launch]:
    return [dataclasses.replace(launch, rank=rank, is_one_node=False) for rank in range(2)]


def agreed(launches: list[Launch]) -> list[str]:
    """Return the start that ranks agree on, which come at the same time."""
    with ThreadPoolExecutor(len(launches)) as pool:
        return list(pool.map(agreed_start, launches))


def test_each_start_of_all_ranks_has_a_number_of_its_own(two_nodes: list[Launch]) -> None:
    assert [agreed(two_nodes) for _ in range(3)] == [["0", "0"], ["1", "1"], ["2", "2"]]
    again = [dataclasses.replace(each, name="another block") for each in two_nodes]
    assert agreed(again) == ["0", "0"]


def test_a_start_that_a_rank_has_missed_is_nobodys(two_nodes: list[Launch]) -> None:
    """Rank 1 died on its way to the block; the next process of it takes its place in that start, and then leaves it."""
    Starts(two_nodes[0], connected(two_nodes[0], LIMIT))._take(0)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(agreed_start, two_nodes[1])
        time.sleep(0.2)
        assert not second.done(), "the first rank of that start is dead, and does not say that all have come"
        assert agreed_start(two_nodes[0]) == second.result() == "1"


def test_a_rank_that_does_not_come_to_the_block_is_named(two_nodes: list[Launch]) -> None:
    with pytest.raises(PeerFailed, match=r"rank 1 has not come to the restartable block within 0\.2 s"):
        Starts(two_nodes[0], connected(two_nodes[0], LIMIT)).agree(0.2)


def test_nobody_waits_where_a_later_start_has_begun(two_nodes: list[Launch]) -> None:
    """The launcher of another node has started its processes again, and leaves those of this node to fail."""
    agreed(two_nodes)
    rank_0 = StoreMeeting(two_nodes[0], timeout=LIMIT)
    assert not rank_0.is_announced("0")
    Starts(two_nodes[1], connected(two_nodes[1], LIMIT))._take(0)
    assert rank_0.is_announced("0"), "it leaves its step"
    with pytest.raises(PeerFailed, match="torchrun starts the processes of all nodes again: one has died"):
        rank_0.reports("word", 7, int)


def test_nobody_waits_on_several_nodes_where_it_was_asked_to_end(launch: Launch, two_nodes: list[Launch]) -> None:
    began = time.monotonic()
    with pytest.raises(PeerFailed, match="torchrun starts the processes of all nodes again"):
        StoreMeeting(two_nodes[0], timeout=LIMIT).reports("word", 7, int, lambda: True)
    assert time.monotonic() - began < LIMIT / 2
    rank_0 = StoreMeeting(launch, timeout=LIMIT)
    rank_0._timeout = 1.5
    with pytest.raises(PeerFailed, match="did not meet the others"):  # on one node, what it holds is handed over
        rank_0.reports("word", 7, int, lambda: True)
