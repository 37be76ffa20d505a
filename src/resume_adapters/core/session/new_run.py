"""The run of a training call, made of what the user has set and of what the framework determines.

An option that a run needs is passed on here alone; every adapter makes its run by :func:`new_run`.
"""

from __future__ import annotations

import os
from typing import Any

from resume_adapters.core.checkpoint.retention import KeepAll, Policy
from resume_adapters.core.choices import Fork
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.run.context import RunOptions
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.framework import Framework
from resume_adapters.core.session.options import ResumeFrom, ResumeOptions
from resume_adapters.core.stop.policy import StopOn
from resume_adapters.core.storage.base import Storage


def new_run(
    directory: str | os.PathLike[str],
    framework: Framework,
    options: ResumeOptions,
    *,
    resume: ResumeFrom | None = None,
    keep: Policy | None = None,
    ranks: Ranks | None = None,
    storage: Storage | None = None,
    **of_framework: Any,
) -> ResumableRun:
    """Return the run that these options describe, not yet opened.

    Args:
        options: what the user has set.
        resume: what the framework's own call names; it comes before the option.
        keep: the adapter's default for ``keep``.
        ranks: the ranks of the run; by default those of ``torch.distributed``.
        storage: the file operations; the local disk by default.
        of_framework: further fields of :class:`RunOptions`.

    Raises:
        UnsupportedSetting: an option is invalid.
    """
    keep = keep if options.keep is None else options.keep
    stop = options.stop
    given = options.resume if resume is None else resume
    run_options = RunOptions(
        framework=framework.about.label,
        foreign=framework.foreign,
        resume="auto" if isinstance(given, Fork) else given,
        keep=KeepAll() if keep is None else keep,
        stop=StopOn() if stop is None else stop,
        cadence=options.cadence(),
        on_save_error=options.on_save_error,
        mirror=options.mirrors(),
        staging=framework.staging(options.stage),
        weights=framework.weights_files(),
        **of_framework,
    )
    return ResumableRun(directory, run_options, ranks=ranks, storage=storage)
