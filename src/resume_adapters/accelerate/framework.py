"""Accelerate's side of a hand-written loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import DistributedType

from resume_adapters.accelerate import files
from resume_adapters.accelerate.loaders import PreparedLoaders, PreparedLoaderState
from resume_adapters.accelerate.schedules import steps_each
from resume_adapters.accelerate.strategies import ReplicatedStrategy, choose_strategy
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.choices import Stage
from resume_adapters.core.loop import observed
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.guard import Trained
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.loop.registered import RegisteredObjects
from resume_adapters.core.loop.tensors import as_part
from resume_adapters.core.observed.paths import is_module
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.patching import replaced, wrap_for_good
from resume_adapters.core.saving.staging import StagingOptions
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import ForkState, FrameworkFacts
from resume_adapters.core.session.loaders import missing_lines
from resume_adapters.core.session.session import Session
from resume_adapters.core.session.settings import LaunchSettings, read_settings
from resume_adapters.core.state.records import Record, Source
from resume_adapters.core.state.stateful import REGISTERED, Stateful, StatefulGroup
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.integrations import accelerate_state
from resume_adapters.integrations.accelerate_state import layout
from resume_adapters.integrations.trackers.runs import Trackers


@dataclass
class AccelerateRankState(Record):
    """What Accelerate does not save and belongs to one process.

    Attributes:
        step: batches since the last optimizer step, as the accelerator counts them.
        iteration: the number of the next checkpoint with automatic naming.
        loaders: the counts of each prepared loader, and the random state that it draws from.
        strategy: what the strategy adds, as a tree.
    """

    step: int
    iteration: int
    loaders: list[PreparedLoaderState]
    strategy: dict[str, Any]


class AccelerateFramework(LoopFramework):
    """What an accelerator has prepared.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.
    """

    rank_state_type = AccelerateRankState

    def __init__(self, accelerator: Any, run_directory: Path) -> None:
        self.accelerator = accelerator
        self._directory = run_directory
        self.registered: list[Any] = accelerator._custom_objects  # seam: accelerate 1.15
        self._registered = RegisteredObjects(self.registered)
        self._saved_accumulation = int(accelerator.gradient_accumulation_steps)
        self.trackers = Trackers(self._writers)
        self._strategy = choose_strategy(accelerator, run_directory)
        self._loaders = PreparedLoaders(accelerator)
        ranks, schedulers = accelerator.num_processes, self._strategy.schedulers
        self.foreign = files.ForeignCheckpoints(ranks, steps_each(schedulers[0], ranks) if schedulers else 1)
        self._number: int | None = None
        self._named: tuple[int, str] | None = None
        self._source: Source | None = None
        self.about = FrameworkFacts(
            f"accelerate {accelerate.__version__}",
            channel="accelerate",
            registers="register_for_resume",
            directory_option="register_for_resume(accelerator, run_dir=...)",
            accumulation=self._saved_accumulation,
            invariants=self._strategy.invariants,
            layout=layout(accelerator, self._strategy.models),
        )
        self._prepared = self._count_prepared()

    # ---- Steps

    def trained(self) -> Trained:
        """Return what was prepared or registered."""
        optimizers = [each for outer in self._strategy.optimizers for each in _with_inner(outer)]
        modules = [each for each in [*self._strategy.models, *self.registered] if is_module(each)]
        partitioned = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        return Trained([*optimizers, *self.registered], modules, are_partitioned=partitioned)

    def require_complete(self) -> None:
        """Refuse models, optimizers and schedulers that were prepared after ``register_for_resume``. Loaders may be.

        Raises:
            UnsupportedSetting: there are some.
        """
        self._loaders.begin_loop()
        late = {kind: count - self._prepared[kind] for kind, count in self._count_prepared().items()}
        found = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in late.items() if count)
        if found:
            raise UnsupportedSetting(
                f"register_for_resume was called before accelerator.prepare(): since then {found} came, which the run "
                "would neither count nor restore. Call it after:\n\n"
                "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
                "    run = register_for_resume(accelerator)\n"
            )

    def _count_prepared(self) -> dict[str, int]:
        # seam: accelerate 1.15
        held = {"model": "_models", "optimizer": "_optimizers", "scheduler": "_schedulers"}
        return {kind: len(getattr(self.accelerator, name)) for kind, name in held.items()}

    def is_accumulating(self) -> bool:
        """Return whether Accelerate is accumulating gradients."""
        return not self.accelerator.sync_gradients

    def skip_micro_batches(self, batches: int) -> None:
        """Count batches as accumulated."""
        self.accelerator.step += batches

    def has_stepped(self) -> bool:
        """Return whether the batch ended an optimizer step; one that was skipped for an overflow counts."""
        return self._strategy.has_stepped()

    # ---- Data

    def track(self, loader: Any, session: Session) -> LoopLoader:
        """Track the torch loader beneath what ``prepare`` put around it."""
        return self._loaders.track(loader, session)

    def skip_pass(self, loader: Any, *, is_left: bool = False, is_iterated: bool = False) -> None:
        """Count the pass, as Accelerate's loaders do at its end; a pass that is left is not counted."""
        if hasattr(loader, "iteration") and not is_left:
            loader.iteration += 1

    # ---- Saving

    def state_dict(self) -> dict[str, Any]:
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

    def begin_save(self) -> None:
        """Find out whether the processes hold different weights."""
        self._strategy.compare()

    def save(self, directory: Path) -> None:
        """Write by ``save_state``; what every rank would write to the same path, rank zero writes alone."""
        accelerator, config = self.accelerator, self.accelerator.project_configuration
        config.iteration = self._number
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(config, "automatic_checkpoint_naming", False))  # it has its name already
            if not accelerator.is_main_process:
                stack.enter_context(replaced(accelerator, "scaler", None))
                stack.enter_context(replaced(accelerator, "_dataloaders", []))  # seam: accelerate 1.15
            stack.enter_context(self._strategy.writing())
            accelerator.save_state(str(directory))

    def answer_saves(self, save: Callable[[], None]) -> None:
        """Take a checkpoint where the script asks for one that Accelerate would name, and prune, by itself.

        Accelerate would remove what it has not written, and end at a number that was used after the step that a run
        resumes from.
        """
        config = self.accelerator.project_configuration

        def answer(native: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            if not config.automatic_checkpoint_naming:
                return native(*arguments, **keywords)
            save()
            return str(self._directory / f"checkpoint_{config.iteration}")

        wrap_for_good(self.accelerator, "save_state", answer)  # after the end nothing is left to save

    def staging(self, stage: Stage) -> StagingOptions:
        """Return what there is to know to copy a save."""
        return StagingOptions(stage, writers=((accelerate.utils.other, "safe_save_file"),))  # seam: accelerate 1.6-1.15

    def weights_files(self) -> WeightsFiles | None:
        """Return the files beside optimizers, schedules and random states; none with DeepSpeed."""
        return None if self.accelerator.distributed_type == DistributedType.DEEPSPEED else accelerate_state.WEIGHTS

    def rehearse(self, context: RestoreContext) -> None:
        """Load a save into copies; see :meth:`Strategy.rehearse`."""
        self._strategy.rehearse(context)

    def loaded_files(self, directory: Path) -> list[Path]:
        """Return the states of optimizers and schedulers, and weights in torch's own format."""
        return files.loaded(directory)

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return files.owner(file)

    def parts(self) -> dict[str, Stateful]:
        """Return the scaler, what was given to ``register_for_checkpointing``, and tensors outside of models."""
        trained = self.trained()
        found = self._strategy.parts() | ({} if trained.are_partitioned else as_part(trained.optimizers))
        if self.accelerator.scaler is not None:
            found["scaler"] = self.accelerator.scaler
        if self.registered:
            found[REGISTERED] = StatefulGroup(self._registered, announce=self._registered.log_order)
        return found

    def subjects(self) -> Subjects:
        """Return the models, schedulers that were not prepared, and how gradients are accumulated."""
        strategy = self._strategy
        optimizers = [getattr(each, "optimizer", each) for each in strategy.optimizers]
        schedulers = [getattr(each, "scheduler", each) for each in strategy.schedulers]
        found = observed.subjects(strategy.models, optimizers, [*schedulers, *optimizers, *self.registered])
        roots = {**found.roots, "accelerator.gradient_state": self.accelerator.gradient_state.plugin_kwargs}
        return replace(found, roots=roots)

    def rank_state(self) -> AccelerateRankState:
        """Return the counts of the accelerator and of its loaders."""
        return AccelerateRankState(
            step=self.accelerator.step,
            iteration=self.accelerator.project_configuration.iteration,
            loaders=self._loaders.states(),
            strategy=self._strategy.rank_state().to_tree(),
        )

    def sharded_state(self) -> Mapping[str, Any]:
        """Return what is sharded over the processes."""
        return self._strategy.sharded_state()

    def modules(self) -> list[Any]:
        """Return the models, and the DDP modules around them."""
        return [*super().modules(), *self._strategy.modules()]

    # ---- Loading

    def load(self, context: RestoreContext) -> None:
        """Load models, optimizers and schedulers."""
        self._source = context.source
        if context.launch is not None:
            self._saved_accumulation = context.launch.topology["gradient_accumulation_steps"]
        self._strategy.load(context)

    def fork_state(self, reader: CheckpointReader) -> ForkState:
        """Return models and optimizers in the order in which they were prepared."""
        strategy, held = self._strategy, reader.files
        if not isinstance(strategy, ReplicatedStrategy):
            return super().fork_state(reader)
        return ForkState(
            [(each, read_weight_files([files.weights(held, at)])) for at, each in enumerate(strategy.models)],
            lambda: [(each, files.pickled(held, "optimizer", at)) for at, each in enumerate(strategy.optimizers)],
        )

    def load_rank_state(self, record: AccelerateRankState) -> None:
        """Restore the counts."""
        strategy = self._strategy
        assert self._source is not None, "the checkpoint was loaded"
        of_strategy = strategy.rank_state_type.from_tree(record.strategy, self._source, "framework.strategy.")
        strategy.load_rank_state(of_strategy)
        self.accelerator.step = record.step * self.about.accumulation // self._saved_accumulation
        self.accelerator.project_configuration.iteration = record.iteration
        self._loaders.restore(record.loaders)

    def load_foreign(self, context: RestoreContext) -> Resumed:
        """Take what a bare checkpoint says; its place is that of one pass over the first loader in each epoch."""
        files.restore_random_states(context.path, self.accelerator.process_index)
        done = self._place(context.step)
        self.accelerator.step = done.batches
        self._loaders.begin_epoch(done.epoch)
        return done

    def _place(self, step: int) -> Resumed:
        accumulated, batches = self.accelerator.gradient_accumulation_steps, self._loaders.length
        if batches is None:
            return Resumed(0, step, 0)
        steps = -(-batches // accumulated)
        return Resumed(step // steps, step, step % steps * accumulated)

    def close(self) -> None:
        """Undo what was patched in loaders and hooked into optimizers."""
        self._loaders.close()
        self._strategy.close()

    def _writers(self) -> list[Any]:
        """Return the writers of ``init_trackers``, which the first process has."""
        if not self.accelerator.is_main_process:
            return []
        return [each.tracker for each in self.accelerator.trackers if each.name == "tensorboard"]

    def settings(self) -> LaunchSettings:
        """Return what the accelerator, the optimizers and the models were given."""
        accelerator, strategy = self.accelerator, self._strategy
        given = {**{name: getattr(accelerator, name) for name in _ARGUMENTS}, **strategy.arguments()}
        trained = strategy.optimizers, strategy.schedulers, strategy.models
        return read_settings(given, *trained, is_fixed=accelerator.distributed_type != DistributedType.DEEPSPEED)

    def describe(self) -> Sequence[PartEntry]:
        """Return an entry for each part that Accelerate saves."""
        strategy = self._strategy
        kinds = {"model": strategy.models, "optimizer": strategy.optimizers, "scheduler": strategy.schedulers}
        found = [
            PartEntry(kind, "framework", f"{len(prepared)} prepared, by save_state")
            for kind, prepared in kinds.items()
            if prepared
        ]
        found += [PartEntry("data", "missing", line) for line in missing_lines(self._loaders.missing)]
        if strategy.has_lost_buckets():
            found.append(
                PartEntry(
                    "buckets",
                    "missing",
                    "no DDP module was found around the models (gc.freeze() hides it): on three or more processes the "
                    "first step after a resume may differ in the last bit",
                )
            )
        return found


_ARGUMENTS = ("mixed_precision", "split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
"""What is given to an ``Accelerator`` and shapes the steps of a training."""


def _with_inner(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that its wrappers hold, one within the other."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)
