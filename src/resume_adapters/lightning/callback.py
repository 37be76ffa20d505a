"""The callback: Lightning's events, passed to the session of the fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.options import OptionsCallback
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.loops import SavePoint
from resume_adapters.lightning.model_checkpoints import assign_directories, move_directories
from resume_adapters.lightning.patch import ResumingTrainer
from resume_adapters.lightning.session import FitSession
from resume_adapters.lightning.supported import require_local, require_supported
from resume_adapters.lightning.tuning import is_only_tuning


class ResumeCallback(OptionsCallback, pl.Callback):  # type: ignore[misc]  # known at run time
    """Makes ``trainer.fit()`` resume, by itself, from the latest valid checkpoint of the first ModelCheckpoint.

    ``ckpt_path`` may be ``None`` or ``"last"``: both mean the newest valid one, and so does ``"hpc"`` where Lightning
    finds such a checkpoint. A path starts a run that has no checkpoint of its own.

    Args:
        resume: ``"auto"``: the latest valid checkpoint, else zero. ``"scratch"``: zero, refused if there are committed
            checkpoints. ``"scratch!"``: zero; each launch moves the checkpoints that it finds to
            ``.resume/set-aside``. A path: that checkpoint, until the run has one of its own.
        keep: a retention policy; by default what each ModelCheckpoint keeps.
        stop: what asks the run to save and leave: signals, the walltime, a stop file.
        save_every: optimizer steps, a ``timedelta``, or ``"auto"``: as often as is worth its cost; beside what each
            ModelCheckpoint saves. Such a checkpoint goes when there is a newer one.
        mtbf: mean time between failures, for ``save_every="auto"``; by default what the run itself has seen.
        verify: after restoring, compare the live state with the saved one, and refuse a difference.
        on_batch_change: ``"refuse"``, or ``"keep-samples"``: where an optimizer step has a different number of samples
            than when the run was saved, resume by samples, with schedules of this launch's length.
        on_save_error: ``"stop"``, or ``"continue"``: after a save that failed, say so, keep training, and try again at
            the next save. Three failures in a row end the run in any case.
        stage: ``"auto"``: training goes on after a copy in memory, which is written in the background, where nothing
            reads the files before their commit and memory is not short; ``"memory"``: a copy wherever there is memory
            for it; ``"off"``: training waits for the write.
        mirror: where committed checkpoints are copied to in the background, such as ``[Remote("s3://bucket/runs/a")]``;
            a start takes the newest checkpoint of all.
        parts: further Statefuls by name, for example ``ema=ema``; also plain torch, numpy and python generators.

    Raises:
        UnsupportedSetting: a part cannot save its state.
    """

    needless_warnings = (re.escape('.fit(ckpt_path="last") is set, but there is no last checkpoint available'),)

    _resuming: ResumingTrainer | None = None
    _former: frozenset[Path] = frozenset()

    def __getstate__(self) -> dict[str, Any]:
        """Return what it was given, and nothing of a ``fit`` that is under way.

        A script may have its callbacks among the hyperparameters, which are saved with each checkpoint.
        """
        is_inherited = {name for name, value in vars(self).items() if value is None and hasattr(type(self), name)}
        return {name: value for name, value in vars(self).items() if name not in {"_resuming", *is_inherited}}

    @property
    def session(self) -> FitSession | None:
        """The ``fit`` under way; ``None`` before it has loaded a checkpoint, and after it."""
        return None if self._resuming is None else self._resuming.session

    @property
    def active_run(self) -> ResumableRun | None:
        """The run under way; ``None`` between two calls of ``fit()``."""
        return None if (session := self.session) is None else session.run

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the few methods through which a fit loads, saves and removes checkpoints."""
        first = next(each for each in trainer.callbacks if isinstance(each, ResumeCallback))
        if stage != "fit" or trainer.fast_dev_run or first is not self:
            return
        require_supported(trainer)
        self._former |= move_directories(trainer)
        require_local(trainer)
        assign_directories(trainer, str(self.options.resume))
        if is_only_tuning(trainer):
            return
        self._resuming = ResumingTrainer(trainer, self, self.options, self._former)
        self._resuming.begin(pl_module)

    # ---- Events

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember the schedules, unless they were loaded before."""
        if (session := self.session) is not None:
            session.remember_schedules()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to train."""
        if (session := self.session) is not None:
            session.begin_training()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        """Leave if a stop was asked for before the first step."""
        if self._resuming is None or (session := self._resuming.session) is None:
            return
        if not session.begin_batch(batch):
            self._resuming.leave_out(self, "on_train_batch_start", ResumeCallback)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Checkpoints are now saved after a batch."""
        if (session := self.session) is not None:
            session.begin_saves(outputs)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Checkpoints are now saved after a validation."""
        if (session := self.session) is not None and not trainer.sanity_checking:
            session.set_save_point(SavePoint.VALIDATION)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Checkpoints are now saved after an epoch."""
        if (session := self.session) is not None:
            session.set_save_point(SavePoint.EPOCH)

    # ---- Ending

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write why the run failed, and undo everything."""
        try:
            if (session := self.session) is not None and isinstance(exception, Exception):
                session.fail(exception)
        finally:
            self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo everything."""
        self._end()

    def _end(self) -> None:
        resuming, self._resuming = self._resuming, None
        if resuming is not None:
            resuming.end()
