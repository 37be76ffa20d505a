"""Trainings that a callback gets no part in: in these nothing is saved, and that is not to stay silent."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

from transformers import Trainer, TrainerCallback

from resume_adapters.core.log import logger
from resume_adapters.core.observed.instances import instances
from resume_adapters.core.observed.steps import watch_steps
from resume_adapters.core.state.stateful import parameters_of

_TWICE = 2
"""Steps of an optimizer after which it is looked for: one may be a trial."""


class OutsideTraining:
    """Warns once of a training that goes past a callback.

    A loop that calls no event is found by its optimizer, until a training has begun that the callback has a part in.
    """

    def __init__(self, callback: TrainerCallback) -> None:
        self._callback = weakref.ref(callback)
        self._has_warned = False
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        own = weakref.WeakMethod(self._after_step)
        # A callback may be made and never used.
        self._watching = weakref.finalize(self, watch_steps(lambda optimizer: _told(own(), optimizer)))
        self._watching.atexit = False

    def end(self) -> None:
        """Watch optimizers no longer: the training that begins calls the callback's events."""
        self._watching()

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

    def _after_step(self, optimizer: Any) -> None:
        """Look at the second step of an optimizer whether it trains the model of a trainer that has the callback."""
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps == _TWICE and (name := self._trainer_of(optimizer)):
            self.warn(f"{name} trains in a loop of its own, which calls no event of its callbacks")

    def _trainer_of(self, optimizer: Any) -> str:
        trained, callback = {id(each) for each in parameters_of(optimizer)}, self._callback()
        for trainer in instances(Trainer):
            handler = getattr(trainer, "callback_handler", None)  # one may be half made
            has_callback = handler is not None and any(each is callback for each in handler.callbacks)
            if has_callback and any(id(each) in trained for each in trainer.model.parameters()):
                return type(trainer).__name__
        return ""


def _told(after_step: Any, optimizer: Any) -> None:
    if after_step is not None:
        after_step(optimizer)
