"""What a search among objects has found, where a search at each step would cost more than all else."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any


class FoundAttributes:
    """Attributes of objects, as they were found.

    Args:
        looks: of each attribute, the object that has it, its name, and its value; ``None`` where it has none.
    """

    def __init__(self, looks: Sequence[tuple[Any, str, Any]]) -> None:
        self._holders = [holder for holder, _, _ in looks]
        self._names = [name for _, name, _ in looks]
        self._values = [value for _, _, value in looks]

    @property
    def are_there(self) -> bool:
        """Whether each is the same object still; in a microsecond."""
        values = map(getattr, self._holders, self._names, itertools.repeat(None))
        return all(map(operator.is_, values, self._values))
