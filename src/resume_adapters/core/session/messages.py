"""What a run tells its user."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from resume_adapters.core.checkpoint.checkpoint import ResumeChoice
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.log import logger


def log_start(choice: ResumeChoice) -> None:
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


def log_finished(step: int) -> None:
    """Say that the run was finished before, and is not trained any more."""
    logger.info("This run finished at step %d: nothing to do.", step)


def log_parts(entries: Iterable[PartEntry]) -> None:
    """Say of each part who captures it, or what its absence will cost."""
    for entry in entries:
        if entry.by == "missing":
            logger.warning("%-10s MISSING: %s", entry.name, entry.note)
        else:
            logger.info("%-10s captured by the %s: %s", entry.name, entry.by, entry.note)


_PERIOD = 30.0
"""Seconds between two lines about a stream that is read again."""


def log_skipping(batches: range) -> Iterator[int]:
    """Yield each batch of a stream that is read only to pass over it; log how far that is, and how to avoid it."""
    if not batches:
        return
    logger.info(
        "This stream can only be read again from its start: passing over %s batches. ElasticShards of "
        "resume_adapters.data finds its place at once; so does map-style data, plain or in a StatefulDataLoader.",
        f"{len(batches):,}",
    )
    logged = time.monotonic()
    for batch in batches:
        if time.monotonic() - logged >= _PERIOD:
            logged = time.monotonic()
            logger.info("Passed over %s of %s batches.", f"{batch:,}", f"{len(batches):,}")
        yield batch
