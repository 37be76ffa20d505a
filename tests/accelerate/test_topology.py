"""Law 7 for Accelerate: different ranks, workers or batch splits give the same samples and rates."""

from __future__ import annotations

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


@pytest.mark.parametrize("case", often(LAUNCHES, "2 to 1"))
def test_every_step_has_the_samples_that_it_would_have_had(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    contract.same_samples_on_any_topology(bench, tmp_path, reference(MAP), LAUNCHES[case], tolerance=1e-4)


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
