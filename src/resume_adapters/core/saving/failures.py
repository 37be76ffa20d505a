"""What follows a save that failed: the run ends, or training goes on and the next save tries again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from resume_adapters.core.choices import OnSaveError
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks
from resume_adapters.core.storage.diagnosis import is_full
from resume_adapters.errors import PeerFailed, ResumeError, SaveFailed, UnsupportedSetting

_MOST = 3
"""Failed saves in a row that end a run in any case: it would train for nothing."""


class _Failure(NamedTuple):
    """A failed save, as all ranks know it: whether a later one may succeed, and whether a disk is full."""

    error: ResumeError
    may_pass: bool
    is_full: bool


class SaveFailures:
    """Decides, alike on all ranks, whether a run goes on after a save that failed.

    Args:
        on_save_error: what the user wants.

    Raises:
        UnsupportedSetting: it is neither ``"stop"`` nor ``"continue"``.
    """

    def __init__(self, ranks: Ranks, on_save_error: OnSaveError) -> None:
        if on_save_error not in ("stop", "continue"):
            raise UnsupportedSetting(f'on_save_error={on_save_error!r} is invalid: expected "stop" or "continue"')
        self._ranks = ranks
        self._continues = on_save_error == "continue"
        self._in_a_row = 0

    def committed(self) -> None:
        """Count a commit: failures before it no longer count."""
        self._in_a_row = 0

    def attempt(
        self,
        work: Callable[[], object],
        *,
        free_space: Callable[[], object] | None = None,
        is_last: bool = False,
    ) -> bool:
        """Save, or wait for a commit; return whether that succeeded. Every rank calls it at the same place.

        Args:
            work: raises on all ranks if it fails on one.
            free_space: removes what no policy keeps; where a disk is full, it is called before a second try.
            is_last: the run ends after it, so that no later save can make up for it.

        Raises:
            ResumeError: it failed, and the run does not go on.
        """
        failure = self._try(work)
        if failure is not None and failure.is_full and failure.may_pass and free_space is not None:
            pruning = self._try(free_space)
            failure = pruning if pruning is not None and not pruning.may_pass else self._try(work)
        if failure is None:
            return True
        self._in_a_row += 1
        is_over = self._in_a_row >= _MOST
        if not self._continues or is_last or is_over or not failure.may_pass:
            if self._continues and is_over and self._ranks.rank == 0:
                logger.error("%d saves in a row failed, so the run ends.", self._in_a_row)
            raise failure.error
        if self._ranks.rank == 0:
            logger.error(
                '%s. Training continues, as on_save_error="continue" says, and the next save tries again; after %d '
                "failures in a row the run ends (this is number %d).",
                str(failure.error).rstrip("."),
                _MOST,
                self._in_a_row,
            )
        return False

    def _try(self, work: Callable[[], object]) -> _Failure | None:
        try:
            work()
        except ResumeError as error:
            # What was fenced off, or holds an object that is not data, fails again.
            found = self._ranks.gather((isinstance(error, SaveFailed | PeerFailed), is_full(error)))
            return _Failure(error, all(may_pass for may_pass, _ in found), any(full for _, full in found))
        return None
