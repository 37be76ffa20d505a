"""The laws for a loop of torch alone, each with real processes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from selection import often

import contract
import laws

KILL = {"event": "step_end", "step": 13}
EARLY = {"event": "step_end", "step": 8}


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param({"augment": True, "workers": 2, "evaluate": True, "second": True}, 1, id="one"),
        pytest.param({"samples": 100, "evaluate": True}, 2, id="two-ranks", marks=pytest.mark.thorough),
    ],
)
def test_an_uninterrupted_run_is_the_bare_one(
    config: dict[str, Any], ranks: int, bench: contract.Bench, reference: Any
) -> None:
    """Law 0."""
    contract.uninterrupted_equals_bare(bench, reference, config, ranks=ranks)


ALONE = {"drawn": True, "max_steps": 18, "evaluate": True, "scaler": True}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "workers-ema": (1, {"augment": True, "workers": 2, "ema": True}),
    "two-optimizers-evaluation": (1, {"second": True, "batch_norm": True, "evaluate": True}),
    "scaler-compile": (1, {"scaler": True, "compile": True}),
    "a-schedule-that-is-not-passed": (1, {"unpassed": True}),
    "no-loader": (1, ALONE),
    "batches-taken-ahead": (1, {"ahead": 2, "augment": True, "save_every": 6, "grows": True}),
    "batches-taken-ahead-by-workers": (2, {"ahead": 1, "augment": True, "workers": 2, "samples": 100}),
    "two-ranks": (2, {"samples": 100, "augment": True, "evaluate": True, "compile": True}),
    "two-ranks-no-loader": (2, {"drawn": True, "max_steps": 18, "batch_norm": True, "evaluate": True}),
    "two-ranks-reduced-by-hand": (2, {"samples": 100, "wrap": False, "batch_norm": True}),
    "two-ranks-that-train-apart": (2, {"samples": 100, "apart": True, "ema": True}),
    "three-ranks-rebuilt-buckets": (3, {"samples": 150, "width": 40_000}),
}


@pytest.mark.parametrize("case", often(CASES, "batches-taken-ahead", "two-ranks"))
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Laws 1 and 2."""
    ranks, config = CASES[case]
    kills = [{**EARLY, "rank": ranks - 1}, {**KILL, "rank": 0}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, ranks), kills, ranks=ranks)


DEALT = {"distributed": True, "samples": 48, "dropout": 0.0}
LAUNCHES = {
    "2 to 3 to 1": [(2, 7, {"batch": 3}), (3, 11, {"batch": 2}), (1, None, {"batch": 6})],
    "1 to 2": [(1, 7, {"batch": 6}), (2, None, {"batch": 3})],
}


@pytest.mark.parametrize("case", often(LAUNCHES, "2 to 3 to 1"))
def test_another_number_of_ranks_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 7, with torch's DistributedSampler."""
    launches = [
        (ranks, {**DEALT, **config, "kill": {**KILL, "step": step, "rank": 0} if step else None})
        for ranks, step, config in LAUNCHES[case]
    ]
    ranks, config = launches[0]
    expected = reference({**config, "kill": None}, ranks)
    contract.same_samples_on_any_topology(bench, tmp_path, expected, launches, tolerance=1e-4)


MOMENTS = {
    "at the end of an epoch": {"event": "epoch_end", "step": 12},
    "in an accumulation window": {"event": "batch_end", "step": 17},
    "after the last save": {"event": "train_end", "step": 18},
}


