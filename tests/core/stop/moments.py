"""A training of plain torch to which something is done at a named moment; ``test_moments.py`` starts it.

It trains three epochs of six steps, and saves after the steps 4, 8, 12, 16 and 18.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

CONFIG = json.loads(sys.argv[1])
DIRECTORY = Path("run")


def act() -> None:
    """Do to this process what the configuration says, and wait as long as it takes to find a stop file."""
    for ask in CONFIG["asks"]:
        if ask == "stop file":
            DIRECTORY.joinpath(".resume").mkdir(parents=True, exist_ok=True)
            DIRECTORY.joinpath("stop").write_text("resume-adapters stop")
            DIRECTORY.joinpath("stop").replace(DIRECTORY / ".resume" / "stop")  # else it may be read while it is empty
            time.sleep(0.5)
        else:
            os.kill(os.getpid(), getattr(signal, ask))


def at(moment: str) -> None:
    if moment == CONFIG["moment"]:
        act()


at("before the package is imported")

from torch.utils.data import DataLoader  # noqa: E402

from resume_adapters.core.run import monitor  # noqa: E402

from plain_torch import Counting, Launch  # noqa: E402

# Frozen, it is not to be between its look whose the run is and its write of the live status.
monitor._PERIOD = 3600.0 if "SIGSTOP" in CONFIG["asks"] else 0.02

TAKES_OVER, STATUS = r"\.resume/\.generation\.[0-9a-f]+\.tmp", r"\.resume/\.status\.json\.[0-9a-f]+\.tmp"
WRITES = r"\.resume/begin-[0-9a-f]+/checkpoint-\d+/resume/rank-00000\.json"
COMMITS = r"\.manifest\.json\.[0-9a-f]+\.tmp"

OPERATIONS = {
    "while it takes the directory over": ("os.rename", TAKES_OVER, 1),
    "before it says that it runs": ("os.rename", STATUS, 1),
    "before it begins": ("os.rename", STATUS, 2),
    "while a checkpoint is written": ("open", WRITES, 2),
    "while it is committed": ("os.rename", COMMITS, 2),
    "behind its commit": ("os.remove", "pending", 2),
    "while the last one is written": ("open", WRITES, 5),
    "while the last one is committed": ("os.rename", COMMITS, 5),
    "before it says that it has finished": ("os.rename", STATUS, 3),
}
"""Before which operation on the run directory a moment is: its audit event, the path and how often."""


def before_operation(event: str, path: str, number: int) -> None:
    pattern, seen = re.compile(f"(.*/)?{path}"), 0

    def audit(found: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if found != event or threading.current_thread().name == monitor.THREAD_NAME:
            return
        if isinstance(arguments[0], int) or not pattern.fullmatch(os.fspath(arguments[0])):
            return
        if event == "open" and "w" not in str(arguments[1]):
            return
        seen += 1
        if seen == number:
            act()

    sys.addaudithook(audit)


class Stream(Counting):
    """Data that a resume reads again, up to where it was."""

    def __iter__(self) -> Any:
        at("while data are skipped")
        yield from super().__iter__()


class Asked(Launch):
    def loader(self) -> Any:
        return DataLoader(Stream(), 4)

    def _plain(self, data: Any) -> None:
        train, steps = self.framework.train, {0: "in the first step", 9: "in a step", 17: "in the last step"}

        def trained(batch: Any) -> Any:
            at(steps.get(self.loop.global_step, ""))
            return train(batch)

        self.framework.train = trained  # type: ignore[method-assign]
        for epoch in self._epochs():
            for batch in self.loop.batches(data):
                self._step(batch)
                if self.loop.global_step == 9:
                    at("in an evaluation")
            if epoch == 1:
                at("between two epochs")


if CONFIG["moment"] in OPERATIONS:
    before_operation(*OPERATIONS[CONFIG["moment"]])
launch = Asked(DIRECTORY, **CONFIG.get("options", {}))
at("before the run is opened")
launch()
at("after the training")
