"""The batches that were fetched ahead when a position was saved, fetched again: with the same numbers, and proved."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.errors import NotRestored

Tree = dict[str, Any]


class PrefetchReplay:
    """Goes along with the first fetches of a pass that is continued.

    Args:
        position: where the pass goes on.
        registered: the generators that the user registered.

    Attributes:
        is_over: all that was fetched ahead has come again, and the random state is that of the position's moment.
    """

    def __init__(self, position: Tree, registered: Mapping[str, GeneratorState]) -> None:
        self.is_over = False
        self._registered = registered
        self._before = deque[Any](position["before"])
        self._left: int = position["ahead"]
        self._proof: list[Any] | None = position["proof"]
        self._step: Tree | None = position["step"]
        if not self._left:
            self._end()

    def prepare(self) -> None:
        """Put back the random state from which the next batch was fetched; of a fetch in a worker, that is none."""
        if self._before:
            before = self._before.popleft()
            rng.restore_cpu(rng.cpu_from_tree(before["cpu"]))
            rng.restore_registered(before["registered"], self._registered)

    def take(self, batch: Any) -> None:
        """Take in a batch that was fetched; with the last that was ahead, prove it and put the random state back.

        Raises:
            NotRestored: it is another batch.
        """
        self._left -= 1
        if not self._left:
            self._prove(batch)
            self._end()

    def _prove(self, batch: Any) -> None:
        if self._proof is not None and encoding.digest_of(batch) != self._proof[1]:
            raise NotRestored(
                f"batch {self._proof[0]} of this pass is not the batch that followed when the checkpoint was saved: "
                "the data were changed, or their order depends on state that is not captured (a generator of its own: "
                "register it as a part; a stream that counts its passes: give it set_epoch)"
            )

    def _end(self) -> None:
        if self._step is not None:
            rng.restore_with(self._step, self._registered)
        self.is_over = True
