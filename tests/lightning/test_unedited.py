"""A script that says nothing of this package resumes under ``resume-adapters run``."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from resume_adapters.core.session.options import OPTIONS
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.lightning import ResumeCallback
from resume_adapters.unedited import ENTRY

SCRIPT = """
import glob, hashlib, os, signal, time
import torch
import lightning.pytorch as pl


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(1, 8), torch.nn.Dropout(0.5)

    def training_step(self, batch, batch_idx):
        if self.global_step == int(os.environ.get("KILL", -1)):
            while not glob.glob("*/*step=8.ckpt.resume/manifest.json"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.drop(self.layer(batch + torch.rand(1))).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


pl.seed_everything(1)
model = Model()
saving = pl.callbacks.ModelCheckpoint(dirpath="out", every_n_train_steps=4, save_top_k=-1)
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[saving])
trainer.fit(model, torch.utils.data.DataLoader(torch.rand(32, 1), batch_size=4, shuffle=True))
print(hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest())
"""


def launch(
    directory: Path, *front: str, package: str = "lightning.pytorch", script: str = SCRIPT, **environment: str
) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(script.replace("lightning.pytorch", package))
    return subprocess.run(
        [*front, "train.py"],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def bare_and_resumed(
    place: Path, *options: str, kill: str = "11", **launched: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Launch a script as it is, and, under ``run`` with these options, until it is killed and then to its end."""
    reference = launch(place / "bare", sys.executable, **launched)
    assert reference.returncode == 0, reference.stderr
    front = [sys.executable, "-m", "resume_adapters.cli", "run", *options]
    assert launch(place / "run", *front, KILL=kill, **launched).returncode == -9
    done = launch(place / "run", *front, **launched)
    assert done.returncode == 0, done.stderr
    return reference, done


@pytest.mark.thorough
@pytest.mark.parametrize("package", ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.long)])
def test_a_killed_script_resumes_and_equals_one_that_was_not_killed(tmp_path: Path, package: str) -> None:
    """Under either name: with ``lightning`` both are installed, and many libraries make the Trainer of the other."""
    pytest.importorskip(package)
    other = "pytorch_lightning" if package == "lightning.pytorch" else "lightning"
    script = f"import {other}\n{SCRIPT}"
    reference, done = bare_and_resumed(tmp_path, "--keep-last", "1", package=package, script=script)
    assert "Resuming from" in done.stderr and "step=8.ckpt" in done.stderr and "No Trainer" not in done.stderr
    assert done.stdout.splitlines()[-1] == reference.stdout.splitlines()[-1]


WRITER = """from lightning.pytorch.cli import SaveConfigCallback


class Parser:
    def save(self, config, path, **more):
        open(path, "w").write(config)


if __name__ == "__main__":
"""


@pytest.mark.thorough
def test_ranks_that_their_trainer_spawns_resume_as_others(tmp_path: Path) -> None:
    """They unpickle trainer and callbacks, where none is made. A relaunch finds the config of LightningCLI."""
    spawning = SCRIPT.replace("logger=False", 'logger=False, strategy="ddp_spawn", devices=2')
    writing = spawning.replace("[saving]", "[saving, SaveConfigCallback(Parser(), 'lr: 1')]")
    front, back = writing.replace("max_epochs=2", 'max_epochs=int(os.environ["EPOCHS"])').split("pl.seed")
    script = front + WRITER + textwrap.indent(f"pl.seed{back}", "    ")
    for epochs, said in {"1": "step=4.ckpt saved", "2": "step=4.ckpt resumed"}.items():
        done = launch(tmp_path, sys.executable, "-m", "resume_adapters.cli", "run", script=script, EPOCHS=epochs)
        assert done.returncode == 0 and said in done.stderr and "No Trainer" not in done.stderr, done.stderr