def test_killed_at_any_moment(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 1: each launch is killed at the next of the moments, and the last one runs to the end."""
    config = {"augment": True, "begins": True, "samples": 48}
    kills = list(MOMENTS.values())
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), kills)


@pytest.mark.thorough
def test_wrapped_and_unwrapped_restore_alike(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 6."""
    kills = [EARLY, KILL]
    contract.interrupted_equals_uninterrupted(
        bench, tmp_path, {}, reference({}), kills, relaunch=[{}, {"compile": True}, {}]
    )


SAVES = {"max_steps": 6, "save_every": 2, "keep": "KeepLast(1)"}


OPERATIONS = contract.operations(
    "step-2",
    "step-4",
    "step-4/resume",
    contract.Operation("open", rf"{contract.BEGUN}step-4/training\.pt", 2),
)


AUDITED = [each for each in OPERATIONS if each != "lets the framework write"]
"""All but the file that torch opens in C++, which no hook of Python sees: a copied save writes it in Python."""


COPIED = {"augment": True, "second": True, "options": {"stage": "memory"}}


def load(checkpoint: Path) -> dict[str, Any]:
    return dict(torch.load(checkpoint / "training.pt", weights_only=True)["model"])


JOB = laws.Job(KILL, SAVES, OPERATIONS, copied=COPIED, load=load, audited={"batch_norm": True, "samples": 96})

test_killed_before_it = laws.of_each(laws.killed_before_it, AUDITED, "commits")
test_killed_before_it_with_copies = laws.of_each(laws.killed_before_it_with_copies, contract.STAGED)
test_an_empty_machine_resumes_from_the_mirror = laws.thorough(laws.an_empty_machine_resumes_from_the_mirror)
test_weights_alone_are_kept = laws.weights_alone_are_kept
test_an_epoch_begins_once_on_two_ranks = laws.thorough(laws.an_epoch_begins_once_on_two_ranks)
test_an_audit_finds_a_flipped_bit = laws.of_each(laws.an_audit_finds_a_flipped_bit, contract.FLIPS, "gradients")
test_a_kill_loses_no_step_that_memory_has = laws.thorough(laws.a_kill_loses_no_step_that_memory_has)


DRAWN = {"drawn": True, "max_steps": 25}


@pytest.mark.thorough
@pytest.mark.parametrize("config", [{"samples": 100}, DRAWN], ids=["loader", "drawn"])
def test_a_stop_that_reaches_one_rank_stops_all(
    config: dict[str, Any], bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Law 8. The ranks vote at each step where steps are not too short."""
    send = {"event": "backward", "step": 12, "rank": 1, "send": "SIGUSR1"}
    contract.stopped_then_resumed(bench, tmp_path, config, reference(config, 2), send, ranks=2, within=3)


def test_each_part_is_captured_and_a_plain_script_loads_what_was_saved(bench: contract.Bench, tmp_path: Path) -> None:
    """Laws 9 and 10."""
    assert bench.run(tmp_path, {"second": True, "scaler": True, "kill": KILL}).killed
    found = contract.parts(tmp_path / bench.run_directory)
    assert found["model"] == "framework: torch.save of model, second"
    assert found.keys() >= {"optimizer", "scheduler", "scaler", "counters", "rng", "data", "metrics", "trackers"}
    config = {"second": True, "bare": True, "load": "out/step-10/training.pt", "epochs": 0}
    bench.run(tmp_path, config).require_success()
    final = contract.read_trace(tmp_path).final[0]
    assert final is not None and final["schedule"] == 10


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "ranks": ({}, 2, "was saved with number of ranks 1, this launch has 2"),
    "another optimizer": ({"second": True}, 1, "number of models 1, this launch has 2"),
    "another model": ({"width": 32}, 1, "0.weight: saved float32[16, 8], the model has float32[32, 8]"),
    "another name": ({"renamed": True}, 1, "was saved with model, optimizer, schedule; this launch gives net, optim"),
    "steps that nothing saves": ({"drawn": True, "save_every": None}, 1, "pass save_every= to the run"),
    "processes without a group": (
        {"group": False, "wrap": False},
        2,
        "call torch.distributed.init_process_group() before",
    ),
    "a sharded optimizer": ({"zero": True}, 2, "ZeroRedundancyOptimizer shards or moves the state"),
}


@pytest.mark.parametrize("what", often(REFUSED, "another name"))
def test_what_would_not_be_exact_is_refused(what: str, bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    change, ranks, words = REFUSED[what]
    killed(tmp_path, {"kill": EARLY})
    outcome = bench.run(tmp_path, change, ranks=ranks)
    assert 1 in outcome.statuses and words in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path, ranks).steps), "nothing may be trained"


@pytest.mark.thorough
def test_a_different_number_of_processes_that_draw_their_batches_is_refused(
    bench: contract.Bench, killed: Any, tmp_path: Path
) -> None:
    killed(tmp_path, {**DRAWN, "kill": EARLY})
    outcome = bench.run(tmp_path, DRAWN, ranks=2)
    assert 1 in outcome.statuses and "the data come from no loader" in outcome.output, outcome.output


@pytest.mark.thorough
def test_processes_with_different_models_are_refused_at_the_first_save(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {"stages": True, "wrap": False, "apart": True}, ranks=2)
    assert 1 in outcome.statuses and "the processes train different models" in outcome.output, outcome.output


@pytest.mark.parametrize("asks", often({"save": {}, "best": {}}, "save"))
def test_a_save_that_one_process_asks_for_is_refused_before_it_hangs(
    asks: str, bench: contract.Bench, tmp_path: Path
) -> None:
    began = time.monotonic()
    outcome = bench.run(tmp_path, {"asks": asks}, ranks=2)
    assert time.monotonic() - began < 100, "it may not wait until a group of the training gives up"
    assert "asks for a checkpoint after step 3, and not on every process" in outcome.output, outcome.output


@pytest.mark.parametrize("config", often({"loader": {}, "drawn": {}}, "drawn"))
def test_a_finished_run_launched_again_does_nothing(
    config: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    same = ("weights", "global_step", "draws", "schedule")
    contract.finished_does_nothing_again(bench, tmp_path, reference, ALONE if config == "drawn" else {}, same)


@pytest.mark.thorough
@pytest.mark.long
def test_a_hundred_runs_of_one_loop_leave_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    """Law 12."""
    contract.opened_and_closed_leaves_nothing(bench, tmp_path, {"save_every": 1, "accumulate": 1})


# ---- Saves that are copied, and written in the background


@pytest.mark.thorough
def test_the_files_are_those_of_the_bare_save(bench: contract.Bench, reference: Any) -> None:
    contract.staged_equals_bare(bench, reference, {**COPIED, "save_every": 2})


OWN_DISKS: dict[str, tuple[int, dict[str, Any]]] = {
    "apart": (2, {"samples": 100, "augment": True, "ema": True, "apart": True, "wrap": False, "save_every": 4}),
    "two-ranks-each": (4, {"samples": 200, "save_every": 4}),
}


@contract.needs_own_disks
@pytest.mark.parametrize("empty", [pytest.param(False, marks=pytest.mark.thorough), True])
@pytest.mark.parametrize("case", often(OWN_DISKS, "apart"))
def test_nodes_with_disks_of_their_own_resume_from_what_both_have(
    case: str, empty: bool, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    ranks, config = OWN_DISKS[case]
    kill = {**KILL, "rank": 1}
    contract.nodes_with_own_disks_resume(
        bench, tmp_path, config, reference(config, ranks), kill, ranks=ranks, empty=empty
    )


@pytest.mark.parametrize("take", contract.FORKS)
def test_a_fork_equals_loading_by_hand(take: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """A new run with the weights of another, and with its optimizer's state."""
    changes = {"samples": 40}
    contract.a_fork_equals_loading_by_hand(bench, tmp_path, {"augment": True}, reference, take, KILL, changes=changes)


@pytest.mark.thorough
def test_a_fork_on_two_ranks_equals_loading_by_hand(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.a_fork_equals_loading_by_hand(
        bench, tmp_path, {"augment": True}, reference, contract.FORKS[-1], KILL, changes={"samples": 80}, ranks=2
    )


def test_an_audit_of_processes_that_train_apart_is_refused(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {"wrap": False, "apart": True, "options": {"verify": {"every": 4}}}, ranks=2)
    assert 1 in outcome.statuses and "or each rank trains apart" in outcome.output, outcome.output
    assert not contract.committed(tmp_path / "out")
