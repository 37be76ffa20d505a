"""The loaders of a ``fit``: tracked, captured, and restored on any number of ranks; what changes on validation data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from resume_adapters.core.dataloader.evaluated import EvaluationLoader, EvaluationLoaders, datasets_of
from resume_adapters.core.dataloader.sampler import length_of
from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.loaders import LoaderShape
from resume_adapters.core.session.records import LoaderState
from resume_adapters.core.session.rescale import SEVERAL_LOADERS
from resume_adapters.core.session.session import Session
from resume_adapters.errors import StateMismatch
from resume_adapters.lightning.loops import LoopProgress, Loops, SavePoint, set_epoch
from resume_adapters.lightning.records import FitRankState


class FitData:
    """The training loaders of a ``fit``."""

    def __init__(self, loops: Loops, session: Session) -> None:
        self._loops = loops
        self._session = session
        self._loaders: Sequence[TrackedLoader] = ()
        self._consumed = 0
        self._held: dict[int, int] = {}

    # ---- Saving

    def states(self, point: SavePoint) -> list[LoaderState]:
        """Capture where each loader is."""
        return [self._state_of(number, loader, point) for number, loader in enumerate(self._loaders)]

    def _state_of(self, number: int, loader: TrackedLoader, point: SavePoint) -> LoaderState:
        context = self._session.context
        if point.in_epoch and self._held.get(number) == loader.passes and context is not None:
            saved = context.rank_state.loaders[number]  # restored to the end of its pass, it has begun no other
            position = replace(loader.position_between(), consumed=saved.position.consumed, start=saved.position.start)
            return self._session.loaders.state(loader, position, saved.consumed, self._global_batch(loader))
        # A loader at its end, where another goes on, gave nothing to the batch that was fetched ahead.
        used = loader.fetched - (0 if loader.exhausted else self._loops.fetched_ahead)
        position = loader.position(used) if point.in_epoch else loader.position_between()
        return self._session.loaders.state(loader, position, used, self._global_batch(loader))

    def _global_batch(self, loader: TrackedLoader) -> int:
        """Return the samples in a batch of a loader, on all ranks together; 0 where the loader does not say."""
        session = self._session
        return (loader.batch_size or 0) * (session.run.ranks.world_size // session.framework.about.layout.sharing)

    # ---- Restoring

    def track(self, loaders: list[Any]) -> None:
        """Track the training loaders, and restore their positions.

        Raises:
            StateMismatch: there were more of them, or fewer, when the checkpoint was saved.
            UnsupportedSetting: one of them is no torch DataLoader.
        """
        self.track_new(loaders)
        context = self._session.context
        if context is None or context.rank_state is None:
            return
        saved: FitRankState = context.rank_state
        if len(loaders) > 1:
            self._session.rescale.forbid(SEVERAL_LOADERS)
        if len(saved.loaders) != len(loaders):
            raise StateMismatch(
                f"{len(saved.loaders)} training loaders were saved, this launch has {len(loaders)}: launch with as "
                "many, or start another run directory"
            )
        for number, loader in enumerate(self._loaders):
            if _has_ended(saved.loaders[number]):
                loader.hold()  # Lightning begins a pass before it knows whether it needs one
                self._held[number] = loader.passes
            else:
                set_epoch(loader.loader, saved.epoch)
                self._restore(context, number)

    def track_new(self, loaders: list[Any]) -> None:
        """Track training loaders that begin at their start.

        Raises:
            UnsupportedSetting: one of them is no torch DataLoader.
        """
        self._loaders = [self._session.loaders.track(each) for each in loaders]
        self._held = {}

    def _restore(self, context: RestoreContext, number: int) -> None:
        loader, saved = self._loaders[number], context.rank_state
        shape = LoaderShape(
            self._global_batch(loader), saved.epoch - (not saved.save_point.in_epoch), length_of(loader.loader)
        )
        self._consumed = self._session.loaders.restore(
            context, loader, saved.loaders[number], shape, lambda state: state.loaders[number]
        )

    def restore_random_state(self, context: RestoreContext) -> None:
        """Restore the random state, and what is left of the loaders whose pass has ended."""
        for number, loader in enumerate(self._loaders):
            saved = context.rank_state.loaders[number]
            if _has_ended(saved):
                self._restore(context, number)
                loader.restore_now()
            else:
                loader.restore_random_state(self._session.loaders.of_this_rank(context, saved.position))

    def restore_cycles(self, context: RestoreContext) -> None:
        """Restore which loaders had begun a further pass within the epoch: with ``max_size_cycle`` it ends by that."""
        state: FitRankState = context.rank_state
        if state.save_point.in_epoch:
            done = self._loops.batches_done(state.progress)
            self._loops.restore_cycles([each.consumed < done for each in state.loaders])

    def progress_here(self, context: RestoreContext) -> LoopProgress:
        """Return the saved counters of the loops, with those that count batches in batches of this launch.

        Raises:
            StateMismatch: the batches that are done are no whole number of those of this launch, or the loaders'
                batch sizes changed differently.
        """
        state: FitRankState = context.rank_state
        here = [self._global_batch(each) for each in self._loaders]
        sizes = {Fraction(each.global_batch, now) for each, now in zip(state.loaders, here, strict=True) if now}
        if sizes <= {1}:
            return state.progress
        size, loaders = max(sizes), self._session.loaders
        is_rebatched = any(loaders.is_rebatched(each, now) for each, now in zip(state.loaders, here, strict=True))
        done = self._consumed if is_rebatched else self._loops.batches_done(state.progress) * size
        at_end = all(_has_ended(each) for each in state.loaders)
        if len(sizes) > 1 or (done % 1 and not at_end) or (is_rebatched and state.gradients):
            raise context.mismatch(
                loaders.topology_changes,
                "it is in the middle of a batch or of an accumulation of this launch, or its loaders are not divided "
                "alike",
            )
        return self._loops.in_batches(state.progress, size, None if at_end else int(done))


def _has_ended(saved: LoaderState) -> bool:
    """Return whether every batch of a loader's pass was used."""
    assert saved.position is not None, "every loader of a fit has a position"
    return bool(saved.position.ended)


