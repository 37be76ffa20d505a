"""What an attempt has not made is hidden, as long as nothing of it may be used by a training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from resume_adapters.core.recovery.older_objects import OlderObjects


@pytest.fixture(autouse=True)
def unhidden() -> Iterator[None]:
    hidden = gc.get_freeze_count()  # by the tests' own setup
    gc.unfreeze()
    yield
    gc.unfreeze()
    if hidden:
        gc.freeze()


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The objects of this process are those of all tests before."""
    objects: list[Any] = [torch.nn.ReLU(), object()]
    monkeypatch.setattr(gc, "get_objects", lambda: objects)
    return objects


def test_what_is_there_is_hidden_until_it_is_released(there: list[Any]) -> None:
    older = OlderObjects()
    older.hide()
    hidden, later = gc.get_freeze_count(), [object()]
    assert hidden
    assert not any(each is there for each in gc.get_referrers(there[1]))
    assert any(each is later for each in gc.get_referrers(later[0]))
    older.hide()
    assert gc.get_freeze_count() > hidden
    older.release()
    assert not gc.get_freeze_count()
    assert any(each is there for each in gc.get_referrers(there[1]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(1, 1),
        lambda: torch.optim.SGD([torch.ones(1)], lr=1.0),
        lambda: torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.ones(1)], lr=1.0)),
        lambda: torch.utils.data.DataLoader([1]),
    ],
)
def test_nothing_is_hidden_while_something_may_be_trained_with(there: list[Any], make: Any) -> None:
    there.append(make())
    older = OlderObjects()
    older.hide()
    assert not gc.get_freeze_count()
    older.release()


def test_what_the_script_has_hidden_stays_hidden(there: list[Any]) -> None:
    gc.freeze()
    hidden = gc.get_freeze_count()
    older = OlderObjects()
    older.hide()
    older.release()
    assert gc.get_freeze_count() == hidden
