"""Begin a run with a checkpoint of another run: see :class:`~resume_adapters.core.choices.Fork`.

The first commit of the new run is the whole of the state, so a kill before it forks again, and after it nothing of the
other run is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.layout import is_committed
from resume_adapters.core.checkpoint.manifest import Ancestry
from resume_adapters.core.checkpoint.parts import CheckpointReader
from resume_adapters.core.checkpoint.resolve import open_checkpoint
from resume_adapters.core.choices import Fork
from resume_adapters.core.log import first_of, logger
from resume_adapters.core.ranks import run_on_all_ranks
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.framework import Framework
from resume_adapters.core.session.records import LaunchState
from resume_adapters.core.session.settings import LaunchSettings, SettingsComparison
from resume_adapters.core.state import keys
from resume_adapters.core.state.loading import load_verified
from resume_adapters.core.state.weights import load_weights, verify_weights
from resume_adapters.core.storage.base import Storage
from resume_adapters.errors import StateMismatch, UnsupportedSetting

_OUTER, _BASE = "base_model.model.", ".base_layer."
"""What peft adds to the names of a model, and of the layers that it puts adapters around."""

_SHOWN = 5
"""Names of tensors that are shown."""


def fork(run: ResumableRun, framework: Framework, given: Fork, parts: Sequence[str], *, verify: bool) -> Ancestry:
    """Load what a fork takes, on every rank, and return what it has taken.

    Args:
        run: the new run, opened.
        parts: the names of the parts of the state.
        verify: compare what is loaded with what was saved.

    Raises:
        UnsupportedSetting: there is no checkpoint, or one of another framework, or the state is sharded.
        CheckpointDamaged: it is not valid.
        StateMismatch: it does not fit the models or optimizers, or the ranks see different ones.
        NotRestored: something did not come back as it was saved.
    """
    path = run_on_all_ranks(run.ranks, lambda: _find(run.storage, given), f"begin with {given.path}")[0]

    def load() -> tuple[int, list[str]]:
        checkpoint = open_checkpoint(run.storage, path, run.context.options.foreign, for_weights=True)
        _require_framework(checkpoint, framework)
        return checkpoint.step, _load(run.reader(checkpoint), framework, given, verify=verify)

    step, unsaved = run_on_all_ranks(run.ranks, load, f"begin with {path}")[run.ranks.rank]
    taken = ("model", "optimizer") if given.take == "weights+optimizer" else ("model",)
    fresh = [name for name in parts if name not in taken] + ([_listed(unsaved)] if unsaved else [])
    found = Ancestry(str(path.parent), path.name, step, taken, tuple(fresh))
    if run.ranks.rank == 0:
        logger.info("This run begins with %s.", found)
    return found


def _find(storage: Storage, given: Fork) -> Path:
    """Return the checkpoint at a path; of a run directory the newest."""
    path = storage.real_path(Path(given.path))
    if not storage.exists(path):
        raise UnsupportedSetting(
            f"{given.path} is not there, and this run has no checkpoint of its own yet to resume from: expected the "
            "checkpoint, or the run directory, with which it is to begin",
            path=path,
        )
    if storage.is_file(path) or is_committed(storage, path):
        return path
    catalog = Catalog(storage, path)
    steps = {name: catalog.summary(path / name).step for name in catalog.committed()}
    return path / max(steps, key=lambda name: steps[name]) if steps else path


def _require_framework(checkpoint: Checkpoint, framework: Framework) -> None:
    manifest, here = checkpoint.manifest, framework.about.label
    if manifest is not None and manifest.framework.partition(" ")[0] != here.partition(" ")[0]:
        raise UnsupportedSetting(
            f"{checkpoint.path} was saved by {manifest.framework}, and this is {here}: load its weights in the script, "
            "from the file that `resume-adapters export` writes",
            path=checkpoint.path,
        )


def _load(reader: CheckpointReader, framework: Framework, given: Fork, *, verify: bool) -> list[str]:
    """Load what is taken; return the names of the tensors that the checkpoint lacks."""
    path = reader.files.checkpoint
    state = framework.fork_state(reader)
    optimizers = state.optimizers() if given.take == "weights+optimizer" else ()
    fitted = [_fitted(model, saved, path) for model, saved in state.models]
    if optimizers:
        _require_same_optimizers(reader, framework)
    for _, saved in optimizers:
        if not saved:
            raise StateMismatch(f"{path} has no state of an optimizer under its name in this launch", path=path)
    for (model, _), (content, _) in zip(state.models, fitted, strict=True):
        load_weights(model, content, path)
        if verify:
            verify_weights(model, content, path)
    for optimizer, saved in optimizers:
        # The groups have this launch's learning rate and schedule.
        load_verified("optimizer", optimizer, {**saved, "param_groups": optimizer.state_dict()["param_groups"]}, verify)
    return [name for _, unsaved in fitted for name in unsaved]


def _fitted(model: Any, saved: Mapping[str, Any], checkpoint: Path) -> tuple[dict[str, Any], list[str]]:
    """Return saved weights under the model's names, with the adapters that they lack; and the names of these.

    Raises:
        StateMismatch: tensors have other shapes; or there are none.
    """
    if not saved:
        raise StateMismatch(f"{checkpoint} has no weights of a model under its name in this launch", path=checkpoint)
    live = model.state_dict()
    by_name, here = _names(saved), _names(live)
    content = {here.get(name, key): saved[key] for name, key in by_name.items()}
    shared = [key for key in live if key in content and hasattr(live[key], "shape")]
    differing = [
        f"{key} {list(content[key].shape)}, the model has {list(live[key].shape)}"
        for key in shared
        if content[key].shape != live[key].shape
    ]
    if differing:
        raise StateMismatch(f"the weights of {checkpoint} do not fit the model: {_listed(differing)}", path=checkpoint)
    around = tuple({f"{key.partition(_BASE)[0]}." for key in live if _BASE in key})
    adapters = [key for key in live if key not in content and around and key.startswith(around)]
    content.update({key: content[key].to(live[key].dtype) for key in shared})
    return {**content, **{key: live[key] for key in adapters}}, adapters


def _names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a state dict by their names without wrappers, and without what peft has put around layers."""
    found = keys.canonical(state)
    plain = {name.removeprefix(_OUTER).replace(_BASE, "."): key for name, key in found.items()}
    return plain if len(plain) == len(found) else found


def _require_same_optimizers(reader: CheckpointReader, framework: Framework) -> None:
    """Refuse optimizers of another class, or with other parameters, before their state is loaded."""
    tree = reader.rank_tree(0)
    settings = LaunchState.from_tree(tree, reader.rank_source(0)).settings if tree else None
    if settings is not None:
        saved = LaunchSettings(optimizers=settings.optimizers, frozen=settings.frozen)
        SettingsComparison(framework.settings).begin(saved, str(reader.files.checkpoint))


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} tensors ({first_of(names, _SHOWN)})"
