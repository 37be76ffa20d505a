"""Wrapper prefixes in state dict keys. Pure.

DDP names a parameter ``module.x``, ``torch.compile`` ``_orig_mod.x``, FSDP ``_fsdp_wrapped_module.x``. Weights
must load whichever of these wraps the model now, and whichever did when it was saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

FSDP = "_fsdp_wrapped_module"
"""What FSDP1 adds to the name of each parameter beneath it; FSDP2 adds nothing."""

ANYWHERE = ("_orig_mod", FSDP, "_checkpoint_wrapped_module")
"""Components that only a wrapper adds, at any depth: a compiled submodule has one in the middle."""

LEADING = ("module",)
"""Components that a wrapper puts in front of every key; a model may also use such a name itself."""


OF_MODEL = " of model "
"""What stands between a name and the number of a further module."""


@dataclass(frozen=True)
class Match:
    """How saved keys and live keys correspond.

    Attributes:
        saved_by_live: the saved key of each live key that has one.
        missing: live keys without a saved one.
        unexpected: saved keys without a live one.
    """

    saved_by_live: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def canonical(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys by name without wrapper prefixes, in order.

    Raises:
        ValueError: two keys have the same name without prefixes.
    """
    stripped = {key: ".".join(part for part in key.split(".") if part not in ANYWHERE) for key in keys}
    for prefix in LEADING:
        while stripped and all(name.startswith(f"{prefix}.") for name in stripped.values()):
            stripped = {key: name[len(prefix) + 1 :] for key, name in stripped.items()}
    named: dict[str, str] = {}
    for key, name in stripped.items():
        if name in named:
            raise ValueError(f"{named[name]!r} and {key!r} are both {name!r} without wrapper prefixes")
        named[name] = key
    return named


def of_modules(held: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Return what several modules hold, by name without wrapper prefixes; of a further module, with its number."""
    return {
        f"{name}{OF_MODEL}{number}" if number else name: each[key]
        for number, each in enumerate(held)
        for name, key in canonical(each).items()
    }


def match(saved: Collection[str], live: Collection[str]) -> Match:
    """Pair the keys of a checkpoint with those of a model, ignoring wrapper prefixes."""
    saved_names, live_names = canonical(saved), canonical(live)
    return Match(
        saved_by_live={key: saved_names[name] for name, key in live_names.items() if name in saved_names},
        missing=tuple(key for name, key in live_names.items() if name not in saved_names),
        unexpected=tuple(key for name, key in saved_names.items() if name not in live_names),
    )


def of_buffers(module: Any, ids: Collection[int]) -> set[str]:
    """Return the keys in a module's state of the buffers with these ids."""
    return {key for key, each in module.named_buffers(remove_duplicate=False) if id(each) in ids}
