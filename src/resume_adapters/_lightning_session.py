"""One call of ``Trainer.fit``, translated into the core's verbs."""

from __future__ import annotations

import functools
import inspect
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resume_adapters import _lightning_files as files
from resume_adapters._lightning_framework import VERSION, io, pl
from resume_adapters._lightning_io import ResumeCheckpointIO
from resume_adapters._lightning_loops import END, EPOCH, IN_EPOCH, VALIDATION, Loops, set_epoch
from resume_adapters.core import report, state, weights
from resume_adapters.core.cadence import chosen
from resume_adapters.core.loader import LoaderWatch
from resume_adapters.core.manifest import finite
from resume_adapters.core.place import is_committed, is_pending
from resume_adapters.core.resolve import Checkpoint
from resume_adapters.core.retention import KeepUnless
from resume_adapters.core.run import ResumableRun
from resume_adapters.core.session import Session
from resume_adapters.errors import CheckpointDamaged, StateMismatch, UnsupportedSetting

if TYPE_CHECKING:
    from resume_adapters.lightning import ResumeCallback

_MEMORY = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""What a ModelCheckpoint remembers and does not save. seam: lightning 2.6"""


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
        "no ModelCheckpoint saves the whole state (with save_weights_only=False)": not _saving(trainer),
        "reload_dataloaders_every_n_epochs makes loaders anew at moments that a resume cannot repeat": (
            trainer.reload_dataloaders_every_n_epochs
        ),
        "AsyncCheckpointIO writes after the save has returned, and may remove the last checkpoint before that; "
        "ResumeCallback commits in the background by itself": isinstance(plugin, io.AsyncCheckpointIO),
        "DeepSpeed shards the state behind the trainer": type(strategy).__name__ == "DeepSpeedStrategy",
        "training_step(dataloader_iter) fetches its batches by itself, and may fetch more than it has used": (
            "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters
        ),
    }
    for reason, found in refused.items():
        if found:
            raise UnsupportedSetting(
                f"{reason}, so this run cannot be resumed exactly: change it, or leave the callback out"
            )


def _saving(trainer: Any) -> list[Any]:
    found = [each for each in trainer.checkpoint_callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]
    return [each for each in found if not each.save_weights_only]


def settle_directories(trainer: Any, resume: str) -> None:
    """Give each ModelCheckpoint that has no ``dirpath`` one that the next launch finds again.

    Lightning would put it below the logger's version, which is a new one at every launch: an earlier version that holds
    a run is taken instead.
    """
    for each in _saving(trainer):
        if each.dirpath is not None:
            continue
        fresh = Path(each._ModelCheckpoint__resolve_ckpt_dir(trainer))  # seam: lightning 2.6
        versions = fresh.parents[1].glob("version_*/" + fresh.name) if trainer.loggers else []
        earlier = sorted((path for path in versions if (path / ".resume").is_dir()), key=_version)
        if earlier and not resume.startswith("scratch"):
            fresh = earlier[-1]
        each.dirpath = trainer.strategy.broadcast(os.path.realpath(fresh))


def _version(directory: Path) -> int:
    number = directory.parent.name.rpartition("_")[2]
    return int(number) if number.isdigit() else -1


class FitSession(Session):
    """One call of ``fit()`` on a trainer that has a :class:`~resume_adapters.lightning.ResumeCallback`."""

    def __init__(self, trainer: Any, callback: ResumeCallback, named: str | os.PathLike[str] | None) -> None:
        self.trainer = trainer
        self.loops = Loops(trainer)
        self.moment: str | None = None
        self.finished = False
        self.watches: list[LoaderWatch] = []
        self.unwanted: set[str] = set()
        directory = Path(os.path.realpath(_saving(trainer)[0].dirpath))
        inside = named is None or files.same(Path(named).parent, directory) or self._is_hpc(named)
        run = ResumableRun(
            directory,
            framework=VERSION,
            resume=callback.resume if named is None or inside else named,
            keep=callback.keep or KeepUnless(self.unwanted, files.OWN_NAME.partition("{")[0]),
            stop=callback.stop,
            cadence=chosen(callback.save_every, callback.mtbf),
            foreign=files.foreign_step,
        )
        fixed = {
            "number of ranks": run.ranks.world_size,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
        }
        super().__init__(run, callback.parts, verify=callback.verify, topology={}, fixed=fixed)
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
        path: str | None = self.trainer._checkpoint_connector._hpc_resume_path  # seam: lightning 2.6
        return path

    def _is_hpc(self, named: str | os.PathLike[str]) -> bool:
        return Path(named).name.startswith("hpc_ckpt_")

    def _prefer_newer_hpc(self) -> None:
        """Take what Slurm's handler saved, where it is newer than everything in the run directory."""
        found = self._hpc()
        if found is None or self.run.resume == "scratch!":
            return
        try:
            step = files.foreign_step(Path(found))
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
        self.require_architecture(module)
        for name in ("state_dict", "current_model_state"):
            if loaded.get(name):
                matched = weights.match(loaded[name], module.state_dict(), self.checkpoint.path)
                loaded[name] = {key: loaded[name][saved] for key, saved in matched.items()}
        for each in _saving(self.trainer):
            saved = loaded.get("callbacks", {}).get(each.state_key)
            if saved and saved["dirpath"] != each.dirpath and self.checkpoint.path.parent == self.run.directory:
                loaded["callbacks"][each.state_key] = _moved(saved, str(saved["dirpath"]), str(each.dirpath))
        self._proof = dict(loaded)
        if self.own is None:
            return
        self.finished = self.is_finished(self.checkpoint.step, self._horizon())
        self.trainer.fit_loop.run = self._run  # seam: lightning 2.6, in place of FitLoop.run for this call

    def _horizon(self) -> int:
        return int(self.trainer.max_steps if self.trainer.max_steps > 0 else self.trainer.max_epochs or 0)

    def _run(self) -> None:
        del self.trainer.fit_loop.run
        if self.finished:
            report.logger.info("This run finished at step %d: nothing to do.", self.trainer.global_step)
        # Of a finished run too: what followed its last checkpoint may have changed weights, as averaging does.
        self.loops.run_from(self.own["moment"], self._put_back, self._restore_random_state)

    def watch_loaders(self, loaders: list[Any]) -> None:
        """Watch the training loaders, and set them where they were.

        Raises:
            StateMismatch: there were more of them, or fewer, when the checkpoint was saved.
            UnsupportedSetting: one of them is no torch DataLoader.
        """
        self.watches = [self.watch(each) for each in loaders]
        if self.own is None:
            return
        positions = self.own["positions"]
        if len(positions) != len(loaders):
            raise StateMismatch(
                f"{len(positions)} training loaders were saved, this launch has {len(loaders)}: launch with as many, "
                "or start another run directory"
            )
        for watch, position in zip(self.watches, positions, strict=True):
            if position["ended"]:
                watch.hold()  # Lightning begins a pass before it knows whether it needs one
            else:
                if other := watch.differences(position):
                    raise self._mismatch(other, "other batches would silently follow")
                set_epoch(watch.loader, self.own["epoch"])
                watch.restore(position)

    def _put_back(self) -> None:
        """Put back what the start of the loop resets, and prove what the trainer loaded."""
        own, trainer = self.own, self.trainer
        # ModelCheckpoint never removes this one; here retention knows when it may go.
        trainer._checkpoint_connector._ckpt_path = None  # seam: lightning 2.6
        if self.verify and not trainer.strategy.restore_checkpoint_after_setup:
            self._prove()  # of weights that are spread over the ranks, no rank holds what was saved
        self.align_buckets(trainer.model)
        self.loops.set_metrics(own["metrics"], own["moment"])
        self.loops.set_progress(own["progress"], own["moment"])
        self.loops.set_gradients(own["gradients"])
        self.loops.start_evaluation_workers(own["evaluation_workers"])
        for each in _saving(trainer):
            self._remind(each, own["checkpoints"].get(each.state_key, {}))
        self.restore_parts(self._further_parts())

    def _further_parts(self) -> dict[str, state.Stateful]:
        """Return what differs between ranks in what Lightning saves of the first alone."""
        return {"buffers": _Buffers(self.trainer)} if self.run.ranks.world_size > 1 else {}

    def _remind(self, callback: Any, memory: dict[str, Any]) -> None:
        for name in _MEMORY:
            if name in memory:
                setattr(callback, name, memory[name])
        name = callback.format_checkpoint_name(dict(self.trainer.callback_metrics), callback.CHECKPOINT_NAME_LAST)
        if callback.save_last and not callback.last_model_path and os.path.lexists(name):
            callback.last_model_path = name  # made right after the first checkpoint, which does not know of it
        if memory.get("elapsed") is not None:
            callback._last_time_checked = time.monotonic() - memory["elapsed"]  # seam: lightning 2.6

    def _prove(self) -> None:
        saved, self._proof = self._proof, {}
        assert self.checkpoint is not None
        trainer = self.trainer
        content = saved.get("current_model_state") or saved.get("state_dict")
        if content:
            weights.prove(trainer.lightning_module, content, self.checkpoint.path)
        for name, live in (("optimizer", trainer.optimizers), ("scheduler", _schedulers(trainer))):
            key = {"optimizer": "optimizer_states", "scheduler": "lr_schedulers"}[name]
            for one, other in zip(saved.get(key, []), live, strict=False):
                state.prove(name, one, other.state_dict())

    def _restore_random_state(self) -> None:
        self.trainer.should_stop = self.own["should_stop"]
        for watch, position in zip(self.watches, self.own["positions"], strict=True):
            if position["ended"]:
                watch.restore(position)
                watch.restore_now()
            else:
                watch.restore_random_state(position)

    # ---- Training

    def take_signals(self) -> None:
        """Take the signals from Lightning, whose handlers act in the middle of a step."""
        self.run.flag.uninstall()
        self.run.flag.install()

    def begin_training(self) -> None:
        """Take the signals, and note the order of DDP's gradients."""
        self.take_signals()
        if self.own is None:
            self.align_buckets(self.trainer.model)
        expected = self.trainer.estimated_stepping_batches
        self._steps = int(expected) if math.isfinite(expected) and expected > 0 else None

    def end_batch(self) -> None:
        """At an optimizer step, ask whether to save, and whether to stop."""
        if self.loops.is_accumulating:
            return
        decision = self.end_step(self.trainer.global_step, self._epoch(), self._steps)
        if decision.save:
            self._save_if_needed()
        self.leave_if_asked()

    def end_validation(self) -> None:
        """After a validation, which may be long, ask once more whether to stop."""
        self.ask_to_stop()
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Save and leave, if all ranks have agreed to.

        Raises:
            Stopped: they have.
        """
        if self.stopping:
            self._save_if_needed()
            self.run.leave(self.trainer.global_step, self._epoch())

    def _save_if_needed(self) -> None:
        if self.run.last_commit != self.trainer.global_step:
            self.trainer.save_checkpoint(self.run.directory / files.OWN_NAME.format(step=self.trainer.global_step))

    # ---- Saving

    def takes(self, path: Path, weights_only: bool | None) -> bool:
        """Return whether a save is one that this run can be resumed from."""
        return not weights_only and self.moment is not None and files.same(path.parent, self.run.directory)

    def save(self, path: Path, native: Callable[[], None]) -> None:
        """Save a checkpoint of the current step around the trainer's own save."""
        self.unwanted.discard(path.name)
        self.save_checkpoint(
            path.name,
            self.trainer.global_step,
            model=self.trainer.lightning_module,
            native=functools.partial(self._write, path, native),
            own=functools.partial(self._own, path),
            parts=self._further_parts(),
            owner=files.owner,
            entries=lambda: files.parts(self.trainer, dict(self.parts)),
            facts=self._facts,
            best=self._best(),
            is_file=not is_sharded(self.trainer.strategy),
        )

    def _write(self, path: Path, native: Callable[[], None]) -> None:
        native()
        plugin = self.trainer.strategy.checkpoint_io
        if isinstance(plugin, ResumeCheckpointIO) and plugin.error is not None:
            error, plugin.error = plugin.error, None
            raise error
        if not self._reported and path.is_file():
            files.require_loadable(path)

    def _own(self, path: Path) -> dict[str, Any]:
        trainer, loops = self.trainer, self.loops
        between = self.moment not in IN_EPOCH
        return {
            "moment": self.moment,
            "epoch": trainer.fit_loop.epoch_progress.current.processed,
            "positions": [
                # A loader at its end, where another goes on, gave nothing to the batch that was fetched ahead.
                each.position_between()
                if between
                else each.position(each.fetched - (0 if each.exhausted else loops.ahead))
                for each in self.watches
            ],
            "progress": loops.progress(),
            "metrics": loops.metrics(),
            "gradients": loops.gradients(),
            "evaluation_workers": loops.evaluation_workers(),
            "should_stop": trainer.should_stop,
            "checkpoints": {each.state_key: self._memory(each, path) for each in _saving(trainer)},
        }

    def _memory(self, callback: Any, path: Path) -> dict[str, Any]:
        """Return what a ModelCheckpoint will remember once the save that it may be doing is done."""
        memory = {name: getattr(callback, name) for name in _MEMORY}
        asked = [callback.best_model_path, callback.last_model_path, *callback.best_k_models]
        if str(path) in asked:
            memory |= {"_last_global_step_saved": self.trainer.global_step, "_last_checkpoint_saved": str(path)}
        checked = callback._last_time_checked  # seam: lightning 2.6
        return {**memory, "elapsed": None if checked is None else time.monotonic() - checked}

    def _facts(self) -> dict[str, Any]:
        fresh = self.moment in (VALIDATION, EPOCH)
        numbers = {name: float(value) for name, value in self.trainer.callback_metrics.items()} if fresh else {}
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return {
            "epoch": self._epoch(),
            # Metrics of an earlier step say nothing of these weights, and retention would rank them by it.
            "metrics": finite(numbers),
            "cursor": {"epoch": self.trainer.current_epoch, "micro_batches": progress.current.ready},
        }

    def _epoch(self) -> float:
        whole = self.trainer.fit_loop.epoch_progress.current.processed
        if self.moment not in IN_EPOCH:
            return float(whole)
        batches = self.trainer.num_training_batches
        return float(whole + self.trainer.fit_loop.epoch_loop.batch_progress.current.ready / batches)

    def _best(self) -> str | None:
        monitoring = [each for each in _saving(self.trainer) if each.monitor is not None]
        best = next((each.best_model_path for each in monitoring if each.best_model_path), None)
        return None if best is None else Path(best).name

    def remove(self, path: Path, native: Callable[[], None]) -> None:
        """Remove a checkpoint that Lightning does not want any more, once what follows it is committed.

        What a restart would take now stays, and so does the best.
        """
        if files.same(path.parent, self.run.directory) and (is_committed(path) or is_pending(path)):
            self.unwanted.add(path.name)
            self.run.prune_later(best=self._best())
        else:
            native()

    # ---- Ending

    def end_training(self, native: Callable[[], None]) -> None:
        """Save the last step where it is not saved, end as the trainer does, and remember that the run is finished."""
        self.moment = END
        self.reason = "finished"
        self._save_if_needed()
        native()
        self.run.flush()
        self.run.record("finished", step=self.trainer.global_step, epoch=self._epoch(), horizon=self._horizon())


