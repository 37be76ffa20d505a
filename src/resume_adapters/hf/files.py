"""What a checkpoint of the Hugging Face ``Trainer`` is made of, on disk and in the trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerControl

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.native_files import require_intact
from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.core.dataloader.instrument import are_kept
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.stateful import Stateful, StatefulGroup
from resume_adapters.errors import CheckpointDamaged
from resume_adapters.integrations.deepspeed_engine import names

_NAME = re.compile(r"checkpoint-(\d+)")
_RNG = re.compile(r"rng_state(?:_(\d+))?\.pth")
_WHOLE = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def owner(file: Path) -> int:
    """Return the rank that wrote a file of the trainer, by its path in the checkpoint."""
    found = _RNG.fullmatch(file.name)
    return int(found[1]) if found and found[1] else names.owner(file)


def weights(checkpoint: Path) -> list[Path]:
    """Return the files of a full model's weights; none for adapters, which only peft can load."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (checkpoint / name).is_file():
            return [checkpoint / name]
    for name in _INDEX:
        if (checkpoint / name).is_file():
            shards = json.loads((checkpoint / name).read_bytes())["weight_map"].values()
            return [checkpoint / shard for shard in sorted(set(shards))]
    return []


def foreign_step(path: Path, world_size: int, engine: ForeignDetector | None = None) -> int | None:
    """Return the step of a checkpoint that the bare trainer wrote; ``None`` for anything else.

    Args:
        path: the directory.
        world_size: ranks of this launch.
        engine: recognises what DeepSpeed wrote into it, where that trains.

    Raises:
        CheckpointDamaged: it is not whole, or was saved by a different number of ranks.
    """
    named = _NAME.fullmatch(path.name)
    if named is None:
        return None
    try:
        step = json.loads((path / "trainer_state.json").read_bytes())["global_step"]
        if step != int(named[1]):
            raise CheckpointDamaged(f"trainer_state.json is of step {step}", path=path)
        generators = [file for file in path.iterdir() if _RNG.fullmatch(file.name)]
        if len(generators) != world_size:
            raise CheckpointDamaged(
                f"it has the random state of {len(generators)} ranks, this launch has {world_size}", path=path
            )
        found = _state_files(path) if engine is None else []
        if engine is not None and engine(path / names.tag(step)) != step:
            raise CheckpointDamaged(f"it has no {names.tag(step)}, which is what DeepSpeed writes", path=path)
        for file in [*found, *generators]:
            require_intact(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointDamaged):
            raise
        raise CheckpointDamaged(f"it is not whole: {error}", path=path) from error
    return int(step)


def _state_files(path: Path) -> list[Path]:
    found = weights(path) or [path / name for name in _WHOLE if (path / name).is_file()]
    if not found:
        raise CheckpointDamaged("it has no weights", path=path)
    return [*found, path / "optimizer.pt", path / "scheduler.pt"]


def verify(trainer: Any, checkpoint: Path) -> None:
    """Compare optimizer, schedule, scaler and adapters with what the checkpoint holds, bit for bit.

    Raises:
        NotRestored: naming the component and the first difference.
    """
    import torch

    live = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler, "scaler": trainer.accelerator.scaler}
    names = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"}
    for component, thing in live.items():
        file = checkpoint / names[component]
        if thing is not None and file.is_file():
            saved = torch.load(file, map_location="cpu", weights_only=True)
            verify_equal(component, saved, thing.state_dict())
    adapter = checkpoint / "adapter_model.safetensors"
    if adapter.is_file():
        from peft import get_peft_model_state_dict
        from safetensors.torch import load_file

        verify_equal("model", load_file(adapter), dict(get_peft_model_state_dict(trainer.model)))


def restore_callbacks(trainer: Any) -> None:
    """Put ``ExportableState`` callbacks back as they were saved, in place, and make unknown ones known.

    The trainer does so only on request, by making new objects; and its next save fails on a callback that the
    checkpoint does not know.
    """
    known = trainer.state.stateful_callbacks
    exported = [each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)]
    for name in sorted({type(each).__name__ for each in exported}):
        same = [each for each in exported if type(each).__name__ == name]
        saved = known.get(name)
        # The trainer appends to a list at each save: the newest states are the last.
        states = (saved if isinstance(saved, list) else [saved])[-len(same) :] if saved is not None else []
        for callback, kept in zip(same, states, strict=False):
            for attribute, value in kept.get("attributes", {}).items():
                setattr(callback, attribute, value)
        known[name] = [each.state() for each in same] if len(same) > 1 else same[0].state()


def evaluation_workers(trainer: Any) -> list[str]:
    """Return the names of the evaluation loaders whose persistent workers are running."""
    loaders = getattr(trainer, "_eval_dataloaders", {})  # seam: transformers 4.57 to 5.23
    return [name for name, each in loaders.items() if are_kept(each)]


def stateful_callbacks(trainer: Any) -> dict[str, Stateful]:
    """Return the part of the callbacks that can save their state by the usual two methods, where there are any."""
    able = [each for each in trainer.callback_handler.callbacks if isinstance(each, Stateful)]
    named = {f"{index}.{type(each).__name__}": each for index, each in enumerate(able)}
    return {"callbacks": StatefulGroup(named)} if able else {}


def entries(trainer: Any) -> list[PartEntry]:
    """Return an entry for each part that the trainer saves, and for what nobody captures."""
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
    return [*(PartEntry(name, "framework", note) for name, note in notes.items()), *_missing(trainer)]


def _missing(trainer: Any) -> list[PartEntry]:
    found = []
    for callback in trainer.callback_handler.callbacks:
        ours = type(callback).__module__.startswith(("transformers.", "resume_adapters."))
        able = isinstance(callback, ExportableState | Stateful | TrainerControl)
        if not ours and not able and getattr(callback, "__dict__", None):
            found.append(
                PartEntry(
                    "callbacks",
                    "missing",
                    f"{type(callback).__name__} has no state_dict(): after a resume it starts over",
                )
            )
    return found
