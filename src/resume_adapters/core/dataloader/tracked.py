"""Where a torch ``DataLoader`` is, and how to put one back there without decoding what was already used.

:func:`watch` makes a loader watched in place: it stays the same object, draws the same random numbers and yields the
same batches, and its :class:`LoaderWatch` can say its position at any time. The position holds, besides the number of
batches, the random state at the few moments that shape the data: when the workers were seeded, when the sampler began
its pass, before each batch that was fetched but not yet used, and in each worker. Restoring them makes the rest of the
pass come out the same, whatever draws random numbers: the sampler, ``__getitem__``, the collator, a worker.

Map-style data is skipped in the sampler, so no sample is decoded; with workers, the round of batches in which the
position falls is fetched again (at most one batch a worker), so that every worker does the batches it did. Streams can
only be read again from the start of the pass. The digest of the batch that was fetched ahead proves that the data that
comes out is the data that would have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from resume_adapters.core.dataloader.instrument import TrackedIterator, WorkerCollate, WorkerInit, tracked_class
from resume_adapters.core.dataloader.prefetch import PrefetchReplay
from resume_adapters.core.dataloader.progress import LoaderPosition, length_of
from resume_adapters.core.dataloader.sampler import TrackedSampler
from resume_adapters.core.state import rng
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.errors import StateMismatch, UnsupportedSetting

Tree = dict[str, Any]


def track(loader: Any, generators: Mapping[str, GeneratorState] | None = None) -> TrackedLoader:
    """Watch a ``torch.utils.data.DataLoader`` (or a subclass), in place. Watching it again returns the same watch.

    Args:
        loader: the loader.
        generators: the generators that the user registered. A dataset may draw from them while it fetches ahead.

    Raises:
        UnsupportedSetting: it is no DataLoader, or it does not keep the order of its batches.
    """
    from torch.utils.data import DataLoader

    if isinstance(getattr(loader, "resume_watch", None), TrackedLoader):
        watched: TrackedLoader = loader.resume_watch
        return watched
    if not isinstance(loader, DataLoader):
        raise UnsupportedSetting(
            f"the training data come from a {type(loader).__name__}; expected a torch.utils.data.DataLoader, whose "
            "position can be saved and restored"
        )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        raise UnsupportedSetting(
            "in_order=False lets workers overtake each other, so the order of the batches cannot be repeated: leave it "
            "at True"
        )
    return TrackedLoader(loader, generators or {})


class TrackedLoader(LoaderPosition):
    """Knows how far a loader is, and puts it back.

    Attributes:
        restored: the position given to :meth:`restore` has been reached, and the random state put back.
        on_skip: called before each batch that is read only to get past it.
        show_skipping: shows how far it is with the batches of a stream that are read only to get past them.
    """

    def __init__(self, loader: Any, generators: Mapping[str, GeneratorState]) -> None:
        super().__init__(loader, generators)
        self.restored = True
        self.on_skip: Callable[[], None] = lambda: None
        self.show_skipping: Callable[[range], Iterable[int]] = lambda batches: batches
        self._held = False
        self._pending: Tree | None = None
        self._is_empty = False
        self._replay: PrefetchReplay | None = None
        self._init: WorkerInit | None = None
        self._made = self._forget_initial_iterator()
        if self.workers:
            loader.collate_fn = WorkerCollate(loader.collate_fn)
            self._init = loader.worker_init_fn = WorkerInit(loader.worker_init_fn)
        loader.__class__ = tracked_class(type(loader))  # type: ignore[arg-type]  # a class is hashable
        loader.resume_watch = self

    def _forget_initial_iterator(self) -> Tree | None:
        """Let a loader that already has the iterator of its first pass make it anew, watched.

        A ``StatefulDataLoader`` makes it when it is first asked for its state. Made at the random state of that moment,
        which an adapter may have noted as ``resume_made``, the new one gives the batches of the old.
        """
        if not getattr(self.loader, "_initial_iter_for_state_dict", False):  # seam: torchdata 0.11
            return None
        self.loader._iterator, self.loader._initial_iter_for_state_dict = None, False  # seam: torchdata 0.11
        return getattr(self.loader, "resume_made", None)

    # ---- Putting it back

    def restore(self, position: Tree) -> None:
        """Continue from a position with the next pass over the loader.

        In the middle of a pass the random state comes back with the first batches. After the end of one there is
        nothing left to fetch: call :meth:`restore_now` where the next pass is about to begin.

        Raises:
            StateMismatch: the loader has another dataset, batch size or number of workers than when it was saved.
        """
        odd = self.differences(position)
        if odd or position["length"] != length_of(self.loader.dataset):
            odd = odd or [f"a dataset of length {position['length']}, this launch has {length_of(self.loader.dataset)}"]
            raise StateMismatch(
                f"the checkpoint was saved with {'; '.join(odd)}: the same batches cannot follow. Launch as before, or "
                "start another run directory"
            )
        self._pending, self._made = position, None
        self.restored = False

    def adopt(self, position: Tree, everyone: Sequence[Tree], consumed: int) -> None:
        """Continue from a position of another topology with the next pass over the loader.

        Args:
            position: what a rank had saved, of which the random state is taken.
            everyone: what every rank had saved.
            consumed: batches of this loader that the position stands for.

        Raises:
            StateMismatch: the loader has another dataset than when it was saved.
        """
        assert self._elastic is not None, "only an elastic loader can"
        saved = [each["elastic"] for each in everyone]
        empty: Tree = {"ahead": 0, "spawn": None, "sampler": None, "before": [], "pool": {}, "proof": None}
        here = {"consumed": consumed, "start": consumed, "elastic": self._elastic.moved(saved)}
        self.restore(position | {**empty, **here, **self._identity(), "length": position["length"]})

    def skip(self, consumed: int) -> None:
        """Begin the next pass after ``consumed`` batches, with no random state to put back (a foreign checkpoint)."""
        start = self._replay_start(consumed)
        self._pending = {**self._end_of_pass(), "ended": False, "consumed": consumed, "start": start, "pool": {}}
        self._pending.update(spawn=None, step=None)
        self._made = None
        self.restored = False

    @property
    def at_end(self) -> bool:
        """Whether the position given to :meth:`restore` is the end of a pass."""
        return self._pending is not None and bool(self._pending["ended"])

    def restore_now(self, *, process: bool = True) -> None:
        """After the end of a pass, put back the random state, and what of the loader outlives the pass.

        Args:
            process: put the random state of the process back too, not only what belongs to the loader.
        """
        position = self._pending
        assert position is not None and position["ended"], "in the middle of a pass the batches bring the state back"
        self._moment.restore_generators(position["generators"])
        self._seek(position)
        if process:
            rng.restore_with(position["step"], self._registered)
        self._spawn, self._pool = position["spawn"], dict(position["pool"])
        if not self._keeps_workers() or self._spawn is None:
            self._pending = None
        self.restored = True

    def end_pass(self) -> None:
        """Let the next pass be the rest of one of which every batch was used: empty, and after it as it was."""
        self._is_empty = True

    def hold(self) -> None:
        """Give the next pass no batch, and begin it not: it is asked for too early, and will be asked for again."""
        self._held = True

    def restore_random_state(self, position: Tree) -> None:
        """Put back the random state of the moment at which a position was saved, of the process and of the loader."""
        self._moment.restore_generators(position["generators"])
        rng.restore_with(position["step"], self._registered)

    # ---- One pass

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass; ``make`` makes the loader's own iterator."""
        if self._is_empty:
            self._is_empty = False
            self.restore_now()
            return iter(())
        self._recent.clear()
        self._last_batch = None
        self.fetched, self.exhausted, self._begun = 0, False, 0
        if self._held:
            self._held = False
            return iter(())
        position, self._pending = self._pending, None
        self.passes += 1
        if self._sampler is not None:
            self._sampler.forget()
        if self._elastic:
            self._elastic.begin(0)
        if position is None:
            inner = self._begin(make)
        elif position["ended"]:
            inner = self._begin_with_former_workers(make)
        else:
            inner = self._continue(make, position)
        if self._elastic and self.workers:
            self._elastic.started()
        return TrackedIterator(self._next, inner)

    def _begin(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if self._made is not None:
            return self._begin_as_made(make)
        if not (self._keeps_workers() and self._spawn is not None):
            self._spawn = self._moment.capture()
            self._pool = {}
        self._pool_at_start = dict(self._pool)
        return make()

    def _begin_as_made(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        now = self._moment.capture()
        assert self._made is not None
        self._moment.restore(self._made)
        self._spawn, self._made = self._made, None
        inner = make()
        self._moment.restore(now)
        return inner

    def _begin_with_former_workers(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass for which the uninterrupted run only reset the workers it had."""
        self._pool_at_start = dict(self._pool)
        now = self._moment.capture()
        sampler = None if self.is_stream else self._watched_sampler()
        if sampler is not None:
            sampler.resume_at(0, {"iter": now, "first": None})
        inner = self._start_workers(make)
        self._moment.restore(now if sampler is None else sampler.after_first or now)
        return inner

    def _continue(self, make: Callable[[], Iterator[Any]], position: Tree) -> Iterator[Any]:
        self._pool_at_start = dict(position["pool"])
        self._pool = dict(position["pool"])
        self._spawn = position["spawn"] or self._moment.capture()
        self.fetched = self._begun = position["start"]
        self._seek(position)
        if not self.is_stream:
            skip = 0 if self._elastic else position["start"]
            self._watched_sampler().resume_at(skip, position["sampler"], within=position["start"] > 0)
        inner = self._start_workers(make)
        passed_over = range(position["consumed"] - position["start"])
        for _ in self.show_skipping(passed_over) if self.is_stream and not self._elastic else passed_over:
            self.on_skip()
            self._fetch(inner)
        self._replay = PrefetchReplay(position, self._registered)
        self.restored = self._replay.is_over
        return inner

    def _seek(self, position: Tree) -> None:
        """Set an elastic loader to where the position begins, in constant time."""
        if self._elastic and position["elastic"]:
            self._elastic.begin(position["start"])
            self._elastic.seek(position["elastic"])

    def _start_workers(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        assert self._spawn is not None
        self._moment.restore(self._spawn)
        if self._init is None:
            return make()
        self._init.states = dict(self._pool_at_start)
        try:
            return make()
        finally:
            self._init.states = {}

    def _next(self, inner: Iterator[Any]) -> Any:
        if self._replay is None or self._replay.is_over:
            return self._fetch(inner)
        self._replay.prepare()
        batch = self._fetch(inner)
        self._replay.take(batch)
        self.restored = self._replay.is_over
        return batch

    # ---- The sampler and the generators

    def sampler(self, inner: Any) -> Any:
        """Return the watched index sampler of the loader."""
        if self.is_stream:
            return inner
        if self._sampler is None:
            self._sampler = TrackedSampler(self._moment, inner)
        return self._sampler

    def _watched_sampler(self) -> TrackedSampler:
        sampler = self.loader._index_sampler  # seam: torch 2.13, overridden in watched_class
        assert isinstance(sampler, TrackedSampler)
        return sampler
