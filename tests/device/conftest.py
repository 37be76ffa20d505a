"""Fixtures of the device's own tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import contract
from contract import reference  # noqa: F401  # fixtures
from launch import Server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server("torch", "accelerate")
    yield server
    server.close()


@pytest.fixture(scope="session")
def bench(server: Server) -> contract.Bench:
    return contract.Bench(server, HERE / "job.py", "project/checkpoints", "options")
