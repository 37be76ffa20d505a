"""What is overridden in the training loop of transformers before 5.3, which is one method.

Later versions have a method for each part of the loop; see ``loop.py``. Here the same events are found in what the
one method calls on its way. Nothing of it is copied or rewritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import trainer as trainer_module

from resume_adapters.core.patching import wrapped
from resume_adapters.hf.session import SessionPhase, TrainerSession


class NothingToTrain(Exception):
    """Leads out of the loop of a run that is finished already."""


class Batches(int):
    """Micro-batches of an epoch, which the loop takes for optimizer steps and would multiply."""

    def __mul__(self, accumulation: int) -> int:
        return int(self)


class StepsPerEpoch(int):
    """Optimizer steps in an epoch. The loop divides the step by them only to learn where it goes on.

    Attributes:
        position: the epoch to go on in, and the micro-batches of it that are done.
    """

    position: tuple[int, int] = (0, 0)

    def __rfloordiv__(self, step: int) -> int:
        return self.position[0]

    def __rmod__(self, step: int) -> int:
        return Batches(self.position[1])


class LoopEvents:
    """The events of one training call, at which later versions call a method of the trainer.

    The running loss is a variable of the loop. What a checkpoint held of it joins the loss of the first step: to add
    it to zero changes no bit.

    Attributes:
        is_native: the loop has asked how long the run is. A subclass's own does not, and ends where it says.
    """

    def __init__(self, trainer: Any, session: TrainerSession, save_now: Callable[[], None]) -> None:
        self.trainer, self.session, self.save_now = trainer, session, save_now
        self.epochs = self.max_steps = 0
        self.per_epoch = StepsPerEpoch(0)
        self.epoch_is_over = self._loss_has_joined = self.is_native = False

    def begin_loop(self) -> None:
        """Give the trainer its running loss, which is a variable of the loop here."""
        self.trainer._tr_loss = torch.tensor(0.0, device=self.trainer.args.device)

    def begin(self, epochs: int, steps_per_epoch: int, max_steps: int) -> StepsPerEpoch:
        """Learn how long the run is; return the steps per epoch as the loop is to divide by them."""
        self.epochs, self.per_epoch, self.max_steps = epochs, StepsPerEpoch(steps_per_epoch), max_steps
        self.is_native = True
        return self.per_epoch

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Wrap what the loop calls and no class of a trainer can override."""
        events = self.trainer.callback_handler
        with (
            wrapped(events, "on_train_begin", self.begin_training),
            wrapped(events, "on_epoch_begin", self.begin_epoch),
            wrapped(trainer_module, "deepspeed_load_checkpoint", self.load_engine),  # seam: transformers 4.57 to 5.2
            wrapped(trainer_module, "speed_metrics", self.measure_speed),  # seam: transformers 4.57 to 5.2
        ):
            yield

    def load_engine(self, native: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Load best weights only: the engine's checkpoint is loaded later, when the session attaches to it."""
        if self.session.framework.engine is not None:
            native(*args, **kwargs)

    def restore_counters(self) -> None:
        """Set where to go on, when the counters are loaded and the loop is about to ask."""
        epoch, steps = divmod(self.trainer.state.global_step, int(self.per_epoch))
        native = (epoch, steps * self.trainer.args.gradient_accumulation_steps)
        self.per_epoch.position = self.session.restore_counters(native, self.max_steps, self.epochs)

    def begin_training(self, native: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        """Where no epoch is left, end the training before the loop does.

        Raises:
            NothingToTrain: the run was left as finished.
        """
        if not self.is_native:
            return native(args, state, control)
        state.max_steps = self.session.limit(self.max_steps)  # the loop has set it again
        self.trainer.control = native(args, state, control)
        if self.session.phase is SessionPhase.FINISHED:
            raise NothingToTrain
        if self.per_epoch.position[0] >= self.epochs:
            self.session.evaluate_again()
            self.end_training()
        return self.trainer.control

    def begin_epoch(self, native: Callable[..., Any], args: Any, state: Any, control: Any) -> Any:
        """Do an evaluation that is due before the first step."""
        self.trainer.control = native(args, state, control)
        self.epoch_is_over = self.session.evaluate_again()
        return self.trainer.control

    def join_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a step as the loop is to add it up."""
        if self._loss_has_joined:
            return loss
        self._loss_has_joined = True
        trainer = self.trainer
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            # The loop puts the mean of what it has summed in its place, and has summed nothing.
            loss = trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        joined: torch.Tensor = trainer._tr_loss + loss
        return joined

    def end_step_or_epoch(self, native: Callable[..., None], loss: torch.Tensor) -> None:
        """Log, evaluate and save as is due, and end the training where the loop is about to."""
        if not self.is_native:
            native(loss)
            return
        trainer = self.trainer
        if self._loss_has_joined:
            trainer._tr_loss = loss
        if self.epoch_is_over:  # its end was logged, evaluated and saved before
            trainer.control.should_log = trainer.control.should_evaluate = trainer.control.should_save = False
        native(trainer._tr_loss)
        is_last = trainer.control.should_training_stop or self.session.epoch + 1 >= self.epochs
        if self.session.phase is SessionPhase.BETWEEN_EPOCHS and is_last:
            self.end_training()

    def end_training(self) -> None:
        """Save what is not saved, before the trainer loads the best weights and adds up the loss."""
        self.session.save_last(self.save_now)
        if not self._loss_has_joined:
            self.trainer._total_loss_scalar += self.trainer._tr_loss.item()

    def measure_speed(self, native: Callable[..., Any], split: str, start_time: float, **kwargs: Any) -> Any:
        """Count the time of all launches in the speed of the whole run."""
        is_of_the_run = split == "train" and "num_steps" in kwargs
        return native(split, start_time - (self.session.seconds if is_of_the_run else 0.0), **kwargs)


class LoopSeams:
    """What a trainer does differently where its loop is one method; its methods stand in for the trainer's own.

    Args:
        save_now: saves a checkpoint through the trainer.
    """

    def __init__(self, trainer: Any, session: TrainerSession, save_now: Callable[[], None]) -> None:
        self.trainer = trainer
        self.session = session
        self.events = LoopEvents(trainer, session, save_now)

    def _inner_training_loop(  # seam: transformers 4.57 to 5.2
        self, native: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.events.begin_loop()
        # With a checkpoint of a different batch size, the trainer would continue with that size.
        kwargs["batch_size"] = self.trainer.args.train_batch_size
        try:
            with self.events.patched():
                output = native(*args, **kwargs)
                return self.session.finish(lambda: output) if self.events.is_native else output
        except NothingToTrain:
            return self.session.former_result()

    def set_initial_training_values(self, native: Callable[..., Any], *args: Any) -> Any:
        epochs, steps, *rest = native(*args)
        return (epochs, self.events.begin(epochs, steps, rest[-1]), *rest)

    def _load_optimizer_and_scheduler(  # seam: transformers 4.57 to 5.2
        self, native: Callable[..., None], checkpoint: str | None
    ) -> None:
        if self.trainer.is_deepspeed_enabled:
            self.session.attach_engine(self.trainer.deepspeed)
        native(checkpoint)

    def _load_callback_state(self, native: Callable[[], None]) -> None:  # seam: transformers 4.57 to 5.2
        native()
        self.events.restore_counters()

    def get_batch_samples(self, native: Callable[..., Any], epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        if self.events.epoch_is_over:
            return [], None
        # The loop of a resumed epoch would take all that is left; later versions count the steps that are.
        return native(epoch_iterator, self.session.data.left_of(num_batches), device)

    def training_step(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.events.join_loss(native(*args, **kwargs))

    def _maybe_log_save_evaluate(  # seam: transformers 4.57 to 5.2
        self, native: Callable[..., None], tr_loss: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        self.events.end_step_or_epoch(lambda loss: native(loss, *args, **kwargs), tr_loss)

    def _sorted_checkpoints(  # seam: transformers 4.57 to 5.1
        self, native: Callable[..., list[str]], *args: Any, **kwargs: Any
    ) -> list[str]:
        return []

    def _rotate_checkpoints(  # seam: transformers 4.57 to 5.1
        self, native: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        """Leave retention to the run."""
