"""Attributes that have another value for a while, and functions that stand before others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_INHERITED = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of an object or a module another value for a while.

    What an object has from its class it has from there again afterwards.
    """
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def wrapped(owner: Any, name: str, function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Let a function stand before a method of an object, or a function of a module, for a while.

    Args:
        owner: the object, or the module.
        name: the method's name.
        function: is called with the former method, and with what that was to be called with.
    """
    former = getattr(owner, name)
    # A function, not a partial: a copy of the owner, such as an average of a module, shares it.
    return replaced(owner, name, lambda *args, **kwargs: function(former, *args, **kwargs))
