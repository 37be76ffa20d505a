"""Fixtures of DeepSpeed's tests: one forking server and the reference runs, shared by a whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import contract
from launch import Server

HERE = Path(__file__).parent

os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def bench() -> Iterator[contract.Bench]:
    compilers = ("torch._dynamo", "torch._inductor.compile_fx", "deepspeed.runtime.zero.muon.muon_optimizer")
    server = Server("torch", "numpy", "deepspeed", *compilers, "deepspeed_operators")
    yield contract.Bench(server, HERE / "job.py")
    server.close()


@pytest.fixture(scope="session")
def reference(bench: contract.Bench, tmp_path_factory: pytest.TempPathFactory) -> contract.References:
    return contract.References(bench, tmp_path_factory.mktemp)
