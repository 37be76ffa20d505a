"""Scripts with loops of their own, written as the documentation says: killed three times, they end as without us."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from loops import ends_as_without
from strangers import HERE

ACCELERATE = ("nanogpt", "gan", "curriculum", "diffusion", "counted", "schedule_free", "early_stopping")
FINDERS = ("lr_find", "scale_batch_size", "LearningRateFinder", "BatchSizeFinder")
LIGHTNING = ("lightning_finetuning", "lightning_average", "lightning_validations", "lightning_gan", "fabric_mnist")


def needs(framework: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(framework) is None, reason=f"needs {framework}")


@needs("accelerate")
@pytest.mark.parametrize("name", ACCELERATE)
def test_a_loop_with_accelerate(name: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / f"{name}.py", tmp_path, 18)


@needs("accelerate")
def test_processes_that_train_apart(tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "local_sgd.py", tmp_path, 18, ranks=2)


@needs("lightning")
@pytest.mark.parametrize("finder", FINDERS)
def test_a_finder_of_lightning(finder: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "lightning_finders.py", tmp_path, 18, finder)


@needs("lightning")
@pytest.mark.parametrize("name", LIGHTNING)
def test_a_script_of_lightning(name: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / f"{name}.py", tmp_path, 18)


@needs("jsonargparse")
def test_a_command_line_of_lightning(tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "lightning_cli.py", tmp_path, 18)


@needs("deepspeed")
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_with_a_json_file(stage: int, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "deepspeed_json.py", tmp_path, 18 + stage, str(stage))


@needs("deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["deepspeed_accelerate", "deepspeed_trainer"])
def test_auto_values_of_a_json_file(name: str, stage: int, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / f"{name}.py", tmp_path, 18, str(stage))


CIFAR = {
    **{f"stage {stage}": (2, [str(stage), "fp32"]) for stage in range(3)},
    "bf16": (2, ["2", "bf16"]),
    "fp16": (1, ["1", "fp16"]),
    "offload 2": (1, ["2", "fp32", "offload"]),
}


@needs("deepspeed")
@pytest.mark.parametrize("case", CIFAR)
def test_deepspeeds_example_on_images(case: str, tmp_path: Path) -> None:
    ranks, arguments = CIFAR[case]
    ends_as_without(HERE / "scripts" / "deepspeed_cifar.py", tmp_path, 18, *arguments, ranks=ranks)


@needs("deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_with_a_json_file_on_two_processes(stage: int, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "deepspeed_json.py", tmp_path, 18, str(stage), ranks=2)
