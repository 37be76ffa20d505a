"""A digest of whatever a user has: it differs where the values do, is the same where they are, and never raises."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import random
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_adapters.core.state import fingerprint, rng
from resume_adapters.core.state.fingerprint import value_digest

Pair = collections.namedtuple("Pair", "one two")


@dataclasses.dataclass
class Sample:
    text: str
    tokens: Any


class Graph:
    def __init__(self, nodes: Any) -> None:
        self.nodes = nodes
        self.itself = self


class Looked:
    """Keeps what it has looked up, and leaves it out where it is pickled, as an index of pandas does."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.found: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows}


class Only:
    """Is pickled by the name of a global, as the protocol allows."""

    def __reduce__(self) -> str:
        return "ONLY"


class Spiteful(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise OSError("no")

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


DIFFERENT: list[tuple[Any, Any]] = [
    (None, False),
    (0, False),
    (1, 1.0),
    (0.0, -0.0),
    (1j, 2j),
    ("1", 1),
    ("1", b"1"),
    (["ab", "c"], ["a", "bc"]),
    ([1, 2], (1, 2)),
    ([[1], 2], [[1, 2]]),
    ({"a": 1}, {"a": 2}),
    ({1: 2}, {"1": 2}),
    ({1, 2}, {1, 3}),
    (Pair(1, 2), (1, 2)),
    (Pair(1, 2), Pair(1, 3)),
    (Sample("a", ones(2)), Sample("a", ones(2) + 1)),
    (Graph(ones(2)), Graph(ones(3))),
    (Graph(1), Sample("a", 1)),
    (ones(2, 3), ones(3, 2)),
    (ones(2), ones(2, dtype=torch.float64)),
    (ones(2), ones(2, dtype=torch.int32)),
    (ones(4).to(torch.bfloat16), ones(4).to(torch.float16)),
    (ones(2, device="meta"), ones(3, device="meta")),
    (torch.eye(3).to_sparse(), (torch.eye(3) * 2).to_sparse()),
    (np.ones(2), np.ones(3)),
    (np.ones(2), ones(2, dtype=torch.float64)),
    (np.ones(2), np.ones(2, dtype=np.float32)),
    (np.array([{"a": 1}], dtype=object), np.array([{"a": 2}], dtype=object)),
    (np.array({"a": 1}, dtype=object), np.array({"a": 2}, dtype=object)),
    (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
    (np.float32(1), np.float64(1)),
    (torch.float32, torch.float64),
    (generator(1), generator(2)),
    (random.Random(1), random.Random(2)),
    (np.random.default_rng(1), np.random.default_rng(2)),
    (ones, generator),
    (Sample, Graph),
    (range(3), range(4)),
    (iter([1]), object()),
    (iter([1]), iter([2])),
    (Looked([1]), Looked([2])),
    (datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    (Path("a"), Path("b")),
    (functools.partial(ones, 2), functools.partial(ones, 3)),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=lambda pair: f"{type(pair[0]).__name__}-{type(pair[1]).__name__}")
def test_what_differs_has_different_digests(pair: tuple[Any, Any]) -> None:
    one, other = map(value_digest, pair)
    assert one != other
    assert [value_digest(each) for each in pair] == [one, other]
    assert len(one) == 16 and int(one, 16) >= 0


def test_what_is_equal_has_one_digest() -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    equal: list[tuple[Any, Any]] = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, {2, 1}),
        (turned, turned.contiguous()),
        (torch.nn.Parameter(ones(2)).data, ones(2)),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
        (object(), object()),
        (Graph([1]), Graph([1])),
        (types.SimpleNamespace(a=1), types.SimpleNamespace(a=1)),
        (Spiteful(), Spiteful()),
        (Only(), Only()),
    ]
    for one, other in equal:
        assert value_digest(one) == value_digest(other), one


def test_what_an_object_leaves_out_where_it_is_pickled_does_not_count() -> None:
    one, other = Looked([1]), Looked([1])
    other.found["first"] = 1
    assert value_digest(one) == value_digest(other)


def test_a_value_without_an_end_has_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_LONGEST", 100)
    assert value_digest(range(10**9)) == value_digest(range(10**9))
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert value_digest(deep)


def test_a_digest_draws_nothing_and_leaves_the_default_device() -> None:
    before = rng.capture()
    with torch.device("meta"):
        assert value_digest(ones(3, device="cpu")) == value_digest(torch.ones(3, device="cpu"))
    for pair in DIFFERENT:
        value_digest(list(pair))
    after = rng.capture()
    assert value_digest(before) == value_digest(after)
