"""The public names of a hand-written loop; imported on demand, since its module is not needed to start a run."""

from __future__ import annotations

from resume_adapters.core.loop.framework import Resumed
from resume_adapters.core.loop.loop import ResumableLoop

__all__ = ["ResumableLoop", "Resumed"]
