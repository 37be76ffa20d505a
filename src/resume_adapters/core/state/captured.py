"""State that was captured: a tree that is kept as it is, and not copied again."""

from __future__ import annotations

from typing import Any


class Captured(dict[str, Any]):
    """A tree that nothing changes, such as the words of a random generator at some moment."""
