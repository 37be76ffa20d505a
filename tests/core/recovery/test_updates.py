"""An update begins where weights may change: after the closure, where an optimizer has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from resume_adapters.core.recovery.updates import UpdateWatch


@pytest.fixture
def watch() -> Iterator[UpdateWatch]:
    watch = UpdateWatch()
    watch.close()  # before it has begun there is nothing to close
    watch.begin()
    yield watch
    watch.close()


def test_a_step_is_an_update(watch: UpdateWatch) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert not watch.is_updating
    optimizer.step()
    assert watch.is_updating
    watch.end_step()
    assert not watch.is_updating
    watch.close()
    optimizer.step()
    assert not watch.is_updating


@pytest.mark.parametrize("give", [lambda step, run: step(run), lambda step, run: step(closure=run)])
def test_what_a_closure_does_comes_before_the_update(watch: UpdateWatch, give: Callable[..., Any]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    seen = []

    def closure() -> float:
        seen.append(watch.is_updating)
        return 0.5

    assert give(optimizer.step, closure) == 0.5
    assert seen == [False]
    assert watch.is_updating
    watch.end_step()
    optimizer.step(None)
    assert watch.is_updating
