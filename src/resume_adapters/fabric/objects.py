"""What a Fabric has set up of a training: models, optimizers and schedules, by the names that the script gives them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.loop.plain import TrainedObjects
from resume_adapters.core.requirements import require_version
from resume_adapters.core.state.stateful import is_schedule, uncompiled
from resume_adapters.errors import MissingFramework, UnsupportedSetting
from resume_adapters.integrations.lightning_files import imported_or_installed

NAMES = ("lightning.fabric", "lightning_fabric")


def version(name: str) -> str:
    """Return the version of the package that has Fabric under a name."""
    return str(importlib.import_module(name.partition(".")[0]).__version__)


def _require_installed() -> None:
    name = imported_or_installed(NAMES)
    if name is None:
        raise MissingFramework("resume_adapters.fabric needs lightning: pip install 'lightning>=2.4,<3'")
    require_version("lightning", version(name), "2.4", extra="lightning")


_require_installed()

_FOLLOWED = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


def trained_objects(named: Mapping[str, Any], precision: Any) -> TrainedObjects:
    """Return what is trained of what was given by name, as it is within Fabric's wrappers.

    Args:
        precision: the precision plugin, which may have a loss scaler.

    Raises:
        UnsupportedSetting: no model or no optimizer that ``fabric.setup`` returned is among it.
    """
    models = {name: each for name, each in named.items() if _is(each, "_FabricModule")}
    optimizers = {name: each for name, each in named.items() if _is(each, "_FabricOptimizer")}
    if not (models and optimizers):
        raise UnsupportedSetting(
            "register_for_resume() was given no model or no optimizer that fabric.setup() has returned: pass them "
            "by name, with whatever else must be saved:\n\n"
            "    model, optimizer = fabric.setup(model, optimizer)\n"
            "    run = register_for_resume(fabric, run_dir, model=model, optimizer=optimizer)\n"
        )
    scaler = getattr(precision, "scaler", None)
    return TrainedObjects(
        {name: each.module for name, each in models.items()},
        {name: each.optimizer for name, each in optimizers.items()},
        {name: each for name, each in named.items() if is_schedule(each)},
        scaler=None if scaler is None else precision,
        scalers=() if scaler is None else (scaler,),
        wrappers=(*models.values(), *optimizers.values()),
    )


def _is(each: Any, wrapper: str) -> bool:
    """Return whether Fabric has wrapped an object; a script's own may have attributes of the same names."""
    return any(kind.__name__ == wrapper for kind in type(uncompiled(each)).__mro__)  # seam: lightning 2.4-2.6


def name_of(fabric: Any) -> str:
    """Return the name, of :data:`NAMES`, under which the script uses Fabric: both may be imported."""
    kinds = type(fabric).__mro__
    return next(name for kind in kinds for name in NAMES if kind.__module__.startswith(f"{name}."))


def require_supported(fabric: Any) -> None:
    """Refuse a strategy that shards or moves the state.

    Raises:
        UnsupportedSetting: it is one.
    """
    found = type(fabric.strategy).__name__
    if found not in _FOLLOWED:
        raise UnsupportedSetting(
            f"Fabric's {found} shards or moves the state in a way that is not followed, so this run cannot be resumed "
            "exactly: train on one device, with DDP or ModelParallelStrategy (FSDP2), or with DeepSpeed under "
            "Accelerate or a Lightning Trainer"
        )
