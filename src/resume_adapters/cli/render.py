"""Print what the commands found, as tables that fit 80 columns."""

from __future__ import annotations

import os
import time
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from resume_adapters.cli.text import escape, visible
from resume_adapters.core.checkpoint.files import extra_in_words
from resume_adapters.core.checkpoint.manifest import describe_cursor
from resume_adapters.core.run_directory.launches import WastedLaunch
from resume_adapters.core.run_directory.upkeep import format_bytes

_STYLES = {
    "committed": "green",
    "valid": "green",
    "readable": "cyan",
    "finished": "green",
    "running": "green",
    "pending": "yellow",
    "stopped": "yellow",
    "halted": "bold yellow",
    "foreign": "cyan",
    "damaged": "bold red",
    "killed": "bold red",
    "failed": "bold red",
}
_WIDE = 120
"""Width in columns from which the table of checkpoints also shows the position in the data."""

_PERIODS = (("d", 86400), ("h", 3600), ("m", 60))


def size(count: int | None) -> str:
    """Format a number of bytes; nothing for ``None``."""
    return "" if count is None else format_bytes(count)


def age(moment: float | None) -> str:
    """Format how long ago a moment was (seconds since 1970), in its largest unit."""
    if moment is None:
        return ""
    seconds = max(0, int(time.time() - moment))
    for unit, length in _PERIODS:
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _ahead(moment: float) -> str:
    """Format the time until a moment (seconds since 1970), to the minute or second."""
    seconds = max(0, round(moment - time.time()))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds % 60:02}s"


def state(word: str) -> str:
    """Return a state with its colour."""
    return f"[{_STYLES[word]}]{word}[/]" if word in _STYLES else escape(word)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for column in columns:
        # In a narrow terminal text is folded rather than truncated; a name or a state is never folded.
        whole = column in ("name", "state")
        table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=whole)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def checkpoints(console: Console, document: dict[str, Any], metric: str | None) -> None:
    """Print the checkpoints of a run directory, and below them why the damaged ones are damaged.

    Args:
        console: prints the table.
        document: of :func:`resume_adapters.cli.documents.checkpoints`.
        metric: the metric to show; by default a loss, if there is one.
    """
    rows = document["checkpoints"]
    metric = metric or _main_metric(rows)
    shown = [metric] if metric else []
    headings = [escape(name) for name in shown]
    data = ["data"] if console.width >= _WIDE else []
    table = _table(
        "name", "step", "epoch", "state", "size", "age", "reason", *headings, "marks", *data, right=("step", "epoch")
    )
    for row in rows:
        committed = row["state"] == "committed"
        table.add_row(
            escape(row["name"]),
            "" if row["step"] is None else str(row["step"]),
            _number(row["epoch"]),
            state(row["state"]),
            size(row["bytes"]),
            age(row["written"]),
            escape(row["reason"]) if committed else "",
            *[_number(row["metrics"].get(name)) for name in shown],
            " ".join(row["marks"]),
            *[escape(describe_cursor(row["cursor"])) for _ in data],
        )
    if rows:
        console.print(table)
    else:
        console.print("No checkpoint yet: the first save has not been committed.")
    for row in rows:
        if row["state"] == "damaged":
            console.print(f"{escape(row['name'])} is {state('damaged')}: {escape(row['reason'])}", soft_wrap=True)
    for each in document.get("recoveries", []):
        console.print(f"recovered: {escape(_recovery(each))}", soft_wrap=True)


def _recovery(each: dict[str, Any]) -> str:
    """Describe one recovery: what failed, where the run went on, and what that took."""
    lost = f", {each['lost']} steps done again" if each["lost"] else ""
    error = str(each["error"]).partition("\n")[0]
    return (
        f"{age(each['time'])} ago, rank {each['rank']}: {error}; from step {each['step']} ({each['level']}) in "
        f"{each['seconds']:.3g} s{lost}"
    )


def _recoveries(found: list[dict[str, Any]]) -> str:
    return f"{len(found)}; the last {_recovery(found[-1])}" if found else ""


def _main_metric(rows: list[dict[str, Any]]) -> str | None:
    names = sorted({name for row in rows for name in row["metrics"]})
    return next((name for name in names if name.endswith("loss")), names[0] if names else None)


def status(console: Console, document: dict[str, Any]) -> None:
    """Print how a run is, of :func:`resume_adapters.cli.documents.status`."""
    console.print(status_table(document))


def status_of_one_or_all(document: dict[str, Any]) -> Table:
    """Return how a run is, or an overview of several."""
    return overview_table(document) if "runs" in document else status_table(document)


