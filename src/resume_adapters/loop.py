"""Exact resume for a training loop of torch alone: :func:`register_for_resume`, and wrap the epochs and batches.

Who saves what, and through which seam:

==========  =========  ==========================================================================================
part        saved by   seam
==========  =========  ==========================================================================================
model       framework  ``torch.save`` of each model's state without wrappers; loaded as data
optimizer   framework  ``torch.save``
scheduler   framework  ``torch.save``, where it was passed; else it is observed
scaler      core       where it was passed
buffers     core       those of each process, where DDP does not make them those of the first
replicas    core       models and optimizers of each process, where the processes train apart
counters    core       epoch, step and running loss of the loop; ``run.memory``
rng         core       after the save, on every rank
data        core       the loaders given to ``run.batches``
metrics     core       ``run.best``
observed    core       schedulers that nobody registered; what the models hold beside their state dict
trackers    core       run ids of W&B and MLflow
others      core       every further keyword of :func:`register_for_resume`, for example ``ema=ema``
==========  =========  ==========================================================================================
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.choices import OnSaveError, Stage, Verify
from resume_adapters.core.loop.framework import Resumed
from resume_adapters.core.loop.loop import ResumableLoop
from resume_adapters.core.loop.plain import PlainFramework, TrainedObjects
from resume_adapters.core.loop.tensors import are_saved
from resume_adapters.core.ranks import current_world_size
from resume_adapters.core.saving.cadence import SaveEvery
from resume_adapters.core.session.framework import FrameworkFacts
from resume_adapters.core.session.new_run import new_run
from resume_adapters.core.session.options import ResumeFrom, ResumeOptions, parts_among, run_directory_override
from resume_adapters.core.state.stateful import is_optimizer, is_schedule, parameters_of, uncompiled
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Mirror
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.integrations.trackers.runs import Trackers

__all__ = ["ResumableLoop", "Resumed", "register_for_resume"]

_ELSEWHERE = {
    "torch.distributed.fsdp": "use FSDP2 under Accelerate, and resume_adapters.accelerate",
    "torch.distributed.optim": "use the optimizer itself, or FSDP2 under Accelerate and resume_adapters.accelerate",
    "torch.distributed.tensor": "use FSDP2 under Accelerate, and resume_adapters.accelerate",
    "deepspeed": "use resume_adapters.deepspeed",
}
"""What shards the state or moves it, by the package of its class, and what serves instead."""


def register_for_resume(
    run_dir: str | os.PathLike[str],
    *,
    resume: ResumeFrom = "auto",
    keep: Policy | None = None,
    stop: StopOn | None = None,
    save_every: SaveEvery | None = None,
    mtbf: timedelta | None = None,
    verify: Verify = True,
    on_save_error: OnSaveError = "stop",
    stage: Stage = "auto",
    mirror: Sequence[Mirror] = (),
    **parts: Any,
) -> ResumableLoop:
    """Make the loop that follows resume by itself. Call it when all that it trains is made, once.

    The other options are those of every adapter but ``on_batch_change``:
    :class:`~resume_adapters.core.session.options.ResumeOptions`.

    Args:
        run_dir: where checkpoints go.
        keep: by default everything is kept.
        save_every: by default at the end of each epoch.
        parts: the models, within DDP or ``torch.compile`` or not, and the optimizers, by name; also schedules, the
            ``GradScaler``, further Statefuls such as ``ema=ema``, and plain torch, numpy and python generators.

    Raises:
        UnsupportedSetting: no optimizer or nothing that it trains is given, a part cannot save its state, or a setting
            rules an exact resume out.
    """
    objects = _trained(parts)
    _require_supported(objects)
    directory = run_directory_override() or os.path.abspath(run_dir)
    saved = {*objects.by_name(), *(() if objects.scaler is None else ("scaler",))}
    found = parts_among({name: each for name, each in parts.items() if name not in saved}, "run_dir")
    options = ResumeOptions(
        resume, keep, stop, save_every, mtbf, verify, "refuse", on_save_error, stage, mirror, parts=found
    )
    about = FrameworkFacts(
        f"torch {torch.__version__}", "resume_adapters", "register_for_resume", "register_for_resume(run_dir, ...)"
    )
    framework = PlainFramework(objects, about, Trackers(), {})
    run = new_run(directory, framework, options)
    return ResumableLoop(framework, run, options, each_epoch=options.cadence() is None)


def _trained(named: Mapping[str, Any]) -> TrainedObjects:
    """Return what is trained of what was given by name: a model is what an optimizer has tensors of."""
    optimizers = {name: each for name, each in named.items() if is_optimizer(each)}
    stepped = {id(tensor) for tensor in parameters_of(*optimizers.values())}
    modules = {name: each for name, each in named.items() if isinstance(each, torch.nn.Module)}
    models = {
        name: each for name, each in modules.items() if any(id(tensor) in stepped for tensor in each.parameters())
    }
    if not models and not are_saved(optimizers.values()):
        raise UnsupportedSetting(
            "register_for_resume() was given no optimizer of torch, or no model that one of them trains: pass them by "
            "name, with whatever else must be saved:\n\n"
            "    run = register_for_resume(run_dir, model=model, optimizer=optimizer)\n"
        )
    scalers = {name: each for name, each in named.items() if isinstance(each, torch.amp.GradScaler)}
    return TrainedObjects(
        {name: _unwrapped(each) for name, each in models.items()},
        optimizers,
        {name: each for name, each in named.items() if is_schedule(each)},
        scaler=scalers.get("scaler"),
        scalers=tuple(scalers.values()),
        wrappers=tuple(models.values()),
    )


def _unwrapped(model: Any) -> Any:
    inner = uncompiled(model)
    inner = inner.module if isinstance(inner, DistributedDataParallel | DataParallel) else inner
    return model if inner is model else _unwrapped(inner)


def _require_supported(objects: TrainedObjects) -> None:
    """Refuse what shards or moves the state, and processes that do not know of each other.

    Raises:
        UnsupportedSetting: naming it, and what serves instead.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and current_world_size() == 1:
        raise UnsupportedSetting(
            f"{launched} processes were launched, by WORLD_SIZE, and none knows of the others, so each would write the "
            "files of all: call torch.distributed.init_process_group() before register_for_resume()"
        )
    of_models = [part for model in objects.wrappers for part in [*model.modules(), *model.parameters()]]
    parts = [*of_models, *objects.optimizers.values()]
    origins = {f"{kind.__module__}.{kind.__name__}" for each in parts for kind in type(each).__mro__}
    for origin, package in itertools.product(sorted(origins), _ELSEWHERE):
        if origin.startswith(package):
            raise UnsupportedSetting(
                f"{origin} shards or moves the state, and a loop of torch alone saves what each process has as a "
                f"whole: {_ELSEWHERE[package]}"
            )
