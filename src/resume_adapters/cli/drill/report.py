"""The verdict on an interrupted run, exact where undisturbed runs are and by statistics where not; and the report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from resume_adapters.cli.drill.causes import likely_cause
from resume_adapters.cli.drill.comparison import NAMES, QUANTITIES, STEPS, Comparison, compare, unseeded
from resume_adapters.cli.drill.drill import Launched, Result
from resume_adapters.cli.drill.faults import Fault
from resume_adapters.cli.drill.statistics import Shift, shifts
from resume_adapters.cli.drill.trace import Run
from resume_adapters.cli.text import escape

IDENTICAL, EQUIVALENT, DIFFERENT, UNDECIDED = "identical", "equivalent", "different", "undecided"
EXIT_CODES = {IDENTICAL: 0, EQUIVALENT: 0, DIFFERENT: 1, UNDECIDED: 4}
"""The exit code for each verdict."""

_STYLES = {IDENTICAL: "bold green", EQUIVALENT: "bold green", DIFFERENT: "bold red", UNDECIDED: "bold yellow"}


@dataclass(frozen=True)
class Verdict:
    """Whether the interrupted run did the same as the reference.

    Attributes:
        word: ``identical``: all that was traced is equal. ``equivalent``: what undisturbed runs repeat is equal, and
            the losses are within their spread. ``undecided``: the run is too short to judge its losses. ``different``
            otherwise.
        comparison: what was compared exactly.
        not_repeated: the quantities in which the references differ from each other.
        unseeded: the random generators that were not compared, because the script does not seed them.
        shifts: the tests of the losses, where those are not repeated.
        difference: what differs, in words; empty if nothing does.
        cause: the likely cause; empty if it is not known.
    """

    word: str
    comparison: Comparison
    not_repeated: tuple[str, ...] = ()
    unseeded: tuple[str, ...] = ()
    shifts: tuple[Shift, ...] = ()
    difference: str = ""
    cause: str = ""


def judge(references: Sequence[Run], interrupted: Run) -> Verdict:
    """Compare an interrupted run with one or more undisturbed runs of the same command."""
    others = (*references[1:], interrupted)
    generators = tuple(dict.fromkeys(name for run in others for name in unseeded(references[0], run)))
    differing = {
        name for one, other in combinations(references, 2) for name in compare(one, other, without=generators).differing
    }
    not_repeated = tuple(name for name in QUANTITIES if name in differing)
    comparison = compare(references[0], interrupted, [each for each in QUANTITIES if each not in differing], generators)
    tested: tuple[Shift, ...] = ()
    if "loss" in differing:
        resumes = [step for launch in interrupted.launches if (step := launch.resumed_from)]
        tested = tuple(shifts([run.losses for run in references], interrupted.losses, resumes))
    outside = [shift for shift in tested if shift.is_within_the_spread is False]
    word, difference, cause = EQUIVALENT if not_repeated else IDENTICAL, "", ""
    if comparison.first is not None:
        difference, cause = str(comparison.first), likely_cause(comparison.first, references[0], interrupted)
    elif STEPS in differing:
        difference = "the reference runs did not do the same steps, so nothing can be compared"
    elif outside:
        difference = f"the losses, {outside[0]}"
        cause = "something that shapes the loss was not resumed; all that can be compared exactly is equal"
    elif tested and all(shift.is_within_the_spread is None for shift in tested):
        word = UNDECIDED
    word = DIFFERENT if difference else word
    return Verdict(word, comparison, not_repeated, generators, tested, difference, cause)


def document(result: Result) -> dict[str, Any]:
    """Describe the result of a drill; losses have all their digits."""
    verdict = judge(result.references, result.interrupted)
    compared, first = verdict.comparison, verdict.comparison.first
    names = ("step", "rank", "launch", "quantity")
    where = {} if first is None else {name: getattr(first, name) for name in names}
    return {
        "verdict": verdict.word,
        "difference": {"text": verdict.difference, "cause": verdict.cause, **where} if verdict.difference else None,
        "command": list(result.drill.command),
        "directory": str(result.drill.directory.absolute()),
        "plot": None,
        "seed": result.drill.seed,
        "compared": {name: getattr(compared, name) for name in ("steps", "done_twice", "ranks", "quantities")},
        "references": len(result.references),
        "not_repeated": verdict.not_repeated,
        "unseeded": verdict.unseeded,
        "statistics": [asdict(shift) for shift in verdict.shifts],
        "launches": list(map(launch, result.launches)),
        "left_out": result.plan.left_out,
        "final_loss": {
            "reference": list(result.references[0].losses.values())[-1:],
            "interrupted": list(result.interrupted.losses.values())[-1:],
        },
        "seconds": round(result.seconds, 1),
    }


def launch(launched: Launched) -> dict[str, Any]:
    """Describe one launch of the interrupted run."""
    trace, fault = launched.trace, launched.fault
    return {
        "launch": trace.number,
        "resumed_from": trace.resumed_from,
        "last_step": trace.last_step,
        "fault": None if fault is None else {**asdict(fault), "happened": launched.struck},
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
    pictured = f"; the curves are in {found['plot']}" if found["plot"] else ""
    yield escape(f"seed {found['seed']}, {found['seconds']:.0f} s{pictured}")
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
