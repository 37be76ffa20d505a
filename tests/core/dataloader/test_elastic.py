"""The elastic samplers and streams through real loaders, on any sequence of ranks, batch sizes and workers."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from resume_adapters.core.dataloader.cursor import SampleCursor, ShardProgress, merge
from resume_adapters.core.dataloader.elastic import ElasticStreamPosition
from resume_adapters.data import ElasticBatchSampler, ElasticSampler, ElasticShards, SeededPerSample
from resume_adapters.errors import StateMismatch


def by_sampler(size: int, batch: int, rank: int, world_size: int) -> Any:
    sampler = ElasticSampler(size, seed=3, rank=rank, world_size=world_size)
    return sampler, torch.utils.data.BatchSampler(sampler, batch, drop_last=False)


def by_batches(size: int, batch: int, rank: int, world_size: int) -> Any:
    sampler = ElasticBatchSampler(size, batch, seed=3, rank=rank, world_size=world_size)
    return sampler, sampler


def steps(make: Any, size: int, batch: int, world_size: int, cursor: SampleCursor) -> list[list[list[int]]]:
    """Return, for each step that is left of the epoch, the batch of each rank."""
    ranks = []
    for rank in range(world_size):
        sampler, batches = make(size, batch, rank, world_size)
        sampler.seek(cursor)
        ranks.append(list(batches))
    assert len({len(batches) for batches in ranks}) == 1, "every rank must have as many batches"
    return [list(step) for step in zip(*ranks, strict=True)]


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(1, 200),
    layouts=st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 9)), min_size=1, max_size=5),
    make=st.sampled_from([by_sampler, by_batches]),
)
def test_every_sample_once_in_the_same_global_batches(size: int, layouts: Any, make: Any) -> None:
    """Ranks times batch size is always 12, so step after step holds the same samples, however they are laid out."""
    reference = steps(make, size, 12, 1, SampleCursor(0, 3))
    done: list[set[int]] = []
    seen: Counter[int] = Counter()
    for number, (world_size, take) in enumerate(layouts):
        cursor = SampleCursor(0, 3, min(size, 12 * len(done)))
        if cursor.consumed >= size:
            break
        left = steps(make, size, 12 // world_size, world_size, cursor)
        taken = left if number == len(layouts) - 1 else left[:take]
        for step in taken:
            done.append({sample for batch in step for sample in batch})
            seen.update(sample for batch in step for sample in batch)
    expected = [set(step[0]) for step in reference][: len(done)]
    padding = 5 if len(done) == len(reference) else 0
    for found, wanted in zip(done, expected, strict=True):
        assert found >= wanted and len(found - wanted) <= padding
    assert sum(seen.values()) - len(seen) <= padding, "but for the padding of the last step, each sample once"
    if len(done) == len(reference):
        assert set(seen) == set(range(size))


def test_each_pass_is_of_the_next_epoch_and_set_epoch_says_which() -> None:
    sampler = ElasticSampler(30, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second and sorted(first) == sorted(second) == list(range(30))
    sampler.set_epoch(0)
    assert list(sampler) == first
    again = ElasticSampler(30, seed=1)
    again.set_epoch(1)
    assert list(again) == second


def test_a_resumed_epoch_goes_on_when_the_framework_sets_it_again() -> None:
    sampler = ElasticSampler(30, seed=1)
    whole = list(sampler)
    resumed = ElasticSampler(30, seed=1)
    resumed.seek(SampleCursor(0, 1, 10))
    resumed.set_epoch(0)
    assert list(resumed) == whole[10:]
    assert len(resumed) == 30, "the length is that of the whole epoch: frameworks count steps with it"
    resumed.seek(SampleCursor(0, 1, 30))
    assert resumed.epoch == 1, "a finished epoch is the start of the next"


def test_another_seed_is_refused() -> None:
    with pytest.raises(StateMismatch, match="saved with seed 4, this sampler has 3"):
        ElasticSampler(30, seed=3).seek(SampleCursor(0, 4, 10))
    with pytest.raises(StateMismatch, match="saved with seed 4, this one has 0"):
        ElasticShards([1], iter).resume(ShardProgress.start(0, 4), {})


def test_a_cursor_counts_what_all_ranks_took() -> None:
    sampler = ElasticSampler(100, seed=3, rank=1, world_size=4)
    sampler.seek(SampleCursor(2, 3, 20))
    iterator = iter(sampler)
    for _ in range(7):
        next(iterator)
    assert sampler.cursor(5) == SampleCursor(2, 3, 40)
    assert sampler.cursor(50) == SampleCursor(2, 3, 100)
    assert ElasticSampler(100, seed=3).state_dict() == {"epoch": 0, "seed": 3, "consumed": 0}


class Drawing(Dataset[Any]):
    """Draws from all three generators for each sample."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.random()), torch.rand(1).item()


