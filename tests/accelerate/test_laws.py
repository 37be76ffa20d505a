"""The other laws for Accelerate, each with real processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import accelerate
import pytest
from safetensors.torch import load_file

from resume_adapters.accelerate.files import ForeignCheckpoints
from selection import often
from waiting import LIMIT

import contract
import laws
import stores
from faults import cut, flip

KILL = {"event": "step_end", "step": 18}
PLAIN: dict[str, Any] = {"augment": True}
RUN = "project/checkpoints"


# ---- Law 0


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ({"augment": True, "workers": 2, "evaluate": True, "ema": True}, 1),
        ({"naming": True, "save_every": None, "registered": [0, 1], "second": True}, 1),
        ({"loader": {"use_stateful_dataloader": True}, "augment": True}, 1),
        ({"loader": {"use_stateful_dataloader": True, "use_seedable_sampler": True}, "workers": 2}, 1),
        ({"augment": True, "samples": 100, "loader": {"dispatch_batches": True}}, 2),
    ],
    ids=["workers", "naming", "stateful", "stateful-workers", "two-ranks"],
)
def test_an_uninterrupted_run_is_the_bare_one(
    config: dict[str, Any], ranks: int, bench: contract.Bench, reference: Any
) -> None:
    """Law 0: same losses, same weights, same native files."""
    contract.uninterrupted_equals_bare(bench, reference, config, ranks=ranks)


# ---- Law 1, elsewhere than at the end of a step in the middle

MOMENTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "saved every five steps": (
        {},
        {
            "first step": {"event": "step_end", "step": 1},
            "at the end of an epoch": {"event": "epoch_end", "step": 14},
            "in an accumulation window": {"event": "batch_end", "step": 17},
            "before the optimizer": {"event": "backward", "step": 17},
            "in the last epoch": {"event": "step_end", "step": 19},
            "at the last step": {"event": "step_end", "step": 21},
            "after the last save": {"event": "train_end", "step": 21},
        },
    ),
    "saved at the end of each epoch": (
        {"save_every": 7},
        {
            "in the first step of an epoch": {"event": "backward", "step": 7},
            "at the start of an epoch": {"event": "epoch_begin", "step": 14},
        },
    ),
    "saved and evaluated at the end of each epoch": (
        {"evaluate": True, "save_every": 7},
        {"with the evaluation of an epoch to come": {"event": "epoch_end", "step": 14}},
    ),
    "stopped in mid-epoch": (
        {"max_steps": 17, "evaluate": True},
        {
            "at that step": {"event": "epoch_end", "step": 17},
            "after training": {"event": "train_end", "step": 17},
        },
    ),
}
"""Runs that are alike, each with the moments at which its launches are killed, one after the other."""


@pytest.mark.parametrize("chain", MOMENTS)
def test_killed_at_any_moment(chain: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Each launch of a chain is killed at the next of its moments, and the last one runs to the end."""
    more, kills = MOMENTS[chain]
    config = {"augment": True, "begins": True, **more}
    expected = reference(config)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, list(kills.values()))


