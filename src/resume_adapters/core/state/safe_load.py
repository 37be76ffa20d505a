"""Make every ``torch.load`` read data only, so that no code named in a file is run."""

from __future__ import annotations

import contextlib
import os
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
