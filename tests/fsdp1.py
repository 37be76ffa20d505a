"""What FSDP1 saved, as the start of a run under FSDP2: it must be loaded bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import contract

STRIKE = {"step": 8, "rank": 0}


def starts_a_run(
    bench: contract.Bench, directory: Path, config: contract.Config, event: str, kinds: tuple[str, str], ranks: int
) -> None:
    """A run under FSDP2 starts from what a bare one under FSDP1 has saved after 5 steps, and goes on from there.

    Args:
        config: a job that saves after 5 steps.
        event: at which the run under FSDP1 is killed.
        kinds: how each of them saves: ``SHARDED_STATE_DICT`` or ``FULL_STATE_DICT``.
        ranks: of both.
    """
    before, here = directory / "before", directory / "here"
    kill = {**STRIKE, "event": event}
    one, other = ({**config, "fsdp": kind} for kind in kinds)
    killed = bench.run(before, {**one, "fsdp_version": 1, "bare": True, "kill": kill}, ranks=ranks)
    assert killed.killed, killed.output
    (start,) = (file.parent for file in before.rglob("scheduler.*"))
    outcome = bench.run(here, {**other, "resume": str(start), "dump": True}, ranks=ranks).require_success()
    assert f"{start.name} was made without this package: its weights, optimizer and schedule" in outcome.output
    require_loaded(here, *_saved(start))
    assert contract.read_trace(here, ranks).first_step == 5


def require_loaded(directory: Path, saved_weights: Any, saved_optimizer: Any) -> None:
    """What a job has loaded, and written down by ``dump_loaded``, is what was saved."""
    weights, optimizer = torch.load(directory / "loaded.pt", weights_only=True)
    _require_same(weights, saved_weights)
    names = [name for group in optimizer["param_groups"] for name in group["params"]]  # alone, some save by numbers
    saved = {names[key] if isinstance(key, int) else key: each for key, each in saved_optimizer["state"].items()}
    _require_same(optimizer["state"], saved)
    assert all(optimizer["state"][name]["exp_avg_sq"].any() for name in names), "there were moments to load"


def _saved(checkpoint: Path) -> list[Any]:
    """Return the weights and the optimizer of a checkpoint of Accelerate, whole."""
    if (whole := checkpoint / "pytorch_model_fsdp.bin").is_file():
        return [torch.load(file, weights_only=True) for file in (whole, checkpoint / "optimizer.bin")]
    found = []
    for directory, key in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")):
        dcp_to_torch_save(checkpoint / directory, checkpoint / "whole.pt")
        found.append(torch.load(checkpoint / "whole.pt", weights_only=False)[key])
    (checkpoint / "whole.pt").unlink()
    return found


def _require_same(one: Any, other: Any) -> None:
    """Two trees have the same keys, and tensors of the same bits."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            _require_same(value, other[key])
    else:
        assert torch.equal(one, other) and one.dtype == other.dtype
