"""A model's weights against a checkpoint's: the same architecture, every key, every bit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from resume_adapters.core.state import keys
from resume_adapters.core.state.comparison import same_bits
from resume_adapters.errors import NotRestored, StateMismatch

if TYPE_CHECKING:
    import torch


_NAMED = 5
"""How many differing names an error lists."""


def architecture(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the dtype and shape of each tensor of a model's state dict, by its name without wrappers."""
    names = keys.canonical(state)
    return {
        name: f"{str(state[key].dtype).removeprefix('torch.')}{list(state[key].shape)}" for name, key in names.items()
    }


def architecture_digest(described: dict[str, str]) -> str:
    """Return the digest of an architecture, whatever the order of its tensors."""
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


def require_architecture(saved: dict[str, str], live: dict[str, str], checkpoint: Path) -> None:
    """Check that the model is the one whose weights were saved, before any weight is touched.

    Raises:
        StateMismatch: with the first names that differ.
    """
    odd = [name for name in {**saved, **live} if saved.get(name) != live.get(name)]
    if odd:
        lines = "".join(
            f"\n  {name}: saved {saved.get(name, 'nothing')}, the model has {live.get(name, 'nothing')}"
            for name in odd[:_NAMED]
        )
        raise StateMismatch(
            f"{checkpoint.name} was saved from another model; {len(odd)} of its tensors differ:{lines}\n"
            "Build the model as it was, or start another run directory.",
            path=checkpoint,
        )


def load_weights(module: torch.nn.Module, saved: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Load weights into a module, whatever wrapped it when they were saved and whatever wraps it now.

    Raises:
        StateMismatch: keys are missing (other than of tied weights, of which one is saved) or unexpected.
    """
    live = module.state_dict()
    matched = match_weights(saved, live, checkpoint)
    module.load_state_dict({key: saved[name] for key, name in matched.items()}, strict=False)


def match_weights(saved: dict[str, Any], live: dict[str, torch.Tensor], checkpoint: Path) -> dict[str, str]:
    """Pair the saved keys with the live ones.

    Raises:
        StateMismatch: keys are missing (other than of tied weights) or unexpected.
    """
    found = keys.match(saved, live)
    held = {_storage(live[key]) for key in found.saved_by_live}
    missing = [key for key in found.missing if _storage(live[key]) not in held]
    if missing or found.unexpected:
        raise StateMismatch(
            f"the weights of {checkpoint.name} do not fit the model: {_names('missing', missing)}"
            f"{'; ' if missing and found.unexpected else ''}{_names('unexpected', found.unexpected)}. "
            "Build the model as it was when it was saved",
            path=checkpoint,
        )
    return found.saved_by_live


def verify_weights(module: torch.nn.Module, saved: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Compare a module's weights with the saved ones, bit for bit.

    Raises:
        NotRestored: naming the first tensor that differs.
    """
    live = module.state_dict()
    for key, name in match_weights(saved, live, checkpoint).items():
        if not same_bits(saved[name], live[key]):
            raise NotRestored(
                f"model: {key} differs from {name} of {checkpoint.name} after loading (saved {saved[name].dtype} "
                f"{tuple(saved[name].shape)}, live {live[key].dtype} {tuple(live[key].shape)})",
                path=checkpoint,
            )


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _names(what: str, names: Iterable[str]) -> str:
    listed = list(names)
    if not listed:
        return ""
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return f"{what} {', '.join(listed[:_NAMED])}{more}"
