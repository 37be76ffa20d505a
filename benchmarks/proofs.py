"""How long a start that resumes takes to its first step, against the bare framework's, which proves nothing.

``python -m benchmarks.proofs FRAMEWORK WAY DIRECTORY LAYERS`` is one start; it prints its seconds.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import figure
from benchmarks.figure import Figure

GOAL = 1.3
_WIDTH = 1024
_SIZES = {"0.5 GB": 40, "2 GB": 160}
"""Layers of a width of 1024, by the size of the model with both moments of AdamW."""
_SAVED = 2


def measure(rounds: int) -> list[Figure]:
    """Return the time to the first step against a bare start, for each framework and size."""
    return [_against_bare(name, size, rounds) for size in _SIZES for name in _TRAINERS]


def _against_bare(framework: str, size: str, rounds: int) -> Figure:
    with tempfile.TemporaryDirectory() as name:

        def seconds(way: str) -> float:
            command = [sys.executable, "-m", "benchmarks.proofs", framework, way, name, str(_SIZES[size])]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            return float(done.stdout.split()[-1])

        seconds("save")
        pairs = [(seconds("resume"), seconds("bare")) for _ in range(rounds)]
    return figure.of(
        f"{framework}, {size}: a start that resumes, to its first step, against a bare one",
        [ours / bare for ours, bare in pairs],
        "x",
        GOAL,
        detail=f"a bare one takes {figure.median([bare for _, bare in pairs]):.2f} s",
    )


def _model(layers: int) -> Any:
    import torch

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(layers))

        def forward(self, rows: Any, labels: Any = None) -> Any:
            used: Any = [each.weight[0, 0] for each in self.layers[1:]]  # type: ignore[index]
            return {"loss": self.layers[0](rows).mean() + sum(used)}

    return Layers()


def _data() -> list[dict[str, Any]]:
    import torch

    return [{"rows": torch.full((_WIDTH,), float(index)), "labels": 0} for index in range(64)]


def _trainer(way: str, directory: Path, layers: int) -> Callable[[], object]:
    from transformers import Trainer, TrainingArguments

    from resume_adapters.hf import ResumeCallback

    steps = _SAVED if way == "save" else 2 * _SAVED
    arguments = TrainingArguments(
        str(directory), max_steps=steps, save_steps=_SAVED, report_to=[], use_cpu=True, disable_tqdm=True
    )
    callbacks: Any = [] if way == "bare" else [ResumeCallback()]
    trainer = Trainer(_model(layers), arguments, train_dataset=_data(), callbacks=callbacks)
    checkpoint = str(directory / f"checkpoint-{_SAVED}") if way == "bare" else None
    return lambda: trainer.train(resume_from_checkpoint=checkpoint)


def _accelerate(way: str, directory: Path, layers: int) -> Callable[[], object]:
    import torch
    from accelerate import Accelerator

    from resume_adapters.accelerate import register_for_resume

    accelerator, model = Accelerator(cpu=True), _model(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    loader: Any = torch.utils.data.DataLoader(_data(), batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def update(batch: Any) -> None:
        accelerator.backward(model(batch["rows"])["loss"])
        optimizer.step()
        optimizer.zero_grad()

    def bare() -> None:
        accelerator.load_state(str(directory / f"checkpoint_{_SAVED}"))
        for batch in accelerator.skip_first_batches(loader, _SAVED):
            update(batch)

    def resumed() -> None:
        run = register_for_resume(accelerator, run_dir=directory, save_every=_SAVED)
        for _ in run.epochs(max_steps=_SAVED if way == "save" else 2 * _SAVED):
            for batch in run.batches(loader):
                update(batch)
                run.step()

    return bare if way == "bare" else resumed


def _lightning(way: str, directory: Path, layers: int) -> Callable[[], object]:
    import lightning
    import torch

    from resume_adapters.lightning import ResumeCallback, ResumeCheckpointIO

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model(layers)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(batch["rows"])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(directory, "saved", every_n_train_steps=_SAVED)
    trainer = lightning.Trainer(
        max_steps=_SAVED if way == "save" else 2 * _SAVED,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints] if way == "bare" else [checkpoints, ResumeCallback()],
        plugins=[] if way == "bare" else [ResumeCheckpointIO()],
    )
    loader: Any = torch.utils.data.DataLoader(_data(), batch_size=8)  # type: ignore[arg-type]
    path = str(directory / "saved.ckpt") if way == "bare" else "last"
    return lambda: trainer.fit(Module(), loader, ckpt_path=path)


_TRAINERS = {"Trainer": _trainer, "Accelerate": _accelerate, "Lightning": _lightning}


def main() -> None:
    """Start once, and print the seconds to the first forward pass; or save."""
    import torch

    _, framework, way, directory, layers = sys.argv
    train = _TRAINERS[framework](way, Path(directory), int(layers))
    gc.collect()  # the imports leave a search for garbage due, 0.3 s long, which falls into whichever start reaches it
    began = time.perf_counter()

    def first(*_: Any) -> None:
        print(time.perf_counter() - began, flush=True)
        os._exit(0)

    if way != "save":
        torch.nn.modules.module.register_module_forward_pre_hook(first)
    train()
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
