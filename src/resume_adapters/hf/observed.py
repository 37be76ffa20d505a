"""Where undeclared state is looked for in a Trainer, and what is passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl

from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.session.settings import LaunchSettings, read_settings
from resume_adapters.core.state.stateful import is_stateful, parameters_of

IGNORED = {
    "*.architectures": "save_pretrained() writes it into the configuration of a model",
    "model.config.dtype": "likewise",
    "trainer.current_flos": "the trainer adds it to state.total_flos when it saves",
    "trainer.current_gradient_accumulation_steps": "set before each step",
    "trainer._mixed_mesh_grads": "found out at each step",
    "trainer._tr_loss": "among this adapter's counters, as the next two",
    "trainer._total_loss_scalar": "a counter",
    "trainer._globalstep_last_logged": "a counter",
    "trainer.gather_function": "set at each evaluation",
}
"""What is passed over, each with the reason; ``tests/hf/test_observed.py`` shows that each entry is needed."""

FOREIGN = (
    "accelerate.",
    "datasets.",
    "pyarrow.",
    "tokenizers.",
    "transformers.tokenization",
)
"""Objects of these modules are not entered: others capture them, or they hold no state of the training."""


def subjects(trainer: Any) -> Subjects:
    """Return the trainer and what hangs on it."""
    callbacks = [each for each in trainer.callback_handler.callbacks if not _is_saved(each)]
    names = [type(each).__name__ for each in callbacks]
    roots = {
        "model": trainer.model,
        "trainer": trainer,
        **{f"callbacks.{name}.{names[:at].count(name)}": callbacks[at] for at, name in enumerate(names)},
    }
    captured = [
        *(trainer.model, trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, trainer.accelerator),
        *(trainer.state, trainer.control, trainer.callback_handler, *trainer.callback_handler.callbacks),
        trainer.eval_dataset,  # what changes on it is captured where it is read
    ]
    # The optimizer is made after the first look.
    trained = [] if trainer.optimizer is None else parameters_of(trainer.optimizer)
    return Subjects(
        roots=roots,
        captured=captured,
        ignored=IGNORED,
        foreign=FOREIGN,
        trained=trained,
        stepped=[] if trainer.is_deepspeed_enabled else trained,  # the engine keeps buffers for gradients there
    )


def _is_saved(callback: Any) -> bool:
    """Return whether the trainer or this package saves a callback's state by its own methods."""
    if isinstance(callback, ExportableState | TrainerControl) or is_stateful(callback):
        return True
    return type(callback).__module__.startswith(("transformers.", "resume_adapters."))  # bars, writers, nothing else


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
