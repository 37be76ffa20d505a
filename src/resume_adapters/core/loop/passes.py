"""The passes of a hand-written loop over its training loaders: which are open, and what is left of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.loop.framework import LoopFramework
from resume_adapters.core.loop.loader import LoopLoader, PassState
from resume_adapters.core.session.rescale import SEVERAL_LOADERS
from resume_adapters.core.session.session import Session
from resume_adapters.errors import UnsupportedSetting


class EpochPasses:
    """The passes of a loop, numbered within their epoch in the order in which the script begins them.

    Args:
        framework: the framework's side of the loop.
        session: the session.

    Attributes:
        begun: passes of this epoch that the script has begun.
    """

    def __init__(self, framework: LoopFramework, session: Session) -> None:
        self.begun = 0
        self._framework = framework
        self._session = session
        self._loaders: list[LoopLoader] = []
        self._open: list[LoopLoader] = []
        self._left: list[tuple[LoopLoader, int | None]] = []
        self._external: LoopLoader | None = None
        self._saved: Sequence[PassState] = ()
        self._saved_begun = 0
        self._saved_epoch = 0

    # ---- One pass

    def begin(self, prepared: Any) -> LoopLoader | None:
        """Begin the next pass of the epoch over a loader; return ``None`` if a checkpoint was taken after that pass.

        Raises:
            StateMismatch: the loader has a different dataset, batch size or number of workers than when it was saved.
        """
        loader = self._loader(prepared)
        number, self.begun = self.begun, self.begun + 1
        if number < self._saved_begun and not loader.continues(number):
            return None
        self._left = []
        loader.begin(number)
        self._open.append(loader)
        return loader

    def skip(self, loader: LoopLoader) -> None:
        """Leave out a pass of which every batch was used before the checkpoint."""
        loader.tracked.restore_now()
        self._framework.skip_pass(loader.prepared)

    def begins_round(self, loader: LoopLoader) -> bool:
        """Return whether this loader, of those that are iterated together, is the first.

        Raises:
            UnsupportedSetting: its pass was begun in an epoch that is over.
        """
        if loader not in self._open:
            raise UnsupportedSetting(
                "a pass over a loader goes on in the next epoch, where a relaunch would begin a new one: call "
                "run.batches(loader) in each epoch"
            )
        return self._open[0] is loader

    def leave(self) -> None:
        """Remember which passes are open when the script leaves one early."""
        self._left = self._left or [(each, each.number) for each in self._open]

    def reopen(self) -> None:
        """Open the passes again that the script left with their epoch: a longer run goes on in the middle of it."""
        for loader, number in self._left:
            loader.reopen(number)
            self._open.append(loader)

    def end(self, loader: LoopLoader) -> None:
        """End a pass."""
        loader.end()
        if loader in self._open:
            self._open.remove(loader)

    def end_epoch(self) -> None:
        """Begin to number the passes of the next epoch."""
        self.begun = self._saved_begun = 0
        self._open, self._left = [], []

    @property
    def are_open(self) -> bool:
        """Whether the script is within a pass."""
        return bool(self._open)

    @property
    def fraction(self) -> float:
        """The fraction of the epoch that is done, by the first open loader; 0.0 where its length is not known."""
        loader = self._external or next(iter(self._open), None)
        return loader.consumed / loader.length if loader is not None and loader.length else 0.0

    # ---- Where the loop cannot be wrapped

    def track_external(self, prepared: Any) -> None:
        """Let the script iterate over a loader itself; its first pass yields what is left.

        Raises:
            StateMismatch: the loader has a different dataset, batch size or number of workers than when it was saved.
        """
        self._external = self._loader(prepared)
        if self._session.trace is not None:
            self._external.tracked.keep_digests()
        if self._external.at_end:
            self._external.tracked.resume_at_end()
            self._framework.skip_pass(prepared)

    def count_external(self) -> bool:
        """Count a batch of the loader that the script iterates over itself; return whether the next pass has begun."""
        return self._external is not None and self._external.count_external()

    def take_external_digests(self) -> list[str]:
        """Return the digests of the batch that was counted last of such a loader; none in a wrapped loop."""
        loader = self._external
        return [] if loader is None else loader.tracked.take_digests(loader.fetches_per_batch)

    # ---- In a checkpoint

    def states(self) -> list[PassState]:
        """Return where each loader is, with those that this launch has not come to yet."""
        unseen = self._saved[len(self._loaders) :]
        return [*(loader.state(self._session.loaders) for loader in self._loaders), *unseen]

    def restore(self, loaders: Sequence[PassState], begun: int, epoch: int) -> int:
        """Restore the passes, each loader when the script comes to it.

        Args:
            loaders: what :meth:`states` returned.
            begun: passes of the epoch that had begun.
            epoch: the epoch in which it was saved.

        Returns:
            The batches that are done of the first pass that was open.
        """
        self._saved, self._saved_begun, self._saved_epoch = loaders, begun, epoch
        if len(loaders) > 1:
            self._session.rescale.forbid(SEVERAL_LOADERS)
        return next((each.consumed for each in loaders if each.number is not None), 0)

    def restore_foreign(self, consumed: int) -> None:
        """Let the first pass begin after some batches; nothing more is known."""
        self._saved = [PassState(position=None, consumed=consumed, global_batch=0, samples=0, number=0)]

    def missing(self) -> list[PartEntry]:
        """Return an entry for each generator of a loader's dataset that is no part of the state."""
        found = []
        for loader in self._loaders:
            beneath = loader.tracked.loader
            places = {"dataset": beneath.dataset, "collate_fn": beneath.collate_fn}
            found += self._session.missing_generators(places)
        return found

    def _loader(self, prepared: Any) -> LoopLoader:
        for known in self._loaders:
            if known.prepared is prepared:
                return known
        loader = self._framework.track(prepared, self._session)
        if len(self._loaders) < len(self._saved):
            self._restore(loader, len(self._loaders))
        self._loaders.append(loader)
        return loader

    def _restore(self, loader: LoopLoader, index: int) -> None:
        session = self._session
        assert session.context is not None, "a loader was saved"
        loader.restore(
            session.context,
            session.loaders,
            self._saved[index],
            self._saved_epoch,
            lambda state: state.loaders[index],
        )
        session.move_schedules()
        begun = session.rescale.take_begun()
        if begun:
            self._framework.skip_micro_batches(begun)
