"""The laws on two and three gloo ranks. Three, because DDP's order of additions hides on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from selection import often

import contract

FIRST = {"event": "on_train_batch_end", "step": 4, "rank": 1}
EARLY = {"event": "on_train_batch_end", "step": 8, "rank": 1}
MIDDLE = {"event": "on_train_batch_end", "step": 12, "rank": 0}

COMBINED = {"combined": "max_size_cycle", "augment": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "map": (2, {"augment": True}),
    "workers": (2, {"augment": True, "workers": 1}),
    "stateful": (2, {"stateful": True, "augment": True}),
    "stateful-workers": (2, {"stateful": True, "augment": True, "workers": 1}),
    "sampler-with-a-generator": (2, {"weighted": True}),
    "epochs": (2, {"augment": True, "checkpoints": [{"every_n_train_steps": None, "every_n_epochs": 1}]}),
    "validation": (2, {"validate": True, "trainer": {"val_check_interval": 5}, "grows": True, **COMBINED}),
    "ema": (2, {"average": "ema"}),
    "device": (2, {"device": "walled", "augment": True, "validate": True}),
    "three-ranks": (3, {"width": 64}),
    "three-ranks-unused": (3, {"width": 64, "strategy": "ddp_find_unused_parameters_true"}),
}

SELDOM = (
    "workers",
    "stateful",
    "epochs",
    "ema",
    "three-ranks-unused",
)
"""They are varied on one rank too."""

UNSAVED = ("map", "three-ranks")
"""These are killed before their first save too, when nothing on the disk depends on the case."""


@pytest.mark.parametrize("case", often(CASES, "validation", seldom=SELDOM))
def test_killed_twice_equals_never(case: str, bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    ranks, config = CASES[case]
    kills = [*([FIRST] if case in UNSAVED else []), EARLY, MIDDLE]
    contract.interrupted_equals_uninterrupted(bench, tmp_path, config, reference(config, ranks), kills, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_another_number_of_ranks_is_refused(ranks: int, bench: contract.Bench, killed: Any, tmp_path: Path) -> None:
    killed(tmp_path, {"kill": {"event": "on_train_batch_end", "step": 8}}, 2)
    assert set(contract.committed(tmp_path / "out").values()) == {5}
    outcome = bench.run(tmp_path, {}, ranks=ranks)
    assert set(outcome.statuses) != {0}
    assert "was saved with number of ranks 2, this launch has" in outcome.output
    assert not any(contract.read_trace(tmp_path, ranks).steps), "nothing may be trained"
    assert set(contract.committed(tmp_path / "out").values()) == {5}


UNEVEN = {"validate": [24], "uneven": True, "trainer": {"val_check_interval": 7, "use_distributed_sampler": False}}
VALIDATION = {"event": "validation_step", "step": 7, "validated": 3, "within": 0}
STOPS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "rank 0 alone": (UNEVEN, [VALIDATION]),
    "rank 1 alone": (
        {**UNEVEN, "average": "ema"},
        [
            {"event": "on_train_batch_end", "step": 4},
            {**VALIDATION, "validated": 8},  # to its end, which puts the weights back in their place
            {**VALIDATION, "step": 10},  # of which there is a checkpoint
        ],
    ),
}


@pytest.mark.parametrize("whom", often(STOPS))
def test_a_stop_that_reaches_one_rank_stops_all(
    whom: str, bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    """Law 8 on two ranks, whose validations have 6 and 8 batches. Bare Lightning hangs when only rank 1 hears it."""
    config, sends = STOPS[whom]
    sends = [{**send, **contract.WHOM[whom]} for send in sends]
    contract.stopped_then_resumed(bench, tmp_path, config, reference(config, 2), *sends, ranks=2)


@pytest.mark.thorough
def test_ranks_that_log_other_metrics_save_under_the_names_of_rank_zero(bench: contract.Bench, tmp_path: Path) -> None:
    """Without ``sync_dist`` each rank has a ``val_loss`` of its own, and so another name for the same checkpoint."""
    names = {"filename": "{step}-{val_loss:.4f}", "every_n_train_steps": None, "every_n_epochs": 1, "save_top_k": 1}
    config = {"validate": [32], "checkpoints": [{"monitor": "val_loss", **names}]}
    bare = contract.uninterrupted(bench, tmp_path / "bare", {**config, "bare": True}, ranks=2)
    assert bare.final[0] is not None and bare.final[1] is not None
    assert bare.final[0]["logged"]["val_loss"] != bare.final[1]["logged"]["val_loss"]
    ours = contract.uninterrupted(bench, tmp_path / "ours", config, ranks=2)
    contract.require_same_end(ours, bare, ignore=("files", "best"))
    kills = [{"event": "on_train_batch_end", "step": 18}]
    contract.interrupted_equals_uninterrupted(bench, tmp_path / "killed", config, ours, kills, ranks=2)
    names_of_ranks = [final["best"][0][0] for final in (*ours.final, bare.final[0]) if final is not None]
    assert len(names_of_ranks) == 3 and len(set(names_of_ranks)) == 1


def test_a_rank_that_removes_late_prunes_with_the_others(bench: contract.Bench, reference: Any, tmp_path: Path) -> None:
    """What it finds on the disk then is not what the first rank found; both must do the same."""
    config = {"checkpoints": [{"save_top_k": 1}]}
    late = contract.uninterrupted(bench, tmp_path, {**config, "late_removal": True}, ranks=2)
    contract.require_same_end(late, reference(config, 2))
    assert len(contract.committed(tmp_path / "out")) <= 2


@pytest.mark.thorough
@contract.needs_own_disks
def test_nodes_with_disks_of_their_own_resume_from_what_both_have(
    bench: contract.Bench, reference: Any, tmp_path: Path
) -> None:
    config: dict[str, Any] = {}
    contract.nodes_with_own_disks_resume(bench, tmp_path, config, reference(config, 2), MIDDLE)
