"""What an accelerator has prepared: the models, optimizers and schedulers, and what every strategy does with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.accelerate import files
from resume_adapters.accelerate.schedules import replay, steps_each
from resume_adapters.core.loop.observed import in_places
from resume_adapters.core.observed.instances import instances
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state import keys
from resume_adapters.core.state.comparison import verify_equal


class Prepared:
    """The models, optimizers and schedulers of an accelerator.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.

    Attributes:
        models: what was prepared, without DDP around it.
        optimizers, schedulers: what was prepared.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        # seam: accelerate 1.15: what was prepared is kept in these lists, and nowhere else
        self.models: list[Any] = accelerator._models
        self.optimizers: list[Any] = accelerator._optimizers
        self.schedulers: list[Any] = accelerator._schedulers

    @property
    def invariants(self) -> dict[str, int]:
        """Settings that a resume must find unchanged, in a user's words."""
        return {"number of models": len(self.models), "number of optimizers": len(self.optimizers)}

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of all models, by the model's number and their names without wrappers."""
        found = {}
        for index, model in enumerate(self.models):
            tensors = model.state_dict()
            prefix = f"{index}." if index else ""
            found.update({f"{prefix}{name}": tensors[key] for name, key in keys.canonical(tensors).items()})
        return found

    def call_load_hooks(self, models: Iterable[Any], path: Path) -> list[Any]:
        """Call the hooks that ``load_state`` calls; return the models that they left to be loaded."""
        left = list(models)
        for hook in self.accelerator._load_model_state_pre_hook.values():  # seam: accelerate 1.15
            hook(left, str(path))
        return left

    def load_optimizers(self, context: RestoreContext) -> None:
        """Load the optimizers, and verify them."""
        for index, optimizer in enumerate(self.optimizers):
            saved = files.pickled(context.files, "optimizer", index)
            _load(context, component_name("optimizer", index), optimizer, saved)

    def load_schedulers(self, context: RestoreContext, schedulers: Sequence[Any]) -> None:
        """Load schedulers, and verify them; on a different number of processes, step them again."""
        before, here = context.saved_by, self.accelerator.num_processes
        states = [files.pickled(context.files, "scheduler", index) for index in range(len(schedulers))]
        for index, (scheduler, saved) in enumerate(zip(schedulers, in_places(states, schedulers), strict=True)):
            context.rescale.schedules.remember(scheduler, steps_each(scheduler, here))
            if before != here and not context.rescale.keeps_samples:
                replay(scheduler, saved, before, here)
            else:
                _load(context, component_name("scheduler", index), scheduler, saved)


class StepCounter:
    """Counts the steps that prepared optimizers take.

    Args:
        prepared: what an accelerator has prepared.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._accelerator, self._optimizers = prepared.accelerator, prepared.optimizers
        self._steps = 0
        self._hooks = [each.optimizer.register_step_post_hook(self._count) for each in prepared.optimizers]

    def _count(self, *_: Any) -> None:
        self._steps += 1

    def has_stepped(self) -> bool:
        """Return whether the batch ended an optimizer step; one that the scaler skipped counts."""
        steps, self._steps = self._steps, 0
        if not self._accelerator.sync_gradients:
            return False
        return steps > 0 or not self._optimizers or any(each.step_was_skipped for each in self._optimizers)

    def reset(self) -> None:
        """Forget the steps that were taken only to load."""
        self._steps = 0

    def close(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()


def ddp_around(models: Iterable[Any]) -> list[Any]:
    """Return the DDP modules around models; ``prepare`` hands them to the script and keeps no reference."""
    from torch.nn.parallel import DistributedDataParallel

    found = instances(DistributedDataParallel)
    around = []
    for model in models:
        inner = {id(parameter) for parameter in model.parameters()}
        around += [each for each in found if any(id(parameter) in inner for parameter in each.module.parameters())]
    return around


def component_name(kind: str, index: int) -> str:
    """Return what a component is called where several of its kind were prepared."""
    return f"{kind} {index}" if index else kind


def _load(context: RestoreContext, name: str, thing: Any, saved: Any) -> None:
    thing.load_state_dict(saved)
    if context.verify:
        verify_equal(name, saved, thing.state_dict())
