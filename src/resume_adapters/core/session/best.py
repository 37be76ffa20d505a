"""Which checkpoint a manifest names as the best."""

from __future__ import annotations

from resume_adapters.core.checkpoint.layout import CheckpointState, state_of
from resume_adapters.core.run.run import ResumableRun

_THERE = (CheckpointState.COMMITTED, CheckpointState.SUPERSEDED)


class BestCheckpoint:
    """The best checkpoint that is there: retention protects what a manifest names.

    Args:
        run: the run.
    """

    def __init__(self, run: ResumableRun) -> None:
        self._run = run
        self._existing: str | None = None
        self._named: str | None = None

    def of_manifest(self, best: str | None, name: str, resumed: str | None) -> str | None:
        """Return the best checkpoint for a manifest: the one that the loop names, or the last one that was there.

        The save of the one that the loop names may have failed.

        Args:
            best: what the loop names.
            name: the checkpoint that is being saved.
            resumed: what the manifest of the checkpoint names from which this launch resumed.
        """
        for each in (self._named or resumed, best):
            if each is not None and state_of(self._run.storage, self._run.directory / each) in _THERE:
                self._existing = each
        self._named = best
        return name if best == name else self._existing
