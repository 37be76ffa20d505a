"""One call of ``Trainer.fit``, up to its first step: choosing, loading, putting back, proving."""

from __future__ import annotations

import contextlib
import functools
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.retention import KeepUnless
from resume_adapters.core.log import logger
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.cadence import chosen
from resume_adapters.core.session.messages import log_finished
from resume_adapters.core.session.options import OptionsCallback
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.core.state.weights import match_weights
from resume_adapters.errors import CheckpointDamaged
from resume_adapters.integrations.trackers.runs import Trackers
from resume_adapters.lightning import engine, files, gradients, logged_values, model_checkpoints, module_state
from resume_adapters.lightning.compat import VERSION, pl
from resume_adapters.lightning.data import TrainingLoaders
from resume_adapters.lightning.loops import Loops
from resume_adapters.lightning.supported import no_horizon


class Restoration(TrainingLoaders):
    """Chooses a checkpoint for a call of ``fit()``, loads it, and proves that it came back."""

    def __init__(self, trainer: Any, callback: OptionsCallback, named: str | os.PathLike[str] | None) -> None:
        self.trainer = trainer
        self.loops = Loops(trainer)
        self.moment: str | None = None
        self.finished = False
        self.unwanted: set[str] = set()
        directory = Path(os.path.realpath(model_checkpoints.saving(trainer)[0].dirpath))
        self.engine = engine.engine_state(trainer.strategy, directory)
        inside = named is None or files.same(Path(named).parent, directory) or self._is_hpc(named)
        own = KeepUnless(self.unwanted, files.OWN_NAME.partition("{")[0])
        run = ResumableRun(
            directory,
            framework=VERSION,
            resume=callback.resume if named is None or inside else named,
            keep=own if callback.keep is None else callback.keep,
            stop=callback.stop,
            cadence=chosen(callback.save_every, callback.mtbf),
            foreign=files.foreign_step if self.engine is None else engine.foreign(self.engine),
        )
        super().__init__(
            run,
            callback.parts,
            trackers=Trackers(self._writers, self._mlflow_run),
            verify=callback.verify,
            topology={"accumulate_grad_batches": trainer.accumulate_grad_batches},
            accumulation=trainer.accumulate_grad_batches,
            fixed={
                **module_state.invariants(trainer, run.ranks.world_size),
                **({} if self.engine is None else self.engine.fixed),
            },
            spread=functools.partial(module_state.sharded_state, trainer),
            on_batch_change=callback.on_batch_change,
        )
        self.batch_change.no_horizon = no_horizon(trainer)
        self._proof: dict[str, Any] = {}
        self._steps: int | None = None

    # ---- Resuming

    def open(self) -> Path | None:
        """Choose what to resume from; return the path that the trainer is to load."""
        self.choose()
        self._prefer_newer_hpc()
        if self.checkpoint is not None and self.checkpoint.manifest is not None and self.own is None:
            logger.warning(
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
            logger.warning("%s is passed over: %s", found, damage)
            return
        if step is not None and step > (self.checkpoint.step if self.checkpoint else 0):
            logger.warning("%s is of step %d, newer than the run directory: it is taken.", found, step)
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
                matched = match_weights(loaded[name], module.state_dict(), self.checkpoint.path)
                loaded[name] = {key: loaded[name][saved] for key, saved in matched.items()}
        for each in model_checkpoints.saving(self.trainer):
            saved = loaded.get("callbacks", {}).get(each.state_key)
            if saved and saved["dirpath"] != each.dirpath and self.checkpoint.path.parent == self.run.directory:
                loaded["callbacks"][each.state_key] = model_checkpoints.moved(
                    saved, str(saved["dirpath"]), str(each.dirpath)
                )
        self._proof = dict(loaded)
        if self.own is None:
            # Else they save this step once more, in the middle of the next.
            for each in model_checkpoints.saving(self.trainer):
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
            log_finished(self.trainer.global_step)
        # Of a finished run too: what followed its last checkpoint may have changed weights, as averaging does.
        self.loops.run_from(self.own["moment"], self._put_back, self._restore_start)

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

    def note_schedules(self) -> None:
        """Note the schedules that go by steps, before the trainer loads them."""
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == "step":
                self.schedules.note(config.scheduler, Fraction(1, config.frequency))

    def _put_back(self) -> None:
        """Put back what the start of the loop resets, and prove what the trainer loaded."""
        own, trainer = self.own, self.trainer
        # ModelCheckpoint never removes this one; here retention knows when it may go.
        trainer._checkpoint_connector._ckpt_path = None  # seam: lightning 2.4-2.6
        self.prove_shares()
        saved, self._proof = self._proof, {}
        if self.verify and self.checkpoint is not None:
            module_state.verify(trainer, saved, self.checkpoint.path)
        if self.engine is not None:
            self.engine.restore(own["engine"])
        self.align_buckets(trainer.model)
        logged, held = own["metrics"], own["gradients"]
        if self.has_other_ranks:
            others, place = self.everyone(), (self.run.ranks.rank, self.run.ranks.world_size)
            logged = logged_values.redistribute(self.loops, [each["metrics"] for each in others], *place)
            held = self._gradients_here([each["gradients"] for each in others])
        logged_values.restore(self.loops, logged, own["moment"])
        self.loops.set_progress(self.progress_here(own["progress"]), own["moment"], own["row"])
        gradients.restore(trainer.lightning_module, held)
        self.loops.start_evaluation_workers(own["evaluation_workers"])
        for each in model_checkpoints.saving(trainer):
            model_checkpoints.remind(each, trainer, own["checkpoints"].get(each.state_key, {}))
        self.restore_parts(self.further_parts())

    def _gradients_here(self, everyone: list[Any]) -> Any:
        """Return the gradients of an unfinished accumulation as this rank is to hold them.

        Raises:
            StateMismatch: each rank had saved its shards of them.
        """
        if any(everyone) and module_state.is_sharded(self.trainer):
            raise self._mismatch(
                self.moved,
                "it is in the middle of an accumulation, and its gradients are cut for the ranks as they were",
            )
        return gradients.mean(everyone)

    def _writers(self) -> list[Any]:
        loggers = self.trainer.loggers if self.trainer.is_global_zero else []
        return [each.experiment for each in loggers if isinstance(each, pl.loggers.TensorBoardLogger)]

    def _mlflow_run(self) -> str | None:
        loggers = self.trainer.loggers if self.trainer.is_global_zero else []
        return next((each.run_id for each in loggers if isinstance(each, pl.loggers.MLFlowLogger)), None)

    def further_parts(self) -> dict[str, Stateful]:
        """Return what DeepSpeed does not save, and what differs between ranks where the first alone is saved."""
        of_engine = {} if self.engine is None else self.engine.parts()
        return {
            **of_engine,
            **({"buffers": module_state.buffers(self.trainer)} if self.run.ranks.world_size > 1 else {}),
        }

    def _restore_start(self) -> None:
        self.trainer.should_stop = self.own["should_stop"]
        self.restore_random_state_of_loaders()
        self.move_schedules()
