"""Settings of a framework under which a resume cannot be exact."""

from __future__ import annotations

from collections.abc import Mapping

from resume_adapters.errors import UnsupportedSetting


def refuse(settings: Mapping[str, object], remedy: str = "change it") -> None:
    """Refuse the first of these settings that is found.

    Args:
        settings: for each what it does, and whether it is set: a true or a false value.
        remedy: what the user can do.

    Raises:
        UnsupportedSetting: naming the setting and the remedy.
    """
    for reason, found in settings.items():
        if found:
            raise UnsupportedSetting(f"{reason}, so this run cannot be resumed exactly: {remedy}")
