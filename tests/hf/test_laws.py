"""The other laws for the Trainer, each with real processes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils

from resume_adapters.core.stop.walltime import VARIABLE
from resume_adapters.hf.files import ForeignCheckpoints
from resume_adapters.hf.framework import TrainerFramework
from selection import often
from waiting import until

import contract
import laws
import stores
from faults import cut, flip

KILL = {"event": "on_step_end", "step": 18}
PLAIN: dict[str, Any] = {"augment": True}


# ---- Law 0


def timeless(name: str, content: bytes) -> bytes:
    """Take the measured times out of the trainer's log."""
    return re.sub(rb'"eval_(runtime|samples_per_second|steps_per_second)": [^,]*,', b"", content)


KNOWN = {field.name for field in dataclasses.fields(TrainingArguments)}
UNTIMED = {"logging_dir": "logs"} if "logging_dir" in KNOWN else {}
"""Settings of older versions that are the time of the start, which goes into ``training_args.bin``."""


@pytest.mark.parametrize(
    "config",
    [
        {"augment": True, "args": {**UNTIMED, "dataloader_num_workers": 2, "eval_strategy": "epoch"}},
        {"data": "stream", "args": {**UNTIMED, "max_steps": 21, "save_total_limit": 2, "save_steps": 10}},
        {"lora": True, "mask": True, "args": {**UNTIMED, "save_strategy": "epoch"}},
    ],
    ids=["map", "stream", "lora"],
)
def test_an_uninterrupted_run_is_the_bare_one(config: dict[str, Any], bench: contract.Bench, reference: Any) -> None:
    """Law 0: same losses, same weights, same log, same native files."""
    contract.uninterrupted_equals_bare(bench, reference, config, timeless=timeless)


def test_on_two_ranks_too(bench: contract.Bench, reference: Any) -> None:
    """Law 0 on two ranks."""
    config = {"augment": True, "args": {**UNTIMED, "ddp_backend": "gloo"}}
    contract.uninterrupted_equals_bare(bench, reference, config, ranks=2, timeless=timeless)


# ---- Law 1, elsewhere than at the end of a step in the middle

MOMENTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "saved every five steps": (
        {},
        {
            "first step": {"event": "on_step_end", "step": 1},
            "at the end of an epoch": {"event": "on_epoch_end", "step": 14},
            "in an accumulation window": {"event": "on_substep_end", "step": 17},
            "before the optimizer": {"event": "on_pre_optimizer_step", "step": 17},
            "in the last epoch": {"event": "on_step_end", "step": 19},
            "after the last save": {"event": "on_train_end", "step": 21},
        },
    ),
    "saved at the end of each epoch": (
        {"save_steps": 7},
        {
            "in the first step of an epoch": {"event": "on_substep_end", "step": 7},
            "at the start of an epoch": {"event": "on_epoch_begin", "step": 14},
        },
    ),
    "saved and evaluated at the end of each epoch": (
        {"save_steps": 7, "eval_strategy": "epoch"},
        {"at the end of an epoch with its evaluation to come": {"event": "on_epoch_end", "step": 14}},
    ),
    "evaluated in between": (
        {"eval_strategy": "steps", "eval_steps": 6},
        {"during an evaluation": {"event": "on_prediction_step", "step": 18}},
    ),
    "stopped in mid-epoch": (
        {"max_steps": 20},
        {
            "at that step": {"event": "on_epoch_end", "step": 20},
            "after training": {"event": "on_train_end", "step": 20},
        },
    ),
}
"""Runs that are alike, each with the moments at which its launches are killed, one after the other."""


