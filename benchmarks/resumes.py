"""The losses of a training job that is killed and resumed in four ways; ``benchmarks.pictures`` draws them.

One way is this package. The other three are common in scripts: load the weights alone; ``load_state`` and start the
epoch again; and Accelerate's documented recipe, ``load_state`` and ``skip_first_batches``, which gets the right batches
but different dropout masks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

STEPS, SAVED, KILLED = 144, 80, 88
"""Optimizer steps of the whole job, of the checkpoint that is resumed from, and of the kill."""

WRONG = {
    "weights": "the weights alone, on the right data",
    "replay": "load_state, and the epoch from its beginning",
    "recipe": "load_state and skip_first_batches",
}

_CONTEXT, _TEXT, _BATCH = 64, 1 << 14, 8
Losses = dict[int, float]


def measure(directory: Path) -> dict[str, Losses]:
    """Train once without a kill, once with one, and resume in each way; return the loss of each step."""
    checkpoint = directory / "run" / f"checkpoint_{SAVED}"
    measured = {"reference": _job(directory, "reference", directory / "undisturbed")}
    _job(directory, "killed", directory / "run")
    for kind in WRONG:
        measured[kind] = _job(directory, kind, checkpoint)
    measured["exact"] = _job(directory, "exact", directory / "run")
    return measured


def _job(directory: Path, kind: str, where: Path) -> Losses:
    trace = directory / f"{kind}.jsonl"
    command = [sys.executable, "-m", "benchmarks.resumes", kind, str(where), str(trace)]
    ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    if ended != (-signal.SIGKILL if kind == "killed" else 0):
        raise RuntimeError(f"the job {kind} ended with {ended}")
    lines = map(json.loads, trace.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


class _Job:
    """Everything that a launch creates."""

    def __init__(self, trace: Path) -> None:
        import torch
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration, set_seed
        from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

        self.trace = trace
        seedable = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=True, dataloader_config=seedable)
        set_seed(0)
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = bytearray(b"".join(file.read_bytes() for file in files)[:_TEXT])
        blocks: Any = torch.frombuffer(text, dtype=torch.uint8).long().view(-1, _CONTEXT)
        size = GPT2Config(vocab_size=256, n_positions=_CONTEXT, n_embd=64, n_layer=2, n_head=4, eos_token_id=0)
        model = GPT2LMHeadModel(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        schedule = get_cosine_schedule_with_warmup(optimizer, 8, STEPS)
        loader: Any = torch.utils.data.DataLoader(blocks, batch_size=_BATCH, shuffle=True)
        self.batches = len(loader)
        prepared = self.accelerator.prepare(model, optimizer, loader, schedule)
        self.model, self.optimizer, self.loader, self.schedule = prepared

    def update(self, batch: Any, step: int) -> Any:
        """Take an optimizer step, and write its loss to a file at once, so that a kill cannot lose it."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        with self.trace.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        return loss

    def with_this_package(self, run_dir: Path, killed: bool) -> None:
        from resume_adapters.accelerate import register_for_resume

        run = register_for_resume(self.accelerator, run_dir=run_dir, save_every=SAVED)
        for epoch in run.epochs(max_steps=STEPS):
            self.loader.set_epoch(epoch)
            for batch in run.batches(self.loader):
                run.step(loss=self.update(batch, run.global_step + 1))
                if killed and run.global_step == KILLED:
                    os.kill(os.getpid(), signal.SIGKILL)

    def bare(self, kind: str, checkpoint: Path) -> None:
        from safetensors.torch import load_model

        if kind == "weights":
            load_model(self.accelerator.unwrap_model(self.model), checkpoint / "model.safetensors")
        else:
            self.accelerator.load_state(str(checkpoint))
        epoch, done = divmod(SAVED, self.batches)
        step = SAVED
        while step < STEPS:
            self.loader.set_epoch(epoch)
            skip = done if kind != "replay" else 0
            for batch in self.accelerator.skip_first_batches(self.loader, skip):
                step += 1
                self.update(batch, step)
                if step == STEPS:
                    break
            epoch, done = epoch + 1, 0


if __name__ == "__main__":
    _, what, where, trace = sys.argv
    job = _Job(Path(trace))
    if what in WRONG:
        job.bare(what, Path(where))
    else:
        job.with_this_package(Path(where), killed=what == "killed")
