"""Trainings that a callback gets no part in: in these nothing is saved, and that is not to stay silent."""

from __future__ import annotations

import importlib
import sys
import weakref
from typing import Any

from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import Trainer, TrainerCallback

from resume_adapters.core.log import logger
from resume_adapters.core.observed.instances import instances

_TWICE = 2
"""Steps of an optimizer after which it is looked for: one may be a trial."""


class OutsideTraining:
    """Warns once of a training that goes past a callback.

    A loop that calls no event is found by its optimizer, through torch's global hook, until a training has begun that
    the callback has a part in.
    """

    def __init__(self, callback: TrainerCallback) -> None:
        self._callback = weakref.ref(callback)
        self._has_warned = False
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        _watch(self)

    def end(self) -> None:
        """Watch optimizers no longer: the training that begins calls the callback's events."""
        _unwatch(id(self))

    def forget(self) -> None:
        """Be ready to warn of another training."""
        self._has_warned = False

    def warn(self, found: str) -> None:
        """Warn that a training goes on which neither saves nor resumes."""
        if self._has_warned:
            return
        self._has_warned = True
        is_patched = hasattr(importlib.import_module("transformers.trainer").Trainer.train, "resume_adapters")
        reloaded = "" if is_patched else " transformers.trainer was reloaded after resume_adapters.hf was imported."
        logger.warning(
            "This training neither saves with ResumeCallback nor resumes: %s.%s Add the callback before train(), let "
            "the train() of a subclass call super().train(), and reload neither transformers nor resume_adapters.",
            found,
            reloaded,
        )

    def after_step(self, optimizer: Any) -> None:
        """Look at the second step of an optimizer whether it trains the model of a trainer that has the callback."""
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps == _TWICE and (name := self._trainer_of(optimizer)):
            self.warn(f"{name} trains in a loop of its own, which calls no event of its callbacks")

    def _trainer_of(self, optimizer: Any) -> str:
        trained, callback = {id(each) for group in optimizer.param_groups for each in group["params"]}, self._callback()
        for trainer in instances(Trainer):
            handler = getattr(trainer, "callback_handler", None)  # one may be half made
            has_callback = handler is not None and any(each is callback for each in handler.callbacks)
            if has_callback and any(id(each) in trained for each in trainer.model.parameters()):
                return type(trainer).__name__
        return ""


# ---- The hook, which all callbacks of a process share

_watching: dict[int, weakref.ref[OutsideTraining]] = {}
_hooks: list[Any] = []


def _watch(outside: OutsideTraining) -> None:
    _watching[id(outside)] = weakref.ref(outside)
    weakref.finalize(outside, _unwatch, id(outside)).atexit = False
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _unwatch(key: int) -> None:
    """Remove the hook if nobody else watches; not within a step, where torch goes through its hooks."""
    _watching.pop(key, None)
    if _hooks and not _watching and not _is_stepping():
        _hooks.pop().remove()


def _is_stepping() -> bool:
    """Return whether an optimizer steps in any thread: objects are also collected in the middle of a step."""
    file = torch_optimizer.__file__
    for frame in sys._current_frames().values():
        each: Any = frame
        while each is not None:
            if each.f_code.co_filename == file:
                return True
            each = each.f_back
    return False


def _after_step(optimizer: Any, *_: Any) -> None:
    for watching in list(_watching.values()):
        if (outside := watching()) is not None:
            outside.after_step(optimizer)
