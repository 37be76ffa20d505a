"""Objects that a script registers without a name: known by their class, and by the order of those of one class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from resume_adapters.core.log import logger
from resume_adapters.core.state.stateful import Stateful


class RegisteredObjects(Mapping[str, Stateful]):
    """Objects that were registered without names, by names.

    Each has the name of its class; where there are several of a class, they are numbered as they were registered.

    Args:
        objects: the objects. More may come.
    """

    def __init__(self, objects: Sequence[Stateful]) -> None:
        self._objects = objects
        self._names: dict[int, str] = {}

    def __getitem__(self, name: str) -> Stateful:
        return self._named()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named())

    def __len__(self) -> int:
        return len(self._objects)

    def log_order(self, saved: Mapping[str, Any]) -> None:
        """Log where the order of registration says which object gets which of the states that were saved."""
        for name in saved:
            if name.endswith(".1"):
                logger.info(
                    "The registered objects of class %s get their states in the order in which they were registered. "
                    "If that may change, give them by name: register_for_resume(..., first=..., second=...).",
                    name.removesuffix(".1"),
                )

    def _named(self) -> dict[str, Stateful]:
        for each in self._objects:
            kind = type(each).__name__
            same = sum(name.partition(".")[0] == kind for name in self._names.values())
            self._names.setdefault(id(each), f"{kind}.{same}" if same else kind)
        return {self._names[id(each)]: each for each in self._objects}