class ValidationData:
    """The datasets, samplers, generators and lasting workers of the validation loaders."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._held = EvaluationLoaders()
        self.look, self.workers, self.close = self._held.data.look, self._held.workers.capture, self._held.workers.close

    @property
    def missing(self) -> dict[str, str]:
        """What has changed and is not captured: paths, with the names of the types."""
        return self._held.data.missing

    def watch(self) -> None:
        """Compare from now on, where the loaders are made and were not watched. Call it before they are read."""
        trained = (
            [data for each in self._loops.loaders for data in datasets_of(each)] if self._loops.have_loaders else []
        )
        for number, each in enumerate(self._loops.validation_loaders()):
            self._held.watch(_NAME.format(number), each, trained)

    def capture(self) -> list[list[Any]]:
        """Return what is known to change, of each loader."""
        return list(self._held.data.capture().values())

    def running(self, known: Sequence[EvaluationLoader]) -> list[bool]:
        """Return for each loader whether its workers outlive a validation and are running; ``known``: those that do."""
        names = {each.name for each in known}
        loaders = self._loops.validation_loaders()
        return [_NAME.format(number) in names for number in range(len(loaders))]

    def restore(self, saved: list[list[Any]], running: list[bool], workers: Sequence[EvaluationLoader] | None) -> None:
        """Restore what :meth:`capture` and ``workers`` returned.

        Args:
            running: of each loader, whether it had persistent workers that were running.
        """
        if any(saved) or any(running):
            self._held.data.restore({_NAME.format(number): each for number, each in enumerate(saved)})
            self._held.workers.restore([_NAME.format(number) for number, each in enumerate(running) if each], workers)
            self._loops.make_validation_loaders()
            self.watch()


_NAME = "val_dataloaders[{}]"
