"""Exact resume for the Hugging Face ``Trainer``: add :class:`ResumeCallback`, launch the same command again.

Who saves what, and through which seam:

==========  =========  ==========================================================================================
part        saved by   seam
==========  =========  ==========================================================================================
model       framework  ``Trainer._save_checkpoint``; loaded by this adapter, so that keys of ``torch.compile`` fit
optimizer   framework  ``optimizer.pt``
scheduler   framework  ``scheduler.pt``
scaler      framework  ``scaler.pt``
buffers     core       those of each process, under FSDP2 and with ``ddp_broadcast_buffers=False``
counters    both       ``trainer_state.json``; the partial running loss and the elapsed time are added
rng         core       after the save, on every rank (``rng_state.pth`` stays for the bare Trainer)
data        core       the loader of ``get_train_dataloader``, watched in place
metrics     framework  ``trainer_state.json``
callbacks   both       ``ExportableState`` through ``trainer_state.json``; ``state_dict()`` by this adapter
observed    core       what the trainer, its model and its callbacks hold beside that, where it is data and changes
trackers    core       run ids of W&B and MLflow, directories of TensorBoard
others      core       every keyword of :class:`ResumeCallback`, for example ``ema=ema``
==========  =========  ==========================================================================================

A ``TrainerCallback`` alone cannot make ``train()`` resume: no event comes before the load. Importing this module
therefore wraps ``Trainer.train`` once; the wrapper does nothing for a trainer without a :class:`ResumeCallback`.
"""

from __future__ import annotations

try:
    import accelerate
    import transformers
except ImportError as error:
    from resume_adapters.errors import MissingFramework

    raise MissingFramework(
        "resume_adapters.hf needs transformers and accelerate: pip install 'transformers>=4.57,<6' 'accelerate>=1.6'"
    ) from error

from resume_adapters.core.recovery.attempt import between_attempts
from resume_adapters.core.requirements import require_version

require_version("transformers", transformers.__version__, "4.57", extra="hf")
require_version("accelerate", accelerate.__version__, "1.6", extra="hf")

from resume_adapters.hf.callback import ResumeCallback  # noqa: E402  # only of a version that serves
from resume_adapters.hf.patch import install  # noqa: E402
from resume_adapters.integrations.accelerate_state import reset_accelerate  # noqa: E402

__all__ = ["ResumeCallback"]

install()
between_attempts(reset_accelerate)
