"""Exact resume for a training loop with Lightning Fabric: :func:`register_for_resume`, and wrap the epochs and batches.

Who saves what, and through which seam:

==========  =========  ==========================================================================================
part        saved by   seam
==========  =========  ==========================================================================================
model       framework  ``fabric.save``; loaded by this adapter, as data
optimizer   framework  ``fabric.save``
scheduler   framework  ``fabric.save``, where it was passed; else it is observed
scaler      core       of the precision ``16-mixed``
buffers     core       those of each process, under FSDP2 and under DDP with ``broadcast_buffers=False``
replicas    core       models and optimizers of each process, where the processes train apart
counters    core       epoch, step and running loss of the loop; ``run.memory``; the passes that Fabric's loaders count
rng         core       after the save, on every rank
data        core       the loaders given to ``run.batches``, watched beneath what ``setup_dataloaders`` put around them
metrics     core       ``run.best``
observed    core       schedulers that nobody registered; what the models hold beside their state dict
trackers    core       run ids of W&B and MLflow, directories of TensorBoard
others      core       every further keyword of :func:`register_for_resume`, for example ``ema=ema``
==========  =========  ==========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.choices import OnSaveError, Stage, Verify
from resume_adapters.core.loop.loop import ResumableLoop
from resume_adapters.core.saving.cadence import SaveEvery
from resume_adapters.core.session.new_run import new_run
from resume_adapters.core.session.options import ResumeFrom, ResumeOptions, parts_among, run_directory_override
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Mirror
from resume_adapters.fabric.framework import FabricFramework
from resume_adapters.fabric.objects import require_supported, trained_objects
from resume_adapters.fabric.sharded import ShardedFramework
from resume_adapters.integrations.model_parallel import is_model_parallel


def register_for_resume(
    fabric: Any,
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
    """Make the loop that follows resume by itself. Call it after ``fabric.launch`` and ``fabric.setup``, once.

    The other options are those of every adapter but ``on_batch_change``:
    :class:`~resume_adapters.core.session.options.ResumeOptions`.

    Args:
        fabric: what has set up the models, optimizers and loaders.
        run_dir: where checkpoints go.
        keep: by default everything is kept.
        save_every: by default at the end of each epoch.
        parts: the models and optimizers that ``fabric.setup`` returned, by name; also schedules, further Statefuls
            such as ``ema=ema``, and plain torch, numpy and python generators.

    Raises:
        UnsupportedSetting: no model or optimizer is given, a part cannot save its state, or a setting rules an exact
            resume out.
    """
    require_supported(fabric)
    objects = trained_objects(parts, fabric.strategy.precision)
    saved = {name: each for name, each in parts.items() if name in objects.by_name()}
    directory = run_directory_override() or os.path.abspath(run_dir)
    found = parts_among({name: each for name, each in parts.items() if name not in saved}, "run_dir")
    options = ResumeOptions(
        resume, keep, stop, save_every, mtbf, verify, "refuse", on_save_error, stage, mirror, parts=found
    )
    each_epoch = options.cadence() is None
    kind = ShardedFramework if is_model_parallel(fabric.strategy) else FabricFramework
    framework = kind(fabric, objects, saved)
    run = new_run(directory, framework, options)
    return ResumableLoop(framework, run, options, each_epoch=each_epoch)
