"""Where undeclared state is looked for in a hand-written loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resume_adapters.core.log import logger
from resume_adapters.core.observed.optimizers import stepping
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.state.encoding import digest_of
from resume_adapters.core.state.stateful import parameters_of, uncompiled
from resume_adapters.core.state.untouched import attributes, container, items

_MOVING = {
    *("last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "_schedulers"),
    *("best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"),
}
"""What changes in the state of torch's schedulers as they step."""


def subjects(models: Sequence[Any], optimizers: Iterable[Any], captured: Iterable[Any]) -> Subjects:
    """Return the models, and the schedulers of their optimizers that nobody captures.

    Args:
        models: what is trained, within torch.compile or an engine or not.
        optimizers: what trains them.
        captured: what is saved by others, beside the models.
    """
    held, steppers = [*captured], [*optimizers]
    models = [_unwrapped(model) for model in models]
    named = {f"model {index}" if index else "model": model for index, model in enumerate(models)}
    schedulers = _schedulers(steppers, held)
    return Subjects(
        roots={**named, "schedulers": {name: alike[0] for name, alike in schedulers.items() if len(alike) == 1}},
        captured=[*models, *held],
        unnamed=[
            f"{len(alike)} schedulers, each a {name}, cannot be told apart: after a resume they start over. Pass each "
            "as a part"
            for name, alike in schedulers.items()
            if len(alike) > 1
        ],
        stepped={id(each): each for each in parameters_of(*steppers)}.values(),
    )


def _unwrapped(model: Any) -> Any:
    inner = uncompiled(model)
    if inner is model and any(each.__module__.startswith("deepspeed.") for each in type(model).__mro__):
        inner = model.module  # of an engine: it is called in the place of its model
    return model if inner is model else _unwrapped(inner)


def _schedulers(optimizers: Sequence[Any], captured: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the schedulers that step these optimizers and are not captured, by class and number of the optimizer.

    Several of one class that step the same optimizer also have what they were made with in their names.
    """
    found = stepping(optimizers)
    groups = [attributes(each).get("_schedulers") for each in found]  # of schedules that step others
    inner = {id(child) for held in groups if container(held) for child in items(held)}
    known = {id(each) for each in captured}
    numbers = {id(optimizer): index for index, optimizer in enumerate(optimizers)}
    alike: dict[str, list[Any]] = {}
    for each in found:
        number = numbers.get(id(getattr(each, "optimizer", None)))
        if number is not None and id(each) not in inner | known:
            alike.setdefault(f"{type(each).__name__} of optimizer {number}", []).append(each)
    named: dict[str, list[Any]] = {}
    for name, several in alike.items():
        for each in several:
            named.setdefault(name if len(several) == 1 else f"{name}{_settings(each)}", []).append(each)
    return named


def made_with(state: Mapping[str, Any]) -> str | None:
    """Return a digest of the state of a scheduler of torch without what changes as it steps; ``None``: it has none."""
    return digest_of({name: each for name, each in state.items() if name not in _MOVING})


def in_places(saved: Sequence[dict[str, Any]], schedulers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the saved states of schedulers in the order of those of this launch, where some have changed places."""
    before, now = [made_with(each) for each in saved], [made_with(each.state_dict()) for each in schedulers]
    if before == now or len(set(before)) < len(before) or set(before) != set(now):
        return [*saved]
    logger.info("The schedulers are in another order than when they were saved. Each is known by its settings.")
    return [saved[before.index(each)] for each in now]


def _settings(scheduler: Any) -> str:
    return f" ({made_with(scheduler.state_dict())})" if hasattr(scheduler, "last_epoch") else ""
