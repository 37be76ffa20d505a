"""The losses and metrics of a hand-written loop: their mean, the best of them, what the manifest says."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from resume_adapters.core.state.records import Record, Tried
from resume_adapters.errors import UnsupportedSetting


@dataclass
class LossSum(Record):
    """The sum of the losses since the epoch began, on one rank."""

    count: int
    sum: Annotated[Any, Tried(functools.partial(operator.add, 0.0))]


@dataclass
class BestMetrics(Record):
    """The best values by name, and the name of the checkpoint that has the last best."""

    best: dict[str, float]
    checkpoint: str | None


class _Given(NamedTuple):
    """What the last save was given: its step, the metrics, and whether it is the best."""

    step: int
    metrics: dict[str, Any]
    is_best: bool


class LoopMetrics:
    """The losses and metrics of a loop.

    Attributes:
        best_checkpoint: name of the checkpoint that has the best value; ``None`` before the first.
        has_evaluated: it was given one that may be the best.
        names: the names of the losses and metrics that this launch was given.
    """

    def __init__(self) -> None:
        import torch

        self._tensor = torch.Tensor
        self.best_checkpoint: str | None = None
        self.names: set[str] = set()
        self.has_evaluated = False
        self._count, self._sum = 0, 0.0
        self._current: dict[str, Any] = {}
        self._best: dict[str, float] = {}
        self._is_new_best = False
        self._given: _Given | None = None

    def add(self, loss: Any, metrics: Mapping[str, float] | None) -> None:
        """Add the loss and the metrics of a batch; a loss that is a tensor on an accelerator is not waited for."""
        if loss is not None:
            if type(loss) is self._tensor and loss.is_cpu and loss.numel() == 1:
                value = loss.item()  # a sum of tensors would take 6 us between two steps, and their caches
            else:
                value = loss.detach() if hasattr(loss, "detach") else loss
            self._current["loss"] = value
            self._sum = self._sum + value
            self._count += 1
            self.names.add("loss")
        if metrics:
            self._current.update(metrics)
            self.names.update(metrics)

    def begin_epoch(self) -> None:
        """Begin a new mean of the losses."""
        self._count, self._sum = 0, 0.0

    @property
    def mean_loss(self) -> float:
        """The mean of the losses since the epoch began; 0.0 before the first."""
        return float(self._sum) / self._count if self._count else 0.0

    def is_best(self, metric: float, mode: str, name: str) -> bool:
        """Return whether a metric is the best so far; if so, the next checkpoint is the one that has it.

        Raises:
            UnsupportedSetting: the mode is neither ``"min"`` nor ``"max"``.
        """
        if mode not in ("min", "max"):
            raise UnsupportedSetting(f'mode must be "min" or "max", got {mode!r}')
        worst = math.inf if mode == "min" else -math.inf
        former = self._best.get(name, worst)
        self._current[name] = metric
        self.has_evaluated = True
        self.names.add(name)
        if not (metric < former if mode == "min" else metric > former):  # so a NaN is never the best
            return False
        self._best[name], self._is_new_best = metric, True
        return True

    # ---- In a checkpoint

    def assign(self, checkpoint: str, step: int, last_commit: int | None) -> None:
        """Attach the metrics since the last checkpoint, and mark it as the best if one improved.

        Where the save before it failed, it says what that one was to say, too. It is the best in its place if it comes
        a step later. Weights of much later are not those that were evaluated.

        Args:
            last_commit: step of the newest checkpoint that is committed.
        """
        given, self._given = self._given, None
        if given is not None and (last_commit is None or last_commit < given.step):
            self._current = {**given.metrics, **self._current}
            self._is_new_best = self._is_new_best or (given.is_best and step <= given.step + 1)
        if self._is_new_best:
            self.best_checkpoint = checkpoint

    def of_manifest(self) -> dict[str, Any]:
        """Return the newest value of each metric since the last checkpoint; a tensor is not waited for."""
        return dict(self._current)

    def begin_manifest(self, step: int) -> None:
        """Begin to collect what the next manifest says, after a save of this step."""
        self._given = _Given(step, self._current, self._is_new_best)
        self._current, self._is_new_best = {}, False

    def losses(self) -> LossSum:
        """Return the running sum of the losses; each rank has its own."""
        return LossSum(self._count, self._sum)

    def best(self) -> BestMetrics:
        """Return the best values, and which checkpoint has them: alike on all ranks."""
        return BestMetrics(self._best, self.best_checkpoint)

    def restore(self, losses: LossSum, best: BestMetrics) -> None:
        """Restore what :meth:`losses` and :meth:`best` returned."""
        self._count, self._sum = losses.count, losses.sum
        self._best, self.best_checkpoint = best.best, best.checkpoint
