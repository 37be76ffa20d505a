"""The errors of resume-adapters.

Every error says what was found, what was expected and what to do next, and carries ``path`` and ``step`` where they
are known. Each is a :class:`ResumeError` and also the builtin that a caller would expect::

    ResumeError
    |-- CheckpointDamaged       (ValueError)         files disagree with their manifest
    |-- NoValidCheckpoint       (RuntimeError)       checkpoints exist, none is valid on every rank
    |-- CheckpointsExist        (FileExistsError)    resume="scratch" in a run directory with committed checkpoints
    |-- FormatTooNew            (ValueError)         written by a later on-disk format
    |-- FormatMismatch          (ValueError)         a checkpoint lacks a field that this version reads
    |-- RunDirectoryUnusable    (OSError)            not a directory, not writable
    |-- RunHalted               (RuntimeError)       the run was halted; a human decides whether it goes on
    |-- SaveFailed              (OSError)            a save could not be completed; nothing was committed
    |-- FencedOff               (RuntimeError)       a later start owns the run directory
    |-- TierUnavailable         (ConnectionError)    a tier beyond the run directory does not answer, or refuses
    |-- PeerFailed              (RuntimeError)       another rank failed, so this one stops as well
    |-- ReplicasDiffer          (RuntimeError)       ranks differ in what DDP keeps alike
    |-- Hung                    (TimeoutError)       a rank has ended no step for too long
    |-- StateMismatch           (ValueError)         the checkpoint belongs to another model, topology or data
    |-- NotRestored             (RuntimeError)       the restored state differs from what was saved
    |-- NotSerialisable         (TypeError)          a part holds an object that is not data
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

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the sentence, which a traceback of fifty lines would hide."""
        return [f"{type(error).__name__}: {error}" for error in (self, self.__cause__) if error is not None]


class CheckpointDamaged(ResumeError, ValueError):
    """A checkpoint's files disagree with its manifest."""


class NoValidCheckpoint(ResumeError, RuntimeError):
    """Checkpoints exist, but none is valid on every rank. The run does not start from step 0 in their place."""


class CheckpointsExist(ResumeError, FileExistsError):
    """``resume="scratch"`` was asked for in a run directory that holds committed checkpoints."""


class FormatTooNew(ResumeError, ValueError):
    """The manifest has a later on-disk format than this version reads."""


class FormatMismatch(ResumeError, ValueError):
    """The checkpoint lacks a field that this version reads: a different version of this package wrote it."""


class RunDirectoryUnusable(ResumeError, OSError):
    """The run directory is not a directory, or cannot be written."""


class RunHalted(ResumeError, RuntimeError):
    """The run was halted and has not been released by ``resume-adapters stop --undo``."""


class SaveFailed(ResumeError, OSError):
    """A save could not be completed. Nothing was committed and the previous checkpoint is intact.

    Args:
        message: what was found, what was expected, what to do.
        path: the checkpoint.
        step: its optimizer step.
        errno: what the system said, where it is known.
    """

    def __init__(
        self, message: str, *, path: str | Path | None = None, step: int | None = None, errno: int | None = None
    ) -> None:
        super().__init__(message, path=path, step=step)
        self.errno = errno


class FencedOff(ResumeError, RuntimeError):
    """A later start owns the run directory; this process can no longer commit."""


class TierUnavailable(ResumeError, ConnectionError):
    """A tier beyond the run directory does not answer, or refuses what is asked. Nothing local is touched."""


class PeerFailed(ResumeError, RuntimeError):
    """Another rank failed during a collective operation, so this rank stops as well."""


class ReplicasDiffer(ResumeError, RuntimeError):
    """An audit found that ranks differ in what DDP keeps alike. Nothing of it is saved."""


class Hung(ResumeError, TimeoutError):
    """A rank has ended no step for too long, within a restartable block that is not run again."""


class StateMismatch(ResumeError, ValueError):
    """The checkpoint belongs to another model, topology or dataset."""


class NotRestored(ResumeError, RuntimeError):
    """After restoring, the live state differs from what was saved."""


class NotSerialisable(ResumeError, TypeError):
    """A part holds an object that only code could load again, such as a pickled class."""


class UnsupportedSetting(ResumeError, ValueError):
    """A setting under which an exact resume is impossible."""


class MissingFramework(ResumeError, ImportError):  # type: ignore[misc]  # ImportError has a path too
    """The adapter's framework is not installed, or too old."""


class Stopped(SystemExit):
    """Ends the process after a requested stop was saved. Not an error: the exit status means "resubmit me".

    Args:
        reason: why the run was asked to stop, for example ``"SIGTERM"``.
        code: the exit status, 0 by default.
    """

    def __init__(self, reason: str, code: int = 0) -> None:
        super().__init__(code)
        self.reason = reason


class Halted(Stopped):
    """Ends the process with exit status 3, after :meth:`~resume_adapters.core.run.run.ResumableRun.halt` and a save.

    Args:
        reason: what a human should look at.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, 3)
