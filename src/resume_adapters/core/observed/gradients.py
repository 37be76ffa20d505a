"""Which gradients a training leaves at the end of a step for a later one: seen, since only the script knows.

One loop clears all gradients as it begins a step, and leaves them at each save for nothing. Another clears at every
second step, or only those of one of its models, and what it leaves is added to. So the first steps are watched, and
those after a save: does a gradient that one step has left still lie in the same memory when the next has been taken?
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from resume_adapters.core.state.stateful import parameters_of

_WATCHED = 8
"""Steps of a launch that are watched from its start."""


class LeftGradients:
    """Watches the gradients that are left at the ends of steps."""

    def __init__(self) -> None:
        self._watches = _WATCHED
        self._left: dict[int, Any] = {}
        self._is_used: dict[int, bool] = {}

    def end_step(self, tensors: Iterable[Any]) -> None:
        """Look at what a step leaves, where it is one of the first."""
        if self._watches:
            self._watches -= 1
            self.look(tensors)

    def look(self, tensors: Iterable[Any]) -> None:
        """Remember the gradients that are there now, until the next step has shown which of them it uses."""
        # To a sparse gradient torch adds in new memory, so nothing is known of it, and it is needed.
        dense = (each for each in tensors if each.grad is not None and not each.grad.is_sparse)
        self._left = {id(each): _memory(each.grad) for each in dense}

    def is_needed(self, tensor: Any) -> bool:
        """Return whether a later step uses the gradient that a tensor has now: it was seen to, or nothing is known."""
        # What is sharded cannot be captured: it is named only where it is known to be used.
        return tensor.grad is not None and self._is_used.get(id(tensor), not hasattr(tensor.grad, "to_local"))

    def after_step(self, optimizer: Any) -> None:
        """See which of the gradients that were left an optimizer has used in its step."""
        if not self._left:
            return
        for each in parameters_of(optimizer):
            if (memory := self._left.pop(id(each), None)) is not None:
                is_used = each.grad is not None and _memory(each.grad) == memory and not memory.expired()
                self._is_used[id(each)] = is_used or self._is_used.get(id(each), False)


def _memory(gradient: Any) -> Any:
    """Return a weak reference to the memory of a gradient; nothing that is freed has the same again."""
    from torch.multiprocessing.reductions import StorageWeakRef

    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
