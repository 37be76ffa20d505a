"""The files of named parts: written by all ranks, and read by one.

Every rank captures its own copy. That of the rank that leads the run directory (rank zero, where all share one) is
written as ``resume/<part>``; another rank writes its own only where it differs, because random state, buffers and
sampler positions are local to a rank while an EMA is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.layout import EXTRAS, rank_file
from resume_adapters.core.checkpoint.manifest import FileEntry
from resume_adapters.core.checkpoint.native_files import require_plain
from resume_adapters.core.log import logger
from resume_adapters.core.state import encoding
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.records import Record, Source
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.core.state.safetensors_file import safetensors_bytes
from resume_adapters.core.state.stateful import Stateful, StatefulGroup, restore_state
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import CheckpointDamaged, StateMismatch

R = TypeVar("R", bound=Record)


SCALER = "scaler"
"""The part with the loss scale: a launch in another precision begins with a new one."""

Write = Callable[[Path, bytes], None]
"""Writes a file."""


def write_part(write: Write, directory: Path, name: str, document: bytes, tensors: Mapping[str, Any]) -> None:
    """Write a part, as it was encoded, below ``directory``: a JSON file, and a safetensors file of its tensors."""
    if tensors:
        write(directory / f"{name}.safetensors", safetensors_bytes(tensors))
    write(directory / f"{name}.json", document)


def read_part(files: CheckpointFiles, name: str, rank: int | None = None, *, copies: bool = True) -> Any:
    """Read a part's tree; with ``rank``, that rank's own copy where it has one. ``None`` where there is no such part.

    Args:
        files: those of the checkpoint.
        name: of the part.
        rank: see above.
        copies: return tensors that lie where torch would put them. In the file they may lie at any byte, and the last
            bit of a matrix product depends on that. Otherwise what nobody looks at is not read.

    Raises:
        CheckpointDamaged: the part's files do not fit together.
    """
    if rank is not None and files.find(f"{EXTRAS}/{rank_file(name, rank)}.json") is not None:
        name = rank_file(name, rank)
    document = f"{EXTRAS}/{name}.json"
    if files.find(document) is None:
        return None
    tensors_file = files.find(f"{EXTRAS}/{name}.safetensors")
    content = files.read(document)
    try:
        mapped = {} if tensors_file is None else _tensors(tensors_file)
        return encoding.decode(content, {key: each.clone() for key, each in mapped.items()} if copies else mapped)
    except ValueError as error:
        raise CheckpointDamaged(
            f"{document} does not fit {name}.safetensors: {error}", path=files.checkpoint
        ) from error


def _tensors(file: Path) -> dict[str, Any]:
    """Map a safetensors file into memory.

    Raises:
        ValueError: it is not one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from error


def require_readable(files: CheckpointFiles, entries: Iterable[FileEntry]) -> None:
    """Read the parts among some files of a checkpoint: their digests say only that they are as they were written.

    Raises:
        CheckpointDamaged: a part is not what this package writes, or a file becomes larger where it is read.
    """
    for entry in entries:
        path = PurePosixPath(entry.path)
        require_plain(files.require(entry.path))
        if path.parent.name == EXTRAS and path.suffix == ".json":
            read_part(files, path.stem, copies=False)


class CheckpointReader:
    """Reads what a checkpoint holds beside the framework's own files, for one rank.

    Args:
        storage: where to read.
        checkpoint: the checkpoint.
        rank: the rank that reads.

    Attributes:
        files: the files that may be read.
    """

    def __init__(self, storage: Storage, checkpoint: Checkpoint, rank: int) -> None:
        self.files = CheckpointFiles(storage, checkpoint.path, checkpoint.manifest)
        self._checkpoint = checkpoint
        self._rank = rank

    def rank_tree(self, rank: int) -> Mapping[str, Any] | None:
        """Return what a rank saved for itself; ``None`` in a foreign checkpoint."""
        tree: Mapping[str, Any] | None = read_part(self.files, rank_file("", rank))
        return tree

    def rank_source(self, rank: int) -> Source:
        """Return where :meth:`rank_tree` reads, for errors."""
        return self._source(rank_file("", rank))

    def part(self, name: str) -> Any:
        """Return a part as this rank saved it, or as the leader did where the two were alike.

        Raises:
            CheckpointDamaged: the part's files do not fit together.
        """
        return read_part(self.files, name, self._rank)

    def required_part(self, name: str) -> Any:
        """Return a part that this package saved for itself.

        Raises:
            FormatMismatch: the part is missing: a different version wrote the checkpoint.
        """
        found, source = self.part(name), self._source(name)
        if found is None:
            raise source.lacks(source.file)
        return found

    def read_record(self, kind: type[R], name: str) -> R:
        """Return a part that this package saved for itself, as a record.

        Raises:
            FormatMismatch: the part or a field is missing.
        """
        return kind.from_tree(self.required_part(name), self._source(name))

    def restore(self, parts: Mapping[str, Stateful]) -> None:
        """Restore every part.

        Raises:
            StateMismatch: the checkpoint has no such part, though it was made by this package.
        """
        for name, part in parts.items():
            saved = self.part(name)
            if saved is not None:
                self._require_same_objects(name, part, saved)
                restore_state(part, _of_part(part, saved))
            elif self._checkpoint.manifest is not None and name != SCALER:
                raise self._lacks(name)

    def verify(self, parts: Mapping[str, Stateful]) -> None:
        """Compare every part with what was saved; it is read again, since a part may have changed what it was given.

        Raises:
            NotRestored: a part's state differs.
        """
        for name, part in parts.items():
            saved = read_part(self.files, name, self._rank, copies=False)
            if saved is not None:
                expected = part.as_restored(saved) if isinstance(part, GeneratorState) else _of_part(part, saved)
                verify_equal(name, expected, part.state_dict())

    def _require_same_objects(self, name: str, part: Stateful, saved: Mapping[str, Any]) -> None:
        """Require that the objects of a group were saved; log those that are no longer in it.

        Raises:
            StateMismatch: an object of the group was not saved.
        """
        if not isinstance(part, StatefulGroup):
            return
        added = sorted(part.named.keys() - set(saved))
        if added:
            raise self._lacks(f"{name}: {added[0]}")
        for each in saved:
            if each not in part.named and self._rank == 0:
                self.log_dropped(f"{name}: {each}")

    def log_dropped(self, name: str) -> None:
        """Log that a part was saved, and is not given in this launch."""
        logger.warning(
            "%s has %s, which is not given in this launch: it is not restored, and no later checkpoint has it. If it "
            "still belongs to the run, stop, and give it again.",
            self._checkpoint.path.name,
            name,
        )

    def _lacks(self, name: str) -> StateMismatch:
        return StateMismatch(
            f"{self._checkpoint.path.name} has no part {name!r}: it was saved without it. Leave the part out, or start "
            "another run directory",
            path=self._checkpoint.path,
        )

    def _source(self, name: str) -> Source:
        manifest = self._checkpoint.manifest
        package = manifest.package if manifest else ""
        return Source(self._checkpoint.path, f"{name}.json", self._checkpoint.step, package)


def _of_part(part: Stateful, saved: Any) -> Any:
    """Return what was saved of a part; of a group, of the objects that are in it now."""
    if not isinstance(part, StatefulGroup):
        return saved
    return {name: state for name, state in saved.items() if name in part.named}
