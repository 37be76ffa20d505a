"""The weights of a trainer's model: which of them the trainer saves under other names, and how they are loaded.

transformers 5 saves many models under other names than they have in memory, and some tensors cut or transposed: one
file serves all of its versions. A subclass of the Trainer may have a format of its own. So what the first save of a
launch writes is compared with the model, and loaded back. Where the two differ, each checkpoint gets the digests of the
live tensors by their names in memory, and a resume is verified against these, whatever has loaded the files. Tensors
that the files do not bring back are kept beside them. So are adapters: peft saves some of their tensors cut, computed
or not at all, and its loading changes which of them train.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.log import logger
from resume_adapters.core.observed import leaves, paths, walk
from resume_adapters.core.observed.leaves import LeafKind
from resume_adapters.core.session.rehearsal import overwrite
from resume_adapters.core.state import keys, rng
from resume_adapters.core.state.stateful import uncompiled
from resume_adapters.core.state.weights import (
    are_saved_as_they_are,
    have_names_of,
    load_weights,
    lost_in,
    updated,
    verify_digests,
    verify_weights,
    weight_digests,
)
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import StateMismatch
from resume_adapters.hf import files
from resume_adapters.hf.observed import subjects

LIVE_WEIGHTS = "live_weights"
"""The part with the live tensors that the files do not bring back, and with the digests of others."""


class ModelWeights:
    """The weights of one trainer's model."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved_as_they_are: bool | None = None
        self._lost: set[str] = set()
        # What adapters are around came from another run, and the script does not have it.
        self._has_foreign_base = False

    def beside_files(self, directory: Path) -> dict[str, Any] | None:
        """Return what a checkpoint must hold beside the files: live tensors, and digests of others.

        Args:
            directory: where the trainer has just saved its files.

        Returns:
            Tensors and digests by name; ``None`` where the files hold the same tensors under the same names.
        """
        if not self._trainer.args.should_save:
            return None
        model = self._trainer.model
        if has_adapters(model):
            return _by_name(model) if self._has_foreign_base else dict(updated(model))
        if self._saved_as_they_are is None:
            found = files.weights(CheckpointFiles(LocalStorage(), directory, None))
            self._saved_as_they_are = are_saved_as_they_are(read_weight_files(found), model.state_dict())
        if self._saved_as_they_are and not self._lost:
            return None
        live = updated(model)
        kept = {name: live[name] for name in live if name in self._lost}
        return {**weight_digests({name: live[name] for name in live if name not in kept}), **kept}

    def rehearse(self, trainer: Any, reader: CheckpointReader) -> None:
        """Load what was just saved into the copy of the model that a copy of the trainer has; keep what is lost.

        Args:
            trainer: the copy, as no session has changed it.
            reader: reads what was saved.
        """
        live = updated(self._trainer.model)
        if has_adapters(self._trainer.model):
            return
        overwrite(updated(trainer.model).values())
        reason = ""
        try:
            native = functools.partial(trainer._load_from_checkpoint, str(reader.files.checkpoint))
            own = is_replaced("_load_from_checkpoint", trainer._load_from_checkpoint)
            ModelWeights(trainer).load(reader, native, has_own_loader=own)
        except Exception as error:  # of any kind: a subclass loads in its own way
            reason = f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        self._lost = {*live} if reason else {*lost_in(trainer.model, live)}
        if self._lost:
            logger.info(
                "%d of the model's %d tensors do not come back from the files that %s saves%s: each checkpoint holds "
                "them beside those files, %s first.",
                len(self._lost),
                len(live),
                type(self._trainer).__name__,
                reason,
                min(self._lost),
            )

    def load(
        self,
        reader: CheckpointReader,
        native: Callable[[], None],
        *,
        has_own_loader: bool,
        has_trained: bool = False,
    ) -> None:
        """Load the weights of a checkpoint into the model, whatever wraps it.

        Args:
            reader: reads the checkpoint.
            native: the trainer's own way to load them.
            has_own_loader: a subclass of the Trainer has replaced that way.
            has_trained: the model has trained, and gets its best weights as a bare trainer loads them.

        Raises:
            StateMismatch: they do not fit the model.
        """
        model, checkpoint = self._trainer.model, reader.files.checkpoint
        beside = {} if has_trained and has_adapters(model) else reader.part(LIVE_WEIGHTS) or {}
        kept = {name: each for name, each in beside.items() if isinstance(each, torch.Tensor)}
        live = updated(model)
        if not kept or not live.keys() <= kept.keys():
            weight_files = files.weights(reader.files)
            is_native = has_own_loader or not weight_files  # adapters: only peft knows under which names they are saved
            files.require_named(reader.files, with_adapters=is_native)
            if is_native:
                with contextlib.nullcontext() if has_trained else loading_tensors_alone(self._trainer):
                    native()
            content = read_weight_files(weight_files)
            if not beside and have_names_of(content, model.state_dict()):
                load_weights(model, content, checkpoint)
            elif content and not has_own_loader:
                load_weights(model, self._converted(content, checkpoint), checkpoint)
        if has_adapters(model) and not kept.keys() <= live.keys():
            self._has_foreign_base, live = True, _by_name(model)
        with torch.no_grad():
            for name in live.keys() & kept.keys():
                live[name].copy_(kept[name])

    def verify(self, reader: CheckpointReader, own: Collection[int] = ()) -> None:
        """Compare the weights of the model with those of a checkpoint.

        Args:
            own: see :func:`verify_weights`.

        Raises:
            NotRestored: a tensor is not what it was when it was saved.
        """
        model, checkpoint = self._trainer.model, reader.files.checkpoint
        if beside := reader.part(LIVE_WEIGHTS):
            kept = {name: each for name, each in beside.items() if isinstance(each, torch.Tensor)}
            live, apart = model.state_dict(), keys.of_buffers(model, own)
            digests, names = {**beside, **weight_digests(kept)}, keys.canonical(live)
            verify_digests(
                {name: each for name, each in digests.items() if names.get(name) not in apart}, live, checkpoint
            )
        elif have_names_of(content := read_weight_files(files.weights(reader.files)), model.state_dict()):
            verify_weights(model, content, checkpoint, own)

    def of_fork(self, reader: CheckpointReader) -> dict[str, Any]:
        """Return the weights of a checkpoint under the names that a model has in memory.

        Where peft has saved adapters, they are kept beside its files, and the frozen weights are those of now.
        """
        model, checkpoint = self._trainer.model, reader.files.checkpoint
        content = read_weight_files(files.weights(reader.files))
        beside = reader.part(LIVE_WEIGHTS) or {}
        kept = {name: each for name, each in beside.items() if isinstance(each, torch.Tensor)}
        if content and not has_adapters(model) and not have_names_of(content, model.state_dict()):
            content = self._converted(content, checkpoint)
        elif kept and not content:
            content, trained = _by_name(model), updated(model)
            self._has_foreign_base = not kept.keys() <= trained.keys()
            return {**{name: each for name, each in content.items() if name not in trained}, **kept}
        self._has_foreign_base = has_adapters(model)
        return {**{name: content[key] for name, key in keys.canonical(content).items()}, **kept}

    def _converted(self, content: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
        """Return weights through ``from_pretrained``, which reverses what ``save_pretrained`` does to them."""
        pretrained = self._trainer.accelerator.unwrap_model(self._trainer.model, keep_torch_compile=False)
        if not isinstance(pretrained, PreTrainedModel):
            return content
        named = {name: content[key] for name, key in keys.canonical(content).items()}
        return _converted(pretrained, named, checkpoint)


@contextlib.contextmanager
def loading_tensors_alone(trainer: Any) -> Iterator[None]:
    """Return the context of a load that changes nothing else of the model, such as its active head or what trains.

    What is no tensor and the training has changed is observed, and is restored later.
    """
    looked_at = replace(subjects(trainer), roots={"model": trainer.model})

    def plain() -> dict[paths.Path, walk.Leaf]:
        found = walk.take(looked_at, objects=10**7, seconds=60.0).leaves
        return {path: leaf for path, leaf in found.items() if leaf.kind is LeafKind.DATA and not leaf.arrays}

    before = plain()
    kept = {path: leaves.capture(paths.get(looked_at.roots, path), LeafKind.DATA) for path in before}
    yield
    for path, leaf in plain().items():
        if leaf != before.get(path, leaf):
            leaves.restore(looked_at.roots, path, kept[path], LeafKind.DATA, in_place=True, stays=set(), type_then="")


def _by_name(model: Any) -> dict[str, Any]:
    live = model.state_dict()
    return {name: live[key] for name, key in keys.canonical(live).items()}


def is_replaced(name: str, method: Any) -> bool:
    """Return whether a subclass, or an attribute of the trainer, has replaced a method of the Trainer."""
    return getattr(method, "__func__", None) is not getattr(Trainer, name)


def has_adapters(model: Any) -> bool:
    """Return whether the trainer saves adapters of a model alone: peft has made it, or transformers has by peft."""
    peft, inner = sys.modules.get("peft"), uncompiled(model)
    is_of_peft = peft is not None and isinstance(inner, peft.PeftModel)
    return is_of_peft or getattr(inner, "_hf_peft_config_loaded", False)  # seam: transformers 4.57 to 5.23


def _converted(model: PreTrainedModel, content: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return saved weights under the names that a model has in memory; no random number is drawn.

    Raises:
        StateMismatch: they do not fit the model.
    """
    kinds = [each.dtype for each in model.state_dict().values() if each.is_floating_point()]
    widest = torch.float64 if torch.float64 in kinds else torch.float32
    config = copy.deepcopy(model.config)
    before = rng.capture()
    try:
        load: Any = type(model).from_pretrained
        made, found = load(None, config=config, state_dict=content, dtype=widest, output_loading_info=True)
    except (RuntimeError, TypeError, ValueError) as error:
        raise StateMismatch(
            f"the weights of {checkpoint.name} cannot be loaded through {type(model).__name__}.from_pretrained(): "
            f"{error}. Build the model as it was when it was saved",
            path=checkpoint,
        ) from error
    finally:
        rng.restore(before)
    wrong = {what: sorted(map(str, names)) for what, names in found.items() if names}
    if wrong:
        raise StateMismatch(
            f"the weights of {checkpoint.name} do not fit the model: {wrong}. Build the model as it was when it was "
            "saved",
            path=checkpoint,
        )
    return dict(made.state_dict())
