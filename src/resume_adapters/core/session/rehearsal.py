"""The first save of a launch is loaded back at once, as a resume would load it: into copies of what is trained.

What does not come back is known then, and not after the kill. The copies are gone when it is compared; the training is
not touched.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from resume_adapters.core import devices
from resume_adapters.core.observed.leaves import is_array
from resume_adapters.core.observed.paths import is_module
from resume_adapters.core.observed.walk import identities
from resume_adapters.core.saving.block import available_memory
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.loading import copied
from resume_adapters.core.state.stateful import is_optimizer
from resume_adapters.core.state.untouched import is_a
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import UnsupportedSetting


class NotRehearsed(Exception):
    """A save cannot be rehearsed, and the reason; it may be right all the same."""


def copies(live: Mapping[str, Any], shared: Iterable[Any], largest: float = math.inf) -> dict[str, Any]:
    """Return copies of modules, optimizers, schedules and scalers, which refer to each other as the originals do.

    The state of an optimizer is left out, as that of a new one is.

    Args:
        live: those; a value may be a list of some, or ``None``.
        shared: what they may refer to that is not copied, such as the trainer.
        largest: bytes of arrays that are copied at most.

    Raises:
        NotRehearsed: they cannot be copied, or the copies do not fit into half of the free memory.
    """
    memo = _Memo({id(each): each for each in shared})
    memo.left = largest
    try:
        held = list(_flat(live))
        for each in held:  # what is copied is never shared as well: the load would reach what trains
            memo.pop(id(each), None)
        _require_memory(held)
        for each in filter(is_optimizer, held):
            memo[id(each.state)] = defaultdict(dict)
        for each in _computed(held):  # torch copies no tensor with a graph; weight_norm and routers keep some
            memo[id(each)] = each.detach()
        made = {name: copy.deepcopy(each, memo) for name, each in live.items()}
        if identities(held) & identities(_flat(made)):
            raise NotRehearsed("what is trained, or a module in it, gives itself as its copy")
        for each in filter(is_optimizer, held):  # torch copies no further attributes of an optimizer
            other = memo[id(each)]
            for name in [name for name in vars(each) if name not in vars(other) or "state_dict" in name]:  # and hooks
                setattr(other, name, copy.deepcopy(vars(each)[name], memo))
    except NotRehearsed:
        raise
    except Exception as error:  # of any kind: it is the script's objects that are copied
        raise NotRehearsed(f"what is trained cannot be copied ({type(error).__name__}: {error})") from error
    return made


def load_copy(name: str, live: Any, saved: Any, shared: Iterable[Any] = ()) -> Any:
    """Load what something of the script has saved into a copy of it; ``None`` if it has none, or holds 100 MB or more.

    Args:
        name: what a user calls it.
        shared: see :func:`copies`.

    Raises:
        UnsupportedSetting: it does not load it.
    """
    try:
        made = copies({name: live}, shared, _LARGEST)[name]
    except NotRehearsed:  # others can be copied
        return None
    try:
        made.load_state_dict(copied(saved))
    except Exception as error:  # of any kind: it is the script's method
        raise UnsupportedSetting(
            f"{name} does not load what it saves ({type(error).__name__}: {error}), so that no launch could resume: "
            "correct its load_state_dict(), or leave it out"
        ) from error
    return made


def rehearse_part(name: str, part: Any) -> None:
    """Load the state of a user's part into a copy of it, where it has one, and verify it.

    Raises:
        UnsupportedSetting: it does not load it.
        NotRestored: it is not the same after that.
    """
    if (made := load_copy(name, part, saved := part.state_dict())) is not None:
        verify_equal(name, saved, made.state_dict())


_LARGEST = 1e8
"""Bytes of arrays in something of the script that is copied, at most."""


class _Memo(dict[int, Any]):
    """The copies so far, by the identities of the originals; not many: a module may hold a dataset."""

    left: float
    """Bytes of arrays that may yet be copied."""

    def __setitem__(self, identity: int, made: Any) -> None:
        self.left -= made.nbytes if is_array(made) else 0
        if len(self) >= _MOST:
            raise NotRehearsed(f"what is trained holds more than {_MOST:,} objects")
        if self.left < 0:
            raise NotRehearsed("it holds larger arrays than are copied")
        super().__setitem__(identity, made)


_MOST = 100_000
"""Objects that are copied; it takes about a second."""


def overwrite(tensors: Iterable[Any]) -> None:
    """Fill tensors of copies with what no training leaves in them, so that only a load can bring the content back.

    Raises:
        NotRehearsed: a tensor has no plain memory.
    """
    try:
        for each in tensors:
            each.untyped_storage().fill_(_FILL)
    except Exception as error:  # of any kind: a tensor may be of the script's own class
        raise NotRehearsed(f"a {type(error).__name__} while a copy was overwritten: {error}") from error


_FILL = 0xA5
"""Neither zero, one, nor a number that a model begins with, in any dtype."""


def _require_memory(held: Iterable[Any]) -> None:
    """Raise where copies of these would not fit into half of the free memory of each device."""
    sizes: dict[str, int] = {}
    for each in {(each.device.type, each.data_ptr()): each for each in _tensors(held)}.values():
        sizes[each.device.type] = sizes.get(each.device.type, 0) + each.nbytes
    for kind, size in sizes.items():
        free = available_memory(LocalStorage()) if kind == "cpu" else devices.free_bytes(kind)
        if free is None:
            raise NotRehearsed(f"{kind} does not say how much memory is free")
        if size > free // 2:
            raise NotRehearsed(f"a copy of {size / 1e6:,.0f} MB does not fit into half of the memory left on {kind}")


def _tensors(held: Iterable[Any]) -> Iterator[Any]:
    for each in held:
        if is_module(each):
            yield from each.parameters()
            yield from each.buffers()
        elif is_optimizer(each):
            for state in each.state.values():  # some keep a number there, beside that of the parameters
                found = state.values() if isinstance(state, dict) else [state]
                yield from (value for value in found if hasattr(value, "data_ptr"))


def _computed(held: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors that modules have kept of their last forward pass."""
    import torch

    for each in held:
        for part in each.modules() if is_module(each) else ():
            for value in vars(part).values():
                yield from (
                    one
                    for one in (value if type(value) in (list, tuple) else [value])
                    if is_a(one, torch.Tensor) and one.grad_fn is not None
                )


def _flat(live: Mapping[str, Any]) -> Iterator[Any]:
    for each in live.values():
        for one in each if isinstance(each, list) else [each]:
            yield one
            if is_optimizer(one) and is_optimizer(inner := getattr(one, "optimizer", None)):
                yield inner
