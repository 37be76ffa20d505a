"""Saves that leave a job by a copy, or straight to the disk: what each adapter's tests need to see them at work.

``RESUME_ADAPTERS_STAGE`` says how the saves of all jobs leave that do not say so: ``nox -s staged`` sets it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

STAGE = os.environ.get("RESUME_ADAPTERS_STAGE", "")
"""How the saves of jobs leave the training that do not say so; empty: as they do by default."""

OPTIONS: dict[str, Any] = {"stage": STAGE} if STAGE else {}
"""The options of a job that is given none."""

SMALLEST = 256
"""Bytes from which on a tensor waits: those of a job are too small to be worth it."""

DELAY = 0.02
"""Seconds before tensors are copied: an optimizer step that did not wait for it would be done by then."""


def let_small_tensors_wait(rank: int) -> None:
    """Let the saves of this process leave small tensors for later, too, from its third one on, and take their time.

    A line of ``later.<rank>`` has the number of tensors that one of them has left.

    Args:
        rank: of this process.
    """
    from resume_adapters.core.staging import owned, staging

    owned.SMALLEST, staging._WHOLE = SMALLEST, 1
    native = staging.StagedSave.copy

    def copy(staged: Any) -> Any:
        left = len(staged._capture.later) + sum(len(each.straight) for each in staged._capture.files)
        with open(f"later.{rank}", "a") as file:
            file.write(f"{left}\n")
        time.sleep(DELAY)
        return native(staged)

    staging.StagedSave.copy = copy  # type: ignore[method-assign]


def left_for_later(directory: Path, rank: int = 0) -> list[int]:
    """Return how many tensors each staged save of the job in a directory has left for later."""
    file = directory / f"later.{rank}"
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def signal_writer(number: signal.Signals) -> None:
    """Signal the process that writes the saves of this one."""
    from resume_adapters.core.staging.writer import Writer

    (writer,) = (each for each in gc.get_objects() if type(each) is Writer and each.is_alive)
    os.kill(writer.pid, number)
    if number == signal.SIGKILL:
        with contextlib.suppress(ChildProcessError):  # the thread that uses it may have taken its status already
            os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
