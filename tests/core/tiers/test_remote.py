"""Files go to a store and back in pieces, with their digests on the fly; and starts claim its URL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers import object_store
from resume_adapters.core.tiers.object_store import ObjectStore
from resume_adapters.core.tiers.remote import Claims, RemoteTier
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, RunDirectoryUnusable, TierUnavailable

from object_stores import FaultyStore

STORAGE = LocalStorage()

MANIFEST = Manifest(step=1, epoch=0.0, world_size=1, generation=1, written=0.0, reason="", files=())

FOUND = TierCheckpoint("place", "checkpoint-1", MANIFEST)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART", 1000)


@pytest.fixture
def tier(store: FaultyStore) -> RemoteTier:
    return RemoteTier(store, STORAGE, "a test")  # type: ignore[arg-type]


def written(directory: Path, size: int) -> FileEntry:
    path = directory / f"file-{size}"
    path.write_bytes(os.urandom(size))
    return FileEntry(path.name, *STORAGE.digest(path))


# ---- Files


@pytest.mark.parametrize("size", [0, 1, 100, 999, 1000, 1001, 2000, 7777, 20_001])
def test_a_file_of_any_size_arrives(tmp_path: Path, store: FaultyStore, tier: RemoteTier, size: int) -> None:
    entry = written(tmp_path, size)
    tier.copy("place", tmp_path, [entry])
    assert store.list() == {f"place/file-{size}": size}
    assert b"".join(tier.read(FOUND, entry)) == (tmp_path / entry.path).read_bytes()


@pytest.mark.parametrize("size", [50, 500, 5000])
def test_a_file_that_has_changed_does_not_get_its_key(
    tmp_path: Path, store: FaultyStore, tier: RemoteTier, size: int
) -> None:
    entry = written(tmp_path, size)
    file = tmp_path / entry.path
    for content in (os.urandom(size), b"", file.read_bytes() + b"more"):
        file.write_bytes(content)
        with pytest.raises(CheckpointDamaged, match="no longer what its manifest says"):
            tier.copy("place", tmp_path, [entry])
    file.unlink()
    with pytest.raises(CheckpointDamaged, match="cannot be read"):
        tier.copy("place", tmp_path, [entry])
    assert store.list() == {}


@pytest.mark.parametrize("size", [500, 5000])
def test_an_object_that_is_missing_is_damaged(tmp_path: Path, tier: RemoteTier, size: int) -> None:
    with pytest.raises(CheckpointDamaged, match="is missing"):
        list(tier.read(FOUND, FileEntry("model.bin", size, "")))


def test_an_object_that_is_larger_than_its_manifest_says_is_not_read(store: FaultyStore, tier: RemoteTier) -> None:
    store.put("place/model.bin", b"x" * 600)
    with pytest.raises(CheckpointDamaged, match="has 600 bytes; expected at most 500"):
        list(tier.read(FOUND, FileEntry("model.bin", 500, "")))


def test_what_should_be_a_manifest_and_is_a_file_of_data_is_not_read(
    store: FaultyStore, tier: RemoteTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resume_adapters.core.tiers.remote._LARGEST_MANIFEST", 100)
    monkeypatch.setattr("resume_adapters.core.tiers.remote._LONGEST_CLAIM", 100)
    place = "checkpoint-1/@00000001-aa-0"
    for key in (f"{place}/resume/manifest.json", ".resume/claims/00000001"):
        store.put(key, b"x" * 101)
    assert tier.checkpoints() == [] and tier.unreadable == [place]
    assert "has 101 bytes; expected at most 100" in caplog.text
    assert tier.claims.owner() == (1, "unknown")


def test_what_the_store_refuses_of_a_part_is_unavailable(tmp_path: Path, store: FaultyStore, tier: RemoteTier) -> None:
    store.down = True
    with pytest.raises(TierUnavailable):
        tier.copy("place", tmp_path, [written(tmp_path, 5000)])


def test_very_large_files_have_few_parts(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(ObjectStore, "_translated", lambda *_: pytest.MonkeyPatch.context())
    api = type("Api", (), {"put": staticmethod(lambda *_, chunk_size, **__: given.append(chunk_size))})
    monkeypatch.setattr(store._store, "_api", api)
    for size, part in ((1001, 1000), (9_000_000, 1000), (9_000_001, 2000), (10**9, 112_000)):
        store._store.put_pieces("key", iter(()), size, Path())
        assert given[-1] == part and size / part <= 9000


# ---- Claims


def test_a_request_that_meets_its_own_first_attempt_has_succeeded(store: FaultyStore) -> None:
    mine = Claims(store, "me")
    mine.take(0)
    store.hides = lambda key: key.endswith(("2", "3"))
    store.put(".resume/claims/00000002", b"me")
    assert mine.take(1) == 2
    store.put(".resume/claims/00000003", b"somebody")
    assert mine.take(2) == 4, "another start has the third, though no listing shows it"


def test_a_claim_whose_answer_was_lost_is_taken_later(store: FaultyStore) -> None:
    """The start is later than it knows: it has another number in its own, new run directory."""
    store.put(".resume/claims/00000007", b"me")
    mine = Claims(store, "me")
    mine.take_late(1)
    mine.require_owned()
    assert mine.generation == 7


def test_a_claim_that_is_gone_does_no_harm(store: FaultyStore) -> None:
    mine = Claims(store, "me")
    assert mine.owner() == (0, "")
    assert mine.take(0) == 1 and mine.owner() == (1, "me")
    assert mine._owner_of(9) == "unknown"


def test_a_number_that_is_no_start_is_passed_over(store: FaultyStore) -> None:
    """No manifest could be read again that has it as its generation."""
    store.put(f".resume/claims/{1 << 63}", b"somebody")
    store.put(f".resume/claims/{'9' * 5000}", b"somebody")
    mine = Claims(store, "me")
    assert mine.take(0) == 1 and mine.take(0) == 2


def test_after_the_last_number_that_a_start_can_have_nobody_claims(store: FaultyStore) -> None:
    """No later start could read the next one."""
    key = f".resume/claims/{10**12 - 1}"
    store.put(key, b"somebody")
    with pytest.raises(RunDirectoryUnusable, match=rf"{key} says that start {10**12 - 1} has been there.*remove it"):
        Claims(store, "me").take(0)
    store._store.discard([key])
    assert Claims(store, "me").take(0) == 1
