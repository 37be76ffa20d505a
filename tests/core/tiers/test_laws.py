"""The laws of a tier: killed anywhere, the newest manifest resumes exactly; two jobs: one is fenced off; and so on."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from msgspec.structs import replace

from resume_adapters import KeepBest, KeepLast, Remote
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import decode_manifest
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.journal import SET_ASIDE
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.stop.walltime import Deadline
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.core.tiers import mirrors
from resume_adapters.core.tiers.mirrors import TierMirror
from resume_adapters.core.tiers.remote import Claims
from resume_adapters.errors import (
    CheckpointDamaged,
    CheckpointsExist,
    FencedOff,
    NoValidCheckpoint,
    RunDirectoryUnusable,
    TierUnavailable,
    UnsupportedSetting,
)
from waiting import LIMIT, until, until_ended

import faults
import miniature
from miniature import Foreign, Miniature, committed, leftovers, set_aside
from object_stores import FaultyStore, open_store

Mirror = Callable[..., list[Remote]]


class Died(BaseException):
    """Stands for SIGKILL in the thread that copies: nothing after it happens."""


def train(directory: Path, mirror: list[Remote], *steps: int, **options: Any) -> Miniature:
    """Start a run and commit steps, each with its copy; the run stays open."""
    job = begin(directory, mirror, **options)
    for step in steps:
        job.commit(step)
        wait(job)
    return job


def begin(directory: Path, mirror: list[Remote], **options: Any) -> Miniature:
    job = Miniature(directory, mirror=mirror, **options)
    job.run.begin(job.step, 0.0)
    return job


def begin_elsewhere(directory: Path, mirror: list[Remote]) -> Miniature:
    """Begin as on another machine, which does not see the run directory of the first."""
    mirrors._USED.clear()
    return begin(directory, mirror)


def wait(job: Miniature) -> None:
    """Wait until nothing is due on any tier."""
    until(
        lambda: not any(state.behind for state in job.run.context.mirrors.states),
        lambda: job.run.context.mirrors.states,
    )


def finish(job: Miniature, step: int) -> None:
    job.run.set_state(RunState.FINISHED, step=step, epoch=1.0)
    job.run.finish_copies()
    job.run.close()


def lose(directory: Path) -> None:
    """Lose the machine: its disk is gone."""
    shutil.rmtree(directory)


def train_and_lose(directory: Path, mirror: list[Remote], *steps: int) -> None:
    finish(train(directory, mirror, *steps), steps[-1])
    lose(directory)


def resumed(directory: Path, mirror: list[Remote]) -> tuple[int, str | None]:
    """Start, and leave at once; return the step and the text of what it has resumed."""
    job = Miniature(directory, mirror=mirror)
    job.run.close()
    return job.step, job.text


def test_an_empty_machine_resumes_from_the_newest_copy(
    tmp_path: Path, shape: None, remote: Mirror, store: FaultyStore
) -> None:
    train_and_lose(tmp_path / "a", remote(), 1, 2, 3)
    job = Miniature(tmp_path / "b", mirror=remote())
    assert (job.step, job.text) == (3, "state at 3")
    assert committed(tmp_path / "b") == {miniature.name(3): 3}
    assert job.run.generation == 2
    assert leftovers(tmp_path / "b") == []
    job.run.close()


def test_a_newer_local_checkpoint_is_taken_and_copied(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    job = train(tmp_path, remote(), 1)
    store.down = True
    job.commit(2)
    job.run.close()
    store.down = False
    job = begin(tmp_path, remote())
    assert job.step == 2
    wait(job)
    job.run.close()
    assert manifests(store) == [1, 2]


def manifests(store: FaultyStore) -> list[int]:
    """Return the steps of the checkpoints in a store."""
    keys = [key for key in store._store.list() if key.endswith("/resume/manifest.json")]
    return sorted(int(key.split("/")[0].removeprefix("checkpoint-").removesuffix(".ckpt")) for key in keys)


def test_what_is_there_already_is_not_copied_again(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    train(tmp_path, remote(), 1).run.close()
    before = store._store.list()
    job = begin(tmp_path, remote())
    wait(job)
    job.run.close()
    added = store._store.list().keys() - before.keys()
    assert added == {".resume/claims/00000002"}


@pytest.mark.parametrize("number", range(11))
def test_killed_before_any_request_of_a_copy_the_newest_manifest_resumes(
    tmp_path: Path, remote: Mirror, store: FaultyStore, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy puts four files and its manifest; then retention removes the manifest and files before it."""
    job = train(tmp_path / "a", remote(keep=KeepLast(1)), 1)
    mirror, base = job.run.context.mirrors._mirrors[0], store.requests
    monkeypatch.setattr(threading, "excepthook", lambda found: None)

    def die(count: int, key: str) -> None:
        if count >= base + number:
            raise Died

    store.before = die
    job.commit(2)
    until(lambda: not mirror._thread.is_alive() or not mirror.state.behind)
    store.before = lambda count, key: None
    found = manifests(store)
    assert found == ([1] if number <= 4 else [1, 2] if number <= 5 else [2])
    job.run.close()
    lose(tmp_path / "a")
    assert resumed(tmp_path / "b", remote()) == (found[-1], f"state at {found[-1]}")


