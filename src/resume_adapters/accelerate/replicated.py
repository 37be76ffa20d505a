"""Models and optimizers of which every process has the whole: read, loaded again and proved, one by one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from resume_adapters.accelerate import files
from resume_adapters.accelerate.schedules import replay, steps_each
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.session.session import Session
from resume_adapters.core.state import keys
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful

Tree = dict[str, Any]


class ReplicatedStrategy:
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
            return {"buffers": ModuleBuffers(dict(enumerate(self.models)))}
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
            session.load_weights(model, read_weight_files([files.weights(path, index)]))
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
                if before != here and not session.batch_change.keeps_samples:
                    replay(thing, saved, before, here)
                    continue
            thing.load_state_dict(saved)
            if session.verify:
                verify_equal(named(kind, index), saved, thing.state_dict())


def _ddp_around(models: Iterable[Any]) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    around = []
    for model in models:
        inner = {id(parameter) for parameter in model.parameters()}
        around += [each for each in found if any(id(parameter) in inner for parameter in each.module.parameters())]
    return around


def named(kind: str, index: int) -> str:
    """Return what a component is called where several of its kind were prepared."""
    return f"{kind} {index}" if index else kind
