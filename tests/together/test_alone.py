"""Each adapter needs its own framework, and none of the others."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import Server

NEEDS = {
    "hf": ["transformers", "accelerate"],
    "lightning": ["lightning", "transformers"],  # torchmetrics imports it where its metadata are installed
    "accelerate": ["accelerate"],
    "deepspeed": ["deepspeed"],
}
FRAMEWORKS = ("transformers", "accelerate", "lightning", "deepspeed", "peft", "torchdata", "datasets")

pytestmark = pytest.mark.xdist_group("together")


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    served = Server("torch")
    yield served
    served.close()


@pytest.mark.parametrize("adapter", NEEDS)
def test_an_adapter_is_imported_where_the_other_frameworks_are_missing(
    adapter: str, bare: Server, tmp_path: Path
) -> None:
    if any(importlib.util.find_spec(name) is None for name in NEEDS[adapter]):
        pytest.skip(f"{adapter} needs {NEEDS[adapter]}")
    absent = [name for name in FRAMEWORKS if name not in NEEDS[adapter]]
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.modules |= dict.fromkeys({absent})\nimport resume_adapters.{adapter}\n")
    bare.start(script, [], tmp_path, 1, {"DS_ACCELERATOR": "cpu"}).wait().require_success()
