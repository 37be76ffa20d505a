"""What a Trainer was given, as far as a resume is compared with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resume_adapters.core.session.settings import LaunchSettings, read_settings

_NAMES = {"lr": "learning_rate", "betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon"}
"""The names under which users set what is in the groups of an optimizer."""

_OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
"""Arguments that are in the groups of the optimizer, which may be a user's own."""

_OF_LAUNCH = (
    *("output_dir", "logging_dir", "run_name", "project", "local_rank", "resume_from_checkpoint", "deepspeed"),
    *("overwrite_output_dir", "disable_tqdm", "report_to", "log_level", "log_level_replica", "use_cpu", "no_cuda"),
)
"""Arguments that name places, or say where and how loudly a launch runs: they shape no step."""


def of_trainer(trainer: Any, of_engine: Mapping[str, Any] | None) -> LaunchSettings:
    """Return the training arguments, and what optimizer and schedule were made with.

    Args:
        trainer: the trainer; it may not have made its optimizer yet.
        of_engine: what DeepSpeed's configuration says; ``None`` without DeepSpeed.
    """
    given = {name: each for name, each in trainer.args.to_dict().items() if _is_compared(name)}
    return read_settings(
        {**given, **(of_engine or {})},
        [] if trainer.optimizer is None else [trainer.optimizer],
        [] if trainer.lr_scheduler is None else [trainer.lr_scheduler],
        [trainer.model],
        names=_NAMES,
        is_fixed=of_engine is None,
    )


def _is_compared(name: str) -> bool:
    return name not in (*_OF_OPTIMIZER, *_OF_LAUNCH) and not name.startswith(("hub_", "push_to_hub"))
