"""Accelerate's side of a hand-written loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate.data_loader import DataLoaderAdapter, DataLoaderDispatcher
from accelerate.utils import send_to_device

from resume_adapters import _accelerate_files as files
from resume_adapters._accelerate_strategies import strategy
from resume_adapters._trackers import Trackers
from resume_adapters.core import workers
from resume_adapters.core.dispatch import FirstSlice
from resume_adapters.core.feed import Feed
from resume_adapters.core.framework import Framework, Resumed
from resume_adapters.core.manifest import PartEntry
from resume_adapters.core.position import batch_size
from resume_adapters.core.replacement import replaced
from resume_adapters.core.resolve import Checkpoint
from resume_adapters.core.sampler import Moment
from resume_adapters.core.session import Session
from resume_adapters.core.settings import refuse
from resume_adapters.core.state import Stateful

Tree = dict[str, Any]


def require_supported(accelerator: Any) -> None:
    """Refuse settings under which a resume cannot be exact.

    Raises:
        UnsupportedSetting: naming the setting and what to do.
    """
    several = accelerator.num_processes > 1
    refused = {
        "save_on_each_node=True scatters a checkpoint over nodes": (
            several and accelerator.project_configuration.save_on_each_node
        ),
        "even_batches=False gives the ranks different numbers of steps, and they save and stop together": (
            several and not accelerator.even_batches
        ),
    }
    refuse(refused)


class Registered:
    """The objects given to ``register_for_checkpointing``, as one part, by the names of their classes."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._named: dict[str, Any] = {}
        for each in objects:
            name = type(each).__name__
            same = sum(type(other).__name__ == name for other in self._named.values())
            self._named[f"{name}.{same}" if same else name] = each

    def state_dict(self) -> Tree:
        """Return the objects' states by name."""
        return {name: each.state_dict() for name, each in self._named.items()}

    def load_state_dict(self, saved: Tree) -> None:
        """Put back what :meth:`state_dict` returned, whatever the order of registration."""
        for name, each in self._named.items():
            if name in saved:
                each.load_state_dict(saved[name])


class AccelerateFramework(Framework):
    """What an accelerator has prepared.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
    """

    registers = "register_for_resume"

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self._strategy = strategy(accelerator)
        self.loaders: list[Any] = accelerator._dataloaders  # seam: accelerate 1.15
        self.registered: list[Any] = accelerator._custom_objects  # seam: accelerate 1.15
        self._first_slices: dict[int, Any] = {}
        self._dispatched: dict[int, tuple[FirstSlice, Feed]] = {}
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

    def feed(self, outer: Any, session: Session) -> Feed:
        """Watch the torch loader beneath what ``prepare`` put around it."""
        watch = session.watch(_base(outer))
        together = _samples(outer, self.accelerator.num_processes)
        if not isinstance(outer, DataLoaderDispatcher):
            return Feed(outer, watch, together)
        # Rank zero fetches a batch for every rank; the others fetch none.
        fetching = self.accelerator.num_processes if self.accelerator.is_main_process else 0
        feed = Feed(outer, watch, together, 1 if outer.split_batches else fetching)
        if not outer._drop_last:  # seam: accelerate 1.15
            index = _index(self.loaders, outer)
            first = outer.slice_fn = FirstSlice(outer.slice_fn, watch)
            first.restore(send_to_device(self._first_slices.get(index), self.accelerator.device))
            self._dispatched[index] = (first, feed)
        return feed

    def _first_slice(self, index: int) -> Any:
        """Return what fills up the last batch of a dispatching loader's running pass; ``None`` between two passes."""
        if index not in self._dispatched:
            return self._first_slices.get(index)
        first, feed = self._dispatched[index]
        return None if feed.number is None else first.kept

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
            found["registered"] = Registered(self.registered)
        return found

    def state(self) -> Tree:
        """Return the counts of the accelerator and of its loaders."""
        return {
            "step": self.accelerator.step,
            "iteration": self.accelerator.project_configuration.iteration,
            "loaders": [
                {
                    "iteration": getattr(each, "iteration", None),
                    "generators": Moment(_base(each)).generators(),
                    "running": _has_running_workers(_base(each)),
                    "first": self._first_slice(index),
                }
                for index, each in enumerate(self.loaders)
            ],
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
        self._first_slices = {index: kept["first"] for index, kept in enumerate(saved["loaders"])}
        for loader, kept in zip(self.loaders, saved["loaders"], strict=False):
            if kept["iteration"] is not None:
                loader.iteration = kept["iteration"]
            if kept["running"]:
                iter(_base(loader))  # a loader that was not given to the loop; its next pass only resets its workers
            Moment(_base(loader)).restore_generators(kept["generators"])

    def adopt(self, checkpoint: Checkpoint) -> Resumed:
        """Take what a bare checkpoint says, and find its place were every epoch one pass over the first loader."""
        files.restore_random_states(checkpoint.path, self.accelerator.process_index)
        done = self._place(checkpoint.step)
        self.accelerator.step = done.batches
        for loader in self.loaders:
            if hasattr(loader, "iteration"):
                loader.iteration = done.epoch
        return done

    def _place(self, step: int) -> Resumed:
        accumulated = self.accelerator.gradient_accumulation_steps
        try:
            batches = len(self.loaders[0])
        except (IndexError, TypeError):  # no loader was prepared, or it is a stream
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
        found += [PartEntry(name, "core", type(part).__name__) for name, part in self.parts().items()]
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


def _index(things: Sequence[Any], thing: Any) -> int:
    return next((index for index, each in enumerate(things) if each is thing), -1)


def _base(loader: Any) -> Any:
    return getattr(loader, "base_dataloader", loader)


def _samples(loader: Any, ranks: int) -> int:
    """Return the samples in a batch of a loader, on all ranks together; 0 where the loader does not say."""
    if hasattr(loader, "total_batch_size"):
        return int(loader.total_batch_size)
    return (batch_size(loader) or 0) * ranks


def _has_running_workers(loader: Any) -> bool:
    """Return whether the persistent workers of a loader that was not given to the loop are running."""
    if hasattr(loader, "resume_watch") or not (loader.num_workers and loader.persistent_workers):
        return False
    return workers.are_kept(loader)


def _note_when_made(native: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(native)
    def init(self: Any, dataset: Any, use_stateful_dataloader: bool = False, *args: Any, **kwargs: Any) -> None:
        moment = Moment(SimpleNamespace(**kwargs)).capture() if use_stateful_dataloader else None
        native(self, dataset, use_stateful_dataloader, *args, **kwargs)
        if moment is not None:
            self.base_dataloader.resume_made = moment

    return init


def _install() -> None:
    """Note the random state at which ``prepare`` lets a ``StatefulDataLoader`` begin its first pass; once."""
    if not hasattr(DataLoaderAdapter.__init__, "__wrapped__"):
        adapter: Any = DataLoaderAdapter
        adapter.__init__ = _note_when_made(adapter.__init__)  # seam: accelerate 1.15


_install()