WITHOUT_THE_STATE = {
    "no ModelCheckpoint": ("callbacks=[saving]", "enable_checkpointing=False"),
    "weights alone": ("every_n_train_steps=4", "every_n_train_steps=4, save_weights_only=True"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("saves", ["no ModelCheckpoint", pytest.param("weights alone", marks=pytest.mark.long)])
def test_a_script_that_saves_no_whole_state_resumes_where_it_is_said_how_often_to_save(
    tmp_path: Path, saves: str
) -> None:
    """As the trainers within many libraries."""
    script = SCRIPT.replace(*WITHOUT_THE_STATE[saves])
    reference, done = bare_and_resumed(tmp_path, "--save-every", "4", script=script)
    assert "Resuming from resume-step=8.ckpt" in done.stderr, done.stderr
    assert done.stdout.splitlines()[-1] == reference.stdout.splitlines()[-1]
    weights = {file.name for file in (tmp_path / "bare").glob("out/*.ckpt")}
    assert weights == {file.name for file in (tmp_path / "run").glob("out/epoch*.ckpt")}


BESIDE = """
def briefly():
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    brief = Model()
    pl.Trainer(max_steps=3, **options).fit(brief, torch.utils.data.DataLoader(torch.rand(32, 1), batch_size=4))
    print(brief.layer.weight.sum().item())
"""


@pytest.mark.thorough
def test_trainings_beside_it_that_save_nothing_are_runs_of_their_own(tmp_path: Path) -> None:
    front, back = SCRIPT.split("pl.seed_everything(1)")
    script = f"{front}{BESIDE}pl.seed_everything(1)\nbriefly(){back.replace('out', 'checkpoints')}briefly()\n"
    reference, done = bare_and_resumed(tmp_path, "--save-every", "2", script=script)
    assert "This run finished at step 3" in done.stderr, done.stderr
    assert done.stdout == reference.stdout


FOLDS = """
import os, signal
import torch
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel


class Model(BoringModel):
    def on_train_batch_start(self, batch, batch_idx):
        if os.environ.get("KILL") == f"{fold}:{self.global_step}":
            os.kill(os.getpid(), signal.SIGKILL)


for fold in range(2):
    pl.seed_everything(fold)
    model = Model()
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", enable_progress_bar=False, limit_train_batches=4)
    trainer.fit(model)
    print(fold, trainer.checkpoint_callback.dirpath.split("/")[-2], model.layer.weight.sum().item())
"""


@pytest.mark.thorough
def test_folds_in_one_process_are_as_many_runs(tmp_path: Path) -> None:
    reference, done = bare_and_resumed(tmp_path, kill="1:9", script=FOLDS)
    assert "This run finished at step 12" in done.stderr, done.stderr
    assert done.stdout == reference.stdout and "1 version_1" in done.stdout


def test_options_that_do_not_apply_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RESUME_ADAPTERS", "1")
    monkeypatch.syspath_prepend(ENTRY)
    monkeypatch.setenv(OPTIONS, '{"save_every": 1}')
    callbacks: list[Any] = [ModelCheckpoint(dirpath=tmp_path / "run"), ResumeCallback()]
    options = {"accelerator": "cpu", "logger": False, "max_steps": 2, "limit_val_batches": 0, "callbacks": callbacks}
    pl.Trainer(default_root_dir=tmp_path, **options).fit(BoringModel())
    assert caplog.text.count("has a ResumeCallback of its own") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["lightning.pytorch", "pytorch_lightning"])
def test_the_package_that_was_imported_first_is_taken(first: str) -> None:
    """A library may import the other one later."""
    pytest.importorskip(first)
    both = [first, *({"lightning.pytorch", "pytorch_lightning"} - {first})]
    script = f"import {', '.join(both)}\nfrom resume_adapters.lightning.compat import pl\nprint(pl.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first


def test_a_trainer_of_the_other_package_is_refused_with_the_remedy(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning")
    connector = importlib.import_module("pytorch_lightning.trainer.connectors.callback_connector")
    if "parent=Callback" not in inspect.getsource(connector._validate_callbacks_list):
        pytest.skip(f"a Trainer of pytorch_lightning {other.__version__} takes no callback of lightning")
    trainer = other.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, callbacks=[ResumeCallback()])
    with pytest.raises(UnsupportedSetting, match=r"of pytorch_lightning, .* import pytorch_lightning first"):
        trainer.fit(importlib.import_module("pytorch_lightning.demos.boring_classes").BoringModel())
