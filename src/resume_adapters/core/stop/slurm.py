"""Two requests to Slurm: the time that the job has left, and to requeue it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from resume_adapters.core.log import logger

_PATIENCE = 20.0
"""Seconds to wait for a busy controller."""


def job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of the Slurm job of this process; ``None`` outside Slurm."""
    return environment.get("SLURM_JOB_ID")


def time_left(number: str) -> str | None:
    """Return the time that a job has left, as ``squeue`` prints it: ``1-02:03:04`` or ``UNLIMITED``, for example."""
    return _ask("squeue", "-h", "-j", number, "-o", "%L")


def requeue(number: str) -> bool:
    """Ask Slurm to requeue a running job, which ends it; return whether Slurm accepted."""
    return _ask("scontrol", "requeue", number) is not None


def _ask(*command: str) -> str | None:
    """Return the output of a Slurm command; ``None`` if it fails, with a warning."""
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
