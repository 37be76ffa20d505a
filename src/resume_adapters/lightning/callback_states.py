"""Callbacks that do not take back what they have saved, though Lightning has given it to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from resume_adapters.core.state import encoding
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.errors import NotSerialisable
from resume_adapters.lightning.observed import FOREIGN


def not_taken_back(trainer: Any, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield in words which callbacks say after loading that their state is another one than they were given.

    One may keep what it was given for a moment that never comes, as one that asks before the load whether anything is
    resumed. What is not data, and so cannot be compared, is left out.

    Args:
        trainer: the trainer, which has loaded.
        saved: the states of the callbacks, by their keys.
    """
    for callback in trainer.callbacks:
        state = saved.get(callback.state_key)
        if not state or type(callback).state_dict.__module__.startswith(FOREIGN):
            continue
        live = callback.state_dict()
        if _is_data(state) and _is_data(live) and (difference := first_difference(state, live)) is not None:
            yield f"{type(callback).__name__} ({difference})"


def _is_data(state: Any) -> bool:
    try:
        encoding.digest_of(state)
    except NotSerialisable:
        return False
    return True
