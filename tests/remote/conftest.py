"""What the tests with object stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from object_stores import forget_settings


@pytest.fixture(scope="module", autouse=True)
def settings() -> Iterator[None]:
    """The stores of a test are those that it starts itself, on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        forget_settings(patch)
        yield
