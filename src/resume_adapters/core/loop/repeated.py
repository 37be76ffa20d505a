"""What was loaded, until the training goes on from it.

A script does some things at its start, or in an epoch before its batches, that it does again in a launch that resumes:
it initializes weights, lowers a rate, sets a sum to zero. What was saved has all of it already.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import rng


class LoadedState:
    """What was loaded, to be compared with what was saved, and to be loaded again where the script has changed it.

    Where the state is spread over the ranks, they compare and load together.

    Args:
        session: the session of the loop.
        load: loads it once more.
    """

    def __init__(self, session: Session, load: Callable[[RestoreContext], None]) -> None:
        self._session = session
        self._load = load
        self._is_proven = True
        self._is_touched = self._is_awaited = False

    def begin(self) -> None:
        """Note that it is loaded."""
        self._is_proven = False

    def hand_over(self) -> None:
        """Note that the script goes on, and may change it."""
        self._is_touched = True

    def verify(self) -> None:
        """Compare it, unless that is done, or waits for a pass that goes on.

        Raises:
            NotRestored: it differs, also when it is loaded again.
        """
        if not self._is_proven and not self._is_awaited:
            self._compare()

    def begin_epochs(self, *, is_within: bool) -> None:
        """Compare it before the first epoch, or later, where the pass goes on within which it was saved.

        Raises:
            NotRestored: see :meth:`verify`.
        """
        # Under another batch size the schedules move before a pass goes on.
        self._is_awaited = is_within and not self._session.rescale.keeps_samples
        if not self._is_awaited and (self._is_touched or not self._is_proven):
            self._compare()

    def go_on(self) -> None:
        """Compare it where the pass goes on within which it was saved. Without ``verify`` it is loaded again.

        Raises:
            NotRestored: see :meth:`verify`.
        """
        if self._is_awaited:
            self._is_touched = True
            self._compare()
            self._is_awaited = False

    def end(self) -> None:
        """Forget it: it is trained from now on."""
        self._is_awaited, self._is_proven = False, True
        if self._session.context is not None:
            self._session.context.drop_proofs()

    def _compare(self) -> None:
        context = self._session.context
        if context is None:
            return
        self._is_proven, before = True, rng.capture()
        if context.verify:
            context.verify_loaded(lambda: self._load(context))
        elif self._is_awaited:
            self._load(context)
        rng.restore(before)
        if self._is_touched:
            self._session.observed.restore()


def refill(live: Any, saved: Any) -> Any:
    """Fill containers and tensors with saved values where they are: the script may hold them. Return what serves."""
    kind: Any = next((each for each in (dict, list, deque, set) if isinstance(saved, each)), None)
    if kind is not None:
        found, former = (live, copy.copy(live)) if isinstance(live, kind) else (copy.copy(saved), kind())
        found.clear()
        if kind is dict:
            found.update({name: refill(former.get(name), each) for name, each in saved.items()})
        elif kind is set:
            found.update(saved)
        else:
            found.extend(refill(*each) for each in itertools.zip_longest(itertools.islice(former, len(saved)), saved))
        return found
    if not hasattr(saved, "data_ptr"):
        return copy.deepcopy(saved)
    if type(live) is type(saved) and (live.shape, live.dtype) == (saved.shape, saved.dtype):
        live.detach().copy_(saved)
        return live
    return saved.clone()
