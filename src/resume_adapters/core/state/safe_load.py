"""Make every ``torch.load`` read data only, so that no code named in a file is run."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
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
