"""A script that says nothing of this package resumes under ``resume-adapters run``, which sets RESUME_ADAPTERS=1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments, trainer

from resume_adapters.core.session import finished
from resume_adapters.core.session.options import OPTIONS
from resume_adapters.hf import ResumeCallback
from resume_adapters.hf.unedited import CallbackOfEnvironment

SCRIPT = """
import hashlib, json, os, signal, time
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(1, 8), torch.nn.Dropout(0.5)

    def forward(self, x, y):
        return {"loss": (self.drop(self.layer(x)).sum(1) - y).square().mean()}


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"x": torch.rand(1), "y": torch.tensor(index / 32)}


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(os.environ.get("KILL", 0)):
            while not os.path.exists("out/checkpoint-8/resume/manifest.json"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(1)
args = TrainingArguments(
    output_dir="out", max_steps=16, save_steps=4, logging_steps=2, per_device_train_batch_size=4, use_cpu=True,
    report_to="none", disable_tqdm=True, dataloader_pin_memory=False, learning_rate=0.1, seed=1,
)
trainer = Trainer(Model(), args, train_dataset=Noisy(), callbacks=[Kill()])
trainer.train()
weights = b"".join(each.detach().numpy().tobytes() for each in trainer.model.parameters())
losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
print(json.dumps([hashlib.sha256(weights).hexdigest(), losses]))
"""


RUN = (sys.executable, "-m", "resume_adapters.cli", "run")


def launch(directory: Path, *front: str, script: str = SCRIPT, **environment: str) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(script)
    found = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [*front, "train.py"], cwd=directory, env=found, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.thorough
def test_a_killed_script_resumes_and_equals_one_that_was_not_killed(tmp_path: Path) -> None:
    reference = launch(tmp_path / "bare", sys.executable)
    assert reference.returncode == 0 and not (tmp_path / "bare" / "out" / ".resume").exists(), reference.stderr
    front = [*RUN, "--keep-last", "1"]
    assert launch(tmp_path / "run", *front, KILL="11").returncode == -9
    done = launch(tmp_path / "run", *front)
    assert done.returncode == 0, done.stderr
    assert "Resuming from checkpoint-8" in done.stderr and "No Trainer" not in done.stderr
    assert done.stdout.splitlines()[-1] == reference.stdout.splitlines()[-1]
    assert [each.name for each in (tmp_path / "run" / "out").glob("checkpoint-*")] == ["checkpoint-16"]


PRUNING = """
class Prune(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        for each in glob.glob("out/checkpoint-*"):
            if each != f"out/checkpoint-{state.global_step}":
                shutil.rmtree(each)
        if state.global_step == int(os.environ.get("KILL", 0)):
            os.kill(os.getpid(), signal.SIGKILL)


def late(descriptor, native=os.fsync):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.05)
    native(descriptor)


os.fsync = late
"""


@pytest.mark.thorough
def test_a_callback_that_removes_older_checkpoints_hears_of_a_new_one_once_it_is_committed(tmp_path: Path) -> None:
    """Else a kill leaves no checkpoint at all."""
    pruning = SCRIPT.replace("import hashlib", "import glob, shutil, threading\nimport hashlib")
    beginning, kill, rest = pruning.partition("class Kill")
    script = beginning + PRUNING + (kill + rest).partition("\n\n\n")[2].replace("Kill()", "Prune()")
    assert launch(tmp_path / "run", *RUN, script=script, KILL="8").returncode == -9
    done = launch(tmp_path / "run", *RUN, script=script)
    assert done.returncode == 0 and "Resuming from checkpoint-8" in done.stderr, done.stderr


@pytest.mark.thorough
@pytest.mark.long
def test_several_ranks_say_once_that_a_trainer_is_left_alone(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "train.py").write_text(SCRIPT.replace("save_steps=4", "save_only_model=True"))
    done = subprocess.run(
        [*RUN, "--keep-last", "1", "--", *torchrun, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("save_only_model=True leaves no optimizer to resume with") == 1


# ---- Which trainers it leaves alone, in this process


class Line(torch.nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (super().forward(x) - y).square().mean()}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainers that are made in a test get what RESUME_ADAPTERS=1 adds."""
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, CallbackOfEnvironment])
    finished._FINISHED.clear()
    yield


def trainer_of(directory: Path, *callbacks: Any, **options: Any) -> Trainer:
    data = [{"x": torch.tensor([i / 16]), "y": torch.tensor([i / 8])} for i in range(16)]
    given = {"max_steps": 2, "save_steps": 1, "use_cpu": True, "disable_tqdm": True, "report_to": "none", **options}
    return Trainer(Line(1, 1), TrainingArguments(str(directory), **given), train_dataset=data, callbacks=[*callbacks])


def kinds(of: Trainer) -> list[type]:
    return [type(each) for each in of.callback_handler.callbacks if isinstance(each, ResumeCallback)]


def test_the_callback_of_the_script_is_used_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTIONS, '{"keep_last": 1}')
    made = trainer_of(tmp_path, ResumeCallback())
    assert kinds(made) == [CallbackOfEnvironment, ResumeCallback]
    made.train()
    assert kinds(made) == [ResumeCallback]
    assert "has a ResumeCallback of its own" in caplog.text
    assert (tmp_path / "checkpoint-1").is_dir(), "its own options keep everything"


def test_the_one_that_is_added_comes_last_and_stays(tmp_path: Path) -> None:
    made = trainer_of(tmp_path)
    made.train()
    assert type(made.callback_handler.callbacks[-1]) is CallbackOfEnvironment
    assert json.loads((tmp_path / ".resume" / "status.json").read_bytes())["state"] == "finished"


@pytest.mark.parametrize(
    ("options", "said"),
    [({"save_strategy": "no"}, "never saves"), ({"save_only_model": True}, "leaves no optimizer")],
    ids=["no", "model"],
)
def test_a_trainer_that_saves_nothing_to_resume_from_is_left_alone(
    options: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer_of(tmp_path, **options)
    made.train()
    assert (made.state.global_step, kinds(made)) == (2, [])
    assert caplog.text.count(said) == 1 and not (tmp_path / ".resume").exists()


def test_what_the_environment_says_makes_such_a_trainer_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS, '{"save_every": 1}')
    trainer_of(tmp_path, save_strategy="no").train()
    assert (tmp_path / "checkpoint-2" / ".resume").exists() or (tmp_path / ".resume").is_dir()


def test_the_same_is_refused_as_with_a_callback(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="ignore_data_skip=True starts the epoch again"):
        trainer_of(tmp_path, ignore_data_skip=True).train()


@pytest.mark.thorough
@pytest.mark.long
def test_a_script_begins_with_the_weights_of_another_run(tmp_path: Path) -> None:
    """The option of the shell is read until the run has a checkpoint of its own."""
    assert launch(tmp_path / "a", *RUN).returncode == 0
    forking = (*RUN, "--resume", str(tmp_path / "a" / "out"), "--take", "weights")
    reference = launch(tmp_path / "b", *forking)
    assert "begins with" in reference.stderr and launch(tmp_path / "c", *forking, KILL="10").returncode != 0
    (tmp_path / "a").rename(tmp_path / "gone")
    resumed = launch(tmp_path / "c", *forking)
    assert "Resuming from checkpoint-8" in resumed.stderr, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1]) == json.loads(reference.stdout.splitlines()[-1])
