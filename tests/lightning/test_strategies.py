"""The laws where the state is spread over the ranks: FSDP2 through ModelParallelStrategy, really run on gloo."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp1

import contract
from faults import flip

FIRST = {"event": "on_train_batch_end", "step": 8, "rank": 1}
SECOND = {"event": "on_train_batch_end", "step": 12, "rank": 0}

SHARDED: dict[str, Any] = {"strategy": "fsdp2"}
BEST = {"monitor": "val_loss", "save_top_k": 1, "every_n_train_steps": None, "save_last": True}  # in a window too
VALIDATE = {"validate": True, "trainer": {"val_check_interval": 5}, "checkpoints": [BEST]}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded": (3, {**SHARDED, "augment": True, "samples": 150}),
    "sharded-limited": (2, {**SHARDED, "checkpoints": [{"save_top_k": 1, "save_last": True}]}),
    "full": (2, {**SHARDED, "sharded": False, **VALIDATE}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Laws 1 and 2. Weights and the optimizer's moments are gathered from all ranks, and compared bit for bit."""
    ranks, config = CASES[case]
    expected = reference(config, ranks)
    assert sum(final["share"] for final in expected.final) == pytest.approx(1), (
        "every rank must hold a part of the weights"
    )
    assert expected.final[0]["moments"] != expected.final[0]["weights"]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, [FIRST, SECOND], ranks=ranks)
    found = contract.committed(tmp_path / "out")
    assert all((tmp_path / "out" / name).is_dir() == (case != "full") for name in found) and 21 in found.values()


@pytest.mark.thorough
def test_shards_that_are_copied_are_those_of_the_bare_trainer(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {
        **SHARDED,
        "width": 256,
        "checkpoints": [{"every_n_train_steps": 7}],
        "callback": {"stage": "memory"},
    }
    contract.staged_equals_bare(bench, reference, config, ranks=2, timeless=placeless)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, 2), [FIRST, SECOND], ranks=2)


def placeless(name: str, content: bytes) -> bytes:
    """Take out of a checkpoint's files where they lie; ModelCheckpoint saves its paths."""
    if not name.endswith("meta.pt"):
        return contract.without_place(name, content)
    text = repr(torch.load(io.BytesIO(content), weights_only=True))
    return re.sub(r"'/[^']*/(?=out\b)", "'", text).encode()


@pytest.mark.thorough
def test_a_damaged_shard_takes_the_previous_checkpoint(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 4, with the share of the rank that does not commit."""
    assert bench.run(tmp_path / "killed", {**SHARDED, "kill": SECOND}, ranks=2).killed
    newest = "epoch=1-step=10.ckpt"
    shard = next((tmp_path / "killed" / "out" / newest).glob("__1_*.distcp"))
    contract.damaged_is_passed_over(
        bench,
        tmp_path / "damaged",
        tmp_path / "killed",
        SHARDED,
        flip,
        f"{newest}/{shard.name}",
        newest=newest,
        before="epoch=0-step=5.ckpt",
        ranks=2,
    ).require_success()
    trace = contract.read_trace(tmp_path / "damaged", 2)
    contract.require_same_steps(trace, reference(SHARDED, 2), start=5)
    contract.require_same_end(trace, reference(SHARDED, 2))


@pytest.mark.thorough
def test_a_stop_that_reaches_one_rank_saves_every_share(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Law 8."""
    send = {"event": "on_train_batch_end", "step": 7, "rank": 1, "send": "SIGTERM"}
    contract.stopped_then_resumed(bench, tmp_path, SHARDED, reference(SHARDED, 2), send, ranks=2)


def test_weights_are_not_kept_alone_in_a_directory_of_shards(bench: contract.Bench, tmp_path: Path) -> None:
    outcome = bench.run(tmp_path, {**SHARDED, "keep": "KeepWeights(KeepEvery(5))"}, ranks=2)
    assert set(outcome.statuses) != {0} and "Keep these checkpoints whole" in outcome.output, outcome.output
    assert not any(contract.read_trace(tmp_path, 2).steps)


def test_cut_gradients_are_refused_on_another_number_of_ranks(bench: contract.Bench, tmp_path: Path) -> None:
    """A checkpoint that was saved between the two batches of a step is one of the number of ranks that saved it."""
    config = {
        **SHARDED,
        **VALIDATE,
        "trainer": {"val_check_interval": 3},
        "elastic": True,
        "rows": True,
        "dropout": 0.0,
        "samples": 48,
    }
    bench.run(tmp_path, {**config, "kill": {"event": "on_train_batch_end", "step": 2, "rank": 0}}, ranks=2)
    assert set(contract.committed(tmp_path / "out").values()) == {1}
    outcome = bench.run(tmp_path, {**config, "batch": 8})
    assert outcome.statuses == (1,)
    assert "in the middle of an accumulation" in outcome.output
    assert contract.read_trace(tmp_path).steps == ((),)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism_is_exact(ranks: int, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """Alone, and with FSDP2. Ranks that share tensors read the same batches, whose samples count once."""
    config = {**SHARDED, "tensor": 2}
    expected = reference(config, ranks)
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, expected, [FIRST], ranks=ranks)
    journal = (tmp_path / "out" / ".resume" / "journal.jsonl").read_text().splitlines()
    (resumed,) = (entry for entry in map(json.loads, journal) if entry["event"] == "resume")
    assert resumed["cursor"]["samples"] == 4 * (ranks // 2) * resumed["cursor"]["micro_batches"]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_fsdp1_starts_a_run(ranks: int, bench: contract.Bench, tmp_path: Path) -> None:
    """In one file as it is, and in shards once Lightning has merged them, as the refusal says."""
    config = {"samples": 50 * ranks, "sharded": ranks > 1, "trainer": {"max_steps": 9}}
    kill = {**FIRST, "rank": 0}
    killed = bench.run(tmp_path / "before", {**config, "strategy": "fsdp1", "bare": True, "kill": kill}, ranks=ranks)
    assert killed.killed, killed.output
    start = tmp_path / "before" / "out" / "epoch=0-step=5.ckpt"
    config |= {**SHARDED, "dump": True}
    if ranks > 1:
        refused = bench.run(tmp_path / "refused", {**config, "resume": str(start)}, ranks=ranks)
        (merge,) = {found[1] for found in re.finditer(r"`python (-m .*)` makes a file", refused.output)}
        subprocess.run([sys.executable, *merge.split()], cwd=tmp_path, check=True, timeout=240)
        start = tmp_path / "epoch=0-step=5-whole.ckpt"
    here = tmp_path / "here"
    bench.run(here, {**config, "resume": str(start)}, ranks=ranks).require_success()
    saved = torch.load(start, weights_only=False)
    fsdp1.require_loaded(here, saved["state_dict"], saved["optimizer_states"][0])
    assert contract.read_trace(here, ranks).first_step == 5
