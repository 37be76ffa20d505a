"""What a run tells its user: one line at a start, one line a part at the first save, warnings as they come."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from resume_adapters.core.manifest import PartEntry
from resume_adapters.core.resolve import Choice

logger = logging.getLogger("resume_adapters")


def enable() -> None:
    """Show the package's messages where the program has not arranged for them itself."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("resume-adapters: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def start(choice: Choice) -> None:
    """Say what was chosen to resume from, and what was passed over and why."""
    chosen = choice.checkpoint
    going_on = f"Resuming from {chosen.path.name}." if chosen else "Starting from step 0."
    for rejected in choice.rejected:
        logger.warning("%s is damaged: %s. It was set aside. %s", rejected.path.name, rejected.reason, going_on)
    if chosen is not None and chosen.manifest is None:
        logger.warning(
            "%s was made without this package: its weights, optimizer and schedule are taken; random state and data "
            "position only as far as the framework saved them.",
            chosen.path.name,
        )
    if not choice.rejected:
        logger.info(going_on if chosen else "No checkpoint yet: starting from step 0.")


def finished(step: int) -> None:
    """Say that the run was finished before, and is not trained any more."""
    logger.info("This run finished at step %d: nothing to do.", step)


def parts(entries: Iterable[PartEntry]) -> None:
    """Say of each part who captures it, or what its absence will cost."""
    for entry in entries:
        if entry.by == "missing":
            logger.warning("%-10s MISSING: %s", entry.name, entry.note)
        else:
            logger.info("%-10s captured by the %s: %s", entry.name, entry.by, entry.note)
