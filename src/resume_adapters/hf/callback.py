"""The callback: the Trainer's events, passed to the session of the training call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.choices import OnBatchChange, OnSaveError, Stage, Verify
from resume_adapters.core.patching import replaced
from resume_adapters.core.saving.cadence import SaveEvery
from resume_adapters.core.session.options import (
    OptionsCallback,
    ResumeFrom,
    ResumeOptions,
    parts_among,
    run_directory_override,
)
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Mirror
from resume_adapters.hf.outside import OutsideTraining
from resume_adapters.hf.session import TrainerSession


class ResumeCallback(OptionsCallback, TrainerCallback):
    """Makes ``trainer.train()`` resume, by itself, from the latest valid checkpoint of ``args.output_dir``.

    The other options are those of every adapter: :class:`~resume_adapters.core.session.options.ResumeOptions`.

    Args:
        run_dir: where the checkpoints go, and whatever else the trainer writes while it trains; by default
            ``args.output_dir``. Each training of a process needs a directory of its own.
        keep: by default ``save_total_limit`` read as :class:`KeepLast`, else everything is kept.
        save_every: by default the trainer's own ``save_strategy`` decides.

    Raises:
        UnsupportedSetting: a part cannot save its state.
    """

    session: TrainerSession | None = None

    def __init__(
        self,
        *,
        run_dir: str | os.PathLike[str] | None = None,
        resume: ResumeFrom = "auto",
        keep: Policy | None = None,
        stop: StopOn | None = None,
        save_every: SaveEvery | None = None,
        mtbf: timedelta | None = None,
        verify: Verify = True,
        on_batch_change: OnBatchChange = "refuse",
        on_save_error: OnSaveError = "stop",
        stage: Stage = "auto",
        mirror: Sequence[Mirror] = (),
        **parts: Any,
    ) -> None:
        self._run_dir = run_dir
        self._has_trained = False
        self._outside = OutsideTraining(self)
        found = parts_among(parts, "run_dir")
        self.set_options(
            ResumeOptions(
                resume, keep, stop, save_every, mtbf, verify, on_batch_change, on_save_error, stage, mirror, parts=found
            )
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: the options, but not the training call that is under way."""
        return {name: value for name, value in vars(self).items() if name not in ("session", "_outside")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Be a copy."""
        vars(self).update(state)
        self._outside = OutsideTraining(self)

    @contextlib.contextmanager
    def training(self, trainer: Any, resume: Any, ignore_keys: list[str] | None) -> Iterator[TrainerSession]:
        """Return the context of a session; what it patched, started and registered is undone at the end.

        Args:
            trainer: the trainer.
            resume: what the user gave ``train()`` as ``resume_from_checkpoint``.
            ignore_keys: what the user gave it as ``ignore_keys_for_eval``.
        """
        _move_output(trainer.args)
        named = resume if isinstance(resume, str | os.PathLike) else self.options.resume
        own = None if run_directory_override() is not None else self._run_dir
        moved = contextlib.nullcontext() if own is None else replaced(trainer.args, "output_dir", os.fspath(own))
        with moved:
            session = self.session = TrainerSession(trainer, self.options, named, ignore_keys)
            self._has_trained = True
            try:
                yield session
            finally:
                self.session = None
                session.close()

    # ---- Events

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the trainer's output directory to that of the environment, if it names one: also after the training."""
        _move_output(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore what is restored last, and verify the whole."""
        if self.session is not None:
            self.session.begin_training(control)
            if self.session.context is not None:  # the loop has asked where to go on; of a finished run no step begins
                self._outside.end()
        else:
            self._outside.warn("Trainer.train() of this package did not begin it")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Be ready to warn of another training."""
        self._outside.forget()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn of a training that logs, and calls no other event."""
        if state.global_step and not self._has_trained:
            self._outside.warn("its loop logs and does not call Trainer.train()")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count epochs."""
        if self.session is not None:
            self.session.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave before the first step if a stop was asked for while data were skipped."""
        if (session := self.session) is None:
            self._outside.warn("the callback was not there when train() began")
            return
        if not session.session.has_begun:
            self._outside.end()
        session.session.begin_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count micro-batches."""
        if self.session is not None:
            self.session.data.consumed += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count micro-batches, and ask whether to save or to stop."""
        if self.session is not None:
            self.session.end_step(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Interrupt an evaluation if a stop was asked for; it is done again after the resume."""
        if self.session is not None:
            self.session.evaluation.end_batch()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Save at each new best, so that the best is what was saved."""
        if self.session is not None:
            self.session.evaluation.end(metrics or {}, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What is saved from now on is saved between two epochs."""
        if self.session is not None:
            self.session.end_epoch(control)


def _move_output(args: Any) -> None:
    """Set the output directory to that of the environment, with the logging directory where it lies within."""
    directory = run_directory_override()
    if directory is None:
        return
    former, args.output_dir = Path(os.path.abspath(args.output_dir)), str(directory)
    logs = getattr(args, "logging_dir", None)  # transformers 4 has it among its arguments
    if logs is not None and former in Path(os.path.abspath(logs)).parents:
        args.logging_dir = str(directory / Path(os.path.abspath(logs)).relative_to(former))
