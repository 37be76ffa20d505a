"""A run directory in trouble: not usable, full, owned by another start."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import KeepAll, KeepLast
from resume_adapters.core.checkpoint.writer import Captured
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import (
    CheckpointDamaged,
    FencedOff,
    NotSerialisable,
    ResumeError,
    RunDirectoryUnusable,
    SaveFailed,
    Stopped,
    UnsupportedSetting,
)

import faults
import miniature
from faults import Disturbed, refuse
from miniature import Miniature, MiniatureContent


def test_a_run_directory_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunDirectoryUnusable, match="is a file, or lies below one") as refused:
            Miniature(directory)
        assert isinstance(refused.value, OSError)
        assert refused.value.path == directory
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_run_directory_that_cannot_be_written_is_refused_before_training(tmp_path: Path, number: int) -> None:
    with pytest.raises(RunDirectoryUnusable, match="cannot be written") as refused:
        Miniature(tmp_path, storage=faults.FailingStorage(number))
    assert os.strerror(number) in str(refused.value)
    assert isinstance(refused.value, OSError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RunDirectoryUnusable, match="cannot be written"):
        Miniature(tmp_path)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_start_that_fails_at_any_operation_is_one_clear_error_and_loses_nothing(tmp_path: Path, number: int) -> None:
    prepared = tmp_path / "prepared"
    job = Miniature(prepared)
    for step in (10, 20, 30):
        job.commit(step)
    faults.flip(prepared / "checkpoint-30" / "model.bin")
    counting = faults.FailingStorage(number, 10**9)
    shutil.copytree(prepared, tmp_path / "counted", symlinks=True)
    Miniature(tmp_path / "counted", storage=counting)
    for at, (_, file) in enumerate(counting.operations):
        directory = tmp_path / str(at)
        shutil.copytree(prepared, directory, symlinks=True)
        if "status.json" in file.name:  # which is for people to look at
            assert Miniature(directory, storage=faults.FailingStorage(number, at)).text == "state at 20"
            continue
        with pytest.raises(RunDirectoryUnusable) as refused:
            Miniature(directory, storage=faults.FailingStorage(number, at))
        assert os.strerror(number) in str(refused.value)
        assert Miniature(directory).text == "state at 20"


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_save_that_fails_at_any_operation_is_one_clear_error_and_the_next_one_works(
    tmp_path: Path, number: int, lasting: bool
) -> None:
    """Whether the disk fails once or for the rest of the save; nothing committed is lost either way."""
    counting = faults.FailingStorage(number, 10**9)
    job = Miniature(tmp_path / "counted", storage=counting, keep=KeepLast(1))
    job.commit(10)
    before = len(counting.operations)
    job.commit(20)
    count = len(counting.operations) - before
    for at in range(count):
        storage = faults.FailingStorage(number, 10**9, lasting=lasting)
        directory = tmp_path / str(at)
        job = Miniature(directory, storage=storage, keep=KeepLast(1))
        job.commit(10)
        storage.fail_at = len(storage.operations) + at
        failed: ResumeError | None = None
        try:
            job.commit(20)
        except ResumeError as error:
            failed = error
        if failed is None:
            operation, path = storage.operations[storage.fail_at]
            is_condemned = "remove-" in str(path) and operation != "sync"
            is_emptied = "begin-" in str(path) and operation == "remove_directory"
            is_held = number == errno.EACCES and (is_condemned or is_emptied)
            is_tried_again = number == errno.ENOSPC and not lasting
            assert is_held or is_tried_again, "a full disk is tried once more"
            stays = is_held and operation == "replace"
            assert set(miniature.committed(directory).values()) == ({10, 20} if stays else {20})
            shutil.rmtree(directory)
            continue
        assert isinstance(failed, SaveFailed)
        assert isinstance(failed, OSError)
        assert os.strerror(number) in str(failed)
        assert (failed.path, failed.step) == (directory / "checkpoint-20", 20)
        storage.fail_at = None
        committed = miniature.committed(directory)
        assert {*committed.values()} in ({10}, {20}, {10, 20}), (at, committed)
        if "is not committed" in str(failed) and not lasting:
            durable = storage.operations[-1][0] == "sync"  # the marker was there, only its directory was not synced
            assert 20 not in committed.values() or durable
        job.commit(30)
        job.run.close()
        assert miniature.committed(directory) == {"checkpoint-30": 30}
        assert Miniature(directory).text == "state at 30"
        shutil.rmtree(directory)


def test_a_save_that_fails_leaves_the_former_save_of_its_step_in_place(tmp_path: Path) -> None:
    storage = faults.FailingStorage(errno.EIO, 10**9, only=("write", "append", "sync", "make_directory"))
    job = Miniature(tmp_path, storage=storage)
    job.commit(10, "first")
    storage.fail_at = len(storage.operations) + 3
    with pytest.raises(SaveFailed):
        job.commit(10, "second")
    assert not miniature.leftovers(tmp_path)
    assert Miniature(tmp_path).text == "first"


def test_a_disk_that_is_really_full_loses_nothing(tmp_path: Path) -> None:
    """A file system of its own, of two megabytes, filled to the brim."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mount)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        _fill_and_recover(mount)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def _fill(ballast: Path) -> None:
    with pytest.raises(OSError, match="No space"), ballast.open("ab") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


