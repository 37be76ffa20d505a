"""Object stores for the tests of tiers: in memory, and with faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta

import pytest

from resume_adapters import Remote
from resume_adapters.core.tiers import mirrors
from waiting import LIMIT

from object_stores import FaultyStore, forget_settings

_NUMBER = itertools.count()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that have failed are soon tried again."""
    monkeypatch.setattr(mirrors, "_LONGEST_PAUSE", 0.05)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores of a test are those that it names itself."""
    forget_settings(monkeypatch)


@pytest.fixture
def url() -> str:
    """A store in memory that no other test has."""
    return f"memory://test-{next(_NUMBER)}"


@pytest.fixture
def store(url: str, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """The store of :func:`url`, through which the tiers of the test go."""
    found = FaultyStore(url)
    monkeypatch.setattr(mirrors, "ObjectStore", lambda *arguments: found)
    return found


@pytest.fixture
def remote(url: str, store: FaultyStore) -> Callable[..., list[Remote]]:
    """Returns the option ``mirror`` for the store."""
    return lambda **options: [Remote(url, **{"timeout": timedelta(seconds=LIMIT), **options})]
