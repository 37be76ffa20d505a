"""Fixtures of the Trainer's tests: one forking server and the reference runs, shared by a whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import contract
from launch import DEEPSPEED, Server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def bench() -> Iterator[contract.Bench]:
    # deepspeed: where it is installed, each trainer imports it.
    models = (
        *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "mixtral")),
        "transformers_tables",
        "peft",
    )
    server = Server("torch", "transformers.trainer", *models, "datasets", *DEEPSPEED, "torchdata.stateful_dataloader")
    yield contract.Bench(server, HERE / "job.py")
    server.close()


@pytest.fixture(scope="session")
def reference(bench: contract.Bench, tmp_path_factory: pytest.TempPathFactory) -> contract.References:
    return contract.References(bench, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def killed(bench: contract.Bench, tmp_path_factory: pytest.TempPathFactory) -> contract.Killed:
    return contract.Killed(bench, tmp_path_factory.mktemp)
