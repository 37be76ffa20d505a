"""Stateful parts of a run: registered by name, captured, written, restored, and proved to have come back.

Every rank captures its own copy. That of the rank that leads the run directory (rank zero, where all share one) is
written as ``resume/<part>``; another rank writes its own only where it differs, because random state, buffers and
sampler positions are local to a rank while an EMA is the same on all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from resume_adapters.core import comparison, rng, tree
from resume_adapters.core.storage import Storage
from resume_adapters.errors import CheckpointDamaged, NotRestored, UnsupportedSetting

DIRECTORY = "resume"
"""Where a checkpoint keeps what this package adds to it."""

RESERVED = ("architecture", "buffers", "callbacks", "manifest", "metrics", "registered", "scaler", "trackers")
"""Names of this package's own parts, under whatever framework, which a user cannot give to parts of their own."""

_RANK = re.compile(r"(?:^|\.)rank-(\d+)\.")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@runtime_checkable
class Stateful(Protocol):
    """Anything with ``state_dict()`` and ``load_state_dict()``."""

    def state_dict(self) -> Any:
        """Return the state as data."""

    def load_state_dict(self, state: Any) -> Any:
        """Put back what :meth:`state_dict` returned."""


class Value:
    """Makes a tree of data a part that is saved, and read by whoever needs it rather than loaded.

    Args:
        value: the tree.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        """Return the tree."""
        return self.value

    def load_state_dict(self, state: Any) -> None:
        """Replace the tree."""
        self.value = state


class Buffers:
    """The buffers of modules, as a part: each rank has its own, and not every framework saves them all.

    Args:
        modules: the modules, by names that stay.
    """

    def __init__(self, modules: Mapping[Any, Any]) -> None:
        self._named = {
            f"{key}.{name}": buffer for key, module in modules.items() for name, buffer in module.named_buffers()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers by module and name."""
        return dict(self._named)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Copy what :meth:`state_dict` returned into the buffers."""
        for name, buffer in self._named.items():
            buffer.data.copy_(saved[name])


class Several:
    """Several Statefuls as one part: what one of them saved goes to the one of its name, in whatever order they are.

    Args:
        named: the objects, by names that stay.
    """

    def __init__(self, named: Mapping[str, Stateful]) -> None:
        self._named = named

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by name."""
        return {name: each.state_dict() for name, each in self._named.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned, where there was one of that name."""
        for name, each in self._named.items():
            if name in saved:
                each.load_state_dict(saved[name])


def named_parts(parts: dict[str, Any]) -> dict[str, Stateful]:
    """Check the extra parts that a user names, and make plain generators Stateful.

    Raises:
        UnsupportedSetting: a name is taken or unfit for a file name, or an object cannot save its state.
    """
    named: dict[str, Stateful] = {}
    for name, part in parts.items():
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise UnsupportedSetting(
                f"{name!r} cannot name a part: expected lower-case letters, digits and underscores, and none of "
                f"{', '.join(RESERVED)}"
            )
        stateful = rng.GeneratorState(part) if rng.is_generator(part) else part
        if not isinstance(stateful, Stateful):
            raise UnsupportedSetting(
                f"{name}={type(part).__name__}(...) has no state_dict() and load_state_dict(), so it cannot be saved: "
                "add both, or wrap it in an object that has them"
            )
        named[name] = stateful
    return named


def write_part(storage: Storage, directory: Path, name: str, state: Any) -> None:
    """Write a part's tree below ``directory``: a JSON file, and a safetensors file where it holds tensors."""
    _write_encoded(storage, directory, name, *tree.encode(state))


class EncodedParts:
    """Parts of the state as data, ready to be written."""

    def __init__(self) -> None:
        self._encoded: dict[str, tuple[bytes, dict[str, Any]]] = {}

    def encode(self, states: dict[str, Any]) -> dict[str, str]:
        """Take in each part's tree, by name, and return the digests.

        Raises:
            NotSerialisable: a part holds something that is not data.
        """
        self._encoded = {name: tree.encode(value) for name, value in states.items()}
        return {name: tree.digest(document, tensors) for name, (document, tensors) in self._encoded.items()}

    def write(self, storage: Storage, directory: Path, rank: int, digests: list[dict[str, str]], leader: int) -> None:
        """Write the leader's parts, and of another rank those that differ from the leader's.

        Args:
            storage: where to write.
            directory: what is added to the checkpoint.
            rank: this rank.
            digests: what :meth:`encode` returned, on every rank.
            leader: the rank that leads the run directory.
        """
        for name, (document, tensors) in self._encoded.items():
            if rank == leader:
                _write_encoded(storage, directory, name, document, tensors)
            elif digests[rank][name] != digests[leader].get(name):
                _write_encoded(storage, directory, rank_file(name, rank), document, tensors)


def read_part(storage: Storage, directory: Path, name: str, rank: int | None = None) -> Any:
    """Read a part's tree; with ``rank``, that rank's own copy where it has one. ``None`` where there is no such part.

    Raises:
        CheckpointDamaged: the part's files do not fit together.
    """
    if rank is not None and (directory / f"{rank_file(name, rank)}.json").exists():
        name = rank_file(name, rank)
    document = directory / f"{name}.json"
    if not document.exists():
        return None
    tensors_file = directory / f"{name}.safetensors"
    tensors: dict[str, Any] = {}
    if tensors_file.exists():
        from safetensors.torch import load_file

        tensors = load_file(tensors_file)
    try:
        return tree.decode(storage.read(document), tensors)
    except (KeyError, ValueError) as error:
        raise CheckpointDamaged(f"{document} does not fit {tensors_file.name}: {error}", path=document) from error


def rank_file(name: str, rank: int) -> str:
    """Return the file name stem of a rank's own copy of a part; with an empty name, of what is the rank's alone."""
    return f"{name}.rank-{rank:05d}" if name else f"rank-{rank:05d}"


def rank_of(file: Path) -> int:
    """Return the rank whose copy of a part a file is; zero where the name says nothing."""
    found = _RANK.search(file.name)
    return int(found[1]) if found else 0


def restore(name: str, part: Stateful, saved: Any, *, verify: bool) -> None:
    """Load a saved tree into a part and, with ``verify``, prove that it came back.

    Raises:
        NotRestored: the part's state after loading differs from what was saved.
    """
    part.load_state_dict(saved)
    if verify:
        prove(name, saved, part.state_dict())


def prove(name: str, saved: Any, live: Any) -> None:
    """Compare a saved tree with the live one.

    Raises:
        NotRestored: naming the part and the first difference.
    """
    difference = comparison.first_difference(saved, live)
    if difference is not None:
        raise NotRestored(
            f"{name} was loaded but did not come back as it was saved; {difference}. Its load_state_dict() drops or "
            "converts state: mend it, or pass verify=False to continue with the difference"
        )


def _write_encoded(storage: Storage, directory: Path, name: str, document: bytes, tensors: Any) -> None:
    if tensors:
        from safetensors.torch import save

        storage.write(directory / f"{name}.safetensors", save(tensors))
    storage.write(directory / f"{name}.json", document)
