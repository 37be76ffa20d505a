"""``ls`` and ``status``: the checkpoints of a run, and how it is, once or until it is over."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import RenderableType
from rich.table import Table

from resume_adapters.cli import run_directory
from resume_adapters.cli.app import EXIT_CODES, LOOK, Document, Json, Places, RunDirs, app, console, show
from resume_adapters.cli.render import age, ahead, escape, labels, number, size, state, table
from resume_adapters.cli.run_directory import RunDirectory, open_url, read_url
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.checkpoint.manifest import Ancestry, Manifest, describe_cursor
from resume_adapters.core.checkpoint.retention import parse_best
from resume_adapters.core.run_directory.launches import WastedLaunch, goodput, wasted_launches
from resume_adapters.core.run_directory.status import RunState, is_alive, observed_state
from resume_adapters.core.tiers.options import is_url
from resume_adapters.errors import UnsupportedSetting

_WIDE = 120
"""Width in columns from which the table of checkpoints also shows the position in the data."""


@app.command(name="ls", rich_help_panel=LOOK, epilog=EXIT_CODES)
def list_checkpoints(
    run_dir: Places,
    best: Annotated[
        str | None, typer.Option(metavar="METRIC[:min|max]", help="Mark the best by this metric, and show it.")
    ] = None,
    json: Json = False,
) -> None:
    """List the checkpoints of a run directory, or of its copies in an object store, oldest first.

    Of several run directories (ls runs/*), an overview: one line for each run. Only the sizes of the files are checked.
    To check their content, use verify.
    """
    wanted = parse_best(best) if best is not None else None
    url = _only_url(run_dir)
    runs = [read_url(open_url(url), url)] if url else run_directory.read_all(list(map(Path, run_dir)))
    if len(run_dir) == 1:
        marked = runs[0].best(wanted)
        document = {
            "run_directory": runs[0].place,
            "checkpoints": [_checkpoint(runs[0], row, marked) for row in runs[0].rows],
            "ancestry": _ancestry(runs[0].newest),
            "recoveries": [] if url else _recoveries(runs[0].control().journal.history()),
        }
        show(document, json, lambda found: _list(found, wanted.metric if wanted else None))
    else:
        show(_overview(runs), json, lambda found: [_overview_table(found)])
    raise typer.Exit(1 if any(run.damaged or run.refused for run in runs) else 0)


@app.command(rich_help_panel=LOOK, epilog=EXIT_CODES)
def status(
    run_dir: RunDirs,
    parts: Annotated[
        bool, typer.Option("--parts", help="Show also who saves each part of the state, and what is MISSING.")
    ] = False,
    json: Json = False,
) -> None:
    """Show how the run is, and what the same launch would resume from now.

    Of several run directories (status runs/*), an overview: one line for each run. A run was killed if its status is
    running and its process on this host is gone.
    """
    if (url := next(filter(is_url, run_dir), None)) is not None:
        raise UnsupportedSetting(f"{url} has copies, which have no status: `resume-adapters ls {url}` lists them")
    runs = run_directory.read_all(list(map(Path, run_dir)))
    if len(run_dir) > 1:
        if parts:
            raise UnsupportedSetting(f"--parts is for one run, and here are {len(run_dir)}: give the directory of one")
        show(_overview(runs), json, lambda found: [_overview_table(found)])
    else:
        show(describe(runs[0]), json, lambda found: [status_table(found), *(_parts(found) if parts else [])])
    raise typer.Exit(1 if any(run.damaged or run.refused for run in runs) else 0)


def _only_url(places: list[str]) -> str | None:
    """Return the URL that a command was given, which stands alone; ``None`` for run directories."""
    urls = [place for place in places if is_url(place)]
    if urls and len(places) > 1:
        raise UnsupportedSetting(f"{urls[0]} is a URL; expected it alone, or run directories")
    return urls[0] if urls else None


# ---- What was found, as documents


def _checkpoint(run: RunDirectory, row: CheckpointInfo, best: str | None) -> Document:
    """Describe one checkpoint; without a manifest, the keys that need one are ``None``."""
    manifest = row.manifest
    names = ("epoch", "bytes", "written", "generation", "world_size", "ranks")
    marks = {
        "anchor": row is run.anchor and run.refused is None,
        "latest": row.path.name == run.latest,
        "best": row.path.name == best,
    }
    return {
        "name": row.path.name,
        "state": row.state,
        "step": row.step,
        **{name: getattr(manifest, name, None) for name in names},
        "reason": manifest.reason if manifest else row.reason,
        "metrics": manifest.metrics if manifest else {},
        "cursor": manifest.cursor if manifest else {},
        "marks": [mark for mark, holds in marks.items() if holds],
    }


def _entries(row: CheckpointInfo | None) -> list[Document]:
    """Return what the manifest of a checkpoint says of each part of the state."""
    return [msgspec.to_builtins(each) for each in (row.manifest.parts if row and row.manifest else ())]


def _ancestry(manifest: Manifest | None) -> Document | None:
    return msgspec.to_builtins(manifest.ancestry) if manifest and manifest.ancestry else None


def _recoveries(history: Iterable[dict[str, Any]]) -> list[Document]:
    """Return the failures after which the run went on without a launch of its own, oldest first."""
    known = ("time", "level", "rank", "error", "step", "lost", "seconds")
    return [{name: entry.get(name) for name in known} for entry in history if entry["event"] == "recovery"]


def describe(run: RunDirectory) -> Document:
    """Describe how the run is and what a restart would resume from.

    ``step`` and ``epoch`` are the last known ones: of the live status, or of the newest commit. ``alive`` is ``None``
    if it is unknown on this host. ``without_progress`` has the launches that ended one after the other without a
    committed step, oldest first.
    """
    found = run.status()
    anchor, newest = None if run.refused else run.anchor, run.newest
    is_running, history = observed_state(found) is RunState.RUNNING, list(run.control().journal.history())
    wasted = wasted_launches(history, is_running=is_running)
    last = max((known for known in (found, newest) if known), key=lambda known: known.step, default=None)
    # A commit may be newer than the live status, in which case that save is done.
    ahead = found is not None and last is not None and found.next_save is not None and found.next_save > last.step
    live = ("horizon", "rate", "eta", "ends", "job", "generation", "host", "pid", "updated")
    return {
        "run_directory": run.place,
        "state": observed_state(found),
        "step": last.step if last else None,
        "epoch": last.epoch if last else None,
        **{name: getattr(found, name, None) for name in live},
        "next_save": found.next_save if found and ahead else None,
        "last_commit": newest.step if newest else None,
        "last_commit_written": newest.written if newest else None,
        "reason": found.reason if found else f"there is no {CONTROL}/status.json that can be read",
        "alive": is_alive(found) if found else None,
        "staging": found.staging if found else "",
        "unremovable": found.unremovable if found else 0,
        "mirrors": msgspec.to_builtins(found.mirrors) if found else [],
        "resumes_from": _checkpoint(run, anchor, run.best(None)) if anchor else None,
        "cursor": anchor.manifest.cursor if anchor and anchor.manifest else {},
        "ancestry": _ancestry(anchor.manifest if anchor else None),
        "parts": _entries(anchor),
        "recoveries": _recoveries(history),
        "goodput": goodput(run.launches(history, found)).share,
        "without_progress": msgspec.to_builtins(wasted),
        "refused": run.refused.reason if run.refused else None,
        "damaged": [row.path.name for row in run.damaged],
    }


def _overview(runs: list[RunDirectory]) -> Document:
    return {"runs": [{**describe(run), **_sizes(run)} for run in runs]}


def _sizes(run: RunDirectory) -> Document:
    return {"checkpoints": len(run.rows), "bytes": sum(row.manifest.bytes for row in run.rows if row.manifest)}


# ---- The documents in words


def _list(document: Document, metric: str | None) -> Iterator[RenderableType]:
    """Yield the checkpoints as a table with a metric, by default a loss, and why the damaged ones are damaged."""
    rows = document["checkpoints"]
    if metric is None:
        names = sorted({name for row in rows for name in row["metrics"]})
        metric = next((name for name in names if name.endswith("loss")), names[0] if names else None)
    shown = {escape(metric): metric} if metric else {}
    data = ["data"] if console().width >= _WIDE else []
    columns = ("name", "step", "epoch", "state", "size", "age", "reason", *shown, "marks", *data)
    found = table(*columns, right=("step", "epoch"))
    for row in rows:
        found.add_row(
            escape(row["name"]),
            "" if row["step"] is None else str(row["step"]),
            number(row["epoch"]),
            state(row["state"]),
            size(row["bytes"]),
            age(row["written"]),
            escape(row["reason"]) if row["written"] is not None else "",
            *[number(row["metrics"].get(name)) for name in shown.values()],
            " ".join(row["marks"]),
            *[escape(describe_cursor(row["cursor"])) for _ in data],
        )
    yield found if rows else "No checkpoint yet: the first save has not been committed."
    for row in rows:
        if row["state"] in ("damaged", "newer"):
            yield f"{escape(row['name'])} is {state(row['state'])}: {escape(row['reason'])}"
    if document["ancestry"]:
        yield f"forked from {escape(str(msgspec.convert(document['ancestry'], Ancestry)))}"
    for each in document["recoveries"]:
        yield f"recovered: {escape(_recovery(each))}"


def _recovery(each: dict[str, Any]) -> str:
    """Describe one recovery: what failed, where the run went on, and what that took."""
    lost = f", {each['lost']} step{'s' if each['lost'] > 1 else ''} done again" if each["lost"] else ""
    error = str(each["error"]).partition("\n")[0]
    return (
        f"{age(each['time'])} ago, rank {each['rank']}: {error}; from step {each['step']} ({each['level']}) in "
        f"{each['seconds']:.3g} s{lost}"
    )


_SAVED_BY = {"framework": "the framework", "core": "this package", "missing": "MISSING"}


def _parts(document: Document) -> Iterator[RenderableType]:
    """Yield who saves each part of the checkpoint that a launch would resume from."""
    found = table("part", "saved by", "what")
    for each in document["parts"]:
        found.add_row(escape(each["name"]), _SAVED_BY.get(each["by"], escape(each["by"])), escape(each["note"]))
    yield ""
    yield found if document["parts"] else "No parts: there is no checkpoint of this package to resume from."


def _overview_table(document: Document) -> Table:
    found = table("name", "state", "step", "last commit", "checkpoints", "size", right=("step", "checkpoints", "size"))
    above = os.path.commonpath([os.path.dirname(run["run_directory"]) for run in document["runs"]])
    for run in document["runs"]:
        name = escape(os.path.relpath(run["run_directory"], above))
        commit, count = _last_commit(run), str(run["checkpoints"])
        found.add_row(name, state(run["state"]), _progress(run), commit, count, size(run["bytes"]))
    return found


def status_table(found: Document) -> Table:
    """Return how a run is, as labels and values."""
    anchor = found["resumes_from"]
    running, recoveries, unremovable = found["state"] == "running", found["recoveries"], found["unremovable"]
    has_some = found["damaged"] or found["last_commit"] is not None  # the others have weights alone
    nothing = "nothing: no checkpoint is valid" if has_some else "step 0: no checkpoint yet"
    if found["refused"]:
        nothing = f"nothing: {escape(found['refused'])}"
    return labels(
        {
            "state": state(found["state"]) + _aliveness(found),
            "step": _progress(found),
            "epoch": number(found["epoch"]),
            "rate": f"{found['rate']:.3g} steps/s" if found["rate"] else "",
            "finishes": f"in {ahead(found['eta'])}" if found["eta"] and running else "",
            "walltime": f"over in {ahead(found['ends'])}" if found["ends"] and running else "",
            "last commit": _last_commit(found),
            "next save": f"after step {found['next_save']}" if found["next_save"] and running else "",
            "job": escape(found["job"] or ""),
            "generation": "" if found["generation"] is None else f"start {found['generation']} of this directory",
            "reason": escape(found["reason"]),
            "updated": f"{age(found['updated'])} ago" if found["updated"] else "",
            "resumes from": f"{escape(anchor['name'])} ({anchor['state']})" if anchor else nothing,
            "cursor": escape(describe_cursor(found["cursor"])),
            "forked from": escape(str(msgspec.convert(found["ancestry"], Ancestry))) if found["ancestry"] else "",
            "recoveries": escape(f"{len(recoveries)}; the last {_recovery(recoveries[-1])}") if recoveries else "",
            "goodput": f"{found['goodput']:.1%} of the wall time" if found["goodput"] is not None else "",
            "no progress": escape(_without_progress(found)),
            "damaged": escape(", ".join(found["damaged"])),
            "staging of saves": found["staging"] if running else "",
            "mirror": escape("; ".join(map(_mirror, found["mirrors"]))),
            "cannot remove": f"{unremovable} old checkpoints or leftovers" if unremovable else "",
        }
    )


def _aliveness(document: Document) -> str:
    if not document["pid"]:
        return ""
    where = f": process {document['pid']} on {escape(document['host'])}"
    if document["state"] == "killed":
        return f"{where} is gone" if document["refused"] else f"{where} is gone; the same launch resumes"
    if document["state"] == "running" and document["alive"] is None:
        return f"{where}, another host: whether it is alive is unknown"
    return where


def _mirror(found: dict[str, Any]) -> str:
    """Describe how far the copies on a tier are."""
    step = f"step {found['step']}" if found.get("step") is not None else ""
    behind = f"mirror behind: {found['behind']}" if found.get("behind") else ""
    return ", ".join(filter(None, (found["tier"], step, behind, found.get("problem"))))


def _without_progress(document: Document) -> str:
    launches = msgspec.convert(document["without_progress"], list[WastedLaunch])
    several = "es in a row" if len(launches) > 1 else ""
    return f"{len(launches)} launch{several} without a step kept: {launches[-1]}" if launches else ""


def _progress(document: Document) -> str:
    horizon = f" of {document['horizon']}" if document["horizon"] else ""
    return "" if document["step"] is None else f"{document['step']}{horizon}"


def _last_commit(document: Document) -> str:
    step = document["last_commit"]
    return "none" if step is None else f"step {step}, {age(document['last_commit_written'])} ago"
