"""The random state of a loader's worker processes: sent along with each batch, put back in a new worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resume_adapters.core import rng


class WorkerCollate:
    """In a worker, sends each batch together with the worker's random state after it; ``None`` where none has drawn."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        self._sent: tuple[Any, Any, Any] | None = None

    def __call__(self, samples: Any) -> tuple[Any, int, Any]:
        from torch.utils.data import get_worker_info

        batch = self.collate(samples)
        worker = get_worker_info()
        assert worker is not None
        state = rng.capture_cpu()
        drawn = self._sent is None or not rng.same_cpu(state, self._sent)
        self._sent = state
        return batch, worker.id, rng.to_bytes(state) if drawn else None


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
