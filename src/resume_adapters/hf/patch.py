"""The Trainer methods and functions that are overridden: in its class for one ``train()``, and in its module."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from transformers import Trainer, trainer

from resume_adapters.core.patching import wrapped
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.hf.callback import ResumeCallback
from resume_adapters.hf.session import TrainerSession

if hasattr(Trainer, "_run_epoch"):  # seam: transformers 5.3 to 5.23
    from resume_adapters.hf.loop import LoopSeams
else:
    from resume_adapters.hf.loop_before_5_3 import LoopSeams  # type: ignore[assignment]


class ResumingTrainer:
    """What a trainer does differently in one ``train()`` with a :class:`~resume_adapters.hf.ResumeCallback`.

    It is mixed into the trainer's class. Each method wraps the trainer's own of that name. They are private
    because the public seams come too late or not at all; ``tests/hf/test_seams.py`` checks each of them against the
    installed version.
    """

    _resume_session: TrainerSession

    def get_train_dataloader(self) -> Any:
        return self._resume_session.data.track(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        native = super().get_eval_dataloader  # type: ignore[misc]
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        return self._resume_session.evaluation.loader(name, lambda: native(eval_dataset))

    def _load_from_checkpoint(
        self, checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:  # seam: transformers 4.57 to 5.23
        native = super()._load_from_checkpoint  # type: ignore[misc]  # seam: transformers 4.57 to 5.23
        self._resume_session.load_from_checkpoint(
            checkpoint, lambda: native(checkpoint, *args), has_own_loader=_is_replaced(native)
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:  # seam: transformers 4.57 to 5.23
        native = super()._load_optimizer_and_scheduler  # type: ignore[misc]  # seam: transformers 4.57 to 5.23
        session = self._resume_session
        session.session.begin_settings()
        session.session.rescale.schedules.remember(self.lr_scheduler)  # type: ignore[attr-defined]
        session.framework.load_optimizer(session.context, lambda: native(checkpoint))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches = self._resume_session.window(num_batches)
        return super().get_batch_samples(epoch_iterator, batches, device)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        native, trace = super().training_step, self._resume_session.session.trace  # type: ignore[misc]
        if trace is None:
            return native(model, inputs, *args, **kwargs)
        trace.add_batch(inputs)
        loss = native(model, inputs, *args, **kwargs)
        trace.add_loss(loss)
        return loss

    def _load_best_model(self) -> None:  # seam: transformers 4.57 to 5.23
        native = super()._load_best_model  # type: ignore[misc]  # seam: transformers 4.57 to 5.23
        self._resume_session.load_best(native, has_own_loader=_is_replaced(native))

    def _load_rng_state(self, checkpoint: str | None) -> None:  # seam: transformers 4.57 to 5.23
        native = super()._load_rng_state  # type: ignore[misc]  # seam: transformers 4.57 to 5.23
        self._resume_session.load_rng(lambda: native(checkpoint))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # seam: transformers 4.57 to 5.23
        native = super()._save_checkpoint  # type: ignore[misc]  # seam: transformers 4.57 to 5.23
        self._resume_session.save(lambda: native(model, trial))

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:  # seam: transformers 4.57 to 5.23
        native = functools.partial(super()._maybe_log_save_evaluate, *args, **kwargs)  # type: ignore[misc]  # seam: transformers 4.57 to 5.23
        self._resume_session.log_evaluate_save(native, self._save_now)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:  # seam: transformers 4.57 to 5.23
        native = functools.partial(super()._evaluate, *args, **kwargs)  # type: ignore[misc]
        return self._resume_session.evaluate(native, at_start=kwargs.get("skip_scheduler", False))

    def _save_now(self) -> None:
        trainer: Any = self
        trainer._save_checkpoint(trainer.model_wrapped, None)  # seam: transformers 4.57 to 5.23
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)


def _is_replaced(method: Any) -> bool:
    """Return whether a subclass has replaced a method of the Trainer."""
    return method.__func__ is not getattr(Trainer, method.__name__)


@functools.cache
def _resuming(base: Any) -> type:
    return type(base.__name__, (LoopSeams, ResumingTrainer, base), {"__module__": base.__module__})


_MANAGED: set[str] = set()
"""Output directories whose retention and loaders a session manages at the moment."""


def _begin_epoch(session: TrainerSession, native: Callable[..., Any], *args: Any) -> Any:
    session.before_epoch()
    return native(*args)


@contextlib.contextmanager
def _resuming_trainer(trainer: Any, session: TrainerSession) -> Iterator[None]:
    """Let a trainer be a :class:`ResumingTrainer` of a session while a training call lasts."""
    managed, base = os.path.abspath(trainer.args.output_dir), type(trainer)
    trainer._resume_session = session
    trainer.__class__ = _resuming(cast("Any", base))
    _MANAGED.add(managed)
    try:
        with wrapped(
            trainer.callback_handler, "on_epoch_begin", lambda native, *args: _begin_epoch(session, native, *args)
        ):
            yield
    finally:
        _MANAGED.discard(managed)
        trainer.__class__ = base
        del trainer._resume_session


def _train(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        callback = next((each for each in self.callback_handler.callbacks if isinstance(each, ResumeCallback)), None)
        if callback is None or callback.session is not None:
            return native(self, resume_from_checkpoint, *args, **kwargs)
        if kwargs.get("trial") is not None or (args and args[0] is not None):
            raise UnsupportedSetting(
                "a hyperparameter search starts many runs in one directory: leave the callback out"
            )
        ignored = kwargs.get("ignore_keys_for_eval", args[1] if len(args) > 1 else None)
        with callback.training(self, resume_from_checkpoint, ignored) as session, _resuming_trainer(self, session):
            try:
                return native(self, session.open(), *args, **kwargs)
            except Exception as error:
                session.session.fail(error, self.state.global_step)
                raise

    train.resume_adapters = True  # type: ignore[attr-defined]
    return train


def _skip_first_batches(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def skip(loader: Any, num_batches: int = 0) -> Any:
        tracked = getattr(getattr(loader, "base_dataloader", loader), "resume_tracked", None)
        if tracked is None or tracked.restored:
            return native(loader, num_batches)
        if tracked.at_end:
            tracked.restore_now()
            return []
        return loader

    return skip


def _unless_managed(native: Callable[..., Any], instead: Callable[[], Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def retention(output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        managed = output_dir is not None and os.path.abspath(output_dir) in _MANAGED
        return instead() if managed else native(output_dir, *args, **kwargs)

    return retention


def _on_a_numbered_cpu(storage: Any, location: str) -> Any:
    """Restore a tensor of ``torch.load`` where older transformers send those of several processes: to ``cpu:0``."""
    return storage if location.startswith("cpu:") else None


def install() -> None:
    """Wrap ``Trainer.train`` and the functions through which it skips and deletes; once."""
    if hasattr(Trainer.train, "resume_adapters"):
        return
    torch.serialization.register_package(15, lambda storage: None, _on_a_numbered_cpu)
    module, trainer_class = cast("Any", trainer), cast("Any", Trainer)
    trainer_class.train = _train(trainer_class.train)
    module.skip_first_batches = _skip_first_batches(module.skip_first_batches)  # seam: transformers 4.57 to 5.23
    for name, instead in (("rotate_checkpoints", lambda: None), ("sort_checkpoints", list)):
        if hasattr(module, name):  # seam: transformers 5.2 to 5.23; before, they are methods
            setattr(module, name, _unless_managed(getattr(module, name), instead))
