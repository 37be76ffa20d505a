"""What the commands found, as JSON documents. Their keys are public: keys are added, never renamed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from resume_adapters.cli.difference import Difference
from resume_adapters.cli.run_directory import RunDirectory
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.retention import Plan
from resume_adapters.core.run_directory.launches import wasted_launches
from resume_adapters.core.run_directory.status import RunState, is_alive, observed_state

Document = dict[str, Any]

READABLE = "readable"
"""The verdict on a checkpoint without digests, whose files have the structure of their formats."""


@dataclass(frozen=True)
class Damage:
    """A file that differs from its manifest. ``file`` is relative to the checkpoint; empty for the whole checkpoint."""

    file: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The result of verifying a checkpoint.

    ``verdict`` is ``valid`` or ``damaged``, ``readable``, or the state of a checkpoint that has no manifest. ``extra``
    are files that its manifest does not name: nothing reads them.
    """

    name: str
    verdict: str
    files: int = 0
    bytes: int = 0
    damage: tuple[Damage, ...] = ()
    extra: tuple[str, ...] = ()


def write(document: Document) -> None:
    """Print a document."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def write_line(document: Document) -> None:
    """Print a document as one line, and flush it."""
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


def checkpoint(row: CheckpointInfo, marks: list[str]) -> Document:
    """Describe one checkpoint; without a manifest, the keys that need one are ``None``."""
    manifest = row.manifest
    return {
        "name": row.path.name,
        "state": row.state,
        "step": row.step,
        "epoch": manifest.epoch if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "written": manifest.written if manifest else None,
        "reason": manifest.reason if manifest else row.reason,
        "metrics": manifest.metrics if manifest else {},
        "generation": manifest.generation if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "ranks": manifest.ranks if manifest else None,
        "marks": marks,
        "cursor": manifest.cursor if manifest else {},
    }


def marks(run: RunDirectory, row: CheckpointInfo, best: str | None) -> list[str]:
    """Return which of these a checkpoint is: ``anchor``, what ``latest`` names, ``best``."""
    facts = {"anchor": row is run.anchor, "latest": row.path.name == run.latest, "best": row.path.name == best}
    return [mark for mark, holds in facts.items() if holds]


def checkpoints(run: RunDirectory, best: str | None) -> Document:
    """Describe a run directory's checkpoints, and the recoveries between them, each oldest first."""
    rows = [checkpoint(row, marks(run, row, best)) for row in run.rows]
    recoveries = _recoveries(run.control().journal.history())
    return {"run_directory": str(run.path), "checkpoints": rows, "recoveries": recoveries}


def _recoveries(history: list[Document]) -> list[Document]:
    """Return the failures after which the run went on without a launch of its own, oldest first."""
    known = ("time", "level", "rank", "error", "step", "lost", "seconds")
    return [{name: entry.get(name) for name in known} for entry in history if entry["event"] == "recovery"]


def status(run: RunDirectory) -> Document:
    """Describe how the run is and what a restart would resume from.

    ``state`` is a :class:`~resume_adapters.core.run_directory.status.RunState`. ``alive`` is ``None`` if it is unknown
    on this host.
    ``step`` and ``epoch`` are the last known ones: of the live status, or of the newest commit.
    ``without_progress`` has the launches that ended one after the other without a committed step, oldest first, and
    ``recoveries`` the failures after which it went on in the same processes.
    """
    found, problem = run.status()
    state = observed_state(found)
    history = run.control().journal.history()
    wasted = wasted_launches(history, is_running=state is RunState.RUNNING)
    alive = is_alive(found) if found else None
    anchor, newest = run.anchor, run.newest
    last = max((known for known in (found, newest) if known), key=lambda known: known.step, default=None)
    # A commit may be newer than the live status, in which case that save is done.
    ahead = found is not None and last is not None and found.next_save is not None and found.next_save > last.step
    return {
        "run_directory": str(run.path),
        "state": state,
        "step": last.step if last else None,
        "epoch": last.epoch if last else None,
        "horizon": found.horizon if found else None,
        "rate": found.rate if found else None,
        "eta": found.eta if found else None,
        "next_save": found.next_save if found and ahead else None,
        "ends": found.ends if found else None,
        "job": found.job if found else None,
        "last_commit": newest.step if newest else None,
        "last_commit_written": newest.written if newest else None,
        "generation": found.generation if found else None,
        "reason": found.reason if found else problem,
        "host": found.host if found else None,
        "pid": found.pid if found else None,
        "alive": alive,
        "updated": found.updated if found else None,
        "staging": found.staging if found else "",
        "unremovable": found.unremovable if found else 0,
        "mirrors": [msgspec.to_builtins(each) for each in found.mirrors] if found else [],
        "resumes_from": checkpoint(anchor, marks(run, anchor, run.best(None))) if anchor else None,
        "cursor": anchor.manifest.cursor if anchor and anchor.manifest else {},
        "recoveries": _recoveries(history),
        "without_progress": [msgspec.to_builtins(launch) for launch in wasted],
        "damaged": [row.path.name for row in run.damaged],
    }


def overview(runs: list[RunDirectory]) -> Document:
    """Describe several runs, each as :func:`status` does, with the sizes of its checkpoints."""
    return {"runs": [{**status(run), **_sizes(run)} for run in runs]}


def _sizes(run: RunDirectory) -> Document:
    sizes = [row.manifest.bytes for row in run.rows if row.manifest]
    return {"checkpoints": len(run.rows), "bytes": sum(sizes)}


def verdicts(run_directory: str, found: list[Verdict]) -> Document:
    """Describe the results of verifying a run directory, or the URL of its copies."""
    return {"run_directory": run_directory, "checkpoints": [msgspec.to_builtins(each) for each in found]}


def pruning(run: RunDirectory, plan: Plan, dry_run: bool) -> Document:
    """Describe what pruning keeps and removes, or has removed."""
    by_name = {row.path.name: row for row in run.rows}

    def describe(names: dict[str, str]) -> list[Document]:
        return [
            {
                "name": name,
                "step": by_name[name].step,
                "bytes": manifest.bytes if (manifest := by_name[name].manifest) else None,
                "reason": names[name],
            }
            for name in by_name
            if name in names
        ]

    return {
        "run_directory": str(run.path),
        "dry_run": dry_run,
        "keep": describe(plan.keep),
        "remove": describe(plan.remove),
        "untouched": [
            # A committed checkpoint that is not in the plan turned out to be damaged when its files were read.
            {"name": row.path.name, "state": "damaged" if row.state == "committed" else row.state}
            for row in run.rows
            if row.path.name not in plan.keep | plan.remove
        ],
    }


@dataclass(frozen=True)
class Side:
    """A checkpoint to compare: where it is, its step if it has a manifest, and whether a run's newest was chosen."""

    path: Path
    step: int | None
    is_newest: bool


def difference(a: Side, b: Side, found: list[Difference]) -> Document:
    """Describe how two checkpoints compare."""
    return {"a": _side(a), "b": _side(b), "equal": not found, "differences": [each._asdict() for each in found]}


def _side(side: Side) -> Document:
    return {
        "run_directory": str(side.path.parent),
        "checkpoint": side.path.name,
        "step": side.step,
        "newest": side.is_newest,
    }
