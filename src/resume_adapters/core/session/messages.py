"""What a run logs for its user."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from resume_adapters.core import devices
from resume_adapters.core.checkpoint.checkpoint import ResumeChoice
from resume_adapters.core.checkpoint.files import extra_in_words
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.parts import SCALER
from resume_adapters.core.log import logger
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.launches import WastedLaunch
from resume_adapters.core.run_directory.siblings import unfinished_sibling
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import Framework
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.state.stateful import Stateful


def log_start(choice: ResumeChoice) -> None:
    """Log the chosen checkpoint, and each rejected one with its reason."""
    chosen = choice.checkpoint
    outcome = f"Resuming from {chosen.path.name}." if chosen else "Starting from step 0."
    for rejected in choice.rejected:
        logger.warning("%s is damaged: %s. It was set aside. %s", rejected.path.name, rejected.reason, outcome)
    if chosen is not None and chosen.manifest is None:
        logger.warning(
            "%s was made without this package: its weights, optimizer and schedule are restored; random state and data "
            "position only as far as the framework saved them.",
            chosen.path.name,
        )
    if not choice.rejected:
        logger.info(outcome if chosen else "No checkpoint yet: starting from step 0.")
    if chosen is not None and (kind := devices.kind_in_use()) is not None:
        repeats = devices.repeats()
        follows = "bit for bit" if repeats else "up to the last digits, as kernels need not repeat themselves there"
        logger.info("On %s the state is restored bit for bit, and what follows is the same %s.", kind, follows)


def log_passed_over(run: ResumableRun) -> None:
    """Log that a path was given, and that the run resumes from a checkpoint of its own instead."""
    chosen, given = run.resumed, run.context.options.resume
    if chosen is None or given in ("auto", "scratch", "scratch!"):
        return
    path = Path(given)
    if run.storage.real_path(path) == run.storage.real_path(chosen.path):
        return
    logger.warning(
        "Not resuming from the given %s: the run has its own checkpoints, and resumes from the newest, %s. To go "
        "back in this run, use `resume-adapters rewind`; to start from the given one, use another run directory.",
        path,
        chosen.path.name,
    )


def log_sibling(run: ResumableRun) -> None:
    """Log that a run starts from zero in a directory that is new at each launch, beside an unfinished one."""
    if run.resumed is not None or run.context.options.resume != "auto":
        return
    sibling = unfinished_sibling(run.storage, run.directory)
    if sibling is not None:
        logger.warning(
            "This run starts from step 0 in %s. The name of %s differs in its digits alone, and the run in it is not "
            "finished: %s at step %d. If this launch was to continue it, give both the same directory: one that is "
            "named after the time or the job is new at each launch.",
            run.directory,
            sibling.path,
            sibling.left,
            sibling.step,
        )


def log_wasted(launches: Sequence[WastedLaunch]) -> None:
    """Log the launches before this one that made no progress, and how each ended; a warning if there are several."""
    if not launches:
        return
    ends = "; ".join(str(launch) for launch in launches[-_SHOWN:])
    if len(launches) == 1:
        logger.info("The last launch committed no step: %s.", ends)
        return
    last = f", the last {_SHOWN} of which" if len(launches) > _SHOWN else ""
    logger.warning("The last %d launches in a row committed no step%s: %s.", len(launches), last, ends)
    if len({launch.step for launch in launches}) == 1 and all(launch.ran_out_of_memory for launch in launches):
        logger.warning(
            "Each of them ran out of memory at step %s; this launch will too, unless it has more memory or needs less.",
            launches[0].step,
        )


_SHOWN = 5
"""How many launches without progress are described."""


def log_extra(name: str, extra: list[str]) -> None:
    """Log what lies in a checkpoint and was not saved with it."""
    if extra:
        logger.warning("%s: not in the manifest of %s, and not read.", extra_in_words(extra), name)


def log_finished(step: int, reason: str, untrained: str) -> None:
    """Log that the run had finished, why nothing is left to train, and with which settings it was not trained."""
    logger.info("This run finished at step %d (%s): nothing to do.", step, reason)
    if untrained:
        logger.warning("It was trained with other settings; given now: %s. They need another run directory.", untrained)


def log_missing(entries: Iterable[PartEntry]) -> None:
    """Log for each part that is not captured what its loss will cost."""
    for entry in entries:
        if entry.by == "missing":
            logger.warning("%s MISSING: %s", entry.name, entry.note)


_PERIOD = 30.0
"""Seconds between two log lines while a stream is skipped."""


def log_skipping(batches: range) -> Iterator[int]:
    """Yield the batches to skip at the start of a stream; log the progress, and how to avoid the skipping."""
    if not batches:
        return
    logger.info(
        "This stream can only be read from its start: skipping %s batches. ElasticShards of resume_adapters.data "
        "seeks to its position at once; so does map-style data, plain or in a StatefulDataLoader.",
        f"{len(batches):,}",
    )
    logged = time.monotonic()
    for batch in batches:
        if time.monotonic() - logged >= _PERIOD:
            logged = time.monotonic()
            logger.info("Skipped %s of %s batches.", f"{batch:,}", f"{len(batches):,}")
        yield batch


_CAPTURED = {
    "rng": "python, numpy, torch and every device in use, on every rank",
    "data": "position of the training loaders, with the random state of their workers",
    "trackers": "run ids of W&B and MLflow, directories of TensorBoard",
}
"""What is captured under every framework alike."""

_OF_LOOP = ("counters", "metrics", "observed")
"""What a session or a training loop captures by itself, as far as there is any."""


class PartEntries:
    """Describes the parts of a session for the manifest and for the user.

    Args:
        framework: saves its own parts.
        options: have the parts that the user named.
    """

    def __init__(self, framework: Framework, options: ResumeOptions) -> None:
        self._framework = framework
        self._options = options

    def captured(self, parts: Mapping[str, Stateful], **notes: str) -> list[PartEntry]:
        """Return an entry for each part that this package captures.

        Args:
            parts: those of the framework and of the training loop, beside those that the user named.
            notes: what the package captures of others, such as ``counters``, in a user's words.
        """
        named = {name: f"{type(part).__name__}.state_dict()" for name, part in {**self._options.parts, **parts}.items()}
        found = [PartEntry(name, "core", note) for name, note in {**notes, **_CAPTURED, **named}.items()]
        lacking = devices.missing()
        return [*found, PartEntry("rng", "missing", lacking)] if lacking else found

    def log_differences(self, context: RestoreContext) -> None:
        """Log the parts of the checkpoint that this launch does not restore, and a loss scale that it lacks."""
        manifest = context.checkpoint.manifest
        if manifest is None:
            return
        named = {each.name for each in self._framework.describe()}
        here = {*named, *self._options.parts, *self._framework.parts(), *_CAPTURED, *_OF_LOOP}
        for each in manifest.parts:
            if each.by != "missing" and each.name not in here:
                context.reader.log_dropped(each.name)
        if manifest.parts and SCALER in here and all(each.name != SCALER for each in manifest.parts):
            logger.warning("%s has no loss scale: it begins as in a new run.", context.path.name)
