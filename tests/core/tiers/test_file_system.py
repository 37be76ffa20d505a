"""The store by fsspec: the same operations, for schemes that obstore does not know."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from resume_adapters import Remote
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers import claims
from resume_adapters.core.tiers.file_system import FileSystemStore
from resume_adapters.core.tiers.mirrors import open_tier
from resume_adapters.errors import CheckpointDamaged, MissingFramework, TierUnavailable, UnsupportedSetting
from waiting import LIMIT

from miniature import Miniature


class Mounted(LocalFileSystem):  # type: ignore[misc]
    """A file system of a scheme of its own."""

    protocol = ("mounted",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(LocalFileSystem._strip_protocol(path.replace("mounted://", "file:///")))


@pytest.fixture(autouse=True)
def scheme() -> None:
    fsspec.register_implementation("mounted", Mounted, clobber=True)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"mounted://{str(tmp_path / 'bucket').lstrip('/')}"


def test_a_file_system_is_a_store(url: str) -> None:
    store = FileSystemStore(url, {})
    store.create("x/one", b"1")
    store.create("x/one", b"11")
    store.put("x/y/a=b c.bin", b"222")
    store.put_parts("x/parts", iter([b"ab", b"cd", b"e"]), 2)
    assert store.list() == {"x/one": 2, "x/y/a=b c.bin": 3, "x/parts": 5}
    assert (store.list("x/y/"), store.list("x/p"), store.list("z/")) == ({"x/y/a=b c.bin": 3}, {"x/parts": 5}, {})
    assert (store.get("x/parts"), store.get_range("x/parts", 1, 3)) == (b"abcde", b"bc")
    assert (store.size("x/one"), store.size("x/two")) == (2, None)
    store.discard(["x/gone", "x/one"])
    assert "x/one" not in store.list()
    with pytest.raises(FileNotFoundError):
        store.get("x/one")


def test_a_directory_that_is_not_there_is_empty(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems say so, and some list nothing."""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("no such directory")

    monkeypatch.setattr(Mounted, "find", missing)
    assert FileSystemStore(url, {}).list() == {}


def test_what_is_damaged_on_its_way_is_said_as_that(url: str) -> None:
    def parts() -> Iterator[bytes]:
        yield b"ab"
        raise CheckpointDamaged("it has changed")

    with pytest.raises(CheckpointDamaged):
        FileSystemStore(url, {}).put_parts("x", parts(), 2)


def test_what_a_file_system_says_is_repeated_without_credentials(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileSystemStore(url, {"MOUNTED_PASSWORD": "hunter22"})

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("login with hunter22 failed")

    monkeypatch.setattr(Mounted, "cat_file", fail)
    with pytest.raises(TierUnavailable, match=r"could not read mounted://.*/a: login with \*\*\* failed"):
        store.get("a")


def test_a_scheme_that_nothing_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedSetting, match="unknown scheme; expected s3"):
        open_tier(Remote("nothing://host/run"), LocalStorage(), "aa")

    def lacks(scheme: str) -> None:
        raise ImportError("Install paramiko to access sftp")

    monkeypatch.setattr("fsspec.core.get_filesystem_class", lacks)
    with pytest.raises(MissingFramework, match="Install paramiko"):
        open_tier(Remote("sftp://host/run"), LocalStorage(), "aa")


def test_an_empty_machine_resumes_from_a_file_system_that_overwrites(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claims, "_SETTLE", 0.0)
    mirror = [Remote(url, timeout=timedelta(seconds=LIMIT))]
    for begins, ends in itertools.pairwise((0, 2, 4)):
        job = Miniature(tmp_path / "run", mirror=mirror)
        assert (job.step, job.text) == (begins, f"state at {begins}" if begins else "")
        job.run.begin(job.step, 0.0)
        job.commit(ends)
        job.run.finish_copies()
        assert "overwrites" in job.run._mirrors.states[0].note
        job.run.close()
        shutil.rmtree(tmp_path / "run")
    assert caplog.text.count("overwrites what exists") == 2
