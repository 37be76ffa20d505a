"""Fixtures of Lightning's tests: one forking server and the reference runs, shared by a whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

import contract
from contract import killed, reference  # noqa: F401  # fixtures
from launch import DEEPSPEED, Running, Server

HERE = Path(__file__).parent


class Bench(contract.Bench):
    """Runs what the installed version has: before Lightning 2.6 it has no averages of the weights."""

    def start(self, directory: Path, config: contract.Config, **rest: Any) -> Running:
        if config.get("average") and not hasattr(pl.callbacks, "WeightAveraging"):
            pytest.skip(f"lightning {pl.__version__} has no WeightAveraging")
        return super().start(directory, config, **rest)


@pytest.fixture(scope="session")
def bench() -> Iterator[contract.Bench]:
    server = Server(
        "torch",
        "lightning.pytorch",
        "torch.distributed.checkpoint.state_dict",
        "torchdata.stateful_dataloader",
        *DEEPSPEED,
    )
    yield Bench(server, HERE / "job.py")
    server.close()
