"""Whether losses that cannot be equal are as close as those of undisturbed runs: a t-test, and its power.

On hardware that does not repeat its results, two undisturbed runs differ from each other. Let ``s`` be the spread of
the references around their mean, and ``e`` the interrupted run minus that mean, both averaged over stretches of steps
that are long enough to be independent. If a resume changes nothing, the interrupted run is one more run of the same
kind, and with ``r`` references and ``m`` stretches::

    t = mean(e) / sqrt(s^2 (1 + 1/r) / m)        has Student's distribution with m (r - 1) degrees of freedom

This is asked twice: of the stretches right after each resume, where a wrong data position or a cold optimizer shows as
a bump that passes, and of all stretches after the first resume, where a lasting change shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

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
