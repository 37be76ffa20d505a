"""Fixtures of the tests of a loop of torch alone: one forking server and the reference runs of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import contract
from contract import killed, reference  # noqa: F401  # fixtures
from launch import Server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def bench() -> Iterator[contract.Bench]:
    server = Server("torch")
    yield contract.Bench(server, HERE / "job.py", options="options")
    server.close()
