"""The errors of resume-adapters.

Every error says what was found, what was expected and what to do next, and carries ``path`` and ``step`` where they
are known. Each is a :class:`ResumeError` and also the builtin that a caller would expect::

    ResumeError
    |-- CheckpointDamaged       (ValueError)         files disagree with their manifest
    |-- NoValidCheckpoint       (RuntimeError)       checkpoints exist, none is valid on every rank
    |-- CheckpointsExist        (FileExistsError)    resume="scratch" in a run directory with committed checkpoints
    |-- FormatTooNew            (ValueError)         written by a later on-disk format
    |-- FormatMismatch          (ValueError)         lacks what this version reads of a checkpoint
    |-- RunDirectoryUnusable    (OSError)            not a directory, not writable
    |-- RunHalted               (RuntimeError)       the run was halted; a human decides whether it goes on
    |-- SaveFailed              (OSError)            a save could not be completed; nothing was committed
    |-- FencedOff               (RuntimeError)       a later start owns the run directory
    |-- PeerFailed              (RuntimeError)       another rank failed, so this one stops too
    |-- StateMismatch           (ValueError)         the checkpoint belongs to another model, topology or data
    |-- NotRestored             (RuntimeError)       the restored state differs from what was saved
    |-- NotSerialisable         (TypeError)          a part holds something a checkpoint cannot carry
    |-- UnsupportedSetting      (ValueError)         a setting under which an exact resume is impossible
    `-- MissingFramework        (ImportError)        the adapter's framework is not installed, or too old
"""

from __future__ import annotations

from pathlib import Path


class ResumeError(Exception):
    """Base of every error of this package.

    Args:
        message: what was found, what was expected, what to do.
        path: the file or directory concerned.
        step: the optimizer step concerned.
    """

    def __init__(self, message: str, *, path: str | Path | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = None if path is None else Path(path)
        self.step = step

    def __str__(self) -> str:
        return self.message


class CheckpointDamaged(ResumeError, ValueError):
    """A checkpoint's files disagree with its manifest."""


class NoValidCheckpoint(ResumeError, RuntimeError):
    """Checkpoints exist, but none is valid on every rank. A fresh start would lose them, so it is not made."""


class CheckpointsExist(ResumeError, FileExistsError):
    """``resume="scratch"`` was asked for in a run directory that holds committed checkpoints."""


class FormatTooNew(ResumeError, ValueError):
    """The manifest was written by a later on-disk format than this version reads."""


class FormatMismatch(ResumeError, ValueError):
    """The checkpoint lacks something that this version reads: another version of this package wrote it."""


class RunDirectoryUnusable(ResumeError, OSError):
    """The run directory is not a directory, or cannot be written."""


class RunHalted(ResumeError, RuntimeError):
    """The run was halted, and nobody has said yet that it may go on."""


class SaveFailed(ResumeError, OSError):
    """A save could not be completed. Nothing was committed and the previous checkpoint is intact."""


class FencedOff(ResumeError, RuntimeError):
    """A later start of the same run directory owns it now; this process may not commit any more."""


class PeerFailed(ResumeError, RuntimeError):
    """Another rank failed during a collective operation, so this rank stops with it."""


class StateMismatch(ResumeError, ValueError):
    """The checkpoint belongs to another model, another topology or other data."""


class NotRestored(ResumeError, RuntimeError):
    """After restoring, the live state differs from what was saved."""


class NotSerialisable(ResumeError, TypeError):
    """A part holds an object that a checkpoint cannot carry without running code when it is loaded."""


class UnsupportedSetting(ResumeError, ValueError):
    """A setting under which an exact resume is impossible."""


class MissingFramework(ResumeError, ImportError):  # type: ignore[misc]  # ImportError has a path too
    """The framework of an adapter is not installed, or older than the adapter needs."""


class Stopped(SystemExit):
    """Leaves the process after a requested stop was saved. Not an error: the exit status tells "resubmit me".

    Args:
        reason: why the run was asked to stop, for example ``"SIGTERM"``.
        code: the exit status, 0 by default.
    """

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(code)
        self.reason = reason


class Halted(Stopped):
    """Leaves the process after :meth:`~resume_adapters.core.run.run.ResumableRun.halt` was obeyed, with exit status 3.

    Args:
        reason: what a human is to look at.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, 3)
