"""What a ``fit`` was given, as far as a resume is compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resume_adapters.core.session.settings import LaunchSettings, read_settings
from resume_adapters.lightning.compat import pl

_FLAGS = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "precision", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "overfit_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "log_every_n_steps", "num_sanity_val_steps"),
    *("reload_dataloaders_every_n_epochs", "use_distributed_sampler"),
)
"""Flags of the trainer that shape its steps, or when it validates and logs."""


def of_trainer(trainer: Any, of_engine: Mapping[str, Any] | None) -> LaunchSettings:
    """Return the trainer's flags, the hyperparameters, and what optimizers and schedules were made with.

    Args:
        trainer: the trainer; its strategy may not have made the optimizers yet.
        of_engine: what DeepSpeed's configuration says; ``None`` without DeepSpeed.
    """
    module, data = trainer.lightning_module, trainer.datamodule
    flags = {name: getattr(trainer, name, None) for name in _FLAGS}
    given = {f"hparams.{name}": each for name, each in module.hparams.items()}
    of_data = {} if data is None else {f"datamodule.hparams.{name}": each for name, each in data.hparams.items()}
    grows = any(isinstance(each, pl.callbacks.BaseFinetuning) for each in trainer.callbacks)
    return read_settings(
        {**flags, **given, **of_data, **(of_engine or {})},
        [] if grows else trainer.optimizers,  # a resume has made the groups of before, with their rates of then
        [config.scheduler for config in trainer.lr_scheduler_configs],
        [module],
        is_fixed=of_engine is None,
    )
