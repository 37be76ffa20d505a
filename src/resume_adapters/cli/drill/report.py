"""The result of a drill, as text and as a JSON document."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from resume_adapters.cli.drill.drill import Launched, Result
from resume_adapters.cli.drill.verdict import DIFFERENT, EQUIVALENT, IDENTICAL, UNDECIDED, in_words

EXIT_CODES = {IDENTICAL: 0, EQUIVALENT: 0, DIFFERENT: 1, UNDECIDED: 4}
"""The exit code for each verdict."""


def document(result: Result, plot: Path | None = None) -> dict[str, Any]:
    """Describe the result of a drill; losses have all their digits.

    Args:
        result: of the drill.
        plot: the picture that was drawn of it.
    """
    verdict, first = result.verdict, result.verdict.comparison.first
    return {
        "verdict": verdict.word,
        "difference": None
        if not verdict.difference
        else {
            "text": verdict.difference,
            "cause": verdict.cause,
            **({} if first is None else {"step": first.step, "rank": first.rank, "launch": first.launch}),
            **({} if first is None else {"quantity": first.quantity}),
        },
        "command": list(result.drill.command),
        "directory": str(result.drill.directory.absolute()),
        "plot": None if plot is None else str(plot),
        "seed": result.drill.seed,
        "compared": {
            "steps": verdict.comparison.steps,
            "done_twice": verdict.comparison.done_twice,
            "ranks": verdict.comparison.ranks,
            "quantities": list(verdict.comparison.quantities),
        },
        "not_repeated": list(verdict.not_repeated),
        "unseeded": list(verdict.unseeded),
        "statistics": [
            {
                "what": shift.what,
                "mean": shift.mean,
                "probability": shift.probability,
                "detectable": shift.detectable,
                "stretches": shift.stretches,
                "length": shift.length,
            }
            for shift in verdict.shifts
        ],
        "launches": [_launch(launched) for launched in result.launches],
        "left_out": result.plan.left_out,
        "final_loss": {
            "reference": list(result.references[0].losses.values())[-1:],
            "interrupted": list(result.interrupted.losses.values())[-1:],
        },
        "seconds": round(result.seconds, 1),
    }


def _launch(launched: Launched) -> dict[str, Any]:
    fault = launched.fault
    return {
        "launch": launched.trace.number,
        "resumed_from": launched.trace.resumed_from,
        "last_step": launched.trace.last_step,
        "fault": None
        if fault is None
        else {
            "kind": fault.kind,
            "step": fault.step,
            "operation": fault.operation,
            "rank": fault.rank,
            "happened": launched.struck,
        },
    }


def lines(result: Result, plot: Path | None = None) -> list[str]:
    """Describe the result of a drill for a reader. The verdict is the first word of its line.

    Args:
        result: of the drill.
        plot: the picture that was drawn of it.
    """
    verdict = result.verdict
    rows = [("launch", "resumed from", "fault"), *map(_row, result.launches)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    text = [f"{one:<{widths[0]}}  {two:<{widths[1]}}  {three}".rstrip() for one, two, three in rows]
    text += [f"left out: {kind} ({reason})" for kind, reason in result.plan.left_out.items()]
    text += ["", *_verdict(result)]
    if verdict.unseeded:
        text.append(f"not compared: the generators {', '.join(verdict.unseeded)}, which the command does not seed")
    if verdict.not_repeated:
        text.append(
            f"The {len(result.references)} references differ from each other in {in_words(verdict.not_repeated)}; "
            f"judged exactly: {in_words(verdict.comparison.quantities) or 'nothing'}; by statistics: "
            f"{'losses' if verdict.shifts else 'nothing'}."
        )
    text += [f"  {shift}" for shift in verdict.shifts]
    pictured = "" if plot is None else f"; the curves are in {plot}"
    text.append(f"seed {result.drill.seed}, {result.seconds:.0f} s{pictured}")
    text.append(f"{shlex.join(result.drill.command)}")
    return text


def _row(launched: Launched) -> tuple[str, str, str]:
    resumed, fault = launched.trace.resumed_from, launched.fault
    start = "ended before" if resumed is None else f"step {resumed}" if resumed else "fresh start"
    if fault is None:
        what = ""
    elif launched.struck:
        # A launch that resumed behind that step was killed after its first one.
        is_killed = fault.kind in ("step", "twice")
        what = str(replace(fault, step=launched.trace.last_step) if is_killed else fault)
    else:
        what = f"(the run was over before: {fault})"
    return str(launched.trace.number), start, what


def _verdict(result: Result) -> list[str]:
    verdict = result.verdict
    if verdict.word == DIFFERENT:
        return [f"{DIFFERENT}: {verdict.difference}", *([f"likely cause: {verdict.cause}"] if verdict.cause else [])]
    found = verdict.comparison
    ranks = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks"
    compared = f"{found.steps} steps ({found.done_twice} of them done more than once) on {ranks}"
    return [f"{verdict.word}: {compared}: {in_words(found.quantities)}, bit for bit"]
