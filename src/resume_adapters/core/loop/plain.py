"""What torch alone trains by hand, each rank with the whole of it: followed, saved in one file, and loaded as data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.native_files import read_native
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.checkpoint.validity import NoForeign
from resume_adapters.core.dataloader.progress import batch_size
from resume_adapters.core.loop import observed
from resume_adapters.core.loop.framework import LoopFramework
from resume_adapters.core.loop.guard import Trained
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.loop.replicas import Replicas, reducers
from resume_adapters.core.loop.tensors import as_part
from resume_adapters.core.observed.steps import watch_steps_of
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.patching import wrapped
from resume_adapters.core.ranks import current_world_size
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import ForkState, FrameworkFacts, Trackers
from resume_adapters.core.session.rehearsal import copies, overwrite
from resume_adapters.core.session.session import Session
from resume_adapters.core.session.settings import LaunchSettings, read_settings
from resume_adapters.core.state import keys
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful, is_optimizer
from resume_adapters.core.state.weights import updated


@dataclass(frozen=True)
class TrainedObjects:
    """What a loop trains, by the names that the script gives.

    Attributes:
        models: the models, without what wraps them.
        optimizers: the optimizers of torch.
        schedules: the schedules of torch.
        scaler: what saves the loss scale; ``None`` where there is none.
        scalers: the loss scalers, that of ``scaler`` among them.
        wrappers: what a framework has put around the models and optimizers.
    """

    models: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    schedules: Mapping[str, Any]
    scaler: Any = None
    scalers: Sequence[Any] = ()
    wrappers: Sequence[Any] = ()

    def by_name(self) -> dict[str, Any]:
        """Return the models, the optimizers and the schedules."""
        return {**self.models, **self.optimizers, **self.schedules}


class PlainFramework(LoopFramework):
    """A loop of torch alone, on one process or several, each of which has the whole of what is trained.

    Args:
        objects: what it trains.
        about: what is known of it; what a resume must find unchanged is added.
        trackers: the experiment trackers.
        arguments: what was given beside the objects and shapes the steps, by the name under which a user sets it.

    Attributes:
        file: the file in a checkpoint.
        saver: what writes it, in a user's words.
    """

    file = "training.pt"
    saver = "torch.save"

    def __init__(
        self, objects: TrainedObjects, about: FrameworkFacts, trackers: Trackers, arguments: Mapping[str, Any]
    ) -> None:
        counts = {"number of models": len(objects.models), "number of optimizers": len(objects.optimizers)}
        self.about = replace(about, invariants={**counts, **about.invariants})
        self.trackers = trackers
        self.foreign = NoForeign()
        self._objects = objects
        self._arguments = arguments
        self._models, self._optimizers = list(objects.models.values()), list(objects.optimizers.values())
        self._replicas = Replicas(self._models, self._optimizers, _of_all)
        self._steps = 0
        self._hooks = contextlib.ExitStack()
        self._hooks.callback(watch_steps_of(self._optimizers, self._count))
        for scaler in objects.scalers:  # after an overflow it calls no optimizer
            self._hooks.enter_context(wrapped(scaler, "step", self._step_scaled))

    # ---- Steps and data

    def _count(self) -> None:
        self._steps += 1

    def _step_scaled(self, native: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self._steps += 1
        return native(*arguments, **keywords)

    def has_stepped(self) -> bool:
        """Return whether an optimizer step ended since the last call; one that a scaler skipped counts."""
        steps, self._steps = self._steps, 0
        return steps > 0

    def trained(self) -> Trained:
        """Return the optimizers and the models."""
        return Trained(self._optimizers, self._models)

    def track(self, loader: Any, session: Session) -> LoopLoader:
        """Track a loader of torch."""
        return LoopLoader(loader, session.loaders.track(loader), (batch_size(loader) or 0) * current_world_size())

    # ---- Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of all models, by their names without wrappers."""
        found = {}
        for name, module in self._objects.models.items():
            tensors = module.state_dict()
            prefix = f"{name}." if len(self._models) > 1 else ""
            found.update({f"{prefix}{key}": tensors[each] for key, each in keys.canonical(tensors).items()})
        return found

    def checkpoint_name(self, step: int) -> str:
        """Return ``step-<N>``."""
        return f"step-{step}"

    def begin_save(self) -> None:
        """Find out whether the processes hold different weights; each saves its own then."""
        if current_world_size() > 1:
            self._replicas.compare()

    def save(self, directory: Path) -> None:
        """Write the states of what is trained, by name, on the first rank."""
        if current_world_size() == 1 or dist.get_rank() == 0:
            torch.save(
                {name: each.state_dict() for name, each in self._objects.by_name().items()}, directory / self.file
            )

    def weights_files(self) -> WeightsFiles | None:
        """Return the models' states in the file."""
        return WeightsFiles(is_kept=self._objects.models.__contains__)

    def loaded_files(self, directory: Path) -> list[Path]:
        """Return the one file, which the first rank writes."""
        return [directory / self.file]

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return 0

    def settings(self) -> LaunchSettings:
        """Return what the optimizers, the schedules and the models were given."""
        return read_settings(self._arguments, self._optimizers, self._objects.schedules.values(), self._models)

    def parts(self) -> dict[str, Stateful]:
        """Return the loss scale, what differs between the processes, and tensors outside of models."""
        found = self._replicas.parts() | as_part(self._optimizers)
        if self._objects.scaler is not None:
            found["scaler"] = self._objects.scaler
        if self._has_own_buffers:
            found["buffers"] = ModuleBuffers(dict(enumerate(self._models)))
        return found

    @functools.cached_property
    def _reducers(self) -> list[Any]:
        return reducers([*self._models, *(each for each in self._objects.wrappers if hasattr(each, "modules"))])

    @property
    def _has_own_buffers(self) -> bool:
        """Whether a model has buffers that DDP does not make those of the first rank."""
        is_shared = len(self._reducers) >= len(self._models) and all(each.broadcast_buffers for each in self._reducers)
        return current_world_size() > 1 and not is_shared

    def modules(self) -> list[Any]:
        """Return the models, and the DDP modules around them."""
        return [*self._models, *self._reducers]

    def subjects(self) -> Subjects:
        """Return the models, and schedules that were not passed."""
        captured = [*self._objects.schedules.values(), *self._optimizers]
        # A schedule may have been made with an optimizer before or after a framework wrapped it.
        steppers = [*self._optimizers, *(each for each in self._objects.wrappers if is_optimizer(each))]
        return observed.subjects(self._models, steppers, captured)

    def describe(self) -> Sequence[PartEntry]:
        """Return an entry for each part in the file."""
        objects = self._objects
        kinds = {"model": objects.models, "optimizer": objects.optimizers, "scheduler": objects.schedules}
        return [
            PartEntry(kind, "framework", f"{self.saver} of {', '.join(held)}") for kind, held in kinds.items() if held
        ]

    def rehearse(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedules into copies, and verify them.

        Raises:
            NotRehearsed: no copies can be made.
            NotRestored: one of them does not come back.
        """
        if current_world_size() > 1 and dist.get_rank() > 0:
            return
        live, saved = self._objects.by_name(), read_native(context.files.require(self.file))
        for name, each in copies(live, self._objects.wrappers).items():
            if name in self._objects.models:
                overwrite(updated(each).values())
                context.load_weights(each, saved[name])
            else:
                context.load_state(name, each, saved[name])
        context.prove()

    # ---- Loading

    def load(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedules.

        Raises:
            StateMismatch: they were saved under other names.
        """
        objects = self._objects
        saved = read_native(context.files.require(self.file))
        self._require_names(context, saved)
        for name, model in objects.models.items():
            context.load_weights(model, saved[name])
        self._load_each(context, objects.optimizers, saved)
        self._replicas.expect(context)
        self._load_each(context, objects.schedules, saved)

    def _require_names(self, context: RestoreContext, saved: Collection[str]) -> None:
        names = self._objects.by_name()
        if {*saved} != {*names}:
            raise context.mismatch(
                [f"{', '.join(saved)}; this launch gives {', '.join(names)}"], "each is known by its name"
            )

    def _load_each(self, context: RestoreContext, things: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        for name, loaded in things.items():
            context.load_state(name, loaded, saved[name])
        for schedule in self._objects.schedules.values():
            context.rescale.schedules.remember(schedule)

    def fork_state(self, reader: CheckpointReader) -> ForkState:
        """Return models and optimizers, each with what was saved under its name."""
        objects, saved = self._objects, read_native(reader.files.require(self.file))
        return ForkState(
            [(each, saved.get(name, {})) for name, each in objects.models.items()],
            lambda: [(each, saved.get(name, {})) for name, each in objects.optimizers.items()],
        )

    # ---- Ending

    def close(self) -> None:
        """Count no longer."""
        self._hooks.close()


def _of_all(value: Any) -> list[Any]:
    """Return the values of all processes."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
