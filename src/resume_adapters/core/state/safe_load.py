"""Make every ``torch.load`` read data only, so that no code named in a file is run."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import pathlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_FORCED, _FREE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Torch's environment variables that override the caller of ``torch.load``. It refuses to load if both are set."""


@contextlib.contextmanager
def allowing(classes: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Allow torch to load these classes as data too. Contexts can be nested."""
    import torch

    before = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([each for each in classes if each not in before]):
        yield


@contextlib.contextmanager
def data_only(classes: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Make every ``torch.load`` read data only, even where a framework asks for ``weights_only=False``.

    Args:
        classes: classes allowed beyond those that torch allows.
    """
    former = {name: os.environ.pop(name, None) for name in (_FORCED, _FREE)}
    os.environ[_FORCED] = "1"
    try:
        with allowing(classes):
            yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in former.items() if value is not None})


def data_classes() -> list[Callable[..., Any]]:
    """Return classes that torch does not load by itself, and that states and hyperparameters often hold.

    Making one runs no code. A schedule that numpy computes makes every learning rate one of numpy's numbers.
    """
    return [
        *(pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
        *(argparse.Namespace, datetime.timedelta, datetime.datetime, datetime.date),
        *numpy_classes(),
    ]


def numpy_classes() -> list[Callable[..., Any]]:
    """Return what a pickle of numpy's arrays and numbers names: calling it runs no code of the file."""
    import numpy as np

    return [
        *(np.dtype, np.ndarray, np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]),
        *(type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdFD"),
    ]


def unknown_classes(file: Path) -> set[str]:
    """Return the names of what a file of ``torch.save`` refers to, and is neither torch's own nor a class of data.

    Raises:
        pickle.UnpicklingError: the file uses instructions that torch does not allow.
    """
    import torch

    classes = data_classes()
    allowed = {f"{each.__module__}.{each.__qualname__}" for each in classes}
    with allowing(classes):
        found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    return {name for name in found if not _is_data(name, allowed)}


def are_classes_added() -> bool:
    """Return whether somebody has told torch of classes: it makes them, and need not be able to fill them."""
    import torch

    return bool(torch.serialization.get_safe_globals())


def _is_data(name: str, allowed: set[str]) -> bool:
    # Modules are renamed between versions of numpy and python: numpy.core and numpy._core, pathlib._local.
    module, _, attribute = name.rpartition(".")
    root = module.partition(".")[0]
    return root in ("numpy", "pathlib") and any(
        each.startswith(f"{root}.") and each.rpartition(".")[2] == attribute for each in allowed
    )


class Opaque:
    """An object of a class that is not loaded: it has the arguments and the state that the file has for it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __new__(cls, *arguments: Any) -> Opaque:
        """Make one; the unpickler does not call ``__init__`` for every class."""
        made = super().__new__(cls)
        Opaque.__init__(made, *arguments)
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def stand_in(name: str) -> type[Opaque]:
    """Return a class that stands in for another one while a file is read, so that no code of that one runs.

    Args:
        name: module and name of the class, as ``torch.serialization.get_unsafe_globals_in_checkpoint`` returns it.
    """
    module, _, plain = name.rpartition(".")
    return type(plain, (Opaque,), {"__module__": module, "__qualname__": plain})


@contextlib.contextmanager
def standing_in(files: Iterable[Path]) -> Iterator[None]:
    """Let torch read files as data though they hold more: objects of other classes are read as stand-ins.

    Args:
        files: what is going to be read; torch's older format does not list what it holds, and is read as ever.
    """
    unknown = {name for file in files if zipfile.is_zipfile(file) for name in unknown_classes(file)}
    with allowing([stand_in(name) for name in sorted(unknown)]):
        yield


def is_stand_in(value: Any) -> bool:
    """Return whether a value, or a class, stands in for what was not loaded."""
    return issubclass(value if isinstance(value, type) else type(value), Opaque)


def stand_ins(content: Mapping[Any, Any], is_read: Callable[[str], bool]) -> dict[str, str]:
    """Return the stand-ins in what was read from a file: the name of each class, by where the first one is.

    Args:
        content: what torch returned.
        is_read: returns whether what it has under a key is looked at, and an object at a place such as ``"key.0"``.
    """
    found: dict[str, str] = {}
    waiting = [(str(key), value) for key, value in content.items() if is_read(str(key))]
    known: set[int] = set()
    while waiting:
        place, value = waiting.pop()
        is_odd = is_stand_in(value)
        if id(value) in known or (is_odd and not is_read(place)):
            continue
        known.add(id(value))
        if is_odd:
            kind = value if isinstance(value, type) else type(value)
            found.setdefault(f"{kind.__module__}.{kind.__qualname__}", place)
        waiting.extend((f"{place}.{key}", child) for key, child in _inside(value))
    return found


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
        yield from ((key, key) for key in value)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from enumerate(value)
    elif getattr(getattr(value, "dtype", None), "hasobject", False):
        yield from enumerate(value.ravel().tolist())
    if not isinstance(value, type):
        yield from getattr(value, "__dict__", {}).items()
