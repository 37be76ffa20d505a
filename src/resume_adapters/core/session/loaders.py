"""The training loaders of a session: tracked, saved, and restored on the same or a different topology.

This is the one place that knows of a different topology of loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from resume_adapters.core.dataloader.check_batch import SEED_WHAT_IS_DRAWN
from resume_adapters.core.dataloader.progress import LoaderPosition
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

    def missing(self) -> list[str]:
        """Return in words what changes on the loaders' samplers, datasets and collate functions and is not captured."""
        return [line for loader in self._tracked for line in missing_lines(loader.missing)]

    def close(self) -> None:
        """Detach the loaders from the run. They stay tracked: their workers may be running."""
        while self._tracked:
            self._tracked.pop().release()

    def state(self, position: LoaderPosition | None, consumed: int, global_batch: int) -> LoaderState:
        """Return where a loader is.

        Args:
            position: the position of the torch loader; ``None`` where it is not known yet.
            consumed: batches of the training loop that are done in this pass.
            global_batch: samples in such a batch, on all ranks together.
        """
        return LoaderState(position, consumed, global_batch, self._rescale.samples(global_batch))

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
        if not self.topology_changes:
            if position.workers != loader.workers:
                self._log(
                    "Saved with num_workers %d, this launch has %d: the data draw no random numbers, so the same "
                    "batches follow.",
                    position.workers,
                    loader.workers,
                )
            former = self._run.previous
            has_finished = former is not None and former.state is RunState.FINISHED  # what may follow is another run
            compares = context.verify and shape.is_kept and not has_finished
            loader.restore(position, changed_seeds=self._changed_seeds, compares=compares)
            if other := loader.other_rows(position):
                logger.warning(
                    "%s has other numbers than when this run was saved, so other samples follow than if it had never "
                    "been killed. %s",
                    " and ".join(other),
                    SEED_WHAT_IS_DRAWN,
                )
            return saved.consumed
        if not loader.is_elastic or position.elastic is None:
            raise context.mismatch(
                self.topology_changes,
                "the order of the batches depends on it, so resuming would change the batches. Use "
                "resume_adapters.data from the start of a run to be able to change this",
            )
        if self.is_rebatched(saved, shape.global_batch):
            consumed = self._resume_by_samples(context, loader, saved, shape)
        else:
            consumed = self._resume_by_steps(context, saved, shape)
        positions = [each.position for each in map(of_rank, context.all_rank_states())]
        mine = self.of_this_rank(context, position)
        loader.restore_resharded(mine, [each for each in positions if each], consumed * shape.fetches_per_batch)
        return consumed

    def _resume_by_steps(self, context: RestoreContext, saved: LoaderState, shape: LoaderShape) -> int:
        now = self._rescale.samples(shape.global_batch)
        self._log(
            "Saved with %s: each optimizer step has %d samples, as before.", "; ".join(self.topology_changes), now
        )
        self._rescale.resume_by_steps(context.step)
        return saved.consumed * saved.global_batch // shape.global_batch

    def _resume_by_samples(
        self, context: RestoreContext, loader: TrackedLoader, saved: LoaderState, shape: LoaderShape
    ) -> int:
        """Find where in this launch's steps the position is; return the batches that are done in its pass."""
        assert saved.position is not None
        before, now = saved.samples, self._rescale.samples(shape.global_batch)
        left = loader.left(saved.position, shape.global_batch) if self._rescale.keeps_samples else None
        if obstacle := self._rescale.obstacle(before, now, left, shape.length):
            raise context.mismatch(self.topology_changes, obstacle)
        assert left is not None and shape.length is not None
        consumed = max(0, shape.length - left)
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
