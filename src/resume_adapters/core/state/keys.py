"""Wrapper prefixes in state dict keys. Pure.

DDP names a parameter ``module.x``, ``torch.compile`` ``_orig_mod.x``, FSDP ``_fsdp_wrapped_module.x``. The same weights
must restore whichever of these wrapped the model when it was saved and whichever wraps it now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

ANYWHERE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Path components that only a wrapper adds, wherever they stand: a compiled submodule has one in the middle."""

LEADING = ("module",)
"""Components that a wrapper adds in front of every key, but that a model may also use for a name of its own."""


@dataclass(frozen=True)
class Match:
    """How saved keys and live keys correspond.

    Attributes:
        saved_by_live: for each live key that has one, its saved key.
        missing: live keys that the checkpoint lacks.
        unexpected: saved keys that the model lacks.
    """

    saved_by_live: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def canonical(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys by their name without wrappers, in order.

    Raises:
        ValueError: two keys have the same name without wrappers.
    """
    stripped = {key: ".".join(part for part in key.split(".") if part not in ANYWHERE) for key in keys}
    for prefix in LEADING:
        while stripped and all(name.startswith(f"{prefix}.") for name in stripped.values()):
            stripped = {key: name[len(prefix) + 1 :] for key, name in stripped.items()}
    named: dict[str, str] = {}
    for key, name in stripped.items():
        if name in named:
            raise ValueError(f"{named[name]!r} and {key!r} are both {name!r} once wrapper prefixes are taken off")
        named[name] = key
    return named


def match(saved: Collection[str], live: Collection[str]) -> Match:
    """Pair the keys of a checkpoint with those of a model, whatever wraps either."""
    saved_names, live_names = canonical(saved), canonical(live)
    return Match(
        saved_by_live={key: saved_names[name] for name, key in live_names.items() if name in saved_names},
        missing=tuple(key for name, key in live_names.items() if name not in saved_names),
        unexpected=tuple(key for name, key in saved_names.items() if name not in live_names),
    )
