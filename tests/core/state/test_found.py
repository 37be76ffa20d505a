"""What a search among objects has found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resume_adapters.core.state.found import FoundAttributes


def change(holder: Any) -> None:
    holder.inner = object()


def fill(holder: Any) -> None:
    holder.absent = object()


def remove(holder: Any) -> None:
    del holder.inner


@pytest.mark.parametrize("afterwards", [change, fill, remove])
def test_it_is_known_when_a_search_would_find_something_else(afterwards: Any) -> None:
    holder = SimpleNamespace(inner=[1], other=None)
    found = FoundAttributes([(holder, "inner", holder.inner), (holder, "absent", None), (holder, "other", None)])
    holder.inner.append(2)
    assert found.are_there
    afterwards(holder)
    assert not found.are_there
