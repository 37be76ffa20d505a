"""The verdict on an interrupted run: exact where undisturbed runs are, and by statistics where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from resume_adapters.cli.drill.causes import likely_cause
from resume_adapters.cli.drill.comparison import NAMES, QUANTITIES, STEPS, Comparison, compare, unseeded
from resume_adapters.cli.drill.statistics import Shift, shifts
from resume_adapters.cli.drill.trace import Run

IDENTICAL = "identical"
EQUIVALENT = "equivalent"
DIFFERENT = "different"
UNDECIDED = "undecided"


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
    exact = tuple(name for name in QUANTITIES if name not in differing)
    comparison = compare(references[0], interrupted, exact, generators)
    tested: tuple[Shift, ...] = ()
    if "loss" in differing:
        resumes = [step for launch in interrupted.launches if (step := launch.resumed_from)]
        tested = tuple(shifts([run.losses for run in references], interrupted.losses, resumes))
    if comparison.first is not None:
        cause = likely_cause(comparison.first, references[0], interrupted)
        return Verdict(DIFFERENT, comparison, not_repeated, generators, tested, str(comparison.first), cause)
    if STEPS in differing:
        why = "the reference runs did not do the same steps, so nothing can be compared"
        return Verdict(DIFFERENT, comparison, not_repeated, generators, tested, why)
    outside = [shift for shift in tested if shift.is_within_the_spread is False]
    if outside:
        cause = "something that shapes the loss was not resumed; all that can be compared exactly is equal"
        return Verdict(DIFFERENT, comparison, not_repeated, generators, tested, f"the losses, {outside[0]}", cause)
    if tested and all(shift.is_within_the_spread is None for shift in tested):
        return Verdict(UNDECIDED, comparison, not_repeated, generators, tested)
    return Verdict(EQUIVALENT if not_repeated else IDENTICAL, comparison, not_repeated, generators, tested)


def in_words(quantities: Sequence[str]) -> str:
    """Return the names of quantities as a list for a reader."""
    return ", ".join(NAMES[name] for name in quantities)
