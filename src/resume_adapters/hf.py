"""Exact resume for the Hugging Face ``Trainer``: add :class:`ResumeCallback`, launch the same command again.

Who saves what, and through which seam:

==========  =========  ==========================================================================================
part        saved by   seam
==========  =========  ==========================================================================================
model       framework  ``Trainer._save_checkpoint``; loaded by this adapter, so that keys of ``torch.compile`` fit
optimizer   framework  ``optimizer.pt``
scheduler   framework  ``scheduler.pt``
scaler      framework  ``scaler.pt``
counters    both       ``trainer_state.json``; the partial running loss and the elapsed time are added
rng         core       after the save, on every rank (``rng_state.pth`` stays for the bare Trainer)
data        core       the loader of ``get_train_dataloader``, watched in place
metrics     framework  ``trainer_state.json``
callbacks   both       ``ExportableState`` through ``trainer_state.json``; ``state_dict()`` by this adapter
trackers    core       run ids of W&B and MLflow, directories of TensorBoard
others      core       every keyword of :class:`ResumeCallback`, for example ``ema=ema``
==========  =========  ==========================================================================================

A ``TrainerCallback`` alone cannot make ``train()`` resume: no event comes before the load. Importing this module
therefore wraps ``Trainer.train`` once; the wrapper does nothing for a trainer without a :class:`ResumeCallback`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch

try:
    import transformers
    import transformers.trainer as trainer_module
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    from resume_adapters.errors import MissingFramework

    raise MissingFramework(
        "resume_adapters.hf needs transformers and accelerate: pip install 'resume-adapters[hf]'"
    ) from error

from resume_adapters._hf_session import TrainerSession
from resume_adapters.core.cadence import SaveEvery
from resume_adapters.core.retention import Policy
from resume_adapters.core.session import RESERVED
from resume_adapters.core.settings import require_version
from resume_adapters.core.state import named_parts
from resume_adapters.core.stop import StopOn
from resume_adapters.errors import UnsupportedSetting

require_version("transformers", transformers.__version__, "4.57", extra="hf")

if hasattr(Trainer, "_run_epoch"):  # seam: transformers 5.3 to 5.23
    from resume_adapters._hf_loop import Loop
else:
    from resume_adapters._hf_single_loop import Loop  # type: ignore[assignment]


class ResumeCallback(TrainerCallback):
    """Makes ``trainer.train()`` resume, by itself, from the latest valid checkpoint of ``args.output_dir``.

    Args:
        resume: ``"auto"``, ``"scratch"``, ``"scratch!"`` or a path; see the documentation's table of options.
        keep: a retention policy; by default ``save_total_limit`` read as :class:`KeepLast`, else everything is kept.
        stop: what asks the run to save and leave: signals, the walltime, a stop file.
        save_every: optimizer steps, a ``timedelta``, or ``"auto"``: as often as is worth its cost. By default the
            trainer's own ``save_strategy`` decides.
        mtbf: mean time between failures, for ``save_every="auto"``; by default what the run itself has seen.
        verify: after restoring, compare the live state with the saved one, and refuse a difference.
        on_batch_change: ``"refuse"``, or ``"keep-samples"``: where an optimizer step has another number of samples than
            when the run was saved, go on by samples, with schedules of this launch's length.
        parts: further Statefuls by name, for example ``ema=ema``; also plain torch, numpy and python generators.

    Raises:
        UnsupportedSetting: a part cannot save its state.
    """

    def __init__(
        self,
        *,
        resume: str | os.PathLike[str] = "auto",
        keep: Policy | None = None,
        stop: StopOn | None = None,
        save_every: SaveEvery | None = None,
        mtbf: timedelta | None = None,
        verify: bool = True,
        on_batch_change: str = "refuse",
        **parts: Any,
    ) -> None:
        self.resume = resume
        self.keep = keep
        self.stop = stop
        self.save_every = save_every
        self.mtbf = mtbf
        self.verify = verify
        self.on_batch_change = on_batch_change
        self.parts = named_parts(parts, (*RESERVED, "buffers", "scaler"))
        self.session: TrainerSession | None = None

    def halt(self, reason: str) -> None:
        """Stop the run for a human to look at: it saves, leaves with exit code 3, and refuses to start again.

        ``resume-adapters resume RUN_DIR`` lets it go on.

        Args:
            reason: what the human is to look at.
        """
        if self.session is not None:
            self.session.run.halt(reason)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put back what is restored last, and prove the whole."""
        if self.session is not None:
            self.session.begin_training(control)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count epochs."""
        if self.session is not None:
            self.session.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave before the first step if a stop was asked for while data were skipped."""
        if self.session is not None:
            self.session.begin_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count micro-batches."""
        if self.session is not None:
            self.session.consumed += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count micro-batches, and ask whether to save or to stop."""
        if self.session is not None:
            self.session.step_ended(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give an evaluation up if a stop was asked for; it is done again after the resume."""
        if self.session is not None:
            self.session.predicted()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Let a new best force a save, so that the best is what was saved."""
        if self.session is not None:
            self.session.evaluated(metrics or {}, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that what is saved from now on stands between two epochs."""
        if self.session is not None:
            self.session.between_epochs = True
            self.session.apply_cadence(control)


class _Resuming:
    """What a trainer does differently while :class:`ResumeCallback` works; mixed into its class for one ``train()``.

    Each method stands before the trainer's own of that name. They are private because the public seams come too late or
    not at all; ``tests/hf/test_seams.py`` checks each of them against the installed version.
    """

    _resume_session: TrainerSession

    def get_train_dataloader(self) -> Any:
        return self._resume_session.watch_loader(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        native = super().get_eval_dataloader  # type: ignore[misc]
        name = eval_dataset if isinstance(eval_dataset, str) else "eval"
        return self._resume_session.evaluation_loader(name, lambda: native(eval_dataset))

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:  # seam: transformers 4.57 to 5.23
        native = super()._load_from_checkpoint  # type: ignore[misc]
        self._resume_session.load_model(model or self.model, lambda: native(checkpoint, model))  # type: ignore[attr-defined]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:  # seam: transformers 4.57 to 5.23
        self._resume_session.schedules.note(self.lr_scheduler)  # type: ignore[attr-defined]
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]  # seam: transformers 4.57 to 5.23

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches = self._resume_session.window(num_batches)
        return super().get_batch_samples(epoch_iterator, batches, device)  # type: ignore[misc]

    def _load_best_model(self) -> None:  # seam: transformers 4.57 to 5.23
        self._resume_session.load_best(super()._load_best_model)  # type: ignore[misc]

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
        return self._resume_session.evaluate(functools.partial(super()._evaluate, *args, **kwargs))  # type: ignore[misc]

    def _save_now(self) -> None:
        trainer: Any = self
        trainer._save_checkpoint(trainer.model_wrapped, None)  # seam: transformers 4.57 to 5.23
        trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)


@functools.cache
def _resuming(base: Any) -> type:
    return type(base.__name__, (Loop, _Resuming, base), {"__module__": base.__module__})


_MANAGED: set[str] = set()
"""Output directories whose retention and loaders this module has taken over for the moment."""


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
        named = isinstance(resume_from_checkpoint, str | os.PathLike)
        session = TrainerSession(self, callback, resume_from_checkpoint if named else callback.resume)
        session.ignore_keys = kwargs.get("ignore_keys_for_eval", args[1] if len(args) > 1 else None)
        managed, base = os.path.abspath(self.args.output_dir), type(self)
        callback.session = self._resume_session = session
        self.__class__ = _resuming(base)  # type: ignore[arg-type]  # a class is hashable
        _MANAGED.add(managed)
        try:
            return native(self, session.open(), *args, **kwargs)
        except Exception as error:
            session.record_failure(error, self.state.global_step)
            raise
        finally:
            _MANAGED.discard(managed)
            self.__class__ = base
            callback.session = None
            del self._resume_session
            session.run.close()

    train.resume_adapters = True  # type: ignore[attr-defined]
    return train


def _skip_first_batches(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def skip(loader: Any, num_batches: int = 0) -> Any:
        watch = getattr(getattr(loader, "base_dataloader", loader), "resume_watch", None)
        if watch is None or watch.restored:
            return native(loader, num_batches)
        if watch.at_end:
            watch.restore_now()
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


def _install() -> None:
    """Wrap ``Trainer.train`` and the functions through which it skips and deletes; once."""
    if hasattr(Trainer.train, "resume_adapters"):
        return
    torch.serialization.register_package(15, lambda storage: None, _on_a_numbered_cpu)
    module, trainer_class = cast("Any", trainer_module), cast("Any", Trainer)
    trainer_class.train = _train(trainer_class.train)
    module.skip_first_batches = _skip_first_batches(module.skip_first_batches)  # seam: transformers 4.57 to 5.23
    for name, instead in (("rotate_checkpoints", lambda: None), ("sort_checkpoints", list)):
        if hasattr(module, name):  # seam: transformers 5.2 to 5.23; before, they are methods
            setattr(module, name, _unless_managed(getattr(module, name), instead))


_install()
