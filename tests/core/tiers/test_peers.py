"""The copy of another node's memory, in one process: what it leaves behind, and what ends it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers.held import HeldCheckpoints
from resume_adapters.core.tiers.peers import Peers, PeerSource, Replica
from resume_adapters.core.tiers.serving import Address, Client, Server
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.core.tiers.wire import Content, Request
from resume_adapters.errors import CheckpointDamaged, FencedOff
from waiting import until, until_ended

import miniature
from miniature import Miniature

TOKEN = b"token of the start"


class Pair:
    """A node that has checkpoints of three steps in its memory, and the directories of one that copies them."""

    def __init__(self, directory: Path) -> None:
        job = Miniature(directory / "memory")
        for step in (1, 2, 3):
            job.commit(step)
        job.run.close()
        self.directory, self.is_fenced, self.replica = directory / "copies", False, None
        own = HeldCheckpoints(LocalStorage(), directory / "memory", self.fence, time.time)
        self.find: Callable[[Request], Content] = Peers(
            LocalStorage(), self.directory, own, self.fence, time.time
        )._find
        self.server = Server(TOKEN, 4, lambda request: self.find(request))
        self.client = Client(TOKEN, {4: Address(("127.0.0.1",), self.server.port)})
        self.replica = Replica(self.held("ranks-00004"), lambda: [self.held("ranks-00008")], self.client, 4)

    def fence(self) -> None:
        if self.is_fenced:
            raise FencedOff("a later start owns the run")

    def held(self, root: str) -> HeldCheckpoints:
        (self.directory / root / ".resume").mkdir(parents=True, exist_ok=True)
        return HeldCheckpoints(LocalStorage(), self.directory / root, self.fence, time.time)

    def copy(self, step: int) -> str:
        """Copy a checkpoint, and return the problem."""
        self.replica.submit(miniature.name(step))
        until(lambda: not self.replica.progress.is_behind or not self.replica._thread.is_alive())
        return self.replica.progress.problem

    def copies(self) -> list[int]:
        return sorted(miniature.committed(self.directory / "ranks-00004").values())


@pytest.fixture
def pair(tmp_path: Path, shape: None) -> Iterator[Pair]:
    found = Pair(tmp_path)
    yield found
    found.replica.close()
    found.server.close()


def test_the_newest_copy_and_the_one_before_it_are_held(pair: Pair) -> None:
    for step, copies in ((1, [1]), (2, [1, 2]), (3, [2, 3])):
        assert (pair.copy(step), pair.replica.progress.step, pair.copies()) == ("", step, copies)
    assert miniature.leftovers(pair.directory / "ranks-00004") == []


def test_copies_of_other_nodes_stay_until_every_node_has_a_newer_one(pair: Pair) -> None:
    job = Miniature(pair.directory / "ranks-00008")
    job.commit(1)
    job.run.close()
    pair.copy(1)
    assert pair.held("ranks-00008").names() != []
    pair.copy(2)
    assert pair.held("ranks-00008").names() == []


def test_what_is_not_there_any_more_is_said_and_the_next_is_copied(pair: Pair) -> None:
    assert "checkpoint-9" in pair.copy(9)
    assert (pair.copy(2), pair.copies()) == ("", [2])


def test_only_files_that_a_manifest_names_are_given(pair: Pair) -> None:
    secret = pair.directory.parent / "secret"
    secret.write_text("not yours")
    name = miniature.name(3)
    paths = ("../../secret", str(secret), "resume/pending", "/etc/passwd")
    for root, checkpoint, path in [*(("", name, path) for path in paths), ("../memory", name, ""), ("", "..", "")]:
        with pytest.raises(CheckpointDamaged, match="is not in that node's memory"):
            b"".join(pair.client.read(Request(4, root, checkpoint, path)))


def test_a_node_that_does_not_answer_at_a_start_is_passed_over(pair: Pair) -> None:
    """Another checkpoint is taken, where there is one."""
    pair.server.close()
    held = pair.held("../memory").checkpoints()[0]
    found = TierCheckpoint(held.place, held.name, replace(held.manifest, ranks=(4, 5)))
    source = PeerSource(pair.client, [(4, "", found)], (4, 5))
    assert PeerSource(pair.client, [(4, "", found)], (5,)).checkpoints() == source.unreadable == []
    (offered,) = source.checkpoints()
    with pytest.raises(CheckpointDamaged, match="could not be fetched: the node of rank 4 does not answer"):
        b"".join(source.read(offered, offered.manifest.files[0]))


def test_a_file_that_is_damaged_is_not_held(pair: Pair) -> None:
    native = miniature.native(pair.directory.parent / "memory" / miniature.name(2))
    native.write_bytes(b"x" * native.stat().st_size)
    assert "its content has changed" in pair.copy(2)
    native.unlink()
    assert "is missing" in pair.copy(2)
    assert (pair.copies(), miniature.leftovers(pair.directory / "ranks-00004")) == ([], [])


def test_a_machine_that_is_short_of_something_copies_the_next(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(request: Request) -> Iterator[bytes]:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(pair.client, "read", fail)
        assert pair.copy(1) == "can't start new thread"
    assert (pair.copy(2), pair.copies()) == ("", [2])


def test_what_nobody_expected_ends_the_copies_and_is_said(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each save to memory would be left out, because the copy before it is not there yet."""

    def fail(request: Request) -> Iterator[bytes]:
        raise KeyError("a part")

    monkeypatch.setattr(threading, "excepthook", lambda found: None)
    monkeypatch.setattr(pair.client, "read", fail)
    pair.copy(1)
    until_ended(pair.replica._thread)
    assert pair.copy(2) == "the copies have ended: KeyError: 'a part'"


def test_a_start_that_is_locked_out_copies_nothing(pair: Pair) -> None:
    pair.is_fenced = True
    pair.copy(1)
    until_ended(pair.replica._thread)
    assert pair.copies() == []


def test_the_end_of_a_run_gives_a_copy_up(pair: Pair) -> None:
    begun = threading.Event()

    def endless() -> Iterator[bytes]:
        for _ in itertools.count():
            begun.set()
            yield b"x" * 100

    pair.find = lambda request: Content(1 << 50, endless())
    pair.replica.submit("checkpoint-1")
    until(begun.is_set)
    pair.replica.close()
    until_ended(pair.replica._thread)
    assert pair.copies() == []
