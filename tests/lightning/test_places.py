"""Where checkpoints lie: what Slurm's handler saved next to them, a TMPDIR and a disk that are elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from resume_adapters.errors import UnsupportedSetting
from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

import contract

KILL = {"event": "on_train_batch_end", "step": 18}

# ---- hpc_ckpt_*


@pytest.fixture(scope="session")
def saved_by_slurm(bench: contract.Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What bare Lightning saves at the steps 8 and 17: Slurm's handler saves such files under another name."""
    directory = tmp_path_factory.mktemp("slurm")
    steps = [{"every_n_train_steps": 8}, {"every_n_train_steps": 17, "filename": "{epoch}-{step}-17"}]
    bench.run(directory, {"bare": True, "checkpoints": steps}).require_success()
    return directory / "out"


@pytest.mark.parametrize("named", ["last", "hpc"])
def test_a_newer_hpc_checkpoint_is_taken(
    named: str | None, saved_by_slurm: Path, bench: contract.Bench, reference: Any, killed: Any, tmp_path: Path
) -> None:
    """Bare Lightning ignores it with ``ckpt_path="last"``. Random state is not in it, and that is said."""
    killed(tmp_path, {"kill": KILL})
    assert set(contract.committed(tmp_path / "out").values()) == {5, 10, 15}
    shutil.copy(saved_by_slurm / "epoch=2-step=17-17.ckpt", tmp_path / "hpc_ckpt_1.ckpt")
    outcome = bench.run(tmp_path, {"ckpt_path": named}).require_success()
    assert "hpc_ckpt_1.ckpt: step 17 is newer than the run directory" in outcome.output
    trace = contract.read_trace(tmp_path)
    assert trace.first_step == 17
    # Before 2.5 Lightning counts the batch that such a file was saved after once more, and so may do a step more.
    wanted = {line["step"]: line["lr"] for line in reference({}).steps[0] if line["step"] >= 17}
    assert wanted.items() <= {line["step"]: line["lr"] for line in trace.steps[0]}.items()


@pytest.mark.parametrize("named", [None, "hpc"])
def test_an_older_hpc_checkpoint_is_not_taken(
    named: str | None, saved_by_slurm: Path, bench: contract.Bench, reference: Any, killed: Any, tmp_path: Path
) -> None:
    """Bare Lightning prefers it with ``ckpt_path=None``."""
    killed(tmp_path, {"kill": KILL})
    shutil.copy(saved_by_slurm / "epoch=1-step=8.ckpt", tmp_path / "hpc_ckpt_1.ckpt")
    assert contract.resumed_equals_uninterrupted(bench, tmp_path, {"ckpt_path": named}, reference({})) == 15


