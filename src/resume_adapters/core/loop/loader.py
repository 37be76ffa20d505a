"""A training loader of a hand-written loop, with the torch ``DataLoader`` beneath it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from resume_adapters.core.dataloader.progress import LoaderPosition, batch_size
from resume_adapters.core.dataloader.sampler import LoaderRandomState, length_of
from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.loop.windows import other_length
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.loaders import LoaderRestorer, LoaderShape
from resume_adapters.core.session.records import LoaderState

_OVER = object()
"""In the place of a batch: the pass has none left."""


_SEED = 8
"""Bytes of the state of a generator that are the seed with which it began."""

_ENDS = 3
"""Passes of which is known where the script left them."""


@dataclass
class PassState(LoaderState):
    """Where a loader of a loop is.

    Attributes:
        number: the number of its pass within the epoch; ``None`` between two passes.
        numbers: the numbers of its passes in the last epoch that used it; ``None`` in a checkpoint of an older version.
        is_reused: it had more than one pass.
        made_in_loop: it did not exist yet when the loop began.
        left_at: the batches after which the script has left the last passes over it; 0 for one that it did not leave.
        alike: how many loaders of the process had its shape, and how many of these the seeds of its generators, too;
            itself included. ``None`` in a checkpoint of an older version.
        begun: the passes over it that the framework has counted; ``None`` where it counts none by itself.
    """

    number: int | None
    numbers: list[int] | None = None
    is_reused: bool = True
    made_in_loop: bool = False
    left_at: list[int] | None = None
    alike: list[int] | None = None
    begun: int | None = None

    def over(self) -> PassState:
        """Return the state once the epoch is over, with which the script has left its pass."""
        if self.position is None:
            return replace(self, number=None, numbers=[])
        return replace(self, number=None, position=replace(self.position, ended=True))


class LoaderForm(NamedTuple):
    """What says which of several loaders one is.

    Attributes:
        sizes: its number of workers, its batch size, and the length of its dataset.
        seeds: the seeds of its generators, by path.
    """

    sizes: tuple[int, int | None, int | None]
    seeds: dict[str, list[int]]

    @staticmethod
    def of(loader: Any) -> LoaderForm:
        """Return the form of a torch loader."""
        sizes = loader.num_workers, batch_size(loader), length_of(loader.dataset)
        return LoaderForm(sizes, _seeds(LoaderRandomState(loader).generators()))

    def fits(self, position: LoaderPosition) -> tuple[bool, bool]:
        """Return whether this is the form of a loader that was saved, and whether it has its seeds, too."""
        if self.sizes != (position.workers, position.batch_size, position.length):
            return False, False
        return True, self.seeds == _seeds(position.generators)


def _seeds(generators: Mapping[str, Any]) -> dict[str, list[int]]:
    return {path: state[:_SEED].tolist() for path, state in generators.items()}


def count_alike(others: Sequence[LoaderForm], position: LoaderPosition) -> list[int]:
    """Return how many loaders have the form of a position, and how many of these its seeds, its own one included."""
    fits = [(True, True), *(each.fits(position) for each in others)]
    return [sum(each) for each in zip(*fits, strict=True)]


class Batches(Iterator[Any]):
    """The batches that are left of a pass. Their ``len()`` is that of the whole pass, alike in each launch.

    Once a pass is over, to iterate them again begins the next one, as with a loader.

    Args:
        begin: yields the batches that are left of the next pass.
        loader: the loader, as the script has it.
        limit: batches of the whole pass at most.
    """

    def __init__(self, begin: Callable[[], Generator[Any, None, None]], loader: Any, limit: int | None) -> None:
        self._begin, self._left, self._loader, self._limit = begin, begin(), loader, limit

    def close(self) -> None:
        """Leave the pass."""
        self._left.close()

    def __iter__(self) -> Batches:
        if inspect.getgeneratorstate(self._left) == inspect.GEN_CLOSED:
            self._left = self._begin()
        return self

    def __next__(self) -> Any:
        return next(self._left)

    def __len__(self) -> int:
        return len(self._loader) if self._limit is None else min(len(self._loader), self._limit)


class LoopLoader:
    """A training loader as the loop sees it, and the torch ``DataLoader`` beneath.

    Args:
        prepared: what the loop iterates over.
        tracked: the tracked torch loader beneath.
        global_batch: samples in a batch of the loop, on all ranks together.
        fetches_per_batch: batches that the torch loader fetches on this rank for each batch of the loop: one, unless
            rank zero fetches for all.
        looks_ahead: what the loop iterates over fetches a batch ahead by itself.
        is_through: returns whether the last batch of the pass is handed out, where only what is iterated over knows.
        is_kept: the torch loader beneath was made for the loop, in the place of one for each pass.

    Attributes:
        consumed: batches of the loop that the script has been given in this pass.
        done: those of them that are used.
        number: the number of the open pass within the epoch; ``None`` between two passes.
        numbers: the numbers of its passes in the last epoch that used it.
        is_reused: it had more than one pass.
        follows: its first batch in this launch was taken within a body of the loop, but for no step of it, as for a
            validation: none of its batches waits for the next step. ``None`` before the first.
        is_paired: it is in the place of a loader of the launch before, or has begun a pass that none of them had.
    """

    def __init__(
        self,
        prepared: Any,
        tracked: TrackedLoader,
        global_batch: int,
        fetches_per_batch: int = 1,
        *,
        looks_ahead: bool = False,
        is_through: Callable[[], bool] = bool,
        is_kept: bool = False,
    ) -> None:
        self.prepared = prepared
        self.tracked = tracked
        self.is_kept = is_kept
        self.global_batch = global_batch
        self.fetches_per_batch = fetches_per_batch
        self.consumed = self.done = 0
        self.number: int | None = None
        self.numbers: list[int] = []
        self.is_reused = self.is_paired = False
        self.follows: bool | None = None
        self._epoch: int | None = None
        self._limit: int | None = None
        self._left_at: list[int] = []
        self._is_resumed = False
        self._restored: PassState | None = None
        self._passes = tracked.passes
        self._looks_ahead = looks_ahead
        self._is_through = is_through
        self._batches: Iterator[Any] = iter(())
        self._ahead: list[Any] = []

    def begin(self, number: int, epoch: int, limit: int | None = None) -> None:
        """Begin pass ``number`` of an epoch of this launch, or continue it where a checkpoint left it.

        Args:
            number: the number of the pass within the epoch.
            limit: batches after which the pass is over.
        """
        self.is_paired, self._limit = True, limit
        if not self.goes_on:
            self._restored = None
            self.is_reused = bool(self.numbers)
            self.numbers = sorted({*(self.numbers if epoch == self._epoch else []), number})
        self._epoch = epoch
        self.consumed = self.done = self._restored.consumed if self._restored else 0
        self._is_resumed = self.consumed > 0
        self.number = number

    @property
    def goes_on(self) -> bool:
        """Whether the checkpoint was taken within the pass that begins next."""
        return self._restored is not None and self._restored.number is not None

    @property
    def at_end(self) -> bool:
        """Whether the checkpoint was taken when every batch of this pass had been used."""
        return self._restored is not None and self.tracked.at_end

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of the pass, and count them."""
        self._restored = None
        self._batches, self._ahead = iter(self.prepared), []
        limit, usual = self._limit, self._usual_end()
        while limit is None or self.consumed < limit:
            batch = self._ahead.pop() if self._ahead else next(self._batches, _OVER)
            if batch is _OVER:
                break
            self.consumed += 1
            if usual is not None and self.consumed > usual:
                raise other_length(usual)
            yield batch
        self._add_end(0)

    @property
    def is_at_limit(self) -> bool:
        """Whether the pass has had as many batches as it may have."""
        return self._limit is not None and self.consumed >= self._limit

    @property
    def is_handed_out(self) -> bool:
        """Whether the script has been given every batch of the pass."""
        return self.end_of_pass is not None and self.consumed >= self.end_of_pass

    def _usual_end(self) -> int | None:
        """Return the batches after which the script has left every pass before; ``None`` where any may follow.

        A resumed pass that goes on there is refused.
        """
        ends = set(self._left_at)
        is_usual = self._is_resumed and len(self._left_at) > 1 and len(ends) == 1
        return min(ends) or None if is_usual else None

    def leave(self) -> None:
        """Remember that the script leaves the pass here."""
        self._add_end(self.consumed)

    def _add_end(self, batches: int) -> None:
        self._left_at = [*self._left_at, batches][-_ENDS:]

    def fetch_ahead(self) -> None:
        """Fetch the batch after this one, so that a resume from a save that follows has a batch to verify.

        Call it where the loop asks for that batch next: all random numbers are then drawn in the same order.
        """
        if not (self._looks_ahead or self._ahead or self.is_at_limit):
            self._ahead.append(next(self._batches, _OVER))

    @functools.cached_property
    def length(self) -> int | None:
        """Batches in a whole pass; ``None`` for a stream without a length."""
        return length_of(self.prepared)

    @property
    def end_of_pass(self) -> int | None:
        """Batches after which this pass is over; ``None`` where that is not known."""
        length, limit = self.length, self._limit
        if length is None or limit is None:
            return limit if length is None else length
        return min(length, limit)

    def hand_out(self, number: int) -> bool:
        """Count a batch of a pass that the script makes itself; return whether an epoch begins with it.

        Args:
            number: its number in what is left of the pass.
        """
        begins_epoch = False
        if number == 0:
            position = self._restored.position if self._restored else None
            continued = self._restored is not None and (position is None or not position.ended)
            begun, self._passes = self.tracked.passes - self._passes, self.tracked.passes
            begins_epoch = self.number is not None and begun > continued  # a pass whose batches were all used gave none
            is_rest = continued and not begins_epoch
            self.consumed = self._restored.consumed if self._restored and is_rest else 0
            self.number, self._restored = 0, None
        self.consumed += 1
        return begins_epoch

    def end(self) -> None:
        """End the pass."""
        self.number = self._restored = None
        self._batches = iter(())

    def reopen(self, number: int | None) -> None:
        """Open a pass again that the script has left early."""
        self.number = number

    def state(
        self,
        loaders: LoaderRestorer,
        process: Mapping[str, Any],
        begun: int | None,
        others: Sequence[LoaderForm],
        *,
        made_in_loop: bool,
    ) -> PassState:
        """Return where the loader is now.

        Args:
            loaders: restores the torch loader beneath.
            process: the current random state of the process, as a tree.
            begun: the passes over it that the framework has counted.
            others: the forms of the loaders beside it.
            made_in_loop: it did not exist yet when the loop began.
        """
        restored = self._restored
        if restored is not None:  # and not yet begun
            if restored.position is None or restored.alike is not None:
                return restored
            # From an older version's.
            return replace(restored, alike=count_alike(others, restored.position), begun=begun)
        if self.number is None or (self.done == self.consumed and (self.is_at_limit or self._is_through())):
            position = self.tracked.position_between(process)
        else:
            used = min(self.done * self.fetches_per_batch, self.tracked.fetched)
            position = self.tracked.position(used, process)
        return PassState(
            **vars(loaders.state(self.tracked, position, self.done, self.global_batch, self.fetches_per_batch)),
            number=self.number,
            numbers=self.numbers,
            is_reused=self.is_reused,
            made_in_loop=made_in_loop,
            left_at=self._left_at,
            alike=count_alike(others, position),
            begun=begun,
        )

    def restore(
        self,
        context: RestoreContext,
        loaders: LoaderRestorer,
        state: PassState,
        epoch: int,
        of_rank: Callable[[Any], PassState],
    ) -> None:
        """Restore the loader to where :meth:`state` found it.

        Args:
            loaders: restores the torch loader beneath.
            state: what :meth:`state` returned on this rank.
            epoch: the epoch in which it was saved.
            of_rank: returns what it returned on another rank, from the state of that rank.

        Raises:
            StateMismatch: it has a different dataset, batch size or number of workers.
        """
        self.is_paired, self._epoch = True, 0
        self.numbers, self.is_reused, self._left_at = state.numbers or [], state.is_reused, state.left_at or []
        if state.position is None:
            self.tracked.skip(state.consumed * self.fetches_per_batch)
            self._restored = state
            return
        if self.tracked.is_used_up(state.position):  # a save within the last batch does not know that the pass is over
            state = replace(state, position=replace(state.position, ended=True))
        is_over = state.number is None
        shape = LoaderShape(
            self.global_batch,
            epoch - is_over,
            self.length,
            fetches_per_batch=self.fetches_per_batch,
            is_kept=not is_over,
        )
        consumed = loaders.restore(context, self.tracked, state, shape, of_rank)
        if is_over:
            self.tracked.restore_now(process=False, without=loaders.places_beside(self.tracked))
        else:
            self._restored = replace(state, consumed=consumed)
            self.number, self.consumed, self.done = state.number, consumed, consumed
