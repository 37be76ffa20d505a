"""The process group of the test device: ``group.cpp`` says what it is. Importing this registers it."""

from __future__ import annotations

import datetime
import importlib.machinery
import importlib.util
from typing import Any

import torch.distributed as dist

from device.compiled import GROUP, NAME, library


def _compiled() -> Any:
    file = str(library(GROUP))
    loader = importlib.machinery.ExtensionFileLoader(GROUP, file)
    spec = importlib.util.spec_from_file_location(GROUP, file, loader=loader)
    assert spec is not None, "it has a loader"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_over = _compiled().over


def _make(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return _over(dist.ProcessGroupGloo(store, rank, size, timeout))


dist.Backend.register_backend(NAME, _make, devices=[NAME])
