"""What a checkpoint of Accelerate's ``save_state`` is made of, on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from accelerate.utils import load

from resume_adapters.core import devices
from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import read_native, require_intact
from resume_adapters.core.checkpoint.validity import ForeignStep
from resume_adapters.core.devices import RandomStates
from resume_adapters.core.state import rng
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import CheckpointDamaged, StateMismatch
from resume_adapters.integrations.deepspeed_engine import names

_RANDOM_STATES = re.compile(r"random_states_(\d+)\.pkl")
_DEVICE_STATES = re.compile(r"torch_(\w+)_manual_seed")
_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def owner(file: Path) -> int:
    """Return the rank that wrote a file of Accelerate, by its path in the checkpoint."""
    found = _RANDOM_STATES.fullmatch(file.name) or distributed_metadata.SHARD.fullmatch(file.name)
    return int(found[1]) if found else names.owner(file)


def weights(files: CheckpointFiles, index: int) -> Path:
    """Return the file of a model's weights.

    Raises:
        StateMismatch: there is no such file: the checkpoint holds fewer models.
    """
    ending = f"_{index}" if index else ""
    names = [f"model{ending}.safetensors", f"pytorch_model{ending}.bin"]
    return _first(files, names, f"model {index}")


def pickled(files: CheckpointFiles, kind: str, index: int) -> Any:
    """Read an optimizer's or a scheduler's state, running no code.

    Args:
        files: those of the checkpoint.
        kind: ``"optimizer"`` or ``"scheduler"``.
        index: which of them, in the order in which they were prepared.

    Raises:
        StateMismatch: there is no such file: the checkpoint holds fewer.
    """
    name = f"{kind}_{index}.bin" if index else f"{kind}.bin"
    return read_native(_first(files, [name], f"{kind} {index}"))


def loaded(directory: Path) -> list[Path]:
    """Return what ``torch.load`` reads of a checkpoint."""
    kinds = ("optimizer", "scheduler", "pytorch_model")
    return [file for kind in kinds for file in sorted(directory.glob(f"{kind}*.bin"))]


def restore_random_states(checkpoint: Path, rank: int) -> None:
    """Restore the random state that bare Accelerate saved, before it had fetched the batches that follow."""
    states = load(checkpoint / f"random_states_{rank}.pkl")
    rng.restore_cpu((states["random_state"], states["numpy_random_seed"], states["torch_manual_seed"]))
    for found in filter(None, map(_DEVICE_STATES.fullmatch, states)):
        devices.restore_random_states(RandomStates(found[1], None, states[found[0]]))


def _first(files: CheckpointFiles, names: list[str], what: str) -> Path:
    for name in names:
        if (file := files.find(name)) is not None:
            return file
    raise StateMismatch(
        f"{files.checkpoint.name} has no {what} ({' or '.join(names)}), and this script has prepared one: prepare the "
        "same models, optimizers and schedulers in the same order, or start another run directory",
        path=files.checkpoint,
    )


class ForeignCheckpoints:
    """Recognises the checkpoints of the bare ``save_state``.

    Args:
        scheduler_steps: how often a prepared scheduler steps in an optimizer step.
    """

    def __init__(self, world_size: int, scheduler_steps: int = 1) -> None:
        self.world_size = world_size
        self._scheduler_steps = scheduler_steps

    def step(self, path: Path) -> ForeignStep | None:
        """Return the step of a checkpoint that ``save_state`` wrote; ``None`` for anything else.

        Raises:
            CheckpointDamaged: it lacks files, or was saved by a different number of ranks.
        """
        state, ranks = self._names(path)
        if not ranks and not any(name.startswith("optimizer") for name in state):
            return None
        if not state or len(ranks) != self.world_size:
            raise CheckpointDamaged(
                f"it has {len(state)} files of models, optimizers and schedulers and the random state of {len(ranks)} "
                f"ranks; expected some, and {self.world_size}",
                path=path,
            )
        return self._step(path)

    def require_whole(self, path: Path) -> None:
        """Check that the files of a checkpoint are complete.

        Raises:
            CheckpointDamaged: naming one that is not.
        """
        state, ranks = self._names(path)
        for name in [*state, *ranks]:
            if (path / name).is_file():
                require_intact(path / name)

    def _names(self, path: Path) -> tuple[list[str], list[str]]:
        """Return the names of the files of models, optimizers and schedulers, and those of random states."""
        # A directory holds the shards of FSDP2; anything else, such as a pipe, is not opened.
        held = path.iterdir() if path.is_dir() else ()
        names = [file.name for file in held if file.is_file() or file.is_dir()]
        state = [name for name in names if re.fullmatch(r"(optimizer|scheduler)(_\d+)?\.bin|(pytorch_)?model.*", name)]
        return state, [name for name in names if _RANDOM_STATES.fullmatch(name)]

    def _step(self, checkpoint: Path) -> ForeignStep:
        """Return the optimizer steps that its optimizer, or else its scheduler counts."""
        files = CheckpointFiles(LocalStorage(), checkpoint, None)
        try:
            if files.find("optimizer.bin") is not None:
                state = pickled(files, "optimizer", 0)["state"]  # a string is the key of what no parameter has
                counted = [each.get("step", 0) for key, each in state.items() if not isinstance(key, str)]
                if counted and max(counted) > 0:
                    return ForeignStep(int(max(counted)))
            if files.find("scheduler.bin") is not None:
                # A prepared scheduler steps once for each process, and counts the step with which it was made.
                steps = pickled(files, "scheduler", 0).get("_step_count", 1) - 1
                if steps > 0:
                    return ForeignStep(int(steps) // self._scheduler_steps)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointDamaged(f"its optimizer or scheduler cannot be read: {error}", path=checkpoint) from error
        named = _NUMBER.search(checkpoint.name)
        return ForeignStep(int(named[0]) if named else 0, is_content=False)
