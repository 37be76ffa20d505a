"""Open and close runs many times in one process, and measure what that leaves behind: what law 12 has its jobs do.

A job is an :class:`Opening`. :func:`train_in_cycles` lets it train in rounds of short runs, which end in each way in
which a run ends, and are resumed.
"""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from training import CONFIG, Broken, trace


class Cycle(NamedTuple):
    """One call that trains.

    Attributes:
        run: which of the run directories of a round.
        steps: optimizer steps of the whole run.
        ends: the state of the run afterwards; or that it was refused, and stays finished.
    """

    run: str
    steps: int
    ends: str


ROUND = (
    Cycle("longer", 2, "finished"),
    Cycle("longer", 3, "finished"),
    Cycle("longer", 3, "refused"),
    Cycle("stopped", 4, "stopped"),
    Cycle("stopped", 4, "finished"),
    Cycle("failed", 3, "failed"),
    Cycle("failed", 3, "finished"),
)
"""The cycles of a round. Each after the first of its run resumes it; one asks for no more than was done."""

WARM_UP = 2
"""Rounds before the first measurement: what is made once is made by then."""


class Opening(Protocol):
    """What a job does in a cycle."""

    event: str
    """The event of the job that ends each of its optimizer steps."""

    def prepare(self, cycle: Cycle, run_directory: str) -> None:
        """Make what trains, but do not train."""

    def train(self) -> None:
        """Train until the run ends."""

    def outline(self) -> dict[str, Any]:
        """Return what the package may patch in the framework's objects while it trains, as a reader of JSON sees it."""


def train_in_cycles(opening: Opening) -> None:
    """Train in at least as many cycles as the configuration says; trace each, and what is there before and after."""
    rounds = -(-CONFIG["cycles"] // len(ROUND))
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            trace(measured="before", **measure())
        for cycle in ROUND:
            before, after = _train(opening, cycle, f"{CONFIG['run_directory']}/{number}-{cycle.run}")
            if number >= WARM_UP:
                trace(cycle=cycle._asdict(), before=before, after=after)
    trace(measured="after", **measure())


def _train(opening: Opening, cycle: Cycle, run_directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train in one cycle; return the outline of before and after."""
    CONFIG["send"] = {"event": opening.event, "step": 1} if cycle.ends == "stopped" else None
    CONFIG["fail"] = {"event": opening.event, "step": 2} if cycle.ends == "failed" else None
    opening.prepare(cycle, run_directory)
    from resume_adapters.errors import (  # here: a job that trains without the package imports this module too
        Stopped,
        UnsupportedSetting,
    )

    before, ended = {**patches(), **opening.outline()}, "finished"
    try:
        opening.train()
    except Stopped:
        ended = "stopped"
    except UnsupportedSetting as error:
        ended = "refused"
        assert str(error).startswith("this process has finished a training of"), error
    except Broken:
        ended = "failed"
    status = json.loads(Path(run_directory, ".resume", "status.json").read_bytes())
    left = "finished" if ended == "refused" else ended
    assert (ended, left) == (cycle.ends, status["state"]), f"{run_directory}: {cycle}, but {ended} and {status}"
    return before, {**patches(), **opening.outline()}


def patches() -> dict[str, int]:
    """Return what a run may hook into torch itself, whatever the framework."""
    from torch.optim import optimizer

    return {
        "global_hooks": len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks),
        "loader_wrappers": depth(torch.utils.data.DataLoader.__iter__),
    }


# ---- Measuring


def measure() -> dict[str, Any]:
    """Return what runs may leave behind in a process, and the objects of the package that are alive."""
    from miniature import effects

    return {
        **effects(),
        "environment": sorted(os.environ),
        "log_handlers": len(logging.getLogger("resume_adapters").handlers),
        "at_exit": atexit._ncallbacks(),
        "torch_load": is_same("torch.load", torch.load),
        "tensorboard": is_same("tensorboard", _tensorboard()),
        "objects": live_objects(),
    }


def live_objects() -> dict[str, int]:
    """Return how many objects of each of the package's classes are alive."""
    kinds = (type(each) for each in gc.get_objects())
    return dict(Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith("resume_adapters.")))


_FIRST = types.SimpleNamespace()
"""What was given first, by name; no dict, since a run looks at the containers in the variables of its script."""


def is_same(name: str, thing: object) -> bool:
    """Return whether this is the object that was given when this name was first asked about."""
    return vars(_FIRST).setdefault(name, thing) is thing


def _tensorboard() -> Any:
    module: Any = sys.modules.get("torch.utils.tensorboard.writer")
    return None if module is None else vars(module.FileWriter)["add_summary"]


def depth(function: Any) -> int:
    """Return how often a function is wrapped."""
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0


def hidden(thing: Any) -> list[str]:
    """Return the methods of a class that an object of it hides behind an attribute of its own."""
    return sorted(name for name in vars(thing) if callable(getattr(type(thing), name, None)))


def hooks(*optimizers: Any, module: torch.nn.Module) -> list[int]:
    """Return how many hooks optimizers, modules and parameters have."""
    parameters = list(module.parameters())
    return [
        *(len(each._optimizer_step_pre_hooks) + len(each._optimizer_step_post_hooks) for each in optimizers),
        sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in module.modules()),
        sum(len(each._post_accumulate_grad_hooks or ()) + len(each._backward_hooks or ()) for each in parameters),
    ]
