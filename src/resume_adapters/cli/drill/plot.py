"""Plot the loss curves of a drill's runs in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot is imported: a shell may have no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from resume_adapters.cli.drill.drill import Launched, Result
from resume_adapters.cli.drill.trace import Run

_REFERENCE = "#c9ccd1"
_INTERRUPTED = "#1f5fa8"
_FAULT = "#c0392b"
_RESUME = "#1e8449"


def draw(file: Path, result: Result) -> None:
    """Write the curves as a PNG: all runs, the faults, where each launch resumed, and the difference below."""
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (curves, differences) = plt.subplots(
            2, 1, figsize=(10, 6), sharex=True, height_ratios=[5, 1], layout="constrained"
        )
        _draw_curves(curves, result)
        _draw_differences(differences, result)
        figure.suptitle(f"One command, undisturbed and with faults: {result.verdict.word}", fontweight="bold")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(file, dpi=150)
        plt.close(figure)


def _draw_curves(axes: Axes, result: Result) -> None:
    for number, reference in enumerate(result.references):
        label = "undisturbed" if number == 0 else None
        axes.plot(*_curve(reference), color=_REFERENCE, linewidth=7, label=label)
    is_first = True
    for launched, following in zip(result.launches, [*result.launches[1:], None], strict=True):
        label = "with faults" if launched is result.launches[0] else None
        axes.plot(*_curve(Run((launched.trace,))), color=_INTERRUPTED, linewidth=1.6, label=label)
        if launched.struck and launched.trace.last_step and following is not None:
            _mark_fault(axes, launched, following.trace.resumed_from, is_first=is_first)
            is_first = False
    axes.set_ylabel("training loss")
    axes.margins(y=0.25)  # room for the faults' labels


def _curve(run: Run) -> tuple[list[int], list[float]]:
    return list(run.losses), list(run.losses.values())


def _mark_fault(axes: Axes, launched: Launched, resumed: int | None, *, is_first: bool) -> None:
    """Mark where a launch met its fault, and how far the next one went back."""
    step, losses = launched.trace.last_step, Run((launched.trace,)).losses
    axes.axvline(step, color=_FAULT, linestyle="--", linewidth=1.1, zorder=0, label="fault" if is_first else None)
    if step in losses:
        axes.plot(step, losses[step], "X", color=_FAULT, markersize=9, zorder=6)
    assert launched.fault is not None
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 9}
    axes.annotate(launched.fault.kind, (step, 1.0), (3, -3), color=_FAULT, va="top", rotation=90, **place)
    if resumed is not None:
        label = "resumed from" if is_first else None
        axes.plot(resumed, 0.02, "^", color=_RESUME, markersize=7, transform=axes.get_xaxis_transform(), label=label)


def _draw_differences(axes: Axes, result: Result) -> None:
    expected = result.references[0].losses
    points = [
        (step, loss - expected[step])
        for launched in result.launches
        for step, loss in Run((launched.trace,)).losses.items()
        if step in expected
    ]
    axes.plot([step for step, _ in points], [difference for _, difference in points], ".", color=_INTERRUPTED)
    if not any(difference for _, difference in points):
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
    axes.set_ylabel("difference")
    axes.set_xlabel("optimizer step")
