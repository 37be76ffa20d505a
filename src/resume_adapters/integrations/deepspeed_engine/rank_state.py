"""What DeepSpeed does not save of an engine and belongs to one rank. Needs no DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resume_adapters.core.state.records import Record


@dataclass
class EngineRankState(Record):
    """The state of an engine on one rank.

    Attributes:
        windows: accumulation windows that are done.
        powers: the powers of beta that C++ optimizers keep.
        random: the states of the random generators of activation checkpointing.
        accumulation: the batches of an optimizer step that the launch was given, those that the script has set, and how
            many of them count as done; ``None`` where the version that saved it did not look.
    """

    windows: int
    powers: Any
    random: Any
    accumulation: list[int] | None = None
