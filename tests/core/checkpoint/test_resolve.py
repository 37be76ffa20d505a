"""Which checkpoint a run resumes from, on one rank and on several, and what it leaves alone."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from resume_adapters import KeepLast
from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.catalog import Catalog, candidates, list_checkpoints
from resume_adapters.core.checkpoint.resolve import latest_valid
from resume_adapters.core.checkpoint.validity import CommitHistory, ForeignStep, NoForeign
from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run_directory.journal import Journal
from resume_adapters.core.run_directory.upkeep import is_checkpoint
from resume_adapters.core.storage.groups import shared_by_all
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import (
    CheckpointDamaged,
    CheckpointsExist,
    FormatTooNew,
    NoValidCheckpoint,
    RunDirectoryUnusable,
    UnsupportedSetting,
)

import faults
import miniature
from launch import Server
from miniature import Foreign, Miniature

JOB = Path(__file__).parents[1] / "job.py"


def saved(directory: Path, *steps: int) -> Path:
    job = Miniature(directory)
    for step in steps:
        job.commit(step)
    job.run.close()
    return directory


def _foreign_step(path: Path) -> ForeignStep | None:
    """Recognise checkpoints that hold a file ``native`` with their step, as an adapter does."""
    if not path.name.startswith(("checkpoint-", "best-")):
        return None
    try:
        text = (path / "native").read_text()
        return ForeignStep(int(text)) if text else ForeignStep(int(path.name.rpartition("-")[2]), is_content=False)
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"native cannot be read: {error}", path=path) from error


def _require_whole(path: Path) -> None:
    if (path / "torn").exists():
        raise CheckpointDamaged("native is torn", path=path)


foreign = Foreign(_foreign_step, _require_whole)


def make_foreign(directory: Path, step: int, content: str | None = None) -> Path:
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "native").write_text(str(step) if content is None else content)
    return path


def rewrite(checkpoint: Path, **fields: Any) -> None:
    """Change fields of a manifest, with the digest that fits."""
    file = checkpoint / "resume" / "manifest.json"
    record = msgspec.json.encode({**json.loads(file.read_bytes())["manifest"], **fields})
    file.write_bytes(
        msgspec.json.encode({"digest": xxhash.xxh3_128_hexdigest(record), "manifest": msgspec.Raw(record)})
    )


@pytest.mark.parametrize("latest", ["stale", "dangling", "missing", "text", "outside"])
def test_latest_is_a_hint_for_people_only(tmp_path: Path, latest: str) -> None:
    run = saved(tmp_path / "run", 10, 20)
    assert os.readlink(run / "latest") == "checkpoint-20"
    (run / "latest").unlink()
    other = saved(tmp_path / "other", 99)
    if latest == "text":
        (run / "latest").write_text("checkpoint-10\n")
    elif latest != "missing":
        where = {"stale": "checkpoint-10", "dangling": "gone", "outside": str(other / "checkpoint-99")}[latest]
        (run / "latest").symlink_to(where)
    job = Miniature(run)
    assert (job.step, job.choice.rejected) == (20, ())
    assert os.readlink(run / "latest") == "checkpoint-20", "a start mends it"
    job.commit(30)
    assert os.readlink(run / "latest") == "checkpoint-30"


@pytest.mark.parametrize("torn", ["", "checkpoint-30\n", "\0\0\0"])
def test_latest_can_be_the_text_file_that_a_framework_reads(tmp_path: Path, torn: str) -> None:
    Miniature(tmp_path, latest="file").commit(10)
    latest = tmp_path / "latest"
    assert not latest.is_symlink() and latest.read_text() == "checkpoint-10\n"
    latest.write_text(torn)
    job = Miniature(tmp_path, latest="file")
    assert (job.step, latest.read_text()) == (10, "checkpoint-10\n")
    job.commit(20)
    assert latest.read_text() == "checkpoint-20\n"


def test_a_directory_in_the_place_of_latest_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(OSError, match="latest is a directory"):
        Miniature(tmp_path)


def copied(directory: Path) -> Path:
    """Copy a run directory with the step 10, as a tool does that copies links as files."""
    shutil.copytree(saved(directory / "run", 10), directory / "copied", symlinks=False)
    return directory / "copied"


def test_a_copy_of_the_newest_checkpoint_in_the_place_of_latest_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copied(tmp_path)
    assert (directory / "latest").is_dir()
    job = Miniature(directory)
    assert (job.step, job.choice.rejected) == (10, ())
    assert miniature.set_aside(directory) == ["latest.1"]
    assert os.readlink(directory / "latest") == "checkpoint-10"
    assert "It is a copy of checkpoint-10, and is moved to" in caplog.text


def test_what_is_no_copy_keeps_the_name_of_latest(tmp_path: Path) -> None:
    directory = copied(tmp_path)
    shutil.rmtree(directory / "checkpoint-10")
    with pytest.raises(RunDirectoryUnusable, match=r"is a directory; expected that name to be free.*rename it"):
        Miniature(directory)
    (directory / "latest").rename(directory / "kept")
    job = Miniature(directory)
    assert (job.step, job.text) == (10, "state at 10")


def test_a_checkpoint_that_is_a_link_out_of_the_run_directory_is_not_taken(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", 10)
    other = saved(tmp_path / "other", 50)
    (run / "checkpoint-50").symlink_to(other / "checkpoint-50")
    job = Miniature(run, keep=KeepLast(1))
    assert job.step == 10
    assert "leaves the run directory" in job.choice.rejected[0].reason
    job.commit(60)
    assert miniature.committed(other) == {"checkpoint-50": 50}, "what a link points to is never touched"


def test_a_checkpoint_that_is_a_link_within_the_run_directory_is_taken_and_never_pruned(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20)
    (run / "checkpoint-70").symlink_to("checkpoint-10")
    job = Miniature(run, keep=KeepLast(1))
    assert job.step == 20, "the step is what the manifest says, not the name"
    job.run.pruner.prune(job.run.storage_group, None)
    assert (run / "checkpoint-70").is_symlink()


def test_retention_removes_no_copy_that_the_user_laid_beside_the_checkpoints(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20)
    shutil.copytree(run / "checkpoint-10", run / "best_0.93")
    shutil.copytree(run / "checkpoint-20", run / "a-copy")
    other = saved(tmp_path / ".other", 15)
    shutil.copytree(other / "checkpoint-15", run / "checkpoint-15")
    job = Miniature(run, keep=KeepLast(1))
    job.commit(30)
    plan = job.run.pruner.prune(job.run.storage_group, None)
    assert set(miniature.committed(run)) == {"best_0.93", "a-copy", "checkpoint-15", "checkpoint-30"}
    reason = "the journal has no commit of it under this name"
    assert {name for name, why in plan.keep.items() if why == reason} == {"best_0.93", "a-copy", "checkpoint-15"}


def test_retention_removes_what_the_first_version_committed_without_a_name_in_the_journal(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20)
    shutil.copytree(run / "checkpoint-10", run / "best_0.93")
    journal = run / ".resume" / "journal.jsonl"
    journal.write_text(re.sub(r'"checkpoint":"[^"]*",', "", journal.read_text()))
    Miniature(run, keep=KeepLast(1)).commit(30)
    assert set(miniature.committed(run)) == {"best_0.93", "checkpoint-30"}


def test_retention_keeps_a_checkpoint_to_which_a_link_points(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20)
    (run / "best").symlink_to("checkpoint-10")
    job = Miniature(run, keep=KeepLast(1))
    job.commit(30)
    assert set(miniature.committed(run)) == {"checkpoint-10", "checkpoint-30"}
    assert job.run.pruner.prune(job.run.storage_group, None).keep["checkpoint-10"] == "best points to it"
    (run / "best").unlink()
    job.commit(40)
    assert set(miniature.committed(run)) == {"checkpoint-40"}


def test_directories_of_the_users_are_left_alone_whatever_they_hold(tmp_path: Path) -> None:
    """Also links to them, also dangling ones, also one that holds a directory called resume."""
    outside = tmp_path / "outside"
    for path in (outside / "resume", tmp_path / "run" / "runs" / "v1", tmp_path / "run" / "data-99" / "resume"):
        path.mkdir(parents=True)
        (path / "cv.pdf").write_text("mine")
    run = tmp_path / "run"
    (run / "logs").symlink_to(outside)
    (run / "scratch-7").symlink_to(tmp_path / "gone")
    (run / "notes.txt").write_text("mine")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    job = Miniature(run, keep=KeepLast(1), foreign=foreign)
    assert (job.step, job.choice.rejected) == (0, ())
    for step in (10, 20, 20):
        job.commit(step)
    assert Miniature(run, foreign=foreign).step == 20
    assert Miniature(run, foreign=foreign, resume="scratch!").step == 0
    assert miniature.set_aside(run) == ["checkpoint-20.1"]
    after = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    assert set(before) <= after


def test_a_copy_under_another_name_does_not_hide_newer_checkpoints(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20, 30)
    shutil.copytree(run / "checkpoint-10", run / "backup-2024-12-31")
    shutil.copytree(run / "checkpoint-10", run / "checkpoint-10-20991231")
    assert Miniature(run).text == "state at 30"


def test_a_checkpoint_without_its_manifest_is_damaged_and_not_merely_unfinished(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20)
    (run / "checkpoint-20" / "resume" / "manifest.json").unlink()
    job = Miniature(run)
    assert job.step == 10
    assert "manifest.json is missing" in job.choice.rejected[0].reason
    assert miniature.set_aside(run) == ["checkpoint-20.1"]


def lose(checkpoint: Path) -> None:
    """Remove what this package added to a checkpoint."""
    shutil.rmtree(checkpoint / "resume")
    (checkpoint / "native").write_text(checkpoint.name.removeprefix("checkpoint-"))


@pytest.mark.parametrize("named", [True, False], ids=["named", "of 0.1.0"])
def test_a_committed_checkpoint_that_lost_this_packages_directory_is_damaged_and_not_foreign(
    tmp_path: Path, named: bool
) -> None:
    run = saved(tmp_path, 10, 20)
    lose(run / "checkpoint-20")
    journal = run / ".resume" / "journal.jsonl"
    if not named:  # as the first version wrote it
        journal.write_text(re.sub(r'"checkpoint":"[^"]*",', "", journal.read_text()))
    rows = list_checkpoints(LocalStorage(), run, foreign, Journal(LocalStorage(), run / ".resume", float).committed())
    assert [(row.path.name, row.state) for row in rows] == [
        ("checkpoint-10", "committed"),
        ("checkpoint-20", "damaged"),
    ]
    job = Miniature(run, foreign=foreign)
    assert (job.step, job.text) == (10, "state at 10")
    assert "its resume directory is missing" in job.choice.rejected[0].reason
    assert miniature.set_aside(run) == ["checkpoint-20.1"]


def test_a_name_that_the_run_no_longer_has_may_be_that_of_a_foreign_checkpoint(tmp_path: Path) -> None:
    """After a prune, after it was set aside, and after a rewind the bare framework may write that name again."""
    run = saved(tmp_path, 10, 20, 30, 40)
    job = Miniature(run, keep=KeepLast(3))
    job.run.pruner.prune(job.run.storage_group, None)
    faults.flip(run / "checkpoint-40" / "model.bin")
    assert Miniature(run).step == 30
    (run / "checkpoint-30").rename(tmp_path / ".elsewhere")
    Journal(LocalStorage(), run / ".resume", float).append("rewind", step=20)
    for step in (10, 30, 40):
        make_foreign(run, step)
        job = Miniature(run, foreign=foreign)
        assert job.step == 20 and not job.choice.rejected


def test_a_commit_that_the_journal_missed_is_in_it_after_the_next_start(tmp_path: Path, shape: Any) -> None:
    """A kill after the commit, in the middle of the journal's line."""
    storage = faults.CrashingStorage()
    job = Miniature(tmp_path, storage=storage)
    job.commit(10)
    journal = tmp_path / ".resume" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-30])
    layout.pending_path(storage, tmp_path / miniature.name(10)).write_bytes(layout.pending_text(miniature.name(10)))
    assert not Journal(LocalStorage(), tmp_path / ".resume", float).committed().has(miniature.name(10))
    job = Miniature(tmp_path)
    assert job.run.control.journal.committed().has(miniature.name(10))
    assert not layout.pending_path(storage, tmp_path / miniature.name(10)).exists()
    job.commit(20)
    again = Journal(LocalStorage(), tmp_path / ".resume", float)
    assert all(again.committed().has(miniature.name(step)) for step in (10, 20))


