"""One call of ``Trainer.fit``, up to its first step: choosing, loading, putting back, proving."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resume_adapters import _lightning_deepspeed as zero
from resume_adapters import _lightning_files as files
from resume_adapters import _lightning_state as module_state
from resume_adapters._lightning_framework import VERSION, io, pl, unsaved
from resume_adapters._lightning_loops import IN_EPOCH, Loops, mean_of_gradients, set_epoch
from resume_adapters._trackers import Trackers
from resume_adapters.core import report, state, weights
from resume_adapters.core.cadence import chosen
from resume_adapters.core.loader import LoaderWatch
from resume_adapters.core.position import length_of
from resume_adapters.core.resolve import Checkpoint
from resume_adapters.core.resumption import GIVEN_IN_STEPS, SEVERAL_LOADERS
from resume_adapters.core.retention import KeepUnless
from resume_adapters.core.run import ResumableRun
from resume_adapters.core.session import Session
from resume_adapters.core.settings import refuse
from resume_adapters.errors import CheckpointDamaged, StateMismatch, UnsupportedSetting

if TYPE_CHECKING:
    from resume_adapters.lightning import ResumeCallback


def require_supported(trainer: Any) -> None:
    """Refuse settings under which a resume cannot be exact.

    Raises:
        UnsupportedSetting: naming the setting and what to do.
    """
    if not isinstance(trainer, pl.Trainer):
        raise UnsupportedSetting(
            f"this Trainer is of {type(trainer).__module__.partition('.')[0]}, resume_adapters.lightning works with "
            f"{pl.__name__}: import both from there"
        )
    strategy = trainer.strategy
    plugin = strategy.checkpoint_io
    refused = {
        "no ModelCheckpoint saves the whole state (with save_weights_only=False)": not saving(trainer),
        "reload_dataloaders_every_n_epochs makes loaders anew at moments that a resume cannot repeat": (
            trainer.reload_dataloaders_every_n_epochs
        ),
        "AsyncCheckpointIO writes after the save has returned, and may remove the last checkpoint before that; "
        "ResumeCallback commits in the background by itself": isinstance(plugin, io.AsyncCheckpointIO),
        **zero.refused(strategy),
        "training_step(dataloader_iter) fetches its batches by itself, and may fetch more than it has used": (
            "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters
        ),
    }
    refuse(refused, "change it, or leave the callback out")


def saving(trainer: Any) -> list[Any]:
    """Return every ModelCheckpoint that saves the whole state."""
    found = [each for each in trainer.checkpoint_callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]
    return [each for each in found if not each.save_weights_only]


def settle_directories(trainer: Any, resume: str) -> None:
    """Give each ModelCheckpoint that has no ``dirpath`` one that the next launch finds again.

    Lightning would put it below the logger's version, which is a new one at every launch: an earlier version that holds
    a run is taken instead.
    """
    for each in saving(trainer):
        if each.dirpath is not None:
            continue
        fresh = Path(each._ModelCheckpoint__resolve_ckpt_dir(trainer))  # seam: lightning 2.4-2.6
        versions = fresh.parents[1].glob("version_*/" + fresh.name) if trainer.loggers else []
        earlier = sorted((path for path in versions if (path / ".resume").is_dir()), key=_version)
        if earlier and not resume.startswith("scratch"):
            fresh = earlier[-1]
        each.dirpath = trainer.strategy.broadcast(os.path.realpath(fresh))


def _version(directory: Path) -> int:
    number = directory.parent.name.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


class Restoration(Session):
    """Chooses a checkpoint for a call of ``fit()``, loads it, and proves that it came back."""

    def __init__(self, trainer: Any, callback: ResumeCallback, named: str | os.PathLike[str] | None) -> None:
        self.trainer = trainer
        self.loops = Loops(trainer)
        self.moment: str | None = None
        self.finished = False
        self.watches: list[LoaderWatch] = []
        self.unwanted: set[str] = set()
        directory = Path(os.path.realpath(saving(trainer)[0].dirpath))
        self.engine = zero.engine_state(trainer.strategy, directory)
        inside = named is None or files.same(Path(named).parent, directory) or self._is_hpc(named)
        run = ResumableRun(
            directory,
            framework=VERSION,
            resume=callback.resume if named is None or inside else named,
            keep=callback.keep or KeepUnless(self.unwanted, files.OWN_NAME.partition("{")[0]),
            stop=callback.stop,
            cadence=chosen(callback.save_every, callback.mtbf),
            foreign=files.foreign_step if self.engine is None else zero.foreign(self.engine),
        )
        super().__init__(
            run,
            callback.parts,
            trackers=Trackers(self._writers, self._mlflow_run),
            verify=callback.verify,
            topology={"accumulate_grad_batches": trainer.accumulate_grad_batches},
            accumulation=trainer.accumulate_grad_batches,
            fixed={
                **module_state.fixed(trainer, run.ranks.world_size),
                **({} if self.engine is None else self.engine.fixed),
            },
            spread=functools.partial(module_state.spread, trainer),
            on_batch_change=callback.on_batch_change,
        )
        self.no_horizon = _no_horizon(trainer)
        self._consumed = 0
        self._proof: dict[str, Any] = {}
        self._steps: int | None = None

    # ---- Resuming

    def open(self) -> Path | None:
        """Choose what to resume from; return the path that the trainer is to load."""
        self.choose()
        self._prefer_newer_hpc()
        if self.checkpoint is not None and self.checkpoint.manifest is not None and self.own is None:
            report.logger.warning(
                "%s was saved without ResumeCallback: random state and data position are those of a fresh start.",
                self.checkpoint.path.name,
            )
        return None if self.checkpoint is None else self.checkpoint.path

    def _hpc(self) -> str | None:
        path: str | None = self.trainer._checkpoint_connector._hpc_resume_path  # seam: lightning 2.4-2.6
        return path

    def _is_hpc(self, named: str | os.PathLike[str]) -> bool:
        return Path(named).name.startswith("hpc_ckpt_")

    def _prefer_newer_hpc(self) -> None:
        """Take what Slurm's handler saved, where it is newer than everything in the run directory."""
        found = self._hpc()
        if found is None or self.run.resume == "scratch!":
            return
        try:
            step = self.run.foreign(Path(found))
        except CheckpointDamaged as damage:
            report.logger.warning("%s is passed over: %s", found, damage)
            return
        if step is not None and step > (self.checkpoint.step if self.checkpoint else 0):
            report.logger.warning("%s is of step %d, newer than the run directory: it is taken.", found, step)
            self.checkpoint, self.own = Checkpoint(Path(found), step, None), None

    def adopt(self, loaded: dict[str, Any]) -> None:
        """Make what the trainer has read fit this launch: keys of a wrapped model, paths of a directory that moved."""
        assert self.checkpoint is not None
        module = self.trainer.lightning_module
        precision = self.trainer.precision_plugin
        if isinstance(precision, pl.plugins.HalfPrecision | pl.plugins.DoublePrecision):
            precision.convert_module(module)  # the strategy will, but later than the weights are compared
        self.require_architecture(self.model)
        for name in ("state_dict", "current_model_state"):
            if loaded.get(name):
                matched = weights.match(loaded[name], module.state_dict(), self.checkpoint.path)
                loaded[name] = {key: loaded[name][saved] for key, saved in matched.items()}
        for each in saving(self.trainer):
            saved = loaded.get("callbacks", {}).get(each.state_key)
            if saved and saved["dirpath"] != each.dirpath and self.checkpoint.path.parent == self.run.directory:
                loaded["callbacks"][each.state_key] = _moved(saved, str(saved["dirpath"]), str(each.dirpath))
        self._proof = dict(loaded)
        if self.own is None:
            for each in saving(self.trainer):  # else it saves this step once more, in the middle of the next
                each._last_global_step_saved = self.checkpoint.step  # seam: lightning 2.4-2.6
            return
        self.finished = self.is_finished(self.checkpoint.step, self.horizon())
        self.trainer.fit_loop.run = self._run  # seam: lightning 2.4-2.6, in place of FitLoop.run for this call

    def horizon(self) -> int:
        """Return the steps, or the epochs, after which the run is finished."""
        return int(self.trainer.max_steps if self.trainer.max_steps > 0 else self.trainer.max_epochs or 0)

    def _run(self) -> None:
        del self.trainer.fit_loop.run
        if self.finished:
            report.logger.info("This run finished at step %d: nothing to do.", self.trainer.global_step)
        # Of a finished run too: what followed its last checkpoint may have changed weights, as averaging does.
        self.loops.run_from(self.own["moment"], self._put_back, self._restore_random_state)

    @property
    def model(self) -> Any:
        """What has the names and the whole shapes of the weights."""
        return self.engine or self.trainer.lightning_module

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which Lightning loads, running no code of the checkpoint."""
        if self.engine is None:
            return contextlib.nullcontext()
        self.require_architecture(self.engine)
        return self.engine.loading(self)

    def watch_loaders(self, loaders: list[Any]) -> None:
        """Watch the training loaders, and set them where they were.

        Raises:
            StateMismatch: there were more of them, or fewer, when the checkpoint was saved.
            UnsupportedSetting: one of them is no torch DataLoader.
        """
        self.watches = [self.watch(each) for each in loaders]
        if self.own is None:
            return
        saved = self.own["loaders"]
        if len(loaders) > 1:
            self.no_horizon = SEVERAL_LOADERS
        if len(saved) != len(loaders):
            raise StateMismatch(
                f"{len(saved)} training loaders were saved, this launch has {len(loaders)}: launch with as many, "
                "or start another run directory"
            )
        for number, watch in enumerate(self.watches):
            if saved[number]["position"]["ended"]:
                watch.hold()  # Lightning begins a pass before it knows whether it needs one
            else:
                set_epoch(watch.loader, self.own["epoch"])
                self._restore_loader(number)

    def _restore_loader(self, number: int) -> None:
        watch = self.watches[number]
        self._consumed = self.restore_loader(
            watch,
            self.own["loaders"][number],
            self.together(watch),
            1,
            lambda own: own["loaders"][number],
            epoch=self.own["epoch"] - (self.own["moment"] not in IN_EPOCH),
            length=length_of(watch.loader),
        )

    def note_schedules(self) -> None:
        """Note the schedules that go by steps, before the trainer loads them."""
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == "step":
                self.schedules.note(config.scheduler, Fraction(1, config.frequency))

    def together(self, watch: LoaderWatch) -> int:
        """Return the samples in a batch of a loader, on all ranks together; 0 where the loader does not say."""
        return (watch.batch_size or 0) * self.run.ranks.world_size

    def _put_back(self) -> None:
        """Put back what the start of the loop resets, and prove what the trainer loaded."""
        own, trainer = self.own, self.trainer
        # ModelCheckpoint never removes this one; here retention knows when it may go.
        trainer._checkpoint_connector._ckpt_path = None  # seam: lightning 2.4-2.6
        self.prove_shares()
        saved, self._proof = self._proof, {}
        if self.verify and self.checkpoint is not None:
            module_state.prove(trainer, saved, self.checkpoint.path)
        if self.engine is not None:
            self.engine.restore(own["engine"])
        self.align_buckets(trainer.model)
        metrics, progress, gradients = own["metrics"], own["progress"], own["gradients"]
        if self.has_other_ranks:
            others, place = self.everyone(), (self.run.ranks.rank, self.run.ranks.world_size)
            metrics = self.loops.share_of_metrics([each["metrics"] for each in others], *place)
            gradients = self._gradients_here([each["gradients"] for each in others])
        self.loops.set_metrics(metrics, own["moment"])
        self.loops.set_progress(self._progress_here(progress), own["moment"], own["row"])
        self.loops.set_gradients(gradients)
        self.loops.start_evaluation_workers(own["evaluation_workers"])
        for each in saving(trainer):
            self._remind(each, own["checkpoints"].get(each.state_key, {}))
        # Of other ranks' running statistics none is this rank's; those of the first are in the trainer's file.
        self.restore_parts({} if self.has_other_ranks else self.further_parts())

    def _gradients_here(self, everyone: list[Any]) -> Any:
        """Return the gradients of an unfinished accumulation as this rank is to hold them.

        Raises:
            StateMismatch: each rank had saved its shards of them.
        """
        if any(everyone) and module_state.is_spread(self.trainer):
            raise self._mismatch(
                self.moved,
                "it is in the middle of an accumulation, and its gradients are cut for the ranks as they were",
            )
        return mean_of_gradients(everyone)

    def _progress_here(self, saved: Any) -> Any:
        """Return the counters of the loops with what counts batches in batches of this launch.

        Raises:
            StateMismatch: the batches that are done are no whole number of them, or of loaders of different sizes.
        """
        before, here = self.own["loaders"], [self.together(watch) for watch in self.watches]
        sizes = {Fraction(each["together"], now) for each, now in zip(before, here, strict=True) if now}
        if sizes <= {1}:
            return saved
        size = max(sizes)
        rebatched = any(self.is_rebatched(each, now) for each, now in zip(before, here, strict=True))
        done = self._consumed if rebatched else self.loops.batches_done(saved) * size
        at_end = all(each["position"]["ended"] for each in before)
        if len(sizes) > 1 or (done % 1 and not at_end) or (rebatched and self.own["gradients"]):
            raise self._mismatch(
                self.moved,
                "it is in the middle of a batch or of an accumulation of this launch, or its loaders are not divided "
                "alike",
            )
        return self.loops.in_batches(saved, size, None if at_end else int(done))

    def _writers(self) -> list[Any]:
        loggers = self.trainer.loggers if self.trainer.is_global_zero else []
        return [each.experiment for each in loggers if isinstance(each, pl.loggers.TensorBoardLogger)]

    def _mlflow_run(self) -> str | None:
        loggers = self.trainer.loggers if self.trainer.is_global_zero else []
        return next((each.run_id for each in loggers if isinstance(each, pl.loggers.MLFlowLogger)), None)

    def further_parts(self) -> dict[str, state.Stateful]:
        """Return what DeepSpeed does not save, and what differs between ranks where the first alone is saved."""
        of_engine = {} if self.engine is None else self.engine.parts()
        return {
            **of_engine,
            **({"buffers": module_state.Buffers(self.trainer)} if self.run.ranks.world_size > 1 else {}),
        }

    def _remind(self, callback: Any, memory: dict[str, Any]) -> None:
        for name in unsaved(callback).keys() & memory.keys():
            setattr(callback, name, memory[name])
        name = callback.format_checkpoint_name(dict(self.trainer.callback_metrics), callback.CHECKPOINT_NAME_LAST)
        if callback.save_last and not callback.last_model_path and os.path.lexists(name):
            callback.last_model_path = name  # made right after the first checkpoint, which does not know of it
        if memory.get("elapsed") is not None:
            callback._last_time_checked = time.monotonic() - memory["elapsed"]  # seam: lightning 2.4-2.6

    def _restore_random_state(self) -> None:
        self.trainer.should_stop = self.own["should_stop"]
        for number, watch in enumerate(self.watches):
            position = self.own["loaders"][number]["position"]
            if position["ended"]:
                self._restore_loader(number)
                watch.restore_now()
            else:
                watch.restore_random_state(self.of_this_rank(position))
        self.move_schedules()


def _no_horizon(trainer: Any) -> str:
    reasons = {
        GIVEN_IN_STEPS: trainer.max_steps > 0,
        "limit_train_batches ends a pass before its end. Leave it out": trainer.limit_train_batches != 1.0,
        "with automatic_optimization=False the module steps its schedules itself": (
            not trainer.lightning_module.automatic_optimization
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _moved(saved: Any, old: str, new: str) -> Any:
    """Return a ModelCheckpoint's state with the paths of a directory that has another name now."""
    if isinstance(saved, dict):
        return {_moved(key, old, new): _moved(value, old, new) for key, value in saved.items()}
    if isinstance(saved, str) and (saved == old or saved.startswith(f"{old}{os.sep}")):
        return new + saved[len(old) :]
    return saved
