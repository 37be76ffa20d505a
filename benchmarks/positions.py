"""Time to reach a position in the data, against ``skip_first_batches`` of Accelerate, which the Trainer calls too."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Any

from accelerate import skip_first_batches
from torch.utils.data import DataLoader, RandomSampler

from benchmarks import figure
from benchmarks.figure import Figure
from resume_adapters.core.dataloader.cursor import SampleCursor
from resume_adapters.core.dataloader.tracked import track
from resume_adapters.data import ElasticSampler

GOAL_SEEK_MILLISECONDS = 1.0
GOAL_SEEK_MEGABYTES = 1.0
GOAL_SPEEDUP = 20.0
GOAL_OVERHEAD = 1.0
_SAMPLES = 1_000_000
_BATCH = 8
_FETCHES = 5_000


def measure(repeats: int) -> list[Figure]:
    """Return what seeking, the first batch after a resume, each index and each fetched batch cost."""
    return [*_seeking(repeats), _first_batch(repeats), _indices(repeats), _fetches(repeats)]


def _seeking(repeats: int) -> list[Figure]:
    times, sizes = [], []
    for _ in range(repeats):
        begun = time.perf_counter()
        _seek()
        times.append((time.perf_counter() - begun) * 1e3)
        tracemalloc.start()
        _seek()
        sizes.append(tracemalloc.get_traced_memory()[1] / 1e6)
        tracemalloc.stop()
    what = "seek to sample 10^9 of 10^10"
    return [
        figure.of(what, times, "ms", GOAL_SEEK_MILLISECONDS, detail="a new sampler, its position, its first sample"),
        figure.of(f"memory to {what}", sizes, "MB", GOAL_SEEK_MEGABYTES, detail="most that python and numpy held"),
    ]


def _seek() -> None:
    sampler = ElasticSampler(10**10, seed=1)
    sampler.seek(SampleCursor(0, 1, 10**9))
    next(iter(sampler))


def _first_batch(repeats: int) -> Figure:
    done = _SAMPLES * 9 // 10 // _BATCH
    position = _position(done)
    ratios, own = [], []
    for _ in range(repeats):
        bare: Any = DataLoader(_samples(_SAMPLES), batch_size=_BATCH, shuffle=True)
        begun = time.perf_counter()
        next(iter(skip_first_batches(bare, done)))
        middle = time.perf_counter()
        resumed = _elastic()
        track(resumed).restore(position)
        next(iter(resumed))
        own.append(time.perf_counter() - middle)
        ratios.append((middle - begun) / own[-1])
    return figure.of(
        "skip_first_batches of Accelerate, against this package's resume",
        ratios,
        "times as long",
        GOAL_SPEEDUP,
        at_most=False,
        detail=f"first batch at 90% of {_SAMPLES:,} samples; {figure.median(own) * 1e3:.3g} ms here",
    )


def _elastic() -> Any:
    return DataLoader(_samples(_SAMPLES), batch_size=_BATCH, sampler=ElasticSampler(_SAMPLES, seed=1))


def _samples(count: int) -> Any:
    """Return a dataset of so many integers."""
    return range(count)


def _position(done: int) -> Any:
    """Return the position of a loader after so many consumed batches."""
    loader = _elastic()
    tracked = track(loader)
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    return tracked.position(done)


def _indices(repeats: int) -> Figure:
    ratios, own = [], []
    for _ in range(repeats):
        samplers = [ElasticSampler(_SAMPLES, seed=1), RandomSampler(range(_SAMPLES))]
        taken = {}
        for sampler in random.sample(samplers, 2):  # take turns at being first
            begun = time.process_time()
            for _ in sampler:
                pass
            taken[type(sampler)] = time.process_time() - begun
        own.append(taken[ElasticSampler])
        ratios.append(own[-1] / taken[RandomSampler])
    return figure.of(
        "ElasticSampler against torch's RandomSampler, for each index",
        ratios,
        "times as long",
        GOAL_OVERHEAD,
        detail=f"a pass over {_SAMPLES:,} indices; {figure.median(own) / _SAMPLES * 1e9:.3g} ns here",
    )


def _fetches(repeats: int) -> Figure:
    """Return what tracking adds to each batch that a loader without workers fetches."""
    added, bare = [], []
    for _ in range(repeats):
        taken = {}
        for is_tracked in random.sample([False, True], 2):
            loader: Any = DataLoader(_samples(_FETCHES * _BATCH), _BATCH)
            if is_tracked:
                track(loader)
            begun = time.process_time()
            for _ in loader:
                pass
            taken[is_tracked] = (time.process_time() - begun) / _FETCHES * 1e6
        bare.append(taken[False])
        added.append(taken[True] - taken[False])
    return figure.of(
        "processor time that tracking adds per fetched batch, without workers",
        added,
        "us",
        detail=f"a pass over {_FETCHES:,} batches; a bare one takes {figure.median(bare):.3g} us",
    )
