"""A process under a supervisor, which does what it is told instead of training. Forked by the server."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from resume_adapters.core.recovery.options import Launch
from resume_adapters.core.recovery.supervisor import Supervisor, supervised

LATE = "flask_cors"
"""A library that nothing here needs."""


def write(name: str, text: str) -> None:
    with Path(name).open("a") as file:
        file.write(f"{text}\n")


def got(number: int, frame: Any) -> None:
    write("got", signal.Signals(number).name)


def main(does: str) -> None:
    signal.signal(signal.SIGUSR1, got)
    random.seed(1)
    host, port, ranks = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ.get("RANKS", "1"))
    of_launcher = Launch(world_size=ranks, host=host, port=port, name="test")
    launch, process = Supervisor(of_launcher, 2).run()
    write("starts", f"{launch.start} {process.restarts} {launch.restarts_left} {random.random():.3f}")
    write("late", f"{LATE in sys.modules}")
    write("pids", f"{os.getppid()} {os.getpid()}")
    process.begin_attempt(0)
    again, nobody = supervised(Launch(world_size=2), 2)
    assert again.start == "0" and not nobody.restarts_left, "it has a supervisor, and is none"
    is_first = len(Path("starts").read_text().splitlines()) == 1
    if does.startswith("wait"):
        while not Path("end").exists():
            time.sleep(0.01)
    elif does == "import" and is_first:
        __import__(LATE)
        process.say_imports()
        time.sleep(0.5)
    if does == "die" or (does == "import" and is_first):
        os.kill(os.getpid(), signal.SIGKILL)
    if does.endswith("leave") and is_first:
        process.replace()
        sys.exit(1)
    if does == "fail":
        sys.exit(3)
    process.end()
    if does == "die later":
        os.kill(os.getpid(), signal.SIGKILL)


main(sys.argv[1])
