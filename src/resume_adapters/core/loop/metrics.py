"""What a hand-written loop tells of its losses and metrics: their mean, the best of them, what the manifest says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.checkpoint.manifest import finite_metrics
from resume_adapters.errors import UnsupportedSetting

Tree = dict[str, Any]


class LoopMetrics:
    """The losses and metrics that a loop was told of.

    Attributes:
        best_checkpoint: name of the checkpoint that has the best value; ``None`` where none was told of.
    """

    def __init__(self) -> None:
        self.best_checkpoint: str | None = None
        self._losses: tuple[int, Any] = (0, 0.0)
        self._noted: dict[str, Any] = {}
        self._best: dict[str, float] = {}
        self._is_new_best = False

    def note(self, loss: Any, metrics: Mapping[str, float] | None) -> None:
        """Note what is told of a batch; a loss that is a tensor is not waited for."""
        if loss is not None:
            value = loss.detach() if hasattr(loss, "detach") else loss
            self._losses = (self._losses[0] + 1, self._losses[1] + value)
            self._noted["loss"] = value
        if metrics:
            self._noted.update(metrics)

    def begin_epoch(self) -> None:
        """Begin the mean of the losses anew."""
        self._losses = (0, 0.0)

    @property
    def mean_loss(self) -> float:
        """The mean of the losses since the epoch began; 0.0 where none was told."""
        count, total = self._losses
        return float(total) / count if count else 0.0

    def is_best(self, metric: float, mode: str, name: str) -> bool:
        """Return whether a metric is the best so far; if so, the next checkpoint is the one that has it.

        Raises:
            UnsupportedSetting: the mode is neither ``"min"`` nor ``"max"``.
        """
        if mode not in ("min", "max"):
            raise UnsupportedSetting(
                f'mode={mode!r} says neither that smaller nor that greater is better: "min", "max"'
            )
        worst = math.inf if mode == "min" else -math.inf
        former = self._best.get(name, worst)
        self._noted[name] = metric
        if not (metric < former if mode == "min" else metric > former):  # so a NaN is never the best
            return False
        self._best[name], self._is_new_best = metric, True
        return True

    # ---- In a checkpoint

    def assign(self, checkpoint: str) -> None:
        """Let a checkpoint be the best, if a best value was told of since the one before it."""
        if self._is_new_best:
            self.best_checkpoint, self._is_new_best = checkpoint, False

    def facts(self) -> dict[str, float | None]:
        """Return what the manifest says of what was told since the last checkpoint."""
        return finite_metrics({name: float(value) for name, value in self._noted.items()})

    def forget(self) -> None:
        """Begin anew what the next manifest says."""
        self._noted = {}

    def losses(self) -> Tree:
        """Return the running sum of the losses, which each rank has its own of."""
        return {"count": self._losses[0], "sum": self._losses[1]}

    def best(self) -> Tree:
        """Return the best values, and which checkpoint has them: alike on all ranks."""
        return {"best": self._best, "checkpoint": self.best_checkpoint}

    def restore(self, losses: Tree, best: Tree) -> None:
        """Put back what :meth:`losses` and :meth:`best` returned."""
        self._losses = (losses["count"], losses["sum"])
        self._best, self.best_checkpoint = best["best"], best["checkpoint"]