def test_a_damaged_copy_is_found_and_the_one_before_taken(
    tmp_path: Path, shape: None, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    train_and_lose(tmp_path / "a", remote(), 1, 2)
    key = next(key for key in store._store.list() if f"{miniature.name(2)}/" in key and key.endswith("ema.safetensors"))
    content = bytearray(store.get(key))
    content[-1] ^= 1
    store._store.put(key, bytes(content))
    job = Miniature(tmp_path / "b", mirror=remote())
    assert (job.step, job.text) == (1, "state at 1")
    assert "ema.safetensors has 82 bytes with the digest" in caplog.text
    job.run.close()


class Reading(LocalStorage):
    """Knows of which files the digests were read from the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.digested: list[str] = []

    def digest(self, path: Path, *, skip_holes: bool = False) -> tuple[int, str]:
        self.digested.append(path.name)
        return super().digest(path, skip_holes=skip_holes)


def test_only_what_was_compared_on_its_way_is_not_read_again(
    tmp_path: Path, remote: Mirror, store: FaultyStore
) -> None:
    """A fetched checkpoint, and a newer one that lies beside it and is damaged."""
    job = train(tmp_path / "a", remote(), 1, 2)
    store.down = True
    job.commit(3)
    job.run.close()
    store.down = False
    lose(tmp_path / "a" / "checkpoint-2")
    faults.flip(tmp_path / "a" / "checkpoint-3" / "model.bin")
    storage = Reading()
    job = Miniature(tmp_path / "a", mirror=remote(), storage=storage)
    assert (job.step, job.text) == (2, "state at 2")
    assert storage.digested.count("model.bin") == 3, "of 3 and 1 at first, and of 3 beside what was fetched"
    job.run.close()


@pytest.mark.parametrize("fault", ["flipped", "missing", "short", "manifest"])
def test_where_every_copy_is_damaged_the_run_does_not_begin_from_zero(
    tmp_path: Path, remote: Mirror, store: FaultyStore, fault: str
) -> None:
    train_and_lose(tmp_path / "a", remote(), 1)
    end = "manifest.json" if fault == "manifest" else "model.bin"
    key = next(key for key in store._store.list() if key.endswith(end))
    if fault == "missing":
        store._store.discard([key])
    else:
        content = store.get(key)
        store._store.put(key, content[:-1] if fault == "short" else b"\0" + content[1:])
    expected = TierUnavailable if fault == "manifest" else NoValidCheckpoint
    with pytest.raises(expected, match=r"manifest|model\.bin"):
        Miniature(tmp_path / "b", mirror=remote())


def test_a_damaged_local_checkpoint_is_replaced_by_its_copy(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    finish(train(tmp_path, remote(), 1), 1)
    file = tmp_path / "checkpoint-1" / "model.bin"
    file.write_bytes(b"\0" + file.read_bytes()[1:])
    job = Miniature(tmp_path, mirror=remote())
    assert (job.step, job.text) == (1, "state at 1")
    assert set_aside(tmp_path) == ["checkpoint-1.superseded.1"]
    job.run.close()


def test_a_copy_that_cannot_be_read_is_passed_over(
    tmp_path: Path, shape: None, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A store may archive or refuse one object, and have the others."""
    train_and_lose(tmp_path / "a", remote(), 1, 2)
    store.refuses = lambda key: key.startswith(f"{miniature.name(2)}/") and not key.endswith("manifest.json")
    job = Miniature(tmp_path / "b", mirror=remote())
    assert (job.step, job.text, leftovers(tmp_path / "b")) == (1, "state at 1", [])
    assert f"{miniature.name(2)} of the mirror is not used: could not read" in caplog.text
    job.run.close()
    lose(tmp_path / "b")
    store.refuses = lambda key: key.startswith("checkpoint-") and not key.endswith("manifest.json")
    with pytest.raises(TierUnavailable, match=r"could not read .*checkpoint-\d.*: access is denied"):
        Miniature(tmp_path / "b", mirror=remote())
    store.refuses = lambda key: False
    assert resumed(tmp_path / "b", remote())[0] == 2


def test_what_the_run_cannot_use_of_a_mirror_is_passed_over(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    """It arrives whole, and is not what this run can go on from."""
    train_and_lose(tmp_path / "a", remote(), 1, 2)

    def resumed(*usable: int) -> Checkpoint | None:
        def require_usable(checkpoint: Checkpoint) -> None:
            if checkpoint.step not in usable:
                raise CheckpointDamaged("it is of another model")

        run = ResumableRun(tmp_path / "b", RunOptions(mirror=remote()), ranks=SingleProcess())
        with contextlib.closing(run):
            return run.open(require_usable).checkpoint

    found = resumed(1)
    assert found is not None and found.step == 1
    assert set_aside(tmp_path / "b") == ["checkpoint-2.1"]
    lose(tmp_path / "b")
    with pytest.raises(NoValidCheckpoint, match="it is of another model"):
        resumed()


@pytest.mark.parametrize("step", [1, 3], ids=["older", "newer"])
def test_a_checkpoint_of_the_bare_framework_is_older_than_any_of_the_mirror(
    tmp_path: Path, remote: Mirror, store: FaultyStore, step: int
) -> None:
    train_and_lose(tmp_path / "a", remote(), 2)
    (tmp_path / "b" / "checkpoint-foreign").mkdir(parents=True)
    foreign = Foreign(lambda path: ForeignStep(step) if path.name == "checkpoint-foreign" else None)
    job = Miniature(tmp_path / "b", mirror=remote(), foreign=foreign)
    assert job.step == 2
    assert committed(tmp_path / "b") == {"checkpoint-2": 2}
    job.run.close()


def test_a_listing_that_lags_behind_is_waited_for(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    job = train(tmp_path, remote(), 1)
    store.hides = lambda key: key.startswith("checkpoint-2/")
    job.commit(2)
    until(lambda: "has no bytes" in job.run.context.mirrors.states[0].problem)
    store.hides = lambda key: False
    finish(job, 2)
    assert manifests(store) == [1, 2]


@pytest.mark.parametrize("name", ["src", "latest", ".ckpt", "checkpoint-1.superseded"])
def test_what_has_no_name_that_a_framework_gives_is_passed_over_by_name(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """It would be written under that name, over what is there."""
    train_and_lose(tmp_path / "a", remote(), 1, 2)
    for key in store._store.list("checkpoint-2/"):
        store._store.put(key.replace("checkpoint-2", name), store.get(key))
        store._store.discard([key])
    job = Miniature(tmp_path / "b", mirror=remote())
    assert job.step == 1
    assert "is not used: " in caplog.text and "is no name that a framework gives to a checkpoint" in caplog.text
    job.run.close()


def manifest_of(store: FaultyStore, step: int) -> str:
    """Return the key of a manifest."""
    return next(key for key in store.list(f"{miniature.name(step)}/") if key.endswith("manifest.json"))


def forge(store: FaultyStore, key: str, **fields: Any) -> None:
    """Replace a manifest by one that says something else, under a right digest."""
    record = msgspec.json.encode(replace(decode_manifest(store.get(key)), **fields))
    document = {"digest": xxhash.xxh3_128_hexdigest(record), "manifest": msgspec.Raw(record)}
    store._store.put(key, msgspec.json.encode(document))


@pytest.mark.parametrize("written", [1e308, 1e12, -1.0])
def test_a_time_that_no_clock_says_is_passed_over_by_name(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture, written: float
) -> None:
    train_and_lose(tmp_path / "a", remote(), 1, 2)
    key = manifest_of(store, 2)
    forge(store, key, written=written)
    job = begin(tmp_path / "b", remote())
    assert job.step == 1 and f"{key.removesuffix('/resume/manifest.json')} is not used" in caplog.text
    job.run.close()


def test_a_copy_whose_paths_cannot_be_written_here_gives_way_to_an_older_one(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The path is one that a manifest may have, and too long below this run directory."""
    train_and_lose(tmp_path / "a", remote(), 1, 2)
    key, path = manifest_of(store, 2), "/".join(["d" * 200] * 4)
    found = decode_manifest(store.get(key))
    model = next(each for each in found.files if each.path == "model.bin")
    place = key.removesuffix("resume/manifest.json")
    store._store.put(f"{place}{path}", store.get(f"{place}model.bin"))
    forge(store, key, files=(*found.files, replace(model, path=path)))
    directory = tmp_path.joinpath(*["r" * 200] * 16)
    job = Miniature(directory, mirror=remote())
    assert (job.step, job.text, leftovers(directory)) == (1, "state at 1", [])
    assert "checkpoint-2 of the mirror is not used" in caplog.text and "cannot be written here" in caplog.text
    job.run.close()


def test_a_copy_that_lacks_bytes_is_not_fetched(
    tmp_path: Path, shape: None, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The store knows the sizes: nothing is read for a manifest that claims what is not there."""
    train_and_lose(tmp_path / "a", remote(), 1, 2)
    key = manifest_of(store, 2)
    forge(store, key, files=tuple(replace(each, bytes=1 << 49) for each in decode_manifest(store.get(key)).files[:1]))
    job = Miniature(tmp_path / "b", mirror=remote())
    assert (job.step, job.text) == (1, "state at 1")
    assert f"bytes, its manifest says {1 << 49}" in caplog.text
    job.run.close()


def test_what_a_listing_does_not_have_yet_is_read(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    train_and_lose(tmp_path / "a", remote(), 1, 2)
    store.hides = lambda key: key.endswith("model.bin")
    assert resumed(tmp_path / "b", remote()) == (2, "state at 2")


def test_where_the_newest_copy_has_no_room_the_run_goes_back_to_no_older_one(
    tmp_path: Path, shape: None, remote: Mirror, store: FaultyStore
) -> None:
    train_and_lose(tmp_path / "a", remote(), 1, 2)

    class Full(LocalStorage):
        def free_bytes(self, path: Path) -> int:
            return 10

    with pytest.raises(RunDirectoryUnusable, match=r"has \d+ B, and .* has 10 B free: free space, or remove it there"):
        Miniature(tmp_path / "b", mirror=remote(), storage=Full())
    assert committed(tmp_path / "b") == {} and leftovers(tmp_path / "b") == []
    assert resumed(tmp_path / "b", remote())[0] == 2


def test_a_manifest_that_is_damaged_is_said_once(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention lists the mirror after each copy."""
    train(tmp_path, remote(), 1).run.close()
    key = next(key for key in store._store.list() if key.endswith("manifest.json"))
    store._store.put(key, b"{")
    train(tmp_path, remote(keep=KeepLast(1)), 2, 3).run.close()
    assert manifests(store) == [1, 3]
    assert caplog.text.count("is not used") == 1


def test_a_file_that_the_store_has_lost_is_copied_again(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    put, lost = store.put_pieces, list[str]()

    def lose_once(key: str, *given: Any) -> None:
        if key.endswith("model.bin") and not lost:
            lost.append(key)
        else:
            put(key, *given)

    store.put_pieces = lose_once  # type: ignore[method-assign]
    job = train(tmp_path / "a", remote(), 1)
    journal = job.run.control.journal.history()
    finish(job, 1)
    (behind,) = [entry for entry in journal if entry["event"] == "mirror-behind"]
    assert "model.bin has no bytes" in behind["reason"]
    lose(tmp_path / "a")
    assert resumed(tmp_path / "b", remote()) == (1, "state at 1")


def test_of_two_jobs_with_one_mirror_the_earlier_is_fenced_off(
    tmp_path: Path, remote: Mirror, store: FaultyStore
) -> None:
    first = train(tmp_path / "a", remote(), 1)
    second = begin_elsewhere(tmp_path / "b", remote())
    assert second.step == 1
    with pytest.raises(FencedOff, match="Two jobs were started with one mirror"):
        first.commit(2)
        until_ended(first.run.context.mirrors._mirrors[0]._thread)
        assert "owns now" in (first.run.flag.reason or "")
        first.commit(3)
    with pytest.raises(FencedOff):
        first.run.finish_copies()
    first.run.close()
    second.commit(4)
    wait(second)
    assert manifests(store) == [1, 4]
    second.run.close()


def test_a_store_that_overwrites_is_refused_at_the_start(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    """Two jobs could not know of each other there."""
    store.lies = True
    with pytest.raises(UnsupportedSetting, match="overwrites what exists where it is asked to create it only"):
        Miniature(tmp_path, mirror=remote())


def test_a_store_that_overwrites_and_is_asked_late_ends_no_training(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.down = True
    job = begin(tmp_path, [])
    job.commit(1)
    job.run.close()
    job = begin(tmp_path, remote())
    store.down, store.lies = False, True
    job.commit(2)
    until(lambda: "overwrites what exists" in job.run.context.mirrors.states[0].problem)
    job.commit(3)
    job.run.close()
    assert manifests(store) == [] and job.run.flag.reason is None


def test_a_claim_of_another_start_that_is_not_visible_yet_is_passed_over(store: FaultyStore) -> None:
    """A store may answer 409 while it creates what another start has asked for."""
    create = store.create

    def conflict(key: str, content: bytes) -> None:
        if key.endswith("00000001"):
            raise FileExistsError(key)
        create(key, content)

    store.create = conflict  # type: ignore[method-assign]
    assert Claims(store, "one").take(0) == 2


def test_retention_removes_nothing_once_a_later_start_owns_the_mirror(
    tmp_path: Path, remote: Mirror, store: FaultyStore
) -> None:
    """It lists the mirror first, which may take minutes."""
    job = train(tmp_path, remote(keep=KeepLast(1)), 1)

    def claim(number: int, key: str) -> None:
        if key.endswith("manifest.json"):
            store._store.put(".resume/claims/00000099", b"another machine")

    store.before = claim
    with contextlib.suppress(FencedOff):  # the copy may be as far as that when the commit ends
        job.commit(2)
    until_ended(job.run.context.mirrors._mirrors[0]._thread)
    store.before = lambda number, key: None
    assert manifests(store) == [1, 2] and "start 99" in (job.run.flag.reason or "")
    job.run.close()


def test_a_store_that_is_down_never_stops_a_training(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    job = train(tmp_path, remote(), 1)
    store.down = True
    for step in (2, 3):
        job.commit(step)
    mirror = job.run.context.mirrors._mirrors[0]
    until(lambda: any(entry["event"] == "mirror-behind" for entry in job.run.control.journal.history()))
    assert mirror.state.behind == 2 and "it is down" in mirror._problem
    assert "mirror behind" in caplog.text and "Training goes on" in caplog.text
    store.down = False
    finish(job, 3)
    assert manifests(store) == [1, 3], "older ones that are due are left out"
    assert "no longer behind" in caplog.text
    status = job.run.control.status.read()
    assert status is not None and status.mirrors[0].step == 3 and status.mirrors[0].behind == 0


def test_a_mirror_that_stays_behind_stops_the_run_where_that_is_asked_for(
    tmp_path: Path, remote: Mirror, store: FaultyStore
) -> None:
    job = train(tmp_path, remote(on_behind="stop", timeout=timedelta(milliseconds=1)), 1)
    store.down = True
    job.commit(2)
    job.run.context.mirrors._mirrors[0]._failing_since = 0.0
    until(lambda: job.run.flag.reason)
    assert "is behind for" in (job.run.flag.reason or "")
    job.run.close()


def test_an_empty_machine_does_not_begin_from_zero_where_the_store_is_down(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    finish(train(tmp_path, remote(), 1), 1)
    store.down = True
    job = Miniature(tmp_path, mirror=remote())
    assert job.step == 1 and "The run resumes from the checkpoints in" in caplog.text
    job.run.close()
    lose(tmp_path)
    with pytest.raises(TierUnavailable, match="does not begin from zero in its place"):
        Miniature(tmp_path, mirror=remote())


def test_a_start_that_could_not_claim_is_fenced_off_by_one_that_has(
    tmp_path: Path, remote: Mirror, store: FaultyStore
) -> None:
    finish(train(tmp_path / "a", remote(), 1), 1)
    shutil.copytree(tmp_path / "a", tmp_path / "copy", symlinks=True)
    store.down = True
    cut_off = begin(tmp_path / "a", remote())
    store.down = False
    begin_elsewhere(tmp_path / "copy", remote()).run.close()
    with pytest.raises(FencedOff):
        cut_off.commit(2)
        until_ended(cut_off.run.context.mirrors._mirrors[0]._thread)
        cut_off.commit(3)
    cut_off.run.close()


def test_a_start_that_could_not_claim_copies_what_the_start_before_it_has_saved(
    tmp_path: Path, remote: Mirror, store: FaultyStore
) -> None:
    """The checkpoint is of an earlier generation than the claim, which is no reason to be locked out."""
    job = train(tmp_path, remote(), 1)
    store.down = True
    job.commit(2)
    job.run.close()
    job = begin(tmp_path, remote())
    store.down = False
    wait(job)
    job.commit(3)
    wait(job)
    job.run.close()
    assert manifests(store) == [1, 2, 3] and job.run.flag.reason is None
    assert ".resume/claims/00000002" in store._store.list(), "it claims before its first copy"


def test_a_store_that_has_what_is_due_has_no_problem_any_more(
    tmp_path: Path, remote: Mirror, store: FaultyStore
) -> None:
    """Else a failure hours later would count as late since then, and stop the run where that is asked for."""
    finish(train(tmp_path, remote(), 1), 1)
    store.down = True
    job = begin(tmp_path, remote())
    until(lambda: job.run.context.mirrors.states[0].problem)
    store.down = False
    wait(job)
    until(lambda: not job.run.context.mirrors.states[0].problem)
    assert job.run.context.mirrors._mirrors[0]._failing_since is None
    job.run.close()


def test_scratch_asks_the_mirror_too(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    train_and_lose(tmp_path, remote(), 1, 2)
    with pytest.raises(CheckpointsExist, match="the mirror holds 2 committed checkpoints, checkpoint-2"):
        Miniature(tmp_path, mirror=remote(), resume="scratch")
    lose(tmp_path)
    job = begin(tmp_path, remote(), resume="scratch!")
    assert job.step == 0
    job.commit(1, "another run")
    wait(job)
    job.run.close()
    lose(tmp_path)
    assert resumed(tmp_path, remote()) == (1, "another run"), "what was set aside stays so"


def test_scratch_begins_where_the_mirror_is_empty(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    job = Miniature(tmp_path, mirror=remote(), resume="scratch")
    assert job.step == 0
    job.run.close()


def test_a_rewind_sets_aside_once(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    """What is saved after it under the same step is resumed from."""
    finish(train(tmp_path, remote(), 1, 2), 2)
    shutil.rmtree(tmp_path / "checkpoint-2")
    Miniature(tmp_path).run.control.journal.append("rewind", step=1, set_aside=["checkpoint-2.1"])
    job = begin(tmp_path, remote())
    assert job.step == 1, "what was set aside is not fetched back"
    job.commit(2, "after the rewind")
    wait(job)
    job.run.close()
    for _ in range(2):
        job = Miniature(tmp_path, mirror=remote())
        assert (job.step, job.text) == (2, "after the rewind")
        job.run.close()
    assert [entry["event"] for entry in job.run.control.journal.history()].count(SET_ASIDE) == 1


@pytest.mark.parametrize("saves", [False, True], ids=["nothing saved", "saved"])
def test_a_rewind_holds_for_a_mirror_that_the_next_launch_did_not_use(
    tmp_path: Path, remote: Mirror, store: FaultyStore, saves: bool
) -> None:
    """And what that launch has saved is copied, and resumed from."""
    finish(train(tmp_path, remote(), 1, 2), 2)
    shutil.rmtree(tmp_path / "checkpoint-2")
    Miniature(tmp_path).run.control.journal.append("rewind", step=1, set_aside=["checkpoint-2.1"])
    job = begin(tmp_path, [])
    assert job.step == 1
    if saves:
        job.commit(3, "without the mirror")
    job.run.close()
    expected = (3, "without the mirror") if saves else (1, "state at 1")
    for _ in range(2):
        job = begin(tmp_path, remote())
        assert (job.step, job.text) == expected
        wait(job)
        job.run.close()
        lose(tmp_path)
    job = begin(tmp_path, remote())
    job.commit(4)
    wait(job)
    job.run.close()
    assert resumed(tmp_path, remote())[0] == 4


def test_of_two_mirrors_both_set_aside_what_an_empty_machine_does(tmp_path: Path, url: str) -> None:
    """The second has been claimed more often, so the first has copies of a later start than its own claims say."""
    two = open_store(f"{url}/two")
    two.create(".resume/claims/00000009", b"another machine")
    mirror = [Remote(f"{url}/one"), Remote(f"{url}/two")]
    train(tmp_path, mirror, 1).run.close()
    lose(tmp_path)
    Miniature(tmp_path, mirror=mirror, resume="scratch!").run.close()
    lose(tmp_path)
    assert resumed(tmp_path, mirror)[0] == 0


def test_setting_aside_needs_a_store_that_answers(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    store.down = True
    with pytest.raises(TierUnavailable, match="did not answer when this start began"):
        Miniature(tmp_path, mirror=remote(), resume="scratch!")


def test_a_policy_holds_for_the_mirror_alone(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    keep = KeepLast(1) | KeepBest(1, "loss")
    job = begin(tmp_path, remote(keep=keep), keep=KeepLast(1))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        job.save(step, describe=lambda loss=loss: {"epoch": 0.0, "reason": "scheduled", "metrics": {"loss": loss}})
        job.run.saver.flush()
        wait(job)
    job.run.close()
    assert manifests(store) == [2, 4]
    assert not [key for key in store._store.list() if key.startswith(("checkpoint-1/", "checkpoint-3/"))]
    assert committed(tmp_path).keys() == {"checkpoint-4"}


def test_the_last_save_is_copied_whatever_it_was_saved_for(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    """A trainer saves at its last step as at any other, and only then learns that it ends."""
    job = train(tmp_path, remote(every=3), 1, 2, 3)
    assert manifests(store) == [1]
    finish(job, 3)
    assert manifests(store) == [1, 3]


class Blocked:
    """Lets each copy of a tier wait until the test has seen it, so that a few saves take no longer than one copy.

    Args:
        mirror: the thread that copies.
    """

    def __init__(self, mirror: TierMirror) -> None:
        self._tier: Any = mirror.tier
        self._copy, self._tier.copy = self._tier.copy, self._blocked
        self.begun: list[str] = []
        self._released = threading.Semaphore(0)

    def _blocked(self, place: str, *given: Any) -> None:
        self.begun.append(place.split("/")[0])
        assert self._released.acquire(timeout=LIMIT)
        self._copy(place, *given)

    def until_begun(self, name: str) -> None:
        until(lambda: name in self.begun, lambda: self.begun)

    def release(self, copies: int = 1) -> None:
        self._released.release(copies)


def test_retention_leaves_what_is_being_copied(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    """A copy takes longer than several saves, and what is copied is neither the oldest that is due nor the newest."""
    job = begin(tmp_path, remote(), keep=KeepLast(2))
    blocked = Blocked(job.run.context.mirrors._mirrors[0])
    job.commit(1)
    blocked.until_begun("checkpoint-1")
    job.commit(2)
    job.commit(3)
    blocked.release()
    blocked.until_begun("checkpoint-3")
    for step in (4, 5, 6):
        job.commit(step)
    assert committed(tmp_path).keys() == {"checkpoint-3", "checkpoint-5", "checkpoint-6"}
    blocked.release()
    blocked.until_begun("checkpoint-6")
    assert manifests(store) == [1, 3]
    blocked.release()
    finish(job, 6)
    assert manifests(store) == [1, 3, 6]


@pytest.mark.parametrize(
    ("damage", "words"),
    [(lambda path: path.write_bytes(b"\0" * 200), "no longer what its manifest says"), (Path.unlink, "cannot be read")],
    ids=["changed", "gone"],
)
def test_a_checkpoint_that_is_not_what_was_committed_is_not_copied(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture, damage: Any, words: str
) -> None:
    job = train(tmp_path, remote(), 1)
    store.down = True
    job.commit(2)
    damage(tmp_path / "checkpoint-2" / "model.bin")
    store.down = False
    finish(job, 2)
    assert manifests(store) == [1] and words in caplog.text


def test_the_last_copy_is_begun_only_if_it_fits(
    tmp_path: Path, remote: Mirror, store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    job = train(tmp_path, remote(every=100), 1)
    mirror = job.run.context.mirrors._mirrors[0]
    mirror._rate = 1.0  # a byte a second
    job.commit(2)
    mirrors.finish_all([mirror], 5.0)
    job.run.close()
    assert manifests(store) == [1] and "would not have been copied in the time left" in caplog.text


@pytest.mark.parametrize("walltime", [False, True], ids=["failed", "walltime"])
def test_a_run_that_fails_does_not_wait_for_long(
    tmp_path: Path, remote: Mirror, store: FaultyStore, walltime: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is to be launched again; and the processes that share the machine may be waited for."""
    job = begin(tmp_path, remote())
    blocked = Blocked(job.run.context.mirrors._mirrors[0])
    if walltime:
        job.run.steps.deadline = Deadline(time.time() + 0.5, "a test", time.time())
    else:
        monkeypatch.setattr(mirrors, "_LONGEST_CLOSE", 0.5)
    monkeypatch.setattr(mirrors, "_LONGEST_GOODBYE", 0.5)
    thread = job.run.context.mirrors._mirrors[0]._thread
    job.commit(1)
    blocked.until_begun("checkpoint-1")
    began = time.monotonic()
    job.run.close()
    assert time.monotonic() - began < LIMIT / 2
    blocked.release()
    until_ended(thread)


def test_a_fetched_checkpoint_replaces_an_older_one_of_its_name(
    tmp_path: Path, remote: Mirror, store: FaultyStore
) -> None:
    train(tmp_path / "a", remote(), 1).run.close()
    shutil.copytree(tmp_path / "a", tmp_path / "old", symlinks=True)
    job = begin(tmp_path / "a", remote())
    job.commit(1, "again")
    wait(job)
    job.run.close()
    lose(tmp_path / "a")
    job = Miniature(tmp_path / "old", mirror=remote())
    assert (job.step, job.text) == (1, "again")
    assert len(set_aside(tmp_path / "old")) == 1
    job.run.close()


def test_two_trainings_of_a_process_need_two_urls(tmp_path: Path, remote: Mirror, store: FaultyStore) -> None:
    train(tmp_path / "a", remote(), 1).run.close()
    with pytest.raises(UnsupportedSetting, match="expected a URL for each run"):
        Miniature(tmp_path / "b", mirror=remote())


def test_the_url_may_have_the_name_of_the_run_directory(tmp_path: Path, url: str) -> None:
    for name in "ab":
        train(tmp_path / name, [Remote(f"{url}/{{run}}")], 1).run.close()


def test_of_two_mirrors_one_serves_where_the_other_is_down(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stores = {f"{url}/{name}": FaultyStore(f"{url}/{name}") for name in ("one", "two")}
    monkeypatch.setattr(mirrors, "ObjectStore", lambda url, *_: stores[url])
    monkeypatch.setattr(mirrors, "HubStore", lambda url, *_, **options: stores[url])
    mirror = [Remote(each) for each in stores]
    train(tmp_path, mirror, 1, 2).run.close()
    for up, down in (("one", "two"), ("two", "one")):
        lose(tmp_path)
        stores[f"{url}/{up}"].down, stores[f"{url}/{down}"].down = False, True
        caplog.clear()
        job = Miniature(tmp_path, mirror=mirror)
        assert job.step == 2
        assert f"it is down. The run resumes from the checkpoints in {url}/{up}" in caplog.text
        job.run.close()
    lose(tmp_path)
    stores[f"{url}/two"].down = True
    with pytest.raises(TierUnavailable, match="does not begin from zero in its place"):
        Miniature(tmp_path, mirror=[mirror[1]])


def test_of_two_mirrors_the_second_serves_where_the_first_is_damaged(tmp_path: Path, url: str) -> None:
    mirror = [Remote(f"{url}/one"), Remote(f"{url}/two")]
    train(tmp_path, mirror, 1).run.close()
    lose(tmp_path)
    one = open_store(f"{url}/one")
    key = next(key for key in one.list() if key.endswith("model.bin"))
    one.put(key, b"\0" * 200)
    assert resumed(tmp_path, mirror)[0] == 1