def _fill_and_recover(mount: Path) -> None:
    job = Miniature(mount / "run")
    job.commit(10, "x" * 1000)
    ballast = mount / "ballast"
    _fill(ballast)
    with pytest.raises(SaveFailed, match="No space left on device"):
        job.commit(20, "y" * 1000)
    _fill(ballast)  # the save has removed what was made ahead of it
    with pytest.raises(RunDirectoryUnusable):
        Miniature(mount / "run")
    ballast.unlink()
    job.commit(30, "z" * 1000)
    assert set(miniature.committed(mount / "run").values()) == {10, 30}
    assert Miniature(mount / "run").text == "z" * 1000


def test_a_limit_on_file_sizes_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    """A write that the system really refuses, in a process of its own: no file may grow beyond 20 kB."""
    program = f"""
import resource, signal, pathlib
from miniature import Miniature
from resume_adapters.errors import SaveFailed
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
job = Miniature(pathlib.Path({str(tmp_path)!r}))
job.commit(10)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    job.commit(20, "x" * 1500)
except SaveFailed as error:
    assert "File too large" in str(error), error
else:
    raise AssertionError("the save should have failed")
job.commit(30)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=120)
    assert set(miniature.committed(tmp_path).values()) == {10, 30}
    assert resource.getrlimit(resource.RLIMIT_FSIZE) != (20000, 20000)


class Unserialisable(MiniatureContent):
    def capture(self) -> Captured:
        return replace(super().capture(), rank_state=object())


def test_a_part_that_cannot_be_saved_fails_the_save_with_its_name(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    with pytest.raises(NotSerialisable, match=r"the state is a builtins\.object"):
        job.run.saver.save("checkpoint-10", 10, Unserialisable(job.run, "text", 10, None, None))
    assert [path.name for path in tmp_path.iterdir()] == [".resume"]
    job.commit(20)


def test_metrics_that_nobody_could_read_again_fail_the_save(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.save(10, describe=lambda: {"epoch": float("nan"), "reason": "scheduled"})
    with pytest.raises(SaveFailed, match=r"no start could read this manifest again: .*`\$.epoch`"):
        job.run.saver.flush()
    job.commit(20)
    assert job.committed() == {"checkpoint-20": 20}


# ---- Two starts of one run directory


def test_the_earlier_of_two_starts_can_commit_nothing_more(tmp_path: Path) -> None:
    earlier = Miniature(tmp_path)
    earlier.commit(10)
    later = Miniature(tmp_path)
    assert (earlier.run.generation, later.run.generation) == (1, 2)
    with pytest.raises(
        FencedOff, match=r"this process is start 1 of .*, which start 2 \(process \d+ on .+\) owns now"
    ) as refused:
        earlier.commit(20, "of the earlier")
    assert isinstance(refused.value, RuntimeError)
    assert later.committed() == {"checkpoint-10": 10}
    later.commit(20, "of the later")
    assert Miniature(tmp_path).text == "of the later"


def test_a_start_in_the_middle_of_a_save_fences_it_off(tmp_path: Path) -> None:
    """Its files are written, its commit is refused, and it does not touch what the later start writes meanwhile."""
    earlier = Miniature(tmp_path)
    earlier.commit(10)
    later: list[Miniature] = []

    def describe() -> dict[str, Any]:
        later.append(Miniature(tmp_path))
        later[0].save(20, "of the later")
        later[0].run.saver.flush()
        return {"epoch": 1.0, "reason": "scheduled"}

    with pytest.raises((FencedOff, SaveFailed)):
        earlier.save(20, "of the earlier", describe=describe)
        earlier.run.saver.flush()
    again = Miniature(tmp_path)
    assert again.text == "of the later"
    assert not again.choice.rejected


def test_the_earlier_start_neither_prunes_nor_reports(tmp_path: Path) -> None:
    earlier = Miniature(tmp_path, keep=KeepLast(1))
    earlier.commit(10)
    (tmp_path / "kept").mkdir()
    later = Miniature(tmp_path)
    later.commit(20)
    later.run.set_state(RunState.RUNNING, step=20)
    with pytest.raises(FencedOff):
        earlier.run.pruner.prune(earlier.run.storage_group, None)
    earlier.run.set_state(RunState.FAILED, step=10, reason="fenced off")
    status = json.loads((tmp_path / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["generation"]) == ("running", 2)
    assert set(later.committed().values()) == {10, 20}


@pytest.mark.parametrize("after", [1, 4])
def test_a_commit_while_a_later_start_chooses_is_taken_into_account(tmp_path: Path, after: int) -> None:
    """The later start has read some or all files of checkpoint-10 when the earlier one commits 20 and prunes 10."""
    earlier = Miniature(tmp_path, keep=KeepLast(1))
    earlier.commit(10)

    digests: list[Path] = []

    def meanwhile(operation: str, path: Path) -> None:
        has_read = len(digests) == after
        digests.extend([path] if has_read or operation == "digest" else [])
        if has_read:
            earlier.commit(20)

    later = Miniature(tmp_path, storage=Disturbed(meanwhile))
    assert (later.step, later.text) == (20, "state at 20")


# ---- The end of a run


def test_leaving_flushes_records_and_exits_with_the_code(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.save(10)
    job.run.flag.request("SIGTERM")
    with pytest.raises(Stopped) as left:
        job.run.leave(10, 1.0)
    assert (left.value.code, left.value.reason) == (0, "SIGTERM")
    status = json.loads((tmp_path / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["step"], status["last_commit"]) == ("stopped", 10, 10)
    events = [json.loads(line)["event"] for line in (tmp_path / ".resume" / "journal.jsonl").read_text().splitlines()]
    assert events == ["start", "commit", "stopped"]


def test_a_commit_that_ends_later_does_not_hide_that_the_run_failed(tmp_path: Path) -> None:
    released = threading.Event()

    def wait(operation: str, path: Path) -> None:
        assert (operation, path.name) != ("sync", "model.bin") or released.wait(120)

    job = Miniature(tmp_path, storage=Disturbed(wait))
    job.run.set_state(RunState.RUNNING)
    job.save(10)
    job.run.set_state(RunState.FAILED, step=10, reason="the training raised")
    released.set()
    job.run.saver.flush()
    status = json.loads((tmp_path / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["reason"]) == ("failed", "the training raised")
    assert job.committed() == {"checkpoint-10": 10}


def test_a_status_or_generation_that_is_torn_does_not_stop_a_start(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.commit(10)
    job.run.set_state(RunState.RUNNING, step=10)
    for name in ("status.json", "generation"):
        for damage in faults.DAMAGES.values():
            content = (tmp_path / ".resume" / name).read_bytes()
            damage(tmp_path / ".resume" / name)
            assert Miniature(tmp_path).step == 10
            (tmp_path / ".resume" / name).write_bytes(content)
        (tmp_path / ".resume" / name).write_bytes(b'{"state":"\xff\xfe","token":"\xff","generation":1}')
        assert Miniature(tmp_path).step == 10


# ---- Saves of one name


def test_a_save_whose_remains_could_not_be_removed_is_begun_anew(tmp_path: Path) -> None:
    """The disk fails for the whole of a save, twice, and with it what would tidy up; then it works again."""
    counting = faults.FailingStorage(errno.EIO, 10**9)
    Miniature(tmp_path / "counted", storage=counting).commit(20)
    for at in range(len(counting.operations)):
        storage = faults.FailingStorage(errno.EIO, 10**9)
        job = Miniature(tmp_path / str(at), storage=storage)
        for number in (at, at + 1):
            storage.fail_at, storage.lasting = len(storage.operations) + number, number == at
            with contextlib.suppress(SaveFailed):
                job.commit(20)
            storage.fail_at = None
        job.commit(20, "at last")
        assert Miniature(tmp_path / str(at)).text == "at last"
        assert not miniature.leftovers(tmp_path / str(at))


def test_a_save_under_the_name_of_two_sets_the_older_one_aside(tmp_path: Path) -> None:
    """A kill came between a second save of a step and the pruning of the first."""
    job = Miniature(tmp_path)
    job.commit(10, "first")
    miniature.copy(tmp_path / "checkpoint-10", tmp_path / "checkpoint-10.superseded")
    job.commit(10, "third")
    assert miniature.committed(tmp_path) == {"checkpoint-10": 10}
    assert miniature.set_aside(tmp_path) == ["checkpoint-10.superseded.1"]
    assert Miniature(tmp_path).text == "third"


def test_a_checkpoint_can_be_asked_for_before_it_is_read(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.save(10)
    job.run.require_valid(tmp_path / "checkpoint-10")
    faults.flip(tmp_path / "checkpoint-10" / "model.bin")
    with pytest.raises(CheckpointDamaged, match=r"model\.bin has the digest"):
        job.run.require_valid(tmp_path / "checkpoint-10")


# ---- What an error says


def test_a_full_disk_is_named_where_the_framework_lost_the_errno(tmp_path: Path) -> None:
    """As torch.save does, whose archive says that its position is wrong."""

    class Full(LocalStorage):
        number = 0

        def write(self, path: Path, content: bytes) -> None:
            if self.number and len(content) > 1000:
                raise OSError(self.number, os.strerror(self.number))
            super().write(path, content)

    class Torch(MiniatureContent):
        def save(self, directory: Path) -> None:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    storage = Full()
    job = Miniature(tmp_path, storage=storage)
    for number in (errno.ENOSPC, errno.EACCES, 0):
        storage.number = number
        with pytest.raises(SaveFailed, match="unexpected pos 64 vs 0") as refused:
            job.run.saver.save("checkpoint-10", 10, Torch(job.run, "text", 10, None, None))
        full = number == errno.ENOSPC
        assert (refused.value.errno == errno.ENOSPC) == full == ("No space left on device" in str(refused.value))
        assert [path.name for path in tmp_path.iterdir()] == [".resume"]


@pytest.mark.parametrize("where", ["the parts", "the journal", "the pruning"])
def test_an_error_that_a_later_start_caused_says_so(tmp_path: Path, where: str) -> None:
    """It does not say to launch again, which would evict the later start, and it the next."""

    storage = Disturbed()

    def take_over(operation: str, path: Path) -> None:
        at = {
            "the parts": operation == "write" and path.name == "rank-00000.json",
            "the journal": operation == "append",
            "the pruning": operation == "remove_file" and "remove-" in str(path),
        }
        if at[where]:
            storage.before = lambda operation, path: None
            Miniature(tmp_path)
            refuse(errno.EIO)

    earlier = Miniature(tmp_path, storage=storage, keep=KeepAll())
    for step in (10, 20):
        earlier.commit(step)
    storage.before = take_over
    with pytest.raises(FencedOff, match="the later one continues"):
        if where == "the pruning":
            earlier.run.pruner.keep = KeepLast(1)
            earlier.run.saver.prune_later()
            earlier.run.saver.flush()
        else:
            earlier.commit(30)
    assert Miniature(tmp_path).step >= 20


def test_a_start_that_was_fenced_off_while_it_tidied_says_so(tmp_path: Path) -> None:
    Miniature(tmp_path).commit(10)

    def take_over(operation: str, path: Path) -> None:
        if operation == "append":
            Miniature(tmp_path)
            refuse(errno.ENOSPC)

    with pytest.raises(FencedOff, match="the later one continues"):
        Miniature(tmp_path, storage=Disturbed(take_over))


def test_a_fence_that_cannot_be_read_does_not_hide_the_error(tmp_path: Path) -> None:
    def fail(operation: str, path: Path) -> None:
        if operation == "write" or (operation, path.name) == ("read", "generation"):
            refuse(errno.ENOSPC if operation == "write" else errno.EIO)

    class Content(MiniatureContent):
        def save(self, directory: Path) -> None:
            storage.before = fail

    storage = Disturbed()
    job = Miniature(tmp_path, storage=storage)
    with pytest.raises(SaveFailed):
        job.run.saver.save("checkpoint-10", 10, Content(job.run, "text", 10, None, None))


@pytest.mark.parametrize("damaged", ["rank-00000.json", "ema.safetensors"])
def test_bytes_that_are_damaged_on_their_way_to_the_disk_are_not_committed(tmp_path: Path, damaged: str) -> None:
    """Between what was meant and what was stored: a digest of what was stored would certify the damage."""

    class Flipping(LocalStorage):
        def write(self, path: Path, content: bytes) -> None:
            flipped = bytearray(content)
            if path.name == damaged:
                flipped[len(content) // 2] ^= 1
            super().write(path, bytes(flipped))

    job = Miniature(tmp_path, storage=Flipping())
    with pytest.raises(SaveFailed, match=f"the stored bytes are not those that were written.*{damaged}"):
        job.commit(10)
    assert job.committed() == {}


def test_a_status_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is for people to look at."""
    job = Miniature(tmp_path)
    (tmp_path / ".resume" / "status.json").unlink()
    (tmp_path / ".resume" / "status.json").mkdir()
    with caplog.at_level("ERROR"):
        job.run.begin(0, 0.0)
        job.commit(10)
        with pytest.raises(Stopped):
            job.run.leave(10, 1.0)
    assert "The status of the run, which is running, could not be written" in caplog.text
    assert "The status of the run, which is stopped, could not be written" in caplog.text
    (tmp_path / ".resume" / "status.json").rmdir()
    assert Miniature(tmp_path).step == 10


def test_a_name_that_could_never_be_removed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    job = Miniature(tmp_path, keep=KeepLast(1))
    longest = "é" * 100
    job.commit(1, under=longest)
    with pytest.raises(UnsupportedSetting, match=r"has 201 bytes; expected at most 200"):
        job.save(2, under=f"{longest}x")
    job.commit(3, under=longest)
    job.commit(4)
    assert job.committed() == {"checkpoint-4": 4}
    job.run.close()