def test_candidates_come_newest_first_however_many_there_are(tmp_path: Path) -> None:
    for step in range(1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "file-5000").touch()
    found = [path.name for path in candidates(LocalStorage(), tmp_path)]
    job = Miniature(tmp_path)
    assert found == [f"checkpoint-{step}" for step in range(999, -1, -1)] + ["logs"]
    assert job.step == 0


def test_a_missing_run_directory_is_a_fresh_start(tmp_path: Path) -> None:
    job = Miniature(tmp_path / "a" / "b")
    assert (job.step, job.choice.rejected) == (0, ())
    assert candidates(LocalStorage(), tmp_path / "nowhere") == []


def test_why_a_run_directory_cannot_be_listed_is_said_once(tmp_path: Path) -> None:
    """And not as of one whose permissions are to be fixed."""
    file, ranks = tmp_path / "file", SingleProcess()
    file.touch()
    with pytest.raises(RunDirectoryUnusable) as found:
        latest_valid(Catalog(LocalStorage(), file), ranks, shared_by_all(ranks), NoForeign(), CommitHistory())
    assert str(found.value) == f"{file} is a file; expected the directory of the run's checkpoints"


@pytest.mark.parametrize("step", [15, 25])
def test_a_foreign_checkpoint_is_not_taken_where_one_was_committed(tmp_path: Path, step: int) -> None:
    """A script may save into the run directory by itself, in the middle of an epoch."""
    run = saved(tmp_path, 10, 20)
    make_foreign(run, step)
    job = Miniature(run, foreign=foreign)
    assert job.step == 20 and job.choice.passed_over == ((f"checkpoint-{step}",) if step == 25 else ())
    job.run.pruner.keep = KeepLast(1)
    job.commit(40)
    assert (run / f"checkpoint-{step}").is_dir(), "retention neither counts nor removes it"


