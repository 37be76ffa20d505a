"""One measured figure, with its goal, and the table of them all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        name: what was measured.
        value: the figure; the median where it was repeated.
        unit: of the value.
        low: first quartile of the repeats.
        high: third quartile of the repeats.
        goal: the project's limit; ``None`` for a figure that only explains another one.
        at_most: whether the goal is an upper limit (else a lower one).
        detail: what it was measured on.
    """

    name: str
    value: float
    unit: str
    low: float
    high: float
    goal: float | None = None
    at_most: bool = True
    detail: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; ``None`` without a goal."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def of(
    name: str, values: Sequence[float], unit: str, goal: float | None = None, *, at_most: bool = True, detail: str = ""
) -> Figure:
    """Return the figure of repeated measurements: their median, with the quartiles as its spread."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return Figure(name, middle, unit, low, high, goal, at_most, detail)


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def row(figure: Figure) -> tuple[str, str, str, str, str, str]:
    """Return a figure as text: name, value, spread, goal, whether it is met, and what it was measured on."""
    goal = "" if figure.goal is None else f"{'<=' if figure.at_most else '>='} {_number(figure.goal)} {figure.unit}"
    met = {True: "yes", False: "no", None: ""}[figure.met]
    spread = "" if figure.low == figure.high else f"{_number(figure.low)} to {_number(figure.high)}"
    return figure.name, f"{_number(figure.value)} {figure.unit}", spread, goal.strip(), met, figure.detail


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
