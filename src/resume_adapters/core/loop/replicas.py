"""Models and optimizers of which each rank has a copy: saved once where they are alike, else by each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from resume_adapters.core.observed.instances import instances
from resume_adapters.core.ranks import current_world_size
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.stateful import Stateful, StatefulGroup
from resume_adapters.errors import UnsupportedSetting

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
        """Compare the copies of all ranks, before the first save; of large tensors a sample.

        Raises:
            UnsupportedSetting: they are of different models.
        """
        if self._is_compared or self.are_apart:
            return
        self._is_compared = True
        weights = [dict(module.named_parameters()) for module in self._modules]
        moments = [optimizer.state_dict()["state"] for optimizer in self._optimizers]
        forms = [{name: tuple(each.shape) for name, each in named.items()} for named in weights]
        found = self._gather((repr(forms), value_digest([weights, moments], sampled_above=_SAMPLE)))
        if len({forms for forms, _ in found}) > 1:
            raise UnsupportedSetting(
                "the processes train different models, as the stages of a pipeline do, and one file is saved for all: "
                "train with DDP, or with FSDP2 under Accelerate"
            )
        self.are_apart = len(set(found)) > 1

    def parts(self) -> dict[str, Stateful]:
        """Return what this rank saves beside the files of the framework, which are those of the first rank."""
        if not self.are_apart:
            return {}
        models = {f"model {index}": each for index, each in enumerate(self._modules)}
        optimizers = {f"optimizer {index}": each for index, each in enumerate(self._optimizers)}
        return {_PART: StatefulGroup({**models, **optimizers})}

    def expect(self, context: RestoreContext) -> None:
        """Find out from a checkpoint whether each rank has a copy of its own; models and optimizers are loaded.

        Raises:
            NotRestored: they are not what was saved.
            StateMismatch: it holds that of a different number of ranks.
        """
        self.are_apart = context.reader.part(_PART) is not None
        if self.are_apart:  # the part replaces what was loaded until now
            context.prove()
            context.drop_proofs()
        if self.are_apart and context.has_other_ranks:
            ranks = (
                f"weights of its own on each of {context.saved_by} ranks, this launch has {context.ranks.world_size}"
            )
            raise context.mismatch([ranks], "there is no copy of the training for each rank")


def reducers(models: Sequence[Any]) -> list[Any]:
    """Return the DDP modules around models or within them, wherever the script keeps them, model by model."""
    from torch.nn.parallel import DistributedDataParallel

    if current_world_size() == 1:
        return []
    within = [part for model in models for part in model.modules()]  # gc.freeze() hides none of these
    known = [
        each for each in [*within, *instances(DistributedDataParallel)] if isinstance(each, DistributedDataParallel)
    ]
    held = [{id(parameter) for parameter in model.parameters()} for model in models]
    found = [each for own in held for each in known if any(id(parameter) in own for parameter in each.parameters())]
    return list(dict.fromkeys(found))
