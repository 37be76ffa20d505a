"""What one call of ``Trainer.train`` does before its first step: choose, check, load, put back, prove."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import send_to_device
from transformers.integrations.integration_utils import TensorBoardCallback

from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.checkpoint.retention import KeepLast
from resume_adapters.core.dataloader.dispatch import FirstSlice, fetches_per_batch
from resume_adapters.core.dataloader.progress import length_of
from resume_adapters.core.dataloader.tracked import TrackedLoader
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.cadence import chosen
from resume_adapters.core.session.options import OptionsCallback
from resume_adapters.core.session.rescale import GIVEN_IN_STEPS
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.core.state.weights import load_weights
from resume_adapters.hf import engine, files
from resume_adapters.hf.supported import require_supported
from resume_adapters.integrations.deepspeed_engine import names
from resume_adapters.integrations.trackers.runs import Trackers

if TYPE_CHECKING:
    from resume_adapters.integrations.deepspeed_engine.engine import EngineState


class Restoration(Session):
    """The first half of a :class:`~resume_adapters.hf.session.TrainerSession`."""

    def __init__(self, trainer: Any, callback: OptionsCallback, resume: str | os.PathLike[str]) -> None:
        cadence = chosen(callback.save_every, callback.mtbf)
        require_supported(trainer, cadence)
        args = trainer.args
        limit = args.save_total_limit
        run = ResumableRun(
            args.output_dir,
            framework=f"transformers {transformers.__version__}",
            resume=resume,
            keep=KeepLast(limit) if callback.keep is None and limit else callback.keep,
            stop=callback.stop,
            cadence=cadence,
            foreign=functools.partial(
                files.foreign_step, world_size=args.world_size, engine=engine.foreign(trainer, args.world_size)
            ),
        )
        topology = {
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
        }
        self.trackers = Trackers(self._writers)
        super().__init__(
            run,
            callback.parts,
            trackers=self.trackers,
            verify=callback.verify,
            topology=topology,
            accumulation=args.gradient_accumulation_steps,
            fixed=engine.invariants(trainer),
            on_batch_change=callback.on_batch_change,
        )
        if args.max_steps > 0:
            self.batch_change.no_horizon = GIVEN_IN_STEPS
        self.trainer = trainer
        self.engine: EngineState | None = None
        self.loader_watch: TrackedLoader | None = None
        self.share = 1
        self.length: int | None = None
        self.first_slice: FirstSlice | None = None
        self.epoch, self.consumed, self.between_epochs = -1, 0, False
        self.over = self.finished = self.saving = False
        self.replaces_cadence = cadence is not None
        self.initial_step, self.seconds, self.started = 0, 0.0, time.monotonic()

    # ---- Resuming

    def open(self) -> str | None:
        """Choose what to resume from; return the path that the trainer is to load."""
        chosen = self.choose()
        for each, directory in zip(self._tensorboards(), self.trackers.directories, strict=False):
            if each.tb_writer is None:
                where = each if hasattr(each, "logging_dir") else self.trainer.args  # transformers 4 has it there
                where.logging_dir = directory
        return None if chosen is None else str(chosen.path)

    def _tensorboards(self) -> list[Any]:
        return [each for each in self.trainer.callback_handler.callbacks if isinstance(each, TensorBoardCallback)]

    def _writers(self) -> list[Any]:
        return [each.tb_writer for each in self._tensorboards() if each.tb_writer is not None]

    def load_model(self, model: Any, native: Callable[[], None]) -> None:
        """Load the weights, whatever wraps the model, and prove them."""
        assert self.checkpoint is not None
        path = self.checkpoint.path
        self.require_architecture(model)
        weight_files = files.weights(path)
        if weight_files:
            self.load_weights(model, read_weight_files(weight_files))
        else:  # adapters: only peft knows under which names they are saved
            native()

    def attach_engine(self, deepspeed: Any) -> None:
        """Take over the engine through which DeepSpeed trains, and load what it saved in the checkpoint."""
        self.engine = engine.attach_engine(deepspeed, self.run.directory)
        if self.checkpoint is not None:
            self.require_architecture(self.engine)
            self.engine.load(self, self.checkpoint.path, names.tag(self.checkpoint.step))

    def load_best(self, native: Callable[[], None]) -> None:
        """Load the best weights at the end, whatever wrapped the model when they were saved."""
        best = Path(self.trainer.state.best_model_checkpoint)
        weight_files = files.weights(best)
        if self.engine is not None:
            self.run.require_valid(best)
            with self.engine.data_only():
                native()
        elif weight_files:
            self.run.require_valid(best)
            load_weights(self.trainer.model, read_weight_files(weight_files), best)
        else:
            native()

    def restore_counters(self, native: tuple[int, int], max_steps: int, epochs: int) -> tuple[int, int]:
        """Return the epoch to go on in and the micro-batches of it that are done, and set the loader there."""
        if self.checkpoint is None:
            return native
        assert self.loader_watch is not None
        live = self.trainer.state
        best = self.run.directory / f"checkpoint-{live.best_global_step}"
        live.best_model_checkpoint = str(self._as_given(best)) if live.best_global_step and best.is_dir() else None
        files.restore_callbacks(self.trainer)
        if self.own is None:
            self.epoch, self.consumed = native[0] - 1, native[1]
            if self.consumed:
                self.loader_watch.skip(self.consumed)
            return native
        own, position = self.own, self.own["position"]
        rebatched = self.is_rebatched(own, self.together)
        at_end = live.global_step >= max_steps + self.batch_change.shift and not rebatched
        self.finished = self.is_finished(live.global_step, max_steps + self.batch_change.shift)
        self.over = at_end or (own["stopping"] and live.global_step < own["max_steps"])
        if self.finished or self.over:
            position = position | {"ended": True}
        saved = own | {"position": position}
        consumed = self.restore_loader(
            self.loader_watch,
            saved,
            self.together,
            self.share,
            lambda rank: rank,
            epoch=own["epoch"],
            length=self.length,
        )
        live.max_steps = max_steps + self.batch_change.shift
        self.over = self.over or live.global_step >= live.max_steps
        if self.finished or (self.over and own["between_epochs"]):
            return epochs, 0
        next_epoch = own["between_epochs"] and position["ended"]
        self.epoch = own["epoch"] if next_epoch else own["epoch"] - 1
        self.consumed = 0 if next_epoch else consumed
        if self.first_slice is not None:
            self.first_slice.restore(send_to_device(own["first_slice"], self.trainer.args.device))
        return self.epoch + 1, self.consumed

    @property
    def together(self) -> int:
        """Samples in a micro-batch, on all ranks together."""
        size: int = self.trainer.args.per_device_train_batch_size * self.run.ranks.world_size
        return size

    def _as_given(self, path: Path) -> Path:
        return Path(self.trainer.args.output_dir) / path.name

    def load_rng(self, native: Callable[[], None]) -> None:
        """Stand in for the trainer's own restore of the random state, which comes after the data were fetched."""
        assert self.loader_watch is not None
        if self.own is None:
            native()
        elif not self.loader_watch.restored:
            self.loader_watch.restore_now()

    def watch_loader(self, train_loader: Any) -> Any:
        """Watch the loader of ``get_train_dataloader``, below what Accelerate wraps around it."""
        self.loader_watch = self.watch(getattr(train_loader, "base_dataloader", train_loader))
        self.length = length_of(train_loader)
        if not isinstance(train_loader, DataLoaderDispatcher):
            return train_loader
        self.share = fetches_per_batch(self.run.ranks, splits=train_loader.split_batches)
        if not train_loader._drop_last:  # seam: accelerate 1.15
            self.first_slice = train_loader.slice_fn = FirstSlice(train_loader.slice_fn, self.loader_watch)
        return train_loader

    def begin_training(self, control: Any) -> None:
        """Put back what the trainer resets after it has loaded a checkpoint, and prove what it loaded."""
        trainer = self.trainer
        self.started = time.monotonic()
        if self.checkpoint is not None:
            control.should_training_stop = self.over
            self.restore_parts(self._further_parts())
            if self.verify:
                files.verify(trainer, self.checkpoint.path)
            self.move_schedules()
        if self.own is not None:
            self._restore_running_values()
        self.align_buckets(trainer.model_wrapped)

    def _restore_running_values(self) -> None:
        """Put back what the trainer sets anew at the start of its loop."""
        trainer = self.trainer
        counters = self.own["counters"]
        running = counters["tr_loss"]
        if self.moved:  # each rank's is its share of what is averaged when it is logged
            running = torch.stack([own["counters"]["tr_loss"] for own in self.everyone()]).mean(0)
        trainer._tr_loss = running.to(trainer._tr_loss.device)
        trainer._total_loss_scalar = counters["total_loss"]
        trainer._globalstep_last_logged = counters["last_logged"]
        trainer._initial_global_step = self.initial_step = counters["initial_step"]
        self.seconds = counters["seconds"]
        if self.engine is not None:
            self.engine.restore(self.own["engine"])

    def _further_parts(self) -> dict[str, Stateful]:
        of_engine = {} if self.engine is None else self.engine.parts()
        return {**files.stateful_callbacks(self.trainer), **of_engine}
