"""What a checkpoint of Accelerate's ``save_state`` is made of, on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from accelerate.utils import load

from resume_adapters.core.checkpoint.native_files import require_intact
from resume_adapters.core.state import rng
from resume_adapters.errors import CheckpointDamaged, StateMismatch

_RANDOM_STATES = re.compile(r"random_states_(\d+)\.pkl")
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def owner(file: Path) -> int:
    """Return the rank that wrote a file of Accelerate, by its path in the checkpoint."""
    for pattern in (_RANDOM_STATES, _SHARD):
        found = pattern.fullmatch(file.name)
        if found:
            return int(found[1])
    return 0


def weights(checkpoint: Path, index: int) -> Path:
    """Return the file of a model's weights.

    Raises:
        StateMismatch: there is no such file: the checkpoint holds fewer models.
    """
    ending = f"_{index}" if index else ""
    names = [f"model{ending}.safetensors", f"pytorch_model{ending}.bin"]
    return _first(checkpoint, names, f"model {index}")


def pickled(checkpoint: Path, kind: str, index: int) -> Any:
    """Read an optimizer's or a scheduler's state, running no code.

    Args:
        checkpoint: where.
        kind: ``"optimizer"`` or ``"scheduler"``.
        index: which of them, in the order in which they were prepared.

    Raises:
        StateMismatch: there is no such file: the checkpoint holds fewer.
    """
    import torch

    name = f"{kind}_{index}.bin" if index else f"{kind}.bin"
    return torch.load(_first(checkpoint, [name], f"{kind} {index}"), map_location="cpu", weights_only=True)


def restore_random_states(checkpoint: Path, rank: int) -> None:
    """Put back the random state that bare Accelerate saved, before it had fetched the batches that follow."""
    import torch

    states = load(checkpoint / f"random_states_{rank}.pkl")
    rng.restore_cpu((states["random_state"], states["numpy_random_seed"], states["torch_manual_seed"]))
    if "torch_cuda_manual_seed" in states:
        torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])


def _first(checkpoint: Path, names: list[str], what: str) -> Path:
    for name in names:
        if (checkpoint / name).is_file():
            return checkpoint / name
    raise StateMismatch(
        f"{checkpoint.name} has no {what} ({' or '.join(names)}), and this script has prepared one: prepare the same "
        "models, optimizers and schedulers in the same order, or start another run directory",
        path=checkpoint,
    )


class ForeignCheckpoints:
    """Recognises the checkpoints of the bare ``save_state``.

    Args:
        world_size: ranks of this launch.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __call__(self, path: Path) -> int | None:
        """Return the step of a checkpoint that ``save_state`` wrote; ``None`` for anything else.

        Raises:
            CheckpointDamaged: it is not whole, or was saved by a different number of ranks.
        """
        names = {file.name for file in path.iterdir()} if path.is_dir() else set()
        ranks = [name for name in names if _RANDOM_STATES.fullmatch(name)]
        state = [name for name in names if re.fullmatch(r"(optimizer|scheduler)(_\d+)?\.bin|(pytorch_)?model.*", name)]
        if not ranks and not any(name.startswith("optimizer") for name in state):
            return None
        if not state or len(ranks) != self.world_size:
            raise CheckpointDamaged(
                f"it has {len(state)} files of models, optimizers and schedulers and the random state of {len(ranks)} "
                f"ranks; expected some, and {self.world_size}",
                path=path,
            )
        for name in [*state, *ranks]:
            if (path / name).is_file():
                require_intact(path / name)
        return _step(path)


def _step(checkpoint: Path) -> int:
    """Return the optimizer steps that a checkpoint of ``save_state`` is after, as its optimizer counts them."""
    if (checkpoint / "optimizer.bin").is_file():
        counted = [each.get("step", 0) for each in pickled(checkpoint, "optimizer", 0)["state"].values()]
        if counted and max(counted) > 0:
            return int(max(counted))
    named = _NUMBER.search(checkpoint.name)
    return int(named[0]) if named else 0
