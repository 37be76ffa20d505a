"""Law 7 for Lightning: different ranks, workers or batch splits give the same samples and rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract

MAP = {"elastic": True, "rows": True, "augment": True, "dropout": 0.0, "samples": 48}


def on(ranks: int, kill: int | None = None, accumulate: int = 2, **config: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch on some ranks, which is killed after a step."""
    strike = {"event": "on_train_batch_end", "step": kill, "rank": 0} if kill else None
    return ranks, {**MAP, "trainer": {"accumulate_grad_batches": accumulate}, **config, "kill": strike}


ORDINARY = {"elastic": False, "augment": False, "samples": 48}


def ordinary(ranks: int, kill: int | None = None, **config: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch with a loader as scripts have them, whose batches have six samples on all ranks together."""
    return on(ranks, kill, **{**ORDINARY, "batch": 6 // ranks, **config})


OWN = {"distributed": True}
ORDINARY_LAUNCHES = {
    "2 to 3": [ordinary(2, 7), ordinary(3)],
    "3 to 2, with less accumulation": [ordinary(3, 7), ordinary(2, batch=6, accumulate=1)],
    "an own sampler, 1 to 3 to 2": [ordinary(1, 7, **OWN), ordinary(3, 11, **OWN), ordinary(2, **OWN)],
}

KEEP = {"decays": True, "callback": {"on_batch_change": "keep-samples"}}
SHARDED = {"strategy": "fsdp2", "checkpoints": [{"every_n_train_steps": 3}]}
FULL = {**SHARDED, "sharded": False}

LAUNCHES = {
    "2 to 1, with 0 to 2 workers": [on(2, 16, accumulate=1), on(1, workers=2)],
    "1 to 2 to 1, in other batches": [on(1, 8), on(2, 16, batch=2, workers=1), on(1, batch=8, accumulate=1)],
    "sharded, 1 to 2 to 3 to 1": [
        on(1, 5, batch=6, **SHARDED),
        on(2, 8, batch=3, **SHARDED),
        on(3, 11, batch=4, accumulate=1, **SHARDED),
        on(1, batch=6, **SHARDED),
    ],
    "full, 1 to 2 to 1": [on(1, 5, batch=6, **FULL), on(2, 8, batch=3, **FULL), on(1, batch=6, **FULL)],
    "at the end of an epoch": [on(2, 7, accumulate=1, checkpoints=[{"every_n_train_steps": 6}]), on(1)],
}


@pytest.mark.parametrize("case", often(LAUNCHES))
def test_every_step_has_the_samples_that_it_would_have_had(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    is_spread = "strategy" in LAUNCHES[case][0][1]
    expected = reference(on(1, **({"batch": 6} if is_spread else {}))[1])  # in whole, on one rank
    contract.same_samples_on_any_topology(bench, tmp_path, expected, LAUNCHES[case], tolerance=1e-4)
    # Of an epoch that was half done, what was logged is the mean over all its samples too.
    final = contract.read_trace(tmp_path).final[0]
    assert final is not None and expected.final[0] is not None
    logged, as_ever = (float.fromhex(each["logged"]["train_loss_epoch"]) for each in (final, expected.final[0]))
    assert abs(logged - as_ever) < 1e-4
    assert (final["strategy"] == "ModelParallelStrategy") == is_spread


@pytest.mark.parametrize("case", often(ORDINARY_LAUNCHES, "2 to 3"))
def test_an_ordinary_loader_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    launches = ORDINARY_LAUNCHES[case]
    ranks, config = launches[0]
    expected = reference({**config, "kill": None}, ranks)
    contract.same_samples_on_any_topology(bench, tmp_path, expected, launches, tolerance=1e-4)


def test_a_sampler_that_one_process_lacks_is_refused(bench: contract.Bench, tmp_path: Path) -> None:
    """Lightning shuffles otherwise on several processes than on one."""
    ranks, config = ordinary(1, 7)
    assert bench.run(tmp_path, config, ranks=ranks).killed
    outcome = bench.run(tmp_path, ordinary(2)[1], ranks=2)
    assert set(outcome.statuses) != {0}
    assert "the samples had the order of RandomSampler" in outcome.output
    assert "now that of DistributedSampler(seed=" in outcome.output
    assert not any(contract.read_trace(tmp_path, 2).steps)


@pytest.mark.parametrize("strategy", [{}, pytest.param(SHARDED, marks=pytest.mark.thorough)], ids=["whole", "sharded"])
def test_another_global_batch_goes_on_by_samples(
    strategy: dict[str, Any], bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    options = {**KEEP, **strategy}
    launches = [on(1, 8, **options), on(2, 11, **options), on(1, batch=16, accumulate=1, **options)]
    expected = reference(launches[-1][1])
    contract.goes_on_by_samples(bench, tmp_path, launches, 3 * 48, expected)


def test_another_global_batch_is_refused(bench: contract.Bench, tmp_path: Path) -> None:
    assert bench.run(tmp_path, on(1, 8)[1]).killed
    outcome = bench.run(tmp_path, on(1, batch=8)[1])
    assert outcome.statuses == (1,)
    assert "an optimizer step had 8 samples and would now have 16" in outcome.output
    assert 'on_batch_change="keep-samples"' in outcome.output
    assert not any(contract.read_trace(tmp_path).steps)
