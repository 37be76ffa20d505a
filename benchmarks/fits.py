"""What Lightning's ``fit`` pays: time added to a step, and a 500 MB save against a bare one and ``AsyncCheckpointIO``.

``python -m benchmarks.fits DIRECTORY KIND`` is one job that saves; its last line is a JSON record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks import figure
from benchmarks.figure import Figure
from benchmarks.job import SAVES, WIDTH
from benchmarks.saves import GOAL_BLOCKED, GOAL_RATIO
from benchmarks.stack import Rows, Stack
from benchmarks.steps import GOAL_MICROSECONDS, Turns
from benchmarks.training import NEVER, sync_tree
from benchmarks.turns import ROUND, WARM_UP, means_of_turns, on_one_processor, run_together

_BARE, _ASYNC, _PACKAGE = "bare", "async", "package"


class _Module(pl.LightningModule):
    """A stack of square linear layers, trained with AdamW."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stack = Stack(width, layers)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.stack(batch["inputs"])["loss"]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def _fit(directory: Path, kind: str, *, width: int, layers: int, steps: int, save_every: int, clock: Any) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

    torch.set_num_threads(1)
    saving = pl.callbacks.ModelCheckpoint(directory, every_n_train_steps=save_every, save_top_k=1)
    plugins: dict[str, list[Any]] = {_BARE: [], _ASYNC: [AsyncCheckpointIO()], _PACKAGE: [ResumeCheckpointIO()]}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[*([ResumeCallback(stage="memory")] if kind == _PACKAGE else []), clock, saving],
        plugins=plugins[kind],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.utils.data.DataLoader(Rows(width), batch_size=1)
    trainer.fit(_Module(width, layers), rows)


# ---- Steps


class _StepClock(pl.Callback):
    """Times each step on this thread's processor, and passes the turn on after some."""

    def __init__(self, turns: Turns, which: int) -> None:
        self.times: list[float] = []
        self._turns, self._which, self._begun = turns, which, 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.thread_time() - self._begun)
        if len(self.times) % ROUND == 0:
            self._turns.pass_on(self._which)
            self._turns.wait(self._which)
        self._begun = time.thread_time()


def measure_steps(steps: int) -> list[Figure]:
    """Return the processor time added per step: two fits in two threads take turns."""
    turns = Turns(2)
    clocks = [_StepClock(turns, which) for which in range(2)]

    def train(which: int) -> None:
        turns.wait(which)
        try:
            with tempfile.TemporaryDirectory() as directory:
                kind = (_BARE, _PACKAGE)[which]
                size = {"width": 16, "layers": 1, "save_every": NEVER}
                _fit(Path(directory), kind, steps=WARM_UP + steps, clock=clocks[which], **size)
        finally:
            turns.pass_on(which)

    with on_one_processor():
        run_together(train)
    bare, package = (means_of_turns([each * 1e6 for each in clock.times[WARM_UP:]]) for clock in clocks)
    return [
        figure.of(
            "Lightning: processor time added per step",
            [more - less for less, more in zip(bare, package, strict=True)],
            "us",
            GOAL_MICROSECONDS,
            detail=f"{len(bare)} pairs of {ROUND} steps; a bare one takes {figure.median(bare):.0f} us",
        )
    ]


# ---- Saves


class _SaveClock(pl.Callback):
    """Times each save from the end of its step to the start of the next, and until it is safe."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory, self.kind = directory, kind
        self.record: dict[str, list[float]] = {"blocked": [], "safe": []}
        self._begun: float | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        self._begun = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._begun is None:
            return
        self.record["blocked"].append(time.perf_counter() - self._begun)
        if self.kind == _PACKAGE:
            session = next(each.session for each in trainer.callbacks if hasattr(each, "session"))
            session.run.saver.flush()
        elif self.kind == _BARE:
            sync_tree(self.directory)
        self.record["safe"].append(time.perf_counter() - self._begun)
        os.sync()
        self._begun = None


def measure_saves(rounds: int) -> list[Figure]:
    """Return how long the training is blocked, and until the checkpoint is safe, as ratios to a bare save."""
    records: dict[str, dict[str, list[float]]] = {
        kind: {"blocked": [], "safe": []} for kind in (_BARE, _ASYNC, _PACKAGE)
    }
    for _ in range(rounds):
        for kind, record in records.items():
            with tempfile.TemporaryDirectory() as directory:
                for name, values in _run(Path(directory), kind).items():
                    record[name] += values
    blocked, safe = (figure.median(records[_BARE][name]) for name in ("blocked", "safe"))
    rows = (
        ("training blocked, against a bare save", _PACKAGE, "blocked", blocked, GOAL_BLOCKED),
        ("until committed, against a bare save with fsync", _PACKAGE, "safe", safe, GOAL_RATIO),
        ("AsyncCheckpointIO, training blocked, against a bare save", _ASYNC, "blocked", blocked, None),
    )
    return [
        figure.of(
            f"Lightning, 500 MB save: {what}",
            [seconds / bare for seconds in records[kind][name]],
            "x",
            goal,
            detail=f"a bare one takes {bare:.2f} s",
        )
        for what, kind, name, bare, goal in rows
    ]


def _run(directory: Path, kind: str) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "benchmarks.fits", str(directory), kind]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    record: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return record


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("kind", choices=(_BARE, _ASYNC, _PACKAGE))
    given = parser.parse_args()
    clock = _SaveClock(given.directory, given.kind)
    _fit(given.directory, given.kind, width=WIDTH["save"], layers=4, steps=SAVES + 2, save_every=1, clock=clock)
    print(json.dumps({name: values[1:] for name, values in clock.record.items()}))


if __name__ == "__main__":
    main()
