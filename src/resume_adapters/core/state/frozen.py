"""A state that stays what it is while the training goes on: copied, but for what is too large to copy at each step."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple

from resume_adapters.core.state.comparison import same_bits
from resume_adapters.core.state.records import Record, tree_of

_LARGE = 1 << 16
"""Bytes from which on a tensor is not copied."""

_PLAIN = frozenset((int, float, complex, str, bytes, bool, type(None)))
"""The types that most values of a state have: looked at first, since a state is copied at each step."""


class FrozenState:
    """A tree of data, as it is now.

    Args:
        tree: the tree: mappings, lists, tuples, tensors, arrays and plain values; or records of them.
    """

    def __init__(self, tree: Any) -> None:
        self._large: list[tuple[Any, int]] = []
        self._copy = self._copied(tree)

    @property
    def tree(self) -> Any:
        """A copy. Large tensors are those of the live tree, as long as nothing changes them."""
        return tree_of(self._copy)

    @property
    def is_intact(self) -> bool:
        """Whether the large tensors are what they were, as far as torch counts what changes them."""
        return all(tensor._version == version for tensor, version in self._large)

    def _copied(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Record):
            return value.map_values(self._copied)
        if kind in (Counter, OrderedDict, defaultdict):
            found = copy.copy(value)  # with its type, and what a defaultdict makes
            dict.update(found, self._copied(dict(value)))
            return found
        if kind is dict or isinstance(value, Mapping):
            copied = self._copied
            return {key: each if type(each) in _PLAIN else copied(each) for key, each in value.items()}
        if isinstance(value, list):
            return list(value) if _PLAIN.issuperset(map(type, value)) else [self._copied(each) for each in value]
        if isinstance(value, tuple):
            return self._copied_tuple(value)
        if hasattr(value, "_version"):
            return self._tensor(value)
        return copy.deepcopy(value)

    def _copied_tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if value and type(value[0]) is int and type(value[-1]) is int and len(value) > 1 << 6:
            return value  # the words of a random generator
        items = [self._copied(each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)

    def _tensor(self, tensor: Any) -> Any:
        if tensor.numel() * tensor.element_size() < _LARGE:
            return tensor.detach().clone()
        self._large.append((tensor, tensor._version))
        return tensor


NOTHING = FrozenState({})
"""An empty tree, which most parts of most states are."""


class TakenBuffer(NamedTuple):
    """A buffer at one :meth:`FrozenBuffers.take`.

    Attributes:
        live: the buffer.
        version: how often torch has counted that it changed; -1 where it does not count that.
        content: a copy.
    """

    live: Any = None
    version: int = -1
    content: Any = None


class FrozenBuffers:
    """The buffers of modules, as they are at each :meth:`take`. A forward pass changes those of a normalisation.

    One that is ``None`` or deleted counts as absent: a module may fill it later, and empty it again.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        from torch.nn.modules.batchnorm import _NormBase  # seam: torch 2.6-2.13

        owners = {id(each): each for module in modules for each in module.modules()}.values()
        found = {f"{at}.{name}": (each, name) for at, each in enumerate(owners) for name, _ in each._buffers.items()}
        self._places: dict[str, tuple[MutableMapping[str, Any], str]] = {
            key: (each._buffers, name) for key, (each, name) in found.items()
        }
        self._taken: dict[str, TakenBuffer] = dict.fromkeys(self._places, TakenBuffer())
        # The kernel of a batch normalisation does not count what it changes.
        self._uncounted = {key for key, (each, _) in found.items() if isinstance(each, _NormBase)}
        self._times = 0

    def take(self) -> Mapping[str, TakenBuffer]:
        """Copy the buffers; of large ones, those that have changed since the last time.

        torch counts most of what changes a tensor, but not what is done to its ``data``. So a large one that seems to
        be the same is compared, ever more seldom; one that is not the same is copied each time from then on.
        """
        self._times += 1
        compares = self._times & (self._times - 1) == 0
        for key, (holder, name) in self._places.items():
            now = _held(holder, name)
            if now is None:
                self._taken[key] = TakenBuffer()
                continue
            if compares and self._is_unnoticed(key, self._taken[key]):
                self._uncounted.add(key)
            if key in self._uncounted or not self._seems_unchanged(key, self._taken[key]):
                version = -1 if key in self._uncounted else now._version
                self._taken[key] = TakenBuffer(now, version, now.detach().clone())
        return dict(self._taken)

    def is_intact(self, taken: Mapping[str, TakenBuffer]) -> bool:
        """Return whether no large buffer has changed unnoticed since it was taken. It reads them all."""
        return not any(self._is_unnoticed(key, each) for key, each in taken.items())

    def _seems_unchanged(self, key: str, taken: TakenBuffer) -> bool:
        holder, name = self._places[key]
        now = _held(holder, name)
        if now is None or now is not taken.live:
            return False
        return bool(now._version == taken.version and now.numel() * now.element_size() >= _LARGE)

    def _is_unnoticed(self, key: str, taken: TakenBuffer) -> bool:
        """Return whether a buffer has changed, and neither torch nor this object knows of it."""
        return self._seems_unchanged(key, taken) and not same_bits(taken.live, taken.content)

    def load(self, contents: Mapping[str, Any]) -> None:
        """Set the buffers to the contents that were taken, of other modules of the same kind."""
        for key, (holder, name) in self._places.items():
            _set(holder, name, _held(holder, name), contents[key])

    def restore(self, taken: Mapping[str, TakenBuffer]) -> None:
        """Set the buffers to what they were when they were taken."""
        for key, (holder, name) in self._places.items():
            _set(holder, name, taken[key].live, taken[key].content)


def _held(holder: MutableMapping[str, Any], name: str) -> Any:
    """Return a buffer, or ``None`` where it is absent; a scripted module holds its buffers in no dict."""
    return dict(holder.items()).get(name)


def _set(holder: MutableMapping[str, Any], name: str, live: Any, content: Any) -> None:
    """Set a buffer to a tensor with a content; where it is absent, to a copy of that; or remove it."""
    if content is None:
        if name in holder:
            holder[name] = None
        return
    if live is None or live.shape != content.shape:
        live = content.clone()
    else:
        live.copy_(content)
    holder[name] = live
