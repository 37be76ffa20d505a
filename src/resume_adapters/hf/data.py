"""The training data of one call of ``Trainer.train``: the loader, its micro-batches, and dispatching loaders."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import send_to_device

from resume_adapters.core.dataloader.dispatch import FirstSlice, fetches_per_batch
from resume_adapters.core.dataloader.sampler import length_of
from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.patching import replaced
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.loaders import LoaderShape
from resume_adapters.core.session.records import LoaderState
from resume_adapters.core.session.session import Session
from resume_adapters.hf.records import TrainerRankState


class TrainingData:
    """The training loader and how far it is.

    Attributes:
        loader: the tracked torch loader; ``None`` before the trainer asks for it.
        consumed: micro-batches that are done in this epoch.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self.loader: TrackedLoader | None = None
        self.consumed = 0
        self._trainer = trainer
        self._session = session
        self._fetches = 1
        self._length: int | None = None
        self._first_slice: FirstSlice | None = None
        self._replaced = contextlib.ExitStack()

    @property
    def global_batch(self) -> int:
        """Samples in a micro-batch, on all ranks together."""
        args, ranks = self._trainer.args, self._session.run.ranks.world_size
        splits = args.accelerator_config.split_batches
        return int(args.per_device_train_batch_size) * (1 if splits else ranks)

    def track(self, train_loader: Any) -> Any:
        """Track the loader of ``get_train_dataloader``, below what Accelerate wraps around it; return it."""
        self.loader = self._session.loaders.track(getattr(train_loader, "base_dataloader", train_loader))
        self._length = length_of(train_loader)
        if isinstance(train_loader, DataLoaderDispatcher):
            self._fetches = fetches_per_batch(self._session.run.ranks, splits=train_loader.split_batches)
            self._first_slice = FirstSlice(train_loader, self.loader)
            if not train_loader._drop_last:  # seam: accelerate 1.15
                self._replaced.enter_context(replaced(train_loader, "slice_fn", self._first_slice))
        return train_loader

    def close(self) -> None:
        """Give a dispatching loader its own slicing function again."""
        self._replaced.close()

    # ---- Counting

    def left_of(self, batches: int) -> int:
        """Return how many of some micro-batches the epoch still has, by its length: a loader may yield more."""
        if self._length is None or self._session.loaders.topology_changes:
            return batches
        return max(min(batches, self._length - self.consumed), 0)

    # ---- In a checkpoint

    def state(self, *, between_epochs: bool, stopping: bool) -> LoaderState:
        """Return where the loader is.

        Args:
            between_epochs: the epoch has ended.
            stopping: the trainer has decided to stop, maybe within the pass.
        """
        loader = self.loader
        assert loader is not None, "the trainer has its loader"
        used = min(self.consumed * self._fetches, loader.fetched)
        if self._first_slice is None:
            is_over, is_through = False, loader.exhausted and used == loader.fetched
        else:  # a rank that fetches nothing sees no end beneath
            is_over = is_through = self._first_slice.is_through()
        is_over = is_over or (between_epochs and (not stopping or is_through)) or self._leaves_rest(loader)
        position = loader.position_between() if is_over else loader.position(used)
        return self._session.loaders.state(loader, position, self.consumed, self.global_batch, self._fetches)

    def _leaves_rest(self, loader: TrackedLoader) -> bool:
        """Return whether the pass is used up by its length, and the loader has more, which nobody asks for."""
        is_used_up = self._length is not None and self.consumed >= self._length
        return is_used_up and not loader.exhausted and loader.fetched >= self.consumed * self._fetches

    def first_slice(self) -> Any:
        """Return what fills up the last batch of a dispatching loader's running pass."""
        return self._first_slice.kept if self._first_slice else None

    # ---- Resuming

    def is_rebatched(self, saved: LoaderState) -> bool:
        """Return whether an optimizer step had a different number of samples than it has now."""
        return self._session.loaders.is_rebatched(saved, self.global_batch)

    def skip(self, consumed: int) -> None:
        """Begin after some micro-batches of a bare checkpoint."""
        self.consumed = consumed
        if consumed and self.loader is not None:
            self.loader.skip(consumed)

    def restore(self, context: RestoreContext, state: TrainerRankState, *, ended: bool) -> int:
        """Restore the loader; return the micro-batches that are done.

        Args:
            ended: no step is left: the pass counts as ended.
        """
        assert self.loader is not None and state.position is not None, "the trainer has its loader, and saved it"
        saved = replace(state, position=replace(state.position, ended=True)) if ended else state
        shape = LoaderShape(self.global_batch, state.epoch, self._length, self._fetches)
        return self._session.loaders.restore(context, self.loader, saved, shape, lambda other: other)

    def resume_at(self, consumed: int, first_slice: Any) -> None:
        """Resume after some micro-batches of the epoch."""
        self.consumed = consumed
        context = self._session.context
        if self._first_slice is not None and (context is None or not context.has_other_ranks):  # which need another
            self._first_slice.restore(send_to_device(first_slice, self._trainer.args.device))

    def end_pass(self, state: TrainerRankState) -> None:
        """Count the pass as ended, with the random state of a checkpoint."""
        assert self.loader is not None and state.position is not None, "the trainer has its loader, and saved it"
        self.loader.restore(replace(state.position, ended=True))

    def restore_rng(self) -> None:
        """Restore the random state where no batch is left to do it."""
        if self.loader is not None and not self.loader.restored:
            self.loader.restore_now()
