"""The training loaders of a call of ``fit()``: watched, saved, and set where they were on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from resume_adapters.core.dataloader.progress import length_of
from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.session.rescale import SEVERAL_LOADERS
from resume_adapters.core.session.session import Session
from resume_adapters.errors import StateMismatch
from resume_adapters.lightning.loops import IN_EPOCH, Loops, set_epoch


class TrainingLoaders(Session):
    """What a :class:`~resume_adapters.lightning.session.FitSession` knows of its loaders.

    Attributes:
        loops: the trainer's loops.
        watches: a watch for each training loader, once they are made.
    """

    loops: Loops
    watches: Sequence[TrackedLoader] = ()
    _consumed = 0

    def watch_loaders(self, loaders: list[Any]) -> None:
        """Watch the training loaders, and set them where they were.

        Raises:
            StateMismatch: there were more of them, or fewer, when the checkpoint was saved.
            UnsupportedSetting: one of them is no torch DataLoader.
        """
        self.watches = [self.watch(each) for each in loaders]
        if self.own is None:
            return
        saved = self.own["loaders"]
        if len(loaders) > 1:
            self.batch_change.no_horizon = SEVERAL_LOADERS
        if len(saved) != len(loaders):
            raise StateMismatch(
                f"{len(saved)} training loaders were saved, this launch has {len(loaders)}: launch with as many, "
                "or start another run directory"
            )
        for number, watch in enumerate(self.watches):
            if saved[number]["position"]["ended"]:
                watch.hold()  # Lightning begins a pass before it knows whether it needs one
            else:
                set_epoch(watch.loader, self.own["epoch"])
                self._restore_loader(number)

    def _restore_loader(self, number: int) -> None:
        watch = self.watches[number]
        self._consumed = self.restore_loader(
            watch,
            self.own["loaders"][number],
            self.together(watch),
            1,
            lambda own: own["loaders"][number],
            epoch=self.own["epoch"] - (self.own["moment"] not in IN_EPOCH),
            length=length_of(watch.loader),
        )

    def together(self, watch: TrackedLoader) -> int:
        """Return the samples in a batch of a loader, on all ranks together; 0 where the loader does not say."""
        return (watch.batch_size or 0) * self.run.ranks.world_size

    def restore_random_state_of_loaders(self) -> None:
        """Put back the random state, and what is left of the loaders whose pass has ended."""
        for number, watch in enumerate(self.watches):
            position = self.own["loaders"][number]["position"]
            if position["ended"]:
                self._restore_loader(number)
                watch.restore_now()
            else:
                watch.restore_random_state(self.of_this_rank(position))

    def progress_here(self, saved: Any) -> Any:
        """Return the counters of the loops with what counts batches in batches of this launch.

        Raises:
            StateMismatch: the batches that are done are no whole number of them, or of loaders of different sizes.
        """
        before, here = self.own["loaders"], [self.together(watch) for watch in self.watches]
        sizes = {Fraction(each["together"], now) for each, now in zip(before, here, strict=True) if now}
        if sizes <= {1}:
            return saved
        size = max(sizes)
        rebatched = any(self.is_rebatched(each, now) for each, now in zip(before, here, strict=True))
        done = self._consumed if rebatched else self.loops.batches_done(saved) * size
        at_end = all(each["position"]["ended"] for each in before)
        if len(sizes) > 1 or (done % 1 and not at_end) or (rebatched and self.own["gradients"]):
            raise self._mismatch(
                self.moved,
                "it is in the middle of a batch or of an accumulation of this launch, or its loaders are not divided "
                "alike",
            )
        return self.loops.in_batches(saved, size, None if at_end else int(done))

    def loader_states(self, *, between: bool) -> list[dict[str, Any]]:
        """Return where each loader is.

        Args:
            between: between two passes, not within one.
        """
        return [self._state_of(watch, between) for watch in self.watches]

    def _state_of(self, watch: TrackedLoader, between: bool) -> dict[str, Any]:
        # A loader at its end, where another goes on, gave nothing to the batch that was fetched ahead.
        used = watch.fetched - (0 if watch.exhausted else self.loops.ahead)
        position = watch.position_between() if between else watch.position(used)
        return self.loader_state(position, used, self.together(watch))
