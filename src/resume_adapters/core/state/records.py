"""What this package saved for itself, read again: a key that is not there is an error that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from resume_adapters.errors import FormatMismatch

_OURS = {"topology", "fixed", "loaders", "position", "losses", "counters", "framework", "strategy", "engine"}
"""Names under which this package keeps records of its own. Whatever else a record holds is handed out as it was saved:
frameworks and users keep it, and may save it in files of theirs."""


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
        """Return the error that something is not there which this version reads."""
        return FormatMismatch(
            f"{self.checkpoint.name} has no {what}, which this version of resume-adapters reads: "
            f"{f'resume-adapters {self.package}' if self.package else 'another version'} wrote it in another version "
            "of the format. Launch with the version that wrote it, or start another run directory",
            path=self.checkpoint,
            step=self.step,
        )


class Record(dict[str, Any]):
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
        return Record({**self, **other}, self._source, self._where)


def _within(value: Any, source: Source, where: str) -> Any:
    if isinstance(value, list):
        return [_within(each, source, f"{where}{index}.") for index, each in enumerate(value)]
    return Record(value, source, where) if isinstance(value, dict) else value