def is_sharded(strategy: Any) -> bool:
    """Return whether a strategy saves a directory, into which every rank writes its share."""
    return getattr(strategy, "_state_dict_type", "full") == "sharded" or bool(
        getattr(strategy, "_save_distributed_checkpoint", False)  # seam: lightning 2.6, as the line before
    )


class _Buffers:
    """The buffers of the module, and of averages that callbacks keep of it: running statistics are a rank's own."""

    def __init__(self, trainer: Any) -> None:
        kept = {name: value for each in trainer.callbacks for name, value in vars(each).items()}
        modules = {"": trainer.lightning_module, **{name: each for name, each in kept.items() if _is_module(each)}}
        self._buffers = {
            f"{name}.{key}": buffer for name, module in modules.items() for key, buffer in module.named_buffers()
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self._buffers)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, buffer in self._buffers.items():
            buffer.data.copy_(saved[name])


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _schedulers(trainer: Any) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _moved(saved: Any, old: str, new: str) -> Any:
    """Return a ModelCheckpoint's state with the paths of a directory that has another name now."""
    if isinstance(saved, dict):
        return {_moved(key, old, new): _moved(value, old, new) for key, value in saved.items()}
    if isinstance(saved, str) and (saved == old or saved.startswith(f"{old}{os.sep}")):
        return new + saved[len(old) :]
    return saved
