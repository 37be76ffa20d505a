"""Refuse what an installed DeepSpeed is too old for."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch

from resume_adapters.core.requirements import is_older, require_version
from resume_adapters.errors import StateMismatch, UnsupportedSetting

require_version("deepspeed", deepspeed.__version__, "0.19.4", extra="deepspeed")

_UNIVERSAL = "0.19.7"
"""Older versions load the weights of a universal checkpoint over the moments at stages 1 and 2, and keep their own."""

_GATHERS = "0.19.8"
"""Older versions wait only for the last of the gathers after a step of ZeRO 3. Under gloo each gather runs on its own,
so a forward pass sometimes uses weights that have not arrived, and two runs differ."""


def is_before(version: str) -> bool:
    """Return whether the installed DeepSpeed is older than ``version``."""
    return is_older(deepspeed.__version__, version)


def require_ordered_gathers(stage: int, ranks: int) -> None:
    """Refuse ZeRO 3 on several ranks under gloo with a version in which two runs differ.

    Raises:
        UnsupportedSetting: naming the installed version, and the required one.
    """
    if stage == 3 and ranks > 1 and is_before(_GATHERS) and torch.distributed.get_backend() == "gloo":
        raise UnsupportedSetting(
            f"deepspeed {deepspeed.__version__} does not wait for all of ZeRO 3's gathers under gloo, so no two runs "
            f"are alike: use {_GATHERS} or newer (pip install --upgrade deepspeed), or another stage"
        )


def require_universal(path: Path, step: int, before: int, now: int) -> None:
    """Refuse to resume on a different number of ranks with a version that would load the weights wrongly.

    Args:
        path: the checkpoint.
        step: its step.
        before: number of ranks that saved it.
        now: number of ranks of this launch.

    Raises:
        StateMismatch: naming the installed version, and the required one.
    """
    if is_before(_UNIVERSAL):
        raise StateMismatch(
            f"{path.name} was saved with number of ranks {before}, this launch has {now}, and deepspeed "
            f"{deepspeed.__version__} loads a converted checkpoint into the wrong place: launch with "
            f"{before}, or use {_UNIVERSAL} or newer (pip install --upgrade deepspeed)",
            path=path,
            step=step,
        )
