"""The words that an option may be, alike in a callback, in the environment and on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

from resume_adapters.errors import UnsupportedSetting

OnBatchChange = Literal["refuse", "keep-samples"]
"""What a resume with a different global batch size does."""

OnSaveError = Literal["stop", "continue"]
"""What a run does after a save that failed: it ends, or it trains on and tries again at the next save."""

Stage = Literal["auto", "memory", "off"]
"""How saves leave the training: through a copy in memory, not at all, or what fits."""

Requeue = Literal["slurm"]
"""Which scheduler a run that leaves for its walltime asks to queue the job again."""

Take = Literal["weights", "weights+optimizer"]
"""What a new run takes of the checkpoint that it begins with."""


@dataclass(frozen=True)
class Audit:
    """A value of ``verify``: beside what ``True`` does, compare the ranks of a training with DDP on the way.

    Weights and optimizer state must be alike on all ranks. They are compared by digests each ``every`` steps and before
    each save, so that every checkpoint has passed; a difference ends the run with :class:`ReplicasDiffer` on all ranks.
    On one rank nothing is compared.

    Args:
        every: optimizer steps from one audit to the next.

    Raises:
        UnsupportedSetting: ``every`` is no positive number.
    """

    every: int

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise UnsupportedSetting(f"{self}: expected every how many optimizer steps the ranks are compared")


Verify = bool | Audit
"""Whether what was restored is compared with what was saved, and whether ranks are compared on the way."""


@dataclass(frozen=True)
class Fork:
    """A value of ``resume``: begin a new run with a checkpoint of another, which it only reads.

    From the first checkpoint of its own on the run resumes from itself, and the other one may be gone.

    Args:
        path: the checkpoint; of a run directory it is the newest.
        take: ``"weights"``, or ``"weights+optimizer"``: the optimizers' state too, with the learning rate and the other
            hyperparameters of this launch. All else begins as the launch has made it.

    Raises:
        UnsupportedSetting: ``path`` or ``take`` is not one.
    """

    path: str | os.PathLike[str]
    take: Take = "weights"

    def __post_init__(self) -> None:
        is_path = isinstance(self.path, str | os.PathLike) and self.path not in ("", "auto", "scratch", "scratch!")
        if not is_path or self.take not in get_args(Take):
            raise UnsupportedSetting(
                f"{self}: expected the path of a checkpoint or of a run directory, and to take one of "
                f"{', '.join(get_args(Take))}"
            )
