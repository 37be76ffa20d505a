"""The package's logger, and a default handler."""

from __future__ import annotations

import logging

logger = logging.getLogger("resume_adapters")


def enable_logging() -> None:
    """Show the package's messages on stderr, unless the program has configured logging itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("resume-adapters: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
