"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Iterator
from signal import getsignal

import pytest
from hypothesis import settings

from resume_adapters.core.stop import signals
from resume_adapters.core.stop.policy import SIGNALS

import miniature
from launch import Server

# How long an example takes says how loaded the machine is, and nothing of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(params=["directory", pytest.param("file", marks=pytest.mark.thorough)])
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with checkpoints that are directories, and with ones that are single files."""
    monkeypatch.setattr(miniature, "FILES", request.param == "file")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Fail where a test leaves a run's signal handlers installed: the worker that runs it would outlive a signal."""
    yield
    left = [signal.name for signal in SIGNALS if signals._HANDLERS._handle == getsignal(signal)]
    signals._HANDLERS.restore()
    assert not left, f"the test left a run open: its handlers of {left} are installed"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A process that has imported torch, from which the ranks of a test are forked."""
    server = Server("torch", "torch.distributed", "numpy")
    yield server
    server.close()
