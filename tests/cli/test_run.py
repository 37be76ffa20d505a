"""``run`` starts a command in whose processes every Trainer resumes; here, what it passes on and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resume_adapters import KeepBest, KeepLast, StopOn, unedited
from resume_adapters.core.session.options import options_of_environment

Command = Callable[..., Any]
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


def shown(command: Command, *words: object) -> tuple[dict[str, str], list[str]]:
    done = command("run", *words)
    assert done.code == 0, done.err
    environment, arguments = json.loads(done.out)
    return environment, arguments


def test_the_options_reach_the_command(command: Command, tmp_path: Path) -> None:
    options = ["--keep-last", 3, "--keep-best", "eval_loss", "--save-every", "30m", "--no-verify", "--exit-code", 85]
    environment, arguments = shown(
        command, *options, "--run-dir", tmp_path, "--", sys.executable, "-c", SHOW, "--keep-last", "7"
    )
    assert environment["RESUME_ADAPTERS"] == "1" and environment["RESUME_ADAPTERS_RUN_DIR"] == str(tmp_path)
    assert arguments == ["--keep-last", "7"]
    found = options_of_environment(environment)
    assert found["keep"] == KeepBest(1, "eval_loss") | KeepLast(3)
    assert found["save_every"] == timedelta(minutes=30)
    assert (found["stop"], found["verify"], found["resume"]) == (StopOn(exit_code=85), False, "auto")


def test_a_job_that_only_takes_an_environment_gets_the_same(command: Command, tmp_path: Path) -> None:
    """What ``env`` prints, evaluated by a shell, is what ``run`` sets."""
    options = ["--keep-last", "3", "--run-dir", f"{tmp_path}/a 'run'"]
    lines = command("env", *options).out
    told = [sys.executable, "-c", SHOW]
    done = subprocess.run(["sh", "-c", f'{lines}"$@"', "sh", *told], capture_output=True, text=True, check=True)
    environment, _ = json.loads(done.stdout)
    of_run, _ = shown(command, *options, "--", *told)
    names = [name for name in of_run if name.startswith(("RESUME_ADAPTERS", "PYTHON"))]
    assert len(names) >= 5 and {name: environment[name] for name in names} == {name: of_run[name] for name in names}


def test_a_script_is_run_by_this_python_and_keeps_its_options(command: Command, tmp_path: Path) -> None:
    """As ``torchrun --no-python resume-adapters run train.py --lr 1`` starts it."""
    (tmp_path / "train.py").write_text(SHOW)
    environment, arguments = shown(command, tmp_path / "train.py", "--save-every", "x", "--", "y")
    assert arguments == ["--save-every", "x", "--", "y"]
    assert environment["RESUME_ADAPTERS_OPTIONS"] == "{}" and "RESUME_ADAPTERS_RUN_DIR" not in environment


@pytest.mark.parametrize(("given", "found"), [(None, "0"), ("7", "7"), ("random", "random")])
def test_sets_have_the_same_order_in_each_launch(
    command: Command, monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    show = "import json, os; print(json.dumps([dict(os.environ), [hash('a')]]))"
    environment, hashes = shown(command, "--", sys.executable, "-c", show)
    assert environment["PYTHONHASHSEED"] == found
    assert (hashes == shown(command, "--", sys.executable, "-c", show)[1]) is (given != "random")


def test_the_command_is_the_process_itself(command: Command) -> None:
    """A signal, and a supervisor's kill, reach the training and not something before it."""
    done = command("run", "--", sys.executable, "-c", "import os, sys; os.kill(os.getpid(), 9)")
    assert done.code == -9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "no-such-program"], "there is no program no-such-program"),
        (["--save-every", "often", "train.py"], "invalid save_every 'often'"),
        (["--keep-within", "long", "train.py"], "invalid period 'long'"),
        (["--on-save-error", "shrug", "train.py"], "shrug"),
        (["--run-dir", "s3://bucket/run", "train.py"], "expected a directory on a mounted file system"),
        ([], "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_before_anything_is_run(command: Command, words: list[str], said: str) -> None:
    done = command("run", *words)
    assert done.code == 2 and said in done.err


def test_a_command_that_cannot_be_reached_is_refused(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what runs it, be it a Python or the first line of a script, or by what torch is told."""
    bare = tmp_path / "python3"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    tool = tmp_path / "tool"
    tool.write_text(f"#!{bare}\n")
    for each in (bare, tool):
        each.chmod(0o755)
        done = command("run", "--", each, "-c", "")
        assert done.code == 2 and f"{bare}, which runs {each}, does not have this version" in done.err
    for flag in ("-I", "-E"):
        done = command("run", "--", sys.executable, flag, "-c", "")
        assert done.code == 2 and "is told to ignore PYTHONPATH" in done.err
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho done\n")
    script.chmod(0o755)
    assert command("run", "--", script).out == "done\n"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    done = command("run", "--", script)
    assert done.code == 2 and "unset it" in done.err


LOOP = """
import torch
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(1)).sum().backward()
    optimizer.step()
print("trained")
"""

OWN_OPTIMIZER = """
class Descent:
    def __init__(self, weights, lr):
        self.weights = list(weights)
    def step(self):
        for each in self.weights:
            each.data -= 0.1 * each.grad
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text", [LOOP, OWN_OPTIMIZER + LOOP.replace("torch.optim.SGD", "Descent")], ids=["torch", "own"]
)
def test_a_hand_written_loop_is_named_when_it_trains_and_at_the_end(text: str, tmp_path: Path) -> None:
    """Also one whose optimizer is not of torch, as fastai's."""
    script = tmp_path / "loop.py"
    script.write_text(text)
    code = "from resume_adapters.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0
    said = [line for line in done.stdout.splitlines() if "No Trainer was made in this process" in line]
    assert len(said) == 2 and "this package saves and resumes nothing" in said[1] and "a plain PyTorch loop" in said[1]
    bare = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert bare.stdout == "trained\n"


def test_a_function_is_called_after_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when the module is complete; what the module says of its source stays as it is."""
    (tmp_path / "late_module.py").write_text("content = 1\nend = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []
    finder = unedited.AfterImport("late_module", lambda: seen.append(sys.modules["late_module"].end))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    import json.tool  # another module is not its business

    assert json.tool and not seen
    import late_module  # type: ignore[import-not-found]

    assert seen == [2] and finder not in sys.meta_path
    assert late_module.__file__ == str(tmp_path / "late_module.py")
    assert late_module.__loader__.get_source("late_module") == "content = 1\nend = 2\n"
    del sys.modules["late_module"]
    absent = unedited.AfterImport("no_such_module", lambda: seen.append(0))
    monkeypatch.setattr(sys, "meta_path", [absent, *sys.meta_path])
    with pytest.raises(ModuleNotFoundError):
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert seen == [2] and os.environ.get("RESUME_ADAPTERS") != "1"