def test_a_torn_hpc_checkpoint_is_passed_over(
    saved_by_slurm: Path, bench: contract.Bench, reference: Any, killed: Any, tmp_path: Path
) -> None:
    killed(tmp_path, {"kill": KILL})
    content = (saved_by_slurm / "epoch=2-step=17-17.ckpt").read_bytes()
    (tmp_path / "hpc_ckpt_1.ckpt").write_bytes(content[: len(content) // 2])
    assert contract.resumed_equals_uninterrupted(bench, tmp_path, {}, reference({})) == 15


# ---- TMPDIR


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no other file system here")
@pytest.mark.parametrize("io", [True, False], ids=["io", "callback-alone"])
def test_killed_within_a_file_whose_tmpdir_is_on_another_file_system(
    io: bool, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Law 3. Bare Lightning copies the file from there, and a kill leaves it torn under its final name."""
    written = "epoch=1-step=10.ckpt"
    temporary = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        assert bench.run(tmp_path, {"io": io, "kill_at_opening": written}, env={"TMPDIR": str(temporary)}).killed
        assert not any(temporary.iterdir()), "only a bare Trainer writes in TMPDIR"
    finally:
        shutil.rmtree(temporary)
    content = (tmp_path / "out" / "epoch=0-step=5.ckpt").read_bytes()
    (tmp_path / "out" / written).write_bytes(content[: len(content) // 2])
    config = {"io": io}
    assert contract.resumed_equals_uninterrupted(bench, tmp_path, config, reference(config)) == 5


# ---- Disks that the nodes do not share


@pytest.mark.thorough
@contract.needs_own_disks
def test_nodes_that_see_different_checkpoints_agree_on_one(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """The newest that all of them have. Bare Lightning resumes each rank from its own, and hangs."""
    assert bench.run(tmp_path, {"kill": {**KILL, "step": 12}}, ranks=2).killed
    for node in range(2):
        shutil.copytree(tmp_path / "out", tmp_path / f"disk.{node}", symlinks=True)
    newest = tmp_path / "disk.1" / "epoch=1-step=10.ckpt"
    newest.unlink()
    shutil.rmtree(f"{newest}.resume")
    outcome = bench.start(tmp_path, {"own_disk": True}, ranks=2, nodes=2).wait()
    assert "rank 1: is not there" in outcome.output
    trace = contract.read_trace(tmp_path, 2)
    assert trace.first_step == 5
    contract.require_same_steps(trace, reference({}, 2), start=5)


# ---- Links


class LinkedByStep(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "last-{step}"


def test_a_link_with_a_name_of_each_step_goes_when_there_is_a_newer_one(tmp_path: Path) -> None:
    """A link protects what it points to, so that all checkpoints stayed. Bare Lightning leaves dangling links."""
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "max_steps": 8, "limit_val_batches": 0}
    saving = LinkedByStep(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_last="link")
    pl.Trainer(callbacks=[saving, ResumeCallback()], **options).fit(BoringModel())
    found = {path.name for path in tmp_path.glob("*.ckpt")}
    # What a link of the save before had protected goes with the next commit.
    assert {"step=8.ckpt", "last-step=8.ckpt"} <= found <= {"step=6.ckpt", "step=8.ckpt", "last-step=8.ckpt"}
    assert (tmp_path / "last-step=8.ckpt").resolve() == tmp_path / "step=8.ckpt"


# ---- What is not on a disk


@pytest.mark.parametrize("place", ["dirpath", "default_root_dir"])
def test_a_url_is_refused(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Made absolute, ``memory://a`` is the directory ``memory:`` here."""
    monkeypatch.chdir(tmp_path)
    given = {place: "memory://a"}
    checkpoint = ModelCheckpoint(**given) if place == "dirpath" else ModelCheckpoint()
    root = {} if place == "dirpath" else given
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[checkpoint, ResumeCallback()], **root)
    with pytest.raises(UnsupportedSetting, match=r"ModelCheckpoint saves to memory://a.*: set dirpath"):
        trainer.fit(BoringModel())
    assert not list(tmp_path.iterdir())


def test_a_url_of_another_checkpoint_is_left_to_lightning_but_not_written_by_this_package(tmp_path: Path) -> None:
    local = ModelCheckpoint(dirpath=tmp_path, filename="a", every_n_train_steps=1)
    remote = ModelCheckpoint(dirpath="memory://a", filename="b")
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "max_steps": 1, "limit_val_batches": 0}
    pl.Trainer(callbacks=[local, remote, ResumeCallback()], **options).fit(BoringModel())
    assert (tmp_path / "a.ckpt").exists() and get_filesystem("memory://a").exists("memory://a/b.ckpt")
    ours = ResumeCheckpointIO()
    with pytest.raises(UnsupportedSetting, match="ModelCheckpoint saves to memory://a"):
        pl.Trainer(callbacks=[local, remote, ResumeCallback()], plugins=[ours], **options).fit(BoringModel())
    with pytest.raises(UnsupportedSetting, match=r"got memory://a/b\.ckpt: leave it out"):
        ours.save_checkpoint({}, "memory://a/b.ckpt")


def test_a_first_launch_is_not_told_that_a_last_checkpoint_is_missing(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "max_steps": 1, "limit_val_batches": 0}
    bare = pl.Trainer(callbacks=[ModelCheckpoint(dirpath=tmp_path / "bare")], **options)
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        bare.fit(BoringModel(), ckpt_path="last")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = pl.Trainer(callbacks=[ModelCheckpoint(dirpath=tmp_path / "ours"), ResumeCallback()], **options)
        trainer.fit(BoringModel(), ckpt_path="last")
    assert found and not [each for each in found if "last checkpoint" in str(each.message)]


# ---- What a checkpoint says of others


class Claims(pl.Callback):
    """Says of ModelCheckpoint what a checkpoint might: which one it has saved before, and removes for a better one."""

    def __init__(self, claimed: str) -> None:
        self.claimed = claimed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (checkpoint,) = (each for each in trainer.callbacks if isinstance(each, ModelCheckpoint))
        checkpoint.best_k_models = {self.claimed: torch.tensor(1e9)}
        checkpoint.kth_best_model_path, checkpoint.kth_value = self.claimed, torch.tensor(1e9)


@pytest.mark.parametrize("claimed", ["run/../victim", "run/train.py", "run/data", "victim/file.ckpt"])
def test_what_a_checkpoint_says_removes_nothing_that_is_not_a_checkpoint_of_the_run(
    claimed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint is somebody's claim: bare Lightning removes the directory of a user, with all that is in it."""
    run = tmp_path / "run"
    kept = [tmp_path / "victim" / "file.ckpt", run / "train.py", run / "data" / "file"]
    for each in kept:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("a user's")
    saves = ModelCheckpoint(run, monitor="loss", every_n_train_steps=1, save_top_k=1)

    class Module(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            self.log("loss", found["loss"])
            return found

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    callbacks = [Claims(str(tmp_path / claimed)), saves, ResumeCallback()]
    with caplog.at_level("WARNING"):
        pl.Trainer(max_steps=2, callbacks=callbacks, limit_val_batches=0, **quiet).fit(Module())
    assert all(each.read_text() == "a user's" for each in kept)
    assert "is not removed" in caplog.text or claimed == "victim/file.ckpt", "Lightning asks for that by itself"


@pytest.mark.parametrize("own_io", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_on_an_exception_changes_nothing(own_io: bool, fails: bool, tmp_path: Path) -> None:
    """Lightning's callback for it is no ModelCheckpoint, and removes its file even where it has written none."""

    class Failing(BoringModel):
        def on_train_batch_end(self, *_: Any) -> None:
            if fails and self.global_step == 2:
                raise ZeroDivisionError

    kept = ModelCheckpoint(tmp_path / "run", every_n_train_steps=1, save_top_k=-1)
    callbacks: list[Any] = [kept, OnExceptionCheckpoint(tmp_path / "run"), ResumeCallback()]
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        max_steps=3,
        limit_val_batches=0,
        callbacks=callbacks,
        plugins=[ResumeCheckpointIO()] if own_io else [],
    )
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        trainer.fit(Failing())
    assert trainer.global_step == (2 if fails else 3)