def test_foreign_checkpoints_are_ranked_by_their_content_and_never_by_their_name(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20)
    make_foreign(run, 9000, "6")
    make_foreign(run, 7000, "")
    (run / "checkpoint-7000").rename(run / "best-7000")
    make_foreign(run, 3, "25")
    assert Miniature(run, foreign=foreign).step == 20
    rows = list_checkpoints(LocalStorage(), run, foreign, CommitHistory())
    assert [row.path.name for row in rows] == [
        *("best-7000", "checkpoint-9000", "checkpoint-3", "checkpoint-10", "checkpoint-20")
    ]
    assert [row.path.name for row in rows if not row.is_ranked] == ["best-7000"]
    for name in ("checkpoint-10", "checkpoint-20"):
        shutil.rmtree(run / name)
    shutil.rmtree(run / ".resume")
    assert Miniature(run, foreign=foreign).step == 25, "the name of neither counts"
    for name in ("checkpoint-3", "checkpoint-9000"):
        shutil.rmtree(run / name)
    make_foreign(run, 30, "")
    assert Miniature(run, foreign=foreign).step == 7000, "of those that say no step, the number in the name decides"


def test_a_foreign_checkpoint_whose_files_are_torn_is_not_taken(tmp_path: Path) -> None:
    make_foreign(tmp_path, 10)
    (make_foreign(tmp_path, 20) / "torn").touch()
    job = Miniature(tmp_path, foreign=foreign)
    assert (job.step, job.choice.rejected[0].reason) == (10, "native is torn")
    with pytest.raises(CheckpointDamaged, match="native is torn"):
        torn = make_foreign(tmp_path / "other", 20)
        (torn / "torn").touch()
        Miniature(tmp_path / "new", foreign=foreign, resume=torn)


