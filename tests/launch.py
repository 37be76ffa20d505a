"""Start training jobs as real processes, kill them, and read the traces they leave.

Importing torch and a framework takes seconds and is the same for every job, so jobs are forked from a server process
that has imported them and done nothing else: each job is a process of its own, with its own pid to kill, its own random
state and its own threads. The demo's tests start plain interpreters instead.

A job appends one JSON line to its trace for every micro-step, with a plain ``write``: what it wrote before a SIGKILL
stays written.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib.util
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1

TIMEOUT = 240.0
"""Seconds after which a job counts as hanging."""

_PORTS = random.SystemRandom()


@dataclass(frozen=True)
class Outcome:
    """How one launch ended: each rank's exit status (negative: killed by that signal), and what it printed."""

    statuses: tuple[int, ...]
    output: str

    @property
    def killed(self) -> bool:
        return -signal.SIGKILL in self.statuses

    def require_success(self) -> Outcome:
        assert set(self.statuses) == {0}, f"exit statuses {self.statuses}\n{self.output[-6000:]}"
        return self


class Server:
    """Forks jobs from a process that has imported what they need.

    Args:
        imports: modules to import before the first job, where they are installed.
    """

    def __init__(self, *imports: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server died"
        return json.loads(line)

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def start(self, script: Path, arguments: list[str], directory: Path, ranks: int, env: dict[str, str]) -> Running:
        """Start a job on one or more ranks."""
        port = str(free_port())
        started = []
        for rank in range(ranks):
            distributed = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            distributed |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            output = directory / f"output.{rank}"
            pid = self._ask(
                do="start",
                script=str(script),
                arguments=arguments,
                directory=str(directory),
                output=str(output),
                env=(distributed if ranks > 1 else {}) | env,
            )
            started.append((pid, output))
        return Running(self, started)

    def poll(self, pid: int) -> int | None:
        status: int | None = self._ask(do="poll", pid=pid)
        return status

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Running:
    """A job that was started."""

    def __init__(self, server: Server, started: list[tuple[int, Path]]) -> None:
        self._server = server
        self.pids = [pid for pid, _ in started]
        self._outputs = [output for _, output in started]

    def signal(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to one rank or to all."""
        for pid in self.pids if rank is None else [self.pids[rank]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def alive(self) -> bool:
        return any(self._server.poll(pid) is None for pid in self.pids)

    def wait(self, timeout: float = TIMEOUT) -> Outcome:
        """Wait for every rank. Where one was killed, the others are killed as a launcher would."""
        deadline = time.monotonic() + timeout
        statuses: list[int | None] = [None] * len(self.pids)
        while None in statuses:
            statuses = [self._server.poll(pid) for pid in self.pids]
            if any(status is not None and status != 0 for status in statuses) and None in statuses:
                time.sleep(1.0)
                statuses = [self._server.poll(pid) for pid in self.pids]
                for pid, status in zip(self.pids, statuses, strict=True):
                    if status is None:
                        os.kill(pid, signal.SIGTERM if time.monotonic() < deadline - timeout + 30 else signal.SIGKILL)
            if time.monotonic() > deadline:
                self.signal(signal.SIGQUIT)
                time.sleep(1.0)
                self.signal(signal.SIGKILL)
                raise AssertionError(f"the job hangs after {timeout:.0f} s: {statuses}\n{self._text()[-9000:]}")
            time.sleep(0.01)
        return Outcome(tuple(status for status in statuses if status is not None), self._text())

    def _text(self) -> str:
        return "\n".join(output.read_text(errors="replace") for output in self._outputs)


def free_port() -> int:
    """Return a port of this machine that nothing listens on, and that the kernel gives to nobody who asks for any.

    A job binds it seconds later. Until then the connections of other jobs take such ports, and a rank that meets the
    store of another job waits there for ever.
    """
    while True:
        port = _PORTS.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# ---- The server's side


def _serve(imports: list[str]) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some modules print when they are imported
    for module in imports:
        if importlib.util.find_spec(module.partition(".")[0]):
            __import__(module)
    gc.collect()
    gc.freeze()  # else each job's first collection writes to every object, and so copies the server's memory
    print(json.dumps("ready"), file=replies, flush=True)
    statuses: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            reply: int | None = os.fork()
            if reply == 0:
                _become(request)
            statuses.pop(reply, None)  # of an earlier job of that number: the kernel gives them out again
        else:
            reply = _status(request["pid"], statuses)
        print(json.dumps(reply), file=replies, flush=True)


def _status(pid: int, statuses: dict[int, int]) -> int | None:
    if pid not in statuses:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found == 0:
            return None
        statuses[pid] = os.waitstatus_to_exitcode(status)
    return statuses[pid]


def _become(request: dict[str, Any]) -> None:
    """In the forked process: become the job."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no job outlives the tests
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGQUIT)  # whoever hangs says where
    os.environ.update(request["env"])
    tempfile.tempdir = None  # the server has looked it up already
    os.chdir(request["directory"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path.insert(0, str(Path(request["script"]).parent))
    status = 1
    try:
        runpy.run_path(request["script"], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # What an interpreter does at its end, without unwinding into the server's loop.
        import concurrent.futures.thread
        import threading

        concurrent.futures.thread._python_exit()  # idle workers of an executor leave, busy ones end their work
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join(30)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1:])
