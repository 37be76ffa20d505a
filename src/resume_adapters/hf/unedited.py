"""The callback that ``RESUME_ADAPTERS=1`` adds to every trainer."""

from __future__ import annotations

from typing import Any, cast

from transformers import trainer

from resume_adapters.core.log import logger
from resume_adapters.core.session.options import OPTIONS, options_of_environment
from resume_adapters.hf.callback import ResumeCallback
from resume_adapters.unedited import trainer_was_made


class CallbackOfEnvironment(ResumeCallback):
    """A :class:`ResumeCallback` with the options of the environment, which leaves some trainers alone.

    Raises:
        UnsupportedSetting: an option of the environment is invalid.
    """

    def __init__(self) -> None:
        trainer_was_made()
        self._given = options_of_environment()
        super().__init__(**self._given)

    def serves(self, trainer: Any, *, has_other: bool, is_search: bool) -> bool:
        """Return whether a training call resumes with this callback, and warn where it cannot.

        Args:
            has_other: it has a callback of its script's.
            is_search: the call is a trial of a hyperparameter search.
        """
        if has_other:
            if self._given and trainer.is_world_process_zero():
                logger.warning("This trainer has a ResumeCallback of its own: the options in %s do not apply.", OPTIONS)
            return False
        args = trainer.args
        never = args.save_strategy == "no" and self.options.cadence() is None
        reasons = {
            'its save_strategy="no" never saves (`resume-adapters run --save-every 500` would)': never,
            "its save_only_model=True leaves no optimizer to resume with": args.save_only_model,
            "a hyperparameter search starts many runs in one directory": is_search,
        }
        reason = next((each for each, holds in reasons.items() if holds), None)
        if reason is not None and trainer.is_world_process_zero():
            logger.warning("This trainer trains without being resumed: %s.", reason)
        return reason is None


def install() -> None:
    """Add the callback to each trainer that is made from now on."""
    cast("list[Any]", trainer.DEFAULT_CALLBACKS).append(CallbackOfEnvironment)