def overview_table(document: dict[str, Any]) -> Table:
    """Return a line for each run, of :func:`resume_adapters.cli.documents.overview`."""
    table = _table("name", "state", "step", "last commit", "checkpoints", "size", right=("step", "checkpoints", "size"))
    paths = [run["run_directory"] for run in document["runs"]]
    above = os.path.commonpath([os.path.dirname(path) for path in paths])
    for run, path in zip(document["runs"], paths, strict=True):
        table.add_row(
            escape(os.path.relpath(path, above)),
            state(run["state"]),
            _progress(run),
            _last_commit(run),
            str(run["checkpoints"]),
            size(run["bytes"]),
        )
    return table


def status_table(document: dict[str, Any]) -> Table:
    """Return how a run is, of :func:`resume_adapters.cli.documents.status`, as a table of labels and values."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    anchor, running = document["resumes_from"], document["state"] == "running"
    lines = {
        "state": state(document["state"]) + _aliveness(document),
        "step": _progress(document),
        "epoch": _number(document["epoch"]),
        "rate": f"{document['rate']:.3g} steps/s" if document["rate"] else "",
        "finishes": f"in {_ahead(document['eta'])}" if document["eta"] and running else "",
        "walltime": f"over in {_ahead(document['ends'])}" if document["ends"] and running else "",
        "last commit": _last_commit(document),
        "next save": f"after step {document['next_save']}" if document["next_save"] and running else "",
        "job": escape(document["job"] or ""),
        "generation": "" if document["generation"] is None else f"start {document['generation']} of this directory",
        "reason": escape(document["reason"]),
        "updated": f"{age(document['updated'])} ago" if document["updated"] else "",
        "resumes from": f"{escape(anchor['name'])} ({anchor['state']})" if anchor else "step 0: no checkpoint yet",
        "cursor": escape(describe_cursor(document["cursor"])),
        "recoveries": escape(_recoveries(document["recoveries"])),
        "no progress": escape(_without_progress(document)),
        "damaged": escape(", ".join(document["damaged"])),
        "staging of saves": document["staging"] if running else "",
        "mirror": escape("; ".join(map(_mirror, document["mirrors"]))),
        "cannot remove": f"{count} old checkpoints or leftovers" if (count := document["unremovable"]) else "",
    }
    if document["damaged"] and not anchor:
        lines["resumes from"] = "nothing: no checkpoint is valid"
    for label, text in lines.items():
        if text:
            table.add_row(label, text)
    return table


def _aliveness(document: dict[str, Any]) -> str:
    if document["pid"] is None:
        return ""
    where = f"process {document['pid']} on {escape(document['host'])}"
    if document["state"] == "killed":
        return f": {where} is gone; the same launch resumes"
    if document["state"] == "running" and document["alive"] is None:
        return f": {where}, another host: whether it is alive is unknown"
    return f": {where}"


def _mirror(found: dict[str, Any]) -> str:
    """Describe how far the copies on a tier are."""
    step, behind = found.get("step"), found.get("behind", 0)
    words = [found["tier"]]
    words += [] if step is None else [f"step {step}"]
    words += [f"mirror behind: {behind}"] if behind else []
    words += [text for text in (found.get("problem"), found.get("note")) if text]
    return ", ".join(words)


def _without_progress(document: dict[str, Any]) -> str:
    launches = msgspec.convert(document["without_progress"], list[WastedLaunch])
    if not launches:
        return ""
    return f"{len(launches)} launch{'es in a row' if len(launches) > 1 else ''} without a step kept: {launches[-1]}"


def _progress(document: dict[str, Any]) -> str:
    if document["step"] is None:
        return ""
    return f"{document['step']}" + (f" of {document['horizon']}" if document["horizon"] else "")


def _last_commit(document: dict[str, Any]) -> str:
    if document["last_commit"] is None:
        return "none"
    return f"step {document['last_commit']}, {age(document['last_commit_written'])} ago"


def verdicts(console: Console, document: dict[str, Any]) -> None:
    """Print the results of verifying, of :func:`resume_adapters.cli.documents.verdicts`."""
    table = _table("name", "verdict", "files", "size", right=("files", "size"))
    for row in document["checkpoints"]:
        table.add_row(escape(row["name"]), state(row["verdict"]), str(row["files"]), size(row["bytes"]))
    if document["checkpoints"]:
        console.print(table)
    else:
        console.print("There is no checkpoint to verify.")
    for row in document["checkpoints"]:
        for damage in row["damage"]:
            console.print(f"{escape(row['name'])} is {state('damaged')}: {escape(damage['reason'])}", soft_wrap=True)
        if row["extra"]:
            extra = escape(extra_in_words(row["extra"]))
            console.print(f"{escape(row['name'])}: its manifest does not name {extra}, which is not read")
        if row["verdict"] == "readable":
            console.print(
                f"{escape(row['name'])} is {state('readable')}: it was made without this package and has no digests; "
                "only the structure of its files was checked",
                soft_wrap=True,
            )
        elif row["verdict"] not in ("valid", "damaged"):
            console.print(f"{escape(row['name'])} is {state(row['verdict'])}: it has no manifest to compare with")


def pruning(console: Console, document: dict[str, Any]) -> None:
    """Print what pruning keeps and removes, of :func:`resume_adapters.cli.documents.pruning`."""
    table = _table("name", "step", "size", "", "why", right=("step", "size"))
    rows = [(row, "keep", "green") for row in document["keep"]] + [(row, "remove", "red") for row in document["remove"]]
    for row, what, style in sorted(rows, key=lambda each: int(each[0]["step"])):
        table.add_row(
            escape(row["name"]), str(row["step"]), size(row["bytes"]), f"[{style}]{what}[/]", escape(row["reason"])
        )
    console.print(table)
    for row in document["untouched"]:
        console.print(f"{escape(row['name'])} is {state(row['state'])}: left alone")
    count, freed = len(document["remove"]), size(sum(row["bytes"] for row in document["remove"]))
    if document["dry_run"]:
        console.print(f"Would remove {count} of {len(rows)} checkpoints ({freed}); nothing was changed.")
    else:
        console.print(f"Removed {count} of {len(rows)} checkpoints ({freed}).")


def rewinding(console: Console, document: dict[str, Any]) -> None:
    """Print which checkpoints were set aside, and what the next launch resumes from."""
    for name, shelf in document["set_aside"].items():
        console.print(f"{visible(name)} was moved to .resume/set-aside/{visible(shelf)}", markup=False)
    console.print(f"The next launch resumes from {visible(document['checkpoint'])}.", markup=False)


def exporting(console: Console, document: dict[str, Any]) -> None:
    """Print what was exported."""
    written = f"{document['tensors']} tensors of {visible(document['checkpoint'])} to {visible(document['output'])}"
    console.print(f"Wrote {written} ({size(document['bytes'])}).", markup=False, soft_wrap=True)


def copied(console: Console, document: dict[str, Any]) -> None:
    """Print which checkpoint is now in a run directory and in an object store."""
    both = f"{visible(document['run_directory'])} and at {visible(document['url'])}"
    console.print(
        f"{visible(document['checkpoint'])} ({size(document['bytes'])}) is in {both}.", markup=False, soft_wrap=True
    )


def remote_status_table(document: dict[str, Any]) -> Table:
    """Return what is at a URL, as a table of labels and values."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    newest, owner = document["resumes_from"], document["owner"]
    lines = {
        "url": escape(document["run_directory"]),
        "checkpoints": f"{document['checkpoints']} ({size(document['bytes'])})",
        "resumes from": f"{escape(newest['name'])} ({newest['state']})" if newest else "nothing: none is whole",
        "written": f"{age(newest['written'])} ago" if newest else "",
        "claimed by": f"start {document['generation']} ({escape(owner)})" if owner else "",
        "cursor": escape(describe_cursor(newest["cursor"])) if newest else "",
        "damaged": escape(", ".join(document["damaged"])),
    }
    for label, text in lines.items():
        if text:
            table.add_row(label, text)
    return table


_SHOWN = 20
"""Differences that are printed; the JSON document has all."""


def difference(console: Console, document: dict[str, Any]) -> None:
    """Print how two checkpoints compare, of :func:`resume_adapters.cli.documents.difference`."""
    found = document["differences"]
    lines = [f"{label.upper()}: {_side(document[label])}" for label in ("a", "b")]
    for each in found[:_SHOWN]:
        absent = [label.upper() for label in ("a", "b") if not each[label]]
        text = f"is missing in {absent[0]}" if absent else f"is {each['a']} in A, {each['b']} in B"
        lines.append(f"{each['name'].lstrip(': ')} {text}")
    if len(found) > _SHOWN:
        lines.append(f"{len(found) - _SHOWN} more differ; --json lists all")
    lines.append("The states are equal." if document["equal"] else "The states differ.")
    for line in lines:
        console.print(visible(line), markup=False, soft_wrap=True)


def _side(side: dict[str, Any]) -> str:
    step = "" if side["step"] is None else f" (step {side['step']})"
    newest = ", the newest valid checkpoint" if side["newest"] else ""
    return f"{side['checkpoint']}{step} of {side['run_directory']}{newest}"
