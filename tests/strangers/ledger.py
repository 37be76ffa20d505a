"""What the scripts with a switch write down of their training: :func:`step` in each step, :func:`end` at the end.

``STRANGERS_ADAPTER`` is the switch. With ``STRANGERS_KILL=KEY`` the process is killed when it comes to that step.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

ADAPTED = bool(os.environ.get("STRANGERS_ADAPTER"))
"""The script is to train with the adapter."""

RANK = int(os.environ.get("RANK", "0"))


def steps_file(rank: int = RANK) -> str:
    """Return the name of the file of a process's steps."""
    return f"steps.{rank}.jsonl"


def end_file(rank: int = RANK) -> str:
    """Return the name of the file of what a process ended with."""
    return f"end.{rank}.json"


_seen: dict[int, int] = {}

random.seed(0)  # many scripts seed torch alone; what they end with is compared all the same
np.random.seed(0)


def step(steps: int, loss: float, optimizers: Iterable[Any], **values: Any) -> None:
    """Write down a batch, or be killed before that.

    Args:
        steps: optimizer steps of the run before this batch.
        loss: of the batch.
        optimizers: whose learning rates belong to it.
        values: what else belongs to it.
    """
    _seen[steps] = _seen.get(steps, -1) + 1
    key = f"{steps}.{_seen[steps]}"
    if key == os.environ.get("STRANGERS_KILL") and RANK == 0:
        time.sleep(1.0)  # a checkpoint is committed by now: what is logged before the first one is logged twice
        os.kill(os.getpid(), signal.SIGKILL)
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    write(key, {"loss": float(loss), "lr": rates, **values})


def write(key: str, values: Mapping[str, Any]) -> None:
    """Write down what belongs to a moment of the training."""
    with open(steps_file(), "a") as file:
        print(json.dumps([key, values]), file=file)


def end(modules: Iterable[Any], optimizers: Iterable[Any], **values: Any) -> None:
    """Write down what the training ended with.

    Args:
        modules: whose weights are written down, as digests.
        optimizers: likewise; or their state.
        values: what else is compared.
    """
    weights = [{name: digest(each) for name, each in module.state_dict().items()} for module in modules]
    states = [tree_digest(each if isinstance(each, dict) else each.state_dict()) for each in optimizers]
    found = {"weights": weights, "optimizers": states, "random": random_state(), **values}
    Path(end_file()).write_text(json.dumps(found, indent=1, sort_keys=True, default=str))


def digest(value: Any) -> str:
    """Return a digest of a tensor, of bytes, or of what is printed of anything else."""
    if hasattr(value, "full_tensor"):  # sharded by FSDP
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(value if isinstance(value, bytes) else repr(value).encode(), digest_size=8).hexdigest()


def tree_digest(value: Any) -> Any:
    """Return a tree of dicts and sequences with digests in the places of tensors, and the types of other objects."""
    if isinstance(value, Mapping):
        return {str(name): tree_digest(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [tree_digest(each) for each in value]
    if isinstance(value, torch.Tensor):
        return digest(value)
    return repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


def random_state() -> list[str]:
    """Return digests of the random state of python, numpy and torch."""
    of_numpy: Any = np.random.get_state()
    return [digest(random.getstate()), digest(of_numpy[1].tobytes()), digest(torch.get_rng_state())]


def scalars(directory: str) -> dict[str, Any]:
    """Return what the event files in a directory hold: by tag each step and value, once where it was logged again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, Any] = {}
    for each in sorted({file.parent for file in Path(directory).rglob("events.out.tfevents.*")}):
        events = EventAccumulator(str(each), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, set()).update((event.step, event.value) for event in events.Scalars(tag))
    return {tag: sorted(each) for tag, each in found.items()}
