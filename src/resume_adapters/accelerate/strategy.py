"""What an accelerator has prepared, and what every strategy does with it: the models, optimizers and schedulers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from resume_adapters.accelerate import files
from resume_adapters.accelerate.schedules import replay, steps_each
from resume_adapters.core.loop.observed import in_places
from resume_adapters.core.observed.steps import watch_steps_of
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.rehearsal import NotRehearsed
from resume_adapters.core.state import keys
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import Stateful


class Strategy:
    """Where models and optimizers are, and how they are saved and loaded.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
        counts_steps: steps are counted by the optimizers' hooks.

    Attributes:
        models: what was prepared, without DDP around it.
        optimizers: what was prepared.
        schedulers: what was prepared, as far as ``save_state`` saves it by itself.
        invariants: settings that a resume must find unchanged, in a user's words.
        rank_state_type: the record that :meth:`rank_state` returns.
    """

    rank_state_type: type[Record] = Record

    def __init__(self, accelerator: Any, *, counts_steps: bool = True) -> None:
        self.accelerator = accelerator
        # seam: accelerate 1.15: what was prepared is kept in these lists, and nowhere else
        self.models: list[Any] = accelerator._models
        self.optimizers: list[Any] = accelerator._optimizers
        self.schedulers: list[Any] = accelerator._schedulers
        self.invariants = {"number of models": len(self.models), "number of optimizers": len(self.optimizers)}
        self._steps = 0
        self._hooks = contextlib.ExitStack()
        if counts_steps:
            self._hooks.callback(watch_steps_of([each.optimizer for each in self.optimizers], self._count))

    def _count(self) -> None:
        self._steps += 1

    def has_stepped(self) -> bool:
        """Return whether the batch ended an optimizer step; one that the scaler skipped counts."""
        steps, self._steps = self._steps, 0
        if not self.accelerator.sync_gradients:
            return False
        return steps > 0 or not self.optimizers or any(each.step_was_skipped for each in self.optimizers)

    def tensors(self) -> dict[str, Any]:
        """Return tensors with the names, dtypes and whole shapes of all models', by the model's number."""
        found = {}
        for index, model in enumerate(self.models):
            tensors = model.state_dict()
            prefix = f"{index}." if index else ""
            found.update({f"{prefix}{name}": tensors[key] for name, key in keys.canonical(tensors).items()})
        return found

    def arguments(self) -> Mapping[str, Any]:
        """Return what was given to the strategy beside what was given to the accelerator."""
        return {}

    def parts(self) -> dict[str, Stateful]:
        """Return what Accelerate does not save and may differ between processes."""
        return {}

    def sharded_state(self) -> Mapping[str, Any]:
        """Return what is sharded over the processes, by the name of the component."""
        return {}

    def rank_state(self) -> Record:
        """Return what Accelerate does not save and belongs to this rank alone."""
        return Record()

    def load_rank_state(self, state: Any) -> None:
        """Restore what :meth:`rank_state` returned."""

    def modules(self) -> list[Any]:
        """Return the DDP modules around the models; FSDP2 has no buckets, and DeepSpeed its own, in a fixed order."""
        return []

    def compare(self) -> None:
        """Find out before the first save whether the processes hold different replicas; each saves its own then."""

    def has_lost_buckets(self) -> bool:
        """Return whether DDP must be around a model, and was not found."""
        return False

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which ``save_state`` writes."""
        return contextlib.nullcontext()

    def load(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedulers, and say how they are proven."""
        raise NotImplementedError

    def rehearse(self, context: RestoreContext) -> None:
        """Load a save into copies, and verify them; where the state is sharded, say that this is not done.

        Raises:
            NotRehearsed: it is.
        """
        raise NotRehearsed("its state is spread over processes")

    def call_load_hooks(self, models: Iterable[Any], path: Path) -> list[Any]:
        """Call the hooks that ``load_state`` calls; return the models that they left to be loaded."""
        left = list(models)
        for hook in self.accelerator._load_model_state_pre_hook.values():  # seam: accelerate 1.15
            hook(left, str(path))
        return left

    def load_schedulers(self, context: RestoreContext) -> None:
        """Load the schedulers; on a different number of processes, step them again."""
        before, here = context.saved_by, self.accelerator.num_processes
        states = [files.pickled(context.files, "scheduler", index) for index in range(len(self.schedulers))]
        for index, (scheduler, saved) in enumerate(
            zip(self.schedulers, in_places(states, self.schedulers), strict=True)
        ):
            context.rescale.schedules.remember(scheduler, steps_each(scheduler, here))
            if before != here and not context.rescale.keeps_samples:
                replay(scheduler, saved, before, here)
            else:
                context.load_state(component_name("scheduler", index), scheduler, saved)

    def close(self) -> None:
        """Undo what was hooked or wrapped."""
        self._hooks.close()


def component_name(kind: str, index: int) -> str:
    """Return what a component is called where several of its kind were prepared."""
    return f"{kind} {index}" if index else kind
