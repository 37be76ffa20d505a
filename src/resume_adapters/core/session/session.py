"""One training call of any framework: what every adapter does around the core's verbs, in the order it must happen.

An adapter derives from :class:`Session`, translates its framework's events, and adds what only it can know: where the
weights are, which loader feeds the steps, which counters the framework resets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.manifest import PartEntry, describe_cursor
from resume_adapters.core.dataloader.progress import cursor_of
from resume_adapters.core.log import logger
from resume_adapters.core.run.step_control import Decision
from resume_adapters.core.session.messages import log_parts
from resume_adapters.core.session.restore import Restorer, Tree
from resume_adapters.core.state import rng
from resume_adapters.core.state.stateful import Stateful, StaticState
from resume_adapters.core.state.weights import architecture_digest

_CAPTURED = {
    "rng": "python, numpy, torch and every CUDA device, on every rank",
    "data": "position of the training loaders, with the random state of their workers",
    "trackers": "run ids of W&B and MLflow, directories of TensorBoard",
}
"""What is captured under every framework alike."""


class Session(Restorer):
    """One training call on a run directory.

    Attributes:
        reason: why the next checkpoint is saved.
        stopping: all ranks have agreed to save and leave.
        under_way: the first step has begun.
    """

    reason = "scheduled"
    stopping = False
    under_way = False
    _reported = False

    # ---- Training

    def begin_step(self) -> None:
        """Leave if a stop was asked for before the first step. Every rank calls it when it has the batch of a step.

        Raises:
            Stopped: one was.
        """
        if not self.under_way:
            self.under_way = True
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
        is_file: bool = False,
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
            facts: ``epoch`` and ``metrics`` of the manifest.
            best: name of the best checkpoint.
            is_file: the framework writes one file of that name, not a directory.
        """
        kept: Tree = {}
        architecture = self._architecture(model)

        def of_this_rank() -> Tree:
            kept.update(own())
            return kept | self._of_this_launch()

        def described() -> dict[str, Any]:
            found, known = entries(), facts()
            cursor = cursor_of(known["epoch"], kept)
            self._say(found, f"{name} saved at {describe_cursor(cursor)}.")
            return {
                "reason": self.reason,
                "parts": tuple(found),
                "architecture": architecture_digest(architecture),
                "cursor": cursor,
                **known,
            }

        added = {"architecture": StaticState(architecture), "trackers": StaticState(self._trackers.capture())}
        self.run.save(
            name,
            step,
            native=native,
            own=of_this_rank,
            parts={**self.parts, **parts, **added},
            owner=owner,
            facts=described,
            best=best,
            is_file=is_file,
        )
        self.reason = "scheduled"

    def _of_this_launch(self) -> Tree:
        return {
            "topology": self.topology,
            "fixed": self.fixed,
            "shares": self._shares(),
            "shift": self.batch_change.shift,
            "buckets": [each.order for each in self._orders],
        }

    def _say(self, entries: Sequence[PartEntry], saved: str) -> None:
        if self.run.ranks.rank == 0:
            if not self._reported:
                log_parts(entries)
            logger.info(saved)
        self._reported = True

    def entries(self, further: Mapping[str, Stateful], **notes: str) -> list[PartEntry]:
        """Return an entry for each part that this package captures.

        Args:
            further: parts of the adapter, beside those that the user named.
            notes: what it captures of others, such as ``counters``, in a user's words.
        """
        named = {name: f"{type(part).__name__}.state_dict()" for name, part in {**self.parts, **further}.items()}
        return [PartEntry(name, "core", note) for name, note in {**notes, **_CAPTURED, **named}.items()]

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
