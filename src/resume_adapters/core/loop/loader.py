"""A training loader of a hand-written loop: what the loop iterates over, and the torch ``DataLoader`` beneath it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from resume_adapters.core.dataloader.progress import length_of
from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.session.session import Session

Tree = dict[str, Any]


class LoopLoader:
    """A training loader as the loop sees it, and the torch ``DataLoader`` beneath.

    Args:
        outer: what the loop iterates over.
        watch: the watched torch loader beneath.
        together: samples in a batch of the loop, on all ranks together.
        share: batches that the torch loader fetches on this rank for each batch of the loop: one, unless rank zero
            fetches for all.
    """

    def __init__(self, outer: Any, watch: TrackedLoader, together: int, share: int = 1) -> None:
        self.outer = outer
        self.watch = watch
        self.together = together
        self.share = share
        self.consumed = 0
        self.number: int | None = None
        self._restoring: Tree | None = None
        self._passes = watch.passes

    def begin(self, number: int) -> None:
        """Begin pass ``number`` of the epoch, or go on with it where a checkpoint left it."""
        if not self.continues(number):
            self._restoring = None
        self.consumed = self._restoring["consumed"] if self._restoring else 0
        self.number = number

    def continues(self, number: int) -> bool:
        """Return whether the checkpoint was taken within pass ``number``."""
        return self._restoring is not None and self._restoring["number"] == number

    @property
    def at_end(self) -> bool:
        """Whether the checkpoint was taken when every batch of this pass had been used."""
        return self._restoring is not None and self.watch.at_end

    def __iter__(self) -> Iterator[Any]:
        self._restoring = None
        return iter(self.outer)

    @functools.cached_property
    def length(self) -> int | None:
        """Batches in a pass; ``None`` for a stream without a length."""
        return length_of(self.outer)

    def follow(self) -> bool:
        """Count a batch of a loader that the script iterates over itself; return whether another pass has begun."""
        begun, self._passes = self.watch.passes - self._passes, self.watch.passes
        another = False
        if begun:
            restored = self._restoring or {"consumed": 0, "position": {"ended": True}}
            continued = restored["position"] is None or not restored["position"]["ended"]
            another = self.number is not None and begun > continued  # of a pass whose batches were all used, none came
            self.consumed = restored["consumed"] if continued and not another else 0
        self.number, self._restoring = 0, None
        self.consumed += 1
        return another

    def end(self) -> None:
        """Note that the pass is over."""
        self.number = self._restoring = None

    def state(self, session: Session) -> Tree:
        """Return where the loader is; the outer loader's own count is the framework's business."""
        if self._restoring is not None:  # restored, and not yet begun
            return self._restoring
        if self.number is None:
            position = self.watch.position_between()
        else:
            position = self.watch.position(min(self.consumed * self.share, self.watch.fetched))
        return {"number": self.number, **session.loader_state(position, self.consumed, self.together)}

    def restore(self, state: Tree, session: Session, epoch: int, of_rank: Callable[[Any], Tree]) -> None:
        """Put the loader where :meth:`state` found it.

        Args:
            state: what it returned on this rank.
            session: the session.
            epoch: the epoch in which it was saved.
            of_rank: returns what it returned on another rank, from what that saved as its own.

        Raises:
            StateMismatch: it has another dataset, batch size or number of workers.
        """
        if state["position"] is None:
            self.watch.skip(state["consumed"] * self.share)
            self._restoring = state
            return
        consumed = session.restore_loader(
            self.watch,
            state,
            self.together,
            self.share,
            of_rank,
            epoch=epoch - (state["number"] is None),
            length=self.length,
        )
        if state["number"] is None:
            self.watch.restore_now(process=False)
        else:
            self._restoring = state | {"consumed": consumed}
            self.number, self.consumed = state["number"], consumed
