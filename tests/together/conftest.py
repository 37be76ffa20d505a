"""What concerns all adapters at once: one forking server for the pages, the examples and the options."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from launch import Server

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    served = Server("torch", "transformers.trainer", "lightning.pytorch", "torch._dynamo", "deepspeed", "rich", "typer")
    yield served
    served.close()
