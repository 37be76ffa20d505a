"""The weights of a trainer's model: which of them the trainer saves under other names, and how they are loaded.

transformers 5 saves many models under other names than they have in memory, and some tensors cut or transposed: one
file serves all of its versions. A subclass of the Trainer may have a format of its own. So what the first save of a
launch writes is compared with the model. Where the two differ, each checkpoint gets the digests of the live tensors by
their names in memory, and a resume is verified against these, whatever has loaded the files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from resume_adapters.core.checkpoint.files import CheckpointFiles
from resume_adapters.core.checkpoint.native_files import read_weight_files
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.observed.when import TENSORS
from resume_adapters.core.state import keys, rng
from resume_adapters.core.state.weights import (
    are_saved_as_they_are,
    have_names_of,
    load_weights,
    verify_digests,
    verify_weights,
    weight_digests,
)
from resume_adapters.core.storage.local import LocalStorage
from resume_adapters.errors import StateMismatch
from resume_adapters.hf import files

LIVE_WEIGHTS = "live_weights"
"""The part with the digests of the live tensors."""


class ModelWeights:
    """The weights of one trainer's model."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved_as_they_are: bool | None = None

    def digests(self, directory: Path) -> dict[str, str] | None:
        """Return the digests of the live tensors; ``None`` where the files hold the same under the same names.

        Adapters of peft are compared by what peft says is their state.

        Args:
            directory: where the trainer has just saved its files.
        """
        if not self._trainer.args.should_save:
            return None
        model = self._trainer.model
        if self._saved_as_they_are is None:
            found = files.weights(CheckpointFiles(LocalStorage(), directory, None))
            is_adapter = not found and files.is_peft_model(model)
            self._saved_as_they_are = is_adapter or are_saved_as_they_are(read_weight_files(found), model.state_dict())
        return None if self._saved_as_they_are else weight_digests(model.state_dict())

    def load(
        self,
        reader: CheckpointReader,
        native: Callable[[], None],
        *,
        has_own_loader: bool,
        verify: bool,
        has_trained: bool = False,
    ) -> None:
        """Load the weights of a checkpoint into the model, whatever wraps it, and verify them.

        Args:
            reader: reads the checkpoint.
            native: the trainer's own way to load them.
            has_own_loader: a subclass of the Trainer has replaced that way.
            has_trained: the model has trained, so that peft knows of it what it has saved of its adapters.
            verify: compare what was loaded with what was saved.

        Raises:
            StateMismatch: they do not fit the model.
            NotRestored: a tensor is not what it was when it was saved.
        """
        model, checkpoint = self._trainer.model, reader.files.checkpoint
        weight_files = files.weights(reader.files)
        files.require_named(reader.files, with_adapters=has_own_loader or not weight_files)
        digests = reader.part(LIVE_WEIGHTS)
        if has_own_loader or not weight_files:  # adapters: only peft knows under which names they are saved
            cut = {} if has_own_loader or has_trained else files.cut_adapters(self._trainer, reader.files)
            observed = _observed(reader) if cut else {}
            if cut and cut.keys() <= observed.keys():
                whole = files.whole_adapters(self._trainer, reader.files)
                model.load_state_dict({**whole, **{name: observed[name] for name in cut}}, strict=False)
            else:
                native()
        content = read_weight_files(weight_files)
        if digests is None and have_names_of(content, model.state_dict()):
            load_weights(model, content, checkpoint)
            if verify:
                verify_weights(model, content, checkpoint)
        elif content and not has_own_loader:
            self._convert(content, checkpoint)
        if digests is not None and verify:
            verify_digests(digests, model.state_dict(), checkpoint)

    def _convert(self, content: dict[str, Any], checkpoint: Path) -> None:
        """Load weights through ``from_pretrained``, which reverses what ``save_pretrained`` does to names and tensors.

        Raises:
            StateMismatch: they do not fit the model.
        """
        model = self._trainer.model
        pretrained = self._trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
        if isinstance(pretrained, PreTrainedModel):
            named = {name: content[key] for name, key in keys.canonical(content).items()}
            content = _converted(pretrained, named, checkpoint)
        load_weights(model, content, checkpoint)


def _observed(reader: CheckpointReader) -> dict[str, Any]:
    """Return the model's tensors that are observed state, by their names in memory."""
    return {name.removeprefix("model."): each for name, each in (reader.part(TENSORS) or {}).items()}


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
