"""Records are written as trees, and read again field by field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from resume_adapters.core.state.records import FRESH, Record, Source, Stored
from resume_adapters.errors import FormatMismatch

SOURCE = Source(Path("checkpoint-4"), "rank-00000.json", 4, "0.1.0")


@dataclass
class Position(Record):
    index: int
    size: Annotated[int, Stored("together")]


@dataclass
class Loader(Record):
    order: list[str]
    positions: list[Position]
    last: Position | None
    seeds: int | str | None
    added_later: bool = False


WRITTEN: dict[str, Any] = {
    "order": ["a", "b"],
    "positions": [{"index": 1, "together": 8}, {"index": 2, "together": 8}],
    "last": {"index": 3, "together": 4},
    "seeds": "7",
    "added_later": True,
}


def test_a_record_is_read_again_as_it_was_written() -> None:
    loader = Loader(["a", "b"], [Position(1, 8), Position(2, 8)], Position(3, 4), "7", added_later=True)
    assert loader.to_tree() == WRITTEN
    assert Loader.from_tree(WRITTEN, SOURCE) == loader
    bare = Loader([], [], None, None)
    assert Loader.from_tree(bare.to_tree(), SOURCE) == bare


def test_what_a_version_did_not_save_yet_has_its_default_and_what_a_later_one_added_is_passed_over() -> None:
    older = {name: value for name, value in WRITTEN.items() if name != "added_later"}
    assert Loader.from_tree({**older, "unknown": 1}, SOURCE).added_later is False


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"positions": [{"index": 1, "together": 8}, {"index": 2}]}, r"no positions\.1\.together in rank-00000\.json"),
        ({"positions": [5]}, r"no record positions\.0 in rank-00000\.json"),
        ({"last": "the end"}, r"no record last in rank-00000\.json"),
    ],
)
def test_what_is_no_such_record_is_of_another_version_of_the_format(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatMismatch, match=rf"checkpoint-4 has {words}.*resume-adapters 0\.1\.0 wrote it") as refused:
        Loader.from_tree({**WRITTEN, **changed}, SOURCE)
    assert refused.value.step == 4


@dataclass
class Batch(Record):
    indices: list[int]
    made: Annotated[list[int], FRESH]
    digest: str | None
    inner: list[Batch]
