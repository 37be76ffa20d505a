"""What the ranks of the core's tests do: real processes over gloo, forked by ``launch.Server``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import faults
from miniature import Miniature
from resume_adapters.core.ranks import current
from resume_adapters.core.stop import Agreement, StopFlag, StopOn
from resume_adapters.errors import ResumeError

LAST = 8


def agree(rank: int, asked: str) -> dict[str, Any]:
    """Run steps; this rank is sent SIGTERM during the step that ``asked`` names for it."""
    mine = json.loads(asked)[rank]
    flag = StopFlag(StopOn())
    flag.install()
    agreement = Agreement(current(), flag)
    stopped = None
    for step in range(LAST):
        if step == mine:
            os.kill(os.getpid(), signal.SIGTERM)
        if agreement.reached():
            stopped = step
            break
    still = stopped is not None and agreement.reached() and agreement.reached()
    agreement.close()
    return {"stopped": stopped, "reason": flag.reason, "still": still}


def save(rank: int, directory: str, *steps: str) -> dict[str, Any]:
    """Save and commit some steps."""
    job = Miniature(Path(directory), ranks=current())
    for step in steps:
        job.commit(int(step))
    job.run.close()
    return {"resumed": job.step, "committed": job.committed()}


def resume(rank: int, *directories: str) -> dict[str, Any]:
    """Resume, each rank from its own view of the run directory, and commit one more step."""
    job = Miniature(Path(directories[rank]), ranks=current())
    found = {"resumed": job.step, "text": job.text, "rejected": [each.reason for each in job.choice.rejected]}
    job.commit(job.step + 10)
    job.run.close()
    return found


def start_from(rank: int, directory: str, *named: str) -> dict[str, Any]:
    """Start a run that has no checkpoint of its own from the one that each rank names."""
    return {"resumed": Miniature(Path(directory), ranks=current(), resume=named[rank]).step}


def fail(rank: int, directory: str, where: str, failing: str) -> dict[str, Any]:
    """Save while one rank's disk, framework or adapter fails; then save again, all ranks together."""
    storage = faults.FailingStorage(28)
    storage.fail_at = None
    job = Miniature(Path(directory), ranks=current(), storage=storage)
    job.commit(10)
    mine = rank == int(failing)
    facts: dict[str, Any] = {}
    if mine and where == "facts":
        facts = {"step": "given twice", "no_such_field": 1}
    if mine and where in ("write", "commit", "after"):
        storage.fail_at = len(storage.operations) + {"write": 8, "commit": 14, "after": 28}[where]
    heard = []
    for attempt in (lambda: job.save(20, **facts), job.run.flush):
        try:
            attempt()
        except ResumeError as error:
            heard.append(f"{type(error).__name__}: {error}")
            break
    storage.fail_at = None
    committed_then = job.committed()
    job.commit(30)
    return {"heard": heard, "then": committed_then, "at_last": job.committed(), "rank": rank}


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    work = {each.__name__: each for each in (agree, save, resume, start_from, fail)}[sys.argv[1]]
    try:
        result = work(rank, *sys.argv[2:])
    except ResumeError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    Path(f"result.{rank}").write_text(json.dumps(result))
    dist.barrier()


main()
