"""Exact resume for a DeepSpeed training loop: make :class:`ResumeHooks`, and wrap the epochs and the batches.

Who saves what, and through which seam:

==========  =========  ==========================================================================================
part        saved by   seam
==========  =========  ==========================================================================================
model       framework  ``engine.save_checkpoint``; loaded by ``engine.load_checkpoint``, without running its pickles
optimizer   both       ``engine.save_checkpoint``; the powers of beta that C++ keeps are multiplied again
scheduler   framework  ``engine.save_checkpoint``, where the engine has it; else name it: ``scheduler=scheduler``
scaler      both       ``engine.save_checkpoint``, and by the core
buffers     both       ``engine.save_checkpoint`` of rank zero; of the other ranks by the core
counters    both       the engine's; epoch, micro-step and running loss by the core
rng         core       after the save, on every rank; with the states of DeepSpeed's activation checkpointing
data        core       the loaders given to ``run.batches``; of ``training_data=`` the torch loader beneath
metrics     core       ``run.best``
observed    core       schedulers that nobody registered; what the model holds beside its state dict
trackers    core       run ids of W&B and MLflow, directory of ``engine.monitor``'s TensorBoard
others      core       every keyword of :class:`ResumeHooks`, for example ``ema=ema``
==========  =========  ==========================================================================================

``client_state`` is not used: DeepSpeed merges its names over its own counters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

try:
    import deepspeed  # noqa: F401  # only asked whether it is there
except ImportError as error:
    from resume_adapters.errors import MissingFramework

    raise MissingFramework(
        "resume_adapters.deepspeed needs deepspeed: pip install 'deepspeed>=0.19.8,<0.20'"
    ) from error

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.choices import OnBatchChange, OnSaveError, Stage, Verify
from resume_adapters.core.loop.loop import ResumableLoop
from resume_adapters.core.saving.cadence import SaveEvery
from resume_adapters.core.session.new_run import new_run
from resume_adapters.core.session.options import ResumeFrom, ResumeOptions, parts_among, run_directory_override
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.tiers.options import Mirror
from resume_adapters.deepspeed.framework import DeepSpeedFramework
from resume_adapters.integrations.deepspeed_engine.supported import require_supported


class ResumeHooks(ResumableLoop):
    """Makes the loop that follows resume by itself. Make it after ``deepspeed.initialize``, once.

    The other options are those of every adapter: :class:`~resume_adapters.core.session.options.ResumeOptions`.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        run_dir: where checkpoints go: what ``save_checkpoint`` calls ``save_dir``. With ``use_node_local_storage`` in
            DeepSpeed's configuration, a directory on a disk of each node.
        keep: by default everything is kept, as DeepSpeed does.
        save_every: by default at the end of each epoch.

    Raises:
        UnsupportedSetting: a part cannot save its state, or a setting rules an exact resume out.
    """

    def __init__(
        self,
        engine: Any,
        run_dir: str | os.PathLike[str],
        *,
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
    ) -> None:
        directory = run_directory_override() or os.path.abspath(run_dir)
        require_supported(engine, str(directory))
        found = parts_among(parts, "run_dir")
        options = ResumeOptions(
            resume, keep, stop, save_every, mtbf, verify, on_batch_change, on_save_error, stage, mirror, parts=found
        )
        each_epoch = options.cadence() is None
        framework = DeepSpeedFramework(engine)
        run = new_run(directory, framework, options, latest="file", is_node_local=framework.is_node_local)
        super().__init__(framework, run, options, each_epoch=each_epoch)
