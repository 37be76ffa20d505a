"""``report``: one HTML file that says what became of a run, for people who were not there."""

from __future__ import annotations

import html
import json
import math
import string
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from resume_adapters.cli import run_directory
from resume_adapters.cli.app import EXIT_CODES, LOOK, Document, Json, RunDir, app, show
from resume_adapters.cli.render import number, size
from resume_adapters.cli.run_directory import STORAGE, RunDirectory
from resume_adapters.core.run_directory.launches import Launch, goodput
from resume_adapters.core.run_directory.status import observed_state
from resume_adapters.core.saving.cadence import mean_time_between, optimal
from resume_adapters.core.storage.base import write_atomically
from resume_adapters.errors import UnsupportedSetting

_FEWEST, _POINTS = 3, 2000
"""Points of a curve that is drawn, at least and at most."""


@app.command(rich_help_panel=LOOK, epilog=EXIT_CODES)
def report(
    run_dir: RunDir,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file; it must be new.")] = Path(
        "report.html"
    ),
    json: Json = False,
) -> None:
    """Write one HTML file about a run: its launches and why each ended, where the time went, its saves and its losses.

    The file needs no network. --json prints what it would show, and writes no file.
    """
    document = describe(run_directory.read(run_dir))
    if json:
        show(document, json)
        return
    if output.exists():
        raise UnsupportedSetting(f"{output} exists: name another file with -o, or remove it")
    write_atomically(STORAGE, output.absolute(), page(document).encode())
    print(f"Wrote {output}: {_share(document['goodput']['share'])} of the wall time ended in steps that are kept.")


# ---- What was found, as a document


def describe(run: RunDirectory) -> Document:
    """Describe what became of a run; times are seconds since 1970, durations are in seconds."""
    history, status = list(run.control().journal.history()), run.status()
    found = run.launches(history, status)
    spent = goodput(found)
    manifests = {row.path.name: row.manifest for row in run.rows if row.manifest is not None}
    return {
        "run_directory": run.place,
        "state": observed_state(status),
        "step": max([each.step for each in found] + [each.step for each in manifests.values()], default=0),
        "horizon": status.horizon if status else None,
        "goodput": {**msgspec.to_builtins(spent), "share": spent.share},
        "launches": [{**msgspec.to_builtins(each), "productive": each.productive} for each in found],
        "saves": _saves(history, found),
        "curves": _curves(run),
        "kept": [
            {"name": name, "step": each.step, "written": each.written, "reason": each.reason, "bytes": each.bytes}
            for name, each in manifests.items()
        ],
        "removed": [
            {name: entry.get(name) for name in ("time", "checkpoint", "reason")}
            for entry in history
            if entry["event"] == "prune"
        ],
    }


def _saves(history: Sequence[dict[str, Any]], found: Sequence[Launch]) -> Document:
    """Describe how often the run has saved, and how often Young and Daly would."""
    count, seconds = sum(each.saves for each in found), sum(each.save_seconds for each in found)
    between = mean_time_between(history)
    return {
        "count": count,
        "seconds": seconds / count if count else None,
        "every": sum(each.training for each in found) / count if count else None,
        "mean_time_between_failures": between,
        "advised": optimal(seconds / count, between) if seconds else None,
    }


def _curves(run: RunDirectory) -> dict[str, list[tuple[int, float]]]:
    """Return the losses that the Trainer has logged, or else those that the manifests of the checkpoints have."""
    rows = [row for row in run.rows if row.manifest is not None]
    for row in reversed(rows):
        found = {name: _logged(row.path / "trainer_state.json", name) for name in ("loss", "eval_loss")}
        if any(found.values()):
            return found
    measured = [(row.manifest.step, row.manifest.metrics) for row in rows if row.manifest]
    names = sorted({name for _, metrics in measured for name in metrics if name.endswith("loss")})
    points = {name: [(step, metrics.get(name)) for step, metrics in measured] for name in names}
    return {name: [(step, value) for step, value in found if value is not None] for name, found in points.items()}


