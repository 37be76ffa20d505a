"""Replace attributes and wrap functions while a context lasts."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

_INHERITED = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or a module while a context lasts.

    Afterwards, an attribute that an object inherited from its class is inherited again.
    """
    former = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if former is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, former)


def wrapped(owner: Any, name: str, function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Wrap a method of an object, or a function of a module, while a context lasts.

    Args:
        owner: the object, or the module.
        function: is called instead, with the former method and the arguments of the call.
    """
    former = getattr(owner, name)
    if isinstance(owner, type | types.ModuleType):
        return replaced(owner, name, lambda *args, **kwargs: function(former, *args, **kwargs))
    return replaced(owner, name, _Wrapper(function, former))


def wrap_for_good(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Wrap a method of an object as :func:`wrapped` does, in place of what was wrapped around it before."""
    former = getattr(owner, name)
    setattr(owner, name, _Wrapper(function, former._former if isinstance(former, _Wrapper) else former))


class _Wrapper:
    """A method of an object while it is wrapped.

    A deep copy of the object, such as an average of a module, shares it. What is pickled of the object, such as a
    callback among saved hyperparameters, has the method as it was.

    Args:
        function: is called, with the former method first.
    """

    def __init__(self, function: Callable[..., Any], former: Callable[..., Any]) -> None:
        self._function = function
        self._former = former

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._former, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Wrapper:
        return self

    def __reduce__(self) -> Any:
        return _reduced(self._former)


def _reduced(former: Any) -> tuple[Any, ...]:
    """Return what makes a method again, as ``__reduce__`` does: that of its object, as of any pickled method."""
    if isinstance(former, types.MethodType):
        return getattr, (former.__self__, former.__name__)
    return former.__reduce__() if isinstance(former, _Wrapper | _Override) else (functools.partial, (former,))


def overridden(owner: Any, name: str, function: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Wrap a method of an object as :func:`wrapped` does; a deep copy of the object has the method as it was."""
    return replaced(owner, name, _Override(function, getattr(owner, name)))


class _Override(functools.partial[Any]):
    """A method of an object while it is wrapped: a function, with the former method as its last argument so far.

    A partial is called without a function of python, and some of these methods are called at each step.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Bound to the copy of its owner, as copies of methods are. Before it are the arguments of a partial function.
        return copy.deepcopy(self.args[-1], memo)

    def __reduce__(self) -> Any:
        return _reduced(self.args[-1])


def unchanged_copy(owner: Any) -> Any:
    """Return a shallow copy of an object whose methods are as they were before :func:`overridden` and :func:`wrapped`.

    Those that the object had of its own are bound to the copy.
    """
    made = copy.copy(owner)
    held: dict[str, Any] = {name: each for name, each in vars(made).items() if isinstance(each, _Wrapper | _Override)}
    for name, former in held.items():
        while isinstance(former, _Wrapper | _Override):
            former = former._former if isinstance(former, _Wrapper) else former.args[-1]
        delattr(made, name)
        function = getattr(former, "__func__", former)
        if getattr(type(owner), name, None) is not function:
            setattr(made, name, types.MethodType(function, made) if hasattr(former, "__self__") else former)
    return made
