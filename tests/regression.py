"""What the jobs with a loop of their own share: the data of a small regression, and the loop without the package."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from training import CONFIG

FEATURES = 8


def item(index: int) -> dict[str, torch.Tensor]:
    x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
    y = x.sum().sin()
    if CONFIG["augment"]:  # by each of the three generators
        x = x + 0.1 * torch.randn(FEATURES)
        x[random.randrange(FEATURES)] = 0.0
        x[np.random.randint(FEATURES)] += 0.5
    return {"x": x, "y": y}


class Mapped(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return item(index)


class Bare:
    """The loop's surface without the package: saves at the same moments, and never resumes.

    Args:
        has_stepped: returns whether an optimizer step was taken since the step that it is given.
        save: saves at a step.
    """

    def __init__(self, has_stepped: Callable[[int], bool], save: Callable[[int], object]) -> None:
        self.global_step = 0
        self.memory: dict[str, Any] = {}
        self._has_stepped = has_stepped
        self._save = save
        self._due = False

    def epochs(self, count: int, max_steps: int | None = None) -> Iterator[int]:
        for epoch in range(count):
            yield epoch
            self._due = self._due or CONFIG["save_every"] is None
            self._save_if_due()
        self._due = bool(self.global_step % (CONFIG["save_every"] or 1))
        self._save_if_due()

    def batches(self, loader: Any) -> Iterator[Any]:
        for batch in loader:
            yield batch
            self._save_if_due()

    def enumerate(self, loader: Any) -> Iterator[tuple[int, Any]]:
        return enumerate(self.batches(loader))

    def step(self, **_: Any) -> None:
        if self._has_stepped(self.global_step):
            self.global_step += 1
            self._due = CONFIG["save_every"] is not None and self.global_step % CONFIG["save_every"] == 0

    def _save_if_due(self) -> None:
        if self._due:
            self._due = False
            self._save(self.global_step)
