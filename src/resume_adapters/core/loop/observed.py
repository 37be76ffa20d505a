"""Where undeclared state is looked for in a hand-written loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from resume_adapters.core.loop.objects import instances
from resume_adapters.core.state.census import Subjects


def subjects(models: Sequence[Any], optimizers: Iterable[Any], captured: Iterable[Any], **options: Any) -> Subjects:
    """Return the models, and the schedulers of their optimizers that nobody captures.

    Args:
        models: what is trained, within torch.compile or an engine or not.
        optimizers: what trains them.
        captured: what is saved by others, beside the models.
        options: further attributes of the subjects.
    """
    held = [*captured]
    models = [_unwrapped(model) for model in models]
    named = {f"model {index}" if index else "model": model for index, model in enumerate(models)}
    return Subjects(
        roots={**named, "schedulers": _schedulers(list(optimizers), held)}, captured=[*models, *held], **options
    )


def _unwrapped(model: Any) -> Any:
    inner = getattr(model, "_orig_mod", None)  # torch.compile
    if inner is None and hasattr(model, "backward"):  # an engine: it is called in the place of its model
        inner = model.module
    return model if inner is None else _unwrapped(inner)


def _schedulers(optimizers: Sequence[Any], captured: Sequence[Any]) -> dict[str, Any]:
    """Return the schedulers that step these optimizers and are not captured, by class and number of the optimizer.

    No optimizer knows its schedulers, so they are looked for among all objects of the process. Two of one class that
    step the same optimizer cannot be told apart in the next launch: they are left out.
    """
    from torch.optim.lr_scheduler import LRScheduler

    found = instances(LRScheduler)
    inner = {id(child) for each in found for child in getattr(each, "_schedulers", ())}
    known = {id(each) for each in captured}
    numbers = {id(optimizer): index for index, optimizer in enumerate(optimizers)}
    named: dict[str, list[Any]] = {}
    for each in found:
        number = numbers.get(id(getattr(each, "optimizer", None)))
        if number is not None and id(each) not in inner | known:
            named.setdefault(f"{type(each).__name__} of optimizer {number}", []).append(each)
    return {name: alike[0] for name, alike in named.items() if len(alike) == 1}
