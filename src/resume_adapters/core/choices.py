"""The words that an option may be, alike in a callback, in the environment and on the command line."""

from __future__ import annotations

from typing import Literal

OnBatchChange = Literal["refuse", "keep-samples"]
"""What a resume with a different global batch size does."""

OnSaveError = Literal["stop", "continue"]
"""What a run does after a save that failed: it ends, or it trains on and tries again at the next save."""

Stage = Literal["auto", "memory", "off"]
"""How saves leave the training: through a copy in memory, not at all, or what fits."""

Requeue = Literal["slurm"]
"""Which scheduler a run that leaves for its walltime asks to queue the job again."""
