"""Models and optimizers of which each rank has a copy: saved once where they are alike, else by each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.stateful import Stateful, StatefulGroup

_SAMPLE = 1 << 16
"""Bytes that are compared of a larger tensor: where ranks train apart, every element differs."""

_PART = "replicas"


class Replicas:
    """The models and the optimizers of a training of which each rank has the whole.

    Args:
        modules: the models; a list that may still grow.
        optimizers: the optimizers, likewise.
        gather: returns the values of all ranks; every rank calls it.

    Attributes:
        are_apart: the ranks hold different copies, and each saves its own.
    """

    def __init__(
        self, modules: Sequence[Any], optimizers: Sequence[Any], gather: Callable[[Any], Sequence[Any]]
    ) -> None:
        self.are_apart = False
        self._modules = modules
        self._optimizers = optimizers
        self._gather = gather
        self._is_compared = False

    def train_apart(self) -> None:
        """Save each rank's own copy: the script trains them apart, though they may be alike for a moment."""
        self.are_apart = True

    def compare(self) -> None:
        """Compare the copies of all ranks, before the first save; of large tensors a sample."""
        if self._is_compared or self.are_apart:
            return
        self._is_compared = True
        weights = [dict(module.named_parameters()) for module in self._modules]
        moments = [optimizer.state_dict()["state"] for optimizer in self._optimizers]
        self.are_apart = len(set(self._gather(value_digest([weights, moments], sampled_above=_SAMPLE)))) > 1

    def parts(self) -> dict[str, Stateful]:
        """Return what this rank saves beside the files of the framework, which are those of the first rank."""
        if not self.are_apart:
            return {}
        models = {f"model {index}": each for index, each in enumerate(self._modules)}
        optimizers = {f"optimizer {index}": each for index, each in enumerate(self._optimizers)}
        return {_PART: StatefulGroup({**models, **optimizers})}

    def expect(self, context: RestoreContext) -> None:
        """Find out from a checkpoint whether each rank has a copy of its own.

        Raises:
            StateMismatch: it holds that of a different number of ranks.
        """
        self.are_apart = context.reader.part(_PART) is not None
        if self.are_apart and context.has_other_ranks:
            ranks = (
                f"weights of its own on each of {context.saved_by} ranks, this launch has {context.ranks.world_size}"
            )
            raise context.mismatch([ranks], "there is no copy of the training for each rank")
