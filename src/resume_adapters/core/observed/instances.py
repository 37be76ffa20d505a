"""All objects of a class, wherever a script keeps them."""

from __future__ import annotations

import gc
from typing import Any


def subclasses(kind: type) -> set[type]:
    """Return all classes that derive from a class."""
    direct: list[type] = kind.__subclasses__()
    return set(direct).union(*map(subclasses, direct))


def instances(kind: type) -> list[Any]:
    """Return every object of a class or of one that derives from it."""
    # An object refers to its class: asked this way, the collector looks through all objects in C.
    return [each for each in gc.get_referrers(kind, *subclasses(kind)) if issubclass(type(each), kind)]
