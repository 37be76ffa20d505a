"""How resume comes into the processes that ``resume-adapters run`` starts.

``run`` puts this directory on their ``PYTHONPATH``. torch and Lightning find the functions here by the entry points in
the ``dist-info`` beside this file: the installed package itself has none, so that no other process ever loads it, be
its install broken or not. So this file stands alone, and imports nothing before it has read the variable.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def begin() -> None:
    """Wait for the Trainers of transformers: torch calls it at the end of its import."""
    if not _is_wanted():
        return
    try:
        from resume_adapters import unedited

        unedited.begin()
    except Exception as error:  # of any kind: it would be one of `import torch`
        _say(error)


def callbacks() -> list[Any]:
    """Return the callbacks that Lightning adds to a Trainer.

    Raises:
        ResumeError: they cannot be made of the options in the environment.
    """
    return _callbacks("lightning.pytorch")


def callbacks_of_pytorch_lightning() -> list[Any]:
    """Return those of a Trainer of ``pytorch_lightning``: a script may have imported both, and a library use one."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    if not _is_wanted():
        return []
    try:
        from resume_adapters.integrations import lightning_files

        lightning_files.asking[package] = None
        from resume_adapters.lightning import unedited
    except Exception as error:  # likewise
        if type(error).__module__ == "resume_adapters.errors":
            raise
        _say(error)
        return []
    return [unedited.CallbackOfEnvironment()]


def _is_wanted() -> bool:
    return os.environ.get("RESUME_ADAPTERS") == "1"


def _say(error: Exception) -> None:
    print(
        f"resume-adapters: this process does not resume: {type(error).__name__}: {error}. Install the package again "
        f"into the environment of {sys.executable}, or start without `resume-adapters run`",
        file=sys.stderr,
    )
