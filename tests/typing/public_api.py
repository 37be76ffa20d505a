"""What a user with strict types writes. It is not run: mypy reads it with the package, and every line must be right."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

import resume_adapters
from resume_adapters import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepWeights,
    KeepWithin,
    Policy,
    ResumeError,
    StopOn,
    Stopped,
    accelerate,
    deepspeed,
    errors,
    hf,
    lightning,
    tracker_run,
)
from resume_adapters.data import ElasticBatchSampler, ElasticSampler, ElasticShards, SeededPerSample
from resume_adapters.loop import ResumableLoop, Resumed

assert_type(resume_adapters.__version__, str)
assert_type(tracker_run("runs/a", "wandb"), str | None)


def policies() -> Policy:
    joined = KeepLast(3) | KeepBest(1, "eval_loss", mode="min") | KeepEvery(5000) | KeepWithin(timedelta(hours=6))
    joined |= KeepWeights(KeepEvery(500))
    assert_type(joined, Policy)
    return joined | KeepAll()


def stops() -> list[StopOn]:
    return [
        StopOn(),
        StopOn(signals=(SIGTERM, SIGUSR1), exit_code=85),
        StopOn(walltime="11:50:00", reserve=timedelta(minutes=5), requeue="slurm"),
        StopOn(walltime=42600, reserve="auto"),
    ]


def callbacks(model: torch.nn.Module) -> None:
    trainer = hf.ResumeCallback(keep=policies(), stop=StopOn(), save_every=500, ema=model)
    trainer.halt("the loss is not a number")
    hf.ResumeCallback(resume=Path("runs/b"), save_every="auto", mtbf=timedelta(hours=8), verify=False)
    hf.ResumeCallback(resume=resume_adapters.Fork("runs/a", take="weights+optimizer"), verify=resume_adapters.Audit(9))
    fit = lightning.ResumeCallback(resume="scratch", save_every=timedelta(minutes=10), noise=torch.Generator())
    fit.halt("the loss is not a number")
    lightning.ResumeCheckpointIO()


def loops(accelerator: Any, engine: Any, loader: DataLoader[torch.Tensor]) -> None:
    run = accelerate.register_for_resume(accelerator, run_dir=Path("runs/a"), save_every=500)
    assert_type(run, ResumableLoop)
    assert_type(run.resume(), Resumed)
    hooks: ResumableLoop = deepspeed.ResumeHooks(engine, "runs/a", keep=KeepLast(3))
    with run, hooks:
        for epoch in run.epochs(3, max_steps=1000):
            assert_type(epoch, int)
            for batch in run.batches(loader):
                run.step(loss=batch.mean(), metrics={"accuracy": 0.5})
            if run.best(run.mean_loss, mode="min", name="loss"):
                run.save("a new best")
    assert_type(run.global_step, int)
    run.finish()


def data(samples: Dataset[Any], shards: list[str]) -> list[DataLoader[Any]]:
    def read(shard: str) -> Iterator[str]:
        with open(shard) as file:
            yield from file

    sampler = ElasticSampler(1000, seed=1)
    batches = ElasticBatchSampler(1000, batch_size=8)
    sampler.set_epoch(2)
    return [
        DataLoader(SeededPerSample(samples, sampler), sampler=sampler),
        DataLoader(samples, batch_sampler=batches),
        DataLoader(ElasticShards(shards, read)),
    ]


def failures(error: ResumeError) -> str:
    assert_type(error.path, Path | None)
    assert_type(error.step, int | None)
    try:
        raise error
    except errors.NoValidCheckpoint as none:
        return none.message
    except (errors.StateMismatch, errors.NotRestored, errors.UnsupportedSetting):
        raise
    except Stopped as stopped:
        raise SystemExit(stopped.code) from stopped
