"""What a script does in an epoch before its batches, and does again in a launch that resumes within that epoch.

A rate that is lowered, a weight that is clipped, a sum that is set to zero: what was saved has all of it already.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from resume_adapters.core.log import logger
from resume_adapters.core.loop.framework import LoopFramework
from resume_adapters.core.observed.paths import is_module
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import rng
from resume_adapters.core.state.sharded_digest import fingerprint


class RepeatedStart:
    """Restores what was saved once more, where a pass goes on, if the script has changed it since it was loaded.

    Args:
        framework: the framework's side of the loop.
        session: the session of the loop.
        memory: what the script keeps from launch to launch.
        load: restores what the script may change.
    """

    def __init__(
        self, framework: LoopFramework, session: Session, memory: dict[str, Any], load: Callable[[], object]
    ) -> None:
        self._framework = framework
        self._session = session
        self._memory = memory
        self._load = load
        self._loaded: list[str | None] | None = None

    def begin(self) -> None:
        """Remember what was loaded, of a checkpoint within a pass."""
        # Under another batch size the schedules have moved since.
        if not self._session.rescale.keeps_samples:
            self._loaded = self._digests()

    def end(self) -> None:
        """Compare, and load again where it differs; once, where the pass goes on.

        Where the state is spread over the ranks, all of them read loaders, and load together.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        differs, is_spread = self._digests() != loaded, self._framework.trained().are_partitioned
        if is_spread or self._framework.sharded_state():
            differs = any(self._session.run.ranks.gather(differs))
        if differs:
            before = rng.capture()
            self._load()
            rng.restore(before)
            logger.info(
                "What the script did in this epoch before its batches was done already when it was saved: what it "
                "changed in this launch is as it was saved again."
            )
        self._session.observed.restore()

    def _digests(self) -> list[str | None]:
        captured = self._session.subjects().captured
        return [fingerprint(self._memory), *(digest for each in captured for digest in _digests_of(each))]


def _digests_of(each: Any) -> list[str | None]:
    try:
        return [fingerprint(held) for held in _held(each)]
    except Exception:  # of any kind: of tensors of a class of its own, or not yet made; it is not compared
        return []


def _held(each: Any) -> Iterable[Any]:
    """Yield what a module, an optimizer, a tensor or anything else with a state holds, as data, on this rank."""
    if is_module(each):
        tensors = {**dict(each.named_parameters()), **dict(each.named_buffers())}
        yield {name: _local(tensor) for name, tensor in tensors.items()}
    elif hasattr(each, "param_groups"):
        yield [{name: value for name, value in group.items() if name != "params"} for group in each.param_groups]
        for state in each.state.values():
            yield {name: _local(value) for name, value in state.items()} if isinstance(state, dict) else None
    elif hasattr(each, "state_dict"):
        yield each.state_dict()
    else:
        yield _local(each) if hasattr(each, "data_ptr") else None


def _local(value: Any) -> Any:
    value = value.to_local() if hasattr(value, "to_local") else value
    return value.detach() if hasattr(value, "detach") else value


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
        return saved
    if type(live) is type(saved) and (live.shape, live.dtype) == (saved.shape, saved.dtype):
        live.detach().copy_(saved)
        return live
    return saved.clone()
