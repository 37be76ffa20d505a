"""Refuse what an installed DeepSpeed is too old for."""

from __future__ import annotations

import deepspeed
import torch

from resume_adapters.core.requirements import is_older, require_version
from resume_adapters.errors import UnsupportedSetting

require_version("deepspeed", deepspeed.__version__, "0.19.7", extra="deepspeed")

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
