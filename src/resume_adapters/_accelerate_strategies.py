"""Where models and optimizers are, by the strategy that an accelerator trains with, and how they are loaded again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType, load_fsdp_model, load_fsdp_optimizer
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper  # there without DeepSpeed too

from resume_adapters import _accelerate_files as files
from resume_adapters import _zero_names as zero
from resume_adapters._accelerate_schedules import replay, steps_each
from resume_adapters.core import keys, state, weights
from resume_adapters.core.session import Session
from resume_adapters.core.state import Buffers, Stateful
from resume_adapters.errors import UnsupportedSetting

Tree = dict[str, Any]


class Replicated:
    """Every process has the whole model: one process, or DDP.

    Args:
        accelerator: an ``accelerate.Accelerator``, after ``prepare``.

    Attributes:
        models: what was prepared, without DDP around it.
        fixed: what must be as it was when the checkpoint was saved, in a user's words.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        # seam: accelerate 1.15: what was prepared is kept in these lists, and nowhere else
        self.models: list[Any] = accelerator._models
        self.optimizers: list[Any] = accelerator._optimizers
        self.schedulers: list[Any] = accelerator._schedulers
        self.fixed = {"number of models": len(self.models), "number of optimizers": len(self.optimizers)}
        self._steps = 0
        self._modules: list[Any] | None = None
        self._observe_steps()

    # ---- Steps

    def _observe_steps(self) -> None:
        for optimizer in self.optimizers:
            optimizer.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._steps += 1

    def has_stepped(self) -> bool:
        """Return whether the batch ended an optimizer step; one that the scaler skipped counts."""
        stepped, self._steps = self._steps > 0 or not self.optimizers, 0
        skipped = any(each.step_was_skipped for each in self.optimizers)
        return self.accelerator.sync_gradients and (stepped or skipped)

    # ---- State

    def tensors(self) -> Tree:
        """Return the tensors of all models, by the model's number and their names without wrappers."""
        found = {}
        for index, model in enumerate(self.models):
            tensors = model.state_dict()
            prefix = f"{index}." if index else ""
            found.update({f"{prefix}{name}": tensors[key] for name, key in keys.canonical(tensors).items()})
        return found

    def parts(self) -> dict[str, Stateful]:
        """Return what belongs to the models, is not saved by Accelerate, and may differ between processes."""
        if any(not each.broadcast_buffers for each in self.modules()):
            return {"buffers": Buffers(dict(enumerate(self.models)))}
        return {}

    def own(self) -> Tree:
        """Return what Accelerate does not save and belongs to this rank alone."""
        return {}

    def restore(self, own: Tree) -> None:
        """Put back what :meth:`own` returned."""

    def modules(self) -> list[Any]:
        """Return the DDP modules around the models; ``prepare`` hands them to the script and keeps no reference."""
        if self._modules is None:
            self._modules = _ddp_around(self.models) if self.accelerator.num_processes > 1 else []
        return self._modules

    def has_lost_buckets(self) -> bool:
        """Return whether DDP must be around a model, and was not found."""
        trained = any(each.requires_grad for model in self.models for each in model.parameters())
        return self.accelerator.num_processes > 1 and trained and not self.modules()

    def spread(self) -> Tree:
        """Return what is spread over the processes."""
        return {}

    # ---- Files

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which ``save_state`` writes."""
        return contextlib.nullcontext()

    def owner(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return files.owner(file)

    def load(self, session: Session) -> None:
        """Load models, optimizers and schedulers, calling the hooks that ``load_state`` calls, and prove them."""
        assert session.checkpoint is not None
        path = session.checkpoint.path
        for index, model in enumerate(self._left_by_hooks(self.models, path)):
            session.load_weights(model, weights.read_files([files.weights(path, index)]))
        self._load_pickled(session, "optimizer", self.optimizers)
        self._load_pickled(session, "scheduler", self.schedulers)

    def _left_by_hooks(self, models: Iterable[Any], path: Path) -> list[Any]:
        left = list(models)
        for hook in self.accelerator._load_model_state_pre_hook.values():  # seam: accelerate 1.15
            hook(left, str(path))
        return left

    def _load_pickled(self, session: Session, kind: str, things: Iterable[Any]) -> None:
        assert session.checkpoint is not None
        manifest, here = session.checkpoint.manifest, self.accelerator.num_processes
        before = manifest.world_size if manifest else here
        for index, thing in enumerate(things):
            saved = files.pickled(session.checkpoint.path, kind, index)
            if kind == "scheduler":
                session.schedules.note(thing, steps_each(thing, here))
                if before != here and not session.keeps_samples:
                    replay(thing, saved, before, here)
                    continue
            thing.load_state_dict(saved)
            if session.verify:
                state.prove(_named(kind, index), saved, thing.state_dict())


class Sharded(Replicated):
    """Every process has a shard of each tensor: FSDP2. Accelerate and torch read its files, on any number of ranks."""

    def parts(self) -> dict[str, Stateful]:
        """Return the buffers, which each process has for itself."""
        return {"buffers": Buffers(dict(enumerate(self.models)))}

    def has_lost_buckets(self) -> bool:
        """Return False: FSDP2 has none."""
        return False

    def spread(self) -> Tree:
        """Return the models' parameters and the optimizers' state, by the name of each model and optimizer."""
        models = {_named("model", index): dict(each.named_parameters()) for index, each in enumerate(self.models)}
        optimizers = {_named("optimizer", index): each.state_dict() for index, each in enumerate(self.optimizers)}
        return {**models, **optimizers}

    def load(self, session: Session) -> None:
        """Let Accelerate load models and optimizers, prove them, and load the schedulers."""
        assert session.checkpoint is not None
        path, plugin = session.checkpoint.path, self.accelerator.state.fsdp_plugin
        for index, model in enumerate(self.models):
            load_fsdp_model(plugin, self.accelerator, model, str(path), index)
        for index, (optimizer, model) in enumerate(zip(self.optimizers, self.models, strict=False)):
            load_fsdp_optimizer(plugin, self.accelerator, optimizer, model, str(path), index)
        self._steps = 0  # torch makes the state that it fills by a step that changes nothing
        self._left_by_hooks([], path)
        session.prove_shares()
        self._load_pickled(session, "scheduler", self.schedulers)


class Partitioned(Replicated):
    """A DeepSpeed engine has the model and the optimizer; Accelerate's plugin for it allows one."""

    def __init__(self, accelerator: Any) -> None:
        from resume_adapters._zero_engine import EngineState, require_supported

        (engine,) = accelerator._models  # seam: accelerate 1.15
        require_supported(engine, "")
        self._engine = EngineState(engine)
        super().__init__(accelerator)
        self.fixed |= self._engine.fixed
        # A schedule that the engine has is saved by the engine.
        self.schedulers = [each for each in self.schedulers if not isinstance(each, DeepSpeedSchedulerWrapper)]

    def _observe_steps(self) -> None:
        """Leave the counting to the engine."""

    def has_stepped(self) -> bool:
        """Return whether the engine counted a step; one that overflowed counts."""
        return self._engine.has_stepped()

    def tensors(self) -> Tree:
        """Return the model's tensors, without content."""
        return self._engine.state_dict()

    def has_lost_buckets(self) -> bool:
        """Return False: DeepSpeed has buckets of its own, in a fixed order."""
        return False

    def parts(self) -> dict[str, Stateful]:
        """Return what DeepSpeed does not save."""
        return self._engine.parts()

    def own(self) -> Tree:
        """Return what DeepSpeed does not save and belongs to this rank alone."""
        return self._engine.own()

    def restore(self, own: Tree) -> None:
        """Put it back."""
        self._engine.restore(own)

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which DeepSpeed writes data only."""
        return self._engine.data_only()

    def owner(self, file: Path) -> int:
        """Return the rank that wrote a file."""
        return zero.owner(file) or files.owner(file)

    def load(self, session: Session) -> None:
        """Let DeepSpeed load, and load the schedulers that it does not know."""
        assert session.checkpoint is not None
        path = session.checkpoint.path
        self._engine.load(session, path, "pytorch_model")
        self._left_by_hooks([], path)
        self._load_pickled(session, "scheduler", self.schedulers)


def strategy(accelerator: Any) -> Replicated:
    """Return how an accelerator has placed what it prepared.

    Raises:
        UnsupportedSetting: in a way that cannot be followed.
    """
    kind, reason = accelerator.distributed_type, ""
    if kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        return Replicated(accelerator)
    if kind == DistributedType.DEEPSPEED and len(accelerator._models) == 1:  # seam: accelerate 1.15
        return Partitioned(accelerator)
    if kind == DistributedType.FSDP and accelerator.is_fsdp2:
        return Sharded(accelerator)
    if kind == DistributedType.FSDP:
        reason = "FSDP1 flattens the parameters: use fsdp_version=2"
    elif kind == DistributedType.DEEPSPEED:
        reason = "with DeepSpeed one model is to be prepared before register_for_resume is called"
    raise UnsupportedSetting(
        f"{kind} shards or moves the state in a way that is not followed, so this run cannot be resumed exactly: "
        f"{reason or 'train with DDP, FSDP2 or DeepSpeed'}"
    )


def _ddp_around(models: Iterable[Any]) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    around = []
    for model in models:
        inner = {id(parameter) for parameter in model.parameters()}
        around += [each for each in found if any(id(parameter) in inner for parameter in each.module.parameters())]
    return around


def _named(kind: str, index: int) -> str:
    return f"{kind} {index}" if index else kind
