"""The run of a training call, made of what the user has set and of what the framework determines.

An option that a run needs is passed on here alone; every adapter makes its run by :func:`new_run`.
"""

from __future__ import annotations

import os
from typing import Any

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.framework import Framework
from resume_adapters.core.session.options import ResumeFrom, ResumeOptions


def new_run(
    directory: str | os.PathLike[str],
    framework: Framework,
    options: ResumeOptions,
    *,
    resume: ResumeFrom | None = None,
    keep: Policy | None = None,
    **of_framework: Any,
) -> ResumableRun:
    """Return the run that these options describe, not yet opened.

    Args:
        directory: where the run's checkpoints are.
        framework: the framework that trains.
        options: what the user has set.
        resume: what the framework's own call names; it comes before the option.
        keep: the adapter's default for ``keep``.
        of_framework: further arguments of :class:`ResumableRun`.

    Raises:
        UnsupportedSetting: an option is invalid.
    """
    return ResumableRun(
        directory,
        framework=framework.label,
        foreign=framework.foreign,
        resume=options.resume if resume is None else resume,
        keep=keep if options.keep is None else options.keep,
        stop=options.stop,
        cadence=options.cadence(),
        on_save_error=options.on_save_error,
        mirror=options.mirrors(),
        staging=framework.staging(options.stage),
        **of_framework,
    )
