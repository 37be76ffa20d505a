"""Law 7 for a DeepSpeed loop: a different number of ranks or workers, the same samples and rates in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract

MAP = {"elastic": True, "rows": True, "augment": True, "dropout": 0.0, "samples": 48, "batch": 2, "accumulate": 2}


# Where it overflows depends on what a rank adds up by itself.
SCALE = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 4, "hysteresis": 1}


def on(ranks: int, kill: int | None = None, **config: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch on some ranks, which is killed after a step."""
    strike = {"event": "step_end", "step": kill, "rank": 0} if kill else None
    return ranks, {**MAP, **config, "kill": strike}


def there_and_back(**config: Any) -> list[tuple[int, dict[str, Any]]]:
    return [on(2, 8, accumulate=1, **config), on(1, 13, **{**config, "workers": 2}), on(2, accumulate=1, **config)]


LAUNCHES = {
    "stage 0": there_and_back(),
    "stage 1": there_and_back(stage=1, optimizer="cpu"),
    "stage 2": there_and_back(stage=2, precision="fp16", config={"fp16": SCALE}),
    "stage 3": there_and_back(stage=3),
    "stage 2, fused": there_and_back(stage=2, optimizer="fused"),
    "stage 3, offloaded": there_and_back(stage=3, optimizer="cpu", offload=True),
}


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_frozen_weights_come_back(stage: int, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """A launch that made them otherwise goes on with those of the checkpoint."""
    frozen = {"stage": stage, "frozen": True, "accumulate": 1}
    launches = [on(2, 8, **frozen), on(1, **{**frozen, "accumulate": 2}, seed=1)]
    contract.same_samples_on_any_topology(bench, tmp_path, reference(on(2, **frozen)[1], 2), launches, tolerance=1e-4)


ORDINARY = {"elastic": False, "augment": False, "loader": "own", "set_epoch": True}
ORDINARY_LAUNCHES = {f"stage {stage}": there_and_back(**ORDINARY, stage=stage) for stage in (0, 2)}


@pytest.mark.thorough
@pytest.mark.parametrize("case", ORDINARY_LAUNCHES)
def test_an_ordinary_loader_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """With the loader of ``training_data=``, which has a DistributedSampler on one rank, too."""
    launches = ORDINARY_LAUNCHES[case]
    expected = reference({**launches[1][1], "kill": None})
    contract.same_samples_on_any_topology(bench, tmp_path, expected, launches, tolerance=1e-4)


@pytest.mark.parametrize("case", often(LAUNCHES, seldom=("stage 2, fused", "stage 3, offloaded")))
def test_every_step_has_the_samples_that_it_would_have_had(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """On two ranks, then on one, then on two; with ZeRO through DeepSpeed's universal checkpoint."""
    launches = LAUNCHES[case]
    expected = reference({**launches[1][1], "workers": 0, "kill": None})
    tolerance = 2e-2 if launches[0][1].get("precision") == "fp16" else 1e-4
    contract.same_samples_on_any_topology(bench, tmp_path, expected, launches, tolerance=tolerance)
    sums = [trace.final[0]["sums"] for trace in (contract.read_trace(tmp_path, 2), expected)]
    assert sums[0] == pytest.approx(sums[1], abs=tolerance)
    scales = [trace.steps[0][-1]["scale"] for trace in (contract.read_trace(tmp_path, 2), expected)]
    assert scales[0] == scales[1]
    assert not list((tmp_path / "out" / ".resume").glob("remove-*"))


def test_another_global_batch_goes_on_by_samples(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """With a schedule of DeepSpeed's own; the accumulation that the position falls into is cut short."""
    keep = {"cycle": True, "options": {"on_batch_change": "keep-samples"}}
    launches = [on(1, 8, **keep), on(2, 13, **keep), on(1, batch=4, **keep)]
    contract.goes_on_by_samples(bench, tmp_path, launches, 3 * 48, reference(launches[-1][1]))
