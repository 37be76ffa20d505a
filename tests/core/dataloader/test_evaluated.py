"""What an evaluation reads goes on where it was, whatever kind of loader it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

from resume_adapters.core.dataloader.evaluated import EvaluationLoaders


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(6.0))


class Shifting(DataLoader[Any]):
    """Counts its passes."""

    def __init__(self) -> None:
        super().__init__(rows(), batch_size=2)
        self.__dict__["passes"] = 0

    def __iter__(self) -> Any:
        self.passes += 1
        for (batch,) in super().__iter__():
            yield batch + self.passes


class Made:
    """No loader of torch: it makes its batches."""

    def __init__(self) -> None:
        self.numbers, self.passes = np.random.default_rng(3), 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for _ in range(3):
            yield torch.tensor([self.numbers.normal() + self.passes])


class Rotated(Sampler[int]):
    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(each + self.passes) % 6 for each in range(6)])


KINDS: dict[str, Callable[[], Any]] = {
    "generator": lambda: DataLoader(rows(), 2, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "sampler": lambda: DataLoader(rows(), 2, sampler=Rotated()),
    "subclass": Shifting,
    "no DataLoader": Made,
}


def read(loaders: EvaluationLoaders, loader: Any) -> list[Any]:
    loaders.watch("validation", loader)
    found = [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in loader]
    loaders.data.look()
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_next_pass_after_a_resume_is_the_next_one(kind: str) -> None:
    loaders, loader = EvaluationLoaders(), KINDS[kind]()
    first = read(loaders, loader)
    saved = loaders.data.capture()
    second, third = read(loaders, loader), read(loaders, loader)
    assert first != second and second != third
    again, fresh = EvaluationLoaders(), KINDS[kind]()
    again.data.restore(saved)
    assert [read(again, fresh), read(again, fresh)] == [second, third]
    assert not again.data.missing


class Kept(DataLoader[Any]):
    """Takes its batches from one iterator."""

    def __init__(self) -> None:
        super().__init__(rows(), batch_size=2)
        self.__dict__["batches"] = super().__iter__()

    def __iter__(self) -> Any:
        yield next(self.batches)


def test_where_the_position_of_an_iterator_is_lost_it_is_named() -> None:
    loaders = EvaluationLoaders()
    read(loaders, Kept())
    assert loaders.data.missing == {"validation.Kept.batches": "_SingleProcessDataLoaderIter"}
