"""The laws under Fabric's ModelParallelStrategy, really run on gloo: FSDP2, HSDP and tensor parallelism."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract
from faults import flip

FIRST = {"event": "step_end", "step": 8}
SECOND = {"event": "step_end", "step": 13}
SHARDED: dict[str, Any] = {"shards": "sharded", "samples": 100, "augment": True}
FULL = {**SHARDED, "shards": "full"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {**SHARDED, "samples": 50}),
    "sharded": (2, {**SHARDED, "batch_norm": True, "begins": True}),
    "three": (3, {**SHARDED, "samples": 150, "compile": True}),
    "full": (2, FULL),
    "stateless": (2, {**SHARDED, "stateless": True, "unpassed": True}),
    "stateless-full": (2, {**FULL, "stateless": True}),
    "tensor": (2, {**SHARDED, "tensor": 2, "samples": 50}),
    "fsdp2-tensor": (4, {**SHARDED, "tensor": 2}),
    "hybrid": (4, {**SHARDED, "replicas": 2, "samples": 200}),
}


@pytest.mark.parametrize("case", often(CASES, seldom=("three", "stateless-full", "tensor")))
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Laws 1 and 2. Weights and the optimizer's moments are gathered from all ranks, and compared bit for bit."""
    ranks, config = CASES[case]
    expected = reference(config, ranks)
    kills = [{**FIRST, "rank": ranks - 1}, {**SECOND, "rank": 0}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, kills, ranks=ranks)
    assert ranks == 1 or all(final["share"] < 0.9 for final in expected.final), "every rank must hold a part"
    journal = map(json.loads, (tmp_path / "out" / ".resume" / "journal.jsonl").read_text().splitlines())
    cursors = [entry["cursor"] for entry in journal if entry["event"] == "resume"]
    reading = ranks // config.get("tensor", 1)
    assert [each["samples"] == 4 * reading * each["micro_batches"] for each in cursors] == [True, True]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config",
    [pytest.param(SHARDED, id="sharded"), pytest.param({**FULL, "stateless": True}, id="full", marks=pytest.mark.long)],
)
def test_a_copied_save_is_that_of_the_bare_run(
    config: dict[str, Any], bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Law 0, and law 1 for what was copied."""
    config = {**config, "width": 256, "save_every": 2, "options": {"stage": "memory"}}
    contract.staged_equals_bare(bench, reference, config, ranks=2, timeless=contract.without_place)
    kills = [{**SECOND, "rank": 0}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, 2), kills, ranks=2)


ORDINARY: dict[str, Any] = {"samples": 48, "dropout": 0.0, "shards": "sharded", "save_every": 3, "epochs": 5}


def on(ranks: int, kill: int | None = None, **config: Any) -> tuple[int, dict[str, Any]]:
    """Return a launch whose batches have six samples on all ranks together; it is killed after a step."""
    strike = {**FIRST, "step": kill, "rank": 0} if kill else None
    return ranks, {**ORDINARY, "batch": 6 // ranks, **config, "kill": strike}


LAUNCHES = {
    "2 to 1": [on(2, 7), on(1)],
    "1 to 2 to 3": [on(1, 5), on(2, 11), on(3)],
    "2 to 3 to 1, in one file": [on(2, 5, shards="full"), on(3, 11, shards="full"), on(1, shards="full")],
    "1 to 2, from shards to one file and back": [on(1, 5), on(2, 11, shards="full"), on(1)],
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", LAUNCHES)
def test_another_number_of_ranks_goes_on(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 7, with the sampler that Fabric puts in, on one rank too."""
    ranks, config = LAUNCHES[case][0]
    expected = reference({**config, "kill": None}, ranks)
    contract.same_samples_on_any_topology(bench, tmp_path, expected, LAUNCHES[case], tolerance=1e-5)


@pytest.mark.thorough
def test_a_damaged_shard_takes_the_previous_checkpoint(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 4, with the share of the rank that does not commit."""
    assert bench.run(tmp_path / "killed", {**SHARDED, "kill": {**SECOND, "rank": 0}}, ranks=2).killed
    contract.damaged_is_passed_over(
        bench,
        tmp_path / "damaged",
        tmp_path / "killed",
        SHARDED,
        flip,
        "step-10/fabric.ckpt/__1_0.distcp",
        newest="step-10",
        before="step-5",
        ranks=2,
    ).require_success()
    trace = contract.read_trace(tmp_path / "damaged", 2)
    contract.require_same_steps(trace, reference(SHARDED, 2), start=5)
    contract.require_same_end(trace, reference(SHARDED, 2))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "config", [pytest.param(SHARDED, id="sharded"), pytest.param(FULL, id="full", marks=pytest.mark.long)]
)
def test_the_shell_reads_what_was_saved(config: dict[str, Any], reference: Any) -> None:
    reference(config, 2)
    directory = reference.directory(config, 2)
    subprocess.run([sys.executable, "-m", "resume_adapters.cli", "verify", directory / "out"], check=True, timeout=240)
    contract.export_is_the_model(directory, "out", ["0.weight", "0.bias", "4.weight", "4.bias"], ranks=2)


@pytest.mark.thorough
@pytest.mark.parametrize("config", [SHARDED, FULL], ids=["sharded", "full"])
def test_a_plain_script_loads_what_was_saved(
    config: dict[str, Any], bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Law 10."""
    last = max(contract.committed(reference.directory(config, 2) / "out").items(), key=lambda item: item[1])[0]
    path = reference.directory(config, 2) / "out" / last / "fabric.ckpt"
    bench.run(tmp_path, {**config, "bare": True, "load": str(path), "epochs": 0}, ranks=2).require_success()
    final, expected = contract.read_trace(tmp_path, 2).final[0], reference(config, 2).final[0]
    assert final is not None and all(final[name] == expected[name] for name in ("weights", "optimizer"))


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "another model": ({"width": 32}, 2, "0.weight: saved float32[16, 8], the model has float32[32, 8]"),
    "another sharing of tensors": ({"tensor": 2}, 2, "was saved with tensor_parallel_size 1, this launch has 2"),
    "another name": ({"called": "net"}, 2, "was saved with model, optimizer, schedule; this launch gives net"),
    "nothing distributed": ({"shards": "none"}, 2, "saves one model, which its parallelize_fn has distributed"),
    "two models": ({"second": True}, 2, "register_for_resume() was given model, second: pass one"),
    "weights alone": ({"keep": "KeepWeights(KeepEvery(5))"}, 2, "Keep these checkpoints whole"),
    "an unknown dimension": ({"dimension": "stages"}, 2, "spread over 2 ranks in `stages`"),
}


@pytest.mark.parametrize("what", often(REFUSED, "another name", "nothing distributed", "an unknown dimension"))
def test_what_would_not_be_exact_is_refused(what: str, bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    change, ranks, words = REFUSED[what]
    killed(tmp_path, {**SHARDED, "kill": {**FIRST, "rank": 0}}, 2)
    outcome = bench.run(tmp_path, {**SHARDED, **change}, ranks=ranks)
    assert 1 in outcome.statuses and words in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path, ranks).steps), "nothing may be trained"
