"""One training call of any framework: what every adapter does around the core's verbs, in the order it must happen.

An adapter derives from :class:`Session`, translates its framework's events, and adds what only it can know: where the
weights are, which loader feeds the steps, which counters the framework resets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.core import loader, report, rng, trackers, weights
from resume_adapters.core.buckets import BucketOrder
from resume_adapters.core.lifecycle import Decision
from resume_adapters.core.loader import LoaderWatch
from resume_adapters.core.manifest import PartEntry
from resume_adapters.core.resolve import Checkpoint
from resume_adapters.core.run import ResumableRun
from resume_adapters.core.state import Stateful, Value
from resume_adapters.errors import StateMismatch

RESERVED = ("architecture", "callbacks", "trackers", "manifest")
"""Names of parts that a user cannot give to parts of their own."""


_RANKS = "number of ranks"


class Session:
    """One training call on a run directory.

    Args:
        run: the run, not yet opened.
        parts: the parts that the user named.
        verify: prove what is restored.
        topology: what makes up an optimizer step's samples beside the number of ranks, each a factor, by the name under
            which a user sets it.

    Attributes:
        checkpoint: what this call resumes from; ``None`` for a fresh start.
        own: what this rank alone saved in it; ``None`` for a fresh start and for a foreign checkpoint. Where it was
            saved by fewer ranks, what another rank saved.
        moved: it was saved with another topology.
        reason: why the next checkpoint is saved.
        stopping: all ranks have agreed to save and leave.
    """

    def __init__(
        self, run: ResumableRun, parts: Mapping[str, Stateful], *, verify: bool, topology: Mapping[str, int]
    ) -> None:
        self.run = run
        self.parts = parts
        self.verify = verify
        self.topology = dict(topology)
        self.checkpoint: Checkpoint | None = None
        self.own: Any = None
        self.moved = False
        self.reason = "scheduled"
        self.stopping = False
        self._under_way = False
        self._orders: list[BucketOrder] = []
        self._described: dict[str, str] | None = None
        self._reported = False

    # ---- Resuming

    def choose(self) -> Checkpoint | None:
        """Open the run directory, say what is resumed from, and read what this rank saved in it.

        Raises:
            StateMismatch: it was saved with another topology.
            ResumeError: as :meth:`ResumableRun.open` does.
        """
        report.enable()
        choice = self.run.open()
        self.checkpoint = choice.checkpoint
        if self.run.ranks.rank == 0:
            report.start(choice)
        if self.checkpoint is not None and self.checkpoint.manifest is not None:
            saved_by = self.checkpoint.manifest.world_size
            self.own = self.run.read_own(self.checkpoint, self.run.ranks.rank % saved_by)
            self.moved = self._has_moved({**self.own["topology"], _RANKS: saved_by})
            trackers.restore(self.run.read_part(self.checkpoint, "trackers"))
        known = self.checkpoint.manifest if self.checkpoint else None
        self.run.begin(self.checkpoint.step if self.checkpoint else 0, known.epoch if known else 0.0)
        return self.checkpoint

    def _has_moved(self, saved: Mapping[str, int]) -> bool:
        """Return whether the checkpoint was saved with another topology, of as many samples in an optimizer step."""
        assert self.checkpoint is not None
        here = {**self.topology, _RANKS: self.run.ranks.world_size}
        odd = [name for name in here if saved[name] != here[name]]
        if not odd:
            return False
        before, now = math.prod(saved.values()), math.prod(here.values())
        differences = ", ".join(f"{name} {saved[name]} (this launch has {here[name]})" for name in odd)
        if before != now:
            raise StateMismatch(
                f"{self.checkpoint.path.name} was saved with {differences}: an optimizer step had {before} samples and "
                f"would now have {now}, and the learning rate and the number of steps would silently be others. Launch "
                f"so that {' times '.join(here)} is {before}, or start another run directory",
                path=self.checkpoint.path,
                step=self.checkpoint.step,
            )
        report.logger.info("Saved with %s: each optimizer step still has %d samples.", differences, now)
        return True

    def restore_loader(self, watched: LoaderWatch, position: Any, of_rank: Callable[[Any], Any], consumed: int) -> None:
        """Put a loader where it was, on whatever topology the checkpoint was saved.

        Args:
            watched: the loader.
            position: this rank's position of it.
            of_rank: returns the position in what a rank saved as its own.
            consumed: batches of the loader, here, that the position stands for.

        Raises:
            StateMismatch: the data are not the same, or their order depends on the topology.
        """
        if not self.moved and not watched.differs(position):
            watched.restore(position)
            return
        everyone = self.everyone()
        if self.run.ranks.rank >= len(everyone):
            step = position["step"]
            forked = rng.forked(step["process"], self.run.ranks.rank)
            position = {**position, "step": {**step, "process": forked}}
        watched.move(position, [of_rank(own) for own in everyone], consumed)

    def everyone(self) -> list[Any]:
        """Return what each rank saved as its own, in rank order."""
        assert self.checkpoint is not None and self.checkpoint.manifest is not None
        return [self.run.read_own(self.checkpoint, rank) for rank in range(self.checkpoint.manifest.world_size)]

    def require_architecture(self, model: Any) -> None:
        """Refuse a checkpoint of another model, before any weight is touched.

        Raises:
            StateMismatch: with the first tensors that differ.
        """
        assert self.checkpoint is not None
        saved = self.run.read_part(self.checkpoint, "architecture")
        if saved is not None:
            weights.require_architecture(saved, self._architecture(model), self.checkpoint.path)

    def load_weights(self, model: Any, content: dict[str, Any]) -> None:
        """Load weights that were read from the checkpoint, whatever wraps the model, and prove them.

        Raises:
            StateMismatch: they do not fit the model.
            NotRestored: a tensor did not come back bit for bit.
        """
        assert self.checkpoint is not None
        weights.load(model, content, self.checkpoint.path)
        if self.verify:
            weights.prove(model, content, self.checkpoint.path)

    def _architecture(self, model: Any) -> dict[str, str]:
        if self._described is None:
            self._described = weights.architecture(model.state_dict())
        return self._described

    def restore_parts(self, further: Mapping[str, Stateful]) -> None:
        """Load the user's parts, and the adapter's ``further`` ones, and prove them.

        Raises:
            StateMismatch: the checkpoint lacks one of them.
            NotRestored: one did not come back as it was saved.
        """
        if self.checkpoint is not None:
            self.run.restore_parts(self.checkpoint, {**self.parts, **further}, verify=self.verify)

    def watch(self, data_loader: Any) -> LoaderWatch:
        """Watch a loader in place, together with the generators among the user's parts."""
        generators = {name: part for name, part in self.parts.items() if isinstance(part, rng.GeneratorState)}
        watched = loader.watch(data_loader, generators)
        watched.on_skip = self.run.skip_batch
        return watched

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

    # ---- Training

    def begin_step(self) -> None:
        """Leave if a stop was asked for before the first step. Every rank calls it when it has the batch of a step.

        Raises:
            Stopped: one was.
        """
        if not self._under_way:
            self._under_way = True
            self.run.end_skipping()

    def end_step(self, step: int, epoch: float, horizon: int | None = None) -> Decision:
        """Note that a step was completed, and return what all ranks do now; see :meth:`ResumableRun.end_step`.

        Every rank calls it at the end of every step.
        """
        decision = self.run.end_step(step, epoch, horizon)
        self._heed(decision.stop)
        return decision

    def ask_to_stop(self) -> bool:
        """Return whether all ranks are to save and leave now.

        Every rank asks at the same places between two ends of a step: between the batches of an evaluation.
        """
        if not self.stopping:
            self._heed(self.run.should_stop())
        return self.stopping

    def _heed(self, stop: bool) -> None:
        if stop and not self.stopping:
            self.stopping, self.reason = True, f"stop: {self.run.flag.reason}"

    def save_checkpoint(
        self,
        name: str,
        step: int,
        *,
        model: Any,
        native: Callable[[], object],
        own: Callable[[], dict[str, Any]],
        parts: Mapping[str, Stateful],
        owner: Callable[[Path], int],
        entries: Callable[[], Sequence[PartEntry]],
        facts: Callable[[], dict[str, Any]],
        best: str | None,
    ) -> None:
        """Save and commit a checkpoint; see :meth:`ResumableRun.save`. At the first, say what each part holds.

        Args:
            name: name of the checkpoint.
            step: optimizer steps completed.
            model: the module whose tensors the checkpoint holds.
            native: lets the framework write its own files.
            own: what belongs to this rank alone, beside what this class adds.
            parts: further parts of the adapter.
            owner: the rank that answers for a file of the framework.
            entries: says of each part who captures it.
            facts: ``epoch``, ``metrics`` and ``cursor`` of the manifest.
            best: name of the best checkpoint.
        """

        def described() -> dict[str, Any]:
            found = entries()
            if not self._reported and self.run.ranks.rank == 0:
                report.parts(found)
            self._reported = True
            return {
                "reason": self.reason,
                "parts": tuple(found),
                "architecture": weights.architecture_digest(architecture),
                **facts(),
            }

        architecture = self._architecture(model)
        added = {"architecture": Value(architecture), "trackers": Value(trackers.capture())}
        self.run.save(
            name,
            step,
            native=native,
            own=lambda: {
                **own(),
                "topology": self.topology,
                "buckets": [each.order for each in self._orders],
            },
            parts={**self.parts, **parts, **added},
            owner=owner,
            facts=described,
            best=best,
        )
        self.reason = "scheduled"

    def missing_generators(self, places: Mapping[str, Any], registers: str) -> list[PartEntry]:
        """Return an entry for each generator that is an attribute of one of these places, and no part of the state.

        Args:
            places: the objects to look at, by the name under which a user knows them.
            registers: what registers a part, as a user writes it.
        """
        held = {id(getattr(part, "generator", part)) for part in self.parts.values()}
        return [
            PartEntry(
                "data",
                "missing",
                f"{place}.{name} is a generator of its own: after a resume it starts anew; register it with "
                f"{registers}({name.strip('_').lower()}={place}.{name})",
            )
            for place, thing in places.items()
            for name, value in getattr(thing, "__dict__", {}).items()
            if rng.is_generator(value) and id(value) not in held
        ]

    # ---- Ending

    def is_finished(self, step: int, horizon: int) -> bool:
        """Return whether the run was left as finished at this step, with the same horizon: nothing is left to do."""
        former = self.run.previous
        return former is not None and (former.state, former.step, former.horizon) == ("finished", step, horizon)

    def record_failure(self, error: Exception, step: int) -> None:
        """Record why the run failed, if it got as far as owning its directory."""
        if self.run.generation:
            self.run.record("failed", step=step, reason=f"{type(error).__name__}: {error}")
