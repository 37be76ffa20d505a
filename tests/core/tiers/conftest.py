"""Object stores for the tests of tiers: in memory, and with faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from resume_adapters import Remote
from resume_adapters.core.tiers import mirrors
from waiting import LIMIT

import hub_stand_in
from object_stores import FaultyStore, forget_settings, retry_soon

_NUMBER = itertools.count()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that have failed are soon tried again."""
    retry_soon(monkeypatch)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores of a test are those that it names itself."""
    forget_settings(monkeypatch)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The laws of a tier hold for a repository of the Hub, too."""
    if "url" in metafunc.fixturenames and Path(metafunc.module.__file__).stem == "test_laws":
        metafunc.parametrize("url", ["memory", pytest.param("hf", marks=pytest.mark.thorough)], indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store that no other test has: in memory, or a repository of the Hub that does not exist yet."""
    if getattr(request, "param", "memory") == "memory":
        yield f"memory://test-{next(_NUMBER)}"
        return
    pytest.importorskip("huggingface_hub", reason="the extra `hub` installs huggingface_hub")
    with hub_stand_in.running(monkeypatch):
        yield f"hf://me/test-{next(_NUMBER)}"


@pytest.fixture
def store(url: str, monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """The store of :func:`url`, through which the tiers of the test go."""
    found = FaultyStore(url)
    monkeypatch.setattr(mirrors, "ObjectStore", lambda *arguments: found)
    monkeypatch.setattr(mirrors, "HubStore", lambda *arguments, **options: found)
    return found


@pytest.fixture
def remote(url: str, store: FaultyStore) -> Callable[..., list[Remote]]:
    """Returns the option ``mirror`` for the store."""
    return lambda **options: [Remote(url, **{"timeout": timedelta(seconds=LIMIT), **options})]
