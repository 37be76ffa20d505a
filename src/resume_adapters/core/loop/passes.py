"""The passes of a hand-written loop over its training loaders: which are open, and what is left of each."""

from __future__ import annotations

from typing import Any

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.loop.framework import LoopFramework
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.session.rescale import SEVERAL_LOADERS
from resume_adapters.core.session.session import Session
from resume_adapters.errors import UnsupportedSetting

Tree = dict[str, Any]


class EpochPasses:
    """The passes of a loop, numbered within their epoch in the order in which the script begins them.

    Args:
        framework: the framework's side of the loop.
        session: the session.
    """

    def __init__(self, framework: LoopFramework, session: Session) -> None:
        self._framework = framework
        self._session = session
        self._feeds: list[LoopLoader] = []
        self._open: list[LoopLoader] = []
        self._left: list[tuple[LoopLoader, int | None]] = []
        self._followed: LoopLoader | None = None
        self._begun = 0
        self._saved: list[Tree] = []
        self._saved_begun = 0
        self._saved_epoch = 0

    # ---- One pass

    def begin(self, loader: Any) -> LoopLoader | None:
        """Begin the next pass of the epoch, over a loader; return ``None`` if a checkpoint was taken after that pass.

        Raises:
            StateMismatch: the loader has another dataset, batch size or number of workers than when it was saved.
        """
        feed = self._feed(loader)
        number, self._begun = self._begun, self._begun + 1
        if number < self._saved_begun and not feed.continues(number):
            return None
        self._left = []
        feed.begin(number)
        self._open.append(feed)
        return feed

    def skip(self, feed: LoopLoader) -> None:
        """Leave out a pass of which every batch was used before the checkpoint."""
        feed.watch.restore_now()
        self._framework.skip_pass(feed.outer)

    def begins_round(self, feed: LoopLoader) -> bool:
        """Return whether this loader, of those that are iterated together, is the first.

        Raises:
            UnsupportedSetting: its pass was begun in an epoch that is over.
        """
        if feed not in self._open:
            raise UnsupportedSetting(
                "a pass over a loader goes on in the next epoch, where a relaunch would begin another: ask for "
                "run.batches(loader) anew in each epoch"
            )
        return self._open[0] is feed

    def leave(self) -> None:
        """Note which passes are open when the script leaves one early."""
        self._left = self._left or [(each, each.number) for each in self._open]

    def reopen(self) -> None:
        """Open again what was left when the script leaves its epoch too: a longer run goes on in the middle of it."""
        for feed, number in self._left:
            feed.number = number
            self._open.append(feed)

    def end(self, feed: LoopLoader) -> None:
        """Note that a pass is over."""
        feed.end()
        if feed in self._open:
            self._open.remove(feed)

    def end_epoch(self) -> None:
        """Number the passes anew."""
        self._begun = self._saved_begun = 0
        self._open, self._left = [], []

    @property
    def are_open(self) -> bool:
        """Whether the script is within a pass."""
        return bool(self._open)

    @property
    def fraction(self) -> float:
        """What of the epoch is done, by the first loader that is under way; 0.0 where its length is not known."""
        feed = self._followed or next(iter(self._open), None)
        return feed.consumed / feed.length if feed is not None and feed.length else 0.0

    # ---- Where the loop cannot be wrapped

    def follow(self, loader: Any) -> None:
        """Let the script iterate over a loader itself; its first pass yields what is left.

        Raises:
            StateMismatch: the loader has another dataset, batch size or number of workers than when it was saved.
        """
        self._followed = self._feed(loader)
        if self._followed.at_end:
            self._followed.watch.end_pass()
            self._framework.skip_pass(loader)

    def count_followed(self) -> bool:
        """Count a batch of the loader that the script iterates over itself; return whether another pass has begun."""
        return self._followed is not None and self._followed.follow()

    # ---- In a checkpoint

    def state(self) -> Tree:
        """Return how far each loader is, and which pass of the epoch is the next."""
        unseen = self._saved[len(self._feeds) :]  # loaders that this launch has not come to yet
        return {"begun": self._begun, "loaders": [*(feed.state(self._session) for feed in self._feeds), *unseen]}

    def restore(self, saved: Tree) -> int:
        """Put back what :meth:`state` returned, each loader when the script comes to it.

        Args:
            saved: the record that holds it, with the epoch in which it was saved.

        Returns:
            The batches that are done of the first pass that was open.
        """
        self._saved, self._saved_begun, self._saved_epoch = saved["loaders"], saved["begun"], saved["epoch"]
        if len(self._saved) > 1:
            self._session.batch_change.no_horizon = SEVERAL_LOADERS
        return next((int(feed["consumed"]) for feed in self._saved if feed["number"] is not None), 0)

    def adopt(self, consumed: int) -> None:
        """Let the first pass begin after some batches, of which no more is known."""
        self._saved = [{"number": 0, "consumed": consumed, "position": None}]

    def missing(self) -> list[PartEntry]:
        """Return an entry for each generator of a loader's dataset that is no part of the state."""
        found = []
        for feed in self._feeds:
            beneath = feed.watch.loader
            places = {"dataset": beneath.dataset, "collate_fn": beneath.collate_fn}
            found += self._session.missing_generators(places, self._framework.registers)
        return found

    def _feed(self, loader: Any) -> LoopLoader:
        for known in self._feeds:
            if known.outer is loader:
                return known
        feed = self._framework.feed(loader, self._session)
        if len(self._feeds) < len(self._saved):
            index = len(self._feeds)
            feed.restore(self._saved[index], self._session, self._saved_epoch, lambda own: own["loaders"][index])
            self._session.move_schedules()
            change = self._session.batch_change
            if change.begun:
                self._framework.begin_within_window(change.begun)
                change.begun = 0
        self._feeds.append(feed)
        return feed
