"""The laws on two and three gloo ranks. Three, because DDP's order of additions hides on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fsdp1
from selection import often

import contract

FIRST = {"event": "step_end", "step": 4, "rank": 1}
EARLY = {"event": "step_end", "step": 8, "rank": 1}
MIDDLE = {"event": "step_end", "step": 12, "rank": 0}

WORKERS = {"workers": 1, "augment": True}
DISPATCH = {"dispatch_batches": True}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),
    "plain-workers-rank-seeds": (2, {**WORKERS, "rank_seeds": True}),
    "seedable": (2, {"loader": {"use_seedable_sampler": True}, "set_epoch": True}),
    "split-batches": (2, {"loader": {"split_batches": True}, "augment": True}),
    "stateful": (2, {"loader": {"use_stateful_dataloader": True}, "augment": True}),
    "dispatched": (2, {"loader": DISPATCH, "samples": 99, "augment": True}),
    "dispatched-stateful": (2, {"loader": {**DISPATCH, "use_stateful_dataloader": True}, "samples": 99}),
    "dispatched-split": (2, {"loader": {**DISPATCH, "split_batches": True}, "samples": 51, "augment": True}),
    "dispatched-saved-at-its-end": (2, {"loader": DISPATCH, "samples": 99, "save_every": 7}),
    "dispatched-stream": (2, {"stream": True, "samples": 99, "augment": True}),
    "sharded-stream": (2, {"stream": True, "samples": 99, "loader": {"dispatch_batches": False}, **WORKERS}),
    "two-models-own-buffers": (
        2,
        {"second": True, "clip": True, "batch_norm": True, "ddp": {"broadcast_buffers": False}},
    ),
    "train-apart": (2, {"local_sgd": True}),
    "ema-scaler-evaluation": (2, {"ema": True, "scaler": True, "evaluate": True, "samples": 100}),
    "device": (2, {"device": "walled", "second": True, "evaluate": True, "own_generator": True}),
    "device-scaler": (2, {"device": "walled", "scaler": True, "ema": True, "batch_norm": True, "rank_seeds": True}),
    "device-dispatched": (2, {"device": "walled", "loader": DISPATCH, "samples": 99}),
    "three-ranks-static-graph": (
        3,
        {"width": 512, "samples": 150, "accumulate": 1, "ddp": {"bucket_cap_mb": 1, "static_graph": True}},
    ),
    "three-ranks-rebuilt-buckets": (3, {"width": 512, "samples": 150, "second": True, "ddp": {"bucket_cap_mb": 1}}),
}

SELDOM = (
    "plain",
    "three-ranks-static-graph",
    "seedable",
    "stateful",
    "dispatched-stateful",
    "dispatched-split",
    "dispatched-stream",
    "two-models-own-buffers",
    "device-scaler",
    "device-dispatched",
    "three-ranks-rebuilt-buckets",
)
"""What a loader may be is varied on one rank too, dispatching in another case, and buckets by the Trainer's tests."""

FSDP, SHARDED = "DistributedType.FSDP", {"fsdp": "SHARDED_STATE_DICT"}
STRATEGIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp2-sharded": (FSDP, 3, {**SHARDED, "clip": True, "batch_norm": True, "samples": 150, "begins": True}),
    "fsdp2-hybrid": (FSDP, 4, {**SHARDED, "parallel": {"DP_REPLICATE": 2, "DP_SHARD": 2}, "samples": 200}),
    "fsdp2-full": (FSDP, 2, {"fsdp": "FULL_STATE_DICT", "by_hand": True}),
    "fsdp2-stateless": (FSDP, 2, {**SHARDED, "optimizer": "SGD 0"}),
    "fsdp2-full-stateless": (FSDP, 2, {"fsdp": "FULL_STATE_DICT", "optimizer": "SGD 0"}),
    "zero-2": ("DistributedType.DEEPSPEED", 2, {"zero": 2, "augment": True, "begins": True}),
}


@pytest.mark.usefixtures("sharding")
def test_context_parallelism_is_refused_by_its_name(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {**SHARDED, "parallel": {"CP": 2}}, ranks=2)
    assert 0 not in outcome.statuses and "spread over 2 ranks in `cp`" in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path, 2).steps)


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
@pytest.mark.parametrize("case", often(STRATEGIES, seldom=("fsdp2-full", "fsdp2-full-stateless", "fsdp2-hybrid")))
def test_sharded_state_too(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    strategy, ranks, config = STRATEGIES[case]
    config = {"samples": 100, **config}
    expected = reference(config, ranks)
    assert [final and final["strategy"] for final in expected.final] == [strategy] * ranks, "another one has trained"
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, [EARLY, MIDDLE], ranks=ranks)


