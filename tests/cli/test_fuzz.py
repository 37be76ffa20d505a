"""Whatever somebody forges in a run directory, each command says so in a sentence, and scripts see it in the code."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from resume_adapters.cli import main
from resume_adapters.cli.run_directory import read

import fuzz

RUN, NEWEST, OUT = "RUN", "NEWEST", "OUT"
COMMANDS = [
    ["ls", RUN],
    ["status", RUN],
    ["report", RUN, "-o", OUT],
    ["verify", RUN],
    ["diff", f"{RUN}/{NEWEST}", NEWEST],
    ["export", RUN, "-o", OUT],
    ["prune", RUN, "--keep-last", "1", "--dry-run"],
    ["stop", RUN, "--undo"],
    ["rewind", RUN, NEWEST, "--force"],
    ["prune", RUN, "--keep-last", "1", "--force"],
]
"""The commands; ``RUN/NEWEST`` is the path of the newest checkpoint of the stored run."""

RUNS = ["hf/out", "lightning/out", "accelerate/project/checkpoints", "deepspeed/out"]


@pytest.mark.parametrize("seeds", fuzz.SEEDS)
def test_no_forged_run_directory_ends_a_command_in_another_error_than_ours(
    tmp_path: Path, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: Counter[str] = Counter()
    surroundings = fuzz.Surroundings(tmp_path, fuzz.STORED / RUNS[0], tmp_path / "out")
    directory, out = tmp_path / "run", tmp_path / "out"
    for seed in seeds:
        command, stored = COMMANDS[seed % len(COMMANDS)], fuzz.STORED / RUNS[seed // len(COMMANDS) % len(RUNS)]
        newest = read(stored).rows[-1].path.name
        shutil.copytree(stored, directory, symlinks=True)
        damage = fuzz.Damage(directory, seed)
        surroundings.add_strangers(directory)
        named = {RUN: str(directory), NEWEST: newest, f"{RUN}/{NEWEST}": str(directory / newest), OUT: str(out)}
        given = [named.get(word, word) for word in command]
        words = f"{fuzz.in_words(seed, damage.done)}: {' '.join(given)}"
        with surroundings.unharmed(directory, words):
            outcomes[f"{command[0]} {code_of(given, words, monkeypatch)}"] += 1
        assert not damage.marker.exists(), f"{words} ran code"
        shutil.rmtree(directory)
        out.unlink(missing_ok=True)
    print(f"commands: seeds {seeds[0]} to {seeds[-1]}, outcomes {dict(sorted(outcomes.items()))}")


def code_of(given: Sequence[str], words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of a command in this process; it must be one of those that are documented."""
    monkeypatch.setattr(sys, "argv", ["resume-adapters", *given])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            code: object = 0
        except SystemExit as left:
            code = left.code or 0
        except BaseException as error:
            raise AssertionError(f"{words} ended in {type(error).__name__}") from error
    assert code in (0, 1, 2, 3), f"{words} left with {code!r}"
    assert isinstance(code, int)
    assert code == 0 or out.getvalue() or "resume-adapters: " in err.getvalue(), f"{words} said nothing"
    out.getvalue().encode(), err.getvalue().encode()  # what a terminal can show
    return code
