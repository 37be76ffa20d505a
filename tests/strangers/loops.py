"""Run a script that has the adapter behind a switch, and compare: without it, and killed three times with it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from resume_adapters.unedited import reaching

from ledger import end_file, steps_file
from strangers import HERE, KILLS, TIMEOUT, difference


def ends_as_without(script: Path, directory: Path, seed: int, *arguments: str, ranks: int = 1) -> str:
    """Run a script without the adapter; then with it, killed by SIGKILL at random steps; both must end alike.

    Compared are the loss and the learning rates of each step, the weights, the optimizers and the random state at the
    end, and what else the script gives.

    Args:
        script: the script; ``STRANGERS_ADAPTER`` is its switch.
        directory: where both run.
        seed: of the steps at which it is killed.
        arguments: of the script.
        ranks: processes, started by torchrun where there are several.

    Returns:
        What the last launch said.
    """
    without, killed = directory / "without", directory / "killed"
    run(script, arguments, without, ranks=ranks)
    expected = steps_of(without)
    keys = [key for key in expected if key[0].isdigit()]
    later = range(len(keys) // 3, len(keys))  # what is logged before the first checkpoint is logged twice
    kills = [keys[index] for index in sorted(random.Random(seed).sample(later, KILLS))]
    for key in kills:
        run(script, arguments, killed, adapted=True, kill=key, ranks=ranks)
    before = len(rows_of(killed))
    output = run(script, arguments, killed, adapted=True, ranks=ranks)
    said = f"{script.name} {' '.join(arguments)}, killed before the steps {kills} (seed {seed})"
    assert rows_of(killed)[before][0] != keys[0], f"{said}: the last launch began at the start"
    for rank in range(ranks):
        found, expected = steps_of(killed, rank), steps_of(without, rank)
        where = f"{said}: on rank {rank}"
        assert found == expected, f"{where} steps differ:\n{difference(found, expected)}\n{_first(found, expected)}"
        end, expected = (json.loads((each / end_file(rank)).read_text()) for each in (killed, without))
        for name in expected:
            assert end[name] == expected[name], f"{where} {name} differs:\n{difference(end[name], expected[name])}"
    return output


def run(
    script: Path,
    arguments: tuple[str, ...],
    directory: Path,
    *,
    adapted: bool = False,
    kill: str | None = None,
    ranks: int = 1,
) -> str:
    """Launch a script once; return what it said.

    Args:
        script: the script.
        arguments: its arguments.
        directory: its working directory.
        adapted: turn the switch on.
        kill: the step at which it is killed.
        ranks: processes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    environment |= {"STRANGERS_ADAPTER": "1" if adapted else "", "STRANGERS_KILL": kill or ""}
    environment = reaching(environment) if adapted else environment  # the switch of scripts with Lightning
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = [sys.executable, *launcher, str(script), *arguments]
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    said = f"{' '.join(words)} in {directory}:\n{(done.stdout + done.stderr)[-6000:]}"
    expected = 0 if kill is None else -signal.SIGKILL if ranks == 1 else 1
    assert done.returncode == expected, said
    return done.stdout + done.stderr


def rows_of(directory: Path, rank: int = 0) -> list[Any]:
    """Return what all launches of a process wrote down, in its order."""
    return [json.loads(line) for line in (directory / steps_file(rank)).read_text().splitlines()]


def steps_of(directory: Path, rank: int = 0) -> dict[str, Any]:
    """Return what was written down of each step, by the last launch that came to it."""
    return dict(rows_of(directory, rank))


def _first(found: dict[str, Any], expected: dict[str, Any]) -> str:
    for key in expected:
        if found.get(key) != expected[key]:
            return f"{key}: {found.get(key)}, expected {expected[key]}"
    return ""
