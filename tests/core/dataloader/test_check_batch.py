"""A batch that was used is fetched again at a resume, where none that was fetched ahead could show other data."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset

from resume_adapters.core.dataloader.check_batch import CheckBatch
from resume_adapters.core.dataloader.progress import LoaderPosition
from resume_adapters.core.dataloader.tracked import TrackedLoader, track
from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.records import Source
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.errors import NotRestored

SOURCE = Source(Path("checkpoint-3"), "rank-0.json", 3, "0.2.0")


class Words(Dataset[Any]):
    """Numbers its words in an order that a script may take from a set, and draws random numbers where it is told to."""

    def __init__(self, words: str = "abcdefghijkl", random: Any = None, *, draws: bool = False) -> None:
        self.numbers = {word: number for number, word in enumerate(words)}
        self.epoch = 0
        self.random = random
        self.draws = draws
        self.held: Any = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(()) if self.draws else torch.zeros(())
        own = 0.0 if self.random is None else self.random.random()
        return torch.tensor([self.numbers[chr(97 + index)], 100 * self.epoch, noise + own])


class Holding(Words):
    def __init__(self, held: Any, words: str = "abcdefghijkl") -> None:
        super().__init__(words)
        self.held = held


def fetched(loader: TrackedLoader, count: int) -> list[Any]:
    return list(itertools.islice(loader.loader, count))


def saved(loader: TrackedLoader, count: int = 2, *, ended: bool = False) -> LoaderPosition:
    """Return the position after some batches, or after a pass, as it is read from a checkpoint."""
    fetched(loader, 6 if ended else count)
    return from_disk(loader.position_between() if ended else loader.position(count))


def from_disk(position: LoaderPosition) -> LoaderPosition:
    document, tensors = encoding.encode(position.to_tree())
    return LoaderPosition.from_tree(encoding.decode(document, tensors), SOURCE)


Made = Callable[[str], "DataLoader[Any]"]
MADE: dict[str, Made] = {
    "in order": lambda words: DataLoader(Words(words), 4),
    "shuffled": lambda words: DataLoader(Words(words), 4, shuffle=True),
    "random numbers": lambda words: DataLoader(Words(words, draws=True), 4, shuffle=True),
    "a generator": lambda words: DataLoader(Words(words, np.random.default_rng(1)), 4, shuffle=True),
    "no batches": lambda words: DataLoader(Words(words), None, shuffle=True),
    "numbers of numpy": lambda words: DataLoader(Words(words), 4, sampler=list(np.arange(12))),
    "a transform that is a module": lambda words: DataLoader(Holding(torch.nn.Dropout(), words), 4),
    "a part of two": lambda words: DataLoader(Subset(ConcatDataset([Words(words), Words()]), range(12)), 4),
}


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_the_same_data_are_the_same_and_others_are_refused(kind: str, ended: bool) -> None:
    torch.manual_seed(1)
    position = saved(track(MADE[kind]("abcdefghijkl")), ended=ended)
    torch.manual_seed(2)
    same = track(MADE[kind]("abcdefghijkl"))
    before = rng.cpu_to_tree(rng.capture_cpu())
    same.restore(position, compares=True)
    assert encoding.digest_of(rng.cpu_to_tree(rng.capture_cpu())) == encoding.digest_of(before)
    other = track(MADE[kind]("lkjihgfedcba"))
    with pytest.raises(NotRestored, match=r"the samples .* of the training data are not what they were"):
        other.restore(position, compares=True)
    other.restore(position)


def in_workers(words: str, **options: Any) -> DataLoader[Any]:
    data = Words(words, np.random.default_rng(1), draws=True)
    return DataLoader(data, 2, shuffle=True, num_workers=2, **options)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_the_first_worker_fetches_it_before_its_own(kept: bool, ended: bool) -> None:
    """With the random state that a worker had then; those that follow are as they were."""
    torch.manual_seed(1)
    made = track(in_workers("abcdefghijkl", persistent_workers=kept))
    passing = iter(made.loader)
    list(itertools.islice(passing, 6 if ended else 4))
    position = from_disk(made.position_between() if ended else made.position(4))
    assert position.check is not None and len(position.check.indices) == 2
    expected = [*([] if ended else passing), *made.loader]
    for compares in (True, False):
        same = track(in_workers("abcdefghijkl", persistent_workers=kept))
        same.restore(position, compares=compares)
        if ended:
            same.restore_now()
        found = [*([] if ended else same.loader), *same.loader]
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
        same.loader._iterator = None
    other = track(in_workers("lkjihgfedcba", persistent_workers=kept))
    other.restore(position, compares=True)
    if ended:
        other.restore_now()
    refused = iter(other.loader)
    with pytest.raises(NotRestored, match=r"the samples .* of the training data are not what they were"):
        next(refused)
    for each in (passing, refused):
        each._shutdown_workers()  # type: ignore[attr-defined]  # as garbage torch would wait seconds for each of them
    made.loader._iterator = other.loader._iterator = None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ended", [False, True])
def test_a_script_that_tells_its_dataset_of_each_epoch_resumes(ended: bool, workers: int) -> None:
    """As soon as the pass begins, which at its end is that of the next epoch."""

    def told(loader: TrackedLoader, epoch: int) -> list[torch.Tensor]:
        loader.loader.dataset.epoch = epoch
        return list(loader.loader)

    made = track(DataLoader(Words(), 2, num_workers=workers))
    for epoch in (0, 1):
        passing = iter(made.loader)
        list(itertools.islice(passing, 6 if ended else 4))
        position = made.position_between() if ended else made.position(4)
        rest = [*passing, *told(made, epoch + 1)]
        resumed = track(DataLoader(Words(), 2, num_workers=workers))
        if not ended:
            resumed.loader.dataset.epoch = epoch
        resumed.restore(position, compares=True)
        if ended:
            resumed.restore_now()
        found = [*([] if ended else resumed.loader), *told(resumed, epoch + 1)]
        assert len(found) == len(rest) and all(map(torch.equal, found, rest))


def test_it_is_not_fetched_by_another_number_of_workers() -> None:
    made = track(DataLoader(Words(), 4))
    other = track(DataLoader(Words("lkjihgfedcba"), 4, num_workers=1))
    position = saved(made)
    assert position.plain and position.check is not None
    other.restore(position, compares=True)
    assert len(list(other.loader)) == 1


def test_a_generator_is_left_as_it_is() -> None:
    generator = torch.Generator().manual_seed(3)

    class Drawing(Words):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand((), generator=generator)

    made = track(DataLoader(Drawing(), 4), {"own": GeneratorState(generator)})
    position = saved(made)
    generator.manual_seed(5)
    before = generator.get_state()
    track(DataLoader(Drawing(), 4), {"own": GeneratorState(generator)}).restore(position, compares=True)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("ended", [False, True])
def test_what_the_script_tells_a_dataset_in_each_epoch_is_what_it_was(ended: bool) -> None:
    """The batch is one of the last pass, and is fetched with the attributes of that pass; then they are as before."""
    made = track(DataLoader(Words(), 4))
    for epoch in (0, 1):
        made.loader.dataset.epoch = epoch
        fetched(made, 3)
    made.loader.dataset.epoch = 2
    position = saved(made, ended=ended)
    found = track(DataLoader(Words(), 4))
    found.restore(position, compares=True)
    assert found.loader.dataset.epoch == 0 and position.check is not None


def test_a_batch_that_the_training_has_changed_is_the_one_that_was_fetched() -> None:
    made = track(DataLoader(Words(), 4))
    for batch in itertools.islice(made.loader, 2):
        batch.zero_()
    position = made.position(2)
    track(DataLoader(Words(), 4)).restore(position, compares=True)


def test_it_is_of_the_running_pass_also_after_a_resume() -> None:
    position = saved(track(DataLoader(Words(), 4)))
    assert position.check is not None and position.check.indices == [4, 5, 6, 7]
    resumed = track(DataLoader(Words(), 4))
    resumed.restore(position, compares=True)
    fetched(resumed, 1)
    assert resumed.position(3).check is position.check, "one batch was left: no other is the second of this launch"
    fetched(resumed, 1)
    assert resumed.position(1).check is None, "another pass has begun"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


class Named(Sampler[Any]):
    """Yields what is no number."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(0, 1), (2, 3), (4, 5)])

    def __len__(self) -> int:
        return 3


