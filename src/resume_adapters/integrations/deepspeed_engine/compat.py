"""What an older DeepSpeed does otherwise: refused."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch

from resume_adapters.core.requirements import is_older, require_version
from resume_adapters.errors import StateMismatch, UnsupportedSetting

require_version("deepspeed", deepspeed.__version__, "0.19.4", extra="deepspeed")

_UNIVERSAL = "0.19.7"
"""Before it, stages 1 and 2 load the weights of a universal checkpoint over the moments, and keep their own weights."""

_GATHERS = "0.19.8"
"""Before it, only the last of the gathers that follow a step of ZeRO 3 is waited for. Under gloo each runs by itself,
so a forward pass now and then computes with weights that have not arrived: two runs differ."""


def is_before(version: str) -> bool:
    """Return whether the DeepSpeed that is installed is older than ``version``."""
    return is_older(deepspeed.__version__, version)


def require_ordered_gathers(stage: int, ranks: int) -> None:
    """Refuse ZeRO 3 on several ranks under gloo, where no run equals another.

    Raises:
        UnsupportedSetting: naming the version that is installed, and the one that serves.
    """
    if stage == 3 and ranks > 1 and is_before(_GATHERS) and torch.distributed.get_backend() == "gloo":
        raise UnsupportedSetting(
            f"deepspeed {deepspeed.__version__} does not wait for all of ZeRO 3's gathers under gloo, so no two runs "
            f"are alike: use {_GATHERS} or newer (pip install --upgrade deepspeed), or another stage"
        )


def require_universal(path: Path, step: int, before: int, now: int) -> None:
    """Refuse to convert a checkpoint for another number of ranks, where it would be loaded wrong.

    Args:
        path: the checkpoint.
        step: its step.
        before: with how many ranks it was saved.
        now: with how many it is resumed.

    Raises:
        StateMismatch: naming the version that is installed, and the one that serves.
    """
    if is_before(_UNIVERSAL):
        raise StateMismatch(
            f"{path.name} was saved with number of ranks {before}, this launch has {now}, and deepspeed "
            f"{deepspeed.__version__} loads what it converts for another number into the wrong place: launch with "
            f"{before}, or use {_UNIVERSAL} or newer (pip install --upgrade deepspeed)",
            path=path,
            step=step,
        )