COPIED = {**SHARDED, "width": 256, "samples": 100, "options": {"stage": "memory"}}


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
def test_shards_that_are_copied_are_those_of_the_bare_save_state(bench: contract.Bench, reference: Any) -> None:
    contract.staged_equals_bare(bench, reference, COPIED, ranks=2, timeless=contract.without_place)


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
def test_what_is_copied_of_an_engine_is_that_of_the_bare_save_state(bench: contract.Bench, reference: Any) -> None:
    config = {"zero": 2, "width": 256, "samples": 100, "options": {"stage": "memory"}}
    contract.staged_equals_bare(bench, reference, config, ranks=2)


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
def test_killed_with_copied_shards_equals_never(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    kills = [MIDDLE, {"event": "step_end", "step": 18, "rank": 1}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, COPIED, reference(COPIED, 2), kills, ranks=2)


SAVES = {**SHARDED, "samples": 32, "epochs": 1, "accumulate": 1, "save_every": 2, "limit": 1}


OPERATIONS: dict[str, tuple[int, str]] = {
    "a shard": (1, rf"{contract.BEGUN}checkpoint_4/optimizer_0/__1_0\.distcp"),
    "the index": (0, rf"{contract.BEGUN}checkpoint_4/pytorch_model_fsdp_0/\.metadata.*"),
    "the manifest": (0, rf"{contract.BEGUN}checkpoint_4/resume/{contract.temporary('manifest.json')}"),
}


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
@pytest.mark.parametrize("what", OPERATIONS)
def test_killed_before_a_shard_the_index_and_the_commit(
    what: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Law 3, where a checkpoint is whole only with the files of all ranks."""
    rank, path = OPERATIONS[what]
    contract.killed_before_an_operation(
        bench,
        tmp_path,
        {**SAVES, "on_rank": rank},
        reference(SAVES, 2),
        contract.Operation("open", path, 2),
        leaving=[{4}],
        ranks=2,
    )


UNSAVED = ("plain", "three-ranks-rebuilt-buckets")
"""These are killed before their first save too, when nothing on the disk depends on the case."""


@pytest.mark.parametrize("case", often(CASES, "ema-scaler-evaluation", seldom=SELDOM))
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    ranks, config = CASES[case]
    config = {"samples": 100, **config}
    kills = [*([FIRST] if case in UNSAVED else []), EARLY, MIDDLE]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, ranks), kills, ranks=ranks)


def test_processes_that_train_apart_are_as_many_as_before(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"local_sgd": True, "samples": 100, "elastic": True}
    assert bench.run(tmp_path, {**config, "kill": MIDDLE}, ranks=2).killed
    outcome = bench.run(tmp_path, config)
    assert outcome.statuses == (1,), outcome.output
    assert "weights of its own on each of 2 ranks, this launch has 1" in outcome.output


@pytest.mark.thorough
@pytest.mark.usefixtures("sharding")
@pytest.mark.parametrize(
    ("kinds", "ranks"),
    [
        (("SHARDED_STATE_DICT", "FULL_STATE_DICT"), 2),
        (("FULL_STATE_DICT", "SHARDED_STATE_DICT"), 1),
        pytest.param(("SHARDED_STATE_DICT", "SHARDED_STATE_DICT"), 2, marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_of_fsdp1_starts_a_run(
    kinds: tuple[str, str], ranks: int, bench: contract.Bench, tmp_path: Path
) -> None:
    config = {"samples": 50 * ranks, "save_every": 5, "max_steps": 9, "epochs": 4}
    fsdp1.starts_a_run(bench, tmp_path, config, "step_end", kinds, ranks)


OWN_DISKS: dict[str, tuple[int, dict[str, Any]]] = {
    "workers": (2, {**WORKERS, "samples": 100, "rank_seeds": True}),
    "fsdp2": (2, {**SHARDED, "samples": 100}),
}


@contract.needs_own_disks
@pytest.mark.parametrize("case", often(OWN_DISKS))
def test_nodes_with_disks_of_their_own_resume_from_what_both_have(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    ranks, config = OWN_DISKS[case]
    contract.nodes_with_own_disks_resume(bench, tmp_path, config, reference(config, ranks), MIDDLE, ranks=ranks)


@pytest.mark.thorough
def test_an_audit_of_processes_that_train_apart_is_refused(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {"local_sgd": True, "samples": 100, "options": {"verify": {"every": 4}}}, ranks=2)
    assert 1 in outcome.statuses and "or each rank trains apart" in outcome.output, outcome.output
    assert not contract.committed(tmp_path / "out")
