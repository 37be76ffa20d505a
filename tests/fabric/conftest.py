"""Fixtures of Fabric's tests: one forking server and the reference runs, shared by a whole session."""

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
    server = Server("torch", "lightning.fabric")
    yield contract.Bench(server, HERE / "job.py", options="options")
    server.close()
