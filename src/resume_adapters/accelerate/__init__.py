"""Exact resume for a hand-written Accelerate loop: :func:`register_for_resume`, and wrap the epochs and the batches.

Who saves what, and through which seam:

==========  =========  ==========================================================================================
part        saved by   seam
==========  =========  ==========================================================================================
model       framework  ``save_state``; loaded by this adapter, so that keys of ``torch.compile`` fit. Save and load
                       hooks are called as ``load_state`` calls them
optimizer   framework  ``save_state``
scheduler   framework  ``save_state``, where it was prepared; else name it: ``scheduler=scheduler``
scaler      both       ``save_state``, and by the core
registered  both       ``register_for_checkpointing``; restored by the core, by name
buffers     core       those of each process, under FSDP2 and under DDP with ``broadcast_buffers=False``
replicas    core       models and optimizers of each process, under ``LocalSGD`` and where they differ otherwise
counters    core       epoch, step and running loss of the loop; ``run.memory``; ``accelerator.step``; ``iteration``
rng         core       after the save, on every rank (``random_states_*.pkl`` stays for the bare Accelerate)
data        core       the loaders given to ``run.batches``, watched beneath what ``prepare`` put around them
metrics     core       ``run.best``
observed    core       schedulers that nobody registered; what the models hold beside their state dict
trackers    core       run ids of W&B and MLflow, directories of TensorBoard
others      core       every keyword of :func:`register_for_resume`, for example ``ema=ema``
==========  =========  ==========================================================================================

``load_state`` itself is not used: it unpickles what was registered, whatever that runs, and pairs it by its order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

try:
    import accelerate
except ImportError as error:
    from resume_adapters.errors import MissingFramework

    raise MissingFramework("resume_adapters.accelerate needs accelerate: pip install 'accelerate>=1.6,<2'") from error

from resume_adapters.accelerate.framework import AccelerateFramework
from resume_adapters.accelerate.strategies import require_supported
from resume_adapters.core.checkpoint.retention import KeepLast, Policy
from resume_adapters.core.choices import OnBatchChange, OnSaveError, Stage, Verify
from resume_adapters.core.loop.loop import ResumableLoop
from resume_adapters.core.recovery.attempt import between_attempts
from resume_adapters.core.requirements import require_version
from resume_adapters.core.saving.cadence import SaveEvery
from resume_adapters.core.session.new_run import new_run
from resume_adapters.core.session.options import ResumeFrom, ResumeOptions, parts_among, run_directory_override
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Mirror
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.integrations.accelerate_state import reset_accelerate

require_version("accelerate", accelerate.__version__, "1.6", extra="accelerate")
between_attempts(reset_accelerate)


def register_for_resume(
    accelerator: accelerate.Accelerator,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: ResumeFrom = "auto",
    keep: Policy | None = None,
    stop: StopOn | None = None,
    save_every: SaveEvery | None = None,
    mtbf: timedelta | None = None,
    verify: Verify = True,
    on_batch_change: OnBatchChange = "refuse",
    on_save_error: OnSaveError = "stop",
    stage: Stage = "auto",
    mirror: Sequence[Mirror] = (),
    **parts: Any,
) -> ResumableLoop:
    """Make the loop that follows resume by itself. Call it after ``accelerator.prepare``, once.

    The other options are those of every adapter: :class:`~resume_adapters.core.session.options.ResumeOptions`.

    Args:
        accelerator: what prepared the models, optimizers, schedulers and loaders.
        run_dir: where checkpoints go; by default ``checkpoints`` in the accelerator's ``project_dir``.
        keep: by default ``total_limit`` read as :class:`KeepLast`, else everything is kept.
        save_every: by default at the end of each epoch.

    Raises:
        UnsupportedSetting: there is no directory for the checkpoints, a part cannot save its state, or a setting rules
            an exact resume out.
    """
    require_supported(accelerator)
    config = accelerator.project_configuration
    override = run_directory_override()
    if override is None and run_dir is None and config.project_dir is None:
        raise UnsupportedSetting(
            "there is no directory for the checkpoints: pass Accelerator(project_dir=...), or "
            "register_for_resume(accelerator, run_dir=...)"
        )
    given = Path(config.project_dir or "") / "checkpoints" if run_dir is None else run_dir
    directory = override or Path(os.path.abspath(given))
    found = parts_among(parts, "run_dir")
    options = ResumeOptions(
        resume, keep, stop, save_every, mtbf, verify, on_batch_change, on_save_error, stage, mirror, parts=found
    )
    each_epoch = options.cadence() is None
    framework = AccelerateFramework(accelerator, directory)
    run = new_run(directory, framework, options, keep=KeepLast(config.total_limit) if config.total_limit else None)
    loop = ResumableLoop(framework, run, options, each_epoch=each_epoch)
    framework.answer_saves(loop.save)
    return loop
