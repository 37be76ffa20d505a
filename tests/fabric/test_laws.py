"""The laws for Fabric, each with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric

from selection import often

import contract
import laws

KILL = {"event": "step_end", "step": 13}
EARLY = {"event": "step_end", "step": 8}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "ranks"),
    [({"augment": True, "workers": 2, "evaluate": True, "second": True}, 1), ({"samples": 100, "evaluate": True}, 2)],
    ids=["one", "two-ranks"],
)
def test_an_uninterrupted_run_is_the_bare_one(
    config: dict[str, Any], ranks: int, bench: contract.Bench, reference: Any
) -> None:
    """Law 0."""
    contract.uninterrupted_equals_bare(bench, reference, config, ranks=ranks)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "workers-ema": (1, {"augment": True, "workers": 2, "ema": True}),
    "two-optimizers-evaluation": (1, {"second": True, "batch_norm": True, "evaluate": True}),
    "scaler-compile": (1, {"scaler": True, "compile": True}),
    "a-schedule-that-is-not-passed": (1, {"unpassed": True}),
    "a-loader-made-in-each-epoch": (1, {"anew": True, "save_every": 6}),
    "device": (1, {"device": "walled", "second": True, "ema": True}),
    "device-scaler": (1, {"device": "walled", "scaler": True, "compile": True, "batch_norm": True, "evaluate": True}),
    "unwrapped": (1, {"wrapped": False, "samples": 48, "augment": True}),
    "two-ranks": (2, {"samples": 100, "augment": True, "evaluate": True}),
    "two-ranks-device": (2, {"device": "walled", "samples": 100, "second": True, "evaluate": True}),
    "two-ranks-limited": (2, {"samples": 100, "limit": 8, "epochs": 5}),
    "two-ranks-unwrapped-last-batch": (2, {"samples": 96, "save_every": 6, "wrapped": False}),
    "two-ranks-own-buffers": (2, {"samples": 100, "batch_norm": True, "own_buffers": True}),
    "two-ranks-that-train-apart": (2, {"samples": 100, "apart": True, "ema": True}),
    "three-ranks-rebuilt-buckets": (3, {"samples": 150, "width": 40_000}),
}

SELDOM = (
    "two-optimizers-evaluation",
    "unwrapped",
    "two-ranks-limited",
    "two-ranks-own-buffers",
    "device-scaler",
    "two-ranks-device",
    "three-ranks-rebuilt-buckets",
)
"""The tests of Accelerate and of the plain loop vary them as well, and the loop is the same."""


@pytest.mark.parametrize(
    "case",
    often(
        CASES,
        "workers-ema",
        "two-ranks",
        seldom=SELDOM,
    ),
)
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Laws 1 and 2."""
    ranks, config = CASES[case]
    kills = [{**EARLY, "rank": ranks - 1}, {**KILL, "rank": 0}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, ranks), kills, ranks=ranks)


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


SAVES = {"max_steps": 6, "save_every": 2, "keep": "KeepLast(1)"}


OPERATIONS = contract.operations(
    "step-2",
    "step-4",
    "step-4/resume",
    contract.Operation("open", rf"{contract.BEGUN}step-4/fabric\.ckpt", 2),
)


COPIED = {"augment": True, "second": True, "options": {"stage": "memory"}}


