"""Law 7 for Accelerate: different ranks, workers or batch splits give the same samples and rates."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract

MAP = {"elastic": True, "augment": True, "dropout": 0.0, "samples": 48, "batch": 4, "accumulate": 2}


def on(ranks: int, kill: int | None = None, **config: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch on some ranks, which is killed after a step."""
    strike = {"event": "step_end", "step": kill, "rank": 0} if kill else None
    return ranks, {**MAP, **config, "kill": strike}


LAUNCHES = {
    "2 to 1": [on(2, 8, accumulate=1), on(1)],
    "1 to 2 to 1, in other batches": [on(1, 8), on(2, 13, batch=2, workers=1), on(1, batch=8, accumulate=1)],
}

ORDINARY = {
    **MAP,
    "elastic": False,
    "augment": False,
    "rows": True,
    "loader": {"use_seedable_sampler": True},
    "samples": 50,
    "epochs": 4,
    "drop_last": True,
}
"""A loader as scripts have it."""


def ordinary(ranks: int, kill: int | None = None, **config: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch with such a loader, whose batches have six samples on all ranks together."""
    return on(ranks, kill, **{**ORDINARY, "batch": 6 // ranks, **config})


def loader(**config: Any) -> dict[str, Any]:
    return {"loader": {**ORDINARY["loader"], **config}}


SPLIT = {"batch": 6, "total": 60, **loader(split_batches=True)}
PADDED = {"drop_last": False}
DISPATCHED = loader(dispatch_batches=True)
ORDINARY_LAUNCHES = {
    "2 to 1 to 2": [ordinary(2, 7), ordinary(1, 13), ordinary(2)],
    "1 to 3 to 2": [ordinary(1, 7), ordinary(3, 13), ordinary(2, workers=2)],
    "less accumulation": [ordinary(1, 7), ordinary(2, batch=6, accumulate=1)],
    "on one rank, more accumulation": [ordinary(1, 7, accumulate=1, loader={}, batch=12), ordinary(1, loader={})],
    "an own generator, 3 to 2": [ordinary(3, 7, loader={}), ordinary(2, loader={})],
    "split batches": [ordinary(2, 7, **SPLIT), ordinary(3, **SPLIT)],
    "dispatched batches": [ordinary(2, 7, **DISPATCHED), ordinary(3, 13, **DISPATCHED), ordinary(1, **DISPATCHED)],
    "dispatched and split": [
        ordinary(2, 7, **{**SPLIT, **loader(split_batches=True, dispatch_batches=True)}),
        ordinary(3, **{**SPLIT, **loader(split_batches=True, dispatch_batches=True)}),
    ],
    "at the end of an epoch": [ordinary(2, 9, save_every=8), ordinary(1, save_every=8)],
    "padded": [ordinary(2, 7, **PADDED), ordinary(3, 13, **PADDED), ordinary(1, **PADDED)],
    "dispatched and padded": [ordinary(2, 7, **PADDED, **DISPATCHED), ordinary(3, **PADDED, **DISPATCHED)],
}

SPREAD = {**MAP, "batch": 6, "epochs": 4, "save_every": 3}


def spread(state: str, ranks: int, kill: int | None = None, **config: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch under FSDP2."""
    return on(ranks, kill, **{**SPREAD, "fsdp": state, **config})


FEWER = {"batch": 4, "accumulate": 1}
SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
SHARDS = {
    "sharded, 1 to 2 to 3 to 1": [
        spread(SHARDED, 1, 5),
        spread(SHARDED, 2, 8, batch=3),
        spread(SHARDED, 3, 11, **FEWER),
        spread(SHARDED, 1),
    ],
    "full, 1 to 2 to 1": [spread(FULL, 1, 5), spread(FULL, 2, 8, batch=3), spread(FULL, 1)],
}


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
@pytest.mark.parametrize("case", SHARDS)
def test_shards_are_dealt_out_again(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """What follows is compared with a run of one process, which has no shards."""
    contract.same_samples_on_any_topology(bench, tmp_path, reference(SPREAD), SHARDS[case], tolerance=1e-5)


def zero(stage: int, *ranks: int, **config: Any) -> list[tuple[int, dict[str, Any]]]:
    """Return launches under DeepSpeed; all but the last are killed in the middle of a pass."""
    launches = itertools.zip_longest(ranks, (7, 11)[: len(ranks) - 1])
    return [ordinary(*each, zero=stage, clip=True, **config) for each in launches]


SCALE = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 4, "hysteresis": 1}
PRECISION: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "engine": {"fp16": SCALE}},
}
ENGINES = {
    "stage 0, 2 to 1 to 3": zero(0, 2, 1, 3),
    "stage 0, 2 to 1 in fp16": zero(0, 2, 1, **PRECISION["fp16"]),
    "stage 1, 1 to 2": zero(1, 1, 2),
    "stage 1, 2 to 1 in bf16 with sums in fp32": zero(
        1, 2, 1, precision="bf16", engine={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "stage 1, 2 to 3 in bf16": zero(1, 2, 3, **PRECISION["bf16"]),
    "stage 2, 2 to 1 to 2": zero(2, 2, 1, 2),
    "stage 2, 2 to 1 in fp16": zero(2, 2, 1, **PRECISION["fp16"]),
    "stage 2, 2 to 3 in fp16": zero(2, 2, 3, **PRECISION["fp16"]),
    "stage 3, 1 to 2": zero(3, 1, 2),
    "stage 3, 1 to 2 to 3": zero(3, 1, 2, 3),
    "stage 3, 2 to 1 in bf16": zero(3, 2, 1, **PRECISION["bf16"]),
}
TELLING = ("stage 2, 2 to 1 to 2", "stage 3, 1 to 2")


@pytest.mark.usefixtures("sharding")
@pytest.mark.parametrize("case", often(ENGINES, seldom={*ENGINES} - {*TELLING}))
def test_an_engine_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.engine_goes_on(bench, tmp_path, reference, ENGINES[case], tolerance=3e-2 if "16" in case else 1e-4)


@pytest.mark.parametrize("case", often(LAUNCHES, "2 to 1"))
def test_every_step_has_the_samples_that_it_would_have_had(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    contract.same_samples_on_any_topology(bench, tmp_path, reference(MAP), LAUNCHES[case], tolerance=1e-4)


@pytest.mark.parametrize("case", often(ORDINARY_LAUNCHES, "2 to 1 to 2"))
def test_an_ordinary_loader_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    launches = ORDINARY_LAUNCHES[case]
    ranks, config = launches[0] if "padded" not in case else ordinary(1, **PADDED)
    expected = reference({**config, "kill": None}, ranks)
    tolerance = None if "padded" in case else 1e-4
    contract.same_samples_on_any_topology(bench, tmp_path, expected, launches, tolerance=tolerance)


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
def test_an_engine_without_adam_is_refused(bench: contract.Bench, tmp_path: Path) -> None:
    """As many ranks as before, which the message asks for, go on."""
    (ranks, config), (other, last) = zero(2, 2, 1, optimizer="SGD")
    assert bench.run(tmp_path, config, ranks=ranks).killed
    outcome = bench.run(tmp_path, last, ranks=other)
    assert "the optimizer keeps momentum_buffer for each parameter" in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path, other).steps)
    bench.run(tmp_path, {**config, "kill": None}, ranks=ranks).require_success()


def test_a_schedule_of_the_wrong_length_is_refused(bench: contract.Bench, tmp_path: Path) -> None:
    """A script that does not make its schedule longer for more processes would go on with another learning rate."""
    ranks, config = on(1, 8)
    assert bench.run(tmp_path, config, ranks=ranks).killed
    outcome = bench.run(tmp_path, {**on(2, accumulate=1)[1], "total": 60}, ranks=2)
    assert set(outcome.statuses) != {0}
    assert "optimizer steps times the number of processes" in outcome.output
    assert not any(contract.read_trace(tmp_path, 2).steps)


def test_another_global_batch_goes_on_by_samples(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    keep = {"options": {"on_batch_change": "keep-samples"}}
    launches = [on(1, 8, total=18, **keep), on(2, 11, total=18, **keep), on(1, batch=16, accumulate=1, total=9, **keep)]
    contract.goes_on_by_samples(bench, tmp_path, launches, 3 * 48, reference(launches[-1][1]))
