"""Choose what a training call resumes from, restore it, and verify it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import Manifest, describe_cursor
from resume_adapters.core.log import logger
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.context import RestoreContext, setting_differences
from resume_adapters.core.session.framework import Framework
from resume_adapters.core.session.loaders import LoaderRestorer
from resume_adapters.core.session.messages import log_extra, log_passed_over, log_sibling, log_start, log_wasted
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.session.records import OrderDigest, RankState, data_cursor
from resume_adapters.core.session.rescale import Rescale
from resume_adapters.core.state.ddp_buckets import BucketOrder
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful, is_schedule
from resume_adapters.errors import FormatMismatch

_RANKS = "number of ranks"


class Restorer:
    """Restores one training call.

    Args:
        run: the run, not yet opened.
        framework: the framework's files and live objects.
        kind: the record of the state that each rank saves.
        loaders: restores the training loaders.
        rescale: what follows from a different global batch size.

    Attributes:
        context: what this call resumes from; ``None`` for a fresh start.
        bucket_orders: for each DDP module the order in which its gradients become ready.
    """

    def __init__(
        self,
        run: ResumableRun,
        framework: Framework,
        options: ResumeOptions,
        kind: type[RankState],
        loaders: LoaderRestorer,
        rescale: Rescale,
    ) -> None:
        self.context: RestoreContext | None = None
        self.bucket_orders: list[BucketOrder] = []
        self._has_told = False
        self._run = run
        self._framework = framework
        self._options = options
        self._kind = kind
        self._loaders = loaders
        self._rescale = rescale

    def choose(self) -> RestoreContext | None:
        """Open the run directory, log what is resumed from, and read what this rank saved in it.

        Raises:
            StateMismatch: an invariant was different when it was saved.
            ResumeError: as :meth:`ResumableRun.open` does.
        """
        choice = self._run.open(lambda checkpoint: self.read(checkpoint).require_parts())
        checkpoint = choice.checkpoint
        if self._run.ranks.rank == 0:
            log_start(choice)
            log_passed_over(self._run)
            if checkpoint is not None and choice.passed_over:
                logger.warning(
                    "Of a later step than %s, and not committed by this run: %s. It lacks what an exact resume needs. "
                    "To start from it, pass its path as resume to a run in another directory.",
                    checkpoint.path.name,
                    ", ".join(choice.passed_over),
                )
            log_sibling(self._run)
            log_wasted(self._run.wasted)
            if checkpoint is not None:
                log_extra(checkpoint.path.name, self._run.reader(checkpoint).files.extra())
        if checkpoint is not None:
            self.context = self.read(checkpoint)
            self._require_invariants(self.context)
        manifest = checkpoint.manifest if checkpoint else None
        self._run.begin(checkpoint.step if checkpoint else 0, manifest.epoch if manifest else 0.0)
        return self.context

    def read(self, checkpoint: Checkpoint) -> RestoreContext:
        """Return the context in which a checkpoint is restored."""
        return RestoreContext(
            self._run, checkpoint, self._kind, verify=bool(self._options.verify), rescale=self._rescale
        )

    def replace_context(self, context: RestoreContext | None) -> None:
        """Resume from a different checkpoint than was chosen: one outside the run directory that is newer, or none."""
        self.context = context

    def _require_invariants(self, context: RestoreContext) -> None:
        """Compare the topology of the checkpoint, and refuse one whose invariants were different.

        Raises:
            StateMismatch: an invariant was different when it was saved.
        """
        launch, manifest = context.launch, context.checkpoint.manifest
        if launch is None or manifest is None:
            return

        def lacks(name: str) -> FormatMismatch:
            return context.source.lacks(f"{name} in {context.source.file}")

        self._rescale.restore(launch.shift)
        here = {_RANKS: context.ranks.world_size, **self._framework.about.topology}
        saved = {**launch.topology, _RANKS: manifest.world_size}
        self._loaders.add_topology_changes(setting_differences(saved, here, lambda name: lacks(f"topology.{name}")))
        differences = setting_differences(
            launch.invariants, self._framework.about.invariants, lambda name: lacks(f"fixed.{name}")
        )
        if differences:
            raise context.mismatch(differences, "it cannot be resumed from")
        self._framework.trackers.restore(context.reader.required_part("trackers"))
        if self._run.storage_group.is_leader:
            self._run.control.journal.append("resume", step=context.step, cursor=_cursor(context, manifest))

    def log_resumed(self) -> None:
        """Log where in the data the run is, once. Call it when nothing is left that may refuse it."""
        if self._has_told:
            return
        self._has_told, context = True, self.context
        manifest = context.checkpoint.manifest if context else None
        if context is not None and manifest is not None and context.rank_state is not None and context.ranks.rank == 0:
            logger.info("%s resumed at %s.", context.path.name, describe_cursor(_cursor(context, manifest)))

    def restore_parts(self, parts: Mapping[str, Stateful]) -> None:
        """Restore the user's parts and further ones, to be proven.

        Args:
            parts: those of the framework and of the training loop.

        Raises:
            StateMismatch: the checkpoint lacks one of them.
        """
        context = self.context
        assert context is not None, "something is being resumed"
        for part in self._options.parts.values():
            if is_schedule(part):
                self._rescale.schedules.remember(part)
        if context.has_other_ranks:
            # The running statistics of other ranks are not this rank's; those of the first are among the weights.
            parts = {name: part for name, part in parts.items() if not isinstance(part, ModuleBuffers)}
        restored = {**self._options.parts, **parts}
        for part in parts.values():
            context.own_buffers |= part.ids if isinstance(part, ModuleBuffers) else set()
        context.reader.restore(restored)
        context.add_proof(lambda: context.reader.verify(restored))

    def align_buckets(self) -> None:
        """Set the order in which DDP reduces gradients to that of the uninterrupted run.

        Call it before the first step, with no gradients held.
        """
        launch = self.context.launch if self.context else None
        for module in filter(BucketOrder.applies, self._framework.modules()):
            order, saved = BucketOrder(module), launch.ddp_buckets[len(self.bucket_orders) :] if launch else []
            self.bucket_orders.append(order)
            if saved and saved[0]:
                order.replay(saved[0], self.context.step if self.context else 0)
            else:
                order.observe()

    def concluded_buckets(self) -> list[BucketOrder]:
        """Return the order of each DDP module, for a save."""
        for each in self.bucket_orders:
            each.conclude()
        return self.bucket_orders

    def close(self) -> None:
        """Remove the hooks that still wait for the order of the gradients."""
        for each in self.bucket_orders:
            each.close()


def _cursor(context: RestoreContext, manifest: Manifest) -> dict[str, Any]:
    return data_cursor(manifest.epoch, context.rank_state.loader_states, OrderDigest())
