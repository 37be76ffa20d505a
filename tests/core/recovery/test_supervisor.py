"""Where a process that trains has died, its supervisor forks another one; elsewhere it ends as that one does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from resume_adapters.core.recovery import supervisor
from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.signal_relay import Arrivals, Pipe
from resume_adapters.core.recovery.supervisor import Supervised, supervised
from resume_adapters.core.storage import threads
from waiting import LIMIT, is_gone, until

from launch import Running, Server
from recovering import agent_store

JOB = Path(__file__).parent / "supervised_job.py"
TWO = Launch(world_size=2)


@pytest.fixture
def store() -> Iterator[dict[str, str]]:
    with agent_store() as environment:
        yield environment


def start(server: Server, directory: Path, store: dict[str, str], does: str) -> Running:
    return server.start(JOB, [does], directory, 1, store)


def lines(file: Path) -> list[list[str]]:
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


# ---- What becomes of a process


@pytest.mark.parametrize(
    ("does", "status", "starts"),
    [
        ("end", 0, [["0.0", "0", "2", "0.134"]]),
        ("fail", 3, [["0.0", "0", "2", "0.134"]]),
        ("leave", 0, [["0.0", "0", "2", "0.134"], ["0.1", "1", "1", "0.134"]]),
        ("die", -9, [["0.0", "0", "2", "0.134"], ["0.1", "1", "1", "0.134"], ["0.2", "2", "0", "0.134"]]),
        ("die later", -9, [["0.0", "0", "2", "0.134"]]),
    ],
)
def test_another_one_goes_on_where_it_has_died_or_asks_for_it(
    server: Server, tmp_path: Path, store: dict[str, str], does: str, status: int, starts: list[list[str]]
) -> None:
    """At most twice here, each with the same random numbers; and not once its block is over."""
    assert start(server, tmp_path, store, does).wait(LIMIT).statuses == (status,)
    assert lines(tmp_path / "starts") == starts


def test_the_next_one_has_imported_what_this_one_has(server: Server, tmp_path: Path, store: dict[str, str]) -> None:
    start(server, tmp_path, store, "import").wait(LIMIT).require_success()
    assert lines(tmp_path / "late") == [["False"], ["True"]]


def test_it_ends_with_its_supervisor(server: Server, tmp_path: Path, store: dict[str, str]) -> None:
    running = start(server, tmp_path, store, "wait")
    until(lambda: lines(tmp_path / "pids"))
    running.signal(signal.SIGKILL)
    assert running.wait(LIMIT).statuses == (-signal.SIGKILL,)
    ((_, trainer),) = lines(tmp_path / "pids")
    until(lambda: is_gone(int(trainer)))


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_signal_comes_to_it_once(server: Server, tmp_path: Path, store: dict[str, str], is_alone: bool) -> None:
    """Whether it is sent to the supervisor, or to all processes of the job."""
    running = start(server, tmp_path, store, "wait")
    until(lambda: lines(tmp_path / "pids"))
    ((parent, _),) = lines(tmp_path / "pids")
    for count in (1, 2):
        (os.kill if is_alone else os.killpg)(int(parent), signal.SIGUSR1)
        until(lambda count=count: len(lines(tmp_path / "got")) >= count)  # type: ignore[misc]
        time.sleep(0.5)  # in which a second one would come
        assert lines(tmp_path / "got") == [["SIGUSR1"]] * count
    (tmp_path / "end").touch()
    running.wait(LIMIT).require_success()


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_process_that_is_asked_to_end_is_not_replaced(
    server: Server, tmp_path: Path, store: dict[str, str], is_alone: bool
) -> None:
    running = start(server, tmp_path, store, "wait")
    until(lambda: lines(tmp_path / "pids"))
    (os.kill if is_alone else os.killpg)(running.pids[0], signal.SIGTERM)
    assert running.wait(LIMIT).statuses == (-signal.SIGTERM,)
    assert len(lines(tmp_path / "starts")) == 1


@pytest.mark.thorough
def test_where_the_launcher_is_gone_nobody_goes_on(server: Server, tmp_path: Path) -> None:
    with agent_store() as environment:
        running = start(server, tmp_path, environment, "wait, then leave")
        until(lambda: lines(tmp_path / "pids"))
    (tmp_path / "end").touch()
    assert running.wait(LIMIT).statuses == (1,)
    assert len(lines(tmp_path / "starts")) == 1


def test_who_waits_for_the_others_ends_when_it_is_told_to(
    server: Server, tmp_path: Path, store: dict[str, str]
) -> None:
    running = start(server, tmp_path, {**store, "RANKS": "2"}, "leave")
    until(lambda: lines(tmp_path / "pids"))
    until(lambda: is_gone(int(lines(tmp_path / "pids")[0][1])))
    time.sleep(0.3)
    assert running.alive(), "the process of the other rank may still be at work"
    running.signal(signal.SIGTERM)
    assert running.wait(LIMIT).statuses == (1,)


# ---- Where there is none


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process have no thread but the main one: the tests' own have nothing to do with it."""
    monkeypatch.setattr(supervisor, "other_threads", lambda: ["jemalloc_bg_thd"])
    monkeypatch.setattr(psutil.Process, "children", lambda self: [])


