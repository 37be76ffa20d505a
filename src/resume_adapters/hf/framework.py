"""The Trainer's files and live objects: saved by the trainer, loaded and verified here."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.integrations.integration_utils import TensorBoardCallback

from resume_adapters.core.checkpoint import layout
from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.native_files import read_native
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.checkpoint.validity import ForeignDetector
from resume_adapters.core.choices import Stage
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.patching import replaced, unchanged_copy, wrapped
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.saving.staging import StagingOptions, own_methods
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import ForkState, Framework, FrameworkFacts
from resume_adapters.core.session.options import OptionsCallback
from resume_adapters.core.session.rehearsal import NotRehearsed, copies
from resume_adapters.core.session.settings import LaunchSettings
from resume_adapters.core.state import safe_load
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.core.storage.base import read_pieces, write_pieces
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.hf import files, observed
from resume_adapters.hf.records import TrainerRankState
from resume_adapters.hf.weights import ModelWeights, has_adapters, is_replaced, loading_tensors_alone
from resume_adapters.integrations import accelerate_state
from resume_adapters.integrations.deepspeed_engine import names
from resume_adapters.integrations.trackers.checkpoints import reads_checkpoints
from resume_adapters.integrations.trackers.runs import Trackers

if TYPE_CHECKING:
    from resume_adapters.integrations.deepspeed_engine.engine import EngineState


_DO_NOT_READ = ("transformers", "trl", "sentence_transformers")
"""Packages whose trainers do not read again what they save."""

_LOADS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler")  # seam: transformers 4.57 to 5.23

_PUSH = "_push_from_checkpoint"  # seam: transformers 4.57 to 5.23


class TrainerFramework(Framework):
    """A trainer's side of a session."""

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self.trainer = trainer
        stage = int(trainer.accelerator.state.deepspeed_plugin.zero_stage) if trainer.is_deepspeed_enabled else None
        self.about = FrameworkFacts(
            f"transformers {transformers.__version__}",
            channel="transformers",
            registers="ResumeCallback",
            directory_option="TrainingArguments(output_dir=...), or ResumeCallback(run_dir=...)",
            accumulation=int(args.gradient_accumulation_steps),
            topology={
                "per_device_train_batch_size": args.per_device_train_batch_size,
                "gradient_accumulation_steps": args.gradient_accumulation_steps,
            },
            invariants={} if stage is None else {"ZeRO stage": stage},
            layout=accelerate_state.layout(trainer.accelerator, [trainer.model]),
        )
        self.trackers = self._runs = Trackers(self._writers)
        self.engine: EngineState | None = None
        self.weights = ModelWeights(trainer)
        self.is_sharded = bool(trainer.is_fsdp_enabled)  # by FSDP2: the trainer saves and loads it
        self._saved: Path | None = None
        self.foreign = files.ForeignCheckpoints(
            args.world_size, None if stage is None else _of_engine(args.world_size, stage)
        )
        self._native: Callable[[], None] | None = None
        self._read: dict[str, Any] = {}
        self._load_weights: Callable[[], None] | None = None
        self._observed = contextlib.ExitStack()

    # ---- Trackers

    def _tensorboards(self) -> list[Any]:
        return [each for each in self.trainer.callback_handler.callbacks if isinstance(each, TensorBoardCallback)]

    def _writers(self) -> list[Any]:
        return [each.tb_writer for each in self._tensorboards() if each.tb_writer is not None]

    def continue_tensorboards(self) -> None:
        """Point TensorBoard's callbacks to the directories that they had in the checkpoint."""
        for each, directory in zip(self._tensorboards(), self._runs.directories, strict=False):
            if each.tb_writer is None:
                where = each if hasattr(each, "logging_dir") else self.trainer.args  # transformers 4 has it there
                where.logging_dir = directory

    # ---- Saving

    @contextlib.contextmanager
    def saving(self, native: Callable[[], None], *, pushes: bool = True) -> Iterator[None]:
        """Return the context in which :meth:`save` calls the trainer's own save, as the trainer was about to.

        What it pushes to the hub is pushed once the checkpoint has its name.

        Args:
            native: the trainer's own save, with its arguments.
            pushes: it may push the checkpoint to the hub.
        """
        pushed: list[Path] = []
        with (
            replaced(self, "_native", native),
            wrapped(self.trainer, _PUSH, lambda push, checkpoint: pushed.append(Path(checkpoint))),
        ):
            yield
        for each in pushed if pushes else ():
            self.trainer._push_from_checkpoint(self._under_its_name(each))  # seam: transformers 4.57 to 5.23

    def saving_again(self, checkpoint: Path) -> contextlib.AbstractContextManager[None]:
        """Return the context in which :meth:`save` takes the files of the checkpoint that it replaces."""
        return replaced(self, "_native", functools.partial(self._take_files, checkpoint))

    def _take_files(self, checkpoint: Path) -> None:
        place = Path(self.trainer._get_output_dir(trial=None)) / checkpoint.name  # seam: as in save
        storage = LocalStorage()
        for path, file in layout.files(storage, checkpoint):
            if path.parts[0] != layout.EXTRAS and self.owner_of(path) == self.trainer.args.process_index:
                storage.make_directory((place / path).parent)
                try:
                    os.link(file, place / path)
                except OSError:  # not every file system has links
                    write_pieces(storage, place / path, read_pieces(storage, file))

    def own_values(self) -> dict[str, Any]:
        """Return what changes within a step and is saved: what a save sums over the ranks, and states of callbacks."""
        exported = [each.state().get("attributes", {}) for each in files.exported_callbacks(self.trainer)]
        return {"flops": float(self.trainer.current_flos), "callbacks": exported}  # an integer where it was just saved

    def saving_later(self) -> Callable[[Mapping[str, Any]], contextlib.AbstractContextManager[None]]:
        """Return what returns the context in which the trainer saves what it is now, once its loop has been left.

        The context is given what :meth:`own_values` returned.
        """
        trainer, state = self.trainer, self.trainer.state
        of_state, logs = files.changing(state), len(state.log_history)

        @contextlib.contextmanager
        def saving(own: Mapping[str, Any]) -> Iterator[None]:
            trainer.current_flos = own["flops"]
            for callback, attributes in zip(files.exported_callbacks(trainer), own["callbacks"], strict=True):
                files.restore_attributes(callback, attributes)
            vars(state).update(of_state)
            del state.log_history[logs:]
            native = functools.partial(trainer._save_checkpoint, trainer.model_wrapped, None)  # seam: as _PUSH
            # It is in memory, and nobody else's.
            with wrapped(trainer, _PUSH, lambda push, checkpoint: None), replaced(self, "_native", native):
                yield

        return saving

    def save(self, directory: Path) -> None:
        """Write the checkpoint by the trainer's own save."""
        assert self._native is not None, "a save is under way"
        trainer = self.trainer
        with (
            contextlib.nullcontext() if self.engine is None else self.engine.saving(),
            # seam: transformers 4.57 to 5.23
            replaced(trainer, "_get_output_dir", lambda trial=None: str(directory.parent)),
            wrapped(trainer.state, "save_to_json", self._save_state),
            accelerate_state.asking_once_for_deepspeed(),
        ):
            self._native()
        self._name_best(directory)
        self._saved = directory if self._is_whole else None
        if self._is_whole and self.trainer.args.should_save:
            files.require_complete(self.trainer, directory, [*files.components(self.trainer), "trainer_state.json"])

    @property
    def _is_whole(self) -> bool:
        """Whether one process has all of the state, and the trainer's own files hold it."""
        return self.engine is None and not self.is_sharded

    def beside_files(self) -> dict[str, Any] | None:
        """Return what the checkpoint that was saved last needs beside its files; see :class:`ModelWeights`."""
        return None if self._saved is None else self.weights.beside_files(self._saved)

    def weights_files(self) -> WeightsFiles | None:
        """Return the files beside optimizer, schedule and random states; none with DeepSpeed."""
        return None if self.trainer.is_deepspeed_enabled else accelerate_state.WEIGHTS

    def rehearse(self, context: RestoreContext) -> None:
        """Load weights, optimizer, schedule and scaler into copies, by a copy of the trainer.

        Raises:
            NotRehearsed: no copies can be made, or the state is spread over processes.
            NotRestored: one of them does not come back.
        """
        if not self._is_whole:
            raise NotRehearsed("its state is spread over processes")
        if not self.trainer.args.should_save:
            return
        trainer = _copied(self.trainer)
        if self.trainer.args.world_size > 1 and any(is_replaced(name, getattr(trainer, name)) for name in _LOADS):
            raise NotRehearsed("the trainer loads in a way of its own, which may wait for other processes")
        self.weights.rehearse(trainer, context.reader)
        read = files.read(context.files)
        with safe_load.allowing(safe_load.data_classes()), files.loading(read):
            trainer._load_optimizer_and_scheduler(str(context.path))  # seam: transformers 4.57 to 5.23
            if hasattr(trainer, "_load_scaler"):
                trainer._load_scaler(str(context.path))  # seam: transformers 4.57 to 5.23
        files.verify(trainer, read)

    def loaded_files(self, directory: Path) -> list[Path]:
        """Return the states of optimizer, schedule and scaler, and weights in torch's own format."""
        return [] if self.engine is not None else files.loaded(directory)

    def is_read(self, place: str) -> bool:
        """Return that a resume reads all of those files."""
        return True

    def _save_state(self, native: Callable[[str], None], path: str) -> None:
        self._name_best(Path(path).parent)
        native(path)

    def _name_best(self, saved: Path) -> None:
        """Where the checkpoint that is being saved is the best, let the trainer know the name that it will have."""
        state = self.trainer.state
        if state.best_model_checkpoint == str(saved):
            state.best_model_checkpoint = self._under_its_name(saved)

    def _under_its_name(self, checkpoint: Path) -> str:
        return os.path.join(self.trainer.args.output_dir, checkpoint.name)

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors with the names, dtypes and whole shapes of the model's."""
        found: Mapping[str, Any] = (self.engine or self.trainer.model).state_dict()
        return found

    def readers(self) -> list[str]:
        """Return the methods of callbacks that may read a checkpoint, or remove others, when they hear of it."""
        others = [each for each in self.trainer.callback_handler.callbacks if not isinstance(each, OptionsCallback)]
        told = [each for each in others if reads_checkpoints(each, "on_save", ("transformers",))]
        return [f"{type(each).__name__}.on_save" for each in told]

    def staging(self, stage: Stage) -> StagingOptions:
        """Return who reads a save, and who writes it. What is pushed to the hub is not copied: it is read at once."""
        trainer = self.trainer
        saves = ("_save_checkpoint", "_save", "save_model")  # seam: transformers 4.57 to 5.23
        own = own_methods(trainer, saves, _DO_NOT_READ)

        def objection() -> str:
            readers = [*self.readers(), *own]
            return f"{readers[0]}() may read each checkpoint" if readers else ""

        peft = sys.modules.get("peft.peft_model")
        return StagingOptions(
            "off" if trainer.args.push_to_hub else stage,
            objection=objection,
            writers=[
                (module, "safe_save_file")  # seam: transformers 4.57 to 5.23, peft 0.17 to 0.19
                for module in (transformers.modeling_utils, peft)
                if hasattr(module, "safe_save_file")
            ],
        )

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file of the trainer."""
        return files.owner(file)

    def parts(self) -> dict[str, Stateful]:
        """Return the callbacks that save their state, and what is saved of one process, or not at all."""
        found, args = files.stateful_callbacks(self.trainer), self.trainer.args
        if self.engine is not None:
            found.update(self.engine.parts())
        if self.is_sharded or (args.world_size > 1 and args.ddp_broadcast_buffers is False):
            found["buffers"] = ModuleBuffers({0: self.trainer.model})
        return found

    def sharded_state(self) -> dict[str, Any]:
        """Return what FSDP shards; what DeepSpeed shards, it loads and this package verifies file by file."""
        trainer = self.trainer
        if not self.is_sharded:
            return {}
        return {"model": dict(trainer.model.named_parameters()), "optimizer": trainer.optimizer.state_dict()}

    def modules(self) -> list[Any]:
        """Return the module that may reduce gradients in buckets."""
        return [self.trainer.model_wrapped]

    def subjects(self) -> Subjects:
        """Return the trainer and what hangs on it, without what it saves or rebuilds."""
        return observed.subjects(self.trainer)

    def settings(self) -> LaunchSettings:
        """Return the training arguments, and what optimizer and schedule were made with."""
        return observed.of_trainer(self.trainer, None if self.engine is None else self.engine.arguments())

    def describe(self) -> Sequence[PartEntry]:
        """Return an entry for each part that the trainer saves."""
        return files.describe(self.trainer)

    # ---- Loading

    def load_model(self, context: RestoreContext, native: Callable[[], None], *, has_own_loader: bool) -> None:
        """Load the weights; see :meth:`ModelWeights.load`."""
        context.prepare_model(self.state_dict(), self.modules())
        self._read = files.read(context.files)
        if self.is_sharded:
            with self._reading_shards(context.files), loading_tensors_alone(self.trainer):
                native()
            return
        self._load_weights = functools.partial(self.weights.load, context.reader, native, has_own_loader=has_own_loader)
        self._load_weights()

    def fork_state(self, reader: CheckpointReader) -> ForkState:
        """Return the model and the optimizer, each with what was saved of it."""
        if not self._is_whole:
            return super().fork_state(reader)
        return ForkState(
            [(self.trainer.model, self.weights.of_fork(reader))],
            lambda: [(self.trainer.optimizer, read_native(reader.files.require("optimizer.pt")))],
        )

    def load_optimizer(self, context: RestoreContext | None, native: Callable[[], None]) -> None:
        """Load optimizer and schedule by the trainer, where FSDP has sharded them too."""
        allowed = safe_load.allowing(safe_load.data_classes())
        reading = self._reading_shards(context.files) if self.is_sharded and context is not None else allowed
        with reading, files.loading(self._read):
            native()

    def _reading_shards(self, held: CheckpointFiles) -> contextlib.AbstractContextManager[None]:
        return accelerate_state.reading_shards(self.trainer.accelerator.state.fsdp_plugin, held)

    def attach_engine(
        self, deepspeed: Any, run_directory: Path, context: RestoreContext | None, before_load: Callable[[], None]
    ) -> None:
        """Attach to the engine through which DeepSpeed trains, and load what it saved in the checkpoint."""
        from resume_adapters.integrations.deepspeed_engine.engine import attach_engine  # imports DeepSpeed

        self.engine = attach_engine(deepspeed, run_directory)
        before_load()
        if context is not None:
            context.prepare_model(self.state_dict(), self.modules())
            self.engine.load(context, context.path, names.tag(context.step))

    def load_best(self, run: ResumableRun, native: Callable[[], None], *, has_own_loader: bool, verify: bool) -> None:
        """Load the best weights at the end; see :meth:`ModelWeights.load`."""
        best = Path(self.trainer.state.best_model_checkpoint)
        if not best.is_dir():  # the trainer warns, and goes on with the last weights
            native()
            return
        reader = run.reader(run.require_valid(best))
        if self.engine is not None:
            with self.engine.data_only():
                native()
        elif self.is_sharded:
            with self._reading_shards(reader.files):
                native()
        else:
            self.weights.load(reader, native, has_own_loader=has_own_loader, has_trained=True)
            if verify and not has_adapters(self.trainer.model):
                self.weights.verify(reader)

    def verify(self, context: RestoreContext, restore_parts: Callable[[], None]) -> None:
        """Compare all that was loaded with what the checkpoint holds, once callbacks have begun.

        Args:
            restore_parts: restores the parts once more.

        Raises:
            NotRestored: naming the component and the first difference.
        """
        if self._is_whole and context.checkpoint.manifest is not None:
            files.require_complete(self.trainer, context.path, ["optimizer.pt", "scheduler.pt"])
        if context.verify:
            if self.is_sharded:
                context.verify_shards(self.sharded_state)
            read = self._read or files.read(context.files)

            def verify() -> None:
                if self._load_weights is not None:
                    self.weights.verify(context.reader, context.own_buffers)
                files.verify(self.trainer, read)

            def load() -> None:
                if self._load_weights is not None:
                    self._load_weights()
                files.load(self.trainer, read)
                restore_parts()

            context.add_proof(verify)
            context.verify_loaded(load)
        else:
            restore_parts()
        context.drop_proofs()
        self._read, self._load_weights = {}, None

    def restore_running_values(self, context: RestoreContext, state: TrainerRankState, *, is_resharded: bool) -> None:
        """Restore what the trainer resets at the start of its loop.

        Args:
            is_resharded: the topology was different when it was saved.
        """
        trainer, counters = self.trainer, state.counters
        running = counters.tr_loss
        if is_resharded:  # each rank's is its share of what is averaged when it is logged
            running = torch.stack([each.counters.tr_loss for each in context.all_rank_states()]).mean(0)
        trainer._tr_loss = running.to(trainer._tr_loss.device)
        trainer._total_loss_scalar = counters.total_loss
        trainer._globalstep_last_logged = counters.last_logged
        trainer._initial_global_step = counters.initial_step
        if self.engine is not None and state.engine is not None:
            self.engine.load_rank_state(state.engine)

    def observe_grad_norm(self, observe: Callable[[Any], None]) -> None:
        """Call a function with each gradient norm that the trainer computes, until :meth:`close`."""

        def clip(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            norm = native(*args, **kwargs)
            observe(norm)
            return norm

        self._observed.enter_context(wrapped(self.trainer.accelerator, "clip_grad_norm_", clip))

    def close(self) -> None:
        """Observe the gradient norms no longer; what is patched in the trainer is undone by ``hf.patch``."""
        self._observed.close()
        if self.engine is not None:
            self.engine.close()


def _copied(trainer: Any) -> Any:
    """Return a copy of a trainer as no session has changed it, with copies of what it trains.

    Raises:
        NotRehearsed: that cannot be copied.
    """
    made, accelerator = unchanged_copy(trainer), unchanged_copy(trainer.accelerator)
    live = {"model": trainer.model, "optimizer": trainer.optimizer, "lr_scheduler": trainer.lr_scheduler}
    states = [getattr(trainer.optimizer, name, None) for name in ("accelerator_state", "gradient_state")]
    shared = [trainer, trainer.args, trainer.accelerator, trainer.callback_handler, trainer.train_dataset, *states]
    found = copies({**live, "scaler": trainer.accelerator.scaler}, shared)
    accelerator.scaler = found.pop("scaler")
    vars(made).update(found, model_wrapped=found["model"], accelerator=accelerator)
    return made


def _of_engine(world_size: int, stage: int) -> ForeignDetector:
    """Return what recognises the checkpoints of the engine alone."""
    from resume_adapters.integrations.deepspeed_engine.files import ForeignCheckpoints  # imports DeepSpeed

    return ForeignCheckpoints(world_size, stage)
