"""Reading what torch has pickled, as data: code that a file names is not run, whoever calls ``torch.load``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_FORCED, _FREE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""Variables of torch for callers of ``torch.load`` that cannot be reached. It refuses to load where both are set."""


@contextlib.contextmanager
def allowing(classes: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Let torch load these too as data; one of these contexts may be within another."""
    import torch

    before = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([each for each in classes if each not in before]):
        yield


@contextlib.contextmanager
def data_only(classes: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Let every ``torch.load`` read data only, also where a framework asks it to unpickle freely.

    Args:
        classes: what may be made beyond what torch makes by itself.
    """
    former = {name: os.environ.pop(name, None) for name in (_FORCED, _FREE)}
    os.environ[_FORCED] = "1"
    try:
        with allowing(classes):
            yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in former.items() if value is not None})
