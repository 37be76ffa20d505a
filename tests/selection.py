"""Which cases of a test run each time, and which only in the session ``thorough``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(cases: Iterable[str], *chosen: str) -> list[Any]:
    """Return the names of cases as parameters; all but the chosen ones have the mark ``thorough``."""
    names = list(cases)
    missing = sorted({*chosen} - {*names})
    assert not missing, f"there are no cases {missing}"
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.thorough) for name in names]
