"""Fixtures of DeepSpeed's tests: one forking server and the reference runs, shared by a whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import contract
from contract import reference  # noqa: F401  # fixtures
from launch import DEEPSPEED, Server

HERE = Path(__file__).parent

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the limit of a test be that of itself alone: the setup of the first one compiles DeepSpeed's operators.

    That takes a minute on an idle machine, and more than the limit on a loaded one.
    """
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(600, func_only=True))


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[contract.Bench]:
    # The thorough cases alone use DeepSpeed's own optimizers.
    chosen = (item for item in request.session.items if item.path.is_relative_to(HERE))
    compiled = ["deepspeed_operators"] if any(item.get_closest_marker("thorough") for item in chosen) else []
    server = Server("torch", "numpy", *DEEPSPEED, *compiled)
    yield contract.Bench(server, HERE / "job.py", options="options")
    server.close()
