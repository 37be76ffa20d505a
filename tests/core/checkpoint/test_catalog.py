"""What a run costs that keeps many checkpoints: each is read once, and a commit reads none of those before it."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from resume_adapters import KeepAll, KeepEvery, KeepLast
from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.manifest import decode_manifest, encode_manifest
from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.storage.base import Entry, Stamp
from resume_adapters.core.storage.local import LocalStorage

import faults
import miniature
from miniature import Miniature

pytestmark = pytest.mark.usefixtures("shape")

MANY = 200


class Counting(LocalStorage):
    """A disk that counts how often it is asked for something."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def exists(self, path: Path) -> bool:
        self.asked["looks"] += 1
        return super().exists(path)

    def is_file(self, path: Path) -> bool:
        self.asked["looks"] += 1
        return super().is_file(path)

    def size(self, path: Path) -> int:
        self.asked["sizes"] += 1
        return super().size(path)

    def stamp(self, path: Path) -> Stamp | None:
        self.asked["stamps"] += 1
        return super().stamp(path)

    def entries(self, path: Path) -> list[Entry]:
        self.asked["listings"] += 1
        return super().entries(path)

    def read(self, path: Path) -> bytes:
        self.asked["reads"] += 1
        return super().read(path)


def fill(directory: Path, count: int) -> None:
    """Commit one checkpoint and copy it, with a manifest for each step."""
    job = Miniature(directory)
    job.commit(1)
    first = directory / miniature.name(1)
    manifest = decode_manifest((miniature.own(first) / "manifest.json").read_bytes())
    for step in range(2, count + 1):
        miniature.copy(first, directory / miniature.name(step))
        job.run.control.journal.append("commit", step=step, checkpoint=miniature.name(step))
        renamed = msgspec.structs.replace(manifest, step=step)
        if miniature.FILES:
            path = miniature.name(step)
            files = [
                msgspec.structs.replace(each, path=path) if "/" not in each.path else each for each in manifest.files
            ]
            renamed = msgspec.structs.replace(renamed, files=tuple(files))
        (miniature.own(directory / miniature.name(step)) / "manifest.json").write_bytes(encode_manifest(renamed))
    job.run.close()


def cost_of_a_commit(directory: Path, count: int, keep: Policy) -> Counter[str]:
    fill(directory, count)
    storage = Counting()
    job = Miniature(directory, storage=storage, keep=keep)
    job.commit(count + 1)  # the first in a process looks at all of them
    storage.asked.clear()
    job.commit(count + 2)
    job.run.close()
    assert len(job.committed()) >= count
    return storage.asked


def test_where_all_is_kept_a_commit_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    few = cost_of_a_commit(tmp_path / "few", 10, KeepAll())
    assert cost_of_a_commit(tmp_path / "many", MANY, KeepAll()) == few


def test_a_commit_reads_no_checkpoint_that_is_known(tmp_path: Path) -> None:
    few = cost_of_a_commit(tmp_path / "few", 10, KeepEvery(1))
    many = cost_of_a_commit(tmp_path / "many", MANY, KeepEvery(1))
    assert [many[each] for each in ("reads", "sizes", "listings")] == [
        few[each] for each in ("reads", "sizes", "listings")
    ]


def test_a_start_reads_each_manifest_once(tmp_path: Path) -> None:
    fill(tmp_path, MANY)
    storage = Counting()
    job = Miniature(tmp_path, storage=storage, keep=KeepEvery(1))
    assert job.step == MANY
    assert storage.asked["reads"] < MANY + 20
    storage.asked.clear()
    job.commit(MANY + 1)
    job.run.close()
    assert storage.asked["reads"] < MANY + 20, "the first commit reads them for the sizes of their files"


def test_what_changes_behind_the_back_of_a_run_is_noticed(tmp_path: Path) -> None:
    """Checkpoints that a person removes, copies or replaces while the run is under way."""
    fill(tmp_path, 4)
    catalog = Catalog(LocalStorage(), tmp_path)
    assert {name: found.step for name, found in catalog.whole().items() if found} == {
        miniature.name(step): step for step in (1, 2, 3, 4)
    }
    own = miniature.own(tmp_path / miniature.name(2))
    manifest = decode_manifest((own / "manifest.json").read_bytes())
    (own / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, step=12)))
    shutil.rmtree(miniature.own(tmp_path / miniature.name(1)))
    faults.cut(miniature.own(tmp_path / miniature.name(3)) / "manifest.json")
    assert {name: found and found.step for name, found in catalog.whole().items()} == {
        miniature.name(4): 4,
        miniature.name(3): None,
        miniature.name(2): 12,
    }
    os.truncate(miniature.native(tmp_path / miniature.name(4)), 3)
    assert catalog.whole()[miniature.name(4)] is not None, "its marker is the same"
    assert not catalog.look_again([miniature.name(2), miniature.name(3), "something else"])
    assert catalog.look_again()
    assert catalog.whole()[miniature.name(4)] is None
    assert not catalog.look_again()


class Unstamped(LocalStorage):
    """A disk on which a marker is replaced at the moment at which it is asked for its stamp."""

    def stamp(self, path: Path) -> Stamp | None:
        return None


def test_a_manifest_without_a_stamp_is_read_each_time(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    catalog, path = Catalog(Unstamped(), tmp_path), tmp_path / miniature.name(1)
    assert catalog.summary(path).step == 1
    own = miniature.own(path) / "manifest.json"
    own.write_bytes(encode_manifest(msgspec.structs.replace(decode_manifest(own.read_bytes()), step=12)))
    assert catalog.summary(path).step == 12


def test_a_damaged_checkpoint_is_neither_counted_nor_removed_after_a_commit(tmp_path: Path) -> None:
    """It was whole when the run last looked; it is looked at again before another one is removed because of it."""
    job = Miniature(tmp_path, keep=KeepLast(3))
    for step in (10, 20, 30):
        job.commit(step)
    os.truncate(miniature.native(tmp_path / miniature.name(20)), 3)
    job.commit(40)
    job.commit(50)
    assert set(job.committed()) == {miniature.name(step) for step in (20, 30, 40, 50)}
    job.run.close()
