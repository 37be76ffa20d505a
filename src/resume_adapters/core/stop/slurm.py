"""What is asked of Slurm: when the job ends, and to queue it again. Elsewhere nothing is asked."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from resume_adapters.core.log import logger

_PATIENCE = 20.0
"""Seconds to wait for a controller that is busy."""


def job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the number of the Slurm job that this process belongs to."""
    return environment.get("SLURM_JOB_ID")


def time_left(number: str) -> str | None:
    """Return what ``squeue`` says of the time that a job has left, for example ``1-02:03:04`` or ``UNLIMITED``."""
    return _ask("squeue", "-h", "-j", number, "-o", "%L")


def requeue(number: str) -> bool:
    """Ask Slurm to put a running job back into the queue, which ends it; return whether it will."""
    return _ask("scontrol", "requeue", number) is not None


def _ask(*command: str) -> str | None:
    """Return what a command of Slurm answers; where it fails, say so and return ``None``."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except subprocess.CalledProcessError as error:
        problem = (error.stderr or error.stdout).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        return done.stdout.strip()
    logger.warning("%s failed: %s", " ".join(command), problem)
    return None
