"""The same seed gives the same faults, each where it can happen and where it costs steps."""

from __future__ import annotations

import dataclasses

import pytest

from resume_adapters.cli.drill.drill import facts_of
from resume_adapters.cli.drill.faults import KINDS, Facts, choose
from resume_adapters.cli.drill.job import LaunchTrace
from resume_adapters.errors import UnsupportedSetting

FACTS = Facts(60, {step: 30 + step for step in range(5, 61, 5)}, dict.fromkeys(range(20, 61, 5), 9), 2, True)


@pytest.mark.parametrize("seed", range(20))
def test_each_kind_falls_where_it_can_happen(seed):
    plan = choose(FACTS, list(KINDS), seed)
    assert plan == choose(FACTS, list(KINDS), seed)
    assert sorted(fault.kind for fault in plan.faults) == sorted(KINDS)
    assert plan.left_out == {}
    steps = [fault.step for fault in plan.faults]
    assert steps == sorted(set(steps))
    for fault in plan.faults:
        assert 5 < fault.step < 60
        assert (fault.step % 5 == 0) == (fault.kind in ("save", "prune"))
        assert (fault.rank in (0, 1)) if fault.kind == "rank" else fault.rank is None
        if fault.kind == "save":
            assert 1 <= fault.operation <= FACTS.saves[fault.step]
        elif fault.kind == "prune":
            assert fault.step >= 20 and 1 <= fault.operation <= 9


def test_faults_keep_apart():
    """With as many saves as faults, no two kills fall between the same two commits."""
    for seed in range(10):
        faults = choose(FACTS, ["step"] * 10, seed).faults
        assert len({(fault.step - 1) // 5 for fault in faults}) == 10


def test_kinds_that_do_not_apply_are_left_out_with_the_reason():
    alone = dataclasses.replace(FACTS, prunes={}, ranks=1, has_launcher=False)
    plan = choose(alone, list(KINDS), 0)
    assert plan.left_out == {
        "prune": "the reference removed no checkpoint",
        "rank": "there is one rank",
        "launcher": "no process launches the ranks",
    }
    with pytest.raises(UnsupportedSetting, match="none of these faults applies"):
        choose(alone, ["rank"], 0)
    crowded = choose(dataclasses.replace(FACTS, last=9), ["step"] * 5, 0)
    assert len(crowded.faults) == 3
    assert crowded.left_out == {"step": "no step is left for it"}


def test_only_one_save_is_enough_and_every_step_may_be_saved():
    assert choose(FACTS, ["save"], 0).faults[0].step in range(10, 60, 5)
    once = choose(dataclasses.replace(FACTS, saves={5: 30}, last=9), ["save", "step"], 0)
    assert {fault.kind: fault.step for fault in once.faults}["save"] == 5
    always = choose(dataclasses.replace(FACTS, saves=dict.fromkeys(range(1, 10), 7), last=9), ["step"], 0)
    assert 1 < always.faults[0].step < 9


@pytest.mark.parametrize("saves", [{}, {60: 12}, {59: 12}])
def test_a_run_that_saves_too_late_is_refused_with_what_to_do(saves):
    with pytest.raises(UnsupportedSetting, match=r"60 steps, so no launch could resume: .*--steps N.*--save-every N"):
        choose(dataclasses.replace(FACTS, saves=saves), ["step"], 0)


def test_facts_are_read_from_the_reference(traces):
    events = [
        {"event": "committed", "rank": 0, "step": 5, "operations": 31},
        {"event": "committed", "rank": 1, "step": 5, "operations": 8},
        {"event": "prune", "rank": 0, "names": [], "operations": 0},
        {"event": "committed", "rank": 0, "step": 10, "operations": 33},
        {"event": "prune", "rank": 0, "names": ["checkpoint-5"], "operations": 9},
        {"event": "save", "rank": 0, "step": 12, "name": "checkpoint-12"},
    ]
    launch = traces.launch(1, range(1, 13), ranks=2)
    launch = LaunchTrace(1, (*launch.events, *events))
    assert facts_of(launch, launched=99) == Facts(12, {5: 31, 10: 33, 12: 33}, {10: 9}, 2, True)
    assert not facts_of(launch, launched=101).has_launcher
