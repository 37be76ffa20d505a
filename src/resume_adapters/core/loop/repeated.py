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

    Args:
        session: the session of the loop.
        load: loads it once more.
    """

    def __init__(self, session: Session, load: Callable[[RestoreContext], None]) -> None:
        self._session = session
        self._load = load
        self._is_untouched = self._is_awaited = False

    def begin(self) -> None:
        """Note that it was loaded, and that the script has not gone on since."""
        self._is_untouched = True

    def leave(self) -> None:
        """Compare it before the script goes on.

        Raises:
            NotRestored: it differs.
        """
        context = self._session.context
        if self._is_untouched and context is not None:
            context.prove()
        self._is_untouched = False

    def begin_epochs(self, *, is_within: bool) -> None:
        """Compare it before the first epoch, or later, where the pass goes on within which it was saved.

        Raises:
            NotRestored: it differs, also when it is loaded again.
        """
        self._is_awaited = True
        if is_within and not self._session.rescale.keeps_samples:  # else the schedules move first
            self._is_untouched = False
        elif self._is_untouched:
            self.leave()
        else:
            self.go_on()

    def go_on(self) -> None:
        """Compare it, and load it again where it differs, unless that is done.

        Raises:
            NotRestored: it differs after that, too.
        """
        context = self._session.context
        if not self._is_awaited or context is None:
            return
        self._is_awaited = False
        before = rng.capture()
        context.verify_loaded(lambda: self._load(context))
        rng.restore(before)
        self._session.observed.restore()

    def end(self) -> None:
        """Forget it: it is trained from now on."""
        self._is_awaited = self._is_untouched = False
        if self._session.context is not None:
            self._session.context.drop_proofs()


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
