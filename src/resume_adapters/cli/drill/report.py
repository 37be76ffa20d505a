"""The verdict on an interrupted run, exact where undisturbed runs are and by statistics where not; and the report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean, variance
from typing import Any

from resume_adapters.cli.drill.comparison import NAMES, QUANTITIES, STEPS, compare, likely_cause, unseeded
from resume_adapters.cli.drill.drill import Result
from resume_adapters.cli.drill.faults import Fault
from resume_adapters.cli.drill.job import LaunchTrace, Run
from resume_adapters.cli.render import escape

LEVEL = 0.01
"""How often each test is wrong about a run in which nothing is."""

POWER = 0.8
"""How often it finds a shift of the size that is reported."""

_SHORTEST = 3
"""The fewest stretches that can be judged."""


_BUMP = 5
"""The fewest steps after a resume over which a bump is averaged."""


@dataclass(frozen=True)
class Shift:
    """How far the interrupted losses are from those of the references.

    Attributes:
        what: the stretches of steps that were averaged.
        mean: the interrupted run minus the mean of the references, as a loss.
        probability: how often an undisturbed run would be this far away; ``None`` if there are too few stretches.
        detectable: the shift that the test finds with a probability of ``POWER``; ``None`` likewise.
        stretches: how many stretches.
        length: of how many steps.
    """

    what: str
    mean: float
    probability: float | None
    detectable: float | None
    stretches: int
    length: int

    @property
    def is_within_the_spread(self) -> bool | None:
        """Whether the shift can be chance; ``None`` if there are too few stretches to say."""
        return None if self.probability is None else self.probability >= LEVEL

    def __str__(self) -> str:
        found = f"{self.what}: the interrupted loss is {self.mean:+.3g} from the mean of the references"
        if self.probability is None:
            return f"{found}; {self.stretches} stretches of {self.length} steps are too few to judge: do more steps"
        return (
            f"{found}, p = {self.probability:.2g} (t-test over {self.stretches} stretches of {self.length} steps, "
            f"level {LEVEL:g}); a shift of {self.detectable:.3g} would be found with a probability of {POWER:.0%}"
        )


def shifts(
    references: Sequence[Mapping[int, float]], interrupted: Mapping[int, float], resumes: Sequence[int]
) -> list[Shift]:
    """Test the losses right after the resumes, and all losses after the first resume.

    Args:
        references: for each of at least two undisturbed runs the loss of each step.
        interrupted: the same of the interrupted run.
        resumes: the steps that its launches resumed from.
    """
    steps = sorted(set(interrupted).intersection(*references))
    after = [step for step in steps if step > min(resumes, default=steps[-1] if steps else 0)]
    length = _independent_length([[losses[step] for step in after] for losses in references])
    bump = max(length, _BUMP)
    bumps = [[step for step in after if resumed < step <= resumed + bump] for resumed in sorted(set(resumes))]
    lasting = [after[begin : begin + length] for begin in range(0, len(after), length)]
    return [
        _test("right after each resume", references, interrupted, bumps, bump),
        _test("from the first resume to the end", references, interrupted, lasting, length),
    ]


def _test(
    what: str,
    references: Sequence[Mapping[int, float]],
    interrupted: Mapping[int, float],
    stretches: Sequence[Sequence[int]],
    length: int,
) -> Shift:
    stretches = [steps for steps in stretches if len(steps) == length]
    runs, count = len(references), len(stretches)
    excess, spread = 0.0, 0.0
    for steps in stretches:
        means = [fmean(losses[step] for step in steps) for losses in references]
        excess += (fmean(interrupted[step] for step in steps) - fmean(means)) / count
        spread += variance(means) / count
    if count < _SHORTEST:
        return Shift(what, excess, None, None, count, length)
    error, freedom = math.sqrt(spread * (1 + 1 / runs) / count), count * (runs - 1)
    if error == 0:  # the references are equal where they are looked at
        return Shift(what, excess, float(excess == 0), 0.0, count, length)
    detectable = (student_quantile(1 - LEVEL / 2, freedom) + student_quantile(POWER, freedom)) * error
    return Shift(what, excess, 2 * (1 - student(abs(excess) / error, freedom)), detectable, count, length)


def _independent_length(losses: Sequence[Sequence[float]]) -> int:
    """Return how many steps apart the deviations of the references are independent, from their autocorrelation.

    Runs that drift apart stay apart for a while, so neighbouring steps say the same thing again.
    """
    count = len(losses[0])
    means = [fmean(at_step) for at_step in zip(*losses, strict=True)]
    deviations = [[one - mean for one, mean in zip(run, means, strict=True)] for run in losses]
    whole = sum(each * each for run in deviations for each in run)
    length = 1.0
    for lag in range(1, count):
        if whole == 0:
            break
        shared = sum(a * b for run in deviations for a, b in zip(run, run[lag:], strict=False))
        if shared / whole < 0.05:
            break
        length += 4 * shared / whole  # twice the time over which they forget: two neighbours touch
    return math.ceil(length)


def student(t: float, freedom: int) -> float:
    """Return the probability that a value of Student's distribution is below ``t``, for ``t`` of at least 0."""
    # With x = sqrt(freedom) tan(angle) the density becomes a power of the cosine, which Simpson's rule sums.
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return 0.5 + scale * _simpson(lambda angle: math.cos(angle) ** (freedom - 1), math.atan(t / math.sqrt(freedom)))


def _simpson(function: Callable[[float], float], end: float, intervals: int = 200) -> float:
    width = end / intervals
    inner = sum((4 if index % 2 else 2) * function(index * width) for index in range(1, intervals))
    return (function(0.0) + inner + function(end)) * width / 3


def student_quantile(probability: float, freedom: int) -> float:
    """Return the value below which a value of Student's distribution lies with a probability of at least 1/2."""
    low, high = 0.0, 1.0
    while student(high, freedom) < probability:
        high *= 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom) < probability else (low, middle)
    return high


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
