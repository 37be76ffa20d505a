"""Settings of Lightning with which no resume is exact, or with which the run's length is not known."""

from __future__ import annotations

import inspect
from typing import Any

from resume_adapters.core.recovery.attempt import running_attempt
from resume_adapters.core.requirements import refuse
from resume_adapters.core.session.rescale import GIVEN_IN_STEPS
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.lightning import tuning
from resume_adapters.lightning.compat import io, pl
from resume_adapters.lightning.files import ResumeCheckpointIO
from resume_adapters.lightning.model_checkpoints import place, saving


def require_supported(trainer: Any) -> None:
    """Refuse settings with which no resume is exact.

    Raises:
        UnsupportedSetting: naming the setting and what to do.
    """
    if not isinstance(trainer, pl.Trainer):
        package = type(trainer).__module__.partition(".")[0]
        raise UnsupportedSetting(
            f"this Trainer is of {package}, and resume_adapters.lightning has been imported for {pl.__name__}: import "
            f"{package} first, or the Trainer from {pl.__name__}"
        )
    strategy = trainer.strategy
    plugin = strategy.checkpoint_io
    loads_late = strategy.restore_checkpoint_after_setup and not tuning.is_only_tuning(trainer)

    def has_callback(kind: type[Any]) -> bool:
        return any(isinstance(each, kind) for each in trainer.callbacks)

    refused = {
        "no ModelCheckpoint saves the whole state (with save_weights_only=False)": not saving(trainer),
        "reload_dataloaders_every_n_epochs makes new loaders, whose positions cannot be restored": (
            trainer.reload_dataloaders_every_n_epochs
        ),
        "AsyncCheckpointIO writes after the save has returned, and may remove the last checkpoint before that; "
        "ResumeCallback commits in the background by itself": isinstance(plugin, io.AsyncCheckpointIO),
        "FSDPStrategy keeps process groups that @restartable cannot make again; ModelParallelStrategy does not": (
            running_attempt() is not None and isinstance(strategy, pl.strategies.FSDPStrategy)
        ),
        "StochasticWeightAveraging sets its learning rate and its average up at the start of an epoch alone, so that a "
        "resume within one has neither; EMAWeightAveraging and WeightAveraging do not": (
            has_callback(pl.callbacks.StochasticWeightAveraging)
        ),
        "ModelPruning leaves its masks out of what it saves": has_callback(pl.callbacks.ModelPruning),
        "LearningRateFinder searches before this strategy loads a checkpoint; Tuner.lr_find, called before fit(), does "
        "not": loads_late and has_callback(pl.callbacks.LearningRateFinder),
        "DeepSpeedStrategy(load_full_weights=True) loads no optimizer": getattr(strategy, "load_full_weights", False),
        "DeepSpeedStrategy(exclude_frozen_parameters=True) saves no frozen weights": (
            getattr(strategy, "exclude_frozen_parameters", False)
        ),
        # Lightning saves the weights of the first. seam: lightning 2.4-2.6
        "with model_averaging_period processes train apart": getattr(strategy, "_model_averaging_period", None),
        "training_step(dataloader_iter) fetches its batches by itself, and may fetch more than it has used": (
            "dataloader_iter" in inspect.signature(trainer.lightning_module.training_step).parameters
        ),
    }
    refuse(refused, "change it, or leave the callback out")


def require_local(trainer: Any) -> None:
    """Refuse directories of checkpoints that are URLs, where this package would write to them.

    Raises:
        UnsupportedSetting: naming the directory.
    """
    through_ours = isinstance(trainer.strategy.checkpoint_io, ResumeCheckpointIO)
    every = [each for each in trainer.checkpoint_callbacks if hasattr(each, "dirpath")]
    for each in every if through_ours else saving(trainer)[:1]:
        found = place(each, trainer)
        if "://" in found:
            raise UnsupportedSetting(
                f"{type(each).__name__} saves to {found}; expected a directory on a mounted file system: set dirpath. "
                f'For checkpoints that outlive the machine, add ResumeCallback(mirror=[Remote("{found}")])'
            )


def no_horizon(trainer: Any) -> str:
    """Return why the run's length cannot be computed for a different batch size; empty where it can."""
    reasons = {
        GIVEN_IN_STEPS: trainer.max_steps > 0,
        "limit_train_batches ends a pass before its end. Leave it out": trainer.limit_train_batches != 1.0,
        "with automatic_optimization=False the module steps its schedules itself": (
            not trainer.lightning_module.automatic_optimization
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
