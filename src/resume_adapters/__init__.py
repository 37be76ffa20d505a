"""A training job that is killed at any moment continues exactly where it stopped.

This package holds the core; importing it imports neither torch nor a training framework. The adapters are
:mod:`resume_adapters.hf` and its siblings, each imported by name.
"""

from __future__ import annotations

from resume_adapters._trackers import tracker_run
from resume_adapters.core.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepWithin, Policy
from resume_adapters.core.stop import StopOn
from resume_adapters.errors import ResumeError, Stopped

__version__ = "0.1.0"

__all__ = [
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepWithin",
    "Policy",
    "ResumeError",
    "StopOn",
    "Stopped",
    "__version__",
    "tracker_run",
]
