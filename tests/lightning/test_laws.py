"""The other laws for Lightning, each with real processes."""

from __future__ import annotations

import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from resume_adapters.lightning.files import ForeignCheckpoints, ResumeCheckpointIO
from resume_adapters.lightning.framework import LightningFramework
from selection import often
from waiting import LIMIT

import contract
import laws
import stores
from faults import DAMAGES, cut, flip

KILL = {"event": "on_train_batch_end", "step": 18}
ENDS_SAVED = {"every_n_train_steps": 7}
"""Saves the last step too, so that nothing has to be added at the end."""


# ---- Law 0


MAP: dict[str, Any] = {
    "augment": True,
    "workers": 2,
    "validate": True,
    "checkpoints": [{**ENDS_SAVED, "save_last": True}],
}
STATEFUL: dict[str, Any] = {"stateful": True, "augment": True, "checkpoints": [ENDS_SAVED], "average": "ema"}
STREAM: dict[str, Any] = {"data": "stream", "checkpoints": [{**ENDS_SAVED, "save_top_k": 1}], "logger": True}


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param(MAP, 1, id="1-map"),
        pytest.param(STATEFUL, 1, id="1-stateful", marks=pytest.mark.thorough),
        pytest.param(STREAM, 1, id="1-stream"),
        pytest.param(MAP, 2, id="2-map", marks=pytest.mark.thorough),
        pytest.param(STATEFUL, 2, id="2-stateful"),
    ],
)
def test_an_uninterrupted_run_is_the_bare_one(
    config: dict[str, Any], ranks: int, bench: contract.Bench, reference: Any
) -> None:
    """Law 0: same losses, same weights, same log, same native files. A stream is not divided among ranks."""
    contract.uninterrupted_equals_bare(bench, reference, config, ranks=ranks, timeless=placeless)


def placeless(name: str, content: bytes) -> bytes:
    """Take out of a checkpoint what depends on where it lies: ModelCheckpoint saves its paths."""
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    text = json.dumps(loaded, default=lambda each: each.tolist() if hasattr(each, "tolist") else str(each))
    return re.sub(r'"/[^"]*/(?=out\b)', '"', text).encode()


# ---- Law 1, elsewhere than at the end of a step in the middle

MOMENTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "saved every five steps": (
        {},
        {
            "first step": {"event": "on_train_batch_end", "step": 1},
            "at the end of an epoch": {"event": "on_train_epoch_end", "step": 14},
            "in the last epoch": {"event": "on_train_batch_end", "step": 19},
            "at the end": {"event": "on_train_end", "step": 21},
        },
    ),
    "saved at the end of each epoch": (
        {"checkpoints": [ENDS_SAVED]},
        {
            "in the first batch of an epoch": {"event": "on_train_batch_start", "step": 7},
            "at the start of an epoch": {"event": "on_train_epoch_start", "step": 14},
        },
    ),
    "validated": (
        {"validate": True, "trainer": {"val_check_interval": 10}},
        {"between the save of a batch and its validation": {"event": "validation_step", "step": 5}},
    ),
    "stopped in mid-epoch": (
        {"trainer": {"max_steps": 20, "max_epochs": -1}},
        {"at that step": {"event": "on_train_epoch_end", "step": 20}},
    ),
}
"""Runs that are alike, each with the moments at which its launches are killed, one after the other."""


