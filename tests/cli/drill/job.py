"""A small training job for the drill: the loop of the core, on one rank or under torchrun.

python job.py RUN_DIR [--steps N] [--save-every N] [--augment]
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from resume_adapters import KeepLast
from resume_adapters.core.loop.loop import ResumableLoop
from resume_adapters.core.ranks import current_ranks
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.cadence import Cadence
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.data import ElasticSampler

from plain_torch import PlainTorch

_COUNT = itertools.count(1)


class Numbers(Dataset[float]):
    """Numbers; with ``augment`` some are moved by a count that no part of the state holds.

    Not all, else the batch after a save would have some, and the resume be refused.
    """

    def __init__(self, augment: bool) -> None:
        self.augment = augment

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        return index + (next(_COUNT) / 100 if self.augment and index % 3 == 0 else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--augment", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    ranks = current_ranks()
    framework = PlainTorch(accumulation=1, ranks=ranks.world_size)
    run = ResumableRun(options.run_dir, RunOptions(keep=KeepLast(2), cadence=Cadence(options.save_every)), ranks=ranks)
    data = Numbers(options.augment)
    sampler = ElasticSampler(len(data), seed=1, rank=ranks.rank, world_size=ranks.world_size)
    loader = DataLoader(data, 2, sampler=sampler)
    with ResumableLoop(framework, run, ResumeOptions(), each_epoch=False) as loop:
        for _ in loop.epochs(max_steps=options.steps):
            for batch in loop.batches(loader):
                loop.step(framework.train(batch))
                time.sleep(0.03)  # a save is committed a step or two later, as in a training of some size


if __name__ == "__main__":
    main()
