"""The position in the data: exactly once, in the same global batches, on any topology."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resume_adapters.core.checkpoint.manifest import describe_cursor
from resume_adapters.core.dataloader.cursor import Permutation, SampleCursor, ShardProgress, assign_shards, merge


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_an_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    samples = Permutation(size, seed, epoch).at(np.arange(size))
    assert sorted(samples.tolist()) == list(range(size))


def test_an_order_of_ten_thousand_million_samples_is_asked_anywhere() -> None:
    positions = np.array([0, 10**9, 10**10 - 1])
    first, again = (Permutation(10**10, 7, 3).at(positions) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert len(set(first.tolist())) == 3 and first.max() < 10**10


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(Permutation(50, seed, epoch).at(np.arange(50)).tolist()) for seed in range(20) for epoch in range(20)
    }
    assert len(orders) == 400


@pytest.mark.parametrize("size", [4, 7, 24, 100])
def test_every_sample_is_as_likely_at_every_position(size: int) -> None:
    """A chi-squared statistic over 4,000 seeds stays within five standard deviations of what chance gives."""
    seeds = 4000
    counts = np.zeros((size, size))
    for seed in range(seeds):
        counts[np.arange(size), Permutation(size, seed, 0).at(np.arange(size))] += 1
    expected = seeds / size
    degrees = (size - 1) ** 2
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5


def test_every_permutation_is_as_likely() -> None:
    counts = Counter(tuple(Permutation(4, seed, 0).at(np.arange(4)).tolist()) for seed in range(12000))
    assert len(counts) == 24
    assert min(counts.values()) > 400 and max(counts.values()) < 600


Records = dict[int, int]


def read(shards: Records, progress: ShardProgress, readers: int, takes: list[int]) -> tuple[list[Any], ShardProgress]:
    """Let each reader take some records of its shards; return what was read and how far it got."""
    seen: list[Any] = []
    parts = [progress]
    for mine, take in zip(assign_shards(len(shards), progress, readers), takes, strict=True):
        offsets, finished = {}, set()
        for shard, skip in mine:
            count = min(take, shards[shard] - skip)
            seen += [(shard, skip + number) for number in range(count)]
            take -= count
            if skip + count == shards[shard]:
                finished.add(shard)
            elif skip + count:
                offsets[shard] = skip + count
        parts.append(ShardProgress(progress.epoch, progress.seed, offsets, frozenset(finished)))
    return seen, merge(parts)


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    layouts=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), max_size=6),
    seed=st.integers(0, 99),
)
def test_every_record_of_a_stream_is_read_once_on_any_sequence_of_layouts(
    sizes: list[int], layouts: list[list[int]], seed: int
) -> None:
    shards = dict(enumerate(sizes))
    progress = ShardProgress.start(0, seed)
    seen: list[Any] = []
    for takes in [*layouts, [10**6]]:
        progress = ShardProgress.from_tree(progress.to_tree())
        found, progress = read(shards, progress, len(takes), takes)
        seen += found
    assert sorted(seen) == [(shard, number) for shard, size in shards.items() for number in range(size)]
    assert progress.finished == set(shards)


def test_progress_of_different_epochs_is_not_merged() -> None:
    with pytest.raises(ValueError, match="expected progress of one epoch"):
        merge([ShardProgress.start(0, 1), ShardProgress.start(1, 1)])


def test_a_cursor_is_data() -> None:
    assert SampleCursor(**SampleCursor(2, 7, 30).to_tree()) == SampleCursor(2, 7, 30)


TOLD = {
    "epoch 3, 51,200 of 100,000 samples, order 7f3a90c1": {
        "epoch": 3,
        "micro_batches": 8,
        "samples": 51200,
        "of": 100000,
        "order": "7f3a90c1",
    },
    "epoch 1, 64 samples": {"epoch": 1, "micro_batches": 2, "samples": 64, "of": None, "order": None},
    "epoch 2, 8 batches": {"epoch": 2, "micro_batches": 8},
    "": {},
}


@pytest.mark.parametrize("words", TOLD)
def test_a_cursor_is_told_in_words(words: str) -> None:
    assert describe_cursor(TOLD[words]) == words


def test_a_cursor_that_somebody_forged_is_told_as_far_as_it_counts() -> None:
    for forged in ({"samples": "x"}, {"epoch": [], "samples": {}}, {"micro_batches": None}):
        assert describe_cursor(forged) == ""
    assert describe_cursor({"epoch": 1, "samples": 64, "of": "x"}) == "epoch 1, 64 samples"
