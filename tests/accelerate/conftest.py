"""Fixtures of Accelerate's tests: one forking server and the reference runs, shared by a whole session."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import contract
from launch import Server

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def bench() -> Iterator[contract.Bench]:
    server = Server("torch", "numpy", "accelerate", "torch._dynamo", "torchdata.stateful_dataloader", "peft")
    yield contract.Bench(server, HERE / "job.py", "project/checkpoints")
    server.close()


@pytest.fixture(scope="session")
def reference(bench: contract.Bench, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., contract.Trace]:
    """Return the trace of an uninterrupted run of a configuration; each is run once a session."""
    known: dict[str, contract.Trace] = {}

    def find(config: dict[str, Any], ranks: int = 1) -> contract.Trace:
        key = json.dumps([config, ranks], sort_keys=True)
        if key not in known:
            known[key] = contract.uninterrupted(bench, tmp_path_factory.mktemp("reference"), config, ranks=ranks)
        return known[key]

    return find
