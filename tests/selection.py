"""Which cases of a test run each time, and which only in the sessions ``thorough`` and ``long``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[str], *chosen: str, seldom: Iterable[str] = ()) -> list[Any]:
    """Return the names of cases as parameters; all but the chosen ones have the mark ``thorough``.

    Those that run seldom have the mark ``long``, too: what they vary is varied by other cases, or by another adapter.
    """
    names, rare = list(cases), {*seldom}
    missing = sorted({*chosen, *rare} - {*names})
    assert not missing, f"there are no cases {missing}"
    marks = {name: [pytest.mark.thorough, *([pytest.mark.long] if name in rare else [])] for name in names}
    return [name if name in chosen else pytest.param(name, marks=marks[name]) for name in names]
