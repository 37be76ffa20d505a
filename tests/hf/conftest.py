"""Fixtures of the Trainer's tests: one forking server and the reference runs, shared by a whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import contract
from contract import killed, reference  # noqa: F401  # fixtures
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
