"""Track where a torch ``DataLoader`` is, and resume it there without decoding what was already consumed.

:func:`track` tracks a loader in place: it stays the same object, draws the same random numbers and yields the same
batches, and its :class:`TrackedLoader` returns its position at any time. The position holds, besides the number of
batches, the random state at the few moments that shape the data: when the workers were started, when the sampler began
its pass, before each prefetched batch, and in each worker. With them restored, the rest of the pass is the same,
whatever draws random numbers: the sampler, ``__getitem__``, the collate function, a worker.

Map-style data is skipped in the sampler, so no sample is decoded; with workers, the round of batches in which the
position falls is fetched again (at most one batch for each worker), so that every worker fetches the batches it had
fetched. A stream can only be read again from the start of the pass. The digest of the last prefetched batch verifies
that the resumed data is the data of the uninterrupted run; without one, that of a batch which is fetched again does.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeAlias

from resume_adapters.core.dataloader.check_batch import makes_batches, why_others
from resume_adapters.core.dataloader.instrument import TrackedIterator, tracked_class
from resume_adapters.core.dataloader.next_pass import AlreadyMade, PrefetchReplay
from resume_adapters.core.dataloader.progress import (
    FetchLog,
    LoaderPosition,
    batch_size,
)
from resume_adapters.core.dataloader.sampler import (
    DealtOrder,
    LoaderRandomState,
    TrackedSampler,
    dealt_order,
    length_of,
    order_of,
    renamed,
    samplers_of,
)
from resume_adapters.core.dataloader.worker_rng import WorkerCollate, WorkerInit
from resume_adapters.core.observed.loaders import LoaderAttributes, content_of, rows_at_start
from resume_adapters.core.observed.walk import is_loader_iterator
from resume_adapters.core.patching import replaced
from resume_adapters.core.state import rng
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.errors import StateMismatch, UnsupportedSetting

OnSkip: TypeAlias = Callable[[], None]
ShowSkipping: TypeAlias = Callable[[range], Iterable[int]]


def track(
    loader: Any,
    generators: Mapping[str, GeneratorState] | None = None,
    *,
    on_skip: OnSkip | None = None,
    show_skipping: ShowSkipping | None = None,
) -> TrackedLoader:
    """Track a ``torch.utils.data.DataLoader`` (or a subclass) in place.

    Args:
        loader: the loader. If it is tracked already, its tracker is returned, with what is given here.
        generators: the generators that the user registered. A dataset may draw from them when it prefetches.
        on_skip: called before each batch that is fetched only to skip it.
        show_skipping: yields the numbers of the batches of a stream that are fetched only to skip them, and shows the
            progress.

    Raises:
        UnsupportedSetting: it is no DataLoader, or it does not keep the order of its batches.
    """
    from torch.utils.data import DataLoader

    tracked = getattr(loader, "resume_tracked", None)
    if not isinstance(tracked, TrackedLoader):
        if not isinstance(loader, DataLoader):
            raise UnsupportedSetting(
                f"the training data come from a {type(loader).__name__}; expected a torch.utils.data.DataLoader, whose "
                "position can be saved and restored. Let an IterableDataset yield its batches, and give that to a "
                "DataLoader(dataset, batch_size=None)"
            )
        if loader.num_workers > 0 and not getattr(loader, "in_order", True):
            raise UnsupportedSetting(
                "in_order=False lets workers overtake each other, so the order of the batches cannot be repeated: "
                "leave it at True"
            )
        _require_own_passes(loader)
        tracked = TrackedLoader(loader)
    tracked.attach(generators, on_skip, show_skipping)
    return tracked


def _require_own_passes(loader: Any) -> None:
    for name, value in vars(loader).items():
        if name != "_iterator" and is_loader_iterator(value):  # seam: torch 2.13
            raise UnsupportedSetting(
                f"{type(loader).__name__} takes the batches of all passes from one iterator, its attribute {name}, "
                "which had begun before the run: where it is nobody can save. Use a "
                "DataLoader(persistent_workers=True) instead: its workers outlive a pass, too"
            )


def _ignore() -> None:
    """No-op, where nobody asks to know of a skipped batch."""


def _show_nothing(batches: range) -> Iterable[int]:
    return batches


class TrackedLoader:
    """Tracks and restores the position of a DataLoader.

    Args:
        loader: the loader. It is changed in place.

    Attributes:
        loader: the loader.
        workers: its number of workers.
        passes: passes begun.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.workers: int = loader.num_workers
        self.passes = 0
        order = order_of(loader)
        parts = content_of(loader.dataset, loader.collate_fn)
        content = LoaderAttributes(parts)
        self._random_state = LoaderRandomState(loader, order)
        self._rows = rows_at_start({**samplers_of(loader), **parts}) or None
        self._log = FetchLog(loader, self._random_state, {"order": order, "content": content}, self._rows)
        self._made: AlreadyMade | None = getattr(loader, "resume_made", None)
        self._is_as_made = False
        self._begins_as_made = self._drop_made()
        self._begins_at: LoaderPosition | None = None  # at which the next pass begins; its own start else
        self._is_next_restored = self._is_next_empty = self._is_held = self._is_aside = False
        self._training: weakref.ref[TrackedIterator] | None = None
        self._replay: PrefetchReplay | None = None
        self._changed_seeds: Callable[[], str] = str
        self._to_compare: LoaderPosition | None = None
        self._sampler: TrackedSampler | None = None
        self._worker_init: WorkerInit | None = None
        self._on_skip: OnSkip = _ignore
        self._show_skipping: ShowSkipping = _show_nothing
        self._keep_functions()
        loader.__class__ = tracked_class(type(loader))  # type: ignore[arg-type]  # a class is hashable
        loader.resume_tracked = self

    def _drop_made(self) -> bool:
        """Drop the iterator of the first pass if the loader has made it already, so that a tracked one is made.

        A ``StatefulDataLoader`` makes it when its state is first asked for. An adapter may have kept that moment as
        ``resume_made``, an :class:`AlreadyMade`: the new iterator then yields the batches of the old one.

        Raises:
            UnsupportedSetting: nobody has kept it, so that other batches would follow.
        """
        if not getattr(self.loader, "_initial_iter_for_state_dict", False):  # seam: torchdata 0.11
            return False
        if self._made is None:
            raise UnsupportedSetting(
                "a StatefulDataLoader has begun its first pass already, as accelerator.prepare() or state_dict() lets "
                "it do, and with which random state is not known: import resume_adapters.accelerate at the top of the "
                "script, before prepare(), or ask for no state_dict() of the loader before the run begins"
            )
        self.loader._iterator, self.loader._initial_iter_for_state_dict = None, False  # seam: torchdata 0.11
        return True

    def attach(
        self,
        generators: Mapping[str, GeneratorState] | None,
        on_skip: OnSkip | None,
        show_skipping: ShowSkipping | None,
    ) -> None:
        """Set the generators and the callables of :func:`track`; ``None`` keeps what is set."""
        if generators is not None:
            self._log.capture_generators(generators)
        self._on_skip = on_skip or self._on_skip
        self._show_skipping = show_skipping or self._show_skipping

    def release(self) -> None:
        """Forget what :meth:`attach` set, and a position that was restored and no pass has begun with."""
        self._log.capture_generators({})
        self._on_skip, self._show_skipping = _ignore, _show_nothing
        self._replay = self._to_compare = None
        if self._begins_at is not None:
            self._end_workers()
            self._begin_next_at(None)
        self._is_held = False

    def _end_workers(self) -> None:
        """End workers that outlived a pass of an earlier run in this process; they have a state of their own."""
        self.loader._iterator = None  # seam: torch 2.13
        self._log.workers.restore(None, {})

    # ---- Where the loader is

    @property
    def fetched(self) -> int:
        """Batches fetched in this pass, counted from the start of its epoch."""
        return self._log.fetched

    @property
    def exhausted(self) -> bool:
        """Whether this pass has ended."""
        return self._log.exhausted

    def look(self) -> None:
        """Find what has changed on samplers, dataset or collate function, before a save."""
        self._log.look()

    @property
    def missing(self) -> dict[str, str]:
        """What changes on samplers, dataset or collate function and is not captured: paths, with names of types."""
        return self._log.missing

    @property
    def has_running_workers(self) -> bool:
        """Whether its workers outlive a pass, and are running or are started with the next one in their state."""
        return self._log.workers.are_running

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of the loader; ``None`` where it does not say."""
        return batch_size(self.loader)

    @property
    def is_elastic(self) -> bool:
        """Whether :meth:`restore_resharded` can restore a position of another topology."""
        return self._log.elastic is not None

    def shared_order(self, global_batch: int, fetches_per_batch: int) -> DealtOrder | None:
        """Return the order of samples that all ranks take theirs of by turns; ``None`` where they share none.

        Args:
            global_batch: samples in a batch of the training loop, on all ranks together.
            fetches_per_batch: batches that this rank fetches for each of these; 0 where another rank fetches for it.
        """
        found = None if self._log.is_stream or self._is_as_made else dealt_order(self.loader)
        taken = found.turns * (self.batch_size or 0) * fetches_per_batch if found else 0
        return found if taken == global_batch or not fetches_per_batch else None

    @property
    def draws_order(self) -> bool:
        """Whether the order is drawn from the random state of the process, or no pass has shown where from."""
        return self._sampler is None or self._sampler.draws

    def position(self, consumed: int, process: Mapping[str, Any] | None = None) -> LoaderPosition:
        """Return the position after ``consumed`` batches of this pass.

        Args:
            consumed: batches that completed steps have used; at most those fetched.
            process: the current random state of the process, where it is captured already.

        Raises:
            UnsupportedSetting: the batches that were used cannot be drawn again.
        """
        if self._sampler is not None and self._sampler.is_mixed:
            raise UnsupportedSetting(
                f"{self._sampler.name} draws each batch by itself from the random state of the process, from which the "
                "training draws too, so that a resume within a pass would draw other batches. Give it a generator of "
                "its own (an attribute of it, or DataLoader(generator=...) where it takes that one), or save at the "
                "end of each epoch alone"
            )
        process = rng.capture() if process is None else process
        sampler = self._sampler.began_with() if self._sampler is not None else None
        return self._log.position(consumed, process, sampler, as_made=self._is_as_made)

    def position_between(self, process: Mapping[str, Any] | None = None) -> LoaderPosition:
        """Return the position between two passes.

        Args:
            process: the current random state of the process, where it is captured already.
        """
        return self._log.position_between(rng.capture() if process is None else process)

    def differences(self, position: LoaderPosition) -> list[str]:
        """Return, in words, how the topology differs from that of a position."""
        compared = {
            "batch size": (position.batch_size, self.batch_size),
        }
        if not (position.plain and self._log.may_have_other_workers):
            compared = {"num_workers": (position.workers, self.workers), **compared}
        return [f"{name} {saved}, this launch has {here}" for name, (saved, here) in compared.items() if saved != here]

    def other_rows(self, position: LoaderPosition) -> list[str]:
        """Return the rows of numbers that were others when the launch began of which a position is, by their path."""
        here = self._rows or {}
        return [name for name, digest in (position.rows or {}).items() if here.get(name, digest) != digest]

    def left(self, position: LoaderPosition, global_batch: int) -> int | None:
        """Return the batches that are left of the pass after a position, whatever the batch size when it was saved.

        Args:
            global_batch: samples in a batch, over all ranks.

        Returns:
            ``None`` for a stream, which does not know its length.
        """
        assert self._log.elastic is not None and position.elastic is not None, "only an elastic loader knows"
        return self._log.elastic.left(position.elastic, global_batch)

    # ---- Restoring it

    @property
    def restored(self) -> bool:
        """Whether the loader has reached the position given to :meth:`restore`, and its random state is restored."""
        if self._begins_at is not None and not self._is_next_restored:
            return False
        return self._replay is None or self._replay.is_over

    @property
    def at_end(self) -> bool:
        """Whether the position given to :meth:`restore` is the end of a pass."""
        return self._begins_at is not None and self._begins_at.ended

    def restore(
        self, position: LoaderPosition, changed_seeds: Callable[[], str] = str, *, compares: bool = False
    ) -> None:
        """Resume at a position with the next pass over the loader.

        In the middle of a pass the first batches restore the random state. At its end there is nothing left to fetch:
        call :meth:`restore_now` when the next pass is about to begin.

        Args:
            changed_seeds: returns which seeds were different when it was saved, in words, for the error that the data
                differ.
            compares: fetch a batch of the saved pass again, where none follows that had been fetched ahead.

        Raises:
            StateMismatch: the dataset, the batch size or the number of workers differs.
            NotRestored: the batch that is fetched again is another one.
        """
        differences = self.differences(position)
        here = length_of(self.loader.dataset)
        if not differences and position.length != here:
            differences = [f"a dataset of length {position.length}, this launch has {here}"]
        if differences:
            raise StateMismatch(
                f"the checkpoint was saved with {'; '.join(differences)}: the same batches cannot follow. Launch as "
                "before, or start another run directory"
            )
        if position.workers != self.workers:  # the same batches follow, and nobody has a random state of its own
            position = replace(
                position, workers=self.workers, start=position.consumed, spawn=None, rng_before=[], pool={}, check=None
            )
        self._replay, self._changed_seeds = None, changed_seeds
        self._to_compare = position if compares and position.check is not None and not position.prefetched else None
        if self._to_compare is not None and not self.workers:
            self._compare(position)
        self._log.check.kept = position.check
        self._end_workers()
        self._begin_next_at(position)

    def _compare(self, position: LoaderPosition) -> None:
        """Fetch a batch again that the launch had fetched which saved.

        Raises:
            NotRestored: it is another one.
        """
        assert position.check is not None, "there is one"
        position.check.require_same(self._log.fetch_again(position.check), self._why_others(position))

    def _why_others(self, position: LoaderPosition) -> str:
        """Return in words why the data may be others than when a position was saved."""
        return why_others(self._changed_seeds(), self.other_rows(position), position.word_hash)

    def is_used_up(self, position: LoaderPosition) -> bool:
        """Return whether a position is behind the last sample of an elastic order: it resumes in the next epoch."""
        return (
            self._log.elastic is not None
            and position.elastic is not None
            and self._log.elastic.left(position.elastic, 1) == 0
        )

    def restore_resharded(
        self,
        position: LoaderPosition,
        positions_of_all_ranks: Sequence[LoaderPosition],
        consumed: int,
        changed_seeds: Callable[[], str] = str,
        *,
        compares: bool = False,
    ) -> None:
        """Resume at a position of another topology with the next pass over the loader.

        Args:
            position: the position of a rank, whose random state is restored.
            positions_of_all_ranks: the position of every rank; the order is that of the first.
            consumed: the batches of this loader that correspond to the position.
            changed_seeds: as for :meth:`restore`, and so is ``compares``.

        Raises:
            StateMismatch: the dataset differs.
            NotRestored: as :meth:`restore` does.
        """
        elastic, first = self._log.elastic, positions_of_all_ranks[0]
        saved = [each.elastic for each in positions_of_all_ranks if each.elastic is not None]
        began_with = None if saved or first.sampler is None else first.sampler
        order = samplers_of(self.loader)
        self.restore(
            replace(
                position,
                consumed=consumed,
                start=consumed,
                prefetched=0,
                spawn=None,
                sampler=began_with and {moment: renamed(state, order) for moment, state in began_with.items()},
                rng_before=[],
                pool={},
                proof=None,
                generators=first.generators,
                attributes=renamed(position.attributes, order, "order"),
                elastic=elastic.reshard(saved) if elastic is not None and saved else None,
                check=position.check if position.workers == self.workers else None,
                workers=self.workers,
                batch_size=self.batch_size,
            ),
            changed_seeds,
            compares=compares,
        )

    def skip(self, consumed: int) -> None:
        """Begin the next pass after ``consumed`` batches, with the current random state (a foreign checkpoint)."""
        position = replace(
            self.position_between(),
            ended=False,
            consumed=consumed,
            start=0 if self._log.is_stream else self._log.replay_start(consumed),
            spawn=None,
            pool={},
            step=None,
            elastic=None,  # the foreign checkpoint does not say which epoch the framework will set
        )
        self._replay = None
        self._end_workers()
        self._begin_next_at(position)

    @property
    def places(self) -> set[Any]:
        """Where the loader's generators are, and what is known to change on its objects."""
        return self._log.places() | self._random_state.places()

    def restore_now(self, *, process: bool = True, content: bool = True, without: Set[Any] = frozenset()) -> None:
        """At the end of a pass, restore the random state and the workers that outlive the pass.

        Args:
            process: restore the random state of the process too, not only what belongs to the loader.
            content: also what has changed on the dataset and the collate function of the process.
            without: the :attr:`places` of loaders that have gone on since, which share them.
        """
        position = self._begins_at
        assert position is not None and position.ended, "in the middle of a pass its batches restore the random state"
        self._random_state.restore_generators(position.generators, without)
        self._log.restore_attributes(position, content=content, without=without)
        self._seek(position)
        if process:
            assert position.step is not None, "a position that was saved"
            rng.restore_with(position.step, self._log.generators)
        self._log.workers.restore(position.spawn, position.pool)
        self._begin_next_at(position if self._log.workers.are_running else None, is_restored=True)

    def resume_at_end(self) -> None:
        """Resume at the end of a pass: the next pass yields nothing, and restores the loader."""
        assert self.at_end, "the position to resume at is not the end of a pass"
        self._is_next_empty = True

    def hold(self) -> None:
        """Return an empty iterator once; Lightning asks for a pass before it knows whether it needs one."""
        self._is_held = True

    def restore_random_state(self, position: LoaderPosition) -> None:
        """Restore the random state saved with a position, of the process and of the loader."""
        self._random_state.restore_generators(position.generators)
        assert position.step is not None, "a position that was saved"
        rng.restore_with(position.step, self._log.generators)

    def keep_random_state(self) -> None:
        """Go on with the random state that the process has now: another pass has gone on, and more was drawn."""
        if self._begins_at is not None and self._begins_at.step is not None:
            self._begins_at = replace(self._begins_at, step={**self._begins_at.step, "process": rng.capture()})

    def _begin_next_at(self, position: LoaderPosition | None, *, is_restored: bool = False) -> None:
        """Begin the next pass at a position: in the middle of one, or after its end, with what is left to restore."""
        self._begins_at, self._is_next_restored = position, is_restored
        self._begins_as_made = self._is_next_empty = False

    # ---- One pass

    def _keep_functions(self) -> None:
        """Wrap ``worker_init_fn`` and ``collate_fn``, also those that the script has set since."""
        loader = self.loader
        if self.workers and not isinstance(loader.collate_fn, WorkerCollate):
            loader.collate_fn = WorkerCollate(loader.collate_fn)
        if self.workers and (self._worker_init is None or loader.worker_init_fn is not self._worker_init):
            self._worker_init = WorkerInit(
                loader.worker_init_fn, loader.collate_fn.collate, makes_batches=makes_batches(loader)
            )
            loader.worker_init_fn = self._worker_init

    def iterate(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass; ``make`` makes the loader's own iterator.

        A pass without gradients within one that trains is an evaluation on the training data: nothing of it counts.
        """
        import torch

        self._keep_functions()
        is_training = torch.is_grad_enabled()
        running = self._training() if self._training is not None else None
        if running is not None and not (is_training or self.exhausted or self._log.workers.are_kept):
            return self._aside(make)
        if self._is_next_empty and not self._is_held:
            self.restore_now()
            return iter(())
        self._log.begin()
        if self._is_held:
            self._is_held = False
            return iter(())
        position, self._is_as_made = self._begins_at, self._begins_as_made
        self._begin_next_at(None)
        self.passes += 1
        if self._sampler is not None:
            self._sampler.forget()
        if self._log.elastic:
            self._log.elastic.begin(0)
        with self._comparing():
            inner = self._begin(position, make)
        if self._log.elastic and self.workers:
            self._log.elastic.workers_started()
        begun = TrackedIterator(self._log.fetch if self._replay is None else self._next, inner)
        self._training = weakref.ref(begun) if is_training else None
        return begun

    def _aside(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Make the loader's own iterator, of which nothing is noted."""
        loader = self.loader
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self, "_is_aside", True))
            if self._worker_init is not None:
                stack.enter_context(replaced(loader, "collate_fn", loader.collate_fn.collate))
                stack.enter_context(replaced(loader, "worker_init_fn", self._worker_init.init))
            return make()

    @contextlib.contextmanager
    def _comparing(self) -> Iterator[None]:
        """Return the context in which the first worker that starts fetches a batch again, if that is due."""
        position, self._to_compare = self._to_compare, None
        # At the end of a pass the script may have told the dataset of the next one by now.
        if position is None or self._worker_init is None or (position.ended and self._log.content()):
            yield
            return
        assert position.check is not None, "there is one"
        with replaced(self._worker_init, "check", (position.check, self._why_others(position))):
            yield

    def _begin(self, position: LoaderPosition | None, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if position is not None:
            return self._begin_with_restored_workers(make) if position.ended else self._resume(make, position)
        if self._is_as_made:
            return self._begin_as_made(make)
        workers = self._log.workers
        if workers.are_running:
            self._log.look()
        else:
            workers.restore(self._spawn_state(), {})
            self._log.keep()
        workers.begin_pass()
        return make()

    def _spawn_state(self) -> dict[str, Any]:
        """Return what workers start with that are started now: each has a copy of the dataset as it is."""
        content = self._log.content()
        return {**self._random_state.capture(), **({"content": content} if content else {})}

    def _begin_as_made(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        assert self._made is not None
        now = self._random_state.capture()
        self._log.workers.restore(self._made.random_state, {})
        inner = self._start_workers(make)
        self._random_state.restore(now)
        return inner

    def _begin_with_restored_workers(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass for which the uninterrupted run only reset its workers, with workers in their state."""
        now, content = self._random_state.capture(), self._log.content()
        sampler = None if self._log.is_stream else self._tracked_sampler()
        if sampler is not None:
            sampler.resume_at(0, {"iter": now, "first": None})
        inner = self._start_workers(make)
        self._random_state.restore(now if sampler is None else sampler.after_first or now)
        self._log.restore_content(content)
        return inner

    def _resume(self, make: Callable[[], Iterator[Any]], position: LoaderPosition) -> Iterator[Any]:
        replay = self._replay = PrefetchReplay(position, self._log, lambda: self._why_others(position))
        self._is_as_made = position.as_made
        self._log.workers.restore(position.spawn or self._spawn_state(), position.pool)
        self._log.begin(position.start)
        self._log.check.kept = position.check
        was_sought = self._seek(position)
        if not self._log.is_stream:
            skip = 0 if was_sought else position.start
            sampler = self._tracked_sampler()
            sampler.resume_at(skip, position.sampler, is_mid_pass=position.start > 0)
            # Where nothing was prefetched the sampler draws its order last, and with it come its attributes of then.
            sampler.on_resumed = lambda: self._log.restore_attributes(position) if replay.is_over else None
        self._log.restore_shared(position)
        inner = self._start_workers(make)
        skipped = range(position.consumed - position.start)
        for _ in self._show_skipping(skipped) if self._log.is_stream and not was_sought else skipped:
            self._on_skip()
            self._log.fetch(inner)
        replay.begin()
        return inner

    def _seek(self, position: LoaderPosition) -> bool:
        """Set an elastic loader to the start of the position, in constant time; return whether it is set."""
        if self._log.elastic is None or position.elastic is None:
            return False
        self._log.elastic.begin(position.start)
        self._log.elastic.seek(position.elastic)
        return True

    def _start_workers(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Make the loader's own iterator with the random state with which its workers were started, and theirs."""
        workers = self._log.workers
        workers.begin_pass()
        self._log.start_workers()
        with contextlib.ExitStack() as stack:
            for holder, sampler in self._made.samplers if self._made and self._is_as_made else ():
                stack.enter_context(replaced(holder, "sampler", sampler))
            if self._worker_init is not None:
                stack.enter_context(self._worker_init.restoring(workers.at_start))
            return make()

    def _next(self, inner: Iterator[Any]) -> Any:
        replay = self._replay
        if replay is None or replay.is_over:
            batch = self._log.fetch(inner)
        else:
            replay.prepare()
            batch = self._log.fetch(inner)
            replay.count(batch)
        return batch

    # ---- The sampler

    def sampler(self, inner: Any) -> Any:
        """Return the tracked index sampler of the loader."""
        if self._log.is_stream or self._is_aside:
            return inner
        if self._sampler is None:
            self._sampler = TrackedSampler(self._random_state, inner)
            self._sampler.on_number, self._sampler.number = self._log.note, self._log.check.number
        return self._sampler

    def _tracked_sampler(self) -> TrackedSampler:
        sampler = self.loader._index_sampler  # seam: torch 2.13, overridden in tracked_class
        assert isinstance(sampler, TrackedSampler)
        return sampler
