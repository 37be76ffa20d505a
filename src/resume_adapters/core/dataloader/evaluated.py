"""What changes on the data of an evaluation as they are read: the generator of a dataset or of a sampler, a counter.

A checkpoint is never saved in the middle of an evaluation, so what is there between two steps is what the next one
begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resume_adapters.core.observed.code import generators_of
from resume_adapters.core.observed.loaders import LoaderAttributes


class EvaluatedData:
    """The data of the loaders that evaluations read, by the name of the loader."""

    def __init__(self) -> None:
        self._read: dict[str, Any] = {}
        self._attributes: dict[str, LoaderAttributes] = {}
        self._saved: dict[str, list[Any]] = {}

    @property
    def missing(self) -> dict[str, str]:
        """What has changed and is not captured: paths, with the names of the types."""
        return {path: kind for each in self._attributes.values() for path, kind in each.missing.items()}

    def watch(self, name: str, read: Any, parts: Mapping[str, Any], trained: Sequence[Any]) -> None:
        """Restore the data of a loader, if that is still to be done, and compare them from now on.

        Call it before the loader is read.

        Args:
            read: what is read; as long as it is the same object, it stays watched as it is.
            parts: what it is read with, by name.
            trained: what the training reads with, too, which is captured there.
        """
        if self._read.get(name) is not read:
            shared = {id(each) for each in trained}
            found = {key: each for key, each in parts.items() if each is not None and id(each) not in shared}
            roots = {f"{name}.{key}": each for key, each in found.items()}
            without = [*trained, *generators_of(trained).values()]
            self._read[name], self._attributes[name] = read, LoaderAttributes(roots, without=without)
        if name in self._saved:
            self._attributes[name].restore(self._saved.pop(name))

    def look(self) -> None:
        """Find what the first few evaluations have changed. Call it after each."""
        for each in self._attributes.values():
            each.look_early("fetch")

    def capture(self) -> dict[str, list[Any]]:
        """Return what is known to change, of each loader."""
        return {**self._saved, **{name: each.capture() for name, each in self._attributes.items()}}

    def restore(self, saved: Mapping[str, list[Any]]) -> None:
        """Restore what :meth:`capture` returned, of each loader when it is watched."""
        self._saved = {name: state for name, state in saved.items() if state}


def datasets_of(loader: Any) -> list[Any]:
    """Return the dataset of a loader, with those that it holds one another, as a ``Subset`` does."""
    found: list[Any] = []
    each = loader
    while (each := getattr(each, "dataset", None)) is not None and not any(each is other for other in found):
        found.append(each)
    return found
