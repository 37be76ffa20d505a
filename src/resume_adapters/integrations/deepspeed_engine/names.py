"""The names of DeepSpeed's files, what follows from them, and what belongs to one rank. Needs no DeepSpeed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resume_adapters.core.state.records import Record

SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
"""A shard of one rank: the rank, and whether it is of the model or the optimizer."""

MODEL = "mp_rank_00_model_states.pt"
"""The model's file, which rank zero writes for all ranks, except at ZeRO stage 3."""


def owner(file: Path) -> int:
    """Return the rank that wrote a file of DeepSpeed, by its name; zero for a file without a rank in its name."""
    shard = SHARD.fullmatch(file.name)
    return int(shard[1]) if shard else 0


def tag(step: int) -> str:
    """Return DeepSpeed's name for the checkpoint of a step."""
    return f"global_step{step}"


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