class Pairs(Words):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor(index)


NOT_CHECKED: dict[str, Callable[[], DataLoader[Any]]] = {
    "a stream": lambda: DataLoader(Stream(), 4),
    "a model": lambda: DataLoader(Holding([torch.nn.Linear(1, 1)]), 4),
    "a model further down": lambda: DataLoader(Subset(Holding(torch.nn.Linear(1, 1)), range(12)), 4),
    "a shared value": lambda: DataLoader(Holding(multiprocessing.Value("i", 0)), 4),
    "a raw shared value": lambda: DataLoader(Holding(multiprocessing.RawValue("i", 0)), 4),
    "a sampler": lambda: DataLoader(Holding(Named()), 4),
    "other indices": lambda: DataLoader(Pairs(), None, sampler=Named()),
    "no data": lambda: DataLoader(Words(), 4, collate_fn=lambda samples: object()),
}


@pytest.mark.parametrize("kind", NOT_CHECKED)
def test_what_may_follow_from_more_than_the_data_is_not_compared(kind: str) -> None:
    made = track(NOT_CHECKED[kind]())
    assert saved(made).check is None


def test_what_depends_on_what_is_missing_is_not_compared() -> None:
    made = track(DataLoader(Words(), 4))
    assert saved(made).check is not None
    made.loader.dataset.held = open(__file__)  # noqa: SIM115
    try:
        fetched(made, 3)
        assert made.missing and made.position_between().check is None
    finally:
        made.loader.dataset.held.close()


def test_the_order_of_sets_is_named_where_it_is_another() -> None:
    """Each process has another one; where the environment says which, it is not the cause."""
    position = saved(track(DataLoader(Words(), 4)))
    assert position.word_hash is not None and isinstance(position.check, CheckBatch)
    other = track(DataLoader(Words("lkjihgfedcba"), 4))
    with pytest.raises(NotRestored, match="a generator of its own") as here:
        other.restore(position, compares=True)
    with pytest.raises(NotRestored, match=r"the order of a set.* PYTHONHASHSEED") as elsewhere:
        other.restore(replace(position, word_hash=position.word_hash + 1), compares=True)
    assert "PYTHONHASHSEED" not in str(here.value) and "4, 5, 6, 7" in str(elsewhere.value)


def test_a_batch_that_was_fetched_ahead_shows_it_alone() -> None:
    made = track(DataLoader(Words(), 4))
    fetched(made, 3)
    other = track(DataLoader(Words("lkjihgfedcba"), 4))
    other.restore(made.position(2), compares=True)
    with pytest.raises(NotRestored, match="batch 2 of this pass is not the batch that followed"):
        fetched(other, 1)
