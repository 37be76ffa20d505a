"""Lightning Fabric's side of a hand-written loop."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from resume_adapters.core.choices import Stage
from resume_adapters.core.dataloader.progress import batch_size
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.loop.plain import PlainFramework, TrainedObjects
from resume_adapters.core.saving.staging import StagingOptions, own_methods
from resume_adapters.core.session.framework import FrameworkFacts
from resume_adapters.core.session.session import Session
from resume_adapters.fabric.objects import name_of, version
from resume_adapters.integrations import model_parallel
from resume_adapters.integrations.lightning_files import writing_directly
from resume_adapters.integrations.trackers.runs import Trackers

_DO_NOT_READ = ("lightning", "lightning_fabric", "lightning_utilities")
"""Packages whose methods do not read again what they save."""


class FabricFramework(PlainFramework):
    """A Fabric, and what it has set up.

    Args:
        fabric: a ``lightning.fabric.Fabric``, launched.
        objects: the models, optimizers and schedules of the training.
        named: what ``fabric.save`` is given: these, as the script has them.
    """

    file = "fabric.ckpt"
    saver = "fabric.save"

    def __init__(self, fabric: Any, objects: TrainedObjects, named: dict[str, Any]) -> None:
        package, precision = name_of(fabric), fabric.strategy.precision
        about = FrameworkFacts(
            f"fabric {version(package)}",
            channel=package,
            registers="register_for_resume",
            directory_option="register_for_resume(fabric, run_dir, ...)",
            invariants=model_parallel.invariants(fabric.strategy, int(fabric.world_size)),
            layout=model_parallel.layout(fabric.strategy, objects.models.values()),
        )
        self._fabric = fabric
        self._named = named
        super().__init__(objects, about, Trackers(self._writers), {"precision": precision.precision})

    # ---- Data

    def track(self, loader: Any, session: Session) -> LoopLoader:
        """Track the torch loader beneath what ``setup_dataloaders`` put around it."""
        beneath = getattr(loader, "_dataloader", loader)  # seam: lightning 2.4-2.6
        samples = (batch_size(beneath) or 0) * int(self._fabric.world_size) // self.about.layout.sharing
        return LoopLoader(loader, session.loaders.track(beneath), samples)

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

    def save(self, directory: Path) -> None:
        """Write the framework's files by ``fabric.save``."""
        plugins = importlib.import_module(f"{self.about.channel}.plugins.io")
        with writing_directly(plugins.TorchCheckpointIO):
            self._fabric.save(directory / self.file, self._named)

    def staging(self, stage: Stage) -> StagingOptions:
        """Return what there is to know to copy a save."""
        strategy = self._fabric.strategy
        savers = [(self._fabric, "save"), (strategy, "save_checkpoint")]
        if not model_parallel.is_model_parallel(strategy):  # which writes by itself
            savers.append((strategy.checkpoint_io, "save_checkpoint"))
        own = [each for saver, name in savers for each in own_methods(saver, [name], _DO_NOT_READ)]
        return StagingOptions(stage, objection=lambda: f"{own[0]}() may read each checkpoint" if own else "")

    def _writers(self) -> list[Any]:
        """Return the writers of Fabric's TensorBoard loggers, which the first process has."""
        if not self._fabric.is_global_zero:
            return []
        found = [getattr(each, "_experiment", None) for each in self._fabric.loggers]  # seam: lightning 2.4-2.6
        return [each for each in found if each is not None]
