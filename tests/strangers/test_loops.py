"""Scripts with loops of their own, written as the documentation says: killed three times, they end as without us."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from loops import ends_as_without, run
from strangers import HERE

ACCELERATE = (
    *("nanogpt", "gan", "curriculum", "diffusion", "counted", "schedule_free", "early_stopping"),
    *("autoregressive", "cross_validation", "batch_size_finder", "drawn"),
)
FINDERS = ("lr_find", "scale_batch_size", "LearningRateFinder", "BatchSizeFinder")
LIGHTNING = (
    *("lightning_finetuning", "lightning_average", "lightning_validations", "lightning_gan"),
    *("lightning_transformer", "lightning_ppo", "lightning_saves", "lightning_limits"),
    *("fabric_mnist", "fabric_dcgan", "fabric_kfold", "fabric_maml"),
)


def needs(framework: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(framework) is None, reason=f"needs {framework}")


@pytest.fixture(autouse=True)
def _operators(request: pytest.FixtureRequest) -> None:
    if any(each.kwargs["reason"] == "needs deepspeed" for each in request.node.iter_markers("skipif")):
        _compile_operators()


@functools.cache
def _compile_operators() -> None:
    """Compile DeepSpeed's operators, which takes minutes on a loaded machine, before a launch has a time limit."""
    subprocess.run([sys.executable, "-c", "import deepspeed_operators"], cwd=HERE.parent, check=True)


@needs("accelerate")
@pytest.mark.parametrize("name", ACCELERATE)
def test_a_loop_with_accelerate(name: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / f"{name}.py", tmp_path, 18)


@needs("timm")
def test_a_schedule_of_timm(tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "timm_schedule.py", tmp_path, 18)


@needs("accelerate")
def test_processes_that_train_apart(tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "local_sgd.py", tmp_path, 18, ranks=2)


@needs("accelerate")
@pytest.mark.parametrize("hook", ["fp16", "power_sgd"])  # the batched one of torch 2.13 fails by itself
def test_a_communication_hook_of_ddp(hook: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "comm_hook.py", tmp_path, 18, hook, ranks=2)


@needs("lightning")
@pytest.mark.parametrize("finder", FINDERS)
def test_a_finder_of_lightning(finder: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "lightning_finders.py", tmp_path, 18, finder)


@needs("lightning")
@pytest.mark.parametrize("name", LIGHTNING)
def test_a_script_of_lightning(name: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / f"{name}.py", tmp_path, 18)


@needs("lightning")
def test_a_replay_buffer_is_named(tmp_path: Path) -> None:
    said = run(HERE / "scripts" / "lightning_dqn.py", (), tmp_path, adapted=True)
    assert "MISSING: module.buffer.buffer, a deque, has changed since the start and is not data" in said


@needs("jsonargparse")
def test_a_command_line_of_lightning(tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "lightning_cli.py", tmp_path, 18)


@needs("deepspeed")
def test_an_engine_whose_batch_grows(tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "deepspeed_growing.py", tmp_path, 18)


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
    **{f"stage {stage} on {ranks}": (ranks, [str(stage), "fp32"]) for stage in range(4) for ranks in (1, 2)},
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
@pytest.mark.parametrize("name", ["deepspeed_bert", "deepspeed_gan"])
def test_an_example_of_deepspeed(name: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / f"{name}.py", tmp_path, 18)


@needs("deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_with_a_json_file_on_two_processes(stage: int, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "deepspeed_json.py", tmp_path, 18, str(stage), ranks=2)


HABITS = {
    "every_other": ("torch", "accelerate", "fabric", "lightning"),
    "attributes": ("torch", "trainer", "lightning"),
    "schedule": ("torch", "trainer", "lightning"),
    "hidden": ("torch", "trainer", "lightning"),
    "extra": ("torch", "fabric", "lightning"),
    "layerwise": ("trainer", "lightning"),
    "sparse_window": ("lightning",),
    "frozen": ("trainer",),
    "lazy": ("torch", "trainer", "lightning"),
    "quantized": ("torch", "trainer", "lightning"),
    "scripted": ("torch", "lightning"),
}
"""What a step of a training uses beside what its framework saves, and the frameworks in which it is tried."""


@needs("transformers")
@needs("lightning")
@pytest.mark.parametrize(("habit", "name"), [(habit, name) for habit, names in HABITS.items() for name in names])
def test_a_habit_of_a_training(habit: str, name: str, tmp_path: Path) -> None:
    ends_as_without(HERE / "scripts" / "habits.py", tmp_path, 18, name, habit)


def test_a_group_that_is_added_on_the_way_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"5 parameters in the optimizer.*Make all groups"):
        ends_as_without(HERE / "scripts" / "habits.py", tmp_path, 18, "torch", "groups")


@pytest.mark.parametrize(
    ("name", "habit", "named"),
    [
        ("torch", "tied", "optimizer MISSING: 1 of the parameters of Adam are no longer"),
        ("torch", "globals", "script MISSING: `CALLS`"),
        ("lightning", "globals", "script MISSING: `CALLS`"),
    ],
)
def test_a_habit_that_a_resume_would_lose_is_named(name: str, habit: str, named: str, tmp_path: Path) -> None:
    assert named in run(HERE / "scripts" / "habits.py", (name, habit), tmp_path, adapted=True)