def test_a_torn_foreign_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    make_foreign(tmp_path, 10)
    make_foreign(tmp_path, 20, "torn")
    job = Miniature(tmp_path, foreign=foreign)
    assert job.step == 10
    assert [each.path.name for each in job.choice.rejected] == ["checkpoint-20"]


def test_a_foreign_checkpoint_that_may_not_be_read_is_named_and_not_passed_over(tmp_path: Path) -> None:
    path = make_foreign(tmp_path, 25)

    def refuse(checkpoint: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(checkpoint / "native"))

    with pytest.raises(RunDirectoryUnusable, match=f"^{path} cannot be read: .*Permission denied.* Fix its permiss"):
        Miniature(tmp_path, foreign=Foreign(_foreign_step, refuse))


def test_a_foreign_checkpoint_of_the_same_name_is_set_aside_before_a_save(tmp_path: Path) -> None:
    make_foreign(tmp_path, 10)
    job = Miniature(tmp_path, foreign=foreign, resume="auto")
    job.commit(10)
    assert miniature.set_aside(tmp_path) == ["checkpoint-10.1"]
    assert Miniature(tmp_path).text == "state at 10"


def test_a_later_format_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20)
    rewrite(run / "checkpoint-20", format=99)
    with pytest.raises(FormatTooNew, match=r"checkpoint-20.*upgrade"):
        Miniature(run)
    assert (run / "checkpoint-20").is_dir()


