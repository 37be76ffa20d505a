"""A checkpoint that loses all but its weights: whole until then, never resumed from afterwards, and by one commit."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import KeepEvery, KeepLast, KeepWeights, Remote
from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.checkpoint.validity import check_digests, check_sizes, read_manifest
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.prune import plan_prune
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import FencedOff, NoValidCheckpoint, UnsupportedSetting

import faults
import miniature
from faults import Crash, CrashingStorage, Disturbed
from miniature import Miniature, name, native, own

pytestmark = pytest.mark.usefixtures("shape")

BEFORE = {10: "ten", 20: "twenty", 30: "thirty"}
"""The committed checkpoints with which a test begins; 10 is the best, so it stays whole."""

KEEP = KeepLast(1) | KeepWeights(KeepEvery(10))

ONE = KeepLast(1) | KeepWeights(KeepEvery(20))
"""After a commit of 40, 20 is thinned and 30 is removed."""


def start(directory: Path, **options: Any) -> Miniature:
    return Miniature(directory, **{"keep": KEEP, "weights": WeightsFiles(), **options})


def prepare(directory: Path) -> None:
    job = Miniature(directory)
    for step, text in BEFORE.items():
        job.commit(step, text, best=10)
    job.run.close()


def manifests(directory: Path) -> dict[str, Manifest]:
    """Return the manifests of the committed checkpoints, whose files agree with them."""
    found = {each: read_manifest(LocalStorage(), directory / each) for each in miniature.committed(directory)}
    for each, manifest in found.items():
        check_sizes(LocalStorage(), directory / each, manifest)
        check_digests(LocalStorage(), directory / each, manifest.files)
    return found


def weights_only(directory: Path) -> set[str]:
    return {each for each, manifest in manifests(directory).items() if manifest.weights_only}


def require_weights(directory: Path, *steps: int) -> None:
    """Check that these checkpoints are those of weights alone, and have the weights of their steps and nothing else."""
    assert weights_only(directory) == {name(step) for step in steps}
    for step in steps:
        path = directory / name(step)
        assert native(path).read_bytes() == BEFORE.get(step, f"state at {step}").encode() * 20
        assert [file.name for file in own(path).iterdir()] == ["manifest.json"]
        assert {file for file in path.rglob("*") if file.is_file()} <= {native(path), own(path) / "manifest.json"}


def damage_newer(directory: Path) -> None:
    """Damage the checkpoints that are newer than 20."""
    for step in (30, 40):
        if native(directory / name(step)).exists():
            faults.flip(native(directory / name(step)))


def remove(checkpoint: Path) -> None:
    for path in (own(checkpoint), checkpoint):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def operations_of_thinning(prepared: Path, scratch: Path) -> dict[int, tuple[str, Path]]:
    """Return the operations of a start and a save from the first of a thinning on, by their numbers."""
    shutil.copytree(prepared, scratch, symlinks=True)
    storage = CrashingStorage()
    start(scratch, storage=storage, keep=ONE).commit(40, best=10)
    found = dict(enumerate(storage.operations))
    first = next(at for at, (_, path) in found.items() if "begin-" in str(path) and name(20) in str(path))
    return {at: each for at, each in found.items() if at >= first}


def test_what_only_keep_weights_keeps_loses_the_rest_and_counts_no_more(tmp_path: Path) -> None:
    prepare(tmp_path)
    job = start(tmp_path)
    job.commit(40, best=10)
    require_weights(tmp_path, 20, 30)
    manifest = manifests(tmp_path)[name(20)]
    assert (manifest.step, manifest.format, manifests(tmp_path)[name(40)].format) == (20, 2, 1)
    job.commit(50, best=50)
    require_weights(tmp_path, 10, 20, 30, 40)
    assert not miniature.leftovers(tmp_path)
    job.run.close()
    removed = list(ControlDirectory(LocalStorage(), tmp_path, float).journal.history())[-2:]
    assert {each["checkpoint"]: each["reason"] for each in removed} == {
        f"{name(step)}.superseded": "its weights: a multiple of 10 steps" for step in (10, 40)
    }
    again = start(tmp_path)
    assert (again.step, again.choice.rejected) == (50, ())
    again.run.close()


@pytest.mark.parametrize("fault", ["killed", "torn"])
def test_a_kill_before_any_operation_leaves_the_one_or_the_other(tmp_path: Path, fault: str) -> None:
    prepare(tmp_path / "prepared")
    found = operations_of_thinning(tmp_path / "prepared", tmp_path / "counted")
    numbers = [at for at, (what, _) in found.items() if fault == "killed" or what in ("write", "append")]
    outcomes = set()
    for at in numbers:
        directory = tmp_path / str(at)
        shutil.copytree(tmp_path / "prepared", directory, symlinks=True)
        storage = CrashingStorage(at, torn=fault == "torn")
        with pytest.raises(Crash):
            start(directory, storage=storage, keep=ONE).commit(40, best=10)
        where = f"stopped before {storage.operations[-1]}, operation {at}"
        # Where the newer ones are damaged, what resumes is whole, be it under the name that it has while it is thinned.
        damaged = tmp_path / f"{at}-damaged"
        shutil.copytree(directory, damaged, symlinks=True)
        damage_newer(damaged)
        job = start(damaged, keep=ONE)
        assert job.text == BEFORE[job.step], where
        outcomes.add(job.step)
        job.commit(60, best=10)
        assert name(60) not in weights_only(damaged), where
        job.run.close()
        job = start(directory, keep=ONE)
        assert (job.step, job.text) == (40, "state at 40"), where
        job.commit(50, best=10)
        require_weights(directory, 20, 40)
        assert {name(10), name(50)} <= {*job.committed()}, where
        assert not miniature.leftovers(directory), where
        job.run.close()
        shutil.rmtree(directory)
        shutil.rmtree(damaged)
    assert outcomes == {10, 20}, "no kill fell before the commit, or none after it"


def test_a_frozen_start_that_wakes_up_thins_nothing_that_a_later_one_needs(tmp_path: Path) -> None:
    prepare(tmp_path / "prepared")
    found, fenced = operations_of_thinning(tmp_path / "prepared", tmp_path / "counted"), list[bool]()
    for at, operation in found.items():
        directory = tmp_path / str(at)
        shutil.copytree(tmp_path / "prepared", directory, symlinks=True)
        later: list[Miniature] = []
        count = itertools.count().__next__

        def take_over(
            what: str, path: Path, count: Any = count, directory: Path = directory, later: Any = later, at: int = at
        ) -> None:
            if what in faults.MUTATIONS and count() == at:
                damage_newer(directory)
                later.append(start(directory, keep=ONE))

        storage = Disturbed(take_over)
        job = start(directory, storage=storage, keep=ONE)
        with contextlib.suppress(FencedOff):  # it may have nothing more to do
            fenced.append(True)
            job.commit(40, best=10)
            fenced[-1] = False
        last = start(directory, keep=ONE)
        assert (last.step, last.text) == (later[0].step, BEFORE[later[0].step]), f"woken before {operation}"
        for each in (last, later[0]):
            each.run.close()
    commits = next(number for number, (_, path) in enumerate(found.values()) if path.name == "manifest.json")
    assert commits > 10 and all(fenced[: commits + 1])


def test_a_thinning_while_a_later_start_chooses_is_taken_into_account(tmp_path: Path) -> None:
    """The earlier start takes 20 for whole, which it has just saved again; the later one has chosen 10."""
    earlier = start(tmp_path, keep=KeepLast(2))
    for step in (10, 20):
        earlier.commit(step)
    faults.flip(native(tmp_path / name(20)))

    def meanwhile(operation: str, path: Path) -> None:
        if operation == "write" and "generation" in path.name and earlier.run.pruner.keep is not KEEP:
            earlier.run.pruner.keep = KEEP
            earlier.commit(20)
            faults.flip(native(tmp_path / name(20)))

    with pytest.raises(NoValidCheckpoint, match=f"{name(10)}: has weights alone"):
        start(tmp_path, storage=Disturbed(meanwhile))
    with contextlib.suppress(FencedOff):
        earlier.run.close()


def test_where_only_weights_are_left_nothing_begins_from_zero(tmp_path: Path) -> None:
    prepare(tmp_path)
    start(tmp_path).commit(40, best=10)
    for step in (10, 40):
        remove(tmp_path / name(step))
    with pytest.raises(NoValidCheckpoint, match=f"{name(30)}: has weights alone.*\n.*{name(20)}: has weights alone"):
        start(tmp_path)
    with pytest.raises(UnsupportedSetting, match=f"{name(20)} has weights alone.*load them in the script"):
        start(tmp_path / "other", resume=tmp_path / name(20))
    require_weights(tmp_path, 20, 30)


def test_the_anchor_is_the_newest_that_is_whole(tmp_path: Path) -> None:
    job = start(tmp_path, keep=KeepEvery(15) | KeepWeights(KeepEvery(10)))
    for step in (15, 20, 22):
        job.commit(step)
    assert weights_only(tmp_path) == {name(20)}
    remove(tmp_path / name(22))
    history = job.run.control.journal.committed()
    plan = plan_prune(Catalog(LocalStorage(), tmp_path), KeepEvery(7), history, now=0.0)
    assert (plan.keep, plan.remove) == ({name(15): "a restart would resume from it"}, {})
    job.run.close()


def test_a_newer_one_of_weights_alone_is_set_aside_since_its_step_will_be_saved_again(tmp_path: Path) -> None:
    prepare(tmp_path)
    start(tmp_path).commit(40, best=10)
    faults.flip(native(tmp_path / name(40)))
    job = start(tmp_path)
    assert (job.step, job.text) == (10, "ten")
    assert {name(20), name(30), name(40)} <= {each.rpartition(".")[0] for each in miniature.set_aside(tmp_path)}
    job.commit(20, "twenty", best=10)
    assert weights_only(tmp_path) == set()
    job.run.close()


def test_what_cannot_be_thinned_stays_whole_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(tmp_path)
    faults.flip(native(tmp_path / name(20)))

    def fail(operation: str, path: Path) -> None:
        if operation == "make_directory" and "begin-" in str(path) and name(30) in str(path):
            faults.refuse(28)

    job = start(tmp_path, storage=Disturbed(fail))
    for step in (40, 50):
        job.commit(step, best=10)
    job.run.close()
    said = [record.getMessage() for record in caplog.records if "keeps all of its state" in record.getMessage()]
    assert [line.partition(" keeps")[0] for line in said] == [name(20), name(30)]
    assert said[0].endswith("has changed since it was committed") and said[1].endswith("No space left on device")
    found = {each: read_manifest(LocalStorage(), tmp_path / each) for each in job.committed()}
    assert {each for each, manifest in found.items() if manifest.weights_only} == {name(40)}
    assert {name(20), name(30)} < found.keys() and not miniature.leftovers(tmp_path)


def test_a_policy_for_weights_is_refused_where_they_cannot_be_kept_alone(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetting, match=r"KeepWeights: engine 1 spreads.*KeepEvery"):
        Miniature(tmp_path, keep=KEEP, framework="engine 1")
    with pytest.raises(UnsupportedSetting, match="a mirror keeps whole copies"):
        Remote("memory://x", keep=KEEP)
