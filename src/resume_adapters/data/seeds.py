"""Augmentation that depends neither on the rank or worker that fetches a sample, nor on earlier samples."""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from resume_adapters.core.state import rng


class Epochs(Protocol):
    """Knows the running epoch, also in a loader's workers. The samplers of this package do."""

    seed: int

    @property
    def epoch(self) -> int:
        """The running epoch."""


class SeededPerSample(Dataset[Any]):
    """Seeds the random numbers that a dataset draws for a sample with the seed, the epoch and the sample's index only.

    Augmentation is then the same on any number of ranks and workers, and after any number of earlier samples. The
    generators of python, numpy and torch are seeded before each ``__getitem__`` and restored after it.

    Args:
        data: a map-style dataset.
        sampler: knows the running epoch.
        seed: seed of the run; the sampler's by default.
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
