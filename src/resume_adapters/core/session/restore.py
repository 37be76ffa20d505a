"""Choose what a training call resumes from, load it on whatever topology it was saved, and verify it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import describe_cursor
from resume_adapters.core.dataloader.progress import cursor_of
from resume_adapters.core.dataloader.tracked import TrackedLoader, track
from resume_adapters.core.log import enable_logging, logger
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.framework import Trackers
from resume_adapters.core.session.messages import log_skipping, log_start
from resume_adapters.core.session.rescale import BatchChange, Schedules
from resume_adapters.core.state import rng
from resume_adapters.core.state.ddp_buckets import BucketOrder
from resume_adapters.core.state.sharded_digest import shard_digest, verify_shards
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.core.state.weights import architecture, load_weights, require_architecture, verify_weights
from resume_adapters.errors import StateMismatch

Tree = dict[str, Any]

_RANKS = "number of ranks"


class Restorer:
    """What one training call resumes from, and how all of it comes back.

    Args:
        run: the run, not yet opened.
        parts: the parts that the user named.
        trackers: what the training logs to.
        verify: prove what is restored.
        topology: what the order of the data may depend on beside the number of ranks, by the name under which a user
            sets it.
        fixed: what must be as it was when the checkpoint was saved, likewise.
        accumulation: batches of the training loop in an optimizer step.
        spread: returns the state that is spread over the ranks, by the name of the component.
        on_batch_change: ``"keep-samples"`` goes on where an optimizer step has another number of samples; ``"refuse"``
            does not.

    Attributes:
        schedules: what the adapter noted of the learning rate schedules before it loaded them.
        batch_change: what follows where an optimizer step has another number of samples.
        checkpoint: what this call resumes from; ``None`` for a fresh start.
        own: what this rank alone saved in it; ``None`` for a fresh start and for a foreign checkpoint. Where it was
            saved by fewer ranks, what another rank saved.
        moved: what of the topology was another when it was saved, in words.
    """

    def __init__(
        self,
        run: ResumableRun,
        parts: Mapping[str, Stateful],
        *,
        trackers: Trackers,
        verify: bool,
        topology: Mapping[str, int],
        accumulation: int = 1,
        fixed: Mapping[str, int] | None = None,
        spread: Callable[[], Mapping[str, Any]] = dict,
        on_batch_change: str = "refuse",
    ) -> None:
        self.run = run
        self.parts = parts
        self.verify = verify
        self.topology = dict(topology)
        self.fixed = dict(fixed or {})
        self.schedules = Schedules()
        self.batch_change = BatchChange(on_batch_change, accumulation)
        self._everyone: list[Any] = []
        self.checkpoint: Checkpoint | None = None
        self.own: Any = None
        self.moved: list[str] = []
        self._spread = spread
        self._trackers = trackers
        self._orders: list[BucketOrder] = []
        self._described: dict[str, str] | None = None

    # ---- Resuming

    def choose(self) -> Checkpoint | None:
        """Open the run directory, say what is resumed from, and read what this rank saved in it.

        Raises:
            StateMismatch: what is fixed was another when it was saved.
            ResumeError: as :meth:`ResumableRun.open` does.
        """
        enable_logging()
        choice = self.run.open()
        self.checkpoint = choice.checkpoint
        if self.run.ranks.rank == 0:
            log_start(choice)
        if self.checkpoint is not None and self.checkpoint.manifest is not None:
            saved_by = self.checkpoint.manifest.world_size
            self.own = self.run.saved(self.checkpoint).own(self.run.ranks.rank % saved_by)
            if self.own is not None:
                self.batch_change.shift = self.own["shift"]
                self.moved = _differences(
                    self.own["topology"] | {_RANKS: saved_by}, {_RANKS: self.run.ranks.world_size, **self.topology}
                )
                if other := _differences(self.own["fixed"], self.fixed):
                    raise self._mismatch(other, "it cannot be resumed from")
                self._trackers.restore(self.run.saved(self.checkpoint).record("trackers"))
                cursor = cursor_of(self.checkpoint.manifest.epoch, self.own)
                if self.run.ranks.rank == 0:
                    logger.info("%s resumed at %s.", self.checkpoint.path.name, describe_cursor(cursor))
                if self.run.sharing.leads:
                    self.run.control.journal.append("resume", step=self.checkpoint.step, cursor=cursor)
        known = self.checkpoint.manifest if self.checkpoint else None
        self.run.begin(self.checkpoint.step if self.checkpoint else 0, known.epoch if known else 0.0)
        return self.checkpoint

    def _mismatch(self, differences: Sequence[str], why: str) -> StateMismatch:
        assert self.checkpoint is not None
        return StateMismatch(
            f"{self.checkpoint.path.name} was saved with {'; '.join(differences)}: {why}. Launch as before, or start "
            "another run directory",
            path=self.checkpoint.path,
            step=self.checkpoint.step,
        )

    def loader_state(self, position: Tree, consumed: int, together: int) -> Tree:
        """Return where a loader is, as :meth:`restore_loader` takes it.

        Args:
            position: the position of the torch loader.
            consumed: batches of the training loop that are done of this pass.
            together: samples in such a batch, on all ranks together.
        """
        samples = self.batch_change.samples(together)
        return {"position": position, "consumed": consumed, "together": together, "samples": samples}

    def restore_loader(
        self,
        watched: TrackedLoader,
        saved: Tree,
        together: int,
        share: int,
        of_rank: Callable[[Any], Tree],
        *,
        epoch: int,
        length: int | None,
    ) -> int:
        """Put a loader where it was, on whatever topology the checkpoint was saved.

        Args:
            watched: the loader.
            saved: what :meth:`loader_state` returned for it.
            together: samples in a batch of the training loop now, on all ranks together.
            share: batches of it on this rank for each batch of the training loop.
            of_rank: returns what :meth:`loader_state` returned on another rank, from what that saved as its own.
            epoch: the epoch, from 0, of the pass that was under way or had ended.
            length: batches of the training loop in a pass now; ``None`` where that is not known.

        Returns:
            The batches of the training loop, of the size that they have now, that are done of this pass.

        Raises:
            StateMismatch: an optimizer step would have another number of samples, the data are not the same, or their
                order depends on the topology.
        """
        position = saved["position"]
        moved = self.moved = list(dict.fromkeys([*self.moved, *watched.differences(position)]))
        if not moved:
            watched.restore(position)
            return int(saved["consumed"])
        assert self.checkpoint is not None
        if not watched.is_elastic or position["elastic"] is None:
            raise self._mismatch(
                moved,
                "the order of the batches depends on it, so others would silently follow. Data of resume_adapters.data "
                "can be taken up with it, in a run that has begun with them",
            )
        if self.is_rebatched(saved, together):
            consumed = self._go_on_by_samples(watched, saved, together, epoch, length)
        else:
            now = self.batch_change.samples(together)
            logger.info("Saved with %s: each optimizer step has %d samples, as before.", "; ".join(moved), now)
            consumed = saved["consumed"] * saved["together"] // together
            self.batch_change.stay(self.checkpoint.step)
        everyone = [of_rank(own)["position"] for own in self.everyone()]
        watched.adopt(self.of_this_rank(position), everyone, int(consumed * share))
        return int(consumed)

    def is_rebatched(self, saved: Tree, together: int) -> bool:
        """Return whether an optimizer step had another number of samples than it has now."""
        return bool(saved["samples"] != self.batch_change.samples(together))

    def _go_on_by_samples(
        self, watched: TrackedLoader, saved: Tree, together: int, epoch: int, length: int | None
    ) -> int:
        """Find where in this launch's steps the position is; return the batches that are done of its pass."""
        assert self.checkpoint is not None
        change, before, now = self.batch_change, saved["samples"], self.batch_change.samples(together)
        left = watched.left(saved["position"], together) if change.keeps_samples else None
        if obstacle := change.obstacle(before, now, left, length):
            raise self._mismatch(self.moved, obstacle)
        assert left is not None and length is not None
        consumed = max(0, length - left)
        steps = change.go_on(self.checkpoint.step, epoch, consumed, length)
        logger.info(
            "Saved with %s: an optimizer step had %d samples and has %d now. Going on by samples: after %d steps the "
            "run is where %d steps of this size would have brought it.",
            "; ".join(self.moved),
            before,
            now,
            self.checkpoint.step,
            steps,
        )
        return consumed

    def move_schedules(self) -> None:
        """Bring the schedules to where the run is by samples, where it goes on by them.

        Call it when schedules and loaders are restored.

        Raises:
            StateMismatch: a schedule does not go by counting steps.
        """
        if self.batch_change.steps is not None:
            self.schedules.move(self.batch_change.steps)

    def of_this_rank(self, position: Tree) -> Tree:
        """Return a saved position with random state that no other rank has, where this rank had saved none."""
        assert self.checkpoint is not None and self.checkpoint.manifest is not None
        rank = self.run.ranks.rank
        if rank < self.checkpoint.manifest.world_size:
            return position
        step = position["step"]
        return position | {"step": {**step, "process": rng.forked(step["process"], rank)}}

    @property
    def has_other_ranks(self) -> bool:
        """Whether the checkpoint was saved by another number of ranks."""
        manifest = self.checkpoint.manifest if self.checkpoint else None
        return manifest is not None and manifest.world_size != self.run.ranks.world_size

    def everyone(self) -> list[Any]:
        """Return what each rank saved as its own, in rank order. Every rank asks."""
        assert self.checkpoint is not None and self.checkpoint.manifest is not None
        if not self._everyone and self.checkpoint.manifest.ranks is not None:
            self._everyone = self.run.ranks.gather(self.own)  # no rank sees the files of all
        elif not self._everyone:
            ranks = range(self.checkpoint.manifest.world_size)
            self._everyone = [self.run.saved(self.checkpoint).own(rank) for rank in ranks]
        return self._everyone

    def require_architecture(self, model: Any) -> None:
        """Refuse a checkpoint of another model, before any weight is touched.

        Raises:
            StateMismatch: with the first tensors that differ.
        """
        assert self.checkpoint is not None
        saved = self.run.saved(self.checkpoint).part("architecture")
        if saved is not None:
            require_architecture(saved, self._architecture(model), self.checkpoint.path)

    def load_weights(self, model: Any, content: dict[str, Any]) -> None:
        """Load weights that were read from the checkpoint, whatever wraps the model, and prove them.

        Raises:
            StateMismatch: they do not fit the model.
            NotRestored: a tensor did not come back bit for bit.
        """
        assert self.checkpoint is not None
        load_weights(model, content, self.checkpoint.path)
        if self.verify:
            verify_weights(model, content, self.checkpoint.path)

    def prove_shares(self) -> None:
        """Prove that what is spread over the ranks came back, on whatever number of ranks. Every rank calls it.

        Raises:
            NotRestored: naming the first component that differs; on every rank.
        """
        if not self.verify or self.own is None:
            return
        assert self.checkpoint is not None
        saved = [own["shares"] for own in self.everyone()]
        verify_shards(saved, self.run.ranks.gather(self._shares()), self.checkpoint.path, self.checkpoint.step)

    def _shares(self) -> dict[str, int]:
        first = self.run.ranks.rank == 0
        live = self._spread() if self.verify else {}
        return {name: shard_digest(component, is_first=first) for name, component in live.items()}

    def _architecture(self, model: Any) -> dict[str, str]:
        if self._described is None:
            self._described = architecture(model.state_dict())
        return self._described

    def restore_parts(self, further: Mapping[str, Stateful]) -> None:
        """Load the user's parts, and the adapter's ``further`` ones, and prove them.

        Raises:
            StateMismatch: the checkpoint lacks one of them.
            NotRestored: one did not come back as it was saved.
        """
        assert self.checkpoint is not None
        for part in self.parts.values():
            if hasattr(part, "get_last_lr"):
                self.schedules.note(part)
        if self.has_other_ranks:
            # Of other ranks' running statistics none is this rank's; those of the first are among the weights.
            further = {name: part for name, part in further.items() if not isinstance(part, ModuleBuffers)}
        self.run.saved(self.checkpoint).restore({**self.parts, **further}, verify=self.verify)

    def watch(self, data_loader: Any) -> TrackedLoader:
        """Watch a loader in place, together with the generators among the user's parts."""
        watched = track(data_loader, self._generators())
        watched.on_skip = self.run.skip_batch
        if self.run.ranks.rank == 0:
            watched.show_skipping = log_skipping
        return watched

    def random_state(self) -> dict[str, Any]:
        """Return the random state of the process and of the user's generators."""
        return rng.capture_with(self._generators())

    def restore_random_state(self, saved: Mapping[str, Any]) -> None:
        """Put back what :meth:`random_state` returned."""
        rng.restore_with(saved, self._generators())

    def _generators(self) -> dict[str, rng.GeneratorState]:
        return {name: part for name, part in self.parts.items() if isinstance(part, rng.GeneratorState)}

    def align_buckets(self, module: Any) -> None:
        """Let DDP reduce gradients in the order of the uninterrupted run; for other modules, do nothing.

        Call it before the first step, with no gradients held; for several modules, in the same order in every launch.
        """
        if not BucketOrder.applies(module):
            return
        order, saved = BucketOrder(module), self.own["buckets"][len(self._orders) :] if self.own else []
        self._orders.append(order)
        if saved and saved[0]:
            order.replay(saved[0])
        else:
            order.record()


def _differences(saved: Mapping[str, int], here: Mapping[str, int]) -> list[str]:
    return [f"{name} {saved[name]}, this launch has {here[name]}" for name in here if saved[name] != here[name]]
