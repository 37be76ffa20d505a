"""Scripts with loops of their own, written as the documentation says: killed three times, they end as without us."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from loops import ends_as_without
from strangers import HERE

ACCELERATE = ("nanogpt", "gan", "curriculum", "diffusion", "counted")


def needs(framework: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(framework) is None, reason=f"needs {framework}")


@needs("accelerate")
@pytest.mark.parametrize("name", ACCELERATE)
def test_a_loop_with_accelerate(name: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / f"{name}.py", tmp_path, 18)


@needs("deepspeed")
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_with_a_json_file(stage: int, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "deepspeed_json.py", tmp_path, 18 + stage, str(stage))


@needs("deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["deepspeed_accelerate", "deepspeed_trainer"])
def test_auto_values_of_a_json_file(name: str, stage: int, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / f"{name}.py", tmp_path, 18, str(stage))