def load(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = Fabric(accelerator="cpu", devices=1).load(checkpoint / "fabric.ckpt")["model"]
    return found


JOB = laws.Job(KILL, SAVES, OPERATIONS, copied=COPIED, often={"save_every": 2}, load=load, audited={"samples": 96})

test_killed_before_it = laws.of_each(laws.killed_before_it, OPERATIONS, "lets the framework write", "commits")
test_killed_before_it_with_copies = laws.of_each(laws.killed_before_it_with_copies, contract.STAGED, "commits")
test_killed_twice_with_copies_equals_never = laws.of_each(
    laws.killed_twice_with_copies_equals_never, ["cpu", "walled"], "cpu"
)
test_killed_between_copy_and_commit = laws.killed_between_copy_and_commit
test_an_empty_machine_resumes_from_the_mirror = laws.an_empty_machine_resumes_from_the_mirror
test_weights_alone_are_kept = laws.weights_alone_are_kept
test_an_epoch_begins_once_on_two_ranks = laws.thorough(laws.an_epoch_begins_once_on_two_ranks)
test_an_audit_finds_a_flipped_bit = laws.of_each(laws.an_audit_finds_a_flipped_bit, contract.FLIPS)
test_a_kill_loses_no_step_that_memory_has = laws.a_kill_loses_no_step_that_memory_has
test_a_run_directory_below_a_file_is_refused = laws.a_run_directory_below_a_file_is_refused


@pytest.mark.thorough
def test_a_stop_that_reaches_one_rank_stops_all(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 8. The ranks vote at each step where steps are not too short."""
    config = {"augment": True, "samples": 100}
    send = {"event": "backward", "step": 12, "rank": 1, "send": "SIGUSR1"}
    contract.stopped_then_resumed(bench, tmp_path, config, reference(config, 2), send, ranks=2, within=3)


def test_each_part_is_captured(bench: contract.Bench, tmp_path: Path) -> None:
    """Law 9."""
    bench.run(tmp_path, {"second": True}).require_success()
    found = contract.parts(tmp_path / bench.run_directory)
    assert found["model"] == "framework: fabric.save of model, second"
    assert found.keys() >= {"optimizer", "scheduler", "counters", "rng", "data", "metrics", "trackers"}


def test_a_plain_script_loads_what_was_saved(bench: contract.Bench, tmp_path: Path) -> None:
    """Law 10."""
    assert bench.run(tmp_path, {"second": True, "kill": KILL}).killed
    config = {"second": True, "bare": True, "load": "out/step-10/fabric.ckpt", "epochs": 0}
    bench.run(tmp_path, config).require_success()
    final = contract.read_trace(tmp_path).final[0]
    assert final is not None and final["schedule"] == 10


LAUNCHES = {"2 to 3": [(2, 7, {"batch": 3}), (3, None, {"batch": 2})]}


@pytest.mark.thorough
@pytest.mark.parametrize("case", LAUNCHES)
def test_another_number_of_ranks_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 7, with the sampler that Fabric puts in."""
    shared = {"samples": 48, "dropout": 0.0}
    launches = [
        (ranks, {**shared, **config, "kill": {**KILL, "step": step, "rank": 0} if step else None})
        for ranks, step, config in LAUNCHES[case]
    ]
    ranks, config = launches[0]
    expected = reference({**config, "kill": None}, ranks)
    contract.same_samples_on_any_topology(bench, tmp_path, expected, launches, tolerance=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "batch": ({"batch": 8}, 1, "batch size 4, this launch has 8"),
    "ranks": ({}, 2, "was saved with number of ranks 1, this launch has 2"),
    "another optimizer": ({"second": True}, 1, "number of models 1, this launch has 2"),
    "another model": ({"width": 32}, 1, "0.weight: saved float32[16, 8], the model has float32[32, 8]"),
    "a strategy": ({"own_strategy": True}, 1, "Elsewhere shards or moves the state"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_be_exact_is_refused(what: str, bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    change, ranks, words = REFUSED[what]
    killed(tmp_path, {"kill": EARLY})
    outcome = bench.run(tmp_path, change, ranks=ranks)
    assert 1 in outcome.statuses and words in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path, ranks).steps), "nothing may be trained"


def test_a_finished_run_launched_again_does_nothing(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    same = ("weights", "global_step", "draws", "schedule")
    contract.finished_does_nothing_again(bench, tmp_path, reference, {}, same)


@pytest.mark.thorough
@pytest.mark.long
def test_a_hundred_runs_of_one_fabric_leave_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    """Law 12."""
    contract.opened_and_closed_leaves_nothing(bench, tmp_path, {"save_every": 1, "accumulate": 1})


# ---- Saves that are copied, and written in the background


@pytest.mark.parametrize("ranks", often({"one": 1, "two": 2}, "one"))
def test_the_files_are_those_of_the_bare_save(ranks: str, bench: contract.Bench, reference: Any) -> None:
    config = {**COPIED, "save_every": 2}
    contract.staged_equals_bare(bench, reference, config, ranks={"one": 1, "two": 2}[ranks])


@pytest.mark.thorough
@contract.needs_own_disks
def test_nodes_with_disks_of_their_own_resume_from_what_both_have(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"samples": 100, "evaluate": True}
    contract.nodes_with_own_disks_resume(bench, tmp_path, config, reference(config, 2), KILL)


@pytest.mark.thorough
@pytest.mark.parametrize("take", contract.FORKS)
def test_a_fork_equals_loading_by_hand(take: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """A new run with the weights of another, and with its optimizer's state."""
    changes = {"samples": 40}
    contract.a_fork_equals_loading_by_hand(bench, tmp_path, {"augment": True}, reference, take, KILL, changes=changes)
