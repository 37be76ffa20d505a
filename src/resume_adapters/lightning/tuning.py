"""Lightning's finders of a learning rate or a batch size, which train for a moment and throw that away.

A :class:`Tuner` calls ``fit()`` for it and ends that before the training. As callbacks they do it within the ``fit()``
of the training, mostly before the first step.
"""

from __future__ import annotations

import importlib
from typing import Any

from resume_adapters.lightning.compat import pl

_attributes: Any = importlib.import_module(f"{pl.__name__}.utilities.parsing")


def finders(trainer: Any) -> list[tuple[Any, str]]:
    """Return the finders among the callbacks, each with the name of the method that searches."""
    kinds = {pl.callbacks.LearningRateFinder: "lr_find", pl.callbacks.BatchSizeFinder: "scale_batch_size"}
    return [(each, name) for each in trainer.callbacks for kind, name in kinds.items() if isinstance(each, kind)]


def is_only_tuning(trainer: Any) -> bool:
    """Return whether this ``fit()`` is one of a :class:`Tuner`, which trains nothing that is kept."""
    return any(each._early_exit for each, _ in finders(trainer))  # seam: lightning 2.4-2.6


def capture(trainer: Any) -> dict[str, Any]:
    """Capture the attributes of the module and the datamodule that the finders among the callbacks set."""
    module, names = trainer.lightning_module, {name for each, _ in finders(trainer) for name in _names(each)}
    held = (name for name in sorted(names) if _attributes.lightning_hasattr(module, name))
    return {name: _attributes.lightning_getattr(module, name) for name in held}


def restore(trainer: Any, saved: dict[str, Any]) -> None:
    """Restore what :func:`capture` returned."""
    for name in capture(trainer).keys() & saved.keys():
        _attributes.lightning_setattr(trainer.lightning_module, name, saved[name])


def _names(finder: Any) -> list[str]:
    """Return the attributes that a finder may set."""
    if isinstance(finder, pl.callbacks.BatchSizeFinder):
        return [finder._batch_arg_name]  # seam: lightning 2.4-2.6
    return [finder._attr_name] if finder._attr_name else ["lr", "learning_rate"]  # seam: lightning 2.4-2.6
