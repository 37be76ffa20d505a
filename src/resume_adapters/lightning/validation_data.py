"""What changes on the data of a validation as they are read: the generator of a dataset or of a sampler, a counter.

A checkpoint is never saved in the middle of a validation, so what is there between two steps is what the next one
begins with.
"""

from __future__ import annotations

import operator
from typing import Any

from resume_adapters.core.dataloader.attributes import LoaderAttributes, content_of
from resume_adapters.lightning.loops import Loops


class ValidationData:
    """The datasets, samplers and generators of the validation loaders.

    Args:
        loops: the trainer's loops.
    """

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._loaders: list[Any] = []
        self._attributes: list[LoaderAttributes] = []

    @property
    def missing(self) -> dict[str, str]:
        """What has changed and is not captured: paths, with the names of the types."""
        return {path: kind for each in self._attributes for path, kind in each.missing.items()}

    def watch(self) -> None:
        """Compare from now on, where the loaders are made and were not watched. Call it before they are read."""
        loaders = self._loops.validation_loaders()
        if len(loaders) == len(self._loaders) and all(map(operator.is_, loaders, self._loaders)):
            return
        trained = [held for each in self._loops.loaders for held in _inner(each)] if self._loops.have_loaders else []
        self._loaders = loaders
        self._attributes = [
            LoaderAttributes(_content(each, number, trained), without=trained) for number, each in enumerate(loaders)
        ]

    def look(self) -> None:
        """Find what the first few validations have changed. Call it after each."""
        for each in self._attributes:
            each.look_early("fetch")

    def capture(self) -> list[list[Any]]:
        """Return what is known to change, of each loader."""
        return [each.capture() for each in self._attributes]

    def restore(self, saved: list[list[Any]]) -> None:
        """Restore what :meth:`capture` returned."""
        if any(saved):
            self._loops.make_validation_loaders()
            self.watch()
            for each, state in zip(self._attributes, saved, strict=False):
                each.restore(state)


def _content(loader: Any, number: int, trained: list[Any]) -> dict[str, Any]:
    """Return what a loader reads with, by name, without what the training reads with, too."""
    parts = content_of(getattr(loader, "dataset", None), getattr(loader, "collate_fn", None))
    parts |= {name: getattr(loader, name, None) for name in ("sampler", "batch_sampler")}
    parts |= {"loader": {"generator": getattr(loader, "generator", None)}}
    shared = {id(each) for each in trained}
    found = {name: each for name, each in parts.items() if each is not None and id(each) not in shared}
    return {f"val_dataloaders[{number}].{name}": each for name, each in found.items()}


def _inner(loader: Any) -> list[Any]:
    """Return the dataset of a training loader, with those that it holds one another, as a ``Subset`` does."""
    found: list[Any] = []
    each = loader
    while (each := getattr(each, "dataset", None)) is not None and not any(each is other for other in found):
        found.append(each)
    return found
