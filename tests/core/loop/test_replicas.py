"""Copies of a training that each rank has: saved by each where they differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.loop.replicas import Replicas
from resume_adapters.errors import StateMismatch, UnsupportedSetting

from plain_torch import Killed, Launch, PlainTorch, killed_after


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(300, 300)


def replicas(gather: Callable[[Any], list[Any]], seed: int = 0) -> Replicas:
    model = network(seed)
    return Replicas([model], [torch.optim.SGD(model.parameters(), lr=0.1)], gather)


def test_copies_that_differ_are_saved_by_each_rank() -> None:
    seen: list[Any] = []
    replicas(lambda value: [seen.append(value) or value, value], seed=1).compare()
    asked: list[Any] = []
    alike = replicas(lambda value: asked.append(value) or [value, value])
    apart = replicas(lambda value: [value, seen[0]])
    for each in (alike, apart, alike):
        each.compare()
    assert len(asked) == 1, "the ranks are asked once"
    assert (alike.are_apart, alike.parts()) == (False, {})
    assert apart.are_apart and set(apart.parts()["replicas"].state_dict()) == {"model 0", "optimizer 0"}
    alike.train_apart()
    alike.compare()
    assert len(asked) == 1 and alike.parts()


def test_copies_of_different_models_are_refused() -> None:
    with pytest.raises(UnsupportedSetting, match="the processes train different models"):
        replicas(lambda value: [value, ("[{'weight': (3, 3)}]", value[1])]).compare()


class Fewer:
    """The context of a launch with fewer ranks than have saved."""

    has_other_ranks, saved_by = True, 2

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class Apart(PlainTorch):
    """A training in which each rank has weights of its own."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.replicas = Replicas([self.model], [self.optimizer], lambda value: [value])

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), **self.replicas.parts()}

    def load(self, context: Any) -> None:
        super().load(context)
        self.replicas.expect(Fewer(context) if self.given.get("fewer") else context)
        torch.nn.init.zeros_(self.model[0].weight)  # as where the files are those of another rank


def launch(directory: Path, *rest: Any, **given: Any) -> Launch:
    found = Launch(directory, *rest)
    framework = Apart(1, 1, **given)
    for name in ("model", "wrapped", "optimizer", "schedule", "replicas", "given"):
        setattr(found.framework, name, getattr(framework, name))
    found.framework.__class__ = Apart
    found.framework.replicas.train_apart()
    return found


def test_what_each_rank_has_saved_comes_back(tmp_path: Path) -> None:
    expected = launch(tmp_path / "never")()
    with pytest.raises(Killed):
        launch(tmp_path / "run", killed_after(7))()
    found = launch(tmp_path / "run")()
    assert found.end == expected.end
    assert found.trace == expected.trace[-len(found.trace) :]


def test_copies_are_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        launch(tmp_path, killed_after(7))()
    with pytest.raises(StateMismatch, match="on each of 2 ranks, this launch has 1"):
        launch(tmp_path, fewer=True)()
