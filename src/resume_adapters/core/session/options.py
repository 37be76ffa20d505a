"""What the callbacks of all frameworks have in common: the options of a run, and its session while it trains."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from resume_adapters.core.checkpoint.retention import Policy
from resume_adapters.core.saving.cadence import SaveEvery
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.stateful import named_parts
from resume_adapters.core.stop.policy import StopOn


class OptionsCallback:
    """A callback with which a training call of any framework resumes; an adapter derives its own, and documents it.

    Attributes:
        session: the training call that is under way.
    """

    session: Session | None = None

    def __init__(
        self,
        *,
        resume: str | os.PathLike[str] = "auto",
        keep: Policy | None = None,
        stop: StopOn | None = None,
        save_every: SaveEvery | None = None,
        mtbf: timedelta | None = None,
        verify: bool = True,
        on_batch_change: str = "refuse",
        **parts: Any,
    ) -> None:
        self.resume = resume
        self.keep = keep
        self.stop = stop
        self.save_every = save_every
        self.mtbf = mtbf
        self.verify = verify
        self.on_batch_change = on_batch_change
        self.parts = named_parts(parts)

    def halt(self, reason: str) -> None:
        """Stop the run for a human to look at: it saves, leaves with exit code 3, and refuses to start again.

        ``resume-adapters resume RUN_DIR`` lets it go on.

        Args:
            reason: what the human is to look at.
        """
        if self.session is not None:
            self.session.run.halt(reason)
