"""How far it is with reading again what a stream had given, which is all that can be done with most streams."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from resume_adapters.core import report

_PERIOD = 30.0
"""Seconds between two lines, where there is no terminal."""


def shown(batches: range) -> Iterator[int]:
    """Yield each batch that is read only to get past it; show how far that is, and say how it is avoided.

    On a terminal with a progress bar, elsewhere with a line now and then.
    """
    if not batches:
        return
    report.logger.info(
        "This stream can only be read again from its start: passing over %s batches. ElasticShards of "
        "resume_adapters.data finds its place at once; so does map-style data, plain or in a StatefulDataLoader.",
        f"{len(batches):,}",
    )
    yield from _with_bar(batches) if sys.stderr.isatty() else _with_lines(batches)


def _with_bar(batches: range) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import track

    yield from track(batches, "Passing over batches", console=Console(stderr=True), transient=True)


def _with_lines(batches: range) -> Iterator[int]:
    said = time.monotonic()
    for batch in batches:
        if time.monotonic() - said >= _PERIOD:
            said = time.monotonic()
            report.logger.info("Passed over %s of %s batches.", f"{batch:,}", f"{len(batches):,}")
        yield batch
