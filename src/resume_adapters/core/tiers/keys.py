"""What is where in an object store, below the URL of a run. Pure: no store.

::

    checkpoint-500/@00000003-9f1c20aa-18c2a6b1f40/<files of the framework>
                                                 /resume/<files of this package>
                                                 /resume/manifest.json      last: it makes the checkpoint exist
    .resume/claims/00000003                      a start has taken the URL over; with -TOKEN where the store lies
    .resume/aside/00000003-400                   of earlier starts, nothing later than step 400 is resumed from
    .resume/probe-TOKEN                          was created twice, to ask the store whether it refuses the second
    latest                                       names the newest manifest; a hint, for a listing that lags behind

The directory ``@GENERATION-TOKEN-TIME`` is one save of one start. So no two jobs write the same key, and nothing is
ever overwritten but ``latest``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

CLAIMS, ASIDE, PROBE, LATEST = ".resume/claims/", ".resume/aside/", ".resume/probe-", "latest"

_PLACE = re.compile(r"(?!\.)([^/]+)/@\d{8,}-[0-9a-f]+-[0-9a-f]+")


class Claim(NamedTuple):
    """A start that has taken the URL over. The greatest owns it."""

    generation: int
    token: str = ""


def place_of(name: str, generation: int, token: str, written: float) -> str:
    """Return where a save goes."""
    return f"{name}/@{generation:08d}-{token}-{round(written * 1000):x}"


def name_in(place: str) -> str | None:
    """Return the name of the checkpoint that has a place; ``None`` for what is no place."""
    found = _PLACE.fullmatch(place)
    return found[1] if found else None


def claim_key(claim: Claim) -> str:
    """Return the key of a claim."""
    return f"{CLAIMS}{claim.generation:08d}" + (f"-{claim.token}" if claim.token else "")


def claim_in(key: str) -> Claim | None:
    """Return the claim that a key makes; ``None`` for another key."""
    number, _, token = key.removeprefix(CLAIMS).partition("-")
    return Claim(int(number), token) if key.startswith(CLAIMS) and number.isdecimal() else None


def aside_key(generation: int, step: int) -> str:
    """Return the key that sets aside what starts before a generation have saved after a step."""
    return f"{ASIDE}{generation:08d}-{step}"


def aside_in(key: str) -> tuple[int, int] | None:
    """Return the generation and the step of :func:`aside_key`; ``None`` for another key."""
    found = re.fullmatch(r"(\d+)-(-?\d+)", key.removeprefix(ASIDE)) if key.startswith(ASIDE) else None
    return (int(found[1]), int(found[2])) if found else None
