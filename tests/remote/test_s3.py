"""The laws of a mirror in S3, as moto has it in this process; and behind a proxy with faults."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from resume_adapters import KeepLast, Remote
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers import object_store
from resume_adapters.core.tiers.object_store import ObjectStore
from resume_adapters.core.tiers.remote import RemoteTier
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, NoValidCheckpoint, TierUnavailable
from waiting import LIMIT, until

import servers
from miniature import Miniature

MANIFEST = Manifest(step=1, epoch=0.0, world_size=1, generation=1, written=0.0, reason="", files=())

pytest.importorskip("moto", reason="the extra `test` installs moto")


@pytest.fixture(scope="module")
def s3() -> Iterator[int]:
    with servers.moto() as port:
        yield port


@pytest.fixture
def proxy(s3: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[servers.Proxy]:
    found = servers.Proxy(s3)
    for name, value in servers.environment(found.port).items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


@pytest.fixture
def url(request: pytest.FixtureRequest, proxy: servers.Proxy) -> str:
    return f"s3://bucket/{request.node.name}".replace("[", "-").replace("]", "")


def train(directory: Path, url: str, *steps: int) -> Miniature:
    """Commit some steps, with a mirror, and end the run."""
    job = Miniature(directory, mirror=[Remote(url, keep=KeepLast(2), timeout=timedelta(seconds=LIMIT))])
    job.run.begin(job.step, 0.0)
    for step in steps:
        job.commit(step)
        until(lambda: not any(state.behind for state in job.run.context.mirrors.states))
    job.run.set_state(RunState.FINISHED, step=steps[-1], epoch=1.0)
    job.run.finish_copies()
    job.run.close()
    return job


def resumed(directory: Path, url: str) -> tuple[int, str]:
    """Lose the run directory, and return the step and the state from which the same start resumes."""
    shutil.rmtree(directory)
    job = Miniature(directory, mirror=[Remote(url, timeout=timedelta(seconds=LIMIT))])
    job.run.close()
    return job.step, job.text


def test_an_empty_machine_resumes_from_s3(tmp_path: Path, url: str, proxy: servers.Proxy) -> None:
    train(tmp_path / "a", url, 1, 2, 3)
    assert resumed(tmp_path / "a", url) == (3, "state at 3")
    assert not any(servers.SECRET in path for _, path in proxy.requests)


def test_a_large_file_goes_in_parts(tmp_path: Path, url: str, proxy: servers.Proxy) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(object_store.PART + 1000))
    storage = LocalStorage()
    tier = RemoteTier(ObjectStore(url, timedelta(seconds=LIMIT)), storage, "a test")
    entry = FileEntry("file", *storage.digest(file))
    tier.copy("place", tmp_path, [entry])
    assert sum("partNumber=" in path for _, path in proxy.requests) == 2
    assert b"".join(tier.read(TierCheckpoint("place", "", MANIFEST), entry)) == file.read_bytes()


def unfinished(port: int) -> int:
    """Return how many uploads the bucket has of which parts are there, and no object."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/bucket?uploads") as answer:
        return int(answer.read().count(b"<UploadId>"))


@pytest.mark.parametrize("fault", ["changed", "refused", "ended"])
def test_a_copy_that_fails_leaves_no_part_of_a_large_file(
    tmp_path: Path, s3: int, url: str, proxy: servers.Proxy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts are in no listing, and paid for. Only of a process that is killed they stay."""
    monkeypatch.setattr(object_store, "IN_FLIGHT", object_store.PART)  # one part at a time
    file, storage = tmp_path / "file", LocalStorage()
    file.write_bytes(os.urandom(2 * object_store.PART + 1000))
    entry = FileEntry("file", *storage.digest(file))
    patience = timedelta(seconds=5 if fault == "refused" else LIMIT)
    tier = RemoteTier(ObjectStore(url, patience), storage, "a test")
    counts: list[int] = []
    ended: list[int] = []

    def require_wanted() -> None:
        if ended:
            raise TierUnavailable("this run ends")

    def fail(number: int, method: str, path: str) -> str | None:
        if "partNumber=1" in path:
            counts.append(unfinished(s3))
            if fault == "ended":
                ended.append(1)
        return "503" if fault == "refused" and "partNumber=2" in path else None

    proxy.fault = fail
    if fault == "changed":
        with file.open("r+b") as changed:
            changed.seek(-1, os.SEEK_END)
            changed.write(bytes([file.read_bytes()[-1] ^ 1]))
    with pytest.raises(CheckpointDamaged if fault == "changed" else TierUnavailable):
        tier.copy("place", tmp_path, [entry], require_wanted)
    assert set(counts) == {1} and unfinished(s3) == 0


def test_the_commands_know_urls(tmp_path: Path, url: str) -> None:
    train(tmp_path / "a", url, 1, 2)
    done = {}
    for words in (["ls", url], ["verify", url], ["pull", url, str(tmp_path / "b"), "1"]):
        command = [sys.executable, "-m", "resume_adapters.cli", *words]
        found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        assert found.returncode == 0, found.stderr
        done[words[0]] = found.stdout
    assert done["ls"].count("committed") == 2 and done["verify"].count("valid") == 2
    assert (tmp_path / "b" / "checkpoint-1" / "model.bin").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["503", "timeout", "cut", "flip", "late"])
def test_requests_that_go_wrong_now_and_then_change_nothing(
    tmp_path: Path, url: str, proxy: servers.Proxy, fault: str
) -> None:
    def every_third(number: int, method: str, path: str) -> str | None:
        listing = "list-type" in path
        if fault in ("cut", "flip"):
            is_file = method == "GET" and not listing and "model.bin" in path
            return fault if is_file and number % 2 else None
        return fault if number % 3 == 1 else None

    proxy.fault = every_third
    train(tmp_path / "a", url, 1, 2)
    assert resumed(tmp_path / "a", url) == (2, "state at 2")


@pytest.mark.thorough
def test_answers_that_are_always_cut_are_no_checkpoint(tmp_path: Path, url: str, proxy: servers.Proxy) -> None:
    train(tmp_path / "a", url, 1)
    proxy.fault = lambda number, method, path: "cut" if method == "GET" and "model.bin" in path else None
    with pytest.raises(NoValidCheckpoint):
        resumed(tmp_path / "a", url)


def test_what_a_store_refuses_is_said_without_the_credentials(
    tmp_path: Path, url: str, proxy: servers.Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", url, 1)
    proxy.fault = lambda number, method, path: "timeout" if method == "PUT" else None
    job = Miniature(tmp_path / "a", mirror=[Remote(url, timeout=timedelta(seconds=1))])
    assert job.step == 1
    job.run.close()
    assert "is not claimed yet" in caplog.text
    journal = (tmp_path / "a" / ".resume" / "journal.jsonl").read_text()
    assert not any(word in caplog.text + journal for word in (servers.SECRET, servers.KEY, "Signature"))
