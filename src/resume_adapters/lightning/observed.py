"""Where undeclared state is looked for in a Lightning trainer, and what is passed over."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.session.numbered import Training
from resume_adapters.core.session.settings import LaunchSettings, of_random_state, read_settings, texts
from resume_adapters.core.state import encoding
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.loading import copied
from resume_adapters.lightning.compat import pl
from resume_adapters.lightning.logged_values import torchmetrics

IGNORED = {
    "*.trainer": "the module and the datamodule know their trainer",
}
"""What is passed over, each with the reason; ``tests/lightning/test_observed.py`` shows that each entry is needed."""

FOREIGN = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
"""Objects of these modules are not entered: the loops, connectors and loggers, which the adapter saves or knows."""

_OURS = "resume_adapters."


def subjects(trainer: Any, captured: Iterable[Any]) -> Subjects:
    """Return the module, its callbacks, the datamodule, the hyperparameters of both, and the trainer's settings.

    Args:
        captured: what is saved beside Lightning's own file.
    """
    module, data = trainer.lightning_module, trainer.datamodule
    callbacks = [each for each in trainer.callbacks if not _is_saved(each) or _adds_to_lightning(each)]
    names = [type(each).__name__ for each in callbacks]
    metrics = [metric for _, metric in torchmetrics(module)]
    by_name = {f"callbacks.{name}.{names[:at].count(name)}": callbacks[at] for at, name in enumerate(names)}
    roots = {"module": module, **_hyperparameters("module", module), **by_name, "trainer": trainer}
    if data is not None and not _saves_itself(data):
        roots |= {"datamodule": data, **_hyperparameters("datamodule", data)}
    return Subjects(
        roots=roots,
        captured=[module, trainer, data, *trainer.optimizers, *_schedulers(trainer), *metrics, *captured],
        ignored={**_of_lightning(), **_in_state_dicts(by_name), **_but_settings(trainer), **IGNORED},
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


def _hyperparameters(name: str, owner: Any) -> dict[str, Any]:
    """Return what ``save_hyperparameters()`` has kept: Lightning saves it, and does not load it into a module."""
    found = vars(owner).get("_hparams")
    return {f"{name}.hparams": found} if isinstance(found, dict) else {}


def _in_state_dicts(callbacks: Mapping[str, Any]) -> dict[str, str]:
    """Return the paths of what Lightning's part of a callback has, with the reason to pass over it."""
    found = {f"{root}.{name}" for root, each in callbacks.items() if _is_saved(each) for name in _own_names(type(each))}  # type: ignore[arg-type]  # a class is hashable
    return dict.fromkeys(found, "Lightning's own: its state_dict() has what must be kept of it")


@functools.cache
def _own_names(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the methods of Lightning's classes use in a callback of this class."""
    ours = [each for each in kind.__mro__ if each.__module__.startswith(FOREIGN)]
    members = [inspect.unwrap(getattr(each, "fget", None) or each) for base in ours for each in vars(base).values()]
    return frozenset(name for each in members if inspect.isfunction(each) for name in each.__code__.co_names)


def _but_settings(trainer: Any) -> dict[str, str]:
    """Return the paths of all of a trainer but the numbers and words that it was given: a callback may change those."""
    given = {name: vars(trainer)[name] for name in _arguments() if name in vars(trainer)}
    settings = {name for name, value in given.items() if value is None or isinstance(value, int | float | str)}
    others = vars(trainer).keys() - settings
    return {f"trainer.{name}": "Lightning's own: the loops and connectors, and what they set" for name in others}


@functools.cache
def _arguments() -> frozenset[str]:
    return frozenset(inspect.signature(pl.Trainer.__init__).parameters)


def _schedulers(trainer: Any) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _adds_to_lightning(callback: Any) -> bool:
    """Return whether a callback of the user inherits how its state is saved, where nothing is known of what it adds."""
    kind = type(callback)
    inherited = (kind.state_dict, kind.on_save_checkpoint)
    return not kind.__module__.startswith((*FOREIGN, _OURS)) and all(
        each.__module__.startswith(FOREIGN) for each in inherited
    )


def _is_saved(callback: Any) -> bool:
    """Return whether Lightning saves a callback's state, or it is Lightning's own, which save what they need."""
    kind = type(callback)
    plain = (pl.Callback.state_dict, pl.Callback.on_save_checkpoint)
    ours = kind.__module__.startswith((*FOREIGN, _OURS))
    return ours or (kind.state_dict, kind.on_save_checkpoint) != plain


def not_taken_back(trainer: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield in words which callbacks have another state than they were given to load, even after they load it again.

    A hook of the start may have set it again. And one may keep what it was given for a moment that never comes, as one
    that asks before the load whether anything is resumed. What is not data, and so cannot be compared, is left out.

    Args:
        trainer: the trainer, which has loaded, and has called the hooks of the start.
        saved: the states of the callbacks, by their keys.
    """
    for callback in trainer.callbacks:
        state = saved.get(callback.state_key)
        if not state or type(callback).state_dict.__module__.startswith(FOREIGN):
            continue
        if _differs(callback, state):
            callback.load_state_dict(copied(state))
            if (difference := _differs(callback, state)) is not None:
                yield f"{type(callback).__name__} ({difference})"


def _differs(callback: Any, state: Any) -> str | None:
    live = callback.state_dict()
    return None if None in map(encoding.digest_of, (state, live)) else first_difference(state, live)


_LENGTHS = ("max_epochs", "min_epochs", "max_steps", "min_steps")

_FLAGS = (
    *_LENGTHS,
    *("precision", "accumulate_grad_batches"),
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


def training(trainer: Any) -> Training:
    """Return what a training was given, as far as it is known before optimizers are made."""
    module = trainer.lightning_module
    arguments = {**of_random_state(), **of_trainer(trainer, None).arguments}
    lengths = {name: arguments.pop(name) for name in _LENGTHS if name in arguments}
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    spread = {name: vars(value) for name, value in own.items() if isinstance(value, argparse.Namespace)}
    inner = {f"{name}.{key}": each for name, values in spread.items() for key, each in values.items()}
    return Training(settings={**arguments, **texts({**own, **inner})}, lengths=lengths)
