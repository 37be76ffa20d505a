"""Where undeclared state is looked for in a Lightning trainer, and what is passed over."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from resume_adapters.core.state.census import Subjects
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.epoch_sums import torchmetrics

IGNORED = {
    "*.trainer": "the module and the datamodule know their trainer",
}
"""What is passed over, each with the reason; ``tests/lightning/test_observed.py`` shows that each entry is needed."""

FOREIGN = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
"""Objects of these modules are not entered: the loops, connectors and loggers, which the adapter saves or knows."""


def subjects(trainer: Any, captured: Iterable[Any]) -> Subjects:
    """Return the module, its callbacks and the datamodule.

    Args:
        trainer: the trainer.
        captured: what is saved beside Lightning's own file.
    """
    module, data = trainer.lightning_module, trainer.datamodule
    callbacks = [each for each in trainer.callbacks if not _is_saved(each)]
    names = [type(each).__name__ for each in callbacks]
    metrics = [metric for _, metric in torchmetrics(module)]
    roots = {
        "module": module,
        **{f"callbacks.{name}.{names[:at].count(name)}": callbacks[at] for at, name in enumerate(names)},
    }
    if data is not None and not _saves_itself(data):
        roots["datamodule"] = data
    return Subjects(
        roots=roots,
        captured=[module, trainer, data, *trainer.optimizers, *_schedulers(trainer), *metrics, *captured],
        ignored={**_of_lightning(), **IGNORED},
        foreign=FOREIGN,
    )


def saved(trainer: Any) -> dict[str, Any]:
    """Return what :func:`subjects` leaves out, for its own methods save its state: callbacks, and the datamodule."""
    found = {each.state_key: each for each in trainer.callbacks if _is_saved(each)}
    data = trainer.datamodule
    return found if data is None or not _saves_itself(data) else {**found, "datamodule": data}


def _saves_itself(data: Any) -> bool:
    return type(data).state_dict is not pl.LightningDataModule.state_dict


@functools.cache
def _of_lightning() -> dict[str, str]:
    """Return the attributes that Lightning gives to each module, with the reason to pass over them."""
    of_module = vars(pl.LightningModule()).keys() - vars(torch.nn.Module()).keys()
    return {f"*.{name}": "Lightning's own: it sets them as it runs" for name in of_module}


def _schedulers(trainer: Any) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _is_saved(callback: Any) -> bool:
    """Return whether Lightning saves a callback's state, or it is Lightning's own, which save what they need."""
    kind = type(callback)
    plain = (pl.Callback.state_dict, pl.Callback.on_save_checkpoint)
    ours = kind.__module__.startswith((*FOREIGN, "resume_adapters."))
    return ours or (kind.state_dict, kind.on_save_checkpoint) != plain
