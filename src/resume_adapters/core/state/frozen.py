"""A state that stays what it is while the training goes on: copied, but for what is too large to copy at each step."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from resume_adapters.core.state.captured import Captured
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
    def copy(self) -> Any:
        """The same, with records as they are."""
        return self._copy

    @property
    def is_intact(self) -> bool:
        """Whether the large tensors are what they were, as far as torch counts what changes them."""
        return all(tensor._version == version for tensor, version in self._large)

    def _copied(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN or kind is Captured:
            return value
        if isinstance(value, Record):
            return value.map_values(self._copied)
        if kind is dict or isinstance(value, Mapping):
            copied = self._copied
            return {key: each if type(each) in _PLAIN else copied(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._copied(each) for each in value]
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


class FrozenBuffers:
    """The buffers of modules, as they are at each :meth:`take`. A forward pass changes those of a normalisation.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        holders = {id(each): each._buffers for module in modules for each in module.modules()}
        self._places: list[tuple[MutableMapping[str, Any], str]] = [
            (holder, name) for holder in holders.values() for name, buffer in holder.items() if buffer is not None
        ]
        self._taken: list[tuple[Any, int, Any]] = [(None, -1, None)] * len(self._places)

    def take(self) -> None:
        """Copy the buffers; of large ones, those that have changed since the last time."""
        for number, (holder, name) in enumerate(self._places):
            live, version, _ = self._taken[number]
            now = holder[name]
            # The kernel of a batch normalisation does not count what it changes.
            if now is not live or now._version != version or now.numel() * now.element_size() < _LARGE:
                self._taken[number] = (now, now._version, now.detach().clone())

    def taken(self) -> dict[str, Any]:
        """Return what was taken last."""
        return {str(number): copied for number, (_, _, copied) in enumerate(self._taken)}

    def replace(self, taken: Mapping[str, Any]) -> None:
        """Let what was taken last be what :meth:`taken` has returned, of other modules of the same kind."""
        for number, (live, version, _) in enumerate(self._taken):
            self._taken[number] = (live, version, taken[str(number)])

    def load(self, taken: Mapping[str, Any]) -> None:
        """Let the buffers be what :meth:`taken` returned, of other modules of the same kind."""
        for number, (holder, name) in enumerate(self._places):
            holder[name].copy_(taken[str(number)])

    def restore(self) -> None:
        """Let the buffers be what was taken last."""
        for (holder, name), (live, _, copied) in zip(self._places, self._taken, strict=True):
            live.copy_(copied)
            holder[name] = live
