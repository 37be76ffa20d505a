"""Trackers that a framework calls for each checkpoint: whether they read it then, as those do that upload it."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from resume_adapters.core.saving.staging import own_methods

_SWITCHES = (
    "_log_model",  # seam: lightning 2.4-2.6 (W&B, MLflow), transformers 4.57 to 5.23 (W&B, ClearML, DVC, SwanLab)
    "_log_artifacts",  # seam: transformers 4.57 to 5.23 (MLflow)
    "_should_upload_checkpoint",  # seam: transformers 4.57 to 5.23 (Neptune)
)
"""The attributes by which a tracker of a framework is told to upload checkpoints."""


def reads_checkpoints(tracker: Any, method: str, packages: Collection[str]) -> bool:
    """Return whether an object may read a checkpoint in the method that is called for it.

    Args:
        tracker: a callback or a logger.
        method: the name of the method. Where it is not a framework's own, the checkpoint may be read.
        packages: the framework, and where its decorators come from.
    """
    if own_methods(tracker, [method], packages):
        return True
    if not inspect.unwrap(getattr(type(tracker), method)).__code__.co_names:
        return False  # it does nothing
    switches = [vars(tracker)[name] for name in _SWITCHES if name in vars(tracker)]
    return not switches or any(getattr(each, "is_enabled", each) for each in switches)
