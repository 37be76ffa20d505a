"""The files of named parts: written by all ranks, and read by one.

Every rank captures its own copy. That of the rank that leads the run directory (rank zero, where all share one) is
written as ``resume/<part>``; another rank writes its own only where it differs, because random state, buffers and
sampler positions are local to a rank while an EMA is the same on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.layout import rank_file
from resume_adapters.core.state import encoding
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.records import Source
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import CheckpointDamaged, StateMismatch


def write_part(storage: Storage, directory: Path, name: str, state: Any) -> None:
    """Write a part's tree below ``directory``: a JSON file, and a safetensors file where it holds tensors."""
    _write_encoded(storage, directory, name, *encoding.encode(state))


class PartsWriter:
    """Parts of the state as data, ready to be written."""

    def __init__(self) -> None:
        self._encoded: dict[str, tuple[bytes, dict[str, Any]]] = {}

    def encode(self, states: dict[str, Any]) -> dict[str, str]:
        """Take in each part's tree, by name, and return the digests.

        Raises:
            NotSerialisable: a part holds something that is not data.
        """
        self._encoded = {name: encoding.encode(value) for name, value in states.items()}
        return {name: encoding.digest(document, tensors) for name, (document, tensors) in self._encoded.items()}

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
        return encoding.decode(storage.read(document), tensors)
    except (KeyError, ValueError) as error:
        raise CheckpointDamaged(f"{document} does not fit {tensors_file.name}: {error}", path=document) from error


def restore_part(name: str, part: Stateful, saved: Any, *, verify: bool) -> None:
    """Load a saved tree into a part and, with ``verify``, prove that it came back.

    Raises:
        NotRestored: the part's state after loading differs from what was saved.
    """
    part.load_state_dict(saved)
    if verify:
        verify_equal(name, saved, part.state_dict())


def _write_encoded(storage: Storage, directory: Path, name: str, document: bytes, tensors: Any) -> None:
    if tensors:
        from safetensors.torch import save

        storage.write(directory / f"{name}.safetensors", save(tensors))
    storage.write(directory / f"{name}.json", document)


class CheckpointReader:
    """The parts of the state that a checkpoint holds.

    Args:
        storage: where to read.
        checkpoint: the checkpoint.
        rank: the rank that reads.
    """

    def __init__(self, storage: Storage, checkpoint: Checkpoint, rank: int) -> None:
        self._storage = storage
        self._checkpoint = checkpoint
        self._rank = rank

    def own(self, rank: int | None = None) -> Any:
        """Return what a rank saved as its own; ``None`` in a foreign checkpoint.

        Args:
            rank: the rank; this one by default.
        """
        name = rank_file("", self._rank if rank is None else rank)
        found = read_part(self._storage, layout.extras_dir(self._checkpoint.path), name)
        return None if found is None else TreeRecord(found, self._source(name))

    def part(self, name: str) -> Any:
        """Return a part as it was saved by this rank, or by the leader where the two were alike.

        Raises:
            CheckpointDamaged: the part's files do not fit together.
        """
        return read_part(self._storage, layout.extras_dir(self._checkpoint.path), name, self._rank)

    def record(self, name: str) -> TreeRecord:
        """Return a part that this package saved for itself.

        Raises:
            FormatMismatch: there is none, since another version wrote the checkpoint; so does what the record lacks.
        """
        found, source = self.part(name), self._source(name)
        if found is None:
            raise source.lacks(source.file)
        return TreeRecord(found, source)

    def restore(self, parts: Mapping[str, Stateful], *, verify: bool) -> None:
        """Load every part and, with ``verify``, prove that it came back.

        Raises:
            StateMismatch: the checkpoint has no such part, though it was made by this package.
            NotRestored: a part's state after loading differs from what was saved.
        """
        for name, part in parts.items():
            saved = self.part(name)
            if saved is not None:
                restore_part(name, part, saved, verify=verify)
            elif self._checkpoint.manifest is not None:
                raise StateMismatch(
                    f"{self._checkpoint.path.name} has no part {name!r}: it was saved without it. Leave the part out, "
                    "or start another run directory",
                    path=self._checkpoint.path,
                )

    def _source(self, name: str) -> Source:
        manifest = self._checkpoint.manifest
        package = manifest.package if manifest else ""
        return Source(self._checkpoint.path, f"{name}.json", self._checkpoint.step, package)


_OURS = {"topology", "fixed", "loaders", "position", "losses", "counters", "framework", "strategy", "engine"}
"""Names under which this package keeps records of its own. Whatever else a record holds is handed out as it was saved:
frameworks and users keep it, and may save it in files of theirs."""


class TreeRecord(dict[str, Any]):
    """A record, and those within it; ``|`` makes another one.

    Args:
        content: the record as data.
        source: where it was read.
        where: its place in the file, for the error.
    """

    def __init__(self, content: Mapping[str, Any], source: Source, where: str = "") -> None:
        super().__init__(content)
        self._source = source
        self._where = where
        for name in _OURS & content.keys():
            self[name] = _within(content[name], source, f"{where}{name}.")

    def __missing__(self, name: str) -> Any:
        raise self._source.lacks(f"{self._where}{name} in {self._source.file}")

    def __or__(self, other: Any) -> Any:
        return TreeRecord({**self, **other}, self._source, self._where)


def _within(value: Any, source: Source, where: str) -> Any:
    if isinstance(value, list):
        return [_within(each, source, f"{where}{index}.") for index, each in enumerate(value)]
    return TreeRecord(value, source, where) if isinstance(value, dict) else value
