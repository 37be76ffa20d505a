"""The callback, and the methods of the trainer that are wrapped while a ``fit`` resumes."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.dataloader.tracked import track
from resume_adapters.core.log import logger
from resume_adapters.core.patching import replaced, wrapped
from resume_adapters.core.session.numbered import Training
from resume_adapters.core.session.options import OptionsCallback
from resume_adapters.lightning import tuning
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.files import ResumeCheckpointIO
from resume_adapters.lightning.loops import Loops, SavePoint
from resume_adapters.lightning.model_checkpoints import (
    assign_directories,
    move_directories,
    named_by_rank_zero,
    saving,
)
from resume_adapters.lightning.session import FitSession
from resume_adapters.lightning.strategies import is_sharded, load_copies, saves_directories
from resume_adapters.lightning.supported import require_local, require_supported
from resume_adapters.lightning.tuning import is_only_tuning


class ResumeCallback(OptionsCallback, pl.Callback):  # type: ignore[misc]  # known at run time
    """Makes ``trainer.fit()`` resume, by itself, from the latest valid checkpoint of the first ModelCheckpoint.

    ``ckpt_path`` may be ``None`` or ``"last"``: both mean the newest valid one, and so does ``"hpc"`` where Lightning
    finds such a checkpoint. A path starts a run that has no checkpoint of its own.

    The other options are those of every adapter: :class:`~resume_adapters.core.session.options.ResumeOptions`.

    Args:
        keep: by default what each ModelCheckpoint keeps.
        save_every: beside what each ModelCheckpoint saves; by default never. Such a checkpoint goes when there
            is a newer one.

    Raises:
        UnsupportedSetting: a part cannot save its state.
    """

    needless_warnings = (re.escape('.fit(ckpt_path="last") is set, but there is no last checkpoint available'),)

    _resuming: ResumingTrainer | None = None
    _former: frozenset[Path] = frozenset()  # directories of the ModelCheckpoints, where the environment has moved them
    _training: Training | None = None  # what was given, where its directory has the number of a version
    _fits = 0  # of this trainer; those that failed do not count

    def __getstate__(self) -> dict[str, Any]:
        """Return what it was given, and nothing of a ``fit`` that is under way.

        A script may have its callbacks among the hyperparameters, which are saved with each checkpoint.
        """
        is_inherited = {name for name, value in vars(self).items() if value is None and hasattr(type(self), name)}
        return {
            name: value
            for name, value in vars(self).items()
            if name not in {"_resuming", "_training", "_fits", *is_inherited}
        }

    @property
    def session(self) -> FitSession | None:
        """The ``fit`` under way; ``None`` before it has loaded a checkpoint, and after it."""
        return None if self._resuming is None else self._resuming.session

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the few methods through which a fit loads, saves and removes checkpoints."""
        first = next(each for each in trainer.callbacks if isinstance(each, ResumeCallback))
        if stage != "fit" or trainer.fast_dev_run or first is not self:
            return
        require_supported(trainer)
        self._former |= move_directories(trainer)
        require_local(trainer)
        # A finder that comes before the fit has given them theirs already.
        self._training = assign_directories(trainer, str(self.options.resume)) or self._training
        if is_only_tuning(trainer):
            return
        self._resuming = ResumingTrainer(trainer, self)
        self._resuming.begin(pl_module)

    # ---- Events

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Look at what is set up, where the checkpoint was not loaded before."""
        if (session := self.session) is not None:
            session.after_setup()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to train."""
        if (session := self.session) is not None:
            session.begin_training()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        """Leave if a stop was asked for before the first step."""
        if self._resuming is None or (session := self._resuming.session) is None:
            return
        if not session.begin_batch(batch):
            self._resuming.leave_out(self, "on_train_batch_start", ResumeCallback)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Checkpoints are now saved after a batch."""
        if (session := self.session) is not None:
            session.begin_saves(outputs)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Checkpoints are now saved after a validation."""
        if (session := self.session) is not None and not trainer.sanity_checking:
            session.set_save_point(SavePoint.VALIDATION)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Checkpoints are now saved after an epoch."""
        if (session := self.session) is not None:
            session.set_save_point(SavePoint.EPOCH)

    # ---- Ending

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write why the run failed, and undo everything."""
        try:
            if (session := self.session) is not None and isinstance(exception, Exception):
                session.fail(exception)
        finally:
            self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undo everything."""
        self._end()

    def _end(self) -> None:
        resuming, self._resuming = self._resuming, None
        if resuming is not None:
            self._fits += resuming.session is not None and resuming.session.has_finished
            resuming.end()


class ResumingTrainer:
    """Owns all that is wrapped, appended and taken in one ``fit()``; :meth:`end` undoes it.

    Attributes:
        session: the session, from the moment at which the trainer loads a checkpoint.
    """

    def __init__(self, trainer: Any, callback: ResumeCallback) -> None:
        self.session: FitSession | None = None
        self._trainer = trainer
        self._callback = callback
        self._is_tuning = False
        self._undo = contextlib.ExitStack()

    def begin(self, module: Any) -> None:
        """Wrap what the trainer calls. Called once the strategy and the callbacks are set up."""
        trainer = self._trainer
        after_saves = AfterSaves(self)
        trainer.callbacks.append(after_saves)
        self._undo.callback(trainer.callbacks.remove, after_saves)
        for each, name in itertools.product((self._callback, after_saves), _OF_EACH_STEP):
            self.leave_out(each, name, pl.Callback)  # where it is inherited: a call takes 5 us
        for finder, search in tuning.finders(trainer):
            self._undo.enter_context(wrapped(finder, search, self._tune))
        for each in saving(trainer):
            self._undo.enter_context(wrapped(each, "file_exists", self._file_exists))
            if trainer.world_size > 1:
                self._undo.enter_context(named_by_rank_zero(each, trainer))
        for each in _config_writers(trainer):
            # It refuses to overwrite a config, and the launch before this one has written it.
            self._undo.enter_context(replaced(each, "overwrite", True))
        self._save_after_module(module)
        self._undo.enter_context(Loops(trainer).passing_loaders_to(self._track))
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, ResumeCheckpointIO):
            self._undo.enter_context(plugin.managed())
        elif trainer.world_size > 1 and trainer.is_global_zero and not saves_directories(trainer.strategy):
            logger.info(
                "Without ResumeCheckpointIO() among the plugins, a rank whose disk is full leaves the others waiting."
            )
        if not is_sharded(trainer):
            self._undo.enter_context(wrapped(trainer.strategy, "load_optimizer_state_dict", load_copies))
        self._wrap(trainer._checkpoint_connector, "resume_start", self._start)  # seam: lightning 2.4-2.6

    def leave_out(self, callback: Any, name: str, kind: type[Any]) -> None:
        """Leave out a hook of each step from now on, if it is that of a class, and not a user's own."""
        if getattr(type(callback), name) is getattr(kind, name) and name not in vars(callback):
            self._undo.enter_context(replaced(callback, name, None))

    def _file_exists(self, native: Callable[..., bool], filepath: Any, trainer: Any) -> bool:
        """Count the newest checkpoint as there: it has its name only once it is committed."""
        return native(filepath, trainer) or (self.session is not None and self.session.is_newest(Path(filepath)))

    def end(self) -> None:
        """Undo everything, and close the session."""
        self.session = None
        self._undo.close()

    def _wrap(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Wrap a method, other than for what a finder trains to throw away."""

        def unless_tuning(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return native(*args, **kwargs) if self._is_tuning else function(native, *args, **kwargs)

        self._undo.enter_context(wrapped(owner, name, unless_tuning))

    def _tune(self, native: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run a finder as if this package were not there; where a checkpoint is loaded, use what it found."""
        session = self.session
        if session is not None and session.restore_tuned():
            return
        self._is_tuning = True
        try:
            with contextlib.nullcontext() if session is None else session.checking():
                native(*args, **kwargs)
        except Exception as error:
            if session is not None:
                session.fail(error)
            self.end()  # a finder that failed has taken the callbacks away, and none of them is called
            raise
        finally:
            self._is_tuning = False

    def _start(self, native: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        """Open a session in place of Lightning's first load of a fit, which gets what is resumed from.

        A callback may load again in the middle of the training, as one that returns to the best checkpoint does.
        """
        if self.session is not None:
            self.session.run.saver.flush()  # it may be in the background still
            native(checkpoint_path, *args, **kwargs)
            return
        trainer, callback, path = self._trainer, self._callback, checkpoint_path
        if path is not None and Path(os.path.realpath(path)).parent in callback._former:
            path = None  # what Lightning took for the newest, in a directory that is not this run's
        session = self.session = FitSession(trainer, callback.options, path, callback._training, callback._fits + 1)
        self._undo.callback(session.close)
        self._wrap(trainer, "save_checkpoint", session.save_checkpoint)
        self._wrap(trainer.strategy, "remove_checkpoint", session.remove_checkpoint)
        self._wrap(trainer.fit_loop, "run", session.run_fit_loop)  # seam: lightning 2.4-2.6
        self._wrap(trainer.fit_loop, "on_run_end", session.end_training)  # seam: lightning 2.4-2.6
        self._wrap(session.loops.validation, "run", session.validate)  # seam: lightning 2.4-2.6
        self._take_signals(session)
        session.load(native)

    def _track(self, loaders: list[Any]) -> None:
        """Track the training loaders; without a session yet, from their first pass on."""
        if self.session is not None:
            # The last loaders that a finder makes are those of the training, and the pass over them has begun.
            track_all = self.session.data.track_new if self._is_tuning else self.session.data.track
            track_all(loaders)
            return
        for each in loaders:
            track(each, self._callback.options.generators)

    def _take_signals(self, session: FitSession) -> None:
        """Replace Lightning's signal handlers, which act in the middle of a step, and let it undo only its own."""
        flag, connector = session.run.flag, self._trainer._signal_connector

        def register(native: Callable[[], None]) -> None:
            flag.uninstall()  # else Lightning restores this package's handlers when all is over
            native()
            flag.install()

        def teardown(native: Callable[[], None]) -> None:
            flag.uninstall()
            native()

        self._wrap(connector, "register_signal_handlers", register)  # seam: lightning 2.4-2.6
        self._wrap(connector, "teardown", teardown)  # seam: lightning 2.4-2.6

    def _save_after_module(self, module: Any) -> None:
        """Save checkpoints after the module's own ``on_train_batch_end``, where it has one.

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
            self._wrap(each, "on_train_batch_end", lambda native, *args: None)
        self._wrap(module, "on_train_batch_end", on_train_batch_end)


_OF_EACH_STEP = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad"),
)
"""The hooks that Lightning calls on every callback at each step; one that is not callable is left out."""


def _config_writers(trainer: Any) -> list[Any]:
    """Return the callbacks of a LightningCLI that write its config, where the run directory has a run already."""
    cli: Any = sys.modules.get(f"{pl.__name__}.cli")
    found = [each for each in trainer.callbacks if cli is not None and isinstance(each, cli.SaveConfigCallback)]
    if found and trainer.strategy.broadcast((Path(saving(trainer)[0].dirpath) / CONTROL).is_dir()):
        return found
    return []


class AfterSaves(pl.Callback):  # type: ignore[misc]  # known at run time
    """Comes after every ModelCheckpoint, so that a stop follows the saves that are due.

    Args:
        resuming: owns the session.
    """

    def __init__(self, resuming: ResumingTrainer) -> None:
        self._resuming = resuming

    def __reduce__(self) -> Any:
        """Return what stands for it in a pickle of the script's list of callbacks: one that does nothing."""
        return pl.Callback, ()

    def on_train_batch_end(self, *args: Any) -> None:
        """Ask whether to save, and whether to stop."""
        if (session := self._resuming.session) is not None:
            session.end_batch()

    def on_validation_batch_end(self, *args: Any) -> None:
        """Ask whether to stop, in the middle of a validation."""
        if (session := self._resuming.session) is not None:
            session.end_validation_batch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Ask whether to stop."""
        if (session := self._resuming.session) is not None and not trainer.sanity_checking:
            session.end_validation()

    def on_train_epoch_end(self, *args: Any) -> None:
        """Hold the state of the epoch's end, within a restartable block."""
        if (session := self._resuming.session) is not None:
            session.keep()
