"""The other laws for a DeepSpeed loop, each with real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from resume_adapters.integrations.deepspeed_engine.files import ForeignCheckpoints
from selection import often
from waiting import LIMIT

import contract
import stores
from faults import DAMAGES
from launch import is_installed

KILL = {"event": "step_end", "step": 18}
PLAIN: dict[str, Any] = {"stage": 2, "augment": True}
TWO: dict[str, Any] = {"stage": 2, "rank_seeds": True, "augment": True}


# ---- Law 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "config"),
    [(1, {"augment": True, "precision": "fp16", "stage": 1}), (2, {"stage": 3, "loader": "own", "set_epoch": True})],
    ids=["one rank", "two ranks"],
)
def test_an_uninterrupted_run_is_the_bare_one(
    ranks: int, config: dict[str, Any], bench: contract.Bench, reference: Any
) -> None:
    """Law 0: same losses, same weights, same native files."""
    directories = contract.uninterrupted_equals_bare(bench, reference, config, ranks=ranks)
    latest = [(each / "latest").read_text().strip() for each in directories]
    assert latest[0] == latest[1]


# ---- Law 1, elsewhere than in the middle

MOMENTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "saved every five steps": (
        {},
        {
            "first step": {"event": "step_end", "step": 1},
            "at the end of an epoch": {"event": "epoch_end", "step": 25},
        },
    ),
    "saved at the end of each epoch": (
        {"samples": 40, "save_every": 10},
        {"right after a save at the end of an epoch": {"event": "epoch_begin", "step": 20}},
    ),
    "stopped in mid-epoch": (
        {"max_steps": 31},
        {"in the last epoch, after max_steps": {"event": "step_end", "step": 31}},
    ),
}
"""Runs that are alike, each with the moments at which its launches are killed, one after the other."""


@pytest.mark.thorough
@pytest.mark.parametrize("chain", MOMENTS)
def test_killed_at_any_moment(chain: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Each launch of a chain is killed at the next of its moments, and the last one runs to the end."""
    changes, kills = MOMENTS[chain]
    config = {**PLAIN, "begins": True, **changes}
    expected = reference(config)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, list(kills.values()))


# ---- Law 3

SAVES = {"stage": 2, "max_steps": 6, "save_every": 2, "keep": "KeepLast(1)"}
LEAVING = [{6}, {4, 6}]


OPERATIONS = contract.operations(
    "global_step2",
    "global_step4",
    "global_step4/resume",
    contract.Operation("os.mkdir", rf"{contract.BEGUN}global_step4", 2, 2),
    superseded=("global_step6", 6),
)


