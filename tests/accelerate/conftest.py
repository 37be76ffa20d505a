"""Fixtures of Accelerate's tests: one forking server and the reference runs, shared by a whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.utils import compare_versions

import contract
from launch import DEEPSPEED, Server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def bench() -> Iterator[contract.Bench]:
    server = Server("torch", "accelerate", "torchdata.stateful_dataloader", "peft", *DEEPSPEED, "datasets")
    yield contract.Bench(server, HERE / "job.py", "project/checkpoints", "options")
    server.close()


@pytest.fixture(scope="session")
def reference(bench: contract.Bench, tmp_path_factory: pytest.TempPathFactory) -> contract.References:
    return contract.References(bench, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def killed(bench: contract.Bench, tmp_path_factory: pytest.TempPathFactory) -> contract.Killed:
    return contract.Killed(bench, tmp_path_factory.mktemp)


@pytest.fixture
def sharding() -> None:
    """Skip where a run whose state is spread over the processes is refused, as test_seams.py requires."""
    if compare_versions("accelerate", "<", "1.9"):
        pytest.skip("an Accelerate before 1.9 does not bring the state of FSDP2 back, nor accumulate under ZeRO-2")
