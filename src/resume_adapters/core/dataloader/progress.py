"""How far a torch ``DataLoader`` is: what is noted as it fetches, and the position that is made of it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from resume_adapters.core.dataloader import elastic
from resume_adapters.core.dataloader.sampler import LoaderRandomState, TrackedSampler
from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.rng import GeneratorState

Tree = dict[str, Any]

_KEPT = 64
"""Least number of fetched batches whose random state is remembered; no loader of the four frameworks fetches further
ahead of its consumer."""


class LoaderPosition:
    """Knows how far a loader is.

    Args:
        loader: the loader.
        generators: the generators that the user registered.

    Attributes:
        passes: passes begun.
        fetched: batches fetched in this pass.
        exhausted: this pass has ended.
    """

    def __init__(self, loader: Any, generators: Mapping[str, GeneratorState]) -> None:
        from torch.utils.data import IterableDataset

        self.loader = loader
        self._registered = generators
        self.workers: int = loader.num_workers
        self.is_stream = isinstance(loader.dataset, IterableDataset)
        self.passes = self.fetched = 0
        self.exhausted = False
        self._moment = LoaderRandomState(loader)
        self._sampler: TrackedSampler | None = None
        kept = max(_KEPT, 4 * self.workers)
        self._recent: deque[tuple[int, Any, Any]] = deque(maxlen=kept)
        self._last_batch: Any = None
        self._spawn: Tree | None = None
        self._pool: dict[int, Any] = {}
        self._pool_at_start: dict[int, Any] = {}
        self._begun = 0
        self._elastic = elastic.find(loader, kept)

    def position(self, consumed: int) -> Tree:
        """Return the position after ``consumed`` batches of this pass, and the random state of now.

        Args:
            consumed: batches that completed steps have used; at most what was fetched.
        """
        assert consumed <= self.fetched, f"{consumed} batches used, {self.fetched} fetched"
        ahead = [(index, before) for index, before, _ in self._recent if index >= consumed]
        ended = self.exhausted and not ahead
        start = consumed if ended else self._replay_start(consumed)
        proof = encoding.digest_of(self._last_batch) if ahead else None
        return {
            **self._end_of_pass(),
            "ended": ended,
            "consumed": consumed,
            "start": start,
            "ahead": len(ahead),
            "spawn": self._spawn,
            "sampler": self._sampler.moments() if self._sampler else None,
            "before": [_before_to_tree(before) for _, before in ahead if before is not None],
            "pool": self._pool_at(start),
            "proof": None if proof is None else [self.fetched - 1, proof],
            **({"elastic": self._elastic.position(consumed, start)} if self._elastic and not ended else {}),
        }

    def position_between(self) -> Tree:
        """Return the position between two passes, of which the next has not begun, and the random state of now."""
        return self._end_of_pass()

    def _end_of_pass(self) -> Tree:
        keeps = self._keeps_workers()
        return {
            "ended": True,
            "consumed": 0,
            "start": 0,
            "ahead": 0,
            "spawn": self._spawn if keeps else None,
            "sampler": None,
            "before": [],
            "pool": dict(self._pool) if keeps else {},
            "proof": None,
            "generators": self._moment.generators(),
            "step": rng.capture_with(self._registered),
            "elastic": self._elastic.end() if self._elastic else None,
            **self._identity(),
        }

    def _identity(self) -> Tree:
        return {
            "workers": self.workers,
            "length": length_of(self.loader.dataset),
            "batch_size": self.batch_size,
        }

    def _replay_start(self, consumed: int) -> int:
        """Return the batch from which to fetch again, so that each worker does the batches that it did."""
        if self.is_stream and self._elastic is None:
            return 0
        if not self.workers:
            return consumed
        if not self.is_stream:
            return self._begun + (consumed - self._begun) // self.workers * self.workers
        # The workers take turns, but one whose shards are at an end drops out: a round begins where numbers fall.
        known = [(index, worker[0]) for index, _, worker in self._recent if index <= consumed]
        rounds = [index for (_, last), (index, worker) in itertools.pairwise(known) if worker <= last]
        return max(rounds, default=self._begun)

    def _pool_at(self, index: int) -> dict[int, Any]:
        """Return each worker's random state before its first batch at or after ``index``."""
        pool = dict(self._pool_at_start)
        for each, _, worker in self._recent:
            if each < index and worker is not None:
                pool[worker[0]] = worker[1]
        return pool

    def _keeps_workers(self) -> bool:
        return bool(self.workers and self.loader.persistent_workers)

    # ---- On what topology

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of the loader; ``None`` where it does not say."""
        return batch_size(self.loader)

    @property
    def is_elastic(self) -> bool:
        """Whether :meth:`adopt` can take up a position of another topology."""
        return self._elastic is not None

    def differences(self, position: Tree) -> list[str]:
        """Return, in words, what of the topology was another when a position was saved."""
        here = self._identity()
        names = {"workers": "num_workers", "batch_size": "batch size"}
        return [
            f"{words} {position[name]}, this launch has {here[name]}"
            for name, words in names.items()
            if position[name] != here[name]
        ]

    def left(self, position: Tree, together: int) -> int | None:
        """Return how many batches are left of the pass after a position, however large a batch was when it was saved.

        Args:
            position: the position.
            together: samples in a batch, on all ranks together.

        Returns:
            ``None`` where that is not known: of a stream.
        """
        assert self._elastic is not None, "only an elastic loader can"
        return self._elastic.left(position["elastic"], together)

    # ---- As it fetches

    def _fetch(self, inner: Iterator[Any]) -> Any:
        # Without workers the fetch itself may draw random numbers, so a fetch that is ahead must be repeatable.
        before = None if self.workers else (rng.capture_cpu(), rng.registered_states(self._registered))
        try:
            batch = next(inner)
        except StopIteration:
            self.exhausted = True
            raise
        worker = None
        if self.workers:
            batch, *worker, reached = batch
            self._pool[worker[0]] = worker[1]
        elif self._elastic:
            reached = self._elastic.reached()
        if self._elastic:
            self._elastic.note(self.fetched, reached)
        self._recent.append((self.fetched, before, worker))
        self._last_batch = batch
        self.fetched += 1
        return batch


def _before_to_tree(before: tuple[Any, Tree]) -> Tree:
    return {"cpu": rng.cpu_to_tree(before[0]), "registered": before[1]}


def cursor_of(epochs: float, own: Tree) -> Tree:
    """Return, for people, where a rank that saved this as its own is in its first loader that is under way."""
    states = [each for each in own.get("loaders", [own]) if each.get("position") is not None]
    state = next((each for each in states if not each["position"]["ended"]), states[0] if states else None)
    if state is None:
        return {"epoch": int(epochs)}
    position, done = state["position"], 0 if state["position"]["ended"] else state["consumed"]
    elastic = (position["elastic"] or {}).get("cursor", {})
    samples = elastic.get("consumed", done * state["together"]) if done else 0
    order = [elastic["seed"], elastic["epoch"]] if elastic else (position["sampler"] or {}).get("iter")
    return {
        "epoch": int(epochs),
        "micro_batches": done,
        "samples": samples if samples or not done else None,
        "of": position["length"],
        "order": (encoding.digest_of(order) or "")[:8] if done and order else None,
    }


def batch_size(loader: Any) -> int | None:
    """Return the batch size of a loader, which one with a batch sampler of its own does not say itself."""
    found: int | None = loader.batch_size
    return getattr(loader.batch_sampler, "batch_size", None) if found is None else found


def length_of(thing: Any) -> int | None:
    """Return the length of a dataset or of a loader; ``None`` where it has none."""
    try:
        return len(thing)
    except TypeError:
        return None