def test_an_older_checkpoint_of_a_later_format_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20, 30)
    rewrite(run / "checkpoint-10", format=99)
    job = Miniature(run, keep=KeepLast(1))
    job.commit(40)
    assert set(miniature.committed(run)) == {"checkpoint-10", "checkpoint-40"}


def test_scratch_refuses_to_train_over_committed_checkpoints(tmp_path: Path) -> None:
    run = saved(tmp_path, 10)
    with pytest.raises(CheckpointsExist, match=r"1 committed.*checkpoint-10 the newest"):
        Miniature(run, resume="scratch")
    assert Miniature(tmp_path / "empty", resume="scratch").step == 0


def test_a_refused_start_does_not_end_the_run_that_is_under_way(tmp_path: Path) -> None:
    job = Miniature(tmp_path)
    job.commit(10)
    with pytest.raises(CheckpointsExist):
        Miniature(tmp_path, resume="scratch")
    job.commit(20)
    assert Miniature(tmp_path).step == 20


def test_a_named_start_is_taken_only_by_a_run_without_checkpoints_of_its_own(tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 70) / "checkpoint-70"
    job = Miniature(tmp_path / "run", resume=other)
    assert (job.step, job.text) == (70, "state at 70")
    job.commit(80)
    assert Miniature(tmp_path / "run", resume=other).step == 80


def test_a_named_start_that_is_damaged_or_none_is_refused(tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 70) / "checkpoint-70"
    faults.flip(other / "model.bin")
    with pytest.raises(CheckpointDamaged, match=r"cannot start from .*checkpoint-70: model\.bin"):
        Miniature(tmp_path / "run", resume=other)
    with pytest.raises(CheckpointDamaged, match="not a checkpoint"):
        Miniature(tmp_path / "run", resume=tmp_path)
    with pytest.raises(UnsupportedSetting, match="is not there"):
        Miniature(tmp_path / "run", resume="sratch")


def test_a_listing_says_what_each_directory_is(tmp_path: Path) -> None:
    run = saved(tmp_path, 10, 20, 30)
    faults.cut(run / "checkpoint-20" / "model.bin")
    (run / "checkpoint-30" / "resume" / "manifest.json").unlink()
    (run / "checkpoint-40" / "resume").mkdir(parents=True)
    (run / "checkpoint-40" / "resume" / "pending").touch()
    make_foreign(run, 5)
    (run / "logs").symlink_to(tmp_path.parent)
    rows = [(each.path.name, each.state) for each in list_checkpoints(LocalStorage(), run, foreign, CommitHistory())]
    assert rows == [
        ("checkpoint-5", "foreign"),
        ("checkpoint-10", "committed"),
        ("checkpoint-20", "damaged"),
        ("checkpoint-30", "damaged"),
        ("checkpoint-40", "pending"),
    ]
    with pytest.raises(NoValidCheckpoint):
        shutil.rmtree(run / "checkpoint-10")
        Miniature(run)


