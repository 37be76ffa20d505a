"""Passes over a tracked loader that do not begin afresh: one that is resumed, and one that was begun before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from resume_adapters.core.dataloader.progress import FetchLog, LoaderPosition
from resume_adapters.core.state import encoding, rng
from resume_adapters.errors import NotRestored


@dataclass(frozen=True, eq=False)
class AlreadyMade:
    """A pass that begins with the random state of the moment at which the loader had made its iterator before.

    Attributes:
        random_state: what :meth:`LoaderRandomState.capture` returned at that moment.
        samplers: the samplers of that moment, each after the one that held it: another may be there since.
    """

    random_state: dict[str, Any]
    samplers: Sequence[tuple[Any, Any]]


class PrefetchReplay:
    """The first fetches of a resumed pass: those whose batches had been prefetched.

    Args:
        position: where the pass resumes.
        log: fetches the batches, and knows the generators that the user registered.
        why: says why another batch may follow.

    Attributes:
        is_over: every prefetched batch was fetched again, and the random state is the one saved with the position.
    """

    def __init__(self, position: LoaderPosition, log: FetchLog, why: Callable[[], str]) -> None:
        self.is_over = False
        self._position = position
        self._log = log
        self._why = why
        self._rng_before = deque[Any](position.rng_before)
        self._left = position.prefetched

    def begin(self) -> None:
        """Restore the saved random state at once if no batch had been prefetched."""
        if not self._left:
            self._end()

    def prepare(self) -> None:
        """Restore the random state before the next fetch (no-op with workers)."""
        if self._rng_before:
            before = self._rng_before.popleft()
            self._log.restore_before(before)

    def count(self, batch: Any) -> None:
        """Count a replayed batch; after the last one, verify it and restore the saved random state.

        Raises:
            NotRestored: it is not the batch that had been prefetched.
        """
        self._left -= 1
        if not self._left:
            self._verify(batch)
            self._end()

    def _verify(self, batch: Any) -> None:
        if self._position.proof is None:
            return
        index, digest = self._position.proof
        if encoding.digest_of(batch) != digest:
            raise NotRestored(
                f"batch {index} of this pass is not the batch that followed when the checkpoint was saved: "
                f"{self._why()}"
            )

    def _end(self) -> None:
        if self._position.step is not None:
            rng.restore_with(self._position.step, self._log.generators)
        self._log.restore_attributes(self._position)
        self.is_over = True
