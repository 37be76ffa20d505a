"""Each adapter needs its own framework, says so where it is missing, and needs none of the others."""

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
FRAMEWORKS = (
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "peft",
    "torchdata",
    "datasets",
)

SCRIPT = """
import importlib, sys
from resume_adapters.errors import MissingFramework
sys.modules |= dict.fromkeys({absent})
import resume_adapters.{adapter}
for other in {others}:
    try:
        importlib.import_module(f"resume_adapters.{{other}}")
    except MissingFramework as error:
        assert f"resume_adapters.{{other}} needs" in str(error), error
        assert ": pip install '" in str(error) and "resume-adapters[" not in str(error), error
    else:
        raise AssertionError(other)
"""
"""Import an adapter where the frameworks of others are missing, and then those others."""


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    served = Server("torch")
    yield served
    served.close()


@pytest.mark.parametrize("adapter", NEEDS)
def test_an_adapter_is_imported_where_other_frameworks_are_missing_and_theirs_say_so(
    adapter: str, bare: Server, tmp_path: Path
) -> None:
    if any(importlib.util.find_spec(name) is None for name in NEEDS[adapter]):
        pytest.skip(f"{adapter} needs {NEEDS[adapter]}")
    absent = [name for name in FRAMEWORKS if name not in NEEDS[adapter]]
    others = [other for other, (framework, *_) in NEEDS.items() if framework in absent]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(adapter=adapter, absent=absent, others=others))
    bare.start(script, [], tmp_path, 1, {"DS_ACCELERATOR": "cpu"}).wait().require_success()
