"""A training job that is killed at any moment continues exactly where it stopped.

This package holds the core; importing it imports neither torch nor a training framework. The adapters are
:mod:`resume_adapters.hf` and its siblings, each imported by name.
"""

from __future__ import annotations

from resume_adapters._version import __version__
from resume_adapters.core.checkpoint.retention import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepWeights,
    KeepWithin,
    Policy,
)
from resume_adapters.core.choices import Audit, Fork
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Memory, Remote
from resume_adapters.errors import ResumeError, Stopped
from resume_adapters.integrations.trackers.runs import tracker_run

__all__ = [
    "Audit",
    "Fork",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepWeights",
    "KeepWithin",
    "Memory",
    "Policy",
    "Remote",
    "ResumeError",
    "StopOn",
    "Stopped",
    "__version__",
    "tracker_run",
]
