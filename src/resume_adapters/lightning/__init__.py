"""Exact resume for Lightning: add :class:`ResumeCallback`, launch the same command again.

Who saves what, and through which seam:

==========  =========  ==========================================================================================
part        saved by   seam
==========  =========  ==========================================================================================
model       framework  ``Trainer.save_checkpoint``; keys of ``torch.compile`` are made to fit when it is read
optimizer   framework  ``optimizer_states`` of the checkpoint
scheduler   framework  ``lr_schedulers``
scaler      framework  the precision plugin's state
buffers     core       those of each process, where there are several
counters    core       the loops' counters, and the save point in the loop; gradients of an unfinished accumulation
rng         core       after the save, on every rank
data        core       the training loaders, tracked in place
metrics     core       the logged values that callbacks and schedulers read; what ModelCheckpoint does not save
callbacks   framework  ``state_dict()`` and ``on_save_checkpoint()`` of each; one that drops it is named
observed    core       what the module, callbacks and datamodule hold beside that, where it is data and changes
trackers    core       run ids of W&B and MLflow, directories of TensorBoard
others      core       every keyword of :class:`ResumeCallback`, for example ``ema=ema``
==========  =========  ==========================================================================================

What this package adds lies beside Lightning's file, which stays as Lightning writes it.

Read :mod:`callback` (events, and what is wrapped in the trainer) first, then :mod:`session` (the order of what
happens), :mod:`framework` (files and live objects), :mod:`data` (the loaders) and :mod:`loops` (where the training
is). The other modules each capture and restore one thing.
"""

from __future__ import annotations

from resume_adapters.lightning.callback import ResumeCallback
from resume_adapters.lightning.files import ResumeCheckpointIO

__all__ = ["ResumeCallback", "ResumeCheckpointIO"]
