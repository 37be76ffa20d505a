"""Resume for a script that nobody can edit: what Lightning asks an installed package for when it makes a Trainer."""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "RESUME_ADAPTERS"
"""Set to 1, every Trainer gets a :class:`~resume_adapters.lightning.ResumeCallback`."""


def callbacks() -> list[Any]:
    """Return the callbacks to add to a Trainer: none, unless the environment asks for it."""
    if os.environ.get(VARIABLE) != "1":
        return []
    from resume_adapters.lightning.callback import CallbackOfEnvironment, come_before_configs

    come_before_configs()
    return [CallbackOfEnvironment()]
