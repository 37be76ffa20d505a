"""The objects that an attempt has not made: left out of what looks through all objects of the process.

The collection of garbage after an attempt, and each search for what a framework keeps no list of, goes through some
hundred thousand objects of the libraries: a tenth of a second for each.
"""

from __future__ import annotations

import gc


class OlderObjects:
    """Hides what is there from the garbage collector, and from searches, until :meth:`release`.

    Nothing is hidden while an object is there that may belong to a training: the next attempt may use it again, and is
    to find it. Where the script has hidden objects itself, nothing is added to them.
    """

    def __init__(self) -> None:
        self._is_mine = gc.get_freeze_count() == 0

    def hide(self) -> None:
        """Hide what is there now, beside what is hidden already."""
        if self._is_mine and not _may_train():
            gc.freeze()

    def release(self) -> None:
        """Hide nothing any longer."""
        if self._is_mine:
            gc.unfreeze()


def _may_train() -> bool:
    """Return whether there is a model, an optimizer, a schedule or a loader."""
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    objects = gc.get_objects()
    kinds = {
        each for each in set(map(type, objects)) if issubclass(each, Module | Optimizer | LRScheduler | DataLoader)
    }
    found = [each for each in objects if type(each) in kinds] if kinds else []
    # Libraries have modules of their own, such as activations.
    return any(next(each.parameters(), None) is not None if isinstance(each, Module) else True for each in found)
