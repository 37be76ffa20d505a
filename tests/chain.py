"""What the launch files start as ``train.py``: a training in miniature, interrupted where files of this directory say.

``at-N`` holds what happens once, in step N: a signal, or ``reclaimed``, which writes a file of that name and waits
until somebody has asked for a stop. ``final`` is the state after the last step.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import torch.distributed as dist

from resume_adapters import StopOn
from resume_adapters.core.ranks import current_ranks
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.saving.cadence import Cadence
from waiting import until

from miniature import Miniature

STEPS = 24
RUN = Path("runs/a")


def advance(text: str, step: int) -> str:
    return hashlib.sha256(f"{text} {step}".encode()).hexdigest()


def interrupt(job: Miniature, step: int) -> None:
    wanted = Path(f"at-{step}")
    if not wanted.exists():
        return
    what = wanted.read_text()
    wanted.unlink()
    if what == "reclaimed":
        Path(what).touch()
        until(lambda: job.run.flag.reason)  # it looks for the stop file each second
    else:
        os.kill(os.getpid(), getattr(signal, what))


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    job = Miniature(RUN, ranks=current_ranks(), cadence=Cadence(4), stop=StopOn(exit_code=int(os.environ["EXIT_CODE"])))
    text = job.text or "start"
    job.run.begin(job.step, 0.0)
    for step in range(job.step + 1, STEPS + 1):
        text = advance(text, step)
        interrupt(job, step)
        decision = job.run.steps.end_step(step, step / STEPS)
        if decision.save or decision.stop:
            job.commit(step, text)
        if decision.stop:
            job.run.leave(step, step / STEPS)
    job.run.set_state(RunState.FINISHED, step=STEPS, epoch=1.0, horizon=STEPS)
    job.run.close()
    Path("final").write_text(text)


if __name__ == "__main__":
    main()
