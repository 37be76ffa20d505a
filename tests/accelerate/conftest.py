"""Fixtures of Accelerate's tests: one forking server and the reference runs, shared by a whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.utils import compare_versions

import contract
from contract import killed, reference  # noqa: F401  # fixtures
from launch import DEEPSPEED, Server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def bench() -> Iterator[contract.Bench]:
    server = Server("torch", "accelerate", "torchdata.stateful_dataloader", "peft", *DEEPSPEED, "datasets")
    yield contract.Bench(server, HERE / "job.py", "project/checkpoints", "options")
    server.close()


@pytest.fixture
def sharding() -> None:
    """Skip where a run whose state is spread over the processes is refused, as test_seams.py requires."""
    if compare_versions("accelerate", "<", "1.9"):
        pytest.skip("an Accelerate before 1.9 does not bring the state of FSDP2 back, nor accumulate under ZeRO-2")