@pytest.mark.parametrize(
    "operation", often(OPERATIONS, "lets the framework write", "commits", "moves latest", "gives the new one its name")
)
def test_killed_before_it(operation: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 3: before each kind of operation of saving, committing and pruning. Accelerate's tests take all."""
    contract.killed_before_an_operation(
        bench, tmp_path, SAVES, reference(SAVES), OPERATIONS[operation], leaving=LEAVING
    )


OF_RANK_ONE = {
    "its shard": contract.Operation("os.mkdir", rf"{contract.BEGUN}global_step4", 2),
    "its tensors": contract.Operation("open", rf"{contract.BEGUN}global_step4/resume/rank-00001\.safetensors", 2),
    "its state": contract.Operation("open", rf"{contract.BEGUN}global_step4/resume/rank-00001\.json", 2),
    "the first": contract.Operation("open", rf"{contract.BEGUN}global_step2/resume/rank-00001\.json", 0),
}


@pytest.mark.parametrize("operation", often(OF_RANK_ONE, "its shard"))
def test_killed_before_an_operation_of_rank_one(
    operation: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Its shard, and what it saves beside it: rank zero neither commits nor moves ``latest``."""
    config = {**SAVES, "on_rank": 1}
    contract.killed_before_an_operation(
        bench, tmp_path, config, reference(config, 2), OF_RANK_ONE[operation], leaving=LEAVING, ranks=2
    )


# ---- Law 4


@pytest.fixture(scope="session")
def three_checkpoints(bench: contract.Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("three")
    assert bench.run(directory, {**TWO, "epochs": 6, "kill": KILL}, ranks=2).killed
    assert contract.committed(directory / "out").keys() == {"global_step5", "global_step10", "global_step15"}
    return directory


FILES = {
    "mp_rank_00_model_states.pt": "flipped",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": "zeroed",
    "zero_pp_rank_1_mp_rank_00_optim_states.pt": "cut",
    "resume/rank-00001.safetensors": "removed",
    "resume/manifest.json": "emptied",
}


def test_any_damage_of_any_file_is_found(three_checkpoints: Path, tmp_path: Path) -> None:
    """Law 4, without a launch."""
    contract.every_damage_is_found(
        three_checkpoints / "out",
        tmp_path / "out",
        [f"global_step15/{name}" for name in FILES],
        ForeignCheckpoints(2, 2),
        newest="global_step15",
        before="global_step10",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_takes_everyone_to_the_previous_checkpoint(
    name: str, three_checkpoints: Path, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Law 4. One of the files is resumed from to the end; the others are checked to be found and named."""
    config = {**TWO, "epochs": 6}
    to_the_end = "rank_1" in name
    stop = {} if to_the_end else {"kill": {"event": "epoch_begin", "step": 10}}
    contract.damaged_is_passed_over(
        bench,
        tmp_path / "run",
        three_checkpoints,
        {**config, **stop},
        DAMAGES[FILES[name]],
        f"global_step15/{name}",
        newest="global_step15",
        before="global_step10",
        ranks=2,
    )
    assert to_the_end or (tmp_path / "run" / "out" / "latest").read_text() == "global_step10\n"
    if to_the_end:
        trace = contract.read_trace(tmp_path / "run", 2)
        contract.require_same_steps(trace, reference(config, 2), start=10)
        contract.require_same_end(trace, reference(config, 2))


@pytest.mark.parametrize("torn", often(["", "global_step99", "\0\0\0"], "global_step99"))
def test_a_torn_latest_is_mended(torn: str, three_checkpoints: Path, bench: contract.Bench, tmp_path: Path) -> None:
    shutil.copytree(three_checkpoints, tmp_path / "run")
    (tmp_path / "run" / "out" / "latest").write_text(torn)
    config = {**TWO, "epochs": 6, "kill": {"event": "epoch_begin", "step": 15}}
    outcome = bench.run(tmp_path / "run", config, ranks=2)
    assert "Resuming from global_step15." in outcome.output
    assert (tmp_path / "run" / "out" / "latest").read_text() == "global_step15\n"


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        (1, {}, "was saved with number of ranks 2, this launch has"),
        (2, {"stage": 1}, "was saved with ZeRO stage 2, this launch has 1"),
        (2, {"width": 20}, "was saved from another model"),
    ],
    ids=["ranks", "stage", "model"],
)
def test_another_shape_of_the_run_is_refused(
    ranks: int, changes: dict[str, Any], message: str, three_checkpoints: Path, bench: contract.Bench, tmp_path: Path
) -> None:
    shutil.copytree(three_checkpoints, tmp_path / "run")
    outcome = bench.run(tmp_path / "run", {**TWO, **changes}, ranks=ranks)
    assert set(outcome.statuses) != {0} and message in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path / "run", ranks).steps), "nothing may be trained"
    assert max(contract.committed(tmp_path / "run" / "out").values()) == 15


# ---- Law 5


