"""What a checkpoint of the Hugging Face ``Trainer`` is made of, on disk and in the trainer."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.native_files import read_native, require_intact, weight_shards
from resume_adapters.core.checkpoint.validity import ForeignDetector, ForeignStep
from resume_adapters.core.patching import wrapped
from resume_adapters.core.state import safe_load
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.loading import copied
from resume_adapters.core.state.stateful import Stateful, StatefulGroup, is_stateful
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged, UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine import names

_NAME = re.compile(r"checkpoint-(\d+)")
_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_WHOLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_LOADED_BY_NAME = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt")
"""What the trainer loads where it lies in a checkpoint."""
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def owner(file: Path) -> int:
    """Return the rank that wrote a file of the trainer, by its path in the checkpoint."""
    found = _RNG.fullmatch(file.name) or distributed_metadata.SHARD.fullmatch(file.name)
    return int(found[1]) if found and found[1] else names.owner(file)


def weights(files: CheckpointFiles) -> list[Path]:
    """Return the files of a full model's weights; none for adapters, which only peft can load.

    Raises:
        CheckpointDamaged: the index of sharded weights does not fit the checkpoint.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (whole := files.find(name)) is not None:
            return [whole]
    for name in _INDEX:
        if files.find(name) is not None:
            return weight_shards(files, name)
    return []


def require_named(files: CheckpointFiles, *, with_adapters: bool) -> None:
    """Refuse what the trainer or peft would load because of its name, though it was not saved with the checkpoint.

    Args:
        files: those of the checkpoint.
        with_adapters: peft loads the weights, and finds them by their name.

    Raises:
        CheckpointDamaged: naming the file.
    """
    for name in files.extra():
        if name in _LOADED_BY_NAME or (with_adapters and name in _WHOLE):
            raise CheckpointDamaged(
                f"{files.checkpoint.name} has a file {name} that is not in its manifest, and the Trainer would load "
                "it: move it out of the checkpoint",
                path=files.checkpoint,
            )


class ForeignCheckpoints:
    """Recognises the checkpoints of the bare trainer.

    Args:
        engine: recognises what DeepSpeed wrote into them, where that trains.
    """

    def __init__(self, world_size: int, engine: ForeignDetector | None = None) -> None:
        self._world_size = world_size
        self._engine = engine

    def step(self, path: Path) -> ForeignStep | None:
        """Return the step of a checkpoint, as its ``trainer_state.json`` says; ``None`` for anything else.

        Raises:
            CheckpointDamaged: it lacks files, or was saved by a different number of ranks.
        """
        if _NAME.fullmatch(path.name) is None:
            return None
        try:
            step = json.loads(LocalStorage().read(path / "trainer_state.json"))["global_step"]
            generators = _generators(path)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointDamaged(f"it is not whole: {error}", path=path) from error
        if not isinstance(step, int):
            raise CheckpointDamaged(f"trainer_state.json has the global_step {step!r}", path=path)
        if len(generators) != self._world_size:
            raise CheckpointDamaged(
                f"it has the random state of {len(generators)} ranks, this launch has {self._world_size}", path=path
            )
        of_engine = None if self._engine is None else self._engine.step(path / names.tag(step))
        if self._engine is not None and (of_engine is None or of_engine.step != step):
            raise CheckpointDamaged(f"it has no {names.tag(step)}, which is what DeepSpeed writes", path=path)
        return ForeignStep(step)

    def require_whole(self, path: Path) -> None:
        """Check that the files of a checkpoint are complete.

        Raises:
            CheckpointDamaged: naming one that is not.
        """
        if self._engine is None:
            state = _state_files(CheckpointFiles(LocalStorage(), path, None))
        else:
            state = []
            found = self.step(path)
            assert found is not None, "it was recognised"
            self._engine.require_whole(path / names.tag(found.step))
        for file in [*state, *_generators(path)]:
            require_intact(file)


def _generators(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if _RNG.fullmatch(file.name) and file.is_file()]


def _state_files(files: CheckpointFiles) -> list[Path]:
    if files.with_name(distributed_metadata.NAME):  # FSDP: torch reads the shards, and finds what is missing
        return [files.require("scheduler.pt")]
    if files.find("pytorch_model_fsdp.bin") is not None:
        return [files.require(name) for name in ("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt")]
    found = weights(files) or [file for name in _WHOLE if (file := files.find(name)) is not None]
    if not found:
        raise CheckpointDamaged("it has no weights", path=files.checkpoint)
    return [*found, files.require("optimizer.pt"), files.require("scheduler.pt")]


def components(trainer: Any) -> dict[str, Any]:
    """Return what lives beside the model, by the name of the file in which the trainer saves it."""
    found = {
        "optimizer.pt": trainer.optimizer,
        "scheduler.pt": trainer.lr_scheduler,
        "scaler.pt": trainer.accelerator.scaler,
    }
    return {name: each for name, each in found.items() if each is not None}


