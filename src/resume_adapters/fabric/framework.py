"""Lightning Fabric's side of a hand-written loop."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.native_files import read_native
from resume_adapters.core.checkpoint.validity import NoForeign
from resume_adapters.core.choices import Stage
from resume_adapters.core.dataloader.progress import batch_size
from resume_adapters.core.loop import observed
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.guard import Trained
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.loop.replicas import Replicas
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.saving.readers import own_methods
from resume_adapters.core.saving.staging import StagingOptions
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import FrameworkFacts
from resume_adapters.core.session.session import Session
from resume_adapters.core.session.settings import LaunchSettings, read_settings
from resume_adapters.core.state import keys
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.fabric.objects import FabricObjects, name_of, version
from resume_adapters.integrations.lightning_files import writing_directly
from resume_adapters.integrations.trackers.runs import Trackers

FILE = "fabric.ckpt"
"""The file of ``fabric.save`` in a checkpoint."""

_DO_NOT_READ = ("lightning", "lightning_fabric", "lightning_utilities")
"""Packages whose methods do not read again what they save."""


class FabricFramework(LoopFramework):
    """A Fabric, and what it has set up.

    Args:
        fabric: a ``lightning.fabric.Fabric``, launched.
        objects: the models, optimizers and schedules of the training.
    """

    def __init__(self, fabric: Any, objects: FabricObjects) -> None:
        package = name_of(fabric)
        self.about = FrameworkFacts(
            f"fabric {version(package)}",
            channel=package,
            registers="register_for_resume",
            directory_option="register_for_resume(fabric, run_dir, ...)",
            invariants={"number of models": len(objects.models), "number of optimizers": len(objects.optimizers)},
        )
        self.trackers = Trackers(self._writers)
        self.foreign = NoForeign()
        self._fabric = fabric
        self._objects = objects
        self._replicas = Replicas(list(objects.modules().values()), list(objects.inner_optimizers()), _of_all)

    # ---- Steps and data

    def trained(self) -> Trained:
        """Return what was set up."""
        objects = self._objects
        return Trained(list(objects.inner_optimizers()), list(objects.modules().values()))

    def track(self, loader: Any, session: Session) -> LoopLoader:
        """Track the torch loader beneath what ``setup_dataloaders`` put around it."""
        beneath = getattr(loader, "_dataloader", loader)  # seam: lightning 2.4-2.6
        samples = (batch_size(beneath) or 0) * int(self._fabric.world_size)
        return LoopLoader(loader, session.loaders.track(beneath), samples)

    def is_accumulating(self) -> bool:
        """Return ``False``: only the script knows, and steps when it does not."""
        return False

    def has_stepped(self) -> bool:
        """Return whether an optimizer step ended since the last call; one that a scaler skipped counts."""
        return self._objects.has_stepped()

    def skip_micro_batches(self, batches: int) -> None:
        """No-op: a run resumes with the global batch with which it was saved."""

    def passes_begun(self, loader: Any) -> int | None:
        """Return the passes that a loader has begun, by which Fabric seeds a distributed sampler."""
        return getattr(loader, "_num_iter_calls", None)  # seam: lightning 2.4-2.6

    def skip_pass(self, loader: Any, *, is_left: bool = False, is_iterated: bool = False) -> None:
        """Count the pass, as Fabric's loaders do when it begins."""
        begun = self.passes_begun(loader)
        if begun is not None and not is_iterated:
            self.restore_passes(loader, begun + 1)

    def restore_passes(self, loader: Any, begun: int) -> None:
        """Set the number of passes that a loader has begun."""
        loader._num_iter_calls = begun  # seam: lightning 2.4-2.6

    # ---- Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors of all models, by their names without wrappers."""
        found = {}
        modules = self._objects.modules()
        for name, module in modules.items():
            tensors = module.state_dict()
            prefix = f"{name}." if len(modules) > 1 else ""
            found.update({f"{prefix}{key}": tensors[each] for key, each in keys.canonical(tensors).items()})
        return found

    def checkpoint_name(self, step: int) -> str:
        """Return ``step-<N>``."""
        return f"step-{step}"

    def begin_save(self) -> None:
        """Find out whether the processes hold different weights; each saves its own then."""
        if self._fabric.world_size > 1:
            self._replicas.compare()

    def save(self, directory: Path) -> None:
        """Write the framework's files by ``fabric.save``."""
        plugins = importlib.import_module(f"{self.about.channel}.plugins.io")
        with writing_directly(plugins.TorchCheckpointIO):
            self._fabric.save(directory / FILE, self._objects.by_name())

    def staging(self, stage: Stage) -> StagingOptions:
        """Return what there is to know to copy a save."""
        strategy = self._fabric.strategy
        savers = (self._fabric, "save"), (strategy, "save_checkpoint"), (strategy.checkpoint_io, "save_checkpoint")
        own = [each for saver, name in savers for each in own_methods(saver, [name], _DO_NOT_READ)]
        return StagingOptions(stage, objection=lambda: f"{own[0]}() may read each checkpoint" if own else "")

    def loaded_files(self, directory: Path) -> list[Path]:
        """Return the one file that ``fabric.save`` writes, on the first rank."""
        return [file for file in [directory / FILE] if file.is_file()]

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return 0

    def rank_state(self) -> Record:
        """Return nothing: Fabric has no state of its own but that of its loaders."""
        return Record()

    def settings(self) -> LaunchSettings:
        """Return what the optimizers, the schedules and the models were given."""
        objects = self._objects
        given = {"precision": self._fabric.strategy.precision.precision}
        return read_settings(given, objects.inner_optimizers(), objects.schedules.values(), objects.modules().values())

    def parts(self) -> dict[str, Stateful]:
        """Return the loss scale, and what differs between the processes."""
        found = self._replicas.parts()
        precision = self._fabric.strategy.precision
        if getattr(precision, "scaler", None) is not None:
            found["scaler"] = precision
        if any(not getattr(each, "broadcast_buffers", True) for each in self.modules()):
            found["buffers"] = ModuleBuffers(dict(enumerate(self._objects.modules().values())))
        return found

    def modules(self) -> list[Any]:
        """Return the models, and the DDP modules around them."""
        forward = [inner for model in self._objects.models.values() for inner in model.modules()]
        return [*super().modules(), *(each for each in forward if isinstance(each, DistributedDataParallel))]

    def subjects(self) -> Subjects:
        """Return the models, and schedules that were not passed."""
        objects = self._objects
        optimizers = list(objects.inner_optimizers())
        captured = [*objects.schedules.values(), *optimizers]
        # A schedule may have been made with an optimizer before or after fabric.setup() wrapped it.
        return observed.subjects(
            list(objects.modules().values()), [*optimizers, *objects.optimizers.values()], captured
        )

    def describe(self) -> Sequence[PartEntry]:
        """Return an entry for each part that ``fabric.save`` saves."""
        objects = self._objects
        kinds = {"model": objects.models, "optimizer": objects.optimizers, "scheduler": objects.schedules}
        return [
            PartEntry(kind, "framework", f"fabric.save of {', '.join(held)}") for kind, held in kinds.items() if held
        ]

    def _writers(self) -> list[Any]:
        """Return the writers of Fabric's TensorBoard loggers, which the first process has."""
        if not self._fabric.is_global_zero:
            return []
        found = [getattr(each, "_experiment", None) for each in self._fabric.loggers]  # seam: lightning 2.4-2.6
        return [each for each in found if each is not None]

    # ---- Loading

    def load(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedules, and verify them."""
        objects = self._objects
        saved = read_native(context.files.require(FILE))
        for name, module in objects.modules().items():
            context.load_weights(module, saved[name])
        optimizers = zip(objects.optimizers, objects.inner_optimizers(), strict=True)
        for name, loaded in [*optimizers, *objects.schedules.items()]:
            loaded.load_state_dict(saved[name])
            if context.verify:
                verify_equal(name, saved[name], loaded.state_dict())
        for schedule in objects.schedules.values():
            context.rescale.schedules.remember(schedule)
        self._replicas.expect(context)

    def load_rank_state(self, record: Record) -> None:
        """No-op."""

    def load_foreign(self, context: RestoreContext) -> Resumed:
        """Never called: the file of a bare ``fabric.save`` has any name and any content."""
        raise AssertionError("no checkpoint of the bare Fabric is recognised")

    # ---- Ending

    def close(self) -> None:
        """Remove what was hooked into optimizers."""
        self._objects.close()


def _of_all(value: Any) -> list[Any]:
    """Return the values of all processes."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
