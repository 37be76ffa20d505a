"""Plot the loss curves of the demo's two runs in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot is imported: a shell may have no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from resume_adapters.cli.demo.kills import Launch
from resume_adapters.cli.demo.result import Run

_REFERENCE = "#c9ccd1"
_INTERRUPTED = "#1f5fa8"
_KILL = "#c0392b"
_RESUME = "#1e8449"


def draw(file: Path, reference: Run, interrupted: Run) -> None:
    """Write the curves as a PNG: both runs, the kills, where each launch resumed, and the difference below.

    Args:
        file: the PNG.
        reference: the run that was never killed.
        interrupted: the run that was killed three times.
    """
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (curves, differences) = plt.subplots(
            2, 1, figsize=(10, 6), sharex=True, height_ratios=[5, 1], layout="constrained"
        )
        _draw_curves(curves, reference, interrupted)
        _draw_differences(differences, reference, interrupted)
        figure.suptitle("One training run: never killed, and killed three times", fontweight="bold")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(file, dpi=150)
        plt.close(figure)


def _draw_curves(axes: Axes, reference: Run, interrupted: Run) -> None:
    expected = {point.step: point.loss for point in reference.points}
    axes.plot(list(expected), list(expected.values()), color=_REFERENCE, linewidth=7, label="never killed")
    for number, launch in enumerate(interrupted.launches):
        steps, losses = [point.step for point in launch.points], [point.loss for point in launch.points]
        label = "killed three times" if number == 0 else None
        axes.plot(steps, losses, color=_INTERRUPTED, linewidth=1.6, label=label)
        if launch.killed_at is not None:
            _mark_kill(axes, launch, expected, interrupted.resumed_from[number + 1], is_first=number == 0)
    axes.set_ylabel("training loss")
    axes.set_ylim(top=max(expected.values()) + 0.6)  # room for the kills' labels


def _mark_kill(axes: Axes, launch: Launch, expected: dict[int, float], resumed: int, *, is_first: bool) -> None:
    """Mark where a launch was killed, and how far the next one went back."""
    step = launch.points[-1].step
    axes.axvline(step, color=_KILL, linestyle="--", linewidth=1.1, zorder=0)
    axes.plot(step, expected[step], "X", color=_KILL, markersize=10, zorder=6, label="SIGKILL" if is_first else None)
    if resumed:
        label = "checkpoint resumed from" if is_first else None
        axes.plot(resumed, expected[resumed], "o", color=_RESUME, markersize=8, zorder=5, label=label)
    what = f"SIGKILL at {step}" + (",\ninside a save" if launch.inside_save else "")
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 10}
    axes.annotate(what, (step, 1.0), (5, -4), color=_KILL, va="top", **place)
    arrow: dict[str, Any] = {"arrowstyle": "->", "color": _RESUME, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    across: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": ("data", "axes fraction")}
    axes.annotate("", (resumed, 0.84), (step, 0.84), arrowprops=arrow, **across)
    axes.annotate(f"back to {resumed}", (step, 0.84), (5, 0), color=_RESUME, va="center", **place)


def _draw_differences(axes: Axes, reference: Run, interrupted: Run) -> None:
    expected = {point.step: point.loss for point in reference.points}
    differences = [point.loss - expected[point.step] for point in interrupted.points]
    axes.plot([point.step for point in interrupted.points], differences, ".", color=_INTERRUPTED, markersize=5)
    if not any(differences):
        axes.set_ylim(-1, 1)
        axes.set_yticks([0])
    axes.set_ylabel("difference")
    axes.set_xlabel("optimizer step")
