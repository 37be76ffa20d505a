"""The Trainer methods and functions that are overridden: in the trainer for one ``train()``, and in its module."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from transformers import Trainer, trainer

from resume_adapters.core.patching import overridden
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.hf.callback import ResumeCallback
from resume_adapters.hf.session import TrainerSession
from resume_adapters.hf.unedited import CallbackOfEnvironment
from resume_adapters.hf.weights import is_replaced

if hasattr(Trainer, "_run_epoch"):  # seam: transformers 5.3 to 5.23
    from resume_adapters.hf.loop import LoopSeams
else:
    from resume_adapters.hf.loop_before_5_3 import LoopSeams  # type: ignore[assignment]


class TrainerSeams:
    """What a trainer does differently in one ``train()`` with a :class:`~resume_adapters.hf.ResumeCallback`.

    While it lasts, each method stands in for the trainer's own of that name, which it gets as ``native``. The trainer's
    class stays what it is. They are private because the public seams come too late or not at all;
    ``tests/hf/test_seams.py`` checks each of them against the installed version.
    """

    def __init__(self, trainer: Any, session: TrainerSession) -> None:
        self.trainer = trainer
        self.session = session

    def get_train_dataloader(self, native: Callable[..., Any]) -> Any:
        return self.session.data.track(native())

    def get_eval_dataloader(self, native: Callable[..., Any], eval_dataset: Any = None) -> Any:
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        is_own = is_replaced("get_eval_dataloader", native)
        return self.session.evaluation.loader(name, lambda: native(eval_dataset), is_own=is_own)

    def _load_from_checkpoint(  # seam: transformers 4.57 to 5.23
        self, native: Callable[..., None], checkpoint: str, *args: Any, **kwargs: Any
    ) -> None:
        session, own = self.session, is_replaced("_load_from_checkpoint", native)
        if session.context is None or checkpoint != str(session.context.path):
            native(checkpoint, *args)  # a subclass loads the best model so
        else:
            session.framework.load_model(session.context, lambda: native(checkpoint, *args), has_own_loader=own)

    def _load_optimizer_and_scheduler(  # seam: transformers 4.57 to 5.23
        self, native: Callable[..., None], checkpoint: str | None
    ) -> None:
        self.session.session.begin_settings()
        self.session.session.rescale.schedules.remember(self.trainer.lr_scheduler)
        self.session.framework.load_optimizer(self.session.context, lambda: native(checkpoint))

    def get_batch_samples(self, native: Callable[..., Any], epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return native(epoch_iterator, self.session.window(num_batches), device)

    def training_step(self, native: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        trace = self.session.session.trace
        assert trace is not None, "a run is watched"
        trace.add_batch(inputs)
        loss = native(model, inputs, *args, **kwargs)
        trace.add_loss(loss)
        return loss

    def _load_best_model(self, native: Callable[[], None]) -> None:  # seam: transformers 4.57 to 5.23
        session, own = self.session, is_replaced("_load_best_model", native)
        session.framework.load_best(
            session.run, native, has_own_loader=own, verify=bool(session.session.options.verify)
        )

    def _load_rng_state(  # seam: transformers 4.57 to 5.23
        self, native: Callable[[str | None], None], checkpoint: str | None
    ) -> None:
        self.session.load_rng(lambda: native(checkpoint))

    def _save_checkpoint(  # seam: transformers 4.57 to 5.23
        self, native: Callable[..., None], model: Any, trial: Any
    ) -> None:
        self.session.save(lambda: native(model, trial))

    def _maybe_log_save_evaluate(  # seam: transformers 4.57 to 5.23
        self, native: Callable[..., None], *args: Any, **kwargs: Any
    ) -> None:
        self.session.evaluation.run_interruptible(native, *args, **kwargs)
        self.session.act(self.save_now, self.write_now)

    def _evaluate(  # seam: transformers 4.57 to 5.23
        self, native: Callable[..., dict[str, float]], *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        at_start = kwargs.get("skip_scheduler", False)
        return self.session.evaluate(functools.partial(native, *args, **kwargs), at_start=at_start)

    def write_now(self) -> None:
        """Write a checkpoint as the trainer does, without a word to callbacks."""
        trainer = self.trainer
        trainer._save_checkpoint(trainer.model_wrapped, None)  # seam: transformers 4.57 to 5.23

    def save_now(self) -> None:
        """Save as the trainer does, where it does not by itself."""
        trainer = self.trainer
        self.write_now()
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)


_OF_TRACE = ("training_step",)
"""The methods of the seams of every version that are overridden in a watched run alone: each step calls them."""

_MANAGED: set[str] = set()
"""Output directories whose retention and loaders a session manages at the moment."""


def _on_save(
    session: TrainerSession, native: Callable[..., Any], args: Any, state: Any, control: Any, **more: Any
) -> Any:
    """Tell the callbacks of a checkpoint that is there: they may remove older ones for it."""
    if session.is_saved_for_callbacks():
        return native(args, state, control)
    control.should_save = False
    return control


def _begin(session: TrainerSession, native: Callable[..., Any], *args: Any, in_epoch: bool) -> Any:
    control = native(*args)
    session.conclude_start(in_epoch=in_epoch)
    return control


_EVENTS: dict[str, Any] = {
    "on_train_begin": functools.partial(_begin, in_epoch=False),
    "on_epoch_begin": functools.partial(_begin, in_epoch=True),
    "on_save": _on_save,
}


@contextlib.contextmanager
def _resuming_trainer(trainer: Any, session: TrainerSession) -> Iterator[None]:
    """Replace a trainer's methods by those of the seams while a training call lasts."""
    managed = os.path.abspath(trainer.args.output_dir)
    seams = TrainerSeams(trainer, session)
    with contextlib.ExitStack() as stack:
        for each in (seams, LoopSeams(trainer, session, seams.save_now)):  # the loop's are the outer ones
            for name in vars(type(each)):
                if each is seams and name in _OF_TRACE and session.session.trace is None:
                    continue
                if callable(getattr(Trainer, name, None)) and not name.startswith("__"):
                    stack.enter_context(overridden(trainer, name, getattr(each, name)))
        for name, function in _EVENTS.items():
            stack.enter_context(overridden(trainer.callback_handler, name, functools.partial(function, session)))
        _MANAGED.add(managed)
        stack.callback(_MANAGED.discard, managed)
        yield


def _callback_of(trainer: Any, *, is_search: bool) -> ResumeCallback | None:
    """Return the callback of a training call; ``None`` if there is none, or if its training is under way.

    The one that the environment has added moves behind the script's callbacks, where a script would have added it.
    """
    found = [each for each in trainer.callback_handler.callbacks if isinstance(each, ResumeCallback)]
    if any(each.session is not None for each in found):
        return None
    own = [each for each in found if not isinstance(each, CallbackOfEnvironment)]
    for each in found:
        if isinstance(each, CallbackOfEnvironment):
            trainer.remove_callback(each)
            if each.serves(trainer, has_other=bool(own), is_search=is_search):
                trainer.add_callback(each)
                return each
    return own[0] if own else None


def _train(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_search = kwargs.get("trial") is not None or bool(args and args[0] is not None)
        callback = _callback_of(self, is_search=is_search)
        if callback is None:
            return native(self, resume_from_checkpoint, *args, **kwargs)
        if is_search:
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
