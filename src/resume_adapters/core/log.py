"""The package's logger, and its handler where the program has set up none."""

from __future__ import annotations

import logging

logger = logging.getLogger("resume_adapters")


def enable_logging() -> None:
    """Show the package's messages where the program has not arranged for them itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("resume-adapters: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
