"""The verdict on an interrupted run, exact where undisturbed runs are and by statistics where not; and the report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from resume_adapters.cli.drill.causes import likely_cause
from resume_adapters.cli.drill.comparison import NAMES, QUANTITIES, STEPS, compare, unseeded
from resume_adapters.cli.drill.drill import Result
from resume_adapters.cli.drill.faults import Fault
from resume_adapters.cli.drill.statistics import Shift, shifts
from resume_adapters.cli.drill.trace import LaunchTrace, Run
from resume_adapters.cli.render import escape

IDENTICAL, EQUIVALENT, DIFFERENT, UNDECIDED = "identical", "equivalent", "different", "undecided"
EXIT_CODES = {IDENTICAL: 0, EQUIVALENT: 0, DIFFERENT: 1, UNDECIDED: 4}
"""The exit code for each verdict."""

_STYLES = {IDENTICAL: "bold green", EQUIVALENT: "bold green", DIFFERENT: "bold red", UNDECIDED: "bold yellow"}


def judge(references: Sequence[Run], interrupted: Run) -> dict[str, Any]:
    """Compare an interrupted run with one or more undisturbed runs of the same command.

    The verdict is ``identical``: all that was traced is equal; ``equivalent``: what undisturbed runs repeat is equal,
    and the losses are within their spread; ``undecided``: the run is too short to judge its losses; or ``different``.
    """
    others = (*references[1:], interrupted)
    generators = tuple(dict.fromkeys(name for run in others for name in unseeded(references[0], run)))
    differing = {
        name for one, other in combinations(references, 2) for name in compare(one, other, without=generators).differing
    }
    exact = [name for name in QUANTITIES if name not in differing]
    compared = compare(references[0], interrupted, exact, generators)
    tested: list[Shift] = []
    if "loss" in differing:
        resumes = [step for launch in interrupted.launches if (step := launch.resumed_from)]
        tested = shifts([run.losses for run in references], interrupted.losses, resumes)
    outside = [shift for shift in tested if shift.is_within_the_spread is False]
    difference: dict[str, Any] | None = None
    if (first := compared.first) is not None:
        where = {name: getattr(first, name) for name in ("step", "rank", "launch", "quantity")}
        difference = {"text": str(first), "cause": likely_cause(first, references[0], interrupted), **where}
    elif STEPS in differing:
        difference = {"text": "the reference runs did not do the same steps, so nothing can be compared", "cause": ""}
    elif outside:
        cause = "something that shapes the loss was not resumed; all that can be compared exactly is equal"
        difference = {"text": f"the losses, {outside[0]}", "cause": cause}
    if difference is not None:
        word = DIFFERENT
    elif tested and all(shift.is_within_the_spread is None for shift in tested):
        word = UNDECIDED
    else:
        word = EQUIVALENT if len(exact) < len(QUANTITIES) else IDENTICAL
    return {
        "verdict": word,
        "difference": difference,
        "compared": {name: getattr(compared, name) for name in ("steps", "done_twice", "ranks", "quantities")},
        "not_repeated": [name for name in QUANTITIES if name in differing],
        "unseeded": generators,
        "statistics": [asdict(shift) for shift in tested],
    }


def document(result: Result) -> dict[str, Any]:
    """Describe the result of a drill; losses have all their digits."""
    return {
        **judge(result.references, result.interrupted),
        "command": list(result.drill.command),
        "directory": str(result.drill.directory.absolute()),
        "seed": result.drill.seed,
        "references": len(result.references),
        "launches": list(map(launch, result.interrupted.launches)),
        "left_out": result.plan.left_out,
        "final_loss": {
            "reference": list(result.references[0].losses.values())[-1:],
            "interrupted": list(result.interrupted.losses.values())[-1:],
        },
        "seconds": round(result.seconds, 1),
    }


def launch(trace: LaunchTrace) -> dict[str, Any]:
    """Describe one launch of the interrupted run."""
    return {
        "launch": trace.number,
        "resumed_from": trace.resumed_from,
        "last_step": trace.last_step,
        "fault": {**asdict(trace.fault), "happened": trace.struck} if trace.fault else None,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield a document for a reader, as lines of rich's markup. The verdict is the first word of its line."""
    rows = [("launch", "resumed from", "fault"), *map(row, found["launches"])]
    widths = [max(len(each[column]) for each in rows) for column in range(2)]
    for one, two, three in rows:
        yield escape(f"{one:<{widths[0]}}  {two:<{widths[1]}}  {three}".rstrip())
    for kind, reason in found["left_out"].items():
        yield f"left out: {kind} ({escape(reason)})"
    yield ""
    word, difference, compared = found["verdict"], found["difference"], found["compared"]
    quantities = ", ".join(NAMES[name] for name in compared["quantities"])
    if difference is None:
        ranks = "1 rank" if compared["ranks"] == 1 else f"{compared['ranks']} ranks"
        steps = f"{compared['steps']} steps ({compared['done_twice']} of them done more than once) on {ranks}"
        said = f"{steps}: {quantities}, bit for bit"
    else:
        said = difference["text"]
    yield f"[{_STYLES[word]}]{word}: {escape(said)}[/]"
    if difference is not None and difference["cause"]:
        yield f"likely cause: {escape(difference['cause'])}"
    if found["unseeded"]:
        yield escape(f"not compared: the generators {', '.join(found['unseeded'])}, which the command does not seed")
    if found["not_repeated"]:
        differ = ", ".join(NAMES[name] for name in found["not_repeated"])
        by_statistics = "losses" if found["statistics"] else "nothing"
        yield (
            f"The {found['references']} references differ from each other in {differ}; judged exactly: "
            f"{quantities or 'nothing'}; by statistics: {by_statistics}."
        )
    for shift in found["statistics"]:
        yield escape(f"  {Shift(**shift)}")
    yield escape(f"seed {found['seed']}, {found['seconds']:.0f} s")
    yield escape(shlex.join(found["command"]))


def row(launch: dict[str, Any]) -> tuple[str, str, str]:
    """Return what a launch was, where it began and what happened to it, in words."""
    resumed, what = launch["resumed_from"], ""
    start = "ended before" if resumed is None else f"step {resumed}" if resumed else "fresh start"
    if (facts := launch["fault"]) is not None:
        happened = facts["happened"]
        # A launch that resumed behind that step was killed after its first one.
        is_killed = happened and facts["kind"] in ("step", "twice")
        step = launch["last_step"] if is_killed else facts["step"]
        what = str(Fault(facts["kind"], step, facts["operation"], facts["rank"]))
        what = what if happened else f"(the run was over before: {what})"
    return str(launch["launch"]), start, what