@pytest.mark.usefixtures("quiet")
def test_what_is_forked_can_do_all_that_its_parent_could() -> None:
    assert supervisor._can_fork()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (supervisor, "other_threads", lambda: ["python"]),
        (supervisor, "other_threads", lambda: None),
        (supervisor, "devices_in_use", lambda: ["/dev/nvidiactl"]),
        (supervisor, "_supervisors", [os.getppid()]),
        (psutil.Process, "children", lambda self: [self]),
        (os, "pidfd_open", lambda pid: os.open("/no/such/file", os.O_RDONLY)),
    ],
    ids=["a thread", "another system", "a device", "a supervisor", "a child", "an older kernel"],
)
def test_where_it_could_not_the_launcher_alone_starts_another_one(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, replacement: Any
) -> None:
    monkeypatch.setattr(owner, name, replacement)
    launch, process = supervised(TWO, 3)
    assert launch is TWO and not process.restarts_left
    for say in (process.replace, process.end, process.say_imports, lambda: process.begin_attempt(1)):
        say()  # to nobody


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("launch", "restarts"), [(TWO, 0), (Launch(), 3), (Launch(world_size=2, is_one_node=False), 3)]
)
def test_where_none_may_be_started_or_the_launcher_sees_to_it_there_is_no_supervisor(
    launch: Launch, restarts: int
) -> None:
    assert supervised(launch, restarts)[0] is launch


def test_the_threads_of_this_process_are_named() -> None:
    over = threading.Event()
    before = len(threads.other_threads() or ())
    thread = threading.Thread(target=over.wait)
    thread.start()
    found = threads.other_threads()
    over.set()
    thread.join()
    assert found is not None and len(found) == before + 1


def test_another_system_does_not_name_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(threads, "_TASKS", tmp_path / "none")
    assert threads.other_threads() is None


def test_devices_that_are_open_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads.devices_in_use() == []
    monkeypatch.setattr(threads, "_DEVICES", ("/dev/null",))
    with Path(os.devnull).open():
        assert "/dev/null" in threads.devices_in_use()


# ---- Signals and words


def test_a_signal_is_passed_on_unless_it_came_to_both() -> None:
    arrivals = Arrivals()
    assert arrivals.seconds(0.0) is None
    arrivals.add(15, 1.0)
    assert arrivals.take_due(1.0) == []
    assert arrivals.seconds(1.1) == pytest.approx(0.1)
    assert arrivals.take_due(1.5) == [15]
    assert arrivals.take_due(1.5) == []
    arrivals.add(10, 2.0)
    arrivals.add_seen(10, 2.1)
    assert arrivals.take_due(3.0) == []
    arrivals.add_seen(10, 4.0)
    arrivals.add(10, 4.1)
    assert arrivals.seconds(4.1) is None
    arrivals.add(10, 5.0)
    assert arrivals.seconds(9.0) == 0.0
    assert arrivals.take_due(9.0) == [10]


def test_many_words_wait_until_they_are_read() -> None:
    pipe, text = Pipe(is_patient=True), "x" * 300_000
    process = Supervised(pipe.writing, 0, 1)
    saying = threading.Thread(target=process._say, args=(text,))
    saying.start()
    found = b""
    while not found.endswith(b"\n"):
        found += pipe.read()
    saying.join()
    assert found == f"{text}\n".encode()
    process.end()
    assert pipe.read() == b"over\n"
    os.close(pipe.reading)


def test_a_module_that_cannot_be_imported_is_left_to_who_needs_it() -> None:
    supervisor._import(["no_such_module", "never_reached"])


def test_modules_of_the_script_are_not_imported_early() -> None:
    assert not supervisor._is_library(multiprocessing.__spec__)
    assert not supervisor._is_library(None)
    assert supervisor._is_library(pytest.__spec__)
