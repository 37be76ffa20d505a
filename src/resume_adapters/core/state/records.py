"""Typed records of saved state: dataclasses that are written as trees, and read again field by field.

What this package saves for itself is a :class:`Record`. A field may have another name on disk (``stored("together")``):
names on disk never change, names in the code may. A field that a checkpoint lacks is a :class:`FormatMismatch` that
says which version wrote it; a field that a later version added is passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from resume_adapters.errors import FormatMismatch

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


def stored(name: str) -> Any:
    """Return a dataclass field that has another name on disk."""
    return field(metadata={"stored": name})


@dataclass
class Record:
    """Base of the records: a dataclass whose fields are data, other records, or lists and dicts of records."""

    def to_tree(self) -> dict[str, Any]:
        """Return the record as a tree, with the names that it has on disk."""
        return {_stored_name(each): _to_tree(getattr(self, each.name)) for each in dataclasses.fields(self)}

    @classmethod
    def from_tree(cls: type[R], tree: Mapping[str, Any], source: Source, where: str = "") -> R:
        """Read a record.

        Args:
            tree: what :meth:`to_tree` returned.
            source: where it was read, for the error.
            where: the record's place in the file, such as ``"loaders.0."``.

        Raises:
            FormatMismatch: a field is missing, or is no record where one is expected.
        """
        if not isinstance(tree, Mapping):
            raise source.lacks(f"record {where.rstrip('.')} in {source.file}")
        values = {}
        for each, kind in _fields(cls):  # type: ignore[arg-type]  # a class is hashable
            name = _stored_name(each)
            if name not in tree:
                raise source.lacks(f"{where}{name} in {source.file}")
            values[each.name] = _from_tree(kind, tree[name], source, f"{where}{name}.")
        return cls(**values)


def _stored_name(each: dataclasses.Field[Any]) -> str:
    return str(each.metadata.get("stored", each.name))


@functools.cache
def _fields(cls: type[Record]) -> list[tuple[dataclasses.Field[Any], Any]]:
    kinds = typing.get_type_hints(cls)
    return [(each, kinds[each.name]) for each in dataclasses.fields(cls)]


def _to_tree(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_tree()
    if isinstance(value, list) and any(isinstance(each, Record) for each in value):
        return [_to_tree(each) for each in value]
    if isinstance(value, dict) and any(isinstance(each, Record) for each in value.values()):
        return {key: _to_tree(each) for key, each in value.items()}
    return value


def _from_tree(kind: Any, value: Any, source: Source, where: str) -> Any:
    """Read a value of a declared type; what is no record is handed on as it is."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        kinds = [each for each in arguments if each is not type(None)]
        return _from_tree(kinds[0], value, source, where) if len(kinds) == 1 else value
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_tree(value, source, where)
    if origin is list and _holds_records(arguments[0]) and isinstance(value, list):
        return [_from_tree(arguments[0], each, source, f"{where}{index}.") for index, each in enumerate(value)]
    if origin is dict and _holds_records(arguments[1]) and isinstance(value, dict):
        return {key: _from_tree(arguments[1], each, source, f"{where}{key}.") for key, each in value.items()}
    return value


def _holds_records(kind: Any) -> bool:
    if isinstance(kind, type) and typing.get_origin(kind) is None:
        return issubclass(kind, Record)
    return any(_holds_records(each) for each in typing.get_args(kind))
