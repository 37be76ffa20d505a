"""The methods that are overridden in the training loop of transformers 5.3 and newer, which has one for each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resume_adapters.hf.session import SessionPhase, TrainerSession


class LoopSeams:
    """What a trainer does differently in its loop; its methods stand in for the trainer's own for one ``train()``.

    Args:
        save_now: saves a checkpoint through the trainer.
    """

    def __init__(self, trainer: Any, session: TrainerSession, save_now: Callable[[], None]) -> None:
        self.trainer = trainer
        self.session = session
        self.save_now = save_now

    def _init_training_state(  # seam: transformers 5.3 to 5.23
        self, native: Callable[..., tuple[int, int]], *args: Any
    ) -> tuple[int, int]:
        max_steps, _, epochs, _, _ = args
        return self.session.restore_counters(native(*args), max_steps, epochs)

    def _prepare_for_training(  # seam: transformers 5.3 to 5.23
        self, native: Callable[..., Any], max_steps: int, loader: Any, checkpoint: str | None
    ) -> Any:
        if not self.trainer.is_deepspeed_enabled:
            return native(max_steps, loader, checkpoint)
        prepared = native(max_steps, loader, None)
        self.session.attach_engine(self.trainer.deepspeed)
        self.trainer._load_optimizer_and_scheduler(checkpoint)  # seam: transformers 5.3 to 5.23: only its schedule
        return prepared

    def _run_epoch(  # seam: transformers 5.3 to 5.23
        self, native: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        if not self.session.evaluate_again():
            native(*args, **kwargs)

    def _finalize_training(  # seam: transformers 5.3 to 5.23
        self, native: Callable[..., Any], trial: Any, samples: Any, start_time: float
    ) -> Any:
        session = self.session
        if session.phase is SessionPhase.FINISHED:
            return session.former_result()
        session.evaluate_again()
        session.save_last(self.save_now)
        return session.finish(lambda: native(trial, samples, start_time - session.seconds))
