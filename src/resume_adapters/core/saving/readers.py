"""Who may read a checkpoint before its commit: a method of the script in place of a framework's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_OURS = "resume_adapters"


def own_methods(owner: Any, names: Iterable[str], packages: Iterable[str]) -> list[str]:
    """Return the methods of an object that neither some packages nor this one have defined, as ``Class.method``.

    Args:
        owner: the object; its class may have replaced a method, or an attribute of the object.
        names: the methods, of those that the object has.
        packages: whose methods are not returned.
    """
    known = {*packages, _OURS}
    candidates = {name: (getattr(type(owner), name, None), getattr(owner, "__dict__", {}).get(name)) for name in names}
    return [
        f"{type(owner).__name__}.{name}"
        for name, methods in candidates.items()
        if any(callable(each) and _package(each) not in known for each in methods)
    ]


def _package(method: Callable[..., Any]) -> str:
    """Return the package whose code a method is; ``functools.wraps`` says that it is the wrapped one's."""
    function = getattr(method, "__func__", method)
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return str(module).partition(".")[0]
