"""How ranks meet in the store of the launcher, and learn that one never comes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from resume_adapters.core.recovery.meeting import LauncherStore, Meeting, Starts
from resume_adapters.core.recovery.options import Launch
from resume_adapters.errors import PeerFailed
from waiting import LIMIT

from recovering import agent_store


@pytest.fixture
def launch() -> Iterator[Launch]:
    with agent_store() as environment:
        yield Launch(0, 2, True, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), "test", "0")


@pytest.fixture
def rank_0(launch: Launch) -> Meeting:
    return Meeting(launch, timeout=LIMIT)


def test_a_rank_that_does_not_come_is_named(rank_0: Meeting) -> None:
    rank_0._timeout = 0.2  # which is too short to connect on a loaded machine
    with pytest.raises(PeerFailed, match=r"rank 1 did not meet the others within 0\.2 s after a failure"):
        rank_0.exchange("word", 7, int)


def test_a_rank_is_waited_for_as_long_as_it_may_take_to_leave_its_step(launch: Launch) -> None:
    rank_0 = Meeting(launch, timeout=LIMIT, grace=3.0)
    rank_1 = Meeting(dataclasses.replace(launch, rank=1), timeout=LIMIT)
    assert rank_0._timeout == LIMIT + 3.0
    later = threading.Timer(0.6, lambda: rank_1.exchange("report", 8, int))
    later.start()
    assert rank_0.exchange("report", 7, int) == [7, 8]
    later.join(LIMIT)


def test_nobody_waits_who_was_asked_to_end(rank_0: Meeting) -> None:
    """The launcher asks, where another process has died."""
    began = time.monotonic()
    with pytest.raises(PeerFailed, match="rank 1 did not meet the others after a failure: the launcher ends all"):
        rank_0.exchange("word", 7, int, lambda: True)
    assert 1 < time.monotonic() - began < LIMIT / 2


def test_the_end_is_that_of_all_ranks(launch: Launch, rank_0: Meeting) -> None:
    rank_1 = Meeting(dataclasses.replace(launch, rank=1), timeout=LIMIT)
    later = threading.Timer(0.2, lambda: rank_1.finish("0"))
    later.start()
    assert rank_0.finish("0")
    later.join(LIMIT)
    assert rank_1.announce("1") and not rank_0.announce("1")
    assert not rank_0.finish("1")


def test_a_launch_has_one_token_whatever_restarts(launch: Launch, rank_0: Meeting) -> None:
    again = Meeting(dataclasses.replace(launch, start="1"), timeout=LIMIT)
    assert rank_0.token == again.token
    rank_0.announce("0")
    assert again.announce("0"), "each start has announcements of its own"


def test_one_process_meets_itself() -> None:
    meeting = Meeting(Launch(), LIMIT)
    assert meeting.exchange("word", 7, int) == [7]
    assert meeting.announce("0") and not meeting.announce("0")
    assert meeting.is_announced("0") and meeting.finish("1")


def test_where_the_launcher_is_gone_nobody_is_led_out_and_nobody_waits() -> None:
    """The step that is under way needs it not; who must meet the others then says why it cannot."""
    with agent_store() as environment:
        launch = Launch(0, 2, True, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), "gone", "0")
        meeting = Meeting(launch, timeout=LIMIT)
        meeting.write("key", b"value")
        assert meeting.read("key") == b"value"
        assert meeting.read("other") is None
        assert not meeting.is_announced("0")
    meeting.write("key", b"another")
    assert meeting.read("key") is None
    assert not meeting.is_announced("0") and meeting._is_gone
    assert not meeting.is_announced("0")
    with pytest.raises(PeerFailed, match="the store of torchrun cannot be reached"):
        meeting.announce("0")
    with pytest.raises(PeerFailed, match="the store of torchrun cannot be reached"):
        meeting.exchange("word", 7, int)
    assert meeting.finish("0"), "who is through needs nobody"
    with pytest.raises(PeerFailed, match="torchrun has ended, or its machine is gone"):
        LauncherStore(launch, 1.0)


# ---- On several nodes, each of which counts its own restarts


@pytest.fixture
def two_nodes(launch: Launch) -> list[Launch]:
    return [dataclasses.replace(launch, rank=rank, is_one_node=False) for rank in range(2)]


def starts(launch: Launch) -> Starts:
    return Starts(launch, LauncherStore(launch, LIMIT))


def agreed(launches: list[Launch]) -> list[str]:
    """Return the start that ranks agree on, which come at the same time."""
    with ThreadPoolExecutor(len(launches)) as pool:
        return list(pool.map(lambda each: starts(each).agree(LIMIT), launches))


def test_each_start_of_all_ranks_has_a_number_of_its_own(two_nodes: list[Launch]) -> None:
    assert [agreed(two_nodes) for _ in range(3)] == [["0", "0"], ["1", "1"], ["2", "2"]]
    again = [dataclasses.replace(each, name="another block") for each in two_nodes]
    assert agreed(again) == ["0", "0"]


def test_a_start_that_a_rank_has_missed_is_nobodys(two_nodes: list[Launch]) -> None:
    """Rank 1 died on its way to the block; the next process of it takes its place in that start, and then leaves it."""
    starts(two_nodes[0])._take(0)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(starts(two_nodes[1]).agree, LIMIT)
        time.sleep(0.2)
        assert not second.done(), "the first rank of that start is dead, and does not say that all have come"
        assert starts(two_nodes[0]).agree(LIMIT) == second.result(LIMIT) == "1"


def test_a_rank_that_does_not_come_to_the_block_is_named(two_nodes: list[Launch]) -> None:
    with pytest.raises(PeerFailed, match=r"rank 1 has not come to the restartable block within 0\.2 s"):
        starts(two_nodes[0]).agree(0.2)


def test_nobody_waits_where_a_later_start_has_begun(two_nodes: list[Launch]) -> None:
    """The launcher of another node has started its processes again, and leaves those of this node to fail."""
    with ThreadPoolExecutor(2) as pool:
        rank_0, _ = pool.map(lambda each: Meeting(each, LIMIT), two_nodes)
    assert not rank_0.is_announced("0")
    starts(two_nodes[1])._take(0)
    assert rank_0.is_announced("0"), "it leaves its step"
    with pytest.raises(PeerFailed, match="after a failure: torchrun starts all again"):
        rank_0.exchange("word", 7, int)
    assert not rank_0.finish("0")
