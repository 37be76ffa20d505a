"""The random state of a loader's worker processes: sent along with each batch, put back in a new worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resume_adapters.core import rng
from resume_adapters.core.elastic import ElasticStream, stream_of


def are_kept(loader: Any) -> bool:
    """Return whether a loader's workers outlive its passes and are running."""
    return getattr(loader, "_iterator", None) is not None  # seam: torch 2.13, DataLoader


class WorkerCollate:
    """In a worker, sends each batch together with the worker's random state after it, and how far its stream is."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._stream: ElasticStream | None = None
        self._has_looked = False

    def __call__(self, samples: Any) -> tuple[Any, int, Any, Any]:
        from torch.utils.data import get_worker_info

        batch = self.collate(samples)
        worker = get_worker_info()
        assert worker is not None
        # Always whole: the batch that carried an earlier state may have been thrown away with the rest of its pass.
        if not self._has_looked:  # once in each worker: it is asked of every object that the dataset wraps
            self._stream, self._has_looked = stream_of(worker.dataset), True
        reached = self._stream.reached() if self._stream is not None else None
        return batch, worker.id, rng.to_bytes(rng.capture_cpu()), reached


class WorkerInit:
    """In a new worker, puts back the random state that its predecessor had."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self.init = init
        self.states: dict[int, Any] = {}

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        if worker in self.states:
            rng.restore_cpu(rng.from_bytes(self.states[worker]))
