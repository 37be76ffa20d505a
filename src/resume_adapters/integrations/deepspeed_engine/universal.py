"""Load ZeRO's shards on a different number of ranks, through DeepSpeed's universal checkpoint.

A shard is a slice of all parameters concatenated, so it fits only the number of ranks that saved it. DeepSpeed's
converter writes one file for each parameter and each of its moments, and its loader slices them for the ranks of this
launch. Both would unpickle freely; here they read data only.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.log import logger
from resume_adapters.core.patching import replaced, wrapped
from resume_adapters.core.ranks import run_on_all_ranks
from resume_adapters.core.session.context import RestoreContext
from resume_adapters.core.state.comparison import verify_equal
from resume_adapters.core.storage.base import remove_tree
from resume_adapters.errors import SaveFailed, UnsupportedSetting
from resume_adapters.integrations.deepspeed_engine import files, names

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""The optimizer state that the converter keeps, besides the steps."""

_PLACE = "remove-universal"
"""The directory in ``.resume``. Because of its name the next start removes it after a crash."""


@contextlib.contextmanager
def resharding(context: RestoreContext, engine: Any, shards: Path) -> Iterator[None]:
    """Return the context in which ``load_checkpoint`` loads a checkpoint's shards on any number of ranks.

    They are converted first, and the result is removed afterwards. Every rank enters it.

    Args:
        shards: the directory of DeepSpeed's files.

    Raises:
        UnsupportedSetting: the optimizer has state that the converter would lose.
        SaveFailed: the result could not be written.
        NotRestored: a parameter or a moment did not come back.
    """
    with _converted(context, shards) as place:

        def load(native: Callable[..., Any], directory: Any, tag: Any = None, **options: Any) -> Any:
            loaded = native(str(place.parent), tag=place.name, **options)
            _complete(engine, place)
            return loaded

        as_universal = replaced(engine._config, "load_universal_checkpoint", True)  # seam: deepspeed 0.19
        with as_universal, wrapped(engine, "load_checkpoint", load):
            yield
        if context.verify:
            _verify(context, engine, place)


@contextlib.contextmanager
def _converted(context: RestoreContext, shards: Path) -> Iterator[Path]:
    """Convert a checkpoint's shards, yield the directory of the universal checkpoint, and remove it afterwards."""
    run, checkpoint, before = context.run, context.checkpoint, context.saved_by
    place = run.directory / CONTROL / _PLACE

    def convert() -> None:
        if run.storage_group.is_leader:
            logger.info(
                "%s was saved by %d ranks: converting it to DeepSpeed's universal checkpoint, for %d.",
                checkpoint.path.name,
                before,
                run.ranks.world_size,
            )
            remove()
            _require_adam(shards)
            _convert(shards, place / shards.name)

    def failed(cause: Exception) -> SaveFailed:
        return SaveFailed(
            f"could not convert {checkpoint.path.name} for {run.ranks.world_size} ranks: {cause}. The checkpoint is "
            f"intact. Converting needs 24 bytes a parameter in {place.parent}: free space, or launch with {before}",
            path=checkpoint.path,
            step=checkpoint.step,
        )

    def remove() -> None:
        if run.storage_group.is_leader and place.exists():
            remove_tree(run.storage, place)

    run_on_all_ranks(run.ranks, convert, f"convert {checkpoint.path.name}", failed)
    with files.as_data():
        yield place / shards.name
    run_on_all_ranks(run.ranks, remove, f"remove {place}")


def _require_adam(shards: Path) -> None:
    """Refuse an optimizer of whose state the converter would lose a part.

    Raises:
        UnsupportedSetting: its state is not Adam's.
    """
    for file in sorted(shards.glob("*_optim_states.pt")):
        saved = files.read(file, mmap=True)["optimizer_state_dict"]
        of_base = saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
        kept = {key for of_group in of_base["state"].values() for key in of_group}
        if kept - {"step"} != set(_MOMENTS):
            raise UnsupportedSetting(
                f"the optimizer keeps {', '.join(sorted(kept))} for each parameter, and DeepSpeed's universal "
                f"checkpoint holds only {', '.join(_MOMENTS)}: launch with as many ranks as before, or use Adam",
                path=file,
            )


def _convert(shards: Path, place: Path) -> None:
    place.mkdir(parents=True)
    how = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    one = {"num_extract_workers": 1, "num_merge_workers": 1}  # in this process, which reads data only
    with files.as_data(), contextlib.redirect_stdout(sys.stderr):
        ds_to_universal.main(Namespace(input_folder=str(shards), output_folder=str(place), **one, **how))


def _complete(engine: Any, place: Path) -> None:
    """Load what DeepSpeed leaves out of a universal checkpoint: buffers, frozen weights, parameter groups, steps."""
    shards = [files.read(each, mmap=True) for each in sorted(place.glob(f"*{names.MODEL}"), key=names.owner)]
    saved, zero = dict(shards[0]["module"]), place / "zero"
    frozen = {name: each for name, each in engine.module.named_parameters() if not each.requires_grad}
    for name, each in frozen.items():
        if hasattr(each, "ds_shape"):  # of ZeRO 3; the last rank's shard is padded
            flat = torch.cat([shard["frozen_param_fragments"][name].flatten() for shard in shards])
            saved[name] = flat[: each.ds_numel].view(each.ds_shape)
    with GatheredParameters(list(frozen.values()), modifier_rank=0):
        for name, tensor in [*engine.module.named_buffers(), *frozen.items()]:
            if name in saved:
                tensor.data.copy_(saved[name])
    groups = files.read(zero / "optimizer_state.pt", mmap=True)["param_groups"]
    for group, of_group in zip(engine.basic_optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in of_group.items() if key != "params"})
    for state in engine.basic_optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):  # ZeRO 3 has given all groups the same one, and each counts it
            state["step"] = state["step"].clone()


def _verify(context: RestoreContext, engine: Any, place: Path) -> None:
    """Compare each parameter and its moments, put together from all ranks, with the universal checkpoint.

    Raises:
        NotRestored: one differs.
    """
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        live = {"fp32": safe_get_full_fp32_param(parameter)}
        live |= {moment: safe_get_full_optimizer_state(parameter, moment) for moment in _MOMENTS}
        saved = {key: _load_whole(place / "zero" / name / f"{key}.pt", parameter) for key in live}
        run_on_all_ranks(context.ranks, functools.partial(verify_equal, "optimizer", saved, live), f"verify {name}")


def _load_whole(file: Path, parameter: Any) -> torch.Tensor:
    content = files.read(file)
    tensor: torch.Tensor = content["param"] if isinstance(content, dict) else content
    return tensor.view(getattr(parameter, "ds_shape", parameter.shape))
