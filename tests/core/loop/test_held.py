"""What a loop holds at the end of a step is what it would have saved there, whatever happens later."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from resume_adapters.core.loop.checkpointing import LoopCheckpointing
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import encoding
from resume_adapters.core.state.frozen import FrozenState
from selection import often

from plain_torch import Launch


def drawn() -> float:
    """Draw from each generator of the process."""
    return random.random() + float(np.random.random()) + torch.rand(()).item()


class Drawing(Dataset[float]):
    """Draws random numbers for each sample, from a generator of its own as well, and counts them."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(1)
        self.count = 0

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> float:
        self.count += 1
        return index + drawn() + torch.rand((), generator=self.own).item()


class DrawingStream(IterableDataset[float]):
    """Draws random numbers for each record; with workers, each reads its share."""

    def __iter__(self) -> Iterator[float]:
        worker = torch.utils.data.get_worker_info()
        for index in range(worker.id if worker else 0, 22, worker.num_workers if worker else 1):
            yield index + drawn()


WORKERS = {"num_workers": 2}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"accumulation": 2},
    "accumulating for longer than the log": {"accumulation": 70, "batch": 2, "dataset": lambda: range(300)},
    "a stream": {"data": "stream"},
    "an elastic sampler": {"data": "elastic"},
    "a batch ahead": {"data": "ahead"},
    "a batch ahead, from workers": {"data": "ahead", "workers": WORKERS},
    "workers": {"workers": WORKERS},
    "workers that stay": {"workers": {**WORKERS, "persistent_workers": True}},
    "workers and an accumulation": {"workers": WORKERS, "accumulation": 3},
    "data that draw": {"dataset": Drawing},
    "data that draw, a batch ahead": {"dataset": Drawing, "data": "ahead"},
    "data that draw, in workers": {"dataset": Drawing, "workers": WORKERS},
    "a stream that draws": {"dataset": DrawingStream, "workers": {"shuffle": None}},
    "a stream that draws, in workers": {"dataset": DrawingStream, "workers": {**WORKERS, "shuffle": None}},
    "loaders together": {"script": "zip"},
    "loaders one after the other": {"script": "two"},
    "loaders made in each epoch": {"script": "anew"},
    "loaders in turn": {"script": "in turn"},
    "a loader used twice": {"script": "twice"},
    "another loader for evaluations": {"script": "evaluated"},
}


@pytest.mark.parametrize("case", often(CASES, *(CASES.keys() - {"data that draw, a batch ahead"})))
def test_what_is_held_is_what_would_have_been_saved(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, Any]] = []

    def keep(session: Session, step: int, loop: Any, form: Any) -> None:
        found.append((digest(loop.rank_state().to_tree()), FrozenState(loop.rank_state())))

    monkeypatch.setattr(LoopCheckpointing, "holds", True)
    monkeypatch.setattr(Session, "keep", keep)
    options = dict(CASES[case])
    if "dataset" in options:
        options["dataset"] = options["dataset"]()

    def change(launch: Launch) -> None:
        """Change what the script and the process hold, as a step does."""
        drawn()
        launch.loop.memory.setdefault("seen", []).append(launch.loop.global_step)

    Launch(tmp_path, change, save_every=5, **options)()
    assert len(found) > 3
    assert [digest(held.tree) for _, held in found] == [before for before, _ in found]
    assert all(held.is_intact for _, held in found)
    assert len({before for before, _ in found}) == len(found), "each step has a state of its own"


def digest(tree: Any) -> str:
    found = encoding.digest_of(tree)
    assert found is not None, "a state is data"
    return found
