"""The names of DeepSpeed's files, and what they are good for. Needs no DeepSpeed."""

from __future__ import annotations

import re
from pathlib import Path

SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
"""A file of one rank: the rank, and what of it is there."""

MODEL = "mp_rank_00_model_states.pt"
"""What rank zero writes for all, but at ZeRO stage 3."""


def owner(file: Path) -> int:
    """Return the rank that wrote a file of DeepSpeed, by its path in the checkpoint; zero where it does not say."""
    shard = SHARD.fullmatch(file.name)
    return int(shard[1]) if shard else 0


def invariants(stage: int, ranks: int) -> dict[str, int]:
    """Return what must be as it was when a checkpoint was saved, in a user's words, where another framework drives.

    Without ZeRO every rank holds the whole optimizer; with it, its piece.
    """
    return {"ZeRO stage": stage, **({"number of ranks": ranks} if stage else {})}


def tag(step: int) -> str:
    """Return the name that DeepSpeed gives to the checkpoint of a step."""
    return f"global_step{step}"
