"""The callback: Lightning's events, passed to the session of the fit."""

from __future__ import annotations

from typing import Any

from resume_adapters.core.session.options import OptionsCallback
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.loops import BATCH, EPOCH, VALIDATION
from resume_adapters.lightning.model_checkpoints import settle_directories
from resume_adapters.lightning.patch import ResumingTrainer
from resume_adapters.lightning.session import FitSession
from resume_adapters.lightning.supported import require_supported


class ResumeCallback(OptionsCallback, pl.Callback):  # type: ignore[misc]  # known at run time
    """Makes ``trainer.fit()`` resume, by itself, from the latest valid checkpoint of the first ModelCheckpoint.

    ``ckpt_path`` may be ``None`` or ``"last"``: both mean the newest valid one, and so does ``"hpc"`` where Lightning
    finds such a checkpoint. A path starts a run that has no checkpoint of its own.

    Args:
        resume: ``"auto"``, ``"scratch"``, ``"scratch!"`` or a path; see the documentation's table of options.
        keep: a retention policy; by default what each ModelCheckpoint keeps.
        stop: what asks the run to save and leave: signals, the walltime, a stop file.
        save_every: optimizer steps, a ``timedelta``, or ``"auto"``: as often as is worth its cost; beside what each
            ModelCheckpoint saves. Such a checkpoint goes when there is a newer one.
        mtbf: mean time between failures, for ``save_every="auto"``; by default what the run itself has seen.
        verify: after restoring, compare the live state with the saved one, and refuse a difference.
        on_batch_change: ``"refuse"``, or ``"keep-samples"``: where an optimizer step has another number of samples than
            when the run was saved, go on by samples, with schedules of this launch's length.
        parts: further Statefuls by name, for example ``ema=ema``; also plain torch, numpy and python generators.

    Raises:
        UnsupportedSetting: a part cannot save its state.
    """

    session: FitSession | None = None
    _resuming: ResumingTrainer | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stand in the way of the few methods through which a fit loads, saves and removes checkpoints."""
        first = next(each for each in trainer.callbacks if isinstance(each, ResumeCallback))
        if stage != "fit" or trainer.fast_dev_run or first is not self:
            return
        require_supported(trainer)
        settle_directories(trainer, str(self.resume))
        self._resuming = ResumingTrainer(trainer, self)
        self._resuming.begin(pl_module)

    # ---- Moments

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals over as early as there is an event for it."""
        if self.session is not None:
            self.session.take_signals()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the schedules: they are made, and not loaded."""
        if self.session is not None:
            self.session.note_schedules()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to train."""
        if self.session is not None:
            self.session.begin_training()

    def on_train_batch_start(self, *args: Any) -> None:
        """Leave before the first step if a stop was asked for; from here on a save would fall into a step."""
        if self.session is not None:
            self.session.begin_step()
            self.session.moment = None

    def on_train_batch_end(self, *args: Any) -> None:
        """Note that what is saved now stands after a batch."""
        if self.session is not None:
            self.session.moment = BATCH

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that what is saved now stands after a validation."""
        if self.session is not None and not trainer.sanity_checking:
            self.session.moment = VALIDATION

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that what is saved now stands after an epoch."""
        if self.session is not None:
            self.session.moment = EPOCH

    # ---- Ending

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Record why the run failed, and take everything back."""
        if self.session is not None and isinstance(exception, Exception):
            self.session.record_failure(exception, trainer.global_step)
        self._leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take everything back."""
        self._leave()

    def _leave(self) -> None:
        resuming, self._resuming = self._resuming, None
        if resuming is not None:
            resuming.end()
        session, self.session = self.session, None
        if session is not None:
            session.run.close()
