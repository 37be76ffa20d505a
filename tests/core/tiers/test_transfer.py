"""Files go to a store and back in parts, with their digests on the fly."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from resume_adapters.core.checkpoint.manifest import FileEntry
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers import transfer
from resume_adapters.core.tiers.tier import LocalFile
from resume_adapters.core.tiers.transfer import download, upload
from resume_adapters.errors import CheckpointDamaged, TierUnavailable
from waiting import LIMIT

from object_stores import FaultyStore

STORAGE = LocalStorage()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PART", 1000)
    monkeypatch.setattr(transfer, "RANGE", 1000)


def local_file(directory: Path, size: int) -> LocalFile:
    path = directory / f"file-{size}"
    path.write_bytes(os.urandom(size))
    return LocalFile(path, FileEntry(path.name, *STORAGE.digest(path)))


@pytest.mark.parametrize("size", [0, 1, 100, 999, 1000, 1001, 2000, 7777])
def test_a_file_of_any_size_arrives(tmp_path: Path, store: FaultyStore, size: int) -> None:
    file = local_file(tmp_path, size)
    upload(store, STORAGE, [("a/b", file)])
    assert store.list() == {"a/b": size}
    assert b"".join(download(store, "a/b", size)) == file.path.read_bytes()


@pytest.mark.parametrize("size", [50, 500, 5000])
def test_a_file_that_has_changed_does_not_get_its_key(tmp_path: Path, store: FaultyStore, size: int) -> None:
    file = local_file(tmp_path, size)
    file.path.write_bytes(os.urandom(size))
    with pytest.raises(CheckpointDamaged, match="no longer what its manifest says"):
        upload(store, STORAGE, [("a", file)])
    file.path.write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match="no longer what its manifest says"):
        upload(store, STORAGE, [("a", file)])
    file.path.unlink()
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        upload(store, STORAGE, [("a", file)])
    assert store.list() == {}


@pytest.mark.parametrize("size", [500, 5000])
def test_an_object_that_is_short_or_missing_is_damaged(tmp_path: Path, store: FaultyStore, size: int) -> None:
    with pytest.raises(CheckpointDamaged, match="is missing"):
        list(download(store, "model.bin", size))
    upload(store, STORAGE, [("model.bin", local_file(tmp_path, size))])
    store.cuts = 1
    with pytest.raises(CheckpointDamaged, match="its manifest says"):
        list(download(store, "model.bin", size))


def test_what_the_store_refuses_of_a_part_is_unavailable(tmp_path: Path, store: FaultyStore) -> None:
    store.down = True
    with pytest.raises(TierUnavailable):
        upload(store, STORAGE, [("a", local_file(tmp_path, 5000))])


def test_very_large_files_have_few_parts() -> None:
    for size, part in ((1001, 1000), (9_000_000, 1000), (9_000_001, 2000), (10**9, 112_000)):
        assert transfer.part_of(size) == part
        assert size / part <= transfer.MOST_PARTS


_HANGING = """
import threading, time, types
from pathlib import Path
from resume_adapters.core.checkpoint.manifest import FileEntry
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers.tier import LocalFile
from resume_adapters.core.tiers.transfer import upload

begun = threading.Event()
def put(key, content):
    begun.set()
    time.sleep(3600)

path = Path(__file__)
files = [(str(number), LocalFile(path, FileEntry(path.name, *LocalStorage().digest(path)))) for number in range(20)]
upload_all = lambda: upload(types.SimpleNamespace(put=put), LocalStorage(), files)
threading.Thread(target=upload_all, daemon=True).start()
begun.wait()
"""


def test_a_store_that_hangs_does_not_keep_a_process_from_ending(tmp_path: Path) -> None:
    """The thread that copies is given up at the end of a run; those that it has started are not waited for either."""
    script = tmp_path / "script.py"
    script.write_text(_HANGING)
    subprocess.run([sys.executable, str(script)], timeout=LIMIT, check=True)


def test_of_files_that_go_in_parallel_the_first_error_is_raised_and_no_more_are_begun(
    tmp_path: Path, store: FaultyStore
) -> None:
    def refuse(number: int, key: str) -> None:
        raise TierUnavailable(f"{key} is refused")

    store.before = refuse
    file = local_file(tmp_path, 50)
    with pytest.raises(TierUnavailable, match="is refused"):
        upload(store, STORAGE, [(str(number), file) for number in range(1000)])
    assert store.requests < 100


def test_a_machine_that_has_no_more_threads_ends_the_copy_once_the_others_are_done(
    tmp_path: Path, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_three(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_three)
    files = [(str(number), local_file(tmp_path, number)) for number in range(1, 9)]
    with pytest.raises(RuntimeError, match="can't start new thread"):
        upload(store, STORAGE, files)
    assert len(started) == 3 and not any(thread.is_alive() for thread in started)
