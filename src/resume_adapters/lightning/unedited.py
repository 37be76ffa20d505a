"""The callback that ``RESUME_ADAPTERS=1`` adds to every trainer."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from resume_adapters.core.log import logger
from resume_adapters.core.patching import wrapped
from resume_adapters.core.session.options import OPTIONS, options_of_environment, run_directory_override
from resume_adapters.lightning.callback import ResumeCallback
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.model_checkpoints import saving
from resume_adapters.unedited import trainer_was_made


class CallbackOfEnvironment(ResumeCallback):
    """A :class:`ResumeCallback` with the options of the environment.

    A trainer without a ModelCheckpoint that saves the whole state is left alone, unless an option says how often it is
    to save.

    Raises:
        UnsupportedSetting: an option of the environment is invalid.
    """

    _is_set_up = False

    def __init__(self) -> None:
        self._given = options_of_environment()
        super().__init__(**self._given)
        self._undo = contextlib.ExitStack()
        _begin(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin in a process that was spawned for the trainer, too: there both are unpickled."""
        self.__dict__.update(state)
        _begin(self)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Warn where no ModelCheckpoint saves the whole state, or where options have no effect; else as the base."""
        if self._is_set_up:
            self._is_set_up = False
            return
        if isinstance(trainer, pl.Trainer) and not saving(trainer):
            if stage != "fit":
                return
            if self.options.cadence() is None:
                if trainer.is_global_zero:
                    logger.warning(
                        "No ModelCheckpoint of this trainer saves the whole state (enable_checkpointing=False, or "
                        "save_weights_only=True): it trains without being resumed (`resume-adapters run --save-every "
                        "500` would)."
                    )
                return
            self._give_a_place(trainer)
        others = [each for each in getattr(trainer, "callbacks", ()) if isinstance(each, ResumeCallback)]
        if stage == "fit" and self._given and others[:1] != [self] and trainer.is_global_zero:
            logger.warning("This trainer has a ResumeCallback of its own: the options in %s do not apply.", OPTIONS)
        super().setup(trainer, pl_module, stage)

    def _give_a_place(self, trainer: Any) -> None:
        """Give a trainer for this fit what names the place of the run, and saves nothing by itself."""
        parent = run_directory_override() or (None if trainer.loggers else trainer.default_root_dir)
        # Beside the place of other trainers of the script, which may save; with a logger each has its own version.
        directory = None if parent is None else os.path.join(parent, f"checkpoints-of-fit-{next(_fits)}")
        added = pl.callbacks.ModelCheckpoint(directory, save_top_k=0)
        trainer.callbacks.append(added)

        def take_back() -> None:
            trainer.callbacks = [each for each in trainer.callbacks if each is not added]

        self._undo.callback(take_back)

    def set_up_early(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Come before the callbacks of the script, once: Lightning adds those of the environment behind them."""
        self.setup(trainer, pl_module, stage)
        self._is_set_up = True

    def _end(self) -> None:
        self._is_set_up = False
        _leave_configs(id(self))
        super()._end()
        self._undo.close()


def _begin(callback: CallbackOfEnvironment) -> None:
    """End the watch for loops, and move a callback before LightningCLI's, which refuses a directory with a config."""
    trainer_was_made()
    # LightningCLI writes the config once: a second fit of the trainer finds it written.
    cli: Any = sys.modules.get(f"{pl.__name__}.cli")
    if cli is None:
        return
    if not _coming_first:
        _patches.enter_context(wrapped(cli.SaveConfigCallback, "setup", _set_up_early))
    _coming_first.add(id(callback))
    weakref.finalize(callback, _leave_configs, id(callback)).atexit = False


_coming_first: set[int] = set()
_fits = itertools.count(1)
_patches = contextlib.ExitStack()


def _set_up_early(native: Callable[..., None], writer: Any, trainer: Any, pl_module: Any, stage: str) -> None:
    for each in trainer.callbacks:
        if isinstance(each, CallbackOfEnvironment):
            each.set_up_early(trainer, pl_module, stage)
    native(writer, trainer, pl_module, stage)


def _leave_configs(key: int) -> None:
    _coming_first.discard(key)
    if not _coming_first:
        _patches.close()
