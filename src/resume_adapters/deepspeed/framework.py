"""DeepSpeed's side of a hand-written loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from torch.utils.data import DataLoader

from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.dataloader.progress import batch_size
from resume_adapters.core.loop.framework import LoopFramework, Resumed
from resume_adapters.core.loop.loader import LoopLoader
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine import names
from resume_adapters.integrations.deepspeed_engine.engine import EngineState
from resume_adapters.integrations.trackers.runs import Trackers

Tree = dict[str, Any]


class DeepSpeedFramework(LoopFramework):
    """A DeepSpeed engine.

    Args:
        engine: what ``deepspeed.initialize`` returned.
    """

    registers = "ResumeHooks"
    carries_windows = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._state = EngineState(engine)
        self.accumulation = int(engine.gradient_accumulation_steps())
        self.fixed = {"ZeRO stage": self._state.stage}
        self.trackers = Trackers(self._writers)
        loader = engine.training_dataloader
        self._batches = None if loader is None else len(loader)

    # ---- Steps

    def in_window(self) -> bool:
        """Return whether the engine is accumulating gradients."""
        return self._state.in_window()

    def begin_within_window(self, batches: int) -> None:
        """Count batches as accumulated."""
        self.engine.micro_steps += batches

    def has_stepped(self) -> bool:
        """Return whether the engine counted a step; one that overflowed counts."""
        return self._state.has_stepped()

    # ---- Data

    def feed(self, outer: Any, session: Session) -> LoopLoader:
        """Watch the torch loader. A loader of ``training_data=`` makes one for each pass; from now on it keeps one.

        Raises:
            UnsupportedSetting: a RepeatingLoader, of which no pass ever ends.
        """
        if isinstance(outer, RepeatingLoader):
            raise UnsupportedSetting(
                "a RepeatingLoader has begun its first pass already, and ends none: give run.batches() the loader "
                "itself, and let run.epochs(max_steps=...) repeat it"
            )
        if not isinstance(outer, DeepSpeedDataLoader):
            return LoopLoader(outer, session.watch(outer), self._samples(outer))
        kept = _torch_loader(outer)

        def begin_pass() -> Any:
            outer.dataloader, outer.data = kept, (batch for batch in kept)
            return kept

        outer._create_dataloader = begin_pass  # seam: deepspeed 0.19
        return LoopLoader(outer, session.watch(kept), self._samples(outer))

    def _writers(self) -> list[Any]:
        """Return the writer of the engine's TensorBoard monitor, which the first process has."""
        monitor = self.engine.monitor.tb_monitor
        return [] if monitor is None else [monitor.summary_writer]

    def _samples(self, loader: Any) -> int:
        """Return the samples in a batch of a loader, on all ranks together; 0 where the loader does not say."""
        return (batch_size(loader) or 0) * int(self.engine.dp_world_size)

    # ---- Saving

    def state_dict(self) -> Tree:
        """Return the model's tensors, without content."""
        return self._state.state_dict()

    def checkpoint_name(self, step: int) -> str:
        """Return the tag that DeepSpeed would choose."""
        return names.tag(step)

    def save(self, directory: Path) -> None:
        """Let ``save_checkpoint`` write."""
        with self._state.data_only():
            self.engine.save_checkpoint(str(directory.parent), tag=directory.name, save_latest=False)

    def owner(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return names.owner(file)

    def state(self) -> Tree:
        """Return what DeepSpeed does not save."""
        return self._state.own()

    def parts(self) -> dict[str, Stateful]:
        """Return the loss scale, and the buffers that DeepSpeed does not save."""
        return self._state.parts()

    # ---- Loading

    def load(self, session: Session) -> None:
        """Let ``load_checkpoint`` load, and prove what it loaded."""
        assert session.checkpoint is not None
        path = session.checkpoint.path
        self._state.load(session, path.parent, path.name)

    def restore(self, saved: Tree) -> None:
        """Put back what DeepSpeed does not save."""
        self._state.restore(saved)

    def adopt(self, checkpoint: Checkpoint) -> Resumed:
        """Return how far a bare checkpoint is, were every epoch one pass over the loader of ``training_data=``."""
        step = checkpoint.step
        if not self._batches:
            return Resumed(0, step, 0)
        done = step * self.engine.gradient_accumulation_steps()
        return Resumed(done // self._batches, step, done % self._batches)

    def entries(self) -> Sequence[PartEntry]:
        """Say of each part who captures it."""
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
