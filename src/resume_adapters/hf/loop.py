"""The methods that are overridden in the training loop of transformers 5.3 and newer, which has one for each part."""

from __future__ import annotations

from typing import Any

from resume_adapters.hf.session import SessionPhase, TrainerSession


class LoopSeams:
    """What a trainer does differently in its loop; mixed into its class for one ``train()``."""

    _resume_session: TrainerSession

    def _init_training_state(self, *args: Any) -> tuple[int, int]:  # seam: transformers 5.3 to 5.23
        max_steps, _, epochs, _, _ = args
        return self._resume_session.restore_counters(super()._init_training_state(*args), max_steps, epochs)  # type: ignore[misc]

    def _prepare_for_training(self, max_steps: int, loader: Any, checkpoint: str | None) -> Any:
        native = super()._prepare_for_training  # type: ignore[misc]  # seam: transformers 5.3 to 5.23
        trainer: Any = self
        if not trainer.is_deepspeed_enabled:
            return native(max_steps, loader, checkpoint)
        prepared = native(max_steps, loader, None)
        self._resume_session.attach_engine(trainer.deepspeed)
        trainer._load_optimizer_and_scheduler(checkpoint)  # seam: transformers 5.3 to 5.23: only the trainer's schedule
        return prepared

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:  # seam: transformers 5.3 to 5.23
        native = super()._run_epoch  # type: ignore[misc]  # seam: transformers 5.3 to 5.23
        if not self._resume_session.evaluate_again():
            native(*args, **kwargs)

    def _finalize_training(self, trial: Any, samples: Any, start_time: float) -> Any:  # seam: transformers 5.3 to 5.23
        native = super()._finalize_training  # type: ignore[misc]
        trainer: Any = self
        session = self._resume_session
        if session.phase is SessionPhase.FINISHED:
            return session.former_result()
        session.evaluate_again()
        session.save_last(trainer._save_now)
        return session.finish(lambda: native(trial, samples, start_time - session.seconds))
