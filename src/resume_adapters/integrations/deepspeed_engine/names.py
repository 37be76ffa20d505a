"""The names of DeepSpeed's files, and what follows from them. Needs no DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path

SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
"""A shard of one rank: the rank, and whether it is of the model or the optimizer."""

MODEL = "mp_rank_00_model_states.pt"
"""The model's file, which rank zero writes for all ranks, except at ZeRO stage 3."""


def owner(file: Path) -> int:
    """Return the rank that wrote a file of DeepSpeed, by its name; zero for a file without a rank in its name."""
    shard = SHARD.fullmatch(file.name)
    return int(shard[1]) if shard else 0


def invariants(stage: int, ranks: int) -> dict[str, int]:
    """Return the settings that a resume must find unchanged, by the names that users know, under another framework.

    Without ZeRO every rank holds the whole optimizer; with ZeRO, its shard.
    """
    return {"ZeRO stage": stage, **({"number of ranks": ranks} if stage else {})}


def tag(step: int) -> str:
    """Return DeepSpeed's name for the checkpoint of a step."""
    return f"global_step{step}"
