"""The order of samples that ranks take by turns: which samplers deal one out, and how it is named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from resume_adapters.core.dataloader.sampler import DealtOrder, dealt_order
from resume_adapters.core.dataloader.tracked import track

DATA = range(10)


class Blocks(DistributedSampler):  # type: ignore[type-arg]
    """Gives each rank a block of the order, and not every second sample."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA[5 * self.rank : 5 * self.rank + 5])


class Own(BatchSampler):
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


class Mixed(BatchSampler):
    """Takes its batches from several data sets; what it calls its sampler is one that joins them."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(DATA), 2, False)
        self.sampler = ConcatDataset([DATA, DATA])  # type: ignore[assignment, list-item]

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2, 3]])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(DATA)


def distributed(**options: Any) -> DataLoader[int]:
    return DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, 0, **options))  # type: ignore[arg-type]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


ORDERS: dict[str, tuple[DataLoader[int], DealtOrder | None]] = {
    "sequential": (DataLoader(DATA, 2), DealtOrder("SequentialSampler()", 1, 10)),
    "shuffled": (DataLoader(DATA, 2, shuffle=True), DealtOrder("RandomSampler(replacement=False)", 1, 10)),
    "by a generator": (
        DataLoader(DATA, 2, shuffle=True, generator=generator()),
        DealtOrder("RandomSampler(replacement=False, generator)", 1, 10),
    ),
    "distributed": (distributed(seed=3), DealtOrder("DistributedSampler(seed=3)", 2, 10)),
    "distributed, not shuffled": (distributed(shuffle=False), DealtOrder("SequentialSampler()", 2, 10)),
    "distributed in blocks": (DataLoader(DATA, 2, sampler=Blocks(DATA, 2, 0)), None),  # type: ignore[arg-type]
    "a batch sampler of its own": (DataLoader(DATA, batch_sampler=Own(SequentialSampler(DATA), 2, False)), None),
    "batches of several data sets": (DataLoader(DATA, batch_sampler=Mixed()), None),
    "a sampler without length": (DataLoader(DATA, 2, sampler=Endless()), None),
    "no batches": (DataLoader(DATA, None), None),
}


@pytest.mark.parametrize("case", ORDERS)
def test_an_order_is_named_by_what_it_follows_from(case: str) -> None:
    loader, expected = ORDERS[case]
    assert dealt_order(loader) == expected


def test_an_order_is_shared_by_as_many_ranks_as_deal_it_out() -> None:
    tracked = track(distributed())
    assert tracked.shared_order(4, 1) is not None
    assert track(DataLoader(DATA, 2, shuffle=True)).shared_order(4, 1) is None, "each rank has an order of its own"
    assert track(DataLoader(DATA, 2, shuffle=True)).shared_order(4, 2) is not None, "rank zero fetches for both"


@pytest.mark.parametrize(
    ("made", "draws"),
    [
        (lambda: DataLoader(DATA, 2, shuffle=True), True),
        (lambda: DataLoader(DATA, 2, sampler=RandomSampler(DATA, generator=generator())), False),
        (distributed, False),
        (lambda: DataLoader(DATA, 2), False),
    ],
    ids=["shuffled", "by a generator", "distributed", "sequential"],
)
def test_a_pass_shows_whether_its_order_is_drawn_from_the_random_state(made: Any, draws: bool) -> None:
    tracked = track(made())
    assert tracked.draws_order
    next(iter(tracked.loader))
    assert tracked.draws_order == draws
