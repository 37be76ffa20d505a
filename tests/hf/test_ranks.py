"""The laws on two and three gloo ranks. Three, because DDP's order of additions hides on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract

FIRST = {"event": "on_step_end", "step": 4, "rank": 1}
EARLY = {"event": "on_step_end", "step": 8, "rank": 1}
MIDDLE = {"event": "on_step_end", "step": 12, "rank": 0}
ARGS = {"ddp_backend": "gloo", "save_steps": 5}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "map": (2, {"samples": 100, "args": ARGS}),
    "augmented-workers": (2, {"samples": 100, "augment": True, "args": {**ARGS, "dataloader_num_workers": 1}}),
    "plain-sampler": (
        2,
        {"samples": 100, "augment": True, "args": {**ARGS, "accelerator_config": {"use_seedable_sampler": False}}},
    ),
    "dispatched-stream": (2, {"data": "stream", "samples": 100, "augment": True, "args": {**ARGS, "max_steps": 21}}),
    "dispatched-stream-filled-up": (2, {"data": "stream", "samples": 99, "args": {**ARGS, "max_steps": 21}}),
    "dispatched-stream-saved-at-its-end": (2, {"data": "stream", "samples": 80, "args": {**ARGS, "max_steps": 17}}),
    "three-ranks": (3, {"samples": 100, "args": ARGS, "width": 64}),
    "three-ranks-rebuilt-buckets": (
        3,
        {"width": 64, "samples": 100, "args": {**ARGS, "ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 1}},
    ),
    "ema": (2, {"ema": True, "samples": 100, "args": ARGS}),
    "own-buffers-of-lora": (
        2,
        {"lora": True, "beside_lora": True, "samples": 100, "args": {**ARGS, "ddp_broadcast_buffers": False}},
    ),
    "own-buffers": (2, {"running_mean": True, "samples": 100, "args": {**ARGS, "ddp_broadcast_buffers": False}}),
    "device": (
        2,
        {
            "device": "walled",
            "own_generator": True,
            "register_generator": True,
            "samples": 100,
            "args": {"save_steps": 5, "ddp_find_unused_parameters": False},
        },
    ),
}

SELDOM = (
    "augmented-workers",
    "plain-sampler",
    "dispatched-stream-filled-up",
    "ema",
    "own-buffers-of-lora",
)
"""They are varied on one rank too."""

UNSAVED = ("map", "three-ranks")
"""These are killed before their first save too, when nothing on the disk depends on the case."""


@pytest.mark.parametrize("case", often(CASES, "map", seldom=SELDOM))
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    ranks, config = CASES[case]
    kills = [*([FIRST] if case in UNSAVED else []), EARLY, MIDDLE]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, ranks), kills, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_another_number_of_ranks_is_refused(ranks: int, bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    config = {"samples": 100, "args": ARGS}
    killed(tmp_path, {**config, "kill": {"event": "on_step_end", "step": 8}}, 2)
    assert contract.committed(tmp_path / "out") == {"checkpoint-5": 5}
    alone = {"samples": 100, "args": {name: value for name, value in ARGS.items() if name != "ddp_backend"}}
    outcome = bench.run(tmp_path, alone if ranks == 1 else config, ranks=ranks)
    assert set(outcome.statuses) != {0}
    assert "was saved with number of ranks 2, this launch has" in outcome.output
    assert not any(contract.read_trace(tmp_path, ranks).steps), "nothing may be trained"
    assert contract.committed(tmp_path / "out") == {"checkpoint-5": 5}


def test_a_rank_without_its_random_state_takes_everyone_to_the_previous_checkpoint(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config = {"samples": 100, "args": ARGS}
    bench.run(tmp_path, {**config, "kill": {"event": "on_step_end", "step": 12}}, ranks=2)
    (tmp_path / "out" / "checkpoint-10" / "rng_state_1.pth").unlink()
    outcome = bench.run(tmp_path, config, ranks=2).require_success()
    assert "checkpoint-10 is damaged: rank 0: rng_state_1.pth cannot be read" in outcome.output
    trace = contract.read_trace(tmp_path, 2)
    contract.require_same_steps(trace, reference(config, 2), start=5)
    contract.require_same_end(trace, reference(config, 2))


@pytest.mark.thorough
@contract.needs_own_disks
def test_nodes_with_disks_of_their_own_resume_from_what_both_have(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"samples": 100, "args": ARGS}
    contract.nodes_with_own_disks_resume(bench, tmp_path, config, reference(config, 2), MIDDLE)
