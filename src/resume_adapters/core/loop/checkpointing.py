"""What of a hand-written loop is in a checkpoint: saved, and put back."""

from __future__ import annotations

from typing import Any

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.metrics import LoopMetrics
from resume_adapters.core.loop.passes import EpochPasses
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import rng
from resume_adapters.core.state.stateful import StaticState

Tree = dict[str, Any]


class LoopCheckpointing:
    """The state of a loop.

    Args:
        framework: the framework's side of the loop.
        session: the session.

    Attributes:
        passes: the passes over the training loaders.
        metrics: the losses and metrics that the loop was told of.
    """

    def __init__(self, framework: LoopFramework, session: Session) -> None:
        self.passes = EpochPasses(framework, session)
        self.metrics = LoopMetrics()
        self._framework = framework
        self._session = session

    # ---- Resuming

    def restore(self) -> Resumed:
        """Choose, load and prove; return what of the run is done.

        Raises:
            ResumeError: as the documentation's tables of errors say.
        """
        session, framework = self._session, self._framework
        checkpoint = session.choose()
        progress = Resumed()
        if checkpoint is not None:
            session.require_architecture(framework)
            framework.load(session)
            session.restore_parts(framework.parts())
            if session.own is not None:
                progress = self._restore_own(session.own)
            else:
                progress = framework.adopt(checkpoint)
                self.passes.adopt(progress.batches)
        for module in framework.modules():
            session.align_buckets(module)
        if session.own is not None:
            framework.restore(session.own["framework"])
            rng.restore(session.own["rng"])
        return progress

    def _restore_own(self, own: Tree) -> Resumed:
        checkpoint = self._session.checkpoint
        assert checkpoint is not None
        consumed = self.passes.restore(own)
        self.metrics.restore(own["losses"], self._session.run.saved(checkpoint).record("metrics"))
        return Resumed(own["epoch"], checkpoint.step, consumed)

    # ---- Saving

    def save(self, epoch: int, step: int) -> None:
        """Save a checkpoint. Every rank calls it, with no gradients held.

        Args:
            epoch: the epoch that is running, from 0.
            step: optimizer steps completed.
        """

        def own() -> Tree:
            return {
                "epoch": epoch,
                **self.passes.state(),
                "losses": self.metrics.losses(),
                "framework": framework.state(),
                "rng": rng.capture(),
            }

        framework, metrics = self._framework, self.metrics
        name = framework.checkpoint_name(step)
        metrics.assign(name)
        self._session.save_checkpoint(
            name,
            step,
            model=framework,
            native=lambda: framework.save(self._session.run.directory / name),
            own=own,
            parts={**framework.parts(), "metrics": StaticState(metrics.best())},
            owner=framework.owner,
            entries=self._entries,
            facts=lambda: {"epoch": epoch + self.passes.fraction, "metrics": metrics.facts()},
            best=metrics.best_checkpoint,
        )
        metrics.forget()

    def _entries(self) -> list[PartEntry]:
        counted = {"counters": "epoch, step, running loss", "metrics": "best values, and which checkpoint has them"}
        return [
            *self._framework.entries(),
            *self._session.entries(self._framework.parts(), **counted),
            *self.passes.missing(),
        ]