def test_the_best_and_the_anchor_survive(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 5: tags beyond the policy go, the best stays, and so does what a restart takes."""
    config = {**PLAIN, "keep": "KeepLast(1)", "scores": {"7": 1.0, "21": 2.0}, "save_every": 4}
    kills = [{"event": "step_end", "step": 14}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), kills)
    assert contract.committed(tmp_path / "out") == {"global_step7": 7, "global_step37": 37}


# ---- Law 8


def test_a_stop_saves_then_leaves(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    send = {"event": "backward", "step": 12, "send": "SIGTERM"}
    contract.stopped_then_resumed(bench, tmp_path, PLAIN, reference(PLAIN), send)


@pytest.mark.thorough
def test_a_stop_that_reaches_one_rank_stops_all(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    send = {"event": "batch_end", "step": 12, "send": "SIGUSR1", "rank": 1}
    contract.stopped_then_resumed(bench, tmp_path, TWO, reference(TWO, 2), send, ranks=2)


# ---- Law 10, and checkpoints of the bare engine


def test_the_bare_engine_loads_the_newest_committed_checkpoint(
    three_checkpoints: Path, bench: contract.Bench, tmp_path: Path
) -> None:
    shutil.copytree(three_checkpoints, tmp_path / "run")
    # A kill right after a commit may leave ``latest`` at the one before, which is whole too; a start mends that.
    assert bench.run(tmp_path / "run", {**TWO, "kill": {"event": "epoch_begin", "step": 15}}, ranks=2).killed
    bench.run(tmp_path / "run", {**TWO, "bare": True, "native": True}, ranks=2).require_success()
    for rank in range(2):
        line = json.loads((tmp_path / "run" / f"trace.{rank}").read_text().splitlines()[-1])
        assert (Path(line["loaded"]).parent.name, line["step"]) == ("global_step15", 15)


@pytest.mark.thorough
def test_a_run_under_way_is_taken_over(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """From the newest checkpoint of ``save_checkpoint`` that is whole; ``latest`` says another."""
    config = {"stage": 2, "loader": "own", "set_epoch": True}
    assert bench.run(tmp_path, {**config, "bare": True, "kill": KILL}, ranks=2).killed
    (tmp_path / "out" / "global_step15" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    outcome = bench.run(tmp_path, config, ranks=2).require_success()
    assert "global_step15 is damaged" in outcome.output and "Resuming from global_step10." in outcome.output
    for rank in range(2):
        expected = [line for line in reference(config, 2).steps[rank] if line["step"] >= 10]
        found = contract.read_trace(tmp_path, 2).steps[rank]
        for name in ("step", "batch", "lr"):  # the losses differ with dropout, whose state nobody saved
            assert [line[name] for line in found] == [line[name] for line in expected]


class Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def test_a_pickle_that_runs_code_is_not_loaded(bench: contract.Bench, tmp_path: Path) -> None:
    assert bench.run(tmp_path, {"bare": True, "kill": KILL}).killed
    file = tmp_path / "out" / "global_step15" / "mp_rank_00_model_states.pt"
    torch.save({"global_steps": 15, "module": Code()}, file, pickle_module=pickle)
    outcome = bench.run(tmp_path, {})
    assert outcome.statuses == (1,) and "posix.mkdir, and loading them could run code" in outcome.output
    assert not (tmp_path / "executed").exists()


def test_what_could_not_be_loaded_is_refused_at_the_first_save(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {"scheduler": "object"})
    assert outcome.statuses == (1,) and "mp_rank_00_model_states.pt holds objects of __main__.Warmup" in outcome.output
    assert contract.committed(tmp_path / "out") == {}


def test_without_room_on_one_rank_no_rank_commits_or_hangs(bench: contract.Bench, tmp_path: Path) -> None:
    config = {**TWO, "width": 64, "file_limit": 20_000, "on_rank": 1}
    outcome = bench.start(tmp_path, config, ranks=2).wait(survivors=LIMIT)
    assert outcome.statuses == (1, 1)
    assert "rank 1 could not write global_step5" in outcome.output and "It is not committed" in outcome.output
    assert contract.committed(tmp_path / "out") == {}
    assert not (tmp_path / "out" / "latest").exists()


@pytest.mark.thorough
def test_a_run_trains_on_after_a_save_that_failed(
    reference: contract.References, bench: contract.Bench, tmp_path: Path
) -> None:
    config = {**TWO, "options": {"on_save_error": "continue"}, "width": 64, "on_rank": 1}
    contract.trains_on_after_a_failed_save(
        bench, tmp_path, {**config, "file_limit": 20_000}, reference({**TWO, "width": 64}, 2), ranks=2
    )


# ---- Export


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_export_puts_the_pieces_together(stage: int, bench: contract.Bench, tmp_path: Path) -> None:
    """In single precision, as DeepSpeed does it; these are the weights that the run ended with."""
    config = {**TWO, "stage": stage, "max_steps": 3}
    bench.run(tmp_path, config, ranks=2).require_success()
    names = [f"{layer}.{name}" for layer in ("first", "middle", "last") for name in ("weight", "bias")]
    contract.export_is_the_model(tmp_path, "out", names, ranks=2)


# ---- Finished runs, and what is refused


def test_a_finished_run_launched_again_does_nothing(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    same = ["weights", "global_steps"]
    contract.finished_does_nothing_again(bench, tmp_path, reference, {**TWO, "max_steps": 8}, same, ranks=2)


SEQUENCES = {"sequence_parallel_size": 2, "data_parallel_size": 1}
REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "repeating loader": (1, {"loader": "repeating"}, "a RepeatingLoader has begun its first pass already"),
    "no state": (1, {"options": {"thing": 3}}, "has no state_dict()"),
    "sequence parallelism": (2, {"config": SEQUENCES}, "spread over 2 ranks in `sequence parallelism`"),
    "weights alone": (
        1,
        {"keep": "KeepWeights(KeepEvery(5))"},
        "Keep these checkpoints whole, with KeepEvery(steps=5)",
    ),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_settings_without_an_exact_resume_are_refused(setting: str, bench: contract.Bench, tmp_path: Path) -> None:
    ranks, config, message = REFUSED[setting]
    outcome = bench.run(tmp_path, config, ranks=ranks)
    assert 0 not in outcome.statuses and message in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path, ranks).steps)


# ---- Law 12


@pytest.mark.thorough
@pytest.mark.long
def test_a_hundred_runs_of_one_engine_leave_nothing(bench: contract.Bench, tmp_path: Path) -> None:
    tensorboard = {"enabled": True, "output_path": "logs", "job_name": "run"}
    trackers = {"tensorboard": tensorboard} if importlib.util.find_spec("tensorboard") else {}
    config = {"loader": "own", "batch_norm": True, "save_every": 1, "accumulate": 1, "config": trackers}
    contract.opened_and_closed_leaves_nothing(bench, tmp_path, config)


# ---- Saves that are copied, and written in the background


def staged(zero: int = 2) -> dict[str, Any]:
    return {"augment": True, "stage": zero, "options": {"stage": "memory"}}


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "zero"), [(1, 1), (2, 2), (2, 3)])
def test_the_files_are_those_of_the_bare_engine(ranks: int, zero: int, bench: contract.Bench, reference: Any) -> None:
    config = staged(zero)
    contract.staged_equals_bare(bench, reference, config, ranks=ranks)


def test_killed_twice_with_copies_equals_never(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    kills = [{"event": "step_end", "step": step} for step in (12, 18)]
    config = staged()
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config), kills)


@pytest.mark.parametrize("operation", often(contract.STAGED, "lets the framework write", "commits"))
def test_killed_before_it_with_copies(operation: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {**SAVES, **staged()}
    contract.killed_before_an_operation(
        bench, tmp_path, config, reference(config), OPERATIONS[operation], leaving=LEAVING
    )


@pytest.mark.thorough
def test_killed_between_copy_and_commit(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {**staged(), "save_every": 2}
    contract.between_copy_and_commit(bench, tmp_path, config, reference(config), "step_end")


def test_an_empty_machine_resumes_from_the_mirror(
    bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    contract.an_empty_machine_resumes(bench, tmp_path, PLAIN, reference(PLAIN), KILL)


@pytest.mark.thorough
def test_a_kill_loses_no_step_that_memory_has(
    bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    contract.a_kill_loses_no_step_that_memory_has(bench, tmp_path, PLAIN, reference(PLAIN), KILL)


def test_a_run_directory_below_a_file_is_refused(bench: contract.Bench, tmp_path: Path) -> None:
    contract.no_run_directory_below_a_file(bench, tmp_path, TWO, ranks=2)


# ---- In interpreters of their own, which have imported nothing before the job


@pytest.mark.thorough
@pytest.mark.long
def test_the_laws_hold_in_fresh_interpreters(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    config = {"stage": 2, "augment": True, "ema": True}
    contract.laws_in_fresh_interpreters(
        bench,
        tmp_path,
        config,
        reference(config),
        commit=contract.Operation("os.rename", rf"global_step15/resume/{contract.temporary('manifest.json')}", 10),
        damaged="global_step10/mp_rank_00_model_states.pt",
        send={"event": "backward", "step": 17},
    )


# ---- A run that an older version of the package has begun


def test_an_older_run_goes_on(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    contract.older_run_goes_on(bench, tmp_path / "run", reference, "deepspeed", deepspeed.__version__)


# ---- The step trace


def test_the_trace_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    bench: contract.Bench, reference: contract.References, tmp_path: Path
) -> None:
    """ZeRO keeps the weights that are stepped in flat partitions, and the gradient norm is the engine's."""
    config = {"stage": 2, "augment": True, "epochs": 2, "save_every": None}
    quantities = ("batches", "rng", "loss", "lr", "grad_norm")
    kill = {"event": "step_end", "step": 13}
    contract.traces_are_equal(bench, reference, tmp_path, config, kill, quantities=quantities)


# ---- The run of each tracker


@pytest.mark.skipif(not is_installed("tensorboard"), reason="the extra `trackers` installs it")
def test_the_monitor_of_the_engine_continues_the_run(bench: contract.Bench, tmp_path: Path) -> None:
    config = {"config": {"tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"}}}
    kill = {"event": "step_end", "step": 18}
    stores.continue_the_run(bench, tmp_path, config, kill, trackers=["tensorboard"])
