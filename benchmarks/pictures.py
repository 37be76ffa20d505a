"""Draw the pictures of the documentation from real runs: ``python -m benchmarks.pictures [--only NAME ...]``."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # before pyplot is imported: a machine may have no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks import commits, resumes
from benchmarks.commits import Operation

_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "svg.hashsalt": "resume-adapters",  # the same picture is the same file
}
_RED, _GREEN, _GREY, _BLUE = "#c0392b", "#1e8449", "#c9ccd1", "#1f5fa8"
_WRONG = {"weights": "#8e44ad", "replay": "#d35400", "recipe": "#b7950b"}
_FIRST = 60

_PHASES = {
    "begin": ("begin: it says that\nit is pending", "#aab7c4"),
    "framework": ("the framework's own files", "#5d8aa8"),
    "state": ("what is added: random state, position, parts;\nthen it gets its name", "#2e86ab"),
    "proof": ("force each file onto the disk,\nand take its digest", "#e0a458"),
    "manifest": ("the\nmanifest", _RED),
    "publish": ("latest,\njournal", "#7fb685"),
    "retention": ("what is kept no longer\ngoes: first its name", "#9b8bb4"),
}


def main() -> None:
    """Run the jobs, and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"), help="where the pictures go")
    parser.add_argument("--only", nargs="+", choices=list(PICTURES), default=list(PICTURES))
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    for name in given.only:
        with tempfile.TemporaryDirectory() as scratch, plt.rc_context(_STYLE):
            drawn = PICTURES[name](Path(scratch))
            drawn.savefig(given.to / f"{name}.svg", metadata={"Date": None})
            plt.close(drawn)


def draw_resumes(scratch: Path) -> Figure:
    """Draw the loss of one correct and of three wrong resumes."""
    measured = resumes.measure(scratch)
    reference = measured["reference"]
    figure, (curves, differences) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    steps = [step for step in reference if step > _FIRST]
    curves.plot(steps, [reference[step] for step in steps], color=_GREY, linewidth=6, label="never killed")
    lines = {kind: (resumes.WRONG[kind], color, "-") for kind, color in _WRONG.items()}
    lines["exact"] = ("resume-adapters", _BLUE, "--")
    for kind, (label, color, style) in lines.items():
        losses = measured[kind]
        curves.plot(list(losses), list(losses.values()), style, color=color, linewidth=1.3, label=label)
        off = [abs(losses[step] - reference[step]) for step in losses]
        differences.plot(list(losses), off, style, color=color, linewidth=1.3)
    for axes in (curves, differences):
        axes.axvline(resumes.KILLED, color=_RED, linestyle=":", linewidth=1)
        axes.axvline(resumes.SAVED, color=_GREEN, linestyle=":", linewidth=1)
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 9}
    curves.annotate("SIGKILL", (resumes.KILLED, 1.0), (4, -2), color=_RED, va="top", **place)
    curves.annotate("checkpoint", (resumes.SAVED, 1.0), (-4, -2), color=_GREEN, va="top", ha="right", **place)
    curves.set_ylabel("training loss")
    differences.set_yscale("symlog", linthresh=0.0001)
    differences.set_yticks([0, 0.0001, 0.001, 0.01, 0.1], ["0", "0.0001", "0.001", "0.01", "0.1"])
    differences.set_ylim(-0.00005, 1)
    differences.set_ylabel("difference from\nthe run never killed")
    differences.set_xlabel("optimizer step")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_commit(scratch: Path) -> Figure:
    """Draw the operations of a save in order, and what a kill at each one leaves."""
    operations = commits.measure(scratch / "run")
    phases = list(itertools.accumulate(operations, _phase, initial="begin"))[1:]
    committed = 1 + next(number for number, each in enumerate(operations) if each.path.endswith("/manifest.json"))
    figure, axes = plt.subplots(figsize=(11, 3.6), layout="constrained")
    for number, (operation, phase) in enumerate(zip(operations, phases, strict=True)):
        lane = 1.0 if operation.waiting else 0.0
        axes.add_patch(Rectangle((number, lane), 0.9, 0.8, color=_PHASES[phase][1], linewidth=0))
    _name_phases(axes, operations, phases)
    for start, stop, color, text in (
        (0, committed, _GREY, "killed here: the checkpoint before it is resumed from"),
        (committed, len(operations), "#cfe8d5", "killed here: this one is"),
    ):
        axes.add_patch(Rectangle((start, -0.75), stop - start, 0.5, color=color, linewidth=0))
        axes.text((start + stop) / 2, -0.5, text, ha="center", va="center")
    axes.axvline(committed, ymin=0.08, ymax=0.95, color=_RED, linewidth=1.5)
    axes.text(committed, -0.98, "committed", color=_RED, ha="center", va="top", fontweight="bold")
    axes.set_xlim(0, len(operations))
    axes.set_ylim(-1.25, 2.75)
    axes.set_yticks([0.4, 1.4], ["in the background", "the training waits"])
    axes.tick_params(left=False)
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def _phase(former: str, operation: Operation) -> str:
    """Return the phase of an operation, which follows phase ``former``; phases do not repeat."""
    name, path = operation.name, operation.path
    if name == "framework":
        found = name
    elif operation.waiting:
        found = "state" if name == "write" and not path.endswith("pending") else "begin"
    elif "remove-" in path:
        found = "retention"
    elif "manifest" in path:
        found = "manifest"
    elif "latest" in path or path.endswith("pending"):
        found = "publish"
    else:
        found = "proof"
    return max(former, found, key=list(_PHASES).index)


def _name_phases(axes: Axes, operations: list[Operation], phases: list[str]) -> None:
    numbered = itertools.groupby(range(len(phases)), key=phases.__getitem__)
    for phase, group in numbered:
        numbers = list(group)
        milliseconds = 1000 * sum(operations[number].seconds for number in numbers)
        label = _PHASES[phase][0]
        lane = 1.0 if operations[numbers[0]].waiting else 0.0
        middle = (numbers[0] + numbers[-1] + 0.9) / 2
        if phase == "state":  # to the right: there is no room above it
            axes.text(numbers[-1] + 1.1, lane + 0.4, label, va="center", fontsize=8.5)
        else:
            above = lane + (1.35 if phase == "framework" else 0.9)
            axes.text(middle, above, label, ha="center", va="bottom", fontsize=8.5)
        axes.text(middle, lane + 0.05, f"{milliseconds:.0f} ms", ha="center", fontsize=8, color="white")


PICTURES: dict[str, Callable[[Path], Figure]] = {"commit": draw_commit, "resumes": draw_resumes}

if __name__ == "__main__":
    main()