def _logged(file: Path, name: str) -> list[tuple[int, float]]:
    try:
        logged = json.loads(STORAGE.read(file))["log_history"]
        found = [(int(each["step"]), float(each[name])) for each in logged if name in each]
        return [(step, value) for step, value in found if math.isfinite(value)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return []


# ---- As a page


def page(document: Document) -> str:
    """Return the HTML page; whatever the run directory holds is shown as text."""
    horizon = f" of {document['horizon']:,}" if document["horizon"] else ""
    template = string.Template(resources.files("resume_adapters.cli").joinpath("report.html").read_text("utf-8"))
    return template.substitute(
        title=_text(document["run_directory"]),
        summary=f"{_text(document['state'])}, step {document['step']:,}{horizon}; {len(document['launches'])} launches",
        time=_time(document),
        launches=_launches(document["launches"]),
        saves=_about_saves(document["saves"]),
        curves="".join(_curve(name, points, document["launches"]) for name, points in document["curves"].items()),
        kept=_table(
            ("name", "step", "written", "size", "reason"),
            (
                [each["name"], each["step"], _when(each["written"]), size(each["bytes"]), each["reason"]]
                for each in reversed(document["kept"])
            ),
        ),
        removed=_table(
            ("name", "removed", "reason"),
            ([each["checkpoint"], _when(each["time"]), each["reason"]] for each in reversed(document["removed"])),
        ),
    )


_KINDS = {
    "kept": "steps that are kept",
    "repeated": "steps done again",
    "starting": "starts",
    "away": "between launches",
}


def _time(document: Document) -> str:
    """Return where the time went: the share in words, the whole as one bar, and the launches along the wall time."""
    spent = document["goodput"]
    wall = sum(spent[kind] for kind in _KINDS)
    if not wall:
        return "<p>The run has not begun to train.</p>"
    legend = "".join(
        f'<li><i class="{kind}"></i>{words}: {_long(spent[kind])}, {spent[kind] / wall:.1%}</li>'
        for kind, words in _KINDS.items()
    )
    share = f"{_share(spent['share'])} of {_long(wall)} of wall time ended in steps that are kept (goodput)."
    line = _bar(_segments(document["launches"]), wall)
    note = "Along the wall time, launch by launch. Of a launch the steps that were lost are drawn last, each as long."
    return f'<p>{share}</p>{line}<ul class="legend">{legend}</ul><p class="dim">{note}</p>'


def _segments(found: Sequence[Document]) -> Iterator[tuple[str, float]]:
    """Yield the kinds of time in their order, with seconds."""
    for number_of, each in enumerate(found):
        if number_of:
            yield "away", max(0.0, each["began"] - found[number_of - 1]["ended"])
        trained = each["ended"] if each["trained_from"] is None else each["trained_from"]
        yield "starting", trained - each["began"]
        yield "kept", each["productive"]
        yield "repeated", each["ended"] - trained - each["productive"]


def _bar(segments: Iterable[tuple[str, float]], wall: float) -> str:
    parts = "".join(
        f'<i class="{kind}" style="width:{seconds / wall:.4%}" title="{_KINDS[kind]}: {_long(seconds)}"></i>'
        for kind, seconds in segments
        if seconds > 0
    )
    return f'<div class="bar">{parts}</div>'


def _launches(found: Sequence[Document]) -> str:
    rows = (
        [
            each["generation"],
            _when(each["began"]),
            _long(each["ended"] - each["began"]),
            f"{each['resumed_from']:,} to {each['step']:,}",
            each["kept"],
            " ".join(filter(None, (each["how"], each["reason"] and f"({each['reason']})"))),
        ]
        for each in reversed(found)
    )
    return _table(("start", "began", "took", "steps", "kept", "ended"), rows)


def _about_saves(saves: Document) -> str:
    if not saves["count"]:
        return "<p>No checkpoint was committed.</p>"
    words = [
        f"{saves['count']:,} checkpoints were committed, one in {_long(saves['every'])} of training; from the start "
        f"of a save to its commit {_long(saves['seconds'])} on average."
    ]
    if saves["advised"] is not None:
        words.append(
            f"With one failure in {_long(saves['mean_time_between_failures'])}, as this run had them, Young and Daly "
            f"would save every {_long(saves['advised'])}, if the training waited all that time for each save."
        )
    return "".join(f"<p>{each}</p>" for each in words)


def _curve(name: str, points: Sequence[tuple[int, float]], found: Sequence[Document]) -> str:
    """Return one curve over the steps, with a line at each step from which a launch has resumed."""
    if len(points) < _FEWEST:
        return ""
    points = points[:: -(-len(points) // _POINTS)]
    (first, *_), (last, *_) = points[0], points[-1]
    low, high = min(value for _, value in points), max(value for _, value in points)

    def across(step: int) -> float:
        return 1000 * (step - first) / max(1, last - first)

    line = " ".join(
        f"{across(step):.1f},{290 - 280 * (value - low) / ((high - low) or 1):.1f}" for step, value in points
    )
    marks = "".join(
        f'<line x1="{across(step):.1f}" x2="{across(step):.1f}" y1="0" y2="300"/>'
        for step in sorted({each["resumed_from"] for each in found})
        if first < step <= last
    )
    return (
        f"<h2>{_text(name)}</h2><figure>"
        f'<svg viewBox="0 0 1000 300" preserveAspectRatio="none" role="img" aria-label="{_text(name)} by step">'
        f'{marks}<polyline points="{line}"/></svg><figcaption><span>step {first:,}</span><span>from {number(low)} to '
        f"{number(high)}; a dashed line is a resume</span><span>step {last:,}</span></figcaption></figure>"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; numbers are set to the right."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    head = "".join(f'<th class="n">{each}</th>' if each in _COUNTED else f"<th>{each}</th>" for each in columns)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>' if body else "<p>None.</p>"


_COUNTED = ("start", "step", "kept")
"""Columns of numbers."""


def _cell(value: Any) -> str:
    return f'<td class="n">{value:,}</td>' if isinstance(value, int) else f"<td>{_text(value)}</td>"


def _text(value: Any) -> str:
    return html.escape("" if value is None else str(value))


def _share(share: float | None) -> str:
    return "nothing" if share is None else f"{share:.1%}"


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment)) + " UTC"


def _long(seconds: float) -> str:
    """Format a duration in the two largest units."""
    units = (("d", 86400), ("h", 3600), ("min", 60))
    for place, (unit, length) in enumerate(units):
        if seconds >= length:
            below, per = (*units, ("s", 1))[place + 1]
            rest = int(seconds % length // per)
            return f"{int(seconds // length)} {unit} {rest} {below}"
    return f"{seconds:.3g} s"