@pytest.mark.parametrize("chain", MOMENTS)
def test_killed_at_any_moment(chain: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Each launch of a chain is killed at the next of its moments, and the last one runs to the end."""
    args, kills = MOMENTS[chain]
    config = {"augment": True, "begins": True, "args": args}
    expected = reference(config)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, list(kills.values()))


@pytest.mark.thorough
@pytest.mark.parametrize("step", [2, 12])
def test_a_script_that_refuses_a_full_directory_without_a_checkpoint(
    step: int, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Killed twice before the first commit, or after it; the script gives ``train()`` the checkpoint that it finds."""
    config = {**PLAIN, "refuses_full_output": True}
    kills = [{"event": "on_step_end", "step": step}, {"event": "on_step_end", "step": step + 1}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(PLAIN), kills)
    assert "checkpoint-0" not in os.listdir(tmp_path / "out")


def test_add_callback_resumes_as_well(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {**PLAIN, "late": True}
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(PLAIN), [KILL])


# ---- Laws 3 and 4, and others that are the same for every adapter

SAVES = {"args": {"max_steps": 6, "save_steps": 2, "save_total_limit": 1}, "samples": 20}


OPERATIONS = contract.operations(
    "checkpoint-2",
    "checkpoint-4",
    "checkpoint-4/resume",
    contract.Operation("open", rf"{contract.BEGUN}checkpoint-4/trainer_state\.json", 2),
)


COPIED = {"augment": True, "callback": {"stage": "memory"}}
EVERYTHING = {**PLAIN, "ema": True}
DAMAGED = {
    "checkpoint-15/optimizer.pt": "flipped",
    "checkpoint-15/model.safetensors": "zeroed",
    "checkpoint-15/resume/rank-00000.json": "cut",
    "checkpoint-15/resume/ema.safetensors": "emptied",
    "checkpoint-15/resume/manifest.json": "removed",
}
"""A file of each kind, and what befalls it."""


def load(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    return found


JOB = laws.Job(
    KILL,
    SAVES,
    OPERATIONS,
    of_the_end=["logs"],
    plain=PLAIN,
    copied=COPIED,
    often={"args": {"save_steps": 2}},
    everything=EVERYTHING,
    newest="checkpoint-15",
    before="checkpoint-10",
    damages=DAMAGED,
    foreign=ForeignCheckpoints(1),
    load=load,
    audited={"samples": 100, "args": {"ddp_backend": "gloo"}},
)

test_killed_before_it = laws.of_each(
    laws.killed_before_it, OPERATIONS, "lets the framework write", "gives it its name", "commits", "removes its files"
)
test_any_damage_of_any_file_is_found = laws.any_damage_of_any_file_is_found
test_a_damaged_file_of_any_kind_takes_the_previous_checkpoint = laws.of_each(
    laws.a_damaged_file_of_any_kind_takes_the_previous_checkpoint, DAMAGED, "checkpoint-15/model.safetensors"
)
test_killed_before_it_with_copies = laws.of_each(
    laws.killed_before_it_with_copies, contract.STAGED, "lets the framework write", "commits"
)
test_killed_twice_with_copies_equals_never = laws.of_each(
    laws.killed_twice_with_copies_equals_never, ["cpu", "walled"], "cpu"
)
test_killed_between_copy_and_commit = laws.killed_between_copy_and_commit
test_an_empty_machine_resumes_from_the_mirror = laws.an_empty_machine_resumes_from_the_mirror
test_weights_alone_are_kept = laws.weights_alone_are_kept
test_an_epoch_begins_once_on_two_ranks = laws.thorough(laws.an_epoch_begins_once_on_two_ranks)
test_an_audit_finds_a_flipped_bit = laws.of_each(laws.an_audit_finds_a_flipped_bit, contract.FLIPS)
test_a_kill_loses_no_step_that_memory_has = laws.a_kill_loses_no_step_that_memory_has


@pytest.mark.parametrize("operation", ["lets the framework write", "gives it its name"])
def test_frozen_before_it(operation: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 3, for a job that is suspended: when it wakes up, a second one has saved the same steps."""
    contract.frozen_before_an_operation(bench, tmp_path, SAVES, reference(SAVES), OPERATIONS[operation])


def test_an_older_trainer_state_is_found(killed: contract.Killed, bench: contract.Bench, tmp_path: Path) -> None:
    killed(tmp_path / "run", {**EVERYTHING, "kill": KILL})
    out = tmp_path / "run" / "out"
    shutil.copy(out / "checkpoint-10" / "trainer_state.json", out / "checkpoint-15" / "trainer_state.json")
    outcome = bench.run(tmp_path / "run", {**PLAIN, "ema": True, "kill": {"event": "on_train_begin", "step": 10}})
    assert "checkpoint-15 is damaged: trainer_state.json" in outcome.output


def test_all_damaged_is_an_error_that_lists_them(
    killed: contract.Killed, bench: contract.Bench, tmp_path: Path
) -> None:
    killed(tmp_path / "run", {**EVERYTHING, "kill": KILL})
    out = tmp_path / "run" / "out"
    for name in contract.committed(out):
        flip(out / name / "optimizer.pt")
    outcome = bench.run(tmp_path / "run", {**PLAIN, "ema": True})
    assert outcome.statuses == (1,)
    for name in ("checkpoint-5", "checkpoint-10", "checkpoint-15"):
        assert f"{name}: optimizer.pt has the digest" in outcome.output
        assert (out / name).is_dir(), "nothing may be lost"
    assert 'resume="scratch!"' in outcome.output
    bench.run(tmp_path / "run", {**PLAIN, "ema": True, "resume": "scratch!"}).require_success()
    assert len(list((out / ".resume" / "set-aside").iterdir())) == 3


# ---- Law 5


def test_the_best_and_the_anchor_survive(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """The best is kept under save_total_limit=1, as is what a restart would take, and is loaded at the end."""
    config = {
        "scores": {"6": 5.0, "12": 1.0, "18": 3.0},
        "args": {
            "eval_strategy": "steps",
            "eval_steps": 6,
            "save_steps": 6,
            "save_total_limit": 1,
            "metric_for_best_model": "score",
            "greater_is_better": False,
            "load_best_model_at_end": True,
        },
    }
    for step in (13, 19):
        assert bench.run(tmp_path, {**config, "kill": {"event": "on_step_end", "step": step}}).killed
        found = contract.committed(tmp_path / "out")
        assert "checkpoint-12" in found and len(found) <= 3
    bench.run(tmp_path, config).require_success()
    for directory in (tmp_path, reference.directory(config)):
        assert contract.committed(directory / "out") == {"checkpoint-12": 12, "checkpoint-21": 21}
    trace = contract.read_trace(tmp_path)
    contract.require_same_end(trace, reference(config))
    assert trace.final[0] is not None and trace.final[0]["best"] == [1.0, 12, "out/checkpoint-12"]


def test_dates_of_directories_mean_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    """The bare trainer deletes by date, so a clock that was wrong once makes it delete each checkpoint it saves."""
    config = {"args": {"save_total_limit": 1}}
    assert bench.run(tmp_path, {**config, "kill": {"event": "on_step_end", "step": 8}}).killed
    (newest,) = contract.committed(tmp_path / "out")
    future = time.time() + 10_000
    os.utime(tmp_path / "out" / newest, (future, future))
    assert bench.run(tmp_path, {**config, "kill": KILL}).killed
    assert contract.committed(tmp_path / "out") == {"checkpoint-15": 15}
    bench.run(tmp_path, config).require_success()
    assert contract.committed(tmp_path / "out") == {"checkpoint-21": 21}


def test_a_best_between_saves_is_saved(bench: contract.Bench, tmp_path: Path) -> None:
    args = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 10, "metric_for_best_model": "score"}
    config = {"scores": {"4": 1.0, "12": 7.0}, "args": {**args, "greater_is_better": True, "save_total_limit": 1}}
    bench.run(tmp_path, {**config, "scores": {"12": 100.0}}).require_success()
    assert contract.committed(tmp_path / "out") == {"checkpoint-12": 12, "checkpoint-21": 21}


# ---- Law 6

WRAPPED = {"user_compile": True, "traced": False}
"""Compiled, as far as its state has other names: tracing a model takes seconds, and one test of them does it."""


@pytest.mark.thorough
@pytest.mark.long
def test_compiled_and_plain_restore_alike(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    plain = {"args": {"remove_unused_columns": False}}
    kills = [{**KILL, "step": step} for step in (8, 13, 18)]
    launches = [{"user_compile": compiled} for compiled in (False, True, True, False)]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, plain, reference(plain), kills, relaunch=launches)


def test_the_best_weights_load_whatever_wrapped_them(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """The bare trainer loads nothing here, silently: the best was saved compiled, and the run ends plain."""
    args = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "metric_for_best_model": "score"}
    args |= {"load_best_model_at_end": True, "greater_is_better": False, "remove_unused_columns": False}
    config = {"scores": {"10": 1.0}, "args": args}
    contract.interrupted_equals_uninterrupted(
        bench,
        tmp_path,
        config,
        reference(config),
        [KILL],
        relaunch=[WRAPPED, {}],
        ignore=["logs"],  # a compiled model hides its arguments from the evaluation, which then logs no loss
    )


def test_weights_that_are_saved_under_other_names_come_back(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """transformers 5 saves each expert for itself; the bare trainer loads none of them, at a resume and at the end."""
    args = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "metric_for_best_model": "score"}
    args |= {"load_best_model_at_end": True, "greater_is_better": False}
    config = {"experts": True, "scores": {"10": 1.0}, "args": args}
    expected = reference(config)
    assert expected.final[0] is not None and expected.final[0]["weights"] == expected.final[0]["best_weights"]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, [KILL])


def test_a_damaged_best_is_not_loaded(bench: contract.Bench, tmp_path: Path) -> None:
    args = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "metric_for_best_model": "score"}
    config = {"scores": {"10": 1.0}, "args": {**args, "load_best_model_at_end": True, "greater_is_better": False}}
    assert bench.run(tmp_path, {**config, "kill": KILL}).killed
    flip(tmp_path / "out" / "checkpoint-10" / "model.safetensors")
    outcome = bench.run(tmp_path, config)
    assert outcome.statuses == (1,)
    assert "CheckpointDamaged" in outcome.output and "model.safetensors has the digest" in outcome.output


def test_the_scale_of_a_grad_scaler_moves_in_its_test(reference: Any) -> None:
    """The case "scaler" of the exactness tests would show nothing with a scale that stands still."""
    final = reference({"args": {}, "scaler": True}).final[0]
    assert final is not None and final["scaler"]["scale"] != 1024.0


@pytest.mark.thorough
def test_ddp_and_compiled_together(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    plain = {"samples": 100, "args": {"remove_unused_columns": False, "ddp_backend": "gloo"}}
    contract.interrupted_equals_uninterrupted(
        bench, tmp_path, plain, reference(plain, 2), [KILL], ranks=2, relaunch=[WRAPPED, {}]
    )


def test_another_architecture_is_refused(bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    killed(tmp_path, {"kill": KILL})
    outcome = bench.run(tmp_path, {"width": 32})
    assert outcome.statuses == (1,)
    assert "was saved from another model" in outcome.output
    assert "transformer.wte.weight: saved float32[64, 16], the model has float32[64, 32]" in outcome.output


# ---- Law 8


EVALUATED: dict[str, Any] = {
    "augment": True,
    "samples": 100,
    "args": {
        "logging_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "per_device_eval_batch_size": 2,
    },
}
EVENTS: list[dict[str, Any]] = [
    {"event": "on_step_begin", "step": 2},
    {"event": "save", "number": 1, "step": 5},
    {"event": "on_substep_end", "step": 7},
    {"event": "on_prediction_step", "step": 12},
    {"event": "on_pre_optimizer_step", "step": 16},
    {"event": "on_step_end", "step": 19, "send": "SIGINT"},
    {"event": "on_save", "step": 25, "send": "SIGUSR1"},
    {"event": "on_prediction_step", "step": 30, "send": "SIGUSR2"},
    {"event": "commit", "number": 1, "step": 30, "within": 6},  # in the background, while steps go on
]


def test_a_stop_at_any_event_saves_then_leaves(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    sends = sorted([*EVENTS, {"event": "on_epoch_end", "step": 13}], key=lambda send: send["step"])
    contract.stopped_then_resumed(bench, tmp_path, EVALUATED, reference(EVALUATED), *sends)


def test_a_stop_at_the_end_lets_it_finish(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.asked_at_its_end_finishes(bench, tmp_path, reference({}), {"event": "on_train_end", "step": 21})


EACH = {send["event"] for send in EVENTS}
OFTEN = ({"on_step_begin", "on_prediction_step", "on_save"}, "rank 1 alone")
"""The events at which each run stops two ranks, and whom a signal reaches then."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("events", "whom"),
    [OFTEN, *(pytest.param(EACH, whom, marks=pytest.mark.long) for whom in contract.WHOM)],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} events",
)
def test_a_stop_stops_all_ranks_together(
    events: set[str], whom: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """No rank waits for another, whichever was asked; only rank zero does what belongs to the disk."""
    chosen = [send for send in EVENTS if send["event"] in events]
    sends = [{**send, **contract.WHOM[whom]} for send in chosen if "number" not in send or whom == "rank 0 alone"]
    config = {**EVALUATED, "args": {**EVALUATED["args"], "ddp_backend": "gloo", "num_train_epochs": 5}}
    contract.stopped_then_resumed(bench, tmp_path, config, reference(config, 2), *sends, ranks=2)


BY_SCORE = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": False}
WORKERS = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
GIVEN_UP: dict[str, tuple[dict[str, Any], int]] = {
    "that ends the training in mid-epoch": (
        {"patience": 3, "scores": {"8": 1.0}, "args": {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}},
        20,
    ),
    "that ends the training between epochs": (
        {"patience": 1, "scores": {"7": 1.0}, "args": {"eval_strategy": "epoch", "save_strategy": "epoch"}},
        14,
    ),
    "of a new best between two epochs": (
        {"scores": {"14": 1.0}, "args": {"eval_strategy": "epoch", "save_strategy": "epoch"}},
        14,
    ),
    "after the last step": (
        {"scores": {"7": 1.0}, "args": {"eval_strategy": "epoch", "save_strategy": "epoch"}},
        21,
    ),
    "with workers that stay": (
        {"augment": False, "args": {"eval_strategy": "steps", "eval_steps": 6, "save_steps": 6, **WORKERS}},
        12,
    ),
}


@pytest.mark.parametrize("case", often(GIVEN_UP))
def test_an_evaluation_given_up_for_a_stop_is_done_again(
    case: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config, step = GIVEN_UP[case]
    chosen = BY_SCORE if "scores" in config else {}
    config = {"augment": True, **config, "args": {**config["args"], **chosen, "per_device_eval_batch_size": 2}}
    send = {"event": "on_prediction_step", "step": step, "within": 0}
    contract.stopped_then_resumed(bench, tmp_path, config, reference(config), send)


# ---- When it saves


@pytest.mark.parametrize("strategy", often(["steps", "epoch", "no"], "epoch"))
def test_a_cadence_of_its_own_replaces_the_trainers(
    strategy: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {"augment": True, "callback": {"save_every": 4}, "args": {"save_strategy": strategy}}
    assert bench.run(tmp_path, {**config, "kill": KILL}).killed
    assert set(contract.committed(tmp_path / "out").values()) == {4, 8, 12, 16}
    contract.resumed_equals_uninterrupted(bench, tmp_path, config, reference({"augment": True}))
    assert set(contract.committed(tmp_path / "out").values()) == {4, 8, 12, 16, 20, 21}


def test_a_halted_run_is_refused_until_it_is_let_go_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    assert bench.run(tmp_path, {**PLAIN, "halt": 17}).statuses == (3,)
    assert 17 in contract.committed(tmp_path / "out").values()
    outcome = bench.run(tmp_path, PLAIN)
    assert outcome.statuses == (1,)
    assert "was halted at step 17: look at this" in outcome.output
    subprocess.run([sys.executable, "-m", "resume_adapters.cli", "stop", "--undo", tmp_path / "out"], check=True)
    assert contract.resumed_equals_uninterrupted(bench, tmp_path, PLAIN, reference(PLAIN)) == 17


def test_a_time_limit_below_the_reserve_still_keeps_a_step(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {**PLAIN, "startup": 0.6, "slow": 0.1}
    outcome = bench.run(tmp_path, config, env={VARIABLE: "55"}).require_success()
    assert "Walltime ends at" in outcome.output
    status = json.loads((tmp_path / "out" / ".resume" / "status.json").read_bytes())
    assert (status["state"], status["reason"]) == ("stopped", "the walltime is nearly over")
    assert 1 <= contract.resumed_equals_uninterrupted(bench, tmp_path, PLAIN, reference(PLAIN)) <= 12


def test_a_time_limit_without_room_for_a_step_halts_at_the_second_launch(bench: contract.Bench, tmp_path: Path) -> None:
    config = {**PLAIN, "startup": 0.1, "until_asked": True}
    first, second, third = (bench.run(tmp_path, config, env={VARIABLE: "0.1"}) for _ in range(3))
    assert [each.statuses for each in (first, second, third)] == [(0,), (3,), (1,)]
    assert "The last launch committed no step: start 1 stopped at step 0 (the walltime is nearly over)" in second.output
    assert "was halted at step 0: 2 launches in a row left for the walltime before they kept a step" in third.output
    assert not contract.committed(tmp_path / "out")


# ---- Law 9


def test_each_part_is_captured(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {"own_generator": True}).require_success()
    assert "MISSING" not in outcome.output
    wanted = {"model", "optimizer", "scheduler", "counters", "rng", "data", "metrics", "callbacks", "trackers"}
    assert contract.parts(tmp_path / bench.run_directory).keys() >= wanted


@pytest.mark.parametrize(
    ("saving", "words"),
    [
        ("steps", "is not the batch that followed when the checkpoint was saved"),
        ("epoch", "of the training data are not what they were when the checkpoint was saved"),
    ],
)
def test_data_that_cannot_be_repeated_are_refused(
    saving: str, words: str, bench: contract.Bench, tmp_path: Path
) -> None:
    """Behind an iterator that nobody saves, other batches would follow: an error, not another run."""
    config = {"own_generator": "count", "args": {"save_strategy": saving}}
    first = bench.run(tmp_path, {**config, "kill": {"event": "on_step_end", "step": 15}})
    assert first.killed and first.output.count("MISSING: `_COUNT` (a count): the training changes") == 1
    outcome = bench.run(tmp_path, config)
    assert outcome.statuses == (1,)
    assert words in outcome.output
    if saving == "epoch":  # nothing that was fetched ahead has another batch
        bench.run(tmp_path, {**config, "callback": {"verify": False}}).require_success()


def test_a_stream_that_counts_its_passes_goes_on_counting(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {"data": "stream", "counts_passes": True, "args": {"max_steps": 21}}
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), [KILL])


# ---- Law 10


def test_the_bare_trainer_loads_what_was_saved(bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    killed(tmp_path, {"kill": KILL})
    bench.run(tmp_path, {"bare": True, "resume_from": True}).require_success()
    assert contract.read_trace(tmp_path).first_step == 15


# ---- Finished runs, other starts, other settings


EVALUATED_LAST = {"eval_strategy": "epoch"}
"""Its last evaluation comes after the save of the last step."""


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, {}),
        (1, {"args": {"max_steps": 20}}),
        (1, {"args": {"max_steps": 20, "save_steps": 50}}),
        (2, {"augment": True, "args": {**EVALUATED_LAST, "ddp_backend": "gloo"}}),
        pytest.param(
            2,
            {"fsdp": "SHARDED_STATE_DICT", "args": {**EVALUATED_LAST, "save_steps": 3, "remove_unused_columns": False}},
            marks=pytest.mark.thorough,
        ),
        pytest.param(2, {"zero": 2, "args": {**EVALUATED_LAST, "save_steps": 3}}, marks=pytest.mark.thorough),
    ],
    ids=["epochs", "mid-epoch", "unsaved", "evaluated", "evaluated with FSDP", "evaluated with DeepSpeed"],
)
def test_a_finished_run_launched_again_does_nothing(
    ranks: int, config: dict[str, Any], bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    same = ["weights", "global_step", "train_loss", "logs", "draws"]
    contract.finished_does_nothing_again(bench, tmp_path, reference, config, same, ranks=ranks)


@pytest.mark.parametrize(
    "result", [pytest.param({}, marks=pytest.mark.thorough), {"train_loss": None}, {"train_loss": "low"}, []]
)
def test_a_finished_run_whose_result_somebody_has_changed_ends(
    result: Any, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """The status is for people: what is wrong in it ends no launch."""
    shutil.copytree(reference.directory({}), tmp_path, symlinks=True, dirs_exist_ok=True)
    file = tmp_path / bench.run_directory / ".resume" / "status.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "result": result}))
    bench.run(tmp_path, {}).require_success()
    assert contract.read_trace(tmp_path).final[0]["weights"] == reference({}).final[0]["weights"]


def test_a_longer_horizon_goes_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """With a constant learning rate, 11 and then 21 steps are 21 steps."""
    constant = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    bench.run(tmp_path, {"args": {**constant, "max_steps": 11}}).require_success()
    config = {"args": {**constant, "max_steps": 21}}
    bench.run(tmp_path, config).require_success()
    trace = contract.read_trace(tmp_path)
    contract.require_same_steps(trace, reference(config), start=11)
    assert trace.final[0] is not None and trace.final[0]["weights"] == reference(config).final[0]["weights"]


def test_early_stopping_continues(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    scores = {str(step): float(step) for step in range(4, 24, 4)} | {"8": 1.0}
    args = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "load_best_model_at_end": True}
    args |= {"metric_for_best_model": "score", "greater_is_better": False}
    config = {"patience": 3, "scores": scores, "args": args}
    expected = reference(config)
    assert expected.final[0] is not None and expected.final[0]["global_step"] == 20
    kills = [{"event": "on_step_end", "step": 14}, {"event": "on_step_end", "step": 18}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, kills)
    outcome = bench.run(tmp_path, config).require_success()
    assert "nothing to do" in outcome.output and "other settings" not in outcome.output
    final = contract.read_trace(tmp_path).final[0]
    assert final is not None and final["weights"] == expected.final[0]["weights"]
    outcome = bench.run(tmp_path, {**config, "args": {**args, "learning_rate": 1e-3}}).require_success()
    assert "It was trained with other settings; given now: learning_rate 0.001 (was 0.005)" in outcome.output


def test_a_run_under_way_is_taken_over(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """The callback is added to a run that the bare trainer began: its whole checkpoint is taken, a torn one is not."""
    assert bench.run(tmp_path, {"bare": True, "kill": KILL}).killed
    cut(tmp_path / "out" / "checkpoint-15" / "optimizer.pt")
    outcome = bench.run(tmp_path, {}).require_success()
    assert "checkpoint-15 is damaged: it is not whole" in outcome.output or "is torn" in outcome.output
    assert "checkpoint-10 was made without this package" in outcome.output
    trace = contract.read_trace(tmp_path)
    contract.require_same_steps(trace, reference({}), start=10)


def test_a_path_starts_a_run_but_its_own_checkpoints_win(
    bench: contract.Bench, reference: Any, killed: Any, tmp_path: Path
) -> None:
    killed(tmp_path / "old", {"kill": KILL})
    config = {"resume_from": str(tmp_path / "old" / "out" / "checkpoint-10")}
    assert bench.run(tmp_path / "new", {**config, "kill": KILL}).killed
    contract.require_same_steps(contract.read_trace(tmp_path / "new"), reference({}), start=10)
    bench.run(tmp_path / "new", config).require_success()
    contract.require_same_steps(contract.read_trace(tmp_path / "new"), reference({}), start=15)


def test_scratch_refuses_committed_checkpoints(bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    killed(tmp_path, {"kill": KILL})
    outcome = bench.run(tmp_path, {"resume": "scratch"})
    assert outcome.statuses == (1,) and 'resume="scratch" would train over them' in outcome.output


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps"),
    ],
)
def test_another_batch_is_refused(args: Any, named: str, bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    killed(tmp_path, {"kill": KILL})
    outcome = bench.run(tmp_path, {"args": args})
    assert outcome.statuses == (1,)
    assert named in outcome.output and "StateMismatch" in outcome.output


def test_without_room_the_save_fails_with_one_clear_error(bench: contract.Bench, tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: what was committed stays, and the next launch goes on."""
    bench.run(tmp_path, {"kill": {"event": "on_step_end", "step": 8}})
    outcome = bench.run(tmp_path, {"file_limit": 20_000})
    assert outcome.statuses == (1,)
    assert "SaveFailed" in outcome.output and "the checkpoints committed before it are intact" in outcome.output
    assert contract.committed(tmp_path / "out") == {"checkpoint-5": 5}
    bench.run(tmp_path, {}).require_success()


def test_a_run_trains_on_after_a_save_that_failed(
    reference: contract.References, bench: contract.Bench, tmp_path: Path
) -> None:
    config = {"callback": {"on_save_error": "continue"}}
    contract.trains_on_after_a_failed_save(bench, tmp_path, {**config, "file_limit": 20_000}, reference({}))


def test_two_processes_in_one_run_directory(bench: contract.Bench, tmp_path: Path) -> None:
    """The later start goes on; the earlier one can commit nothing more, and says whose directory it is."""
    earlier = bench.start(tmp_path, {"send": {"event": "on_step_end", "step": 7, "send": "SIGSTOP"}})
    earlier.wait_until_stopped()
    assert contract.committed(tmp_path / "out")
    later = bench.start(tmp_path, {})
    until(lambda: any(tmp_path.glob("trace.*")) or not later.alive(), lambda: "the later one does not train")
    earlier.signal(signal.SIGCONT)
    assert later.wait().require_success()
    outcome = earlier.wait()
    assert outcome.statuses == (1,) and "FencedOff" in outcome.output
    assert "checkpoint-21" in contract.committed(tmp_path / "out")


# ---- Law 12


@pytest.mark.thorough
@pytest.mark.parametrize(
    "callback", [pytest.param({}, marks=pytest.mark.long), {"stage": "memory"}], ids=["written", "copied"]
)
def test_a_hundred_trainings_in_one_process_leave_nothing(
    callback: dict[str, Any], bench: contract.Bench, tmp_path: Path
) -> None:
    args: dict[str, Any] = {"save_steps": 1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 2}
    trackers = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    args |= {"report_to": trackers, "logging_steps": 1}
    config = {"width": 4, "samples": 40, "callback": callback, "args": args}
    contract.opened_and_closed_leaves_nothing(bench, tmp_path, config)


# ---- Saves that are copied, and written in the background


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_the_files_are_those_of_the_bare_trainer(ranks: int, bench: contract.Bench, reference: Any) -> None:
    config = {**COPIED, "args": {**UNTIMED, **({"ddp_backend": "gloo"} if ranks > 1 else {})}}
    contract.staged_equals_bare(bench, reference, config, ranks=ranks, timeless=timeless)


def test_the_files_of_adapters_are_peft_s(bench: contract.Bench, reference: Any) -> None:
    config = {**COPIED, "lora": True, "mask": True, "args": UNTIMED}
    contract.staged_equals_bare(bench, reference, config, timeless=timeless)


class Reader(Trainer):
    """It saves by itself, and may read what the Trainer has written."""

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        super()._save_checkpoint(*arguments, **keywords)


class Partial(Trainer):
    """Its own way to save has a default that the Trainer's has not."""

    def _saving(self, *arguments: Any, kind: str, **keywords: Any) -> None:
        super().save_model(*arguments, **keywords)

    save_model = functools.partialmethod(_saving, kind="any")  # type: ignore[assignment]


class Patched(Trainer):
    """A script has replaced a method of the object, under the Trainer's name."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        native = self.save_model

        @functools.wraps(native)
        def save_model(trainer: Any, *arguments: Any, **keywords: Any) -> None:
            native(*arguments, **keywords)

        self.save_model = MethodType(save_model, self)  # type: ignore[method-assign]


class Listener(TrainerCallback):
    """It is called when a checkpoint has its name, and may read it."""

    def on_save(self, *arguments: Any, **keywords: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "callbacks", "reader"),
    [
        (Trainer, [], ""),
        (Reader, [], "Reader._save_checkpoint() may read each checkpoint"),
        (Partial, [], "Partial.save_model() may read each checkpoint"),
        (Patched, [], "Patched.save_model() may read each checkpoint"),
        (Trainer, [Listener], "Listener.on_save() may read each checkpoint"),
    ],
)
def test_nothing_is_copied_by_itself_where_somebody_may_read_it(
    kind: type[Trainer], callbacks: list[Any], reader: str, tmp_path: Path
) -> None:
    trainer = kind(
        torch.nn.Linear(1, 1), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"), callbacks=callbacks
    )
    assert TrainerFramework(trainer).staging("auto").objection() == reader


@pytest.mark.parametrize(
    ("callback", "switch", "on"),
    [("WandbCallback", "_log_model", "checkpoint"), ("MLflowCallback", "_log_artifacts", True)],
)
def test_a_tracker_reads_checkpoints_where_it_is_told_to(callback: str, switch: str, on: Any, tmp_path: Path) -> None:
    """Most are not told to. When a run begins it is not known: they read the environment at its first event."""
    pytest.importorskip(callback.removesuffix("Callback").lower())
    made = getattr(integration_utils, callback)()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    staging = TrainerFramework(Trainer(torch.nn.Linear(1, 1), arguments, callbacks=[made])).staging("auto")
    assert staging.objection() == ""
    setattr(made, switch, on)
    assert staging.objection() == f"{callback}.on_save() may read each checkpoint"


# ---- In interpreters of their own, which have imported nothing before the job


@pytest.mark.thorough
def test_the_laws_hold_in_fresh_interpreters(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {"augment": True, "ema": True}
    contract.laws_in_fresh_interpreters(
        bench,
        tmp_path,
        config,
        reference(config),
        commit=contract.Operation("os.rename", rf"checkpoint-15/resume/{contract.temporary('manifest.json')}", 10),
        damaged="checkpoint-10/optimizer.pt",
        send={"event": "on_substep_end", "step": 17},
    )


# ---- A run that an older version of the package has begun


def test_an_older_run_goes_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.older_run_goes_on(bench, tmp_path / "run", reference, "hf", transformers.__version__)


# ---- The step trace


@pytest.mark.thorough
def test_the_trace_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    """DDP on two ranks, a worker and augmentation; run directory and cadence are those of the environment."""
    args = {"dataloader_num_workers": 1, "save_steps": 1000, "num_train_epochs": 2}
    config = {"augment": True, "samples": 100, "args": args}
    quantities = ("batches", "rng", "loss", "lr", "grad_norm")
    kill = {"event": "on_step_end", "step": 12}
    contract.traces_are_equal(bench, reference, tmp_path, config, kill, quantities=quantities, ranks=2)


# ---- The run of each tracker


@pytest.mark.thorough
@pytest.mark.skipif(not stores.are_installed(), reason="the extra `trackers` installs them")
def test_the_callbacks_of_the_trainer_continue_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"args": {"report_to": ["wandb", "mlflow", "tensorboard"], "logging_steps": 1}}
    stores.continue_the_run(bench, tmp_path, config, {"event": "on_step_end", "step": 18})


@pytest.mark.parametrize("take", contract.FORKS)
def test_a_fork_equals_loading_by_hand(take: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """A new run with the weights of another, and with its optimizer's state."""
    changes = {"samples": 40, "args": {"learning_rate": 1e-3}}
    contract.a_fork_equals_loading_by_hand(bench, tmp_path, {"augment": True}, reference, take, KILL, changes=changes)


def test_adapters_around_what_another_run_has_learnt(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """peft saves the adapters alone: the weights that they are around are no script's, and are in each checkpoint."""
    pytest.importorskip("peft")
    changes = {"lora": True, "args": {"learning_rate": 1e-3}}
    contract.a_fork_equals_loading_by_hand(bench, tmp_path, {}, reference, "weights", KILL, changes=changes)
    for step in (5, 10):
        held = load_file(tmp_path / "fork" / "out" / f"checkpoint-{step}" / "resume" / "live_weights.safetensors")
        assert any(name.endswith("c_attn.base_layer.weight") for name in held)
