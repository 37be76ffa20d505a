"""A journal that has grown large is trimmed by the next start."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import KeepLast
from resume_adapters.core.run_directory import journal
from resume_adapters.core.storage.local import LocalStorage
from waiting import LIMIT, until_ended

import fuzz
from faults import Disturbed
from miniature import Miniature, name, own


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / ".resume" / "journal.jsonl").read_text().splitlines()]


def test_the_first_the_last_the_stops_and_the_commits_that_count_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Miniature(tmp_path, keep=KeepLast(2))
    for number in range(8):
        job.commit(number * 10)
        job.run.control.journal.append("failed" if number == 3 else "resume", step=number)
    job.run.close()
    monkeypatch.setattr(journal, "_FIRST", 2)
    monkeypatch.setattr(journal, "_LAST", 1)
    before = events(tmp_path)
    Miniature(tmp_path).run.close()
    assert events(tmp_path)[: len(before)] == before, "it is not large"
    monkeypatch.setattr(journal, "_LARGE", 100)
    Miniature(tmp_path).run.close()
    kept = [(each["event"], each["step"]) for each in events(tmp_path)]
    assert kept == [
        ("start", 0),
        ("commit", 0),
        ("failed", 3),
        ("commit", 60),
        ("commit", 70),
        ("start", 70),
        ("start", 70),
    ]


def test_what_the_run_has_committed_is_known_after_a_trim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each checkpoint that exists the last line counts: a copy with the name of a pruned one is the user's."""
    job = Miniature(tmp_path, keep=KeepLast(2))
    for step in (10, 20, 30, 40):
        job.commit(step)
    log = job.run.control.journal
    log.append("commit", step=5)  # version 0.1.0 wrote no names
    log.append("commit", step=40)
    job.run.close()
    (tmp_path / name(10)).mkdir()
    shutil.rmtree(own(tmp_path / name(30)))
    for number, value in (("_FIRST", 0), ("_LAST", 1), ("_LARGE", 100)):
        monkeypatch.setattr(journal, number, value)
    again = Miniature(tmp_path)
    again.run.close()
    kept = [(each["event"], each.get("checkpoint", each.get("step"))) for each in events(tmp_path)]
    assert kept == [("commit", name(30)), ("prune", name(10)), ("commit", name(40)), ("commit", 40), ("start", 40)]
    known = Miniature(tmp_path).run.control.journal.committed()
    assert [known.has(name(step)) for step in (10, 20, 30, 40)] == [False, False, True, True]


def test_a_rewind_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Miniature(tmp_path)
    job.commit(10)
    log = job.run.control.journal
    log.append("commit", step=20, checkpoint=name(20))
    log.append("rewind", step=10)
    log.append("resume", step=10)
    (tmp_path / name(20)).mkdir()
    for number, value in (("_FIRST", 0), ("_LAST", 1), ("_LARGE", 100)):
        monkeypatch.setattr(journal, number, value)
    log.trim(lambda: [name(10), name(20)])
    assert [each["event"] for each in events(tmp_path)] == ["start", "commit", "commit", "rewind", "resume"][1:]
    assert (log.committed().has(name(10)), log.committed().has(name(20))) == (True, False)
    job.run.close()


def test_a_line_of_which_a_full_disk_took_a_part_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Miniature(tmp_path).run.control.journal
    whole = LocalStorage.append

    def take_a_part(storage: LocalStorage, path: Path, content: bytes) -> None:
        whole(storage, path, content[:10])
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "append", take_a_part)
        with pytest.raises(OSError, match="no space left"):
            log.append("resume", step=1)
    log.append("resume", step=2)
    assert list(log.history())[-1]["step"] == 2


def interrupted(meanwhile: Callable[[], object]) -> Disturbed:
    """Return a disk that lets ``meanwhile`` happen where a journal is appended to for the first time."""
    once = [meanwhile]
    return Disturbed(lambda operation, path: operation == "append" and once and once.pop()())


def test_of_two_threads_that_append_each_writes_its_line_after_the_other(tmp_path: Path) -> None:
    """A mirror records its copies while checkpoints are committed."""

    def record_a_copy() -> None:
        other.start()
        other.join(0.2)  # it waits for the lock

    log = journal.Journal(interrupted(record_a_copy), tmp_path, lambda: 1.0)
    other = threading.Thread(target=log.append, args=("mirror",))
    log.append("commit", step=1, checkpoint=name(1))
    until_ended(other)
    assert (tmp_path / "journal.jsonl").read_text().count("\n") == len(list(log.history())) == 2
    assert [each["event"] for each in log.history()] == ["commit", "mirror"]
    assert log.committed().has(name(1))


def test_a_forked_process_appends_though_a_thread_did_so_when_it_was_forked(tmp_path: Path) -> None:
    """That thread has not come along, and will never be done."""

    def fork() -> None:
        if (pid := os.fork()) == 0:
            other = threading.Thread(target=log.append, args=("resume",), daemon=True)
            other.start()
            other.join(LIMIT)
            os._exit(other.is_alive())
        assert os.waitpid(pid, 0)[1] == 0

    forking = threading.Thread(target=fork)

    def fork_on_another_thread() -> None:
        forking.start()
        until_ended(forking)

    log = journal.Journal(interrupted(fork_on_another_thread), tmp_path, lambda: 1.0)
    log.append("mirror")
    assert sorted(each["event"] for each in log.history()) == ["mirror", "resume"]


@pytest.mark.parametrize("field", ["time", "event", "step", "generation", "seconds", "tiers"])
@pytest.mark.parametrize("event", ["start", "commit", "rewind", "failed", journal.SET_ASIDE])
def test_an_entry_that_nobody_could_use_ends_no_start(tmp_path: Path, event: str, field: str) -> None:
    """Whoever can write the journal may write anything; without the field it is read, and counts for little."""
    file = tmp_path / ".resume" / "journal.jsonl"
    entry = {"time": 1.0, "event": event, "step": 0, "generation": 1, "seconds": 1.0, "tiers": []}
    job = Miniature(tmp_path)
    job.run.begin(job.step, 0.0)
    job.commit(1)
    job.run.close()
    for value in ("x", {}, -1, 1 << 63, 10**400, 1e308, [1], True):
        with file.open("a") as written:
            written.write(json.dumps({**entry, field: value}) + "\n")
    with file.open("a") as written:
        written.write(json.dumps({name: value for name, value in entry.items() if name != field}) + "\n")
    job = Miniature(tmp_path)
    job.run.begin(job.step, 0.0)
    assert job.step == 1
    job.run.close()


def test_what_was_set_aside_before_the_first_step_is_read_again(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    log = job.run.control.journal
    log.append(journal.SET_ASIDE, step=-1, tiers=["s3://bucket"])
    assert [each["step"] for each in log.history() if each["event"] == journal.SET_ASIDE] == [-1]
    job.run.close()


@pytest.mark.parametrize("line", [b'{"time":1,"event":"commit","step":1,"checkpoint":"a"}\n', b"\n", b"{}\n"])
def test_a_large_journal_costs_no_memory_for_each_of_its_lines(tmp_path: Path, line: bytes) -> None:
    Miniature(tmp_path).run.close()
    lines = 300_000 if len(line) < 10 else 100_000
    with (tmp_path / ".resume" / "journal.jsonl").open("ab") as file:
        file.write(line * lines)
    before = fuzz.restart_peak()
    Miniature(tmp_path).run.close()
    grown = fuzz.memory("VmHWM") - before
    assert grown < 4 * lines * len(line) + (16 << 20), f"{grown >> 20} MB were needed"
