"""Typed records of saved state: dataclasses that are written as trees, and read again field by field.

What this package saves for itself is a :class:`Record`. A field may have another name on disk
(``Annotated[int, Stored("together")]``): names on disk never change, names in the code may. A field that a checkpoint
lacks is a :class:`FormatMismatch` that says which version wrote it; a field that a later version added is passed over.
"""

from __future__ import annotations

import functools
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from resume_adapters.errors import CheckpointDamaged, FormatMismatch

R = TypeVar("R", bound="Record")


class Source(NamedTuple):
    """Where a record was read.

    Attributes:
        checkpoint: the checkpoint.
        file: name of the file in it.
        step: optimizer steps completed.
        package: version of this package that wrote it; empty where it is not known.
    """

    checkpoint: Path
    file: str
    step: int
    package: str

    def lacks(self, what: str) -> FormatMismatch:
        """Return the error that something is missing which this version reads."""
        return FormatMismatch(
            f"{self.checkpoint.name} has no {what}, which this version of resume-adapters reads: "
            f"{f'resume-adapters {self.package}' if self.package else 'another version'} wrote it in another version "
            "of the format. Launch with the version that wrote it, or start another run directory",
            path=self.checkpoint,
            step=self.step,
        )

    def damaged(self, what: str) -> CheckpointDamaged:
        """Return the error that something is not what this package writes."""
        return CheckpointDamaged(f"{self.checkpoint.name} is damaged: {what}", path=self.checkpoint, step=self.step)


class Stored(NamedTuple):
    """Annotates a field that has another name on disk."""

    name: str


class Tried(NamedTuple):
    """Annotates a field that is tried when it is read, so that no later restore ends in what it holds.

    Attributes:
        on: uses a value as a restore does, and changes nothing; whatever it raises, the value is damaged.
    """

    on: Callable[[Any], object]


FRESH = "made with the record"
"""Annotates a field whose value nothing changes later, so that it need not be copied where the record is kept."""


@dataclass
class Record:
    """Base of the records: a dataclass whose fields are data, other records, or lists of records."""

    def to_tree(self) -> dict[str, Any]:
        """Return the record as a tree, with the names that it has on disk."""
        values = vars(self)
        return {stored: tree_of(values[name]) for name, stored, _, _ in _fields(cast("Any", type(self)))}

    @classmethod
    def from_tree(cls: type[R], tree: Mapping[str, Any], source: Source, where: str = "") -> R:
        """Read a record.

        Args:
            tree: what :meth:`to_tree` returned.
            source: where it was read, for the error.
            where: the record's place in the file, such as ``"loaders.0."``.

        Raises:
            FormatMismatch: a field is missing, or is no record where one is expected.
            CheckpointDamaged: a field is of a different kind than was written, or cannot be restored.
        """
        if not isinstance(tree, Mapping):
            raise source.lacks(f"record {where.rstrip('.')} in {source.file}")
        values = {}
        for field, name, kind, tried in _fields(cast("Any", cls)):
            if name not in tree and hasattr(cls, field):  # it has a default: not every version saved it
                continue
            if name not in tree:
                raise source.lacks(f"{where}{name} in {source.file}")
            values[field] = _from_tree(kind, tree[name], source, f"{where}{name}.")
            if tried is not None and values[field] is not None:
                _try(tried, values[field], source, f"{where}{name}")
        return cls(**values)

    def map_values(self: R, copied: Callable[[Any], Any]) -> R:
        """Return a record whose values are copies, but for those of fields that are :data:`FRESH`."""
        fresh, found = _fresh(cast("Any", type(self))), object.__new__(type(self))
        vars(found).update(
            {
                name: value if type(value) in _FIXED or name in fresh else copied(value)
                for name, value in vars(self).items()
            }
        )
        return found


@functools.cache
def _fields(cls: Any) -> list[tuple[str, str, Any, Tried | None]]:
    """Return each field's name, its name on disk, its type, and what it is tried on."""
    found = []
    for name, kind in typing.get_type_hints(cls, include_extras=True).items():
        stored, tried = name, None
        if typing.get_origin(kind) is typing.Annotated:
            kind, *extras = typing.get_args(kind)
            stored = next((each.name for each in extras if isinstance(each, Stored)), name)
            tried = next((each for each in extras if isinstance(each, Tried)), None)
        found.append((name, stored, kind, tried))
    return found


@functools.cache
def _fresh(cls: Any) -> frozenset[str]:
    """Return the names of the fields that are :data:`FRESH`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return frozenset(name for name, kind in hints.items() if FRESH in getattr(kind, "__metadata__", ()))


def tree_of(value: Any) -> Any:
    """Return a value of a record as a tree."""
    if type(value) in _SIMPLE:  # asked first: most are
        return value
    if isinstance(value, Record):
        return value.to_tree()
    if isinstance(value, list) and any(isinstance(each, Record) for each in value):
        return [tree_of(each) for each in value]
    return value


_FIXED = frozenset((type(None), bool, int, float, str, bytes))
_SIMPLE = frozenset[type]((*_FIXED, dict))


def _from_tree(kind: Any, value: Any, source: Source, where: str) -> Any:
    """Read a value of a declared type; of what is no record, the kind of value is checked.

    Raises:
        CheckpointDamaged: it is of a different kind.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [each for each in arguments if each is not type(None)]
        return _from_tree(kinds[0], value, source, where) if len(kinds) == 1 else value
    if _is_record(kind):
        return kind.from_tree(value, source, where)
    expected = _KINDS.get(origin or kind)
    if expected is not None and not isinstance(value, expected):
        raise source.damaged(
            f"{where.rstrip('.')} in {source.file} is a {type(value).__name__}, expected {(origin or kind).__name__}"
        )
    if origin is list:
        return [_from_tree(arguments[0], each, source, f"{where}{index}.") for index, each in enumerate(value)]
    if origin is dict:
        return {key: _from_tree(arguments[1], each, source, f"{where}{key}.") for key, each in value.items()}
    return value


def _try(tried: Tried, value: Any, source: Source, where: str) -> None:
    """Raise if a value cannot be used.

    Raises:
        CheckpointDamaged: it cannot.
    """
    try:
        tried.on(value)
    except Exception as error:  # of any kind: who forged it chooses which
        raise source.damaged(f"{where} in {source.file} cannot be restored ({error!r})") from error


_KINDS: dict[Any, type | tuple[type, ...]] = {
    bool: bool,
    int: numbers.Integral,
    float: numbers.Real,
    str: str,
    list: list,
    dict: Mapping,
}
"""What a declared type may be read as; numpy's numbers are numbers too."""


def _is_record(kind: Any) -> bool:
    # Python 3.10 takes ``list[str]`` for a class, too.
    return typing.get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, Record)
