"""A pytest fixture for projects that hold their training script to an exact resume: ``resume_drill``.

pytest loads this module wherever the package is installed, so it imports nothing until a test asks for the fixture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


@pytest.fixture
def resume_drill(tmp_path: Path) -> Callable[..., None]:
    """Run a training command undisturbed and with real faults, and fail the test if the two differ.

    For example::

        def test_a_killed_training_continues_exactly(resume_drill):
            command = ["python", "train.py", "--output-dir", "{run_dir}"]
            resume_drill(command, steps=40, faults=("step", "save"), seed=0)

    The arguments are the options of ``resume-adapters drill``.
    """
    numbers = itertools.count(1)

    def drill(
        command: Sequence[str],
        *,
        steps: int | None = None,
        faults: Sequence[str] | None = None,
        seed: int = 0,
        references: int = 1,
        save_every: int | None = None,
        timeout: float = 600.0,
    ) -> None:
        from resume_adapters.cli.drill import report
        from resume_adapters.cli.drill.drill import Drill, Watcher, run
        from resume_adapters.cli.drill.job import DrillFailed

        __tracebackhide__ = True
        directory = tmp_path / f"drill-{next(numbers)}"
        kinds = None if faults is None else tuple(faults)
        what = Drill(tuple(map(str, command)), directory, steps, kinds, seed, references, save_every, timeout)
        try:
            result = run(what, Watcher())
        except DrillFailed as error:
            pytest.fail(str(error), pytrace=False)
        if report.EXIT_CODES[result.verdict.word] != 0:
            pytest.fail("\n".join(report.lines(result)), pytrace=False)

    return drill
