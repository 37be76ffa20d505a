"""The random state of a loader's workers: each batch brings that of its worker, and a new worker gets it back.

A worker draws its own random numbers, for augmentations, in a process that the next launch does not have. With its
state comes what has changed on its copy of the dataset, and how far its stream is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from resume_adapters.core.dataloader.check_batch import CheckBatch
from resume_adapters.core.dataloader.elastic import ElasticStream, stream_of
from resume_adapters.core.observed.loaders import WITH_CHANGES, LoaderAttributes, content_of
from resume_adapters.core.state import rng

_WORKER: dict[str, LoaderAttributes] = {}
"""In a worker, what changes on its copies of the dataset and the collate function."""


class WorkerCollate:
    """In a worker, sends with each batch the worker's state after it, and how far its stream is."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._stream: ElasticStream | None = None
        self._has_looked = False

    def __call__(self, samples: Any) -> tuple[Any, int, Any, Any]:
        from torch.utils.data import get_worker_info

        batch = self.collate(samples)
        worker = get_worker_info()
        assert worker is not None
        if not self._has_looked:  # once in each worker: the search goes through every object that the dataset wraps
            self._stream, self._has_looked = stream_of(worker.dataset), True
        progress = self._stream.reader_progress() if self._stream is not None else None
        content = _WORKER["content"]
        content.look_early("fetch")
        # Always whole: the batch that carried an earlier state may have been dropped with the rest of its pass.
        packed, changed = rng.pack_cpu(rng.capture_cpu()), content.capture()
        return batch, worker.id, (packed, changed) if changed else packed, progress


class WorkerInit:
    """In a new worker, restores the random state that its predecessor had, and what had changed on its dataset.

    Args:
        makes_batches: an index of the loader stands for several samples.

    Attributes:
        states: the state of each predecessor, while workers are started that have one.
        check: a batch that the first worker is to fetch again, and why it may be another one.
    """

    def __init__(self, init: Callable[[int], Any] | None, collate: Any, *, makes_batches: bool) -> None:
        self.init = init
        self._collate = collate
        self._makes_batches = makes_batches
        self.states: dict[int, Any] = {}
        self.check: tuple[CheckBatch, str] | None = None

    @contextlib.contextmanager
    def restoring(self, states: Mapping[int, Any]) -> Iterator[None]:
        """Restore these states in the workers that are started while the context lasts."""
        self.states = dict(states)
        try:
            yield
        finally:
            self.states = {}

    def __call__(self, worker: int) -> None:
        from torch.utils.data import get_worker_info

        if self.init is not None:
            self.init(worker)
        here = get_worker_info()
        dataset = None if here is None else here.dataset
        content = _WORKER["content"] = LoaderAttributes(content_of(dataset, self._collate), is_copy=True)
        if self.check is not None and worker == 0:
            self._compare(dataset, content, *self.check)
        if worker in self.states:
            _restore(self.states[worker], content)

    def _compare(self, dataset: Any, content: LoaderAttributes, kept: CheckBatch, why: str) -> None:
        """Fetch a batch again, with the state that the worker had then; the state stays as it is.

        Raises:
            NotRestored: it is another one.
        """
        now = rng.capture_cpu()
        _restore(kept.before, content)
        kept.require_same(kept.fetched_from(dataset, self._collate, makes_batches=self._makes_batches), why)
        rng.restore_cpu(now)
        content.restore([])


def _restore(state: Any, content: LoaderAttributes) -> None:
    """Restore the state of a worker, as each batch brings it."""
    changed = []
    if len(state) == WITH_CHANGES:
        state, changed = state
    rng.restore_cpu(rng.unpack_cpu(state))
    content.restore(changed)
