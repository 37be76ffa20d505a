"""Before a job is killed it waits for commits and copies, so that what a kill leaves does not depend on the load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from resume_adapters import Remote
from resume_adapters.core.saving import engine
from resume_adapters.core.tiers import mirrors
from waiting import LIMIT

import training
from faults import Disturbed
from miniature import Miniature
from object_stores import FaultyStore


class SlowStorage(Disturbed):
    """A disk on which a commit takes until somebody waits for it."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.is_committing = threading.Event()
        self.go_on = threading.Event()

    def _wait(self, operation: str, path: Path) -> None:
        if (operation, path.name) == ("replace", "manifest.json"):
            self.is_committing.set()
            assert self.go_on.wait(120)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Miniature]:
    """A run whose commit of step 2 is under way."""
    monkeypatch.setitem(training.CONFIG, "run_directory", str(tmp_path))
    storage = SlowStorage()
    job = Miniature(tmp_path, storage=storage)
    job.run.begin(0, 0.0)
    job.save(2)
    assert storage.is_committing.wait(120)
    yield job
    storage.go_on.set()
    job.run.close()


def test_it_waits_for_the_commit(job: Miniature) -> None:
    assert job.committed() == {}
    assert isinstance(job.run.storage, SlowStorage)
    threading.Timer(0.3, job.run.storage.go_on.set).start()
    training.settle()
    assert job.committed() == {"checkpoint-2": 2}


def test_it_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.CONFIG, "run_directory", str(tmp_path))
    url, go_on = f"memory://{tmp_path.name}", threading.Event()
    store = FaultyStore(url)
    monkeypatch.setattr(mirrors, "ObjectStore", lambda *arguments: store)
    job = Miniature(tmp_path, mirror=[Remote(url, timeout=timedelta(seconds=LIMIT))])
    job.run.begin(0, 0.0)
    store.before = lambda number, key: go_on.wait(LIMIT)
    job.commit(2)
    assert job.run.context.mirrors.states[0].behind == 1
    threading.Timer(0.3, go_on.set).start()
    training.settle()
    assert job.run.context.mirrors.states[0].step == 2
    job.run.close()


def test_it_fails_where_it_does_not_find_who_commits(job: Miniature, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of which class that is."""
    monkeypatch.setattr(engine, "SaveEngine", type("Another", (), {}))
    with pytest.raises(AssertionError, match="no engine that commits is found"):
        training.settle()
