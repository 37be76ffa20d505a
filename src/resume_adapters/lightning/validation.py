"""Validations that a stop may interrupt: where the ranks vote, and whether leaving in the middle loses anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from resume_adapters.core.session.session import Session
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.lightning import strategies
from resume_adapters.lightning.framework import LightningFramework
from resume_adapters.lightning.loops import Loops
from resume_adapters.lightning.records import FitRankState


class InterruptibleValidation:
    """The validations of one fit.

    Args:
        framework: has the parts that are saved.

    Attributes:
        state_before: what this rank saves while a validation runs; ``None`` while none does.
    """

    def __init__(self, trainer: Any, session: Session, framework: LightningFramework, loops: Loops) -> None:
        self.state_before: FitRankState | None = None
        self._trainer = trainer
        self._session = session
        self._framework = framework
        self._loops = loops
        self._fingerprint: str | None = None
        self._votes_left: float = 0

    def run(self, native: Callable[[], Any], capture: Callable[[], FitRankState] | None, *, is_saved: bool) -> Any:
        """Validate.

        Args:
            native: Lightning's own way.
            capture: returns the state of this rank, which a save in the middle holds; ``None`` in a sanity check.
            is_saved: the current step is saved.
        """
        batches, ranks = self._loops.validation_batches(), self._session.run.ranks
        self._framework.validation_data.watch()
        # Ranks vote together, so no more often than the one with the fewest batches can.
        self._votes_left = math.inf if ranks.world_size == 1 else min(ranks.gather(batches))
        if capture is not None:
            self.state_before = capture()
            self._session.observed.hold()
            if self._votes_left and not is_saved:
                self._fingerprint = self._take_fingerprint()
        result = native()
        self._framework.validation_data.look()
        self.state_before = self._fingerprint = None
        return result

    def end_batch(self) -> bool:
        """Between two batches, let the ranks vote; return whether they have just agreed to stop."""
        if self._votes_left <= 0:
            return False
        self._votes_left -= 1
        if self._session.ask_to_stop():
            self._votes_left = 0
            return True
        return False

    def is_unchanged(self) -> bool:
        """Return whether on no rank the validation has changed what would be saved. Every rank asks."""
        fingerprint = self._fingerprint
        return all(self._session.run.ranks.gather(fingerprint is not None and fingerprint == self._take_fingerprint()))

    def _take_fingerprint(self) -> str | None:
        # What counts of a generator is in the positions of the loaders.
        named = self._session.options.parts.items()
        parts = {name: part for name, part in named if not isinstance(part, GeneratorState)}
        return strategies.fingerprint(self._trainer, {**parts, **self._framework.parts()})
