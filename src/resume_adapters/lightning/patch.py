"""Where the adapter stands in Lightning's trainer: before the few methods through which a fit loads, saves, removes."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resume_adapters.core.log import enable_logging, logger
from resume_adapters.core.patching import wrapped
from resume_adapters.lightning.checkpoint_io import ResumeCheckpointIO, require_data, without_code
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.session import FitSession, is_sharded


class ResumingTrainer:
    """What a trainer does differently in one ``fit()`` with a :class:`~resume_adapters.lightning.ResumeCallback`.

    Args:
        trainer: the trainer.
        callback: the callback, which gets the session.
    """

    def __init__(self, trainer: Any, callback: Any) -> None:
        self._trainer = trainer
        self._callback = callback
        self._replaced = contextlib.ExitStack()

    def begin(self, module: Any) -> None:
        """Stand before what the trainer calls. Called once the strategy and the callbacks are set up."""
        trainer = self._trainer
        if not any(isinstance(each, AfterSaves) for each in trainer.callbacks):
            trainer.callbacks.append(AfterSaves(self._callback))
        self._save_after_module(module)
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, ResumeCheckpointIO):
            plugin.is_managed = True
        elif not is_sharded(trainer.strategy):
            enable_logging()
            logger.info(
                "Without ResumeCheckpointIO() among the plugins, Lightning writes each file in TMPDIR first, and a "
                "rank whose disk is full may leave the others waiting."
            )
        self._precede(trainer._checkpoint_connector, "resume_start", self._start)  # seam: lightning 2.4-2.6

    def end(self) -> None:
        """Take everything back."""
        self._replaced.close()

    def _precede(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        self._replaced.enter_context(wrapped(owner, name, method))

    def _start(self, native: Any, path: Any = None, weights_only: Any = None) -> None:
        """Choose, and let Lightning load what was chosen."""
        trainer = self._trainer
        session = self._callback.session = FitSession(trainer, self._callback, path)
        self._precede(trainer, "save_checkpoint", functools.partial(_save, session))
        self._precede(trainer.strategy, "remove_checkpoint", functools.partial(_remove, session))
        self._precede(trainer.fit_loop, "on_run_end", session.end_training)  # seam: lightning 2.4-2.6
        self._precede(session.loops.validation, "run", session.validate)  # seam: lightning 2.4-2.6
        self._replaced.enter_context(session.loops.giving_loaders(session.watch_loaders))
        chosen = session.open()
        if chosen is None:
            native(None)
            return
        require_data(trainer.strategy, chosen)
        with without_code(), session.loading():
            native(chosen)
        session.adopt(trainer._checkpoint_connector._loaded_checkpoint)  # seam: lightning 2.4-2.6

    def _save_after_module(self, module: Any) -> None:
        """Let checkpoints be saved after the module's own ``on_train_batch_end``, where it has one.

        Lightning calls it after the callbacks, so what it does in the step of a checkpoint would be lost.
        """
        if type(module).on_train_batch_end is pl.LightningModule.on_train_batch_end:
            return
        trainer = self._trainer
        behind = [each for each in trainer.callbacks if isinstance(each, pl.callbacks.Checkpoint | AfterSaves)]
        saves = [each.on_train_batch_end for each in behind]

        def on_train_batch_end(native: Any, *args: Any) -> None:
            native(*args)
            for save in saves:
                save(trainer, module, *args)

        for each in behind:
            self._precede(each, "on_train_batch_end", lambda native, *args: None)
        self._precede(module, "on_train_batch_end", on_train_batch_end)


def _save(session: FitSession, native: Any, filepath: Any, weights_only: Any = None, *rest: Any) -> None:
    write = functools.partial(native, filepath, weights_only, *rest)
    path = Path(os.path.abspath(filepath))
    if session.takes(path, weights_only):
        session.save(path, write)
    else:
        write()


def _remove(session: FitSession, native: Any, filepath: Any) -> None:
    session.remove(Path(os.path.abspath(filepath)), functools.partial(native, filepath))


class AfterSaves(pl.Callback):  # type: ignore[misc]  # known at run time
    """Stands behind every ModelCheckpoint: a stop comes after what is due is saved.

    Args:
        callback: the callback that has the session.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def on_train_batch_end(self, *args: Any) -> None:
        """Ask whether to save, and whether to stop."""
        if self.callback.session is not None:
            self.callback.session.end_batch()

    def on_validation_batch_end(self, *args: Any) -> None:
        """Ask whether to stop, in the middle of a validation."""
        if self.callback.session is not None:
            self.callback.session.end_validation_batch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Ask whether to stop."""
        if self.callback.session is not None and not trainer.sanity_checking:
            self.callback.session.end_validation()
