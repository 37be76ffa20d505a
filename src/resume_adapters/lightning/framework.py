"""Lightning's side of a checkpoint: its file or directory, and the live objects that a trainer has."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint import distributed_metadata
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.choices import Stage
from resume_adapters.core.log import logger
from resume_adapters.core.observed import own_objects
from resume_adapters.core.observed.walk import Subjects
from resume_adapters.core.patching import replaced
from resume_adapters.core.ranks import current_world_size
from resume_adapters.core.saving.staging import StagingOptions, own_methods
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.session.framework import ForkState, Framework, FrameworkFacts
from resume_adapters.core.session.loaders import missing_lines
from resume_adapters.core.session.rehearsal import NotRehearsed, copies, load_copy, overwrite
from resume_adapters.core.session.rescale import Schedules
from resume_adapters.core.session.settings import LaunchSettings
from resume_adapters.core.state import keys
from resume_adapters.core.state.loading import load_verified
from resume_adapters.core.state.stateful import Stateful
from resume_adapters.core.state.weights import lost_in, updated
from resume_adapters.errors import CheckpointDamaged, NotSerialisable, UnsupportedSetting
from resume_adapters.integrations import model_parallel
from resume_adapters.integrations.deepspeed_engine.names import owner
from resume_adapters.integrations.lightning_files import writing_directly
from resume_adapters.integrations.trackers.checkpoints import reads_checkpoints
from resume_adapters.integrations.trackers.runs import Trackers
from resume_adapters.lightning import files, model_checkpoints, observed, strategies
from resume_adapters.lightning.compat import VERSION, io, pl
from resume_adapters.lightning.data import ValidationData
from resume_adapters.lightning.files import ResumeCheckpointIO, data_only, require_data
from resume_adapters.lightning.loops import Loops
from resume_adapters.lightning.observed import not_taken_back

_DO_NOT_READ = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
"""Packages whose methods do not read again what they save."""

_READ = (
    *("epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks", "optimizer_states"),
    *("lr_schedulers", "native_amp_scaling_state"),
)  # seam: lightning 2.4-2.6
"""What Lightning itself reads of a checkpoint, beside what a precision plugin and a datamodule have saved."""

_ONLY_RESUMED = ("optimizer_states", "lr_schedulers", "loops", "callbacks")  # seam: lightning 2.4-2.6

_OF_LIGHTNING = frozenset(_READ) - {"callbacks"}
"""What no hook adds to."""

_NO_HOOKS = tuple(each.on_load_checkpoint for each in (pl.LightningModule, pl.Callback))
"""The hooks that nobody has written."""


class LightningFramework(Framework):
    """The files and live objects of one ``fit``. It is the session's :class:`Framework`.

    Args:
        trainer: the trainer, with its strategy set up as far as it is before a checkpoint is loaded.

    Attributes:
        about: what is known of Lightning and its settings.
        trackers: the experiment trackers.
        foreign: recognises checkpoints that bare Lightning wrote.
        engine: the state of the DeepSpeed engine; ``None`` without DeepSpeed.
        own_objects: which objects of this training the last checkpoint holds: see :func:`own_objects.find`.
        validation_data: what changes on the data of the validations.
        under_way: the checkpoint that is being saved, as the trainer named it, and the trainer's own save.
    """

    def __init__(self, trainer: Any, directory: Path) -> None:
        self._trainer = trainer
        self._ranks = current_world_size()
        self.engine = strategies.engine_state(trainer.strategy, directory)
        of_engine = {} if self.engine is None else self.engine.invariants
        accumulation = int(trainer.accumulate_grad_batches)
        self.about = FrameworkFacts(
            VERSION,
            channel=pl.__name__,
            registers="ResumeCallback",
            directory_option="ModelCheckpoint(dirpath=...)",
            accumulation=accumulation,
            topology={"accumulate_grad_batches": accumulation},
            invariants={**strategies.invariants(trainer, self._ranks), **of_engine},
            layout=model_parallel.layout(trainer.strategy),
        )
        self.trackers = Trackers(
            lambda: [each.experiment for each in self._loggers(pl.loggers.TensorBoardLogger)],
            lambda: next((each.run_id for each in self._loggers(pl.loggers.MLFlowLogger)), None),
        )
        self.foreign = files.ForeignCheckpoints() if self.engine is None else self.engine.foreign(strategies.TAG)
        self.own_objects: dict[str, list[Any]] = {}
        self.validation_data = ValidationData(Loops(trainer))
        self.under_way: tuple[Path, Callable[[Path], object]] | None = None
        self._loaded: dict[str, Any] = {}

    # ---- Live objects

    def state_dict(self) -> Mapping[str, Any]:
        """Return tensors with the names, dtypes and whole shapes of the module's."""
        live: Mapping[str, Any] = (self.engine or self._trainer.lightning_module).state_dict()
        return live

    def modules(self) -> Iterable[Any]:
        """Return the module as the strategy wraps it: DDP reduces its gradients in buckets."""
        return (self._trainer.model,)

    def parts(self) -> dict[str, Stateful]:
        """Return what DeepSpeed does not save, and what differs between ranks where Lightning saves the first's."""
        found = {} if self.engine is None else self.engine.parts()
        return {**found, "buffers": strategies.buffers(self._trainer)} if self._ranks > 1 else found

    def sharded_state(self) -> Mapping[str, Any]:
        """Return what is sharded over the ranks, by the name of the component."""
        return strategies.sharded_state(self._trainer)

    def remember_schedules(self, schedules: Schedules) -> None:
        """Remember the schedules that count steps. Call it when they are made, and nothing is loaded into them."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step":
                schedules.remember(config.scheduler, Fraction(1, config.frequency))

    def _loggers(self, kind: type[Any]) -> list[Any]:
        return [each for each in self._trainer.loggers if self._trainer.is_global_zero and isinstance(each, kind)]

    # ---- Saving

    @property
    def saves_directories(self) -> bool:
        """Whether a checkpoint is a directory, into which every rank writes its shards."""
        return strategies.saves_directories(self._trainer.strategy)

    def saving(self, path: Path, native: Callable[[Path], object]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a checkpoint is saved.

        Args:
            path: the checkpoint, as the trainer named it.
            native: the trainer's own save, to the path that it is given.
        """
        return replaced(self, "under_way", (path, native))

    def save(self, directory: Path) -> None:
        """Write by Lightning's own ``save_checkpoint``.

        Raises:
            OSError: :class:`ResumeCheckpointIO` could not write.
        """
        assert self.under_way is not None, "a session saves within saving()"
        _, native = self.under_way
        strategy = self._trainer.strategy
        save_checkpoint = strategy.save_checkpoint

        def noting(checkpoint: dict[str, Any], *args: Any, **options: Any) -> None:
            self._note(checkpoint)
            save_checkpoint(checkpoint, *args, **options)

        of_engine = contextlib.nullcontext() if self.engine is None else self.engine.saving()
        with (
            data_only(),
            writing_directly(io.TorchCheckpointIO),
            of_engine,
            replaced(strategy, "save_checkpoint", noting),
        ):
            native(directory)
        plugin = self._trainer.strategy.checkpoint_io
        if isinstance(plugin, ResumeCheckpointIO):
            plugin.raise_error()

    def weights_files(self) -> WeightsFiles | None:
        """Return what the file has beside optimizers, schedules, loops and callbacks; none where it is a directory."""
        return None if self.saves_directories else WeightsFiles(is_kept=lambda key: key not in _ONLY_RESUMED)

    def rehearse(self, context: RestoreContext) -> None:
        """Load module, optimizers and schedules into copies, as Lightning does, and verify them.

        Raises:
            NotRehearsed: no copies can be made, the state is spread over processes, or a callback loads it too.
            UnsupportedSetting: tensors that are trained do not come back, or a callback does not load its state.
            NotRestored: an optimizer or a schedule does not.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        if self.saves_directories or strategies.is_sharded(trainer) or self.engine is not None:
            raise NotRehearsed("its state is spread over processes")
        if self._ranks > 1 and _is_hooked(module):
            raise NotRehearsed("a hook loads too, which may wait for other processes")
        if not trainer.is_global_zero:
            return
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        live = {"module": module, "optimizer": trainer.optimizers, "scheduler": schedulers}
        # seam: lightning 2.4-2.6; hyperparameters are objects of any kind, whose copying runs their code.
        given = [getattr(each, name, None) for each in module.modules() for name in ("_hparams", "_hparams_initial")]
        made = copies(live, [trainer, trainer.datamodule, *trainer.callbacks, *given])
        made["module"]._trainer = trainer  # seam: lightning 2.4-2.6; a copy of a module has none
        content = files.read(context.path, self.is_read)
        own_objects.give_back(content, self.own_objects, self._roots())
        self._rehearse_module(made["module"], content)
        for kind, key in (("optimizer", "optimizer_states"), ("scheduler", "lr_schedulers")):
            for each, saved in zip(made[kind], content[key], strict=True):
                load_verified(kind, each, saved)
        self._rehearse_callbacks(content.get("callbacks", {}))

    def _rehearse_callbacks(self, states: dict[str, Any]) -> None:
        trainer = self._trainer
        beside = [trainer, trainer.lightning_module, trainer.datamodule, *trainer.callbacks]
        for each in [each for each in trainer.callbacks if each.state_key in states]:
            load_copy(type(each).__name__, each, states[each.state_key], beside)

    def _rehearse_module(self, module: Any, content: dict[str, Any]) -> None:
        live = updated(self._trainer.lightning_module)
        overwrite(updated(module).values())
        _fit_names(content, module)
        module.on_load_checkpoint(content)
        problem = module.load_state_dict(content.get("current_model_state") or content["state_dict"], strict=False)
        lost = [*lost_in(module, live), *(name for names in problem for name in names if module.strict_loading)]
        if lost and any(map(_is_hooked, self._trainer.callbacks)):
            raise NotRehearsed("a callback loads it too, and may reach what trains")
        if lost:
            raise UnsupportedSetting(
                f"{len(lost)} of the tensors of {type(module).__name__} do not come back from what it saves, {lost[0]} "
                "first: on_save_checkpoint() may leave them out, or load_state_dict() change or refuse them. Save what "
                "is trained; what is frozen may be left out with strict_loading=False; what no module has as a tensor, "
                "take out of the state_dict in on_load_checkpoint()"
            )

    def loaded_files(self, directory: Path) -> Iterable[Path]:
        """Return the checkpoint, where it is a file; of a sharded one what Lightning puts beside the shards."""
        return [each for each in (directory, directory / model_parallel.BESIDE_SHARDS) if each.is_file()]

    def is_read(self, place: str) -> bool:
        """Return whether Lightning reads what is at a place, or a hook may, which somebody has written.

        Hyperparameters are there for ``load_from_checkpoint``. Of objects of this training a hook gets those that live.
        """
        if self._reads_by_itself:
            return True
        key = place.partition(".")[0]
        if key in files.HYPERPARAMETERS or place in self.own_objects:
            return False
        trainer = self._trainer
        hooked = [trainer.lightning_module, *trainer.callbacks]
        states = [type(each).__qualname__ for each in (trainer.precision_plugin, trainer.datamodule)]
        return key in (*_READ, *states) or any(map(_is_hooked, hooked))

    @property
    def _reads_by_itself(self) -> bool:
        """Whether the strategy may read the file with an unpickler of its own: see :func:`require_data`."""
        return isinstance(self._trainer.strategy, pl.strategies.FSDPStrategy)

    def _note(self, checkpoint: Mapping[str, Any]) -> None:
        """Note which objects of this training a checkpoint is to hold.

        Raises:
            NotSerialisable: one that was is another object now, which no resume could give back.
        """
        if self._reads_by_itself:
            return
        former, self.own_objects = self.own_objects, {}
        hooked = {key: value for key, value in checkpoint.items() if key not in _OF_LIGHTNING and self.is_read(key)}
        self.own_objects = own_objects.find(hooked, self._roots())
        for place in former.keys() - self.own_objects.keys():
            raise NotSerialisable(
                f"a hook saves an object at {place} of the checkpoint that was one of the training before, and is "
                "another now, which only its code could load again: let it save data, or the same object",
            )

    def _roots(self) -> dict[str, Any]:
        trainer = self._trainer
        found = {"module": trainer.lightning_module, "callbacks": trainer.callbacks, "datamodule": trainer.datamodule}
        return {name: each for name, each in found.items() if each is not None}

    def staging(self, stage: Stage) -> StagingOptions:
        """Return what there is to know to copy a save."""
        trainer, own = self._trainer, _own_saves(self._trainer)

        def objection() -> str:
            told = [each for each in trainer.loggers if reads_checkpoints(each, "after_save_checkpoint", _DO_NOT_READ)]
            readers = [*(f"{type(each).__name__}.after_save_checkpoint" for each in told), *own]
            return f"{readers[0]}() may read each checkpoint" if readers else ""

        return StagingOptions(stage, objection=objection)

    def owner_of(self, file: Path) -> int:
        """Return the rank that wrote a file of Lightning or DeepSpeed: for a shard, the rank in its name."""
        shard = distributed_metadata.owner(file)
        return owner(file) if shard is None else shard

    def own_values(self) -> dict[str, Any]:
        """Return what changes within a step and is in Lightning's file: states of callbacks and of the datamodule."""
        return {name: each.state_dict() for name, each in observed.saved(self._trainer).items()}

    @functools.cached_property
    def objection_to_saving_later(self) -> str:
        """Which callback adds to the file what it holds when that is written; empty where none does."""
        saved = observed.saved(self._trainer).values()
        own = [name for each in saved for name in own_methods(each, ["on_save_checkpoint"], _DO_NOT_READ)]
        return f"{own[0]}() may save what has changed since the end of the step; state_dict() does not" if own else ""

    @contextlib.contextmanager
    def saving_later(self, path: Path, own: Mapping[str, Any]) -> Iterator[None]:
        """Return the context in which Lightning saves, once its loops have been left.

        Args:
            own: what :meth:`own_values` returned.
        """
        with contextlib.ExitStack() as stack:
            for name, each in observed.saved(self._trainer).items():
                stack.enter_context(replaced(each, "state_dict", functools.partial(own.get, name, {})))
            stack.enter_context(self.saving(path, lambda place: self._trainer.save_checkpoint(str(place))))
            yield

    def subjects(self) -> Subjects:
        """Return the module, its callbacks and the datamodule, without what Lightning saves."""
        buffers = self._trainer.lightning_module.buffers() if self._ranks > 1 else ()
        return observed.subjects(self._trainer, buffers)

    def settings(self) -> LaunchSettings:
        """Return the trainer's flags, the hyperparameters, and what optimizers and schedules were made with."""
        return observed.of_trainer(self._trainer, None if self.engine is None else self.engine.arguments())

    def describe(self) -> Sequence[PartEntry]:
        """Return an entry for each part that Lightning saves, and for what changes as validations read their data."""
        notes = {
            "model": "state_dict",
            "optimizer": "optimizer_states",
            "scheduler": "lr_schedulers",
            "scaler": "the precision plugin's state",
            "callbacks": "state_dict() and on_save_checkpoint() of each",
        }
        if getattr(self._trainer.precision_plugin, "scaler", None) is None:
            del notes["scaler"]
        found = [PartEntry(name, "framework", note) for name, note in notes.items()]
        return found + [PartEntry("data", "missing", each) for each in missing_lines(self.validation_data.missing)]

    # ---- Loading

    def hpc_checkpoint(self) -> Checkpoint | None:
        """Return what Lightning's handler of Slurm's signals saved last, if it is whole."""
        path = self._trainer._checkpoint_connector._hpc_resume_path  # seam: lightning 2.4-2.6
        if path is None:
            return None
        try:
            found = self.foreign.step(Path(path))
            if found is not None:
                self.foreign.require_whole(Path(path))
        except CheckpointDamaged as damage:
            logger.warning("%s is skipped: %s", path, damage)
            return None
        return None if found is None else Checkpoint(Path(path), found.step, None)

    def load(self, context: RestoreContext, native: Callable[[Path], object]) -> None:
        """Load a checkpoint by Lightning, as data, and make what it read fit this launch.

        Args:
            native: Lightning's own load.

        Raises:
            CheckpointDamaged: the checkpoint holds more than data.
            StateMismatch: it is of a different model, or this launch has another object where a hook is given its own.
            NotRestored: DeepSpeed loaded something else.
        """
        require_data(self._trainer.strategy, context.path)
        module, precision = self._trainer.lightning_module, self._trainer.precision_plugin
        if isinstance(precision, pl.plugins.HalfPrecision | pl.plugins.DoublePrecision):
            precision.convert_module(module)  # the strategy will, but after the weights are compared
        context.prepare_model(self.state_dict(), self.modules())
        state = context.rank_state
        self.own_objects = {} if state is None else state.own_objects or {}
        stand_ins = files.standing_in(self.loaded_files(context.path), self.is_read)
        plugin = self._trainer.strategy.checkpoint_io
        reading = plugin.reading(self.is_read) if isinstance(plugin, ResumeCheckpointIO) else contextlib.nullcontext()
        shards = context.path / strategies.TAG
        with (
            distributed_metadata.reading(context.files),
            data_only(),
            stand_ins,
            reading,
            contextlib.nullcontext() if self.engine is None else self.engine.loading(context, shards),
        ):
            native(context.path)
        # The connector restores modules, callbacks and loops from it afterwards.
        loaded = self._trainer._checkpoint_connector._loaded_checkpoint  # seam: lightning 2.4-2.6
        _fit_names(loaded, module)
        self._fit_directories(context, loaded)
        if lacking := own_objects.give_back(loaded, self.own_objects, self._roots()):
            raise context.mismatch(lacking, "a hook takes it back from this launch")
        self._loaded = dict(loaded)

    def fork_state(self, reader: CheckpointReader) -> ForkState:
        """Return the module and the optimizers, each with what was saved of it; no hook is called."""
        trainer = self._trainer
        if self.saves_directories or strategies.is_sharded(trainer) or self.engine is not None:
            return super().fork_state(reader)
        content = files.read(reader.files.checkpoint, _READ.__contains__)
        states = content.get("optimizer_states", ())[: len(trainer.optimizers)]
        return ForkState(
            [(trainer.lightning_module, content["state_dict"])],
            lambda: list(itertools.zip_longest(trainer.optimizers, states, fillvalue={})),
        )

    def _fit_directories(self, context: RestoreContext, loaded: dict[str, Any]) -> None:
        """Give the paths in each ModelCheckpoint's state the run directory's present name."""
        callbacks = loaded.get("callbacks", {})
        for each in model_checkpoints.saving(self._trainer):
            saved = callbacks.get(each.state_key)
            if saved and saved["dirpath"] != each.dirpath and context.path.parent == context.run.directory:
                callbacks[each.state_key] = model_checkpoints.relocated(saved, str(saved["dirpath"]), str(each.dirpath))

    def verify_loaded(self, context: RestoreContext) -> None:
        """Compare what every rank holds whole with what Lightning has read, and name the callbacks that differ.

        Raises:
            NotRestored: naming what differs.
        """
        loaded, self._loaded = self._loaded, {}
        if not context.verify:
            return
        context.add_proof(lambda: strategies.verify(self._trainer, loaded, context.path))
        context.verify_loaded(lambda: strategies.load_again(self._trainer, loaded))
        context.drop_proofs()
        if found := ", ".join(not_taken_back(self._trainer, loaded.get("callbacks") or {})):
            logger.warning(
                "Not restored: the state of these callbacks is not what they were given to load: %s. What they do may "
                "differ from the run that was killed. See their load_state_dict().",
                found,
            )

    def close(self) -> None:
        """Undo what was wrapped in DeepSpeed's engine; ``callback`` undoes what is wrapped in the trainer."""
        self.validation_data.close()
        if self.engine is not None:
            self.engine.close()


def _is_hooked(each: Any) -> bool:
    """Return whether somebody has written ``on_load_checkpoint()`` of a module or a callback."""
    return getattr(each.on_load_checkpoint, "__func__", each.on_load_checkpoint) not in _NO_HOOKS


def _fit_names(loaded: dict[str, Any], module: Any) -> None:
    """Give loaded weights the keys of a module, where it has them; Lightning refuses others, if it is to be strict."""
    for name in ("state_dict", "current_model_state"):
        if saved := loaded.get(name):
            live = {each: key for key, each in keys.match(saved, module.state_dict()).saved_by_live.items()}
            loaded[name] = {live.get(key, key): each for key, each in saved.items()}


def _own_saves(trainer: Any) -> list[str]:
    """Return the script's own methods around Lightning's save, which may read a file before its commit."""
    of_callback = [name for name in dir(pl.callbacks.ModelCheckpoint) if not name.startswith("__")]
    saves = [(each, ["save_checkpoint"]) for each in (trainer, trainer.strategy, trainer.strategy.checkpoint_io)]
    saves += [(each, of_callback) for each in model_checkpoints.saving(trainer)]
    return [method for each, names in saves for method in own_methods(each, names, _DO_NOT_READ)]
