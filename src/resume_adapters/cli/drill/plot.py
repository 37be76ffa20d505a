"""Plot the loss curves of a drill's runs."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot is imported: a shell may have no display

from matplotlib import pyplot as plt

from resume_adapters.cli.drill.drill import Result
from resume_adapters.cli.drill.trace import Run

_FAULT, _RESUME = "#c0392b", "#1e8449"


def draw(file: Path, result: Result) -> Path:
    """Write the curves of all runs as a PNG, with the faults and where each launch resumed, and return it."""
    with plt.rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
        for number, reference in enumerate(result.references):
            label = None if number else "undisturbed"
            axes.plot(
                list(reference.losses), list(reference.losses.values()), color="#c9ccd1", linewidth=7, label=label
            )
        for number, launch in enumerate(result.interrupted.launches):
            losses, step, resumed = Run((launch,)).losses, launch.last_step, launch.resumed_from
            axes.plot(list(losses), list(losses.values()), color="#1f5fa8", label=None if number else "with faults")
            if resumed:
                axes.axvline(resumed, color=_RESUME, linestyle=":", zorder=0)
            if launch.struck and launch.fault is not None and step in losses:
                axes.plot(step, losses[step], "X", color=_FAULT, markersize=9, zorder=6)
                axes.annotate(launch.fault.kind, (step, losses[step]), (3, 8), textcoords="offset points", color=_FAULT)
        axes.set(xlabel="optimizer step", ylabel="training loss", title="One command, undisturbed and with faults")
        axes.legend(frameon=False)
        figure.savefig(file, dpi=150)
        plt.close(figure)
    return file
