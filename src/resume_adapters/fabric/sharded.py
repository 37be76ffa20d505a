"""A loop under Fabric's ``ModelParallelStrategy``: FSDP2 and tensor parallelism, saved sharded or in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.native_files import read_native
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.loop.plain import TrainedObjects
from resume_adapters.core.patching import replaced
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import ForkState, Framework
from resume_adapters.core.session.rehearsal import NotRehearsed
from resume_adapters.core.state.stateful import uncompiled
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.fabric.framework import FabricFramework
from resume_adapters.integrations.model_parallel import BESIDE_SHARDS, saves_directories


class ShardedFramework(FabricFramework):
    """A Fabric with such a strategy, and the one model that it saves.

    Raises:
        UnsupportedSetting: several models are passed, or one of which no weight is distributed.
    """

    def __init__(self, fabric: Any, objects: TrainedObjects, named: dict[str, Any]) -> None:
        tensors = [each for model in objects.models.values() for each in model.parameters()]
        if len(objects.models) > 1 or not any(hasattr(each, "device_mesh") for each in tensors):
            raise UnsupportedSetting(
                "Fabric's ModelParallelStrategy saves one model, which its parallelize_fn has distributed; "
                f"register_for_resume() was given {', '.join(objects.models)}: pass one, that fabric.setup_module() "
                "has returned, and train what is not distributed with DDP"
            )
        super().__init__(fabric, objects, named)
        self._saves_directories = saves_directories(fabric.strategy)
        forward = {name: named[name]._forward_module for name in objects.models}  # seam: lightning 2.4-2.6
        self._as_saved = {name: uncompiled(each) for name, each in forward.items()}

    # ---- Saving

    def begin_save(self) -> None:
        """Compare nothing: each rank has shards of its own."""

    def save(self, directory: Path) -> None:
        """Write by ``fabric.save``; for an optimizer without state torch takes a step that changes nothing."""
        with replaced(self, "_steps", self._steps):
            super().save(directory)

    def rehearse(self, context: RestoreContext) -> None:
        """Prove nothing.

        Raises:
            NotRehearsed: always.
        """
        raise NotRehearsed("its state is spread over processes")

    def weights_files(self) -> WeightsFiles | None:
        """Return the model's state in the file; none where shards are saved."""
        return None if self._saves_directories else super().weights_files()

    def loaded_files(self, directory: Path) -> list[Path]:
        """Return the file, or what is beside the shards."""
        return [directory / self.file / BESIDE_SHARDS] if self._saves_directories else super().loaded_files(directory)

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file: for a shard, the rank in its name."""
        return distributed_metadata.owner(file) or 0

    def sharded_state(self) -> dict[str, Any]:
        """Return the model's parameters and the optimizers' states, by name."""
        objects = self._objects
        return {
            **{name: dict(each.named_parameters()) for name, each in objects.models.items()},
            **{name: each.state_dict() for name, each in objects.optimizers.items()},
        }

    # ---- Loading

    def load(self, context: RestoreContext) -> None:
        """Load the model and the optimizers, from shards or from one file, and the schedules.

        Raises:
            StateMismatch: they were saved under other names.
        """
        objects, is_whole = self._objects, context.files.find(self.file) is not None
        ((name, model),) = self._as_saved.items()
        with replaced(self, "_steps", self._steps):  # see save()
            saved = read_native(context.files.require(self.file)) if is_whole else self._read_shards(context)
            self._require_names(context, saved)
            set_model_state_dict(model, saved[name], options=StateDictOptions(full_state_dict=is_whole))
            for each, optimizer in objects.optimizers.items():
                has_state = bool(saved[each]["state"])  # torch cannot load the whole state of one that has none
                options = StateDictOptions(full_state_dict=is_whole and has_state)
                set_optimizer_state_dict(model, optimizer, saved[each], options=options)
        context.add_proof(lambda: context.verify_shards(self.sharded_state), is_shared=True)
        self._load_each(context, objects.schedules, saved)

    def fork_state(self, reader: CheckpointReader) -> ForkState:
        """Refuse: each rank has shards.

        Raises:
            UnsupportedSetting: always.
        """
        return Framework.fork_state(self, reader)

    def _read_shards(self, context: RestoreContext) -> dict[str, Any]:
        """Return what a directory holds, of each tensor this rank's shard."""
        ((name, model),) = self._as_saved.items()
        optimizers = self._objects.optimizers
        beside = read_native(context.files.require(f"{self.file}/{BESIDE_SHARDS}"))
        with distributed_metadata.reading(context.files) as indexes:
            paths = (indexes[f"{self.file}/{distributed_metadata.NAME}"].planner_data or {}).values()
            self._require_names(context, {**dict.fromkeys(path[0] for path in paths), **beside})
            states = {each: get_optimizer_state_dict(model, optimizer) for each, optimizer in optimizers.items()}
            sharded = {name: get_model_state_dict(model), **states}
            load(sharded, checkpoint_id=context.path / self.file)
        return {**sharded, **beside}
