"""The training loaders of a session: tracked, saved, and restored on the same or a different topology.

This is the one place that knows of a different topology of loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from resume_adapters.core.dataloader.check_batch import SEED_WHAT_IS_DRAWN
from resume_adapters.core.dataloader.progress import LoaderPosition
from resume_adapters.core.dataloader.sampler import DealtOrder
from resume_adapters.core.dataloader.tracked import TrackedLoader, track
from resume_adapters.core.log import logger
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.messages import log_skipping
from resume_adapters.core.session.records import LoaderState
from resume_adapters.core.session.rescale import Rescale
from resume_adapters.core.state.rng import GeneratorState, forked


@dataclass(frozen=True)
class LoaderShape:
    """How a loader is read in this launch.

    Attributes:
        global_batch: samples in a batch of the training loop, on all ranks together.
        fetches_per_batch: batches of the torch loader on this rank for each batch of the training loop.
        epoch: the epoch, from 0, of the pass that was under way or had ended.
        length: batches of the training loop in a pass; ``None`` where that is not known.
        is_kept: it is the loader of the pass that was saved, and the script has told its dataset of no later one.
    """

    global_batch: int
    epoch: int
    length: int | None
    fetches_per_batch: int = 1
    is_kept: bool = True


SHARE_AN_ORDER = (
    "To be able to change this, let all ranks share one order from the start of a run: that of a DistributedSampler, "
    "of Accelerate with use_seedable_sampler=True, or of resume_adapters.data"
)
"""The remedy where the ranks share no order."""


class LoaderRestorer:
    """Tracks the training loaders, and restores their positions.

    Args:
        generators: the generators that the user registered.
        rescale: what follows from a different global batch size.
        changed_seeds: returns in words which seeds were different when the checkpoint was saved.
        on_track: is called with each torch loader when it is tracked.

    Attributes:
        topology_changes: settings that were different when the checkpoint was saved, in words.
    """

    def __init__(
        self,
        run: ResumableRun,
        generators: Mapping[str, GeneratorState],
        rescale: Rescale,
        changed_seeds: Callable[[], str],
        on_track: Callable[[Any], None] | None = None,
    ) -> None:
        self.topology_changes: list[str] = []
        self._run = run
        self._generators = generators
        self._rescale = rescale
        self._changed_seeds = changed_seeds
        self._on_track = on_track
        self._tracked: list[TrackedLoader] = []

    def track(self, loader: Any) -> TrackedLoader:
        """Track a loader in place, together with the generators among the user's parts."""
        show = log_skipping if self._run.ranks.rank == 0 else None
        tracked = track(loader, self._generators, on_skip=self._run.skip_batch, show_skipping=show)
        if not any(tracked is known for known in self._tracked):
            self._tracked.append(tracked)
            if self._on_track is not None:
                self._on_track(loader)
        return tracked

    def places_beside(self, tracked: TrackedLoader) -> set[Any]:
        """Return the :attr:`~TrackedLoader.places` of the other loaders that have begun a pass in this launch."""
        return set().union(*(each.places for each in self._tracked if each is not tracked and each.passes))

    def look(self) -> None:
        """Find what has changed on the loaders' datasets and collate functions; before a save."""
        for loader in self._tracked:
            loader.look()

    def missing(self) -> list[str]:
        """Return in words what changes on the loaders' samplers, datasets and collate functions and is not captured."""
        return [line for loader in self._tracked for line in missing_lines(loader.missing)]

    def close(self) -> None:
        """Detach the loaders from the run. They stay tracked: their workers may be running."""
        while self._tracked:
            self._tracked.pop().release()

    def state(
        self,
        loader: TrackedLoader,
        position: LoaderPosition,
        consumed: int,
        global_batch: int,
        fetches_per_batch: int = 1,
    ) -> LoaderState:
        """Return where a loader is.

        Args:
            position: its position.
            consumed: batches of the training loop that are done in this pass.
            global_batch: samples in such a batch, on all ranks together.
            fetches_per_batch: as for :class:`LoaderShape`.
        """
        order = loader.shared_order(global_batch, fetches_per_batch)
        named = replace(position, order=order.name if order else None, draws=loader.draws_order)
        return LoaderState(named, consumed, global_batch, self._rescale.samples(global_batch))

    def add_topology_changes(self, differences: list[str]) -> None:
        """Remember settings that were different when the checkpoint was saved."""
        self.topology_changes = list(dict.fromkeys([*self.topology_changes, *differences]))

    def is_rebatched(self, saved: LoaderState, global_batch: int) -> bool:
        """Return whether an optimizer step had a different number of samples than it has now."""
        return saved.samples != self._rescale.samples(global_batch)

    def restore(
        self,
        context: RestoreContext,
        loader: TrackedLoader,
        saved: LoaderState,
        shape: LoaderShape,
        of_rank: Callable[[Any], LoaderState],
    ) -> int:
        """Restore a loader's position, on whatever topology the checkpoint was saved.

        Args:
            saved: its state on this rank.
            shape: how it is read now.
            of_rank: returns its state on another rank, from the state of that rank.

        Returns:
            The batches of the training loop, of the size that they have now, that are done in this pass.

        Raises:
            StateMismatch: an optimizer step would have a different number of samples, the data are not the same, or
                their order depends on the topology.
        """
        position = saved.position
        assert position is not None, "a position was saved"
        self.add_topology_changes(loader.differences(position))
        former = self._run.previous
        has_finished = former is not None and former.state is RunState.FINISHED  # what may follow is another run
        compares = context.verify and shape.is_kept and not has_finished
        if not self.topology_changes:
            if position.workers != loader.workers:
                self._log(
                    "Saved with num_workers %d, this launch has %d: the data draw no random numbers, so the same "
                    "batches follow.",
                    position.workers,
                    loader.workers,
                )
            loader.restore(position, changed_seeds=self._changed_seeds, compares=compares)
            consumed = saved.consumed
        else:
            consumed = self._restore_on_another_topology(context, loader, saved, shape, of_rank, compares=compares)
        if other := loader.other_rows(position):
            logger.warning(
                "%s has other numbers than when this run was saved, so other samples follow than if it had never "
                "been killed. %s",
                " and ".join(other),
                SEED_WHAT_IS_DRAWN,
            )
        return consumed

    def _restore_on_another_topology(
        self,
        context: RestoreContext,
        loader: TrackedLoader,
        saved: LoaderState,
        shape: LoaderShape,
        of_rank: Callable[[Any], LoaderState],
        *,
        compares: bool,
    ) -> int:
        states = [of_rank(each) for each in context.all_rank_states()]
        position, of_first = saved.position, states[0].position
        assert position is not None and of_first is not None, "a position was saved"
        order = self._require_order(context, loader, of_first, shape)

        def done() -> int | None:
            if order is not None:
                return self._done(context, saved, shape, order)
            left = loader.left(position, shape.global_batch)
            return None if left is None or shape.length is None else max(0, shape.length - left)

        if self.is_rebatched(saved, shape.global_batch):
            consumed = self._resume_by_samples(context, saved, shape, done)
        else:
            consumed = self._resume_by_steps(context, saved, shape, order)
        keeps_order = order is not None and not context.has_other_ranks  # of several orders each rank has its own
        positions = [position] if keeps_order else [each.position for each in states if each.position]
        mine = self.of_this_rank(context, position)
        fetched = consumed * shape.fetches_per_batch
        loader.restore_resharded(mine, positions, fetched, self._changed_seeds, compares=compares)
        return consumed

    def _require_order(
        self, context: RestoreContext, loader: TrackedLoader, position: LoaderPosition, shape: LoaderShape
    ) -> DealtOrder | None:
        """Return the order that all ranks shared, and share now; ``None`` for data that are elastic.

        Args:
            position: that of the first rank.

        Raises:
            StateMismatch: there is none.
        """
        if loader.is_elastic and position.elastic is not None:
            return None
        order = loader.shared_order(shape.global_batch, shape.fetches_per_batch)
        obstacle = ""
        if all(change.startswith("num_workers") for change in self.topology_changes):
            obstacle = "what the workers draw at random depends on it, so resuming would change the batches"
        elif position.order is None or order is None:
            obstacle = f"the order of the batches depends on it, so resuming would change the batches. {SHARE_AN_ORDER}"
        elif position.order != order.name:
            obstacle = f"the samples had the order of {position.order}, now that of {order.name}. {SHARE_AN_ORDER}"
        elif position.draws and context.has_other_ranks:
            obstacle = f"each process draws the order of {order.name} from its own random state. {SHARE_AN_ORDER}"
        if obstacle:
            raise context.mismatch(self.topology_changes, obstacle)
        return order

    def _resume_by_steps(
        self, context: RestoreContext, saved: LoaderState, shape: LoaderShape, order: DealtOrder | None
    ) -> int:
        self._log(
            "Saved with %s: each optimizer step has %d samples, as before. What the processes draw at random "
            "(augmentation, dropout) is not what they would have drawn.",
            "; ".join(self.topology_changes),
            self._rescale.samples(shape.global_batch),
        )
        self._rescale.resume_by_steps(context.step)
        if order is not None:
            return self._done(context, saved, shape, order)
        return saved.consumed * saved.global_batch // shape.global_batch

    def _resume_by_samples(
        self, context: RestoreContext, saved: LoaderState, shape: LoaderShape, done: Callable[[], int | None]
    ) -> int:
        """Find where in this launch's steps the position is; return the batches that are done in its pass."""
        before, now = saved.samples, self._rescale.samples(shape.global_batch)
        consumed = done() if self._rescale.keeps_samples and shape.length is not None else None
        if obstacle := self._rescale.obstacle(before, now, consumed, context.ranks.world_size):
            raise context.mismatch(self.topology_changes, obstacle)
        assert consumed is not None and shape.length is not None
        steps = self._rescale.resume_by_samples(context.step, shape.epoch, consumed, shape.length)
        self._log(
            "Saved with %s: an optimizer step had %d samples and has %d now. Resuming by samples: its %d steps "
            "count as %d steps of the new size.",
            "; ".join(self.topology_changes),
            before,
            now,
            context.step,
            steps,
        )
        return consumed

    def _done(self, context: RestoreContext, saved: LoaderState, shape: LoaderShape, order: DealtOrder) -> int:
        """Return the batches of the training loop, of the size that they have now, that are done in the pass.

        Raises:
            StateMismatch: they are no whole number.
        """
        assert saved.position is not None, "a position was saved"
        used, size = saved.consumed * saved.global_batch, shape.global_batch
        if (saved.position.ended or used >= order.size) and shape.length is not None:
            return shape.length
        if used % size:
            nearest = min((each for each in range(1, used + 1) if used % each == 0), key=lambda each: abs(each - size))
            raise context.mismatch(
                self.topology_changes,
                f"{used} samples of the pass are used, no whole number of batches of {size} samples, which all ranks "
                f"have together now; {nearest} samples would do",
            )
        return used // size

    def _log(self, message: str, *arguments: object) -> None:
        if self._run.ranks.rank == 0:
            logger.info(message, *arguments)

    def of_this_rank(self, context: RestoreContext, position: LoaderPosition) -> LoaderPosition:
        """Return a saved position with random state that no other rank has, where this rank had saved none."""
        rank = self._run.ranks.rank
        if rank < context.saved_by:
            return position
        assert position.step is not None, "the random state was saved"
        return replace(position, step={**position.step, "process": forked(position.step["process"], rank)})


def missing_lines(missing: Mapping[str, str]) -> list[str]:
    """Return in words what changes on a loader's objects and is not captured: paths, with the names of the types."""
    return [
        f"{path}, a {kind}, changes when batches are read or in training: after a resume it starts over. A cache "
        "may; what shapes a batch or the order must be a row of numbers, data of at most 1,000 values, or follow from "
        "an index or from the random state"
        for path, kind in missing.items()
    ]
