"""What steps a training beside what its framework saves.

A subclass of an optimizer or a schedule may keep attributes that the ``state_dict()`` which it inherits lacks. And
optimizers may live where no framework looks: in hooks of the gradients, one for each tensor. Those are seen as they
step, and each is known by the names of what it steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from resume_adapters.core.observed.instances import instances
from resume_adapters.core.observed.paths import is_module
from resume_adapters.core.observed.walk import has_state
from resume_adapters.core.state import keys
from resume_adapters.core.state.comparison import tensors_in
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.stateful import is_optimizer, parameters_of
from resume_adapters.core.state.untouched import HOLDING, attributes, is_a
from resume_adapters.core.state.weights import place_of

UNSAVED = "unregistered optimizers"
"""The root of the optimizers that nobody saves, and of their schedules."""

_BASE = (
    *("state", "param_groups", "defaults", "step", "zero_grad", "profile_hook_step", "optimizer"),
    *("_opt_called", "_step_count", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
    *("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused", "initialized"),
)
"""Attributes of optimizers that their state holds, or that belong to a launch: the last is of bitsandbytes."""


def registered(captured: Iterable[Any]) -> list[Any]:
    """Return the optimizers and schedules of torch among objects that are saved, with those within wrappers."""
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    waiting, found = [each for each in captured if _steps(each)], {}
    while waiting:
        each = waiting.pop(0)
        if id(each) not in found:
            found[id(each)] = each
            within = [] if is_a(each, LRScheduler) else [held for held in attributes(each).values() if _steps(held)]
            saves = is_a(each, Optimizer)  # by a state_dict() that may lack what is within
            waiting += [held for held in within if not (saves and is_a(held, Optimizer)) or is_within(held, [each])]
    return [each for each in found.values() if is_a(each, Optimizer, LRScheduler)]


def _steps(value: Any) -> bool:
    held = attributes(value) if not is_a(value, type) else {}
    return "param_groups" in held or hasattr(type(value), "param_groups") or hasattr(type(value), "get_last_lr")


def beside_state(steppers: Sequence[Any], saved: Container[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return optimizers and schedules by the names of roots, and the paths of what their ``state_dict()`` holds.

    Their state, too, where they save it otherwise: rounded, or not at all.

    Args:
        steppers: what :func:`registered` returned.
        saved: the roots of what a checkpoint has observed.
    """
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    roots: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    for kind, name in ((Optimizer, "optimizer"), (LRScheduler, "schedule")):
        alike = [(each, held) for each in steppers if is_a(each, kind) and (held := _in_state(each)) is not None]
        for index, (each, held) in enumerate(alike):
            root = f"{name} {index}" if index else name
            roots[root] = each
            ignored |= {f"{root}.{attribute}": "its state_dict() holds it" for attribute in held}
    schedules = [each for each in steppers if is_a(each, LRScheduler)]
    rates = {f"rates of schedule {index}": _rates(each) for index, each in enumerate(schedules)}
    roots |= {name: held for name, held in rates.items() if held}
    with_state = {id(each.state): each for each in steppers if is_a(each, Optimizer) and hasattr(each, "state")}
    for index, each in enumerate(with_state.values()):
        root = f"state of optimizer {index}"
        roots[root] = _lost(each, is_saved=root in saved)
    return roots, ignored


def _rates(schedule: Any) -> list[Any]:
    """Return the functions and methods of a schedule, and of those that it steps: its state has those of objects."""
    held = attributes(schedule)
    own = [each for each in held.get("lr_lambdas", ()) if is_a(each, *HOLDING)]
    return [*own, *(each for inner in held.get("_schedulers", ()) for each in _rates(inner))]


def _lost(optimizer: Any, *, is_saved: bool) -> list[dict[str, Any]]:
    """Return what an optimizer keeps for each of its parameters, unless its ``state_dict()`` has that as it is."""
    if is_saved:
        return [optimizer.state.setdefault(each, {}) for each in parameters_of(optimizer)]
    is_whole = _is_saved(lambda: optimizer.state, [optimizer])
    return [] if is_whole else [optimizer.state.get(each, {}) for each in parameters_of(optimizer)]


def _in_state(stepper: Any) -> Iterable[str] | None:
    """Return the attributes of an optimizer or a schedule that its state holds; ``None``: all of them."""
    import torch
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.optimizer import Optimizer

    kind = type(stepper)
    if kind.__module__.startswith("torch.optim"):
        return None
    inherits = kind.state_dict in (LRScheduler.state_dict, Optimizer.state_dict)
    if inherits and is_a(stepper, LRScheduler):
        return None
    own = () if inherits else stepper.state_dict()
    plain = () if is_a(stepper, LRScheduler) else attributes(torch.optim.Optimizer([torch.zeros(1)], {}))
    return {*own, *plain, *_BASE}