def verify(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Compare optimizer, schedule and scaler with what the checkpoint holds, bit for bit.

    Args:
        saved: what :func:`read` returned.

    Raises:
        NotRestored: naming the component and the first difference.
    """
    live = components(trainer)
    for file, state in saved.items():
        if (name := Path(file).name) in live:
            verify_equal(name.removesuffix(".pt"), state, live[name].state_dict())


def load(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Load optimizer, schedule and scaler once more, as the trainer does: copies, which what was read proves."""
    live = components(trainer)
    with safe_load.allowing(safe_load.data_classes()), loading(saved):
        for file in saved:
            if (name := Path(file).name) in live:
                live[name].load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def require_complete(trainer: Any, directory: Path, wanted: Iterable[str]) -> None:
    """Refuse a save that lacks files of what lives.

    Raises:
        UnsupportedSetting: naming the files.
    """
    storage = LocalStorage()
    if lacking := [name for name in wanted if not storage.is_file(directory / name)]:
        raise UnsupportedSetting(
            f"{type(trainer).__name__} has saved no {', no '.join(lacking)}, so no resume could be exact: let its own "
            "_save_checkpoint() and _save_optimizer_and_scheduler() also call the Trainer's, by super()"
        )


def loaded(directory: Path) -> list[Path]:
    """Return what ``torch.load`` reads of a checkpoint."""
    return [
        *(file for name in _LOADED_BY_NAME if (file := directory / name).is_file()),
        *sorted(directory.glob("pytorch_model*.bin")),
    ]


def read(files: CheckpointFiles) -> dict[str, Any]:
    """Read what the trainer will load by itself, where an error would say nothing of the checkpoint.

    Returns:
        What each file holds, by its path. The tensors lie in the file: what nobody looks at is not read.

    Raises:
        CheckpointDamaged: a file cannot be read, or not without running code from it.
    """
    return {str(file): read_native(file) for file in filter(None, map(files.find, _LOADED_BY_NAME))}


def loading(saved: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Return the context in which ``torch.load`` copies what :func:`read` returned, in place of reading it again."""

    def load(native: Callable[..., Any], file: Any, *args: Any, **options: Any) -> Any:
        if str(file) in saved and str(options.get("map_location")) == "cpu":
            with contextlib.suppress(NotImplementedError):  # tensors of a class that cannot be copied are read again
                return copied(saved[str(file)])  # what was read stays as it is in the file, and proves the copy
        return native(file, *args, **options)

    return wrapped(torch, "load", load)


def exported_callbacks(trainer: Any) -> list[Any]:
    """Return the callbacks whose state the trainer saves in ``trainer_state.json``."""
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


def restore_attributes(callback: Any, attributes: Mapping[str, Any]) -> None:
    """Set the attributes that a callback's ``state()`` had."""
    for name, value in attributes.items():
        setattr(callback, name, value)


def restore_callbacks(trainer: Any) -> None:
    """Put ``ExportableState`` callbacks back as they were saved, in place, and make unknown ones known.

    The trainer does so only on request, by making new objects; and its next save fails on a callback that the
    checkpoint does not know.
    """
    known = trainer.state.stateful_callbacks
    exported = exported_callbacks(trainer)
    for name in sorted({type(each).__name__ for each in exported}):
        same = [each for each in exported if type(each).__name__ == name]
        saved = known.get(name)
        # The trainer appends to a list at each save: the newest states are the last.
        states = (saved if isinstance(saved, list) else [saved])[-len(same) :] if saved is not None else []
        for callback, kept in zip(same, states, strict=False):
            restore_attributes(callback, kept.get("attributes", {}))
    known.update(TrainerState(stateful_callbacks=exported).stateful_callbacks)


_CHANGING = (
    *("global_step", "epoch", "total_flos", "num_input_tokens_seen"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)


def changing(state: TrainerState) -> dict[str, Any]:
    """Return what changes of the trainer's state within a step or an evaluation, and is saved; but for the log."""
    return {name: getattr(state, name) for name in _CHANGING if hasattr(state, name)}


def state_text(trainer: Any) -> str:
    """Return what changes of ``trainer_state.json`` as it would be now; what JSON does not know, as text."""
    exported: Any = TrainerState(stateful_callbacks=exported_callbacks(trainer)).stateful_callbacks
    later = {**changing(trainer.state), "log_history": trainer.state.log_history}
    later["stateful_callbacks"] = {**trainer.state.stateful_callbacks, **exported}
    return json.dumps(later, default=str)


def stateful_callbacks(trainer: Any) -> dict[str, Stateful]:
    """Return the part of the callbacks that can save their state by the usual two methods, where there are any."""
    able = [each for each in trainer.callback_handler.callbacks if is_stateful(each)]
    named = {f"{index}.{type(each).__name__}": each for index, each in enumerate(able)}
    return {"callbacks": StatefulGroup(named)} if able else {}


def describe(trainer: Any) -> list[PartEntry]:
    """Return an entry for each part that the trainer saves."""
    notes = {
        "model": "model weights, by save_model",
        "optimizer": "optimizer.pt",
        "scheduler": "scheduler.pt",
        "scaler": "scaler.pt",
        "metrics": "trainer_state.json",
        "callbacks": "trainer_state.json",
    }
    if trainer.accelerator.scaler is None:
        del notes["scaler"]
    return [PartEntry(name, "framework", note) for name, note in notes.items()]
