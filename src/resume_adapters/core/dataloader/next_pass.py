"""The ways in which the next pass over a tracked loader may begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from resume_adapters.core.dataloader.progress import LoaderPosition


@dataclass(frozen=True, eq=False)
class Fresh:
    """From its first batch, with the current random state."""


@dataclass(frozen=True, eq=False)
class AlreadyMade:
    """From its first batch, with the random state of the moment at which the loader had made its iterator before.

    Attributes:
        random_state: what :meth:`LoaderRandomState.capture` returned at that moment.
        samplers: the samplers of that moment, each after the one that held it: another may be there since.
    """

    random_state: dict[str, Any]
    samplers: Sequence[tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Resumed:
    """From a position in the middle of a pass."""

    position: LoaderPosition


@dataclass(frozen=True, eq=False)
class AfterEnd:
    """From its first batch, after a position at the end of a pass.

    Attributes:
        position: the position.
        is_restored: its random state is restored; what remains is to start the workers that outlived the pass.
    """

    position: LoaderPosition
    is_restored: bool = False


@dataclass(frozen=True, eq=False)
class Empty:
    """An empty iterator: every batch of the pass was consumed. It restores the end of that pass."""

    then: AfterEnd


@dataclass(frozen=True, eq=False)
class Held:
    """An empty iterator, which counts as no pass. The pass after it begins as ``then`` says."""

    then: Beginning | Empty


Beginning: TypeAlias = Fresh | AlreadyMade | Resumed | AfterEnd
NextPass: TypeAlias = Beginning | Empty | Held


def beginning_of(next_pass: NextPass) -> Beginning:
    """Return how the next pass begins that is not an empty iterator."""
    while isinstance(next_pass, Held | Empty):
        next_pass = next_pass.then
    return next_pass