def is_within(optimizer: Any, saved: Iterable[Any]) -> bool:
    """Return whether the state of an optimizer is in that of others, as that of one that a wrapper steps."""
    saved = [each for each in saved if is_optimizer(each)]
    groups = {id(group) for each in saved for group in each.param_groups}
    if not any(id(group) in groups for group in optimizer.param_groups):
        return False
    return _is_saved(optimizer.state_dict, saved)


def _is_saved(state: Callable[[], Mapping[Any, Any]], saved: Iterable[Any]) -> bool:
    """Return whether the tensors of a state are as they are in the ``state_dict()`` of these."""
    try:
        held = [*tensors_in(dict(state()))]
        tensors = [value for each in saved if held for value in tensors_in(each.state_dict())]
    except Exception:  # of any kind: one within an engine, whose files have its state, steps other tensors by now
        return True
    places = {None, *map(place_of, tensors)}
    others = [each for each in held if place_of(each) not in places]
    known = {value_digest(each) for each in tensors if others}
    return all(value_digest(each) in known for each in others)


def unsaved(
    seen: Sequence[Any], steppers: Sequence[Any], captured: Iterable[Any], saved: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the optimizers that train a saved model and that nobody saves, with their schedules, by name.

    Args:
        seen: the optimizers that have stepped.
        steppers: what :func:`registered` returned.
        captured: the objects that are saved, modules among them.
        saved: the names that a checkpoint has, of which some may not have stepped in this launch.

    Returns:
        Them, and why others cannot be saved.
    """
    from torch.optim.optimizer import Optimizer

    saved, known = set(saved), {id(each) for each in steppers}
    found = {id(each): each for each in [*seen, *(instances(Optimizer) if saved else [])] if id(each) not in known}
    others = [each for each in found.values() if not is_within(each, steppers)] if found else []
    if not others:
        return {}, []
    modules = [dict(each.named_parameters()) for each in captured if is_module(each)]
    names = {id(tensor): name for name, tensor in keys.of_modules(modules).items()}
    by_name: dict[str, list[Any]] = {}
    stepped = {id(each) for each in seen}
    for each in others:
        name = _named(each, names)
        if name and (id(each) in stepped or name in saved):
            by_name.setdefault(name, []).append(each)
    schedules = stepping([each for alike in by_name.values() for each in alike])
    for name, alike in list(by_name.items()):
        for each in [each for each in schedules if each.optimizer is alike[0]]:
            by_name.setdefault(f"{type(each).__name__} of {name}", []).append(each)
    unclear = [
        f"{len(alike)} optimizers or schedules, each a {name}, are not registered and cannot be told apart: after a "
        "resume they start over. Pass each as a part"
        for name, alike in by_name.items()
        if len(alike) > 1
    ]
    return {name: alike[0] for name, alike in by_name.items() if len(alike) == 1}, unclear


def _named(optimizer: Any, names: Mapping[int, str]) -> str:
    """Return the name of an optimizer by what it steps; nothing where that belongs to no model."""
    stepped = [names.get(id(each), "") for each in parameters_of(optimizer)]
    if not stepped or not stepped[0]:
        return ""
    more = f" and {len(stepped) - 1} more" if len(stepped) > 1 else ""
    return f"{type(optimizer).__name__} of {stepped[0]}{more}"


def stepping(optimizers: Sequence[Any]) -> list[Any]:
    """Return the schedules of torch, and of libraries such as timm, that hold one of these optimizers.

    No optimizer knows its schedules, so they are looked for among all objects of the process.
    """
    holders = gc.get_referrers(*optimizers) if optimizers else []
    held = [each for each in holders if type(each) is dict]
    owners = [*holders, *(gc.get_referrers(*held) if held else [])]
    return list({id(each): each for each in owners if _is_schedule(each, optimizers)}.values())


def _is_schedule(each: Any, optimizers: Sequence[Any]) -> bool:
    from torch.optim.lr_scheduler import LRScheduler

    kind = type(each)
    if issubclass(kind, LRScheduler):
        return True
    steps = callable(getattr(kind, "step", None)) or callable(getattr(kind, "step_update", None))
    held = attributes(each)
    known = ("parameters", "param_groups", "last_epoch")
    if not steps or any(hasattr(kind, name) or name in held for name in known):
        return False
    return has_state(each) and any(held.get("optimizer") is optimizer for optimizer in optimizers)
