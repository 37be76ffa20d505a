"""DeepSpeed's side of a hand-written loop."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from torch.utils.data import DataLoader

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.dataloader.progress import batch_size
from resume_adapters.core.loop import observed
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.guard import Trained
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.patching import replaced
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import FrameworkFacts
from resume_adapters.core.session.session import Session
from resume_adapters.core.session.settings import LaunchSettings
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine import files, names
from resume_adapters.integrations.deepspeed_engine.engine import EngineState
from resume_adapters.integrations.deepspeed_engine.names import EngineRankState
from resume_adapters.integrations.trackers.runs import Trackers


class DeepSpeedFramework(LoopFramework):
    """A DeepSpeed engine.

    Args:
        engine: what ``deepspeed.initialize`` returned.
    """

    rank_state_type = EngineRankState

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._state = EngineState(engine)
        self.about = FrameworkFacts(
            f"deepspeed {deepspeed.__version__}",
            channel="DeepSpeed",
            registers="ResumeHooks",
            directory_option="ResumeHooks(engine, run_dir)",
            accumulation=int(engine.gradient_accumulation_steps()),
            accumulates_across_epochs=True,
            invariants=self._state.invariants,
        )
        self.is_node_local = bool(engine.use_node_local_storage())
        self.foreign = files.ForeignCheckpoints(
            engine.world_size, self._state.stage, engine.global_rank if self.is_node_local else None
        )
        self.trackers = Trackers(self._writers)
        self._replaced = contextlib.ExitStack()
        loader = engine.training_dataloader
        self._batches = None if loader is None else len(loader)

    # ---- Steps

    def trained(self) -> Trained:
        """Return the engine's optimizer, and its model."""
        return Trained([self.engine.basic_optimizer, self.engine.optimizer], [self.engine.module], are_partitioned=True)

    def is_accumulating(self) -> bool:
        """Return whether the engine is accumulating gradients."""
        return self._state.is_accumulating()

    def skip_micro_batches(self, batches: int) -> None:
        """Count batches as accumulated."""
        self.engine.micro_steps += batches

    def has_stepped(self) -> bool:
        """Return whether the engine counted a step; one that overflowed counts."""
        return self._state.has_stepped()

    def grad_norm(self) -> Any:
        """Return the norm over all ranks, before clipping."""
        return self.engine.get_global_grad_norm()

    # ---- Data

    def track(self, loader: Any, session: Session) -> LoopLoader:
        """Track the torch loader. A loader of ``training_data=`` makes one for each pass; from now on it keeps one.

        Raises:
            UnsupportedSetting: a RepeatingLoader, whose pass never ends.
        """
        if isinstance(loader, RepeatingLoader):
            raise UnsupportedSetting(
                "a RepeatingLoader has begun its first pass already, and never ends one: give run.batches() the loader "
                "itself, and let run.epochs(max_steps=...) repeat it"
            )
        if not isinstance(loader, DeepSpeedDataLoader):
            return LoopLoader(loader, session.loaders.track(loader), self._samples(loader))
        kept = _torch_loader(loader)

        def begin_pass() -> Any:
            loader.dataloader, loader.data = kept, (batch for batch in kept)
            return kept

        self._replaced.enter_context(replaced(loader, "_create_dataloader", begin_pass))  # seam: deepspeed 0.19
        return LoopLoader(loader, session.loaders.track(kept), self._samples(loader), is_kept=True)

    def _writers(self) -> list[Any]:
        """Return the writer of the engine's TensorBoard monitor, which the first process has."""
        monitor = self.engine.monitor.tb_monitor
        return [] if monitor is None else [monitor.summary_writer]

    def _samples(self, loader: Any) -> int:
        """Return the samples in a batch of a loader, on all ranks together; 0 where the loader does not say."""
        return (batch_size(loader) or 0) * int(self.engine.dp_world_size)

    def close(self) -> None:
        """Undo what was wrapped; the loaders of ``training_data=`` make a torch loader for each pass again."""
        self._replaced.close()
        self._state.close()

    # ---- Saving

    def state_dict(self) -> dict[str, Any]:
        """Return the model's tensors, without content."""
        return self._state.state_dict()

    def checkpoint_name(self, step: int) -> str:
        """Return the tag that DeepSpeed would choose."""
        return names.tag(step)

    def save(self, directory: Path) -> None:
        """Write by ``save_checkpoint``."""
        with self._state.saving():
            self.engine.save_checkpoint(str(directory.parent), tag=directory.name, save_latest=False)

    def loaded_files(self, directory: Path) -> list[Path]:
        """Return nothing: the engine's own files are checked when they are written."""
        return []

    def weights_files(self) -> None:
        """Return nothing: with ZeRO, the weights are in the optimizer's files."""

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return names.owner(file)

    def rank_state(self) -> EngineRankState:
        """Return what DeepSpeed does not save."""
        return self._state.rank_state()

    def subjects(self) -> Subjects:
        """Return the model, and schedulers that the engine does not have."""
        engine = self.engine
        optimizers = [each for each in (engine.basic_optimizer, engine.optimizer) if each is not None]
        return observed.subjects([engine], optimizers, [engine.lr_scheduler, *optimizers, *engine.module.buffers()])

    def parts(self) -> dict[str, Stateful]:
        """Return the loss scale, and the buffers that DeepSpeed does not save."""
        return self._state.parts()

    # ---- Loading

    def load(self, context: RestoreContext) -> None:
        """Load by ``load_checkpoint``, and verify what it loaded."""
        self._state.load(context, context.path.parent, context.path.name)
        self._state.add_proof(context)

    def load_rank_state(self, record: EngineRankState) -> None:
        """Restore what DeepSpeed does not save."""
        self._state.load_rank_state(record)

    def load_foreign(self, context: RestoreContext) -> Resumed:
        """Return how far a bare checkpoint is, if every epoch was one pass over the loader of ``training_data=``."""
        step = context.step
        if not self._batches:
            return Resumed(0, step, 0)
        done = step * self.engine.gradient_accumulation_steps()
        return Resumed(done // self._batches, step, done % self._batches)

    def settings(self) -> LaunchSettings:
        """Return what the engine was given."""
        return self._state.settings()

    def describe(self) -> Sequence[PartEntry]:
        """Return an entry for each part that DeepSpeed saves."""
        found = [
            PartEntry("model", "framework", f"save_checkpoint, ZeRO stage {self._state.stage}"),
            PartEntry("optimizer", "framework", f"save_checkpoint; {type(self.engine.basic_optimizer).__name__}"),
        ]
        if self.engine.lr_scheduler is not None:
            found.append(PartEntry("scheduler", "framework", "save_checkpoint"))
        return found


def _torch_loader(outer: Any) -> Any:
    """Return the torch loader that a loader of ``training_data=`` would make for a pass, and would begin at once."""
    collate = {} if outer.collate_fn is None else {"collate_fn": outer.collate_fn}
    return DataLoader(
        outer.dataset,
        batch_size=outer.batch_size,
        sampler=outer.data_sampler,
        num_workers=outer.num_local_io_workers,
        pin_memory=outer.pin_memory,
        drop_last=outer.dataloader_drop_last,
        **collate,
    )
