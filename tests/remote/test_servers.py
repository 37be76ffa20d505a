"""The laws of a mirror in servers that ``nox -s remote`` installs: SeaweedFS, which is killed; rclone, which lies."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from resume_adapters import KeepLast, Remote
from resume_adapters.errors import UnsupportedSetting
from waiting import LIMIT, until

import servers
from miniature import Miniature, MiniatureContent, committed

pytestmark = pytest.mark.thorough

REQUESTS = 200
"""A save has a few more."""

_FIRST = os.environ.get("RESUME_ADAPTERS_REMOTE_KILLS")
KILLS = range(int(_FIRST)) if _FIRST else (0, 1, 10, 100, 199, *range(REQUESTS + 4, REQUESTS + 10))
"""At which requests of a save the server is killed: the last ones are the claims, the manifest and what follows it."""


def require(program: str) -> None:
    if servers.find(program) is None:
        pytest.skip(f"{program} is not installed: nox -s remote")


def use(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in servers.environment(port).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    require("rclone")
    server = servers.rclone(tmp_path / "rclone")
    server.start()
    use(server.port, monkeypatch)
    yield "s3://bucket/run"
    server.kill()


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Process]:
    """A server for all kills: what it has lost once would be missed later."""
    require("weed")
    server = servers.seaweed(tmp_path_factory.mktemp("servers") / "weed")
    server.start()
    servers.make_bucket(server.port)
    servers.until_writable(server)
    yield server
    server.kill()


def test_a_store_that_lies_is_refused(tmp_path: Path, lying: str) -> None:
    with pytest.raises(UnsupportedSetting, match="overwrites what exists"):
        Miniature(tmp_path, mirror=[Remote(lying, timeout=timedelta(seconds=LIMIT))])


def wait(job: Miniature) -> None:
    """Wait until nothing is due on any tier."""
    until(
        lambda: not any(state.behind for state in job.run.context.mirrors.states),
        lambda: job.run.context.mirrors.states,
    )


class ManyFiles(MiniatureContent):
    """What a checkpoint is to hold: as many files as its save is to have requests."""

    def save(self, directory: Path) -> None:
        super().save(directory)
        for number in range(REQUESTS):
            self.run.storage.write(directory / f"part-{number:03d}.bin", f"{self.text}, part {number}".encode())


@pytest.mark.parametrize("number", KILLS)
def test_a_server_that_is_killed_at_a_request_loses_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weed: servers.Process, number: int
) -> None:
    """SIGKILL at each of the first requests of a save, and a restart: the newest manifest resumes exactly."""
    proxy = servers.Proxy(weed.port)
    use(proxy.port, monkeypatch)
    mirror = [Remote(f"s3://bucket/killed-{number}", keep=KeepLast(2), timeout=timedelta(seconds=LIMIT))]
    job = Miniature(tmp_path / "run", mirror=mirror)
    job.run.begin(job.step, 0.0)
    job.commit(1)
    wait(job)
    base, killed = len(proxy.requests), threading.Event()

    def kill(count: int, method: str, path: str) -> str | None:
        if count - base >= number and not killed.is_set():
            killed.set()
            weed.kill()
        return None

    proxy.fault = kill
    job.run.saver.save("checkpoint-2", 2, ManyFiles(job.run, "state at 2", 2, None, None))
    job.run.saver.flush()
    until(killed.is_set, lambda: f"the save has {len(proxy.requests) - base} requests")
    proxy.fault = lambda count, method, path: None
    weed.start()
    servers.until_writable(weed)
    job.run.finish_copies()
    state = job.run.context.mirrors.states[0]
    job.run.close()
    assert (state.behind, state.step) == (0, 2), state
    shutil.rmtree(tmp_path / "run")
    job = Miniature(tmp_path / "run", mirror=mirror)
    assert (job.step, job.text) == (2, "state at 2")
    assert list(committed(tmp_path / "run").values()) == [2]
    for each in range(REQUESTS):
        found = (tmp_path / "run" / "checkpoint-2" / f"part-{each:03d}.bin").read_text()
        assert found == f"state at 2, part {each}"
    job.run.close()
    proxy.close()
