"""What tells that an object without attributes has changed; nothing is taken from it, and no code of the user runs."""

from __future__ import annotations

import itertools
from decimal import Decimal
from typing import Any

import pytest

from resume_adapters.core.observed.opaque import opaque_fingerprint


class Spiteful:
    """Something that nobody may print."""

    def __repr__(self) -> str:
        raise OSError("no")


def seen(value: Any) -> Any:
    return opaque_fingerprint(value, sampled_above=1 << 20)


def kind(value: Any) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", [iter([1, 2, 3]), itertools.count(), zip([1, 2], [3, 4], strict=True)], ids=kind)
def test_an_iterator_is_known_by_how_far_it_is(value: Any) -> None:
    before = seen(value)
    assert seen(value) == before, "nothing is taken from it"
    next(value)
    assert seen(value) != before


def test_a_value_is_known_by_what_it_prints() -> None:
    assert seen(Decimal(1)) == seen(Decimal(1)) != seen(Decimal(2))


def test_what_cannot_be_printed_is_not_known() -> None:
    assert seen((Spiteful(),)) is None
    assert seen(Spiteful()) is None
