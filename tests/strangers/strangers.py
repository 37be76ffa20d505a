"""Run a script that knows nothing of this package, and compare: by itself, and killed three times with the one line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TIMEOUT = 300.0
"""Seconds after which a launch counts as hanging."""

KILLS = 3


def ends_as_undisturbed(
    script: Path, directory: Path, seed: int, *, apart_from: Sequence[str] = (), ranks: int = 1
) -> None:
    """Run a script as it is; then with the callback, killed by SIGKILL at random steps; both must end alike.

    Compared are the weights, the optimizer's state, the whole log without times, the best metric and its step, and the
    random state of python, numpy and torch.

    Args:
        script: the script; it is not changed.
        directory: where both run.
        seed: of the steps at which it is killed.
        apart_from: names of what may differ, of those that ``watch.end`` returns.
        ranks: processes, started by torchrun where there are several.
    """
    reference = run(script, directory / "reference", ranks=ranks)
    steps = sorted(random.Random(seed).sample(range(1, reference[0]["steps"]), KILLS))
    said = f"{script.name}, killed in the steps after {steps} (seed {seed})"
    for step in steps:
        run(script, directory / "killed", kill=step, ranks=ranks)
    end = run(script, directory / "killed", with_callback=True, ranks=ranks)
    for rank, (found, expected) in enumerate(zip(end, reference, strict=True)):
        for name in [name for name in expected if name not in apart_from]:
            differs = f"{said}: {name} differs on rank {rank}:\n{difference(found[name], expected[name])}"
            assert found[name] == expected[name], differs


def run(
    script: Path, directory: Path, *, with_callback: bool = False, kill: int | None = None, ranks: int = 1
) -> list[Any]:
    """Launch a script once; return what the trainer of each rank ended with, or nothing if it was to be killed.

    Args:
        script: the script.
        directory: its working directory.
        with_callback: add the one line.
        kill: the step after which it is killed; with the line added.
        ranks: processes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "STRANGERS_CALLBACK": ""}
    if with_callback or kill is not None:
        environment["STRANGERS_CALLBACK"] = "1"
    if kill is not None:
        environment["STRANGERS_KILL"] = str(kill)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = [sys.executable, *launcher, str(HERE / "watch.py"), str(script)]
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    said = f"{' '.join(words)} in {directory}:\n{(done.stdout + done.stderr)[-6000:]}"
    if kill is not None:
        assert done.returncode == (-signal.SIGKILL if ranks == 1 else 1), said
        return []
    assert done.returncode == 0, said
    return [json.loads((directory / f"end.{rank}.json").read_text()) for rank in range(ranks)]


def difference(found: Any, expected: Any) -> str:
    """Return the first entries that differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        return f"{len(names)} of {len(expected)}: {', '.join(names[:5])}"
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = [(one, other) for one, other in zip(found, expected, strict=True) if one != other]
        return "\n".join(f"{one}\nexpected\n{other}" for one, other in pairs[:3])
    return f"{found}\nexpected\n{expected}"
