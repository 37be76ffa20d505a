"""What torch calls at the end of its import, in every environment where this package is installed."""

from __future__ import annotations

import os


def begin() -> None:
    """Do nothing, unless the environment asks for resume: an error here would be one of ``import torch``."""
    if os.environ.get("RESUME_ADAPTERS") == "1":
        from resume_adapters import unedited

        unedited.begin()
