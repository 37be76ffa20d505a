"""The examples: alike but for what their frameworks make different, and each resumes after a kill."""

from __future__ import annotations

import ast
import importlib.util
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
FRAMEWORKS = ("hf", "lightning", "accelerate", "deepspeed")


def functions(framework: str) -> dict[str, str]:
    """Return what a script defines, in its order, with the source of each."""
    text = (EXAMPLES / f"{framework}_train.py").read_text()
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in found}


ALIKE = ["parse_options", "read_blocks", "main", "evaluate", "digest"]


def test_the_scripts_have_the_same_functions_in_the_same_order() -> None:
    for framework in FRAMEWORKS:
        assert [name for name in functions(framework) if name in ALIKE] == ALIKE, framework


@pytest.mark.parametrize(
    ("name", "those"),
    [
        ("read_blocks", FRAMEWORKS),
        ("digest", FRAMEWORKS),
        ("parse_options", ("hf", "lightning", "accelerate")),  # DeepSpeed's launcher has an option of its own
        ("evaluate", ("hf", "accelerate")),
        ("evaluate", ("lightning", "deepspeed")),
        ("LanguageModel", ("lightning", "deepspeed")),
        ("warm_up_and_decay", ("lightning", "deepspeed")),
    ],
)
def test_what_frameworks_do_not_make_different_is_the_same(name: str, those: tuple[str, ...]) -> None:
    assert len({functions(framework)[name] for framework in those}) == 1


@pytest.mark.parametrize("name", ["slurm.sbatch", "spot.sh", "loop.sh", "torchrun.sh"])
def test_a_launch_file_is_a_shell_script(name: str) -> None:
    assert (EXAMPLES / name).read_text().startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True)


def test_the_pod_gets_the_signal_and_has_time() -> None:
    job: Any = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 30 and pod["restartPolicy"] == "Never"
    assert pod["containers"][0]["command"] == ["python", "train.py"], "a shell in between would keep the SIGTERM"
    actions = {rule["action"]: rule for rule in job["spec"]["podFailurePolicy"]["rules"]}
    assert actions["FailJob"]["onExitCodes"]["values"] == [3], "halted"


@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is missing")
def test_the_lightning_example_resumes_after_a_kill(server: Server, tmp_path: Path) -> None:
    example = EXAMPLES / "lightning_train.py"
    options = ["--cpu", "--steps", "12", "--save-steps", "4", "--eval-steps", "6", "--output-dir"]
    expected = server.start(example, [*options, "reference"], tmp_path, 1, {}).wait().require_success()
    # The save of step 8 waited for the commit of step 4.
    watched = {"RESUME_ADAPTERS_TRACE": "trace", "RESUME_ADAPTERS_PAUSE": "step:8"}
    running = server.start(example, [*options, "run"], tmp_path, 1, watched)
    trace = tmp_path / "trace"
    while not trace.exists() or '"paused"' not in trace.read_text():
        assert running.alive()
        time.sleep(0.02)
    running.signal(signal.SIGKILL)
    assert running.wait().killed
    resumed = server.start(example, [*options, "run"], tmp_path, 1, {}).wait().require_success()
    assert "Resuming from epoch=0-step=" in resumed.output
    digests = [re.findall(r"weights sha256 (\w{64})", outcome.output) for outcome in (expected, resumed)]
    assert digests[0] == digests[1] != []
