"""Augmentation that does not depend on who fetches a sample, nor on what was fetched before it."""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from resume_adapters.core.state import rng


class Epochs(Protocol):
    """Says which epoch is under way, in a loader's workers too; the samplers of this package do."""

    seed: int

    @property
    def epoch(self) -> int:
        """The epoch that is under way."""


class SeededPerSample(Dataset[Any]):
    """Makes the random numbers that a dataset draws for a sample depend on the seed, the epoch and the sample alone.

    Augmentation is then the same on any number of ranks and workers, and whatever was fetched before. The generators of
    python, numpy and torch are seeded around each ``__getitem__`` and put back after it.

    Args:
        data: a map-style dataset.
        sampler: says which epoch it is.
        seed: seed of the run; that of the sampler by default.
    """

    def __init__(self, data: Dataset[Any], sampler: Epochs, seed: int | None = None) -> None:
        self.data = data
        self.sampler = sampler
        self.seed = sampler.seed if seed is None else seed

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]  # a map-style dataset has a length

    def __getitem__(self, index: int) -> Any:
        before = rng.capture_cpu()
        try:
            seeds = np.random.SeedSequence([self.seed, self.sampler.epoch, index]).generate_state(3).tolist()
            random.seed(seeds[0])
            np.random.seed(seeds[1])
            torch.manual_seed(seeds[2])
            return self.data[index]
        finally:
            rng.restore_cpu(before)
