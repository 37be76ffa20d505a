"""The process group of the test device, as NCCL is that of CUDA: it knows no tensor of the host.

Its operations run one after the other on a thread of their own, and their bytes go through the store in which the group
was made. So it has no connection that could be cut: who waits in an operation gets an error by :meth:`Group.abort`.
"""

from __future__ import annotations

import datetime
import itertools
import pickle
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

NAME = "walled"

_LOOK_EVERY = 0.001

_REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda all_ranks: all_ranks.sum(0, dtype=all_ranks.dtype),
    "AVG": lambda all_ranks: all_ranks.sum(0) / len(all_ranks),
    "MIN": lambda all_ranks: all_ranks.amin(0),
    "MAX": lambda all_ranks: all_ranks.amax(0),
}


class Group(dist.ProcessGroup):
    """Ranks whose tensors are on the test device."""

    supports_splitting = False

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._place, self._ranks, self._limit = store, rank, size, timeout.total_seconds()
        self._numbers = itertools.count()
        self._begun = 0
        self._is_aborted = False
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    # ---- What torch asks of a group

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]

    def _get_backend(self, device: torch.device) -> Group:
        if device.type != NAME:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._begun

    def abort(self) -> None:
        self._is_aborted = True

    shutdown = abort

    # ---- Operations

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        reduce = _REDUCED[getattr(opts, "reduceOp", dist.ReduceOp.SUM).op.name]
        return self._begin(
            tensors, tensors, lambda given: [reduce(torch.stack(each)) for each in zip(*given, strict=True)]
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        root = opts.rootRank
        return self._begin(tensors if self._place == root else [], tensors, lambda given: given[root])

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        return self._begin(inputs, outputs[0], lambda given: [each for (each,) in given])

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self._begin([given], list(output.chunk(self._ranks)), lambda given: [each for (each,) in given])

    all_gather_single = _allgather_base  # its name since torch 2.13

    def barrier(self, opts: Any = None) -> Any:
        return self._begin([], [], lambda given: [])

    def _begin(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], compute: Callable[[Any], list[torch.Tensor]]
    ) -> Any:
        for each in (*inputs, *outputs):
            self._get_backend(each.device)
        devices = {each.device for each in outputs} or {torch.device(NAME, torch.accelerator.current_device_index())}
        future: Any = torch.futures.Future(devices=list(devices))
        number = next(self._numbers)
        self._begun += 1

        def run() -> None:
            try:
                with torch.no_grad():
                    given = self._exchange(number, [each.cpu() for each in inputs])
                    for output, value in zip(outputs, compute(given), strict=True):
                        output.copy_(value.view(output.shape))
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(outputs)

        self._waiting.put(run)
        return _create_work_from_future(future)

    def _run(self) -> None:
        while True:
            self._waiting.get()()

    def _exchange(self, number: int, given: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return what each rank has given to an operation."""
        names = [f"{number}/{rank}" for rank in range(self._ranks)]
        self._store.set(names[self._place], pickle.dumps(given))
        until = time.monotonic() + self._limit
        while not self._store.check(names):
            if self._is_aborted or time.monotonic() > until:
                raise RuntimeError(f"operation {number} {'was aborted' if self._is_aborted else 'timed out'}")
            time.sleep(_LOOK_EVERY)
        found = [pickle.loads(self._store.get(name)) for name in names]
        self._store.delete_key(f"{number - 1}/{self._place}")  # all have read it: they have begun this operation
        return found


dist.Backend.register_backend(NAME, Group, devices=[NAME])
