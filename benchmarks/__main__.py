"""Run the benchmarks: ``python -m benchmarks [--only NAME ...] [--json] [--quick] [--write FILE]``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from pathlib import Path

# Set before torch is imported: one thread, so that one of two cores is free for the callback's background work.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from rich.console import Console
from rich.table import Table

from benchmarks import (
    asking,
    digests,
    engines,
    figure,
    fits,
    loops,
    memory,
    mirrors,
    positions,
    proofs,
    ranks,
    recoveries,
    remembered,
    resolving,
    saves,
    staged,
    steps,
)
from benchmarks.figure import Figure

_COLUMNS = ("what", "measured", "quartiles", "goal", "met", "on what")
_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"

BENCHMARKS = {
    "steps": (steps.measure, 2000, 200),
    "asking": (asking.measure, 200, 20),
    "saves": (saves.measure, 4, 1),
    "staged": (staged.measure, 2, 1),
    "ranks": (ranks.measure, 3, 1),
    "loop-steps": (loops.measure_steps, 2000, 200),
    "loop-saves": (loops.measure_saves, 4, 1),
    "loop-trace": (loops.measure_trace, 15, 2),
    "fit-steps": (fits.measure_steps, 2000, 200),
    "fit-saves": (fits.measure_saves, 4, 1),
    "digests": (digests.measure, 15, 3),
    "resolving": (resolving.measure, 15, 3),
    "positions": (positions.measure, 15, 3),
    "proofs": (proofs.measure, 7, 1),
    "memory": (memory.measure, 3, 1),
    "mirrors": (mirrors.measure, 3, 1),
    "remembered": (remembered.measure, 5, 1),
    "recoveries": (recoveries.measure, 10, 2),
    "deepspeed": (engines.measure, 1000, 200),
}
"""By name: what measures it, how many repeats, and how many when in a hurry."""


def main() -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it runs, not what it costs")
    parser.add_argument("--write", type=Path, help="replace the table of figures in this page")
    given = parser.parse_args()
    logging.getLogger("resume_adapters").addHandler(logging.NullHandler())
    figures: list[Figure] = []
    for name in given.only:
        measure, repeats, hurried = BENCHMARKS[name]
        figures += measure(hurried if given.quick else repeats)
    if given.json:
        print(json.dumps([{**dataclasses.asdict(each), "met": each.met} for each in figures], indent=2))
    else:
        _show(figures)
    if given.write:
        _write(given.write, figures)


def _show(figures: list[Figure]) -> None:
    table = Table(*_COLUMNS[:-1], show_lines=True)
    for each in figures:
        name, *cells, detail = figure.row(each)
        table.add_row(f"{name}\n[dim]{detail}[/dim]", *cells, style="red" if each.met is False else "")
    Console(highlight=False).print(table)


def _write(page: Path, figures: list[Figure]) -> None:
    rows = [_COLUMNS, tuple("---" for _ in _COLUMNS), *(figure.row(each) for each in figures)]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    before, rest = page.read_text().split(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n{lines}\n{_END}{rest.split(_END)[1]}")


if __name__ == "__main__":
    main()