def two_epochs(workers: int, persistent: bool) -> list[dict[int, list[float]]]:
    """Return, for each of two epochs, the numbers that were drawn for each sample."""
    sampler = ElasticSampler(24, seed=5)
    loader = DataLoader(
        SeededPerSample(Drawing(), sampler),
        batch_size=4,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=persistent,
    )
    epochs = []
    for _ in range(2):
        rows = [row for batch in loader for row in zip(*(column.tolist() for column in batch), strict=True)]
        epochs.append({int(index): list(drawn) for index, *drawn in rows})
    return epochs


@pytest.mark.parametrize("persistent", [False, True])
def test_augmentation_depends_on_the_sample_alone(persistent: bool) -> None:
    torch.manual_seed(0)
    plain = two_epochs(0, persistent=False)
    torch.manual_seed(1)
    assert two_epochs(2, persistent) == plain
    assert plain[0] != plain[1]


def test_seeding_a_sample_leaves_the_generators_as_they_were() -> None:
    data = SeededPerSample(Drawing(), ElasticSampler(24))
    before = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[index]
    data[3]
    after = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert before == after


def records(shard: int) -> Any:
    return ((shard, number) for number in range(3 + shard % 5))


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_stream_is_read_once_by_all_workers_of_all_ranks(workers: int) -> None:
    found = []
    for rank in range(2):
        stream = ElasticShards(range(11), records, seed=2, rank=rank, world_size=2)
        found += [row for batch in DataLoader(stream, batch_size=None, num_workers=workers) for row in [tuple(batch)]]
    assert sorted(found) == sorted(row for shard in range(11) for row in records(shard))


@settings(max_examples=60, deadline=None)
@given(layouts=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=5), seed=st.integers(0, 20))
def test_a_stream_continues_on_any_number_of_ranks(layouts: Any, seed: int) -> None:
    everything = sorted(row for shard in range(11) for row in records(shard))
    state: dict[str, Any] = ShardProgress.start(1, seed).to_tree()
    seen: list[Any] = []
    for world_size, take in [*layouts, (2, 10**6)]:
        parts = []
        for rank in range(world_size):
            stream = ElasticShards(range(11), records, seed=seed, rank=rank, world_size=world_size)
            stream.load_state_dict(state)
            iterator = iter(stream)
            seen += [row for _, row in zip(range(take), iterator, strict=False)]
            parts.append(ShardProgress.from_tree(stream.state_dict()))
        state = merge(parts).to_tree()
    assert sorted(seen) == everything


def test_each_reader_goes_on_with_its_own_shards_where_there_are_as_many() -> None:
    whole = list(ElasticShards(range(11), records, seed=4, rank=1, world_size=3))
    begun = ElasticShards(range(11), records, seed=4, rank=1, world_size=3)
    iterator = iter(begun)
    first = [next(iterator) for _ in range(7)]
    reader, readers, far = begun.reader_progress()
    assert (reader, readers) == (1, 3)
    resumed = ElasticShards(range(11), records, seed=4, rank=1, world_size=3)
    resumed.resume(ShardProgress.start(0, 4), {reader: far})
    assert first + list(resumed) == whole
    assert list(resumed) == whole, "the pass after the resumed one is a whole one"


def test_the_progress_of_a_reader_outlasts_the_batches_that_are_kept() -> None:
    """A reader that has no shards left fetches no more."""

    def readers(count: int) -> list[ElasticShards]:
        return [ElasticShards(range(11), records, seed=2, rank=rank, world_size=count) for rank in range(count)]

    reading = readers(2)
    position_of, iterators = ElasticStreamPosition(reading[0], kept=3), [iter(each) for each in reading]
    seen = []
    for number, reader in enumerate([0, 0, 1, 1, 1, 1, 1, 1]):
        seen.append(next(iterators[reader]))
        position_of.add(number, reading[reader].reader_progress())
    position = position_of.position(8, 8)
    for start, count in ((position, 2), (position_of.reshard([position]), 3)):
        rest = []
        for stream in readers(count):
            ElasticStreamPosition(stream, kept=3).seek(start)
            rest += list(stream)
        assert sorted(seen + rest) == sorted(row for shard in range(11) for row in records(shard))


def test_shards_of_a_streamed_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset(num_shards=5)
    stream = ElasticShards.of_dataset(data, seed=1)
    assert sorted(row["x"] for row in stream) == list(range(20))