def test_a_save_waits_for_the_end_of_the_window(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Asked for when one of two batches of step 12 had been accumulated, it is of step 12, and nothing is lost."""
    config = {"asks_at": 11}
    assert bench.run(tmp_path, {**config, "kill": {"event": "step_end", "step": 13}}).killed
    assert max(contract.committed(tmp_path / RUN).values()) == 12
    contract.resumed_equals_uninterrupted(bench, tmp_path, config, reference(config))


# ---- Laws 3 and 4, and others that are the same for every adapter

SAVES = {"max_steps": 6, "save_every": 2, "limit": 1, "registered": [0, 1]}


OPERATIONS = contract.operations(
    "checkpoint_2",
    "checkpoint_4",
    "checkpoint_4/resume",
    contract.Operation("os.mkdir", rf"{contract.BEGUN}checkpoint_4", 2, 2),
    superseded=("checkpoint_6", 6),
)


COPIED = {"augment": True, "options": {"stage": "memory"}}
EVERYTHING = {**PLAIN, "ema": True, "scaler": True, "registered": [0, 1]}
DAMAGED = {
    "checkpoint_15/optimizer.bin": "cut",
    "checkpoint_15/custom_checkpoint_0.pkl": "zeroed",
    "checkpoint_15/resume/rank-00000.json": "flipped",
    "checkpoint_15/resume/ema.safetensors": "emptied",
    "checkpoint_15/resume/manifest.json": "removed",
}
"""A file of each kind, and what befalls it."""


def load(checkpoint: Path) -> dict[str, Any]:
    return load_file(checkpoint / "model.safetensors")


JOB = laws.Job(
    KILL,
    SAVES,
    OPERATIONS,
    plain=PLAIN,
    copied=COPIED,
    often={"save_every": 2},
    everything=EVERYTHING,
    newest="checkpoint_15",
    before="checkpoint_10",
    damages=DAMAGED,
    foreign=ForeignCheckpoints(1),
    load=load,
    audited={"batch_norm": True, "samples": 96},
)

test_killed_before_it = laws.of_each(
    laws.killed_before_it,
    OPERATIONS,
    "lets the framework write",
    "commits",
    "takes the mark of the unfinished away",
    "takes the checkpoint before out of sight",
    "says that it has finished",
    "moves a checkpoint aside to save it again",
    "takes the one aside out of sight",
)
test_any_damage_of_any_file_is_found = laws.any_damage_of_any_file_is_found
test_a_damaged_file_of_any_kind_takes_the_previous_checkpoint = laws.of_each(
    laws.a_damaged_file_of_any_kind_takes_the_previous_checkpoint,
    DAMAGED,
    "checkpoint_15/optimizer.bin",
    "checkpoint_15/resume/manifest.json",
)
test_killed_before_it_with_copies = laws.of_each(laws.killed_before_it_with_copies, contract.STAGED)
test_killed_twice_with_copies_equals_never = laws.of_each(
    laws.killed_twice_with_copies_equals_never, ["cpu", "walled"], "cpu"
)
test_killed_between_copy_and_commit = laws.thorough(laws.killed_between_copy_and_commit)
test_an_empty_machine_resumes_from_the_mirror = laws.an_empty_machine_resumes_from_the_mirror
test_weights_alone_are_kept = laws.weights_alone_are_kept
test_an_epoch_begins_once_on_two_ranks = laws.thorough(laws.an_epoch_begins_once_on_two_ranks)
test_an_audit_finds_a_flipped_bit = laws.of_each(laws.an_audit_finds_a_flipped_bit, contract.FLIPS)
test_a_kill_loses_no_step_that_memory_has = laws.thorough(laws.a_kill_loses_no_step_that_memory_has)
test_a_run_directory_below_a_file_is_refused = laws.a_run_directory_below_a_file_is_refused


@pytest.mark.parametrize("operation", ["lets the framework write", "commits"])
def test_frozen_before_it(operation: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 3, for a job that is suspended: when it wakes up, a second one has saved the same steps."""
    contract.frozen_before_an_operation(bench, tmp_path, SAVES, reference(SAVES), OPERATIONS[operation])


# ---- Law 5


def test_the_best_and_the_anchor_survive(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """The best is kept under total_limit=1, as is what a restart would take."""
    config = {"scores": {"7": 5.0, "14": 1.0, "21": 3.0}, "evaluate": True, "limit": 1, "save_every": 4}
    left = {"checkpoint_14": 14, "checkpoint_21": 21}
    for step in (9, 19):
        assert bench.run(tmp_path, {**config, "kill": {"event": "step_end", "step": step}}).killed
        assert len(contract.committed(tmp_path / RUN)) <= 3
    bench.run(tmp_path, config).require_success()
    assert contract.committed(tmp_path / RUN) == left
    contract.require_same_end(contract.read_trace(tmp_path), reference(config))
    assert contract.committed(reference.directory(config) / RUN) == left


# ---- Law 6


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_and_plain_restore_alike(ranks: int, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """On one rank it is traced too, which takes seconds; on two its state has other names, and that is all."""
    kills = [{**KILL, "step": step} for step in (8, 18)]
    relaunch = [{"compile": compiled, "traced": ranks == 1} for compiled in (True, False, True)]
    config = {"samples": 50 * ranks}
    expected = reference(config, ranks)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, kills, relaunch=relaunch, ranks=ranks)


# ---- Law 8


STOPS = [("backward", 1), ("step_end", 4), ("epoch_end", 7), ("batch_end", 11), ("epoch_begin", 14)]


def test_a_stop_at_any_event_saves_then_leaves(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    sends = [{"event": event, "step": step, "send": "SIGTERM"} for event, step in STOPS]
    contract.stopped_then_resumed(bench, tmp_path, PLAIN, reference(PLAIN), *sends)


@pytest.mark.thorough
@pytest.mark.parametrize("whom", contract.WHOM)
def test_a_stop_that_reaches_one_rank_stops_all(
    whom: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {"augment": True, "samples": 100}
    send = {"event": "backward", "step": 12, "send": "SIGUSR1", **contract.WHOM[whom]}
    contract.stopped_then_resumed(bench, tmp_path, config, reference(config, 2), send, ranks=2, within=3)


# ---- Law 9


def test_each_part_is_captured(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {"own_generator": True}).require_success()
    assert "MISSING" not in outcome.output
    found = contract.parts(tmp_path / bench.run_directory)
    assert found.keys() >= {"model", "optimizer", "scheduler", "counters", "rng", "data", "metrics", "trackers"}


def test_ddp_that_cannot_be_found_is_said(bench: contract.Bench, tmp_path: Path) -> None:
    for frozen in (False, True):
        config = {"frozen": frozen, "max_steps": 2}
        outcome = bench.run(tmp_path / str(frozen), config, ranks=2).require_success()
        assert ("MISSING: no DDP module was found" in outcome.output) == frozen


def test_data_that_cannot_be_repeated_are_refused(bench: contract.Bench, tmp_path: Path) -> None:
    assert bench.run(tmp_path, {"own_generator": "count", "kill": KILL}).killed
    outcome = bench.run(tmp_path, {"own_generator": "count"})
    assert outcome.statuses == (1,)
    assert "is not the batch that followed when the checkpoint was saved" in outcome.output


# ---- Law 10


def test_a_plain_script_loads_what_was_saved(bench: contract.Bench, tmp_path: Path) -> None:
    config = {**EVERYTHING, "scaler": False}
    assert bench.run(tmp_path, {**config, "kill": KILL}).killed
    bench.run(tmp_path, {**config, "bare": True, "load": f"{RUN}/checkpoint_15", "epochs": 0}).require_success()
    final = contract.read_trace(tmp_path).final[0]
    assert final is not None and final["counters"] == [15, 30] and final["scheduler"] == 15


# ---- Finished runs, other starts, other settings


@pytest.mark.parametrize(
    "config", [{}, {"max_steps": 17}, {"left_at": 17, "with": True}], ids=["epochs", "max", "left"]
)
def test_a_finished_run_launched_again_does_nothing(
    config: Any, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    same = ("weights", "global_step", "draws", "scheduler")
    contract.finished_does_nothing_again(bench, tmp_path, reference, config, same)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "first", [{"max_steps": 11}, {"left_at": 11, "with": True}, {"epochs": 2}], ids=["max", "left", "epochs"]
)
def test_a_longer_horizon_goes_on(first: Any, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """An epoch and a half, ended or left, and then the rest, are three epochs."""
    bench.run(tmp_path, first).require_success()
    contract.resumed_equals_uninterrupted(bench, tmp_path, {"max_steps": 100}, reference({}))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_registered_objects_are_known_by_name(
    order: list[int], bench: contract.Bench, killed: Any, tmp_path: Path
) -> None:
    """Registered in another order, each gets its own state back; the bare framework swaps them without a word."""
    killed(tmp_path, {"registered": [0, 1], "kill": KILL})
    bench.run(tmp_path, {"registered": order}).require_success()
    final = contract.read_trace(tmp_path).final[0]
    assert final is not None and final["counters"] == [21, 42]


def test_automatic_naming_never_meets_its_own_directories(bench: contract.Bench, tmp_path: Path) -> None:
    """``iteration`` goes on, and what ``total_limit`` removes is the oldest, after the newest is committed."""
    config = {"naming": True, "limit": 2}
    assert bench.run(tmp_path, {**config, "kill": KILL}).killed
    assert contract.committed(tmp_path / RUN) == {"checkpoint_1": 10, "checkpoint_2": 15}
    bench.run(tmp_path, config).require_success()
    assert contract.committed(tmp_path / RUN) == {"checkpoint_3": 20, "checkpoint_4": 21}


def test_a_save_that_the_script_asks_accelerate_for_is_a_checkpoint_of_the_run(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """With automatic naming; by itself it ended at `total_limit`, and in a resumed launch at its own directories."""
    config = {"naming": True, "limit": 2, "save_every": 10, "own_saves": [4, 13, 16]}
    assert bench.run(tmp_path, {**config, "kill": KILL}).killed
    assert contract.committed(tmp_path / RUN) == {"checkpoint_2": 13, "checkpoint_3": 16}
    contract.resumed_equals_uninterrupted(bench, tmp_path, config, reference(config))
    assert contract.committed(tmp_path / RUN) == {"checkpoint_4": 20, "checkpoint_5": 21}


def test_a_run_under_way_is_taken_over(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """The package is added to a run that bare Accelerate began: its whole checkpoint is taken, a torn one is not."""
    config = {"loader": {"use_seedable_sampler": True}}
    assert bench.run(tmp_path, {**config, "bare": True, "kill": KILL}).killed
    cut(tmp_path / RUN / "checkpoint_15" / "optimizer.bin")
    outcome = bench.run(tmp_path, config).require_success()
    assert "checkpoint_15 is damaged" in outcome.output
    assert "checkpoint_10 was made without this package" in outcome.output
    trace, expected = contract.read_trace(tmp_path), reference(config)
    assert trace.first_step == 10
    following = [line for line in expected.steps[0] if line["step"] >= 10]
    assert [line["batch"] for line in trace.steps[0]] == [line["batch"] for line in following]
    assert [line["lr"] for line in trace.steps[0]] == [line["lr"] for line in following]


def test_a_path_starts_a_run_but_its_own_checkpoints_win(
    bench: contract.Bench, reference: Any, killed: Any, tmp_path: Path
) -> None:
    killed(tmp_path / "old", {"kill": KILL})
    config = {"resume": str(tmp_path / "old" / RUN / "checkpoint_10")}
    assert bench.run(tmp_path / "new", {**config, "kill": KILL}).killed
    contract.require_same_steps(contract.read_trace(tmp_path / "new"), reference({}), start=10)
    assert contract.resumed_equals_uninterrupted(bench, tmp_path / "new", config, reference({})) == 15


def test_all_damaged_is_an_error_that_lists_them(
    killed: contract.Killed, bench: contract.Bench, tmp_path: Path
) -> None:
    killed(tmp_path / "run", {**EVERYTHING, "kill": KILL})
    for name in contract.committed(tmp_path / "run" / RUN):
        flip(tmp_path / "run" / RUN / name / "optimizer.bin")
    outcome = bench.run(tmp_path / "run", EVERYTHING)
    assert outcome.statuses == (1,)
    for name in ("checkpoint_5", "checkpoint_10", "checkpoint_15"):
        assert f"{name}: optimizer.bin has the digest" in outcome.output
        assert (tmp_path / "run" / RUN / name).is_dir(), "nothing may be lost"


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "accumulation": ({"accumulate": 1}, 1, "gradient_accumulation_steps 2, this launch has 1"),
    "batch": ({"batch": 8}, 1, "batch size 4, this launch has 8"),
    "samples": ({"samples": 60}, 1, "a dataset of length 50, this launch has 60"),
    "ranks": ({}, 2, "was saved with number of ranks 1, this launch has 2"),
    "another optimizer": ({"second": True}, 1, "number of models 1, this launch has 2"),
    "another model": ({"width": 32}, 1, "first.weight: saved float32[16, 8], the model has float32[32, 8]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_not_be_exact_is_refused(what: str, bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    change, ranks, words = REFUSED[what]
    killed(tmp_path, {"kill": KILL})
    outcome = bench.run(tmp_path, change, ranks=ranks)
    assert 1 in outcome.statuses and "StateMismatch" in outcome.output
    assert words in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path, ranks).steps), "nothing may be trained"


def test_uneven_ranks_are_refused(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.start(tmp_path, {"loader": {"even_batches": False}}, ranks=2).wait(survivors=LIMIT)
    assert set(outcome.statuses) == {1} and "even_batches=False" in outcome.output


def test_without_room_the_save_fails_with_one_clear_error(bench: contract.Bench, tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: what was committed stays, and the next launch goes on."""
    bench.run(tmp_path, {"kill": {"event": "step_end", "step": 8}})
    outcome = bench.run(tmp_path, {"file_limit": 12_000})
    assert outcome.statuses == (1,)
    assert "SaveFailed" in outcome.output and "the checkpoints committed before it are intact" in outcome.output
    assert contract.committed(tmp_path / RUN) == {"checkpoint_5": 5}
    bench.run(tmp_path, {}).require_success()


def test_a_run_trains_on_after_a_save_that_failed(
    reference: contract.References, bench: contract.Bench, tmp_path: Path
) -> None:
    config = {"options": {"on_save_error": "continue"}}
    contract.trains_on_after_a_failed_save(bench, tmp_path, {**config, "file_limit": 12_000}, reference({}))


# ---- Law 12


@pytest.mark.thorough
@pytest.mark.parametrize(
    "varied",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"loader": {"dispatch_batches": True}}, marks=pytest.mark.long),
        pytest.param({"options": {"stage": "memory"}}, marks=pytest.mark.long),
    ],
    ids=["sharded", "dispatched", "copied"],
)
def test_a_hundred_runs_of_one_accelerator_leave_nothing(
    varied: dict[str, Any], bench: contract.Bench, tmp_path: Path
) -> None:
    trackers = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    config = {"save_every": 1, "accumulate": 1, "total": 10**6, "trackers": trackers, **varied}
    contract.opened_and_closed_leaves_nothing(bench, tmp_path, config)


# ---- Saves that are copied, and written in the background


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_files_are_those_of_the_bare_save_state(ranks: int, bench: contract.Bench, reference: Any) -> None:
    config = {**COPIED, "registered": [0, 1], "save_every": 2}
    contract.staged_equals_bare(bench, reference, config, ranks=ranks)


# ---- In interpreters of their own, which have imported nothing before the job


@pytest.mark.thorough
@pytest.mark.long
def test_the_laws_hold_in_fresh_interpreters(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {"augment": True, "ema": True}
    contract.laws_in_fresh_interpreters(
        bench,
        tmp_path,
        config,
        reference(config),
        commit=contract.Operation("os.rename", rf"checkpoint_15/resume/{contract.temporary('manifest.json')}", 10),
        damaged="checkpoint_10/optimizer.bin",
        send={"event": "backward", "step": 13},
    )


# ---- A run that an older version of the package has begun


def test_an_older_run_goes_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.older_run_goes_on(bench, tmp_path / "run", reference, "accelerate", accelerate.__version__)


# ---- The step trace


@pytest.mark.parametrize("device", often(["cpu", "walled"], "cpu"))
def test_the_trace_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    device: str, bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    """The loop iterates over the prepared loader itself, which fetches a batch ahead."""
    config = {"device": device, "augment": True, "wrapped": False, "second": True, "epochs": 2, "save_every": None}
    contract.traces_are_equal(bench, reference, tmp_path, config, {"event": "step_end", "step": 13})


# ---- The run of each tracker


@pytest.mark.thorough
@pytest.mark.long
@pytest.mark.skipif(not stores.are_installed(), reason="the extra `trackers` installs them")
def test_the_trackers_of_accelerate_continue_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"trackers": ["wandb", "mlflow", "tensorboard"]}
    stores.continue_the_run(bench, tmp_path, config, {"event": "step_end", "step": 18})


@pytest.mark.thorough
@pytest.mark.parametrize("take", contract.FORKS)
def test_a_fork_equals_loading_by_hand(take: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """A new run with the weights of another, and with its optimizer's state."""
    changes = {"samples": 40}
    contract.a_fork_equals_loading_by_hand(bench, tmp_path, {"augment": True}, reference, take, KILL, changes=changes)
