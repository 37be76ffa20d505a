"""Accelerate's side of a hand-written loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.accelerate import files
from resume_adapters.accelerate.loaders import Loaders
from resume_adapters.accelerate.strategy import choose_strategy
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.patching import replaced
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.stateful import Stateful, StatefulGroup
from resume_adapters.integrations.trackers.runs import Trackers

Tree = dict[str, Any]


class AccelerateFramework(LoopFramework):
    """What an accelerator has prepared.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
        run_directory: where checkpoints go.
    """

    registers = "register_for_resume"

    def __init__(self, accelerator: Any, run_directory: Path) -> None:
        self.accelerator = accelerator
        self._strategy = choose_strategy(accelerator, run_directory)
        self._loaders = Loaders(accelerator)
        self.registered: list[Any] = accelerator._custom_objects  # seam: accelerate 1.15
        self._number: int | None = None
        self._named: tuple[int, str] | None = None
        self.accumulation = self._saved_accumulation = int(accelerator.gradient_accumulation_steps)
        self.fixed = self._strategy.fixed
        self.trackers = Trackers(self._writers)

    # ---- Steps

    def in_window(self) -> bool:
        """Return whether Accelerate is accumulating gradients."""
        return not self.accelerator.sync_gradients

    def begin_within_window(self, batches: int) -> None:
        """Count batches as accumulated."""
        self.accelerator.step += batches

    def has_stepped(self) -> bool:
        """Return whether the batch ended an optimizer step; one that was skipped for an overflow counts."""
        return self._strategy.has_stepped()

    # ---- Data

    def feed(self, outer: Any, session: Session) -> LoopLoader:
        """Watch the torch loader beneath what ``prepare`` put around it."""
        return self._loaders.feed(outer, session)

    def skip_pass(self, outer: Any) -> None:
        """Count the pass, as Accelerate's loaders do at its end."""
        if hasattr(outer, "iteration"):
            outer.iteration += 1

    # ---- Saving

    def state_dict(self) -> Tree:
        """Return the tensors of all models, by their names without wrappers."""
        return self._strategy.tensors()

    def checkpoint_name(self, step: int) -> str:
        """Return ``checkpoint_<iteration>`` with automatic naming, as Accelerate does, else ``checkpoint_<step>``."""
        if self._named is None or self._named[0] != step:
            config = self.accelerator.project_configuration
            number = config.iteration if config.automatic_checkpoint_naming else step
            self._named = (step, f"checkpoint_{number}")
            self._number = config.iteration
        return self._named[1]

    def save(self, directory: Path) -> None:
        """Let ``save_state`` write; of what every rank writes to the same path, rank zero writes alone."""
        accelerator, config = self.accelerator, self.accelerator.project_configuration
        config.iteration = self._number
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(config, "automatic_checkpoint_naming", False))  # it has its name already
            if not accelerator.is_main_process:
                stack.enter_context(replaced(accelerator, "scaler", None))
                stack.enter_context(replaced(accelerator, "_dataloaders", []))  # seam: accelerate 1.15
            stack.enter_context(self._strategy.writing())
            accelerator.save_state(str(directory))

    def owner(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return self._strategy.owner(file)

    def parts(self) -> dict[str, Stateful]:
        """Return the scaler, and what was given to ``register_for_checkpointing``."""
        found = self._strategy.parts()
        if self.accelerator.scaler is not None:
            found["scaler"] = self.accelerator.scaler
        if self.registered:
            found["registered"] = StatefulGroup(_by_class(self.registered))
        return found

    def state(self) -> Tree:
        """Return the counts of the accelerator and of its loaders."""
        return {
            "step": self.accelerator.step,
            "iteration": self.accelerator.project_configuration.iteration,
            "loaders": self._loaders.state(),
            "strategy": self._strategy.own(),
        }

    def spread(self) -> Tree:
        """Return what is spread over the processes."""
        return self._strategy.spread()

    # ---- Loading

    def load(self, session: Session) -> None:
        """Load models, optimizers and schedulers, and prove them."""
        if session.own is not None:
            self._saved_accumulation = session.own["topology"]["gradient_accumulation_steps"]
        self._strategy.load(session)

    def restore(self, saved: Tree) -> None:
        """Put the counts back."""
        self._strategy.restore(saved["strategy"])
        self.accelerator.step = saved["step"] * self.accumulation // self._saved_accumulation
        self.accelerator.project_configuration.iteration = saved["iteration"]
        self._loaders.restore(saved["loaders"])

    def adopt(self, checkpoint: Checkpoint) -> Resumed:
        """Take what a bare checkpoint says, and find its place were every epoch one pass over the first loader."""
        files.restore_random_states(checkpoint.path, self.accelerator.process_index)
        done = self._place(checkpoint.step)
        self.accelerator.step = done.batches
        self._loaders.begin_epoch(done.epoch)
        return done

    def _place(self, step: int) -> Resumed:
        accumulated, batches = self.accelerator.gradient_accumulation_steps, self._loaders.length
        if batches is None:
            return Resumed(0, step, 0)
        steps = -(-batches // accumulated)
        return Resumed(step // steps, step, step % steps * accumulated)

    def _writers(self) -> list[Any]:
        """Return the writers of ``init_trackers``, which the first process has."""
        if not self.accelerator.is_main_process:
            return []
        return [each.tracker for each in self.accelerator.trackers if each.name == "tensorboard"]

    def modules(self) -> list[Any]:
        """Return the DDP modules around the models."""
        return self._strategy.modules()

    def entries(self) -> Sequence[PartEntry]:
        """Say of each part who captures it."""
        found = [
            PartEntry("model", "framework", f"{len(self._strategy.models)} prepared, by save_state"),
            PartEntry("optimizer", "framework", f"{len(self._strategy.optimizers)} prepared, by save_state"),
        ]
        if self._strategy.schedulers:
            found.append(
                PartEntry("scheduler", "framework", f"{len(self._strategy.schedulers)} prepared, by save_state")
            )
        if self._strategy.has_lost_buckets():
            found.append(
                PartEntry(
                    "buckets",
                    "missing",
                    "no DDP module was found around the models (gc.freeze() hides it): on three or more processes the "
                    "first step after a resume may differ in the last bit",
                )
            )
        return found


def _by_class(objects: Iterable[Any]) -> Tree:
    """Return objects by the names of their classes; the second of a class and those after it also have a number."""
    named: Tree = {}
    for each in objects:
        name = type(each).__name__
        same = sum(type(other).__name__ == name for other in named.values())
        named[f"{name}.{same}" if same else name] = each
    return named
