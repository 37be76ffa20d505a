"""Fencing in an object store: a later start locks an earlier one out, on whatever machine it runs.

A start claims the URL by creating an object with the next number. Where the store refuses to create what exists, two
starts never get one number. Some stores accept the condition and overwrite; so each is asked, by creating a probe
twice. Where it lies, a claim has the start's token in its key, everybody lists the claims, waits, and lists them again:
of one number the greatest token wins, and a start with another token is locked out like an earlier one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from resume_adapters.core.log import logger
from resume_adapters.core.tiers.keys import CLAIMS, PROBE, Claim, claim_in, claim_key
from resume_adapters.core.tiers.store import Store
from resume_adapters.errors import FencedOff, TierUnavailable

_SETTLE = 2.0
"""Seconds in which another start's claim appears in a listing."""


class Claims:
    """The claims on one URL, and the one of this start.

    Args:
        store: the store.
        token: identifies this start; hexadecimal digits.
        owner: describes this start, for people.
        sleep: waits for so many seconds.

    Attributes:
        is_honest: the store can be asked to create only, and refuses what exists; ``None`` until it was asked.
    """

    def __init__(self, store: Store, token: str, owner: str, sleep: Callable[[float], object] = time.sleep) -> None:
        self.is_honest: bool | None = None
        self._store = store
        self._token = token
        self._owner = owner
        self._sleep = sleep
        self._mine: Claim | None = None

    @property
    def generation(self) -> int | None:
        """The generation that this start has claimed; ``None`` if it has claimed none yet."""
        return None if self._mine is None else self._mine.generation

    def take(self, after: int) -> int:
        """Claim the next generation, and return it; see :meth:`Tier.claim`."""
        if self.is_honest is None:
            self._ask()
        generation = max(after, self._newest().generation) + 1
        while not self._create(generation):
            generation += 1
        if not self.is_honest:
            self._sleep(_SETTLE)
        return generation

    def take_late(self, generation: int) -> None:
        """Claim a generation that this start has already, because the store did not answer at its begin.

        Raises:
            FencedOff: another start has claimed it or a later one meanwhile.
        """
        newest = self._newest()
        if newest.generation >= generation:
            raise self._fenced_off(generation, newest)
        self.take(generation - 1)

    def _create(self, generation: int) -> bool:
        claim = Claim(generation, "" if self.is_honest else self._token)
        try:
            (self._store.create if self.is_honest else self._store.put)(claim_key(claim), self._owner.encode())
        except FileExistsError:
            # A request that was tried again may have met its own first attempt.
            if self._description(claim) != self._owner:
                return False
        self._mine = claim
        return True

    def _ask(self) -> None:
        """Ask the store whether it refuses to create what exists."""
        probe = f"{PROBE}{self._token}"
        try:
            with contextlib.suppress(FileExistsError):
                self._store.create(probe, b"is this created once?")
            self._store.create(probe, b"or twice?")
        except FileExistsError:
            self.is_honest = True
        except TierUnavailable:
            self._store.put(probe, b"without a condition?")
            self._warn("refuses to be asked to create what does not exist only")
        else:
            self._warn("overwrites what exists where it is asked to create it only")
        with contextlib.suppress(TierUnavailable):  # these credentials may not delete; the probe is in nobody's way
            self._store.discard([probe])

    def _warn(self, does: str) -> None:
        self.is_honest = False
        logger.warning(
            "%s %s. It is used safely, without relying on that: two jobs that start there at the same moment learn of "
            "each other %g s later.",
            self._store.label,
            does,
            _SETTLE,
        )

    def _newest(self) -> Claim:
        found = [claim for key in self._store.list(CLAIMS) if (claim := claim_in(key)) is not None]
        return max(found, default=Claim(0))

    def require_owned(self) -> None:
        """Check that this start has claimed the URL, and no later one has.

        Raises:
            FencedOff: a later one has.
        """
        newest = self._newest()
        if self._mine is not None and newest > self._mine:
            raise self._fenced_off(self._mine.generation, newest)

    def owner(self) -> tuple[int, str]:
        """Return the generation that owns the URL, and who that is; zero and nothing if nobody has claimed it."""
        newest = self._newest()
        return newest.generation, self._description(newest) if newest.generation else ""

    def _description(self, claim: Claim) -> str:
        try:
            return self._store.get(claim_key(claim)).decode(errors="replace")
        except FileNotFoundError:  # somebody has removed it meanwhile
            return "unknown"

    def _fenced_off(self, generation: int, newest: Claim) -> FencedOff:
        return FencedOff(
            f"this process is start {generation} of {self._store.label}, which start {newest.generation} "
            f"({self._description(newest)}) owns now: nothing more is saved from here. Two jobs were started with one "
            "mirror; the later one continues"
        )
