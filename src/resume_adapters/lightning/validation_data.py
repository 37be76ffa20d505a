"""What changes on the data of a validation as they are read."""

from __future__ import annotations

from typing import Any

from resume_adapters.core.dataloader.evaluated import EvaluatedData, datasets_of
from resume_adapters.core.observed.loaders import content_of
from resume_adapters.lightning.loops import Loops


class ValidationData:
    """The datasets, samplers and generators of the validation loaders.

    Args:
        loops: the trainer's loops.
    """

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._data = EvaluatedData()
        self.look = self._data.look

    @property
    def missing(self) -> dict[str, str]:
        """What has changed and is not captured: paths, with the names of the types."""
        return self._data.missing

    def watch(self) -> None:
        """Compare from now on, where the loaders are made and were not watched. Call it before they are read."""
        trained = (
            [data for each in self._loops.loaders for data in datasets_of(each)] if self._loops.have_loaders else []
        )
        for number, each in enumerate(self._loops.validation_loaders()):
            parts = content_of(getattr(each, "dataset", None), getattr(each, "collate_fn", None))
            parts |= {name: getattr(each, name, None) for name in ("sampler", "batch_sampler")}
            parts |= {"loader": {"generator": getattr(each, "generator", None)}}
            self._data.watch(_NAME.format(number), each, parts, trained)

    def capture(self) -> list[list[Any]]:
        """Return what is known to change, of each loader."""
        return list(self._data.capture().values())

    def restore(self, saved: list[list[Any]]) -> None:
        """Restore what :meth:`capture` returned."""
        if any(saved):
            self._data.restore({_NAME.format(number): each for number, each in enumerate(saved)})
            self._loops.make_validation_loaders()
            self.watch()


_NAME = "val_dataloaders[{}]"