# ---- Several ranks: real processes over gloo


def launch(server: Server, directory: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """Start each rank as on a node of its own."""
    directory.mkdir(exist_ok=True)
    server.start(JOB, [*arguments], directory, ranks, {}, nodes=ranks).wait().require_success()
    return [json.loads((directory / f"result.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_file_damaged_for_one_rank_makes_all_take_the_checkpoint_before(
    server: Server, tmp_path: Path, ranks: int
) -> None:
    run = tmp_path / "run"
    launch(server, tmp_path / "save", ranks, "save", str(run), "10", "20")
    last = f"rank-{ranks - 1:05d}.json"
    assert (run / "checkpoint-20" / "resume" / last).is_file()
    faults.flip(run / "checkpoint-20" / "resume" / last)
    results = launch(server, tmp_path / "resume", ranks, "resume", *[str(run)] * ranks)
    assert [each["resumed"] for each in results] == [10] * ranks
    assert f"rank {ranks - 1}: resume/{last}" in results[0]["rejected"][0]
    assert miniature.set_aside(run) == ["checkpoint-20.1"]
    assert set(miniature.committed(run).values()) == {10, 20}


def test_the_ranks_of_a_save_resume_together(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = launch(server, tmp_path / "save", 3, "save", str(run), "10", "20")
    assert [each["committed"] for each in results] == [{"checkpoint-10": 10, "checkpoint-20": 20}] * 3
    results = launch(server, tmp_path / "resume", 3, "resume", *[str(run)] * 3)
    assert {(each["resumed"], each["text"]) for each in results} == {(20, "state at 20")}


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_checkpoint_that_one_node_does_not_have_is_not_taken(server: Server, tmp_path: Path, lacking: int) -> None:
    """The disks of the nodes have the copies of a run that they shared: all go on from what both have."""
    launch(server, tmp_path / "save", 2, "save", str(tmp_path / "0"), "10", "20")
    shutil.copytree(tmp_path / "0", tmp_path / "1", symlinks=True)
    shutil.rmtree(tmp_path / str(lacking) / "checkpoint-20")
    (tmp_path / "0" / "logs").mkdir()
    results = launch(server, tmp_path / "resume", 2, "resume", str(tmp_path / "0"), str(tmp_path / "1"))
    assert {(each["resumed"], each["text"]) for each in results} == {(10, "state at 10")}
    for node in range(2):
        assert miniature.committed(tmp_path / str(node)) == {"checkpoint-10": 10, "checkpoint-20": 20}
        assert miniature.set_aside(tmp_path / str(node)) == ([] if node == lacking else ["checkpoint-20.1"])
    assert (tmp_path / "0" / "logs").is_dir()


def test_different_checkpoints_of_one_name_are_not_taken(server: Server, tmp_path: Path) -> None:
    launch(server, tmp_path / "save", 2, "save", str(tmp_path / "0"), "10", "20")
    shutil.copytree(tmp_path / "0", tmp_path / "1", symlinks=True)
    shutil.rmtree(tmp_path / "1" / "checkpoint-20")
    shutil.copytree(tmp_path / "1" / "checkpoint-10", tmp_path / "1" / "checkpoint-20")
    shutil.rmtree(tmp_path / "0" / "checkpoint-10")
    shutil.rmtree(tmp_path / "1" / "checkpoint-10")
    results = launch(server, tmp_path / "resume", 2, "resume", str(tmp_path / "0"), str(tmp_path / "1"))
    assert {each["error"] for each in results} == {"NoValidCheckpoint"}
    assert "the ranks see different checkpoints of that name: steps [20, 10]" in results[0]["message"]


@pytest.mark.parametrize("trouble", ["file", "format"])
def test_a_rank_that_cannot_look_fails_all_ranks_at_once(server: Server, tmp_path: Path, trouble: str) -> None:
    """Nobody is left waiting for a rank whose run directory is a file, or whose newest checkpoint is of the future."""
    launch(server, tmp_path / "save", 2, "save", str(tmp_path / "0"), "10", "20")
    shutil.copytree(tmp_path / "0", tmp_path / "1", symlinks=True)
    if trouble == "file":
        shutil.rmtree(tmp_path / "1")
        (tmp_path / "1").touch()
    else:
        rewrite(tmp_path / "1" / "checkpoint-20", format=99)
    results = launch(server, tmp_path / "resume", 2, "resume", str(tmp_path / "0"), str(tmp_path / "1"))
    own = {"file": "RunDirectoryUnusable", "format": "FormatTooNew"}[trouble]
    assert [each["error"] for each in results] == ["PeerFailed", own]


def test_a_named_start_that_one_rank_cannot_use_fails_all_ranks(server: Server, tmp_path: Path) -> None:
    launch(server, tmp_path / "save", 2, "save", str(tmp_path / "other"), "10", "20")
    good, older, bad = tmp_path / "other" / "checkpoint-20", tmp_path / "other" / "checkpoint-10", tmp_path / "none"
    results = launch(server, tmp_path / "a", 2, "start_from", str(tmp_path / "run"), str(good), str(bad))
    assert [each["error"] for each in results] == ["PeerFailed", "UnsupportedSetting"]
    results = launch(server, tmp_path / "b", 2, "start_from", str(tmp_path / "run"), str(good), str(older))
    assert {each["error"] for each in results} == {"StateMismatch"}
    results = launch(server, tmp_path / "c", 2, "start_from", str(tmp_path / "run"), str(good), str(good))
    assert [each["resumed"] for each in results] == [20, 20]


def test_why_what_is_in_memory_is_not_used_is_said_by_one_rank(server: Server, tmp_path: Path) -> None:
    words = ["go_on_from_memory", str(tmp_path / "run")]
    output = server.start(JOB, words, tmp_path, 2, {}).wait().require_success().output
    for rank in range(2):
        assert json.loads((tmp_path / f"result.{rank}").read_text()) == {"step": 1, "from_memory": False}
    assert output.count("What is held in memory is not used: another start has taken") == 1


@pytest.mark.parametrize("where", ["facts", "write", "commit", "after"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_next_one_works(
    server: Server, tmp_path: Path, where: str, failing: int
) -> None:
    if (where, failing) == ("after", 1):
        pytest.skip("what follows a commit is done by rank zero alone")
    results = launch(server, tmp_path / "work", 3, "fail", str(tmp_path / "run"), where, str(failing))
    assert all(each["heard"] for each in results), results
    for each in results:
        mine = each["rank"] == failing
        assert each["heard"][0].startswith("SaveFailed" if mine else "PeerFailed"), each
        assert set(each["then"].values()) == ({10, 20} if where == "after" else {10})
        assert set(each["at_last"].values()) == ({10, 20, 30} if where == "after" else {10, 30})


def test_a_run_starts_from_a_checkpoint_of_the_bare_framework_that_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()

    def recognise(path: Path) -> ForeignStep | None:
        return ForeignStep(70) if path == bare else None

    job = Miniature(tmp_path / "run", resume=bare, foreign=Foreign(recognise))
    assert job.step == 70 and job.choice.checkpoint is not None and job.choice.checkpoint.manifest is None


def test_what_counts_as_a_checkpoint_is_what_a_start_would_have_to_do_with(tmp_path: Path) -> None:
    def recognise(path: Path) -> ForeignStep | None:
        if path.name == "torn":
            raise CheckpointDamaged("half of it is missing")
        return ForeignStep(5) if path.name == "bare" else None

    run = saved(tmp_path, 10)
    for name in ("torn", "bare", "logs"):
        (run / name).mkdir()
    names = ("checkpoint-10", "torn", "bare", "logs")
    found = [is_checkpoint(LocalStorage(), run / name, Foreign(recognise)) for name in names]
    assert found == [True, True, True, False]