@pytest.mark.thorough
@pytest.mark.parametrize("chain", MOMENTS)
def test_killed_at_any_moment(chain: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Each launch of a chain is killed at the next of its moments, and the last one runs to the end."""
    variation, kills = MOMENTS[chain]
    config = {"augment": True, "begins": True, **variation}
    expected = reference(config)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, list(kills.values()))


# ---- Laws 3 and 4, and others that are the same for every adapter

SAVES_LAST_AT_EACH_END = "_last_global_step_saved" not in inspect.getsource(
    pl.callbacks.ModelCheckpoint.on_train_epoch_end
)
"""An older ModelCheckpoint saves last.ckpt at the end of each epoch: let it end with a step that is saved anyway."""

SAVES = {
    "samples": 16 if SAVES_LAST_AT_EACH_END else 20,
    "trainer": {"max_steps": 6, "max_epochs": -1},
    "checkpoints": [{"every_n_train_steps": 2, "save_top_k": 1, "save_last": True}],
}


OPERATIONS = contract.operations(
    "epoch=0-step=2.ckpt",
    "epoch=1-step=4.ckpt",
    "epoch=1-step=4.ckpt.resume",
    contract.Operation("open", rf"{contract.BEGUN}epoch=1-step=4\.ckpt", 2),
    saves=2,
    superseded=("last.ckpt", 4),
) | {
    "takes the mark of the committed away": contract.Operation(
        "os.rename", r"epoch=0-step=2\.ckpt\.resume/manifest\.json", 4
    ),
}


COPIED = {"augment": True, "callback": {"stage": "memory"}}
OFTEN = {"checkpoints": [{"every_n_train_steps": 2}]}
EVERYTHING = {"augment": True}
NEWEST = "epoch=2-step=15.ckpt"
DAMAGED = {
    NEWEST: "zeroed",
    f"{NEWEST}.resume/rank-00000.json": "cut",
    f"{NEWEST}.resume/rank-00000.safetensors": "flipped",
    f"{NEWEST}.resume/manifest.json": "removed",
}
"""A file of each kind, and what befalls it."""


class Loaded(pl.LightningModule):
    def __init__(self, **hyperparameters: Any) -> None:
        super().__init__()

    def load_state_dict(self, state: Any, *arguments: Any, **options: Any) -> Any:
        self.saved = dict(state)
        return super().load_state_dict({})


def load(checkpoint: Path) -> dict[str, torch.Tensor]:
    return Loaded.load_from_checkpoint(checkpoint).saved


JOB = laws.Job(
    KILL,
    SAVES,
    OPERATIONS,
    leaving=[{6}],
    of_the_end=["logged"],
    copied=COPIED,
    often=OFTEN,
    everything=EVERYTHING,
    newest=NEWEST,
    before="epoch=1-step=10.ckpt",
    damages=DAMAGED,
    foreign=ForeignCheckpoints(),
    load=load,
    audited={"augment": True},
)

test_killed_before_it = laws.of_each(
    laws.killed_before_it,
    OPERATIONS,
    "lets the framework write",
    "commits",
    "moves a checkpoint aside to save it again",
    "takes the one aside out of sight",
    "takes the mark of the committed away",
)
test_any_damage_of_any_file_is_found = laws.any_damage_of_any_file_is_found
test_a_damaged_file_of_any_kind_takes_the_previous_checkpoint = laws.of_each(
    laws.a_damaged_file_of_any_kind_takes_the_previous_checkpoint, DAMAGED, NEWEST
)
test_killed_before_it_with_copies = laws.of_each(
    laws.killed_before_it_with_copies, contract.STAGED, "lets the framework write", "commits"
)
test_killed_twice_with_copies_equals_never = laws.of_each(
    laws.killed_twice_with_copies_equals_never, ["cpu", "walled"], "cpu"
)
test_killed_between_copy_and_commit = laws.killed_between_copy_and_commit
test_an_empty_machine_resumes_from_the_mirror = laws.an_empty_machine_resumes_from_the_mirror
test_weights_alone_are_kept = laws.weights_alone_are_kept
test_an_epoch_begins_once_on_two_ranks = laws.thorough(laws.an_epoch_begins_once_on_two_ranks)
test_an_audit_finds_a_flipped_bit = laws.of_each(laws.an_audit_finds_a_flipped_bit, ["weights", "moments"])
test_a_kill_loses_no_step_that_memory_has = laws.a_kill_loses_no_step_that_memory_has
test_a_run_directory_below_a_file_is_refused = laws.a_run_directory_below_a_file_is_refused


@pytest.mark.parametrize("operation", ["lets the framework write", "commits"])
def test_frozen_before_it(operation: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 3, for a job that is suspended: when it wakes up, a second one has saved the same steps."""
    contract.frozen_before_an_operation(
        bench, tmp_path, SAVES, reference(SAVES), OPERATIONS[operation], ignore=["logged"]
    )


LAST = ("cut", "emptied", "flipped", "removed", "dangling", "stale", "newer-name")


@pytest.mark.parametrize("last", often(LAST, "flipped", "dangling", "stale"))
def test_what_is_called_last_is_not_trusted(
    last: str, bench: contract.Bench, reference: Any, killed: Any, tmp_path: Path
) -> None:
    """Bare Lightning crashes on a torn ``last.ckpt``, loads a flipped one, starts from zero without it."""
    config = {"checkpoints": [{"save_last": "link" if last == "dangling" else True}]}
    killed(tmp_path, {**config, "kill": KILL})
    out = tmp_path / "out"
    if last in DAMAGES:
        DAMAGES[last](out / "last.ckpt")
    elif last == "dangling":
        (out / "last.ckpt").unlink()
        (out / "last.ckpt").symlink_to("gone.ckpt")
    elif last == "stale":
        future = time.time() + 10_000
        os.utime(out / "epoch=0-step=5.ckpt", (future, future))
        shutil.copy(out / "epoch=0-step=5.ckpt", out / "last-v1.ckpt")
    else:
        shutil.copy(out / "epoch=0-step=5.ckpt", out / "lastly_saved.ckpt")
    bench.run(tmp_path, config).require_success()
    trace = contract.read_trace(tmp_path)
    contract.require_same_steps(trace, reference(config), start=15)
    contract.require_same_end(trace, reference(config), ["files"])


def test_all_damaged_is_an_error_that_lists_them(
    killed: contract.Killed, bench: contract.Bench, tmp_path: Path
) -> None:
    killed(tmp_path / "run", {**EVERYTHING, "kill": KILL})
    out = tmp_path / "run" / "out"
    names = list(contract.committed(out))
    for name in names:
        flip(out / name)
    outcome = bench.run(tmp_path / "run", {"augment": True})
    assert outcome.statuses == (1,)
    for name in names:
        assert f"{name}: {name} has the digest" in outcome.output
        assert (out / name).is_file(), "nothing may be lost"
    assert 'resume="scratch!"' in outcome.output


# ---- Law 5


def test_the_best_and_the_newest_survive(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {
        "validate": True,
        "trainer": {"val_check_interval": 7},
        "checkpoints": [{"monitor": "val_loss", "save_top_k": 1, "every_n_train_steps": None, "save_last": True}],
    }
    for step in (12, 18):
        assert bench.run(tmp_path, {**config, "kill": {**KILL, "step": step}}).killed
    bench.run(tmp_path, config).require_success()
    trace = contract.read_trace(tmp_path)
    contract.require_same_end(trace, reference(config))
    assert trace.final[0] is not None
    assert trace.final[0]["best"][0][0] in contract.committed(tmp_path / "out")


# ---- Law 6


def test_a_compiled_part_and_a_plain_one_restore_alike(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    kills = [{**KILL, "step": step} for step in (8, 18)]
    launches = [{"compiled": compiled} for compiled in (True, False, True)]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, {}, reference({}), kills, relaunch=launches)


def test_another_architecture_is_refused(bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    killed(tmp_path, {"kill": KILL})
    outcome = bench.run(tmp_path, {"width": 24})
    assert outcome.statuses == (1,)
    assert "was saved from another model" in outcome.output and "body.0.weight" in outcome.output


# ---- Law 8


VALIDATED = {"augment": True, "samples": 100, "validate": [12, 24], "trainer": {"val_check_interval": 7}}
IN_VALIDATION = {"event": "validation_step", "validated": 1, "within": 0}
STOPS: list[dict[str, Any]] = [
    {**IN_VALIDATION, "step": 0},  # in the check before the training
    {"event": "on_train_batch_start", "step": 4},
    {**IN_VALIDATION, "step": 7},
    {**IN_VALIDATION, "step": 10},  # of which there is a checkpoint, from before a batch of the next step
    {**IN_VALIDATION, "step": 16},  # with gradients of the next step
]


def test_a_stop_saves_then_leaves(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Bare Lightning saves within an accumulation window, and exits as if it had finished."""
    contract.stopped_then_resumed(bench, tmp_path, VALIDATED, reference(VALIDATED), *STOPS)


def test_a_stop_at_the_end_lets_it_finish(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.asked_at_its_end_finishes(bench, tmp_path, reference({}), {"event": "on_train_end", "step": 21})


# ---- Law 10


@pytest.mark.parametrize("directory", ["out"])
def test_bare_lightning_loads_what_was_saved(directory: str, bench: contract.Bench, tmp_path: Path) -> None:
    bench.run(tmp_path, {"checkpoints": [{"save_last": True}], "kill": KILL})
    bench.run(tmp_path, {"checkpoints": [{"save_last": True}], "bare": True}).require_success()
    assert contract.read_trace(tmp_path).first_step == 15


# ---- Each alone


def test_the_io_alone_replaces_files_in_one_step(bench: contract.Bench, tmp_path: Path) -> None:
    """A kill within the second save of a file leaves the first; what is missing is said once."""
    config = {"callback_off": True, "checkpoints": [{"save_last": True, "save_top_k": 1}]}
    outcome = bench.run(tmp_path, {**config, "kill": KILL})
    out = tmp_path / "out"
    assert outcome.killed and outcome.output.count("add ResumeCallback()") == 1
    assert sorted(path.name for path in out.glob("*.ckpt")) == ["epoch=2-step=15.ckpt", "last.ckpt"]
    assert contract.committed(out) == {}
    before = (out / "last.ckpt").read_bytes()
    assert bench.run(tmp_path, {**config, "kill_at_opening": ".last.ckpt.tmp"}).killed
    assert contract.read_trace(tmp_path).first_step == 15
    assert (out / "last.ckpt").read_bytes() == before
    shutil.rmtree(out / ".resume", ignore_errors=True)
    outcome = bench.run(tmp_path, {**config, "callback_off": False}).require_success()
    assert "was made without this package" in outcome.output


# ---- Ends, beginnings and refusals


@pytest.mark.parametrize(
    "config",
    [{}, {"average": "ema", "trainer": {"max_steps": 20, "max_epochs": -1}}, {"average": "mean"}],
    ids=["plain", "ema", "mean"],
)
def test_a_finished_run_launched_again_does_nothing(
    config: dict[str, Any], bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Bare Lightning ends an averaged run with the weights that are not averaged."""
    same = ["weights", "global_step", "epoch", "draws", "files"]
    contract.finished_does_nothing_again(bench, tmp_path, reference, config, same)


def test_a_run_under_way_is_taken_over(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    assert bench.run(tmp_path, {"bare": True, "kill": KILL}).killed
    cut(tmp_path / "out" / "epoch=2-step=15.ckpt")
    outcome = bench.run(tmp_path, {}).require_success()
    assert "epoch=2-step=15.ckpt is damaged" in outcome.output
    assert "epoch=1-step=10.ckpt was made without this package" in outcome.output
    assert contract.read_trace(tmp_path).first_step == 10


def test_a_path_starts_a_run_but_its_own_checkpoints_win(
    bench: contract.Bench, reference: Any, killed: Any, tmp_path: Path
) -> None:
    killed(tmp_path / "old", {"kill": KILL})
    config = {"ckpt_path": str(tmp_path / "old" / "out" / "epoch=1-step=10.ckpt")}
    assert bench.run(tmp_path / "new", {**config, "kill": KILL}).killed
    contract.require_same_steps(contract.read_trace(tmp_path / "new"), reference({}), start=10)
    bench.run(tmp_path / "new", config).require_success()
    contract.require_same_steps(contract.read_trace(tmp_path / "new"), reference({}), start=15)


def test_without_a_directory_the_next_launch_finds_the_run(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Under a logger each launch is a new version, and bare Lightning starts from zero in each."""
    config = {"logger": "placeless"}
    place = tmp_path / "logs" / "lightning_logs" / "version_0" / "checkpoints"
    bench.run(tmp_path, {**config, "kill": KILL})
    assert set(contract.committed(place).values()) >= {10}
    bench.run(tmp_path, config).require_success()
    trace = contract.read_trace(tmp_path)
    assert trace.first_step in (10, 15)
    contract.require_same_steps(trace, reference(config), start=trace.first_step)
    assert 21 in contract.committed(place).values()


def test_a_run_directory_that_was_moved_goes_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {"checkpoints": [{"save_top_k": 1, "save_last": True}]}
    bench.run(tmp_path / "a", {**config, "kill": KILL})
    (tmp_path / "a").rename(tmp_path / "b")
    contract.resumed_equals_uninterrupted(bench, tmp_path / "b", config, reference(config))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"async_io": True}, "AsyncCheckpointIO"),
        ({"checkpoints": [{"save_weights_only": True}]}, "no ModelCheckpoint saves the whole state"),
        ({"trainer": {"reload_dataloaders_every_n_epochs": 1}}, "reload_dataloaders_every_n_epochs"),
        ({"resume": "sratch"}, "did you mean"),
        ({"resume": "out/none.ckpt"}, "is not there"),
        ({"fetching": True}, "training_step(dataloader_iter) fetches its batches by itself"),
    ],
)
def test_what_cannot_be_exact_is_refused(config: Any, named: str, bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, config)
    assert outcome.statuses == (1,)
    assert named in outcome.output and "UnsupportedSetting" in outcome.output
    assert not any(contract.read_trace(tmp_path).steps)


def test_without_room_the_save_fails_with_one_clear_error(bench: contract.Bench, tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: what was committed stays, and the next launch goes on."""
    bench.run(tmp_path, {"kill": {"event": "on_train_batch_end", "step": 8}})
    outcome = bench.run(tmp_path, {"file_limit": 15_000})
    assert outcome.statuses == (1,)
    assert "SaveFailed" in outcome.output and "the checkpoints committed before it are intact" in outcome.output
    assert set(contract.committed(tmp_path / "out").values()) == {5}
    bench.run(tmp_path, {}).require_success()


def test_a_run_trains_on_after_a_save_that_failed(
    reference: contract.References, bench: contract.Bench, tmp_path: Path
) -> None:
    config = {"callback": {"on_save_error": "continue"}}
    without = {**config, "file_limit": 15_000}
    contract.trains_on_after_a_failed_save(bench, tmp_path, without, reference({}), ignore=("files",))


def test_a_full_disk_on_one_of_two_ranks_leaves_nobody_waiting(bench: contract.Bench, tmp_path: Path) -> None:
    running = bench.start(tmp_path, {"file_limit": 15_000}, ranks=2)
    outcome = running.wait(survivors=LIMIT)
    assert outcome.statuses[0] == 1 and -signal.SIGKILL not in outcome.statuses


# ---- Law 12


@pytest.mark.thorough
@pytest.mark.long
def test_a_hundred_fits_in_one_process_leave_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    has_tensorboard = importlib.util.find_spec("tensorboard") is not None
    config = {
        "samples": 40,
        "width": 4,
        "validate": True,
        "logger": has_tensorboard,
        "trainer": {"accumulate_grad_batches": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0},
    }
    contract.opened_and_closed_leaves_nothing(bench, tmp_path, config)


# ---- Saves that are copied, and written in the background


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_plugin_would_add_is_said_once_to_several_ranks(
    ranks: int, bench: contract.Bench, tmp_path: Path
) -> None:
    """One rank alone has no other that it could leave waiting."""
    outcome = bench.run(tmp_path, {"io": False, "trainer": {"max_steps": 2}}, ranks=ranks).require_success()
    assert outcome.output.count("a rank whose disk is full leaves the others waiting") == ranks - 1


@pytest.mark.parametrize(("ranks", "io"), [pytest.param(1, True, marks=pytest.mark.thorough), (2, True), (1, False)])
def test_the_files_are_those_of_the_bare_trainer(ranks: int, io: bool, bench: contract.Bench, reference: Any) -> None:
    config = {**COPIED, "io": io, "checkpoints": [ENDS_SAVED]}
    contract.staged_equals_bare(bench, reference, config, ranks=ranks, timeless=placeless)


class Uploading(pl.callbacks.ModelCheckpoint):
    """It reads each file that it has saved."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)


class LeftBehind(pl.callbacks.ModelCheckpoint):
    """It may read what it has saved at the end of a batch."""

    def on_train_batch_end(self, *arguments: Any, **keywords: Any) -> None:
        super().on_train_batch_end(*arguments, **keywords)


class UploadingIO(pl.plugins.TorchCheckpointIO):
    """It reads each file that it has written."""

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        super().save_checkpoint(*arguments, **keywords)


class Adding(pl.Callback):
    """It adds to the file what it holds when that is written."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["adding"] = self.__dict__


@pytest.mark.parametrize(
    ("callback", "objection"),
    [
        (pl.callbacks.EarlyStopping("loss"), ""),
        (Adding(), "Adding.on_save_checkpoint() may save what has changed since the end of the step"),
    ],
)
def test_a_callback_that_adds_to_the_file_is_not_saved_after_a_failure(
    callback: Any, objection: str, tmp_path: Path
) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[callback, pl.callbacks.ModelCheckpoint(tmp_path)])
    found = LightningFramework(trainer, tmp_path).objection_to_saving_later
    assert found.partition(";")[0] == objection


@pytest.mark.parametrize(
    ("kind", "plugins", "reader"),
    [
        (pl.callbacks.ModelCheckpoint, [], ""),
        (pl.callbacks.ModelCheckpoint, [ResumeCheckpointIO], ""),
        (Uploading, [], "Uploading._save_checkpoint() may read each checkpoint"),
        (LeftBehind, [], "LeftBehind.on_train_batch_end() may read each checkpoint"),
        (pl.callbacks.ModelCheckpoint, [UploadingIO], "UploadingIO.save_checkpoint() may read each checkpoint"),
    ],
)
def test_nothing_is_copied_by_itself_where_somebody_may_read_it(
    kind: type[Any], plugins: list[Any], reader: str, tmp_path: Path
) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, callbacks=[kind(tmp_path)], plugins=[each() for each in plugins]
    )
    assert LightningFramework(trainer, tmp_path).staging("auto").objection() == reader


@pytest.mark.parametrize(
    ("logger", "options", "reads"),
    [
        ("CSVLogger", {}, False),
        ("TensorBoardLogger", {}, False),
        ("WandbLogger", {}, False),
        ("WandbLogger", {"log_model": "all"}, True),
    ],
)
def test_a_logger_reads_checkpoints_where_it_is_told_to(
    logger: str, options: dict[str, Any], reads: bool, tmp_path: Path
) -> None:
    if logger != "CSVLogger":
        pytest.importorskip(logger.removesuffix("Logger").lower())
    made = getattr(pl.loggers, logger)(save_dir=tmp_path, **options)
    trainer = pl.Trainer(accelerator="cpu", logger=made, callbacks=[pl.callbacks.ModelCheckpoint(tmp_path)])
    objection = f"{logger}.after_save_checkpoint() may read each checkpoint" if reads else ""
    assert LightningFramework(trainer, tmp_path).staging("auto").objection() == objection


# ---- In interpreters of their own, which have imported nothing before the job


@pytest.mark.thorough
@pytest.mark.long
def test_the_laws_hold_in_fresh_interpreters(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {"augment": True, "module_average": True}
    contract.laws_in_fresh_interpreters(
        bench,
        tmp_path,
        config,
        reference(config),
        commit=contract.Operation(
            "os.rename", rf"epoch=2-step=15\.ckpt\.resume/{contract.temporary('manifest.json')}", 10
        ),
        damaged="epoch=1-step=10.ckpt",
        send={"event": "on_train_batch_start", "step": 17},
    )


# ---- A run that an older version of the package has begun


def test_an_older_run_goes_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.older_run_goes_on(bench, tmp_path / "run", reference, "lightning", pl.__version__)


# ---- The step trace


def test_the_trace_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    """The directory of the script holds no file in the end, also none of the second ModelCheckpoint."""
    checkpoints = [{"every_n_train_steps": 100}, {"every_n_train_steps": 3, "save_top_k": 1, "dirpath": "out/more"}]
    config = {"augment": True, "samples": 100, "checkpoints": checkpoints, "trainer": {"max_epochs": 2}}
    config["trace_files"] = False
    contract.traces_are_equal(bench, reference, tmp_path, config, {"event": "on_train_batch_end", "step": 18})


# ---- The run of each tracker


@pytest.mark.thorough
@pytest.mark.skipif(not stores.are_installed(), reason="the extra `trackers` installs them")
def test_the_loggers_of_lightning_continue_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    """Lightning logs the row of a batch, and of an epoch, after the callbacks, and so after the checkpoint of it."""
    each_epoch = {"every_n_train_steps": None, "every_n_epochs": 1, "save_on_train_epoch_end": True}
    config = {
        "trackers": True,
        "validate": True,
        "trainer": {"log_every_n_steps": 1},
        "checkpoints": [{}, each_epoch],
    }
    kills = (
        {"event": "on_train_epoch_end", "step": 7},  # behind the checkpoint of the epoch
        {"event": "on_train_batch_end", "step": 15},  # behind the checkpoint of the batch
        {"event": "on_train_batch_end", "step": 18},
    )
    stores.continue_the_run(bench, tmp_path, config, *kills)


@pytest.mark.thorough
@pytest.mark.parametrize("take", contract.FORKS)
def test_a_fork_equals_loading_by_hand(take: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """A new run with the weights of another, and with its optimizer's state."""
    changes = {"samples": 40}
    contract.a_fork_equals_loading_by_hand(bench, tmp_path, {"augment": True}, reference, take, KILL, changes=changes)
