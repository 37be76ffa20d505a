"""What Lightning asks an installed package for when it makes a Trainer."""

from __future__ import annotations

from typing import Any

from resume_adapters import unedited


def callbacks() -> list[Any]:
    """Return the callbacks to add to a Trainer: none, unless the environment asks for it."""
    if not unedited.is_wanted():
        return []
    from resume_adapters.lightning.unedited import CallbackOfEnvironment, come_before_configs

    callback = CallbackOfEnvironment()
    come_before_configs(callback)
    return [callback]
