"""Make every ``torch.load`` read data only, so that no code named in a file is run."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
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


def added_classes() -> set[str]:
    """Return the names of the classes that torch was told of: it makes them, and need not be able to fill them."""
    import torch

    added = torch.serialization.get_safe_globals()
    return {each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in added}


def _is_data(name: str, allowed: set[str]) -> bool:
    # Modules are renamed between versions of numpy and python: numpy.core and numpy._core, pathlib._local.
    module, _, attribute = name.rpartition(".")
    root = module.partition(".")[0]
    return root in ("numpy", "pathlib") and any(
        each.startswith(f"{root}.") and each.rpartition(".")[2] == attribute for each in allowed
    )
