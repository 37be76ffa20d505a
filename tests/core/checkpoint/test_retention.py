"""Retention as a pure plan: nothing precious goes, and everything has its reason."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resume_adapters import KeepAll, KeepBest, KeepEvery, KeepLast, KeepWeights, KeepWithin, Policy
from resume_adapters.core.checkpoint.retention import Candidate, KeepUnless, plan_retention
from resume_adapters.errors import UnsupportedSetting

NOW = 1e6
values = st.sampled_from([0.0, 1.0, 1.0, 2.0, -3.5, None, math.nan, math.inf, -math.inf])
counting = st.one_of(
    st.just(KeepAll()),
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepBest, st.integers(1, 4), st.sampled_from(["loss", "other"]), st.sampled_from(["min", "max"])),
    st.builds(KeepEvery, st.integers(1, 30)),
    st.builds(KeepWithin, st.integers(0, 100).map(lambda seconds: timedelta(seconds=seconds))),
)
single = st.one_of(counting, counting.map(KeepWeights))
policies = st.lists(single, min_size=1, max_size=4).map(lambda parts: _joined(parts))


def _joined(parts: list[Policy]) -> Policy:
    joined = parts[0]
    for part in parts[1:]:
        joined = joined | part
    return joined


@st.composite
def checkpoints(draw: st.DrawFn) -> list[Candidate]:
    steps = draw(st.lists(st.integers(0, 60), max_size=12))
    return [
        Candidate(
            name=f"checkpoint-{index}",
            step=step,
            written=NOW - draw(st.integers(-10, 200)),
            metrics=draw(st.dictionaries(st.sampled_from(["loss", "other"]), values, max_size=2)),
            superseded=draw(st.booleans()) and draw(st.booleans()),
            weights_only=draw(st.booleans()) and draw(st.booleans()),
        )
        for index, step in enumerate(steps)
    ]


@given(checkpoints(), policies, st.data())
def test_anchor_and_best_are_kept_whatever_the_policy_and_the_metrics(
    found: list[Candidate], policy: Policy, data: st.DataObject
) -> None:
    names = [candidate.name for candidate in found]
    anchor = data.draw(st.sampled_from([None, "gone", *names]))
    best = data.draw(st.sampled_from([None, "gone", *names]))
    decided = plan_retention(found, policy, now=NOW, anchor=anchor, best=best)
    assert {anchor, best} & set(names) <= set(decided.keep)
    assert not {anchor, best} & {*decided.remove, *decided.thin}


@given(checkpoints(), policies)
def test_every_checkpoint_is_kept_or_removed_once_with_a_reason(found: list[Candidate], policy: Policy) -> None:
    decided = plan_retention(found, policy, now=NOW, anchor=None)
    planned = {**decided.keep, **decided.thin, **decided.remove}
    assert len(planned) == len(decided.keep) + len(decided.thin) + len(decided.remove)
    assert all(planned.values())
    left = {each.name for each in found} - planned.keys()
    weights_only = {each.name for each in found if each.weights_only and not each.superseded}
    assert left == (weights_only if policy.of_weights is None else set())
    assert not {*decided.thin} & weights_only
    steps = {candidate.name: candidate.step for candidate in found}
    order = [steps[name] for name in decided.remove]
    assert order == sorted(order), "the oldest goes first: a prune that is cut short leaves the newer ones"


@given(checkpoints(), st.lists(single, min_size=1, max_size=4))
def test_joined_policies_keep_the_union_of_what_each_keeps(found: list[Candidate], parts: list[Policy]) -> None:
    alone = [set(plan_retention(found, part, now=NOW, anchor=None).keep) for part in parts]
    assert set(plan_retention(found, _joined(parts), now=NOW, anchor=None).keep) == set().union(*alone)


@given(checkpoints(), policies)
def test_a_plan_does_not_depend_on_the_order_in_which_a_directory_is_listed(
    found: list[Candidate], policy: Policy
) -> None:
    distinct = list({candidate.step: candidate for candidate in found}.values())
    forward = plan_retention(distinct, policy, now=NOW, anchor=None)
    assert forward.keep.keys() == plan_retention(distinct[::-1], policy, now=NOW, anchor=None).keep.keys()


@given(checkpoints(), policies)
def test_applying_a_plan_twice_removes_nothing_more(found: list[Candidate], policy: Policy) -> None:
    plan = plan_retention(found, policy, now=NOW, anchor=None)
    rest = [
        dataclasses.replace(each, weights_only=each.weights_only or each.name in plan.thin)
        for each in found
        if each.name not in plan.remove
    ]
    again = plan_retention(rest, policy, now=NOW, anchor=None)
    assert (again.remove, again.thin) == ({}, {})


@given(checkpoints(), policies)
def test_a_superseded_checkpoint_counts_for_nothing(found: list[Candidate], policy: Policy) -> None:
    decided = plan_retention(found, policy, now=NOW, anchor=None)
    current = [candidate for candidate in found if not candidate.superseded]
    assert decided.keep == plan_retention(current, policy, now=NOW, anchor=None).keep
    for candidate in found:
        if candidate.superseded:
            assert decided.remove[candidate.name] == "saved again under its name"


@given(checkpoints(), st.integers(1, 4), st.sampled_from(["min", "max"]))
def test_no_kept_best_is_worse_than_one_that_goes(found: list[Candidate], count: int, mode: str) -> None:
    current = [
        candidate
        for candidate in found
        if not (candidate.superseded or candidate.weights_only) and math.isfinite(candidate.metrics.get("loss") or 0.0)
    ]
    scores = {each.name: each.metrics["loss"] for each in current if each.metrics.get("loss") is not None}
    kept = plan_retention(found, KeepBest(count, "loss", mode), now=NOW, anchor=None).keep
    assert set(kept) <= set(scores), "what has no finite metric is no best"
    assert len(kept) == min(count, len(scores))
    sign = 1 if mode == "min" else -1
    for gone in set(scores) - set(kept):
        assert all(sign * scores[name] <= sign * scores[gone] for name in kept)  # type: ignore[operator]


def test_of_equal_values_the_earlier_step_is_better() -> None:
    found = [Candidate(f"checkpoint-{step}", step, 0.0, {"loss": 1.0}) for step in (30, 10, 20)]
    assert [*plan_retention(found, KeepBest(1, "loss"), now=NOW, anchor=None).keep] == ["checkpoint-10"]


def test_what_some_nodes_lack_takes_no_other_s_place_and_goes_when_no_policy_would_keep_it() -> None:
    found = [Candidate(f"checkpoint-{step}", step, NOW, partial=step in (10, 30)) for step in (10, 20, 30, 40)]
    kept = plan_retention(found, KeepLast(2), now=NOW, anchor="checkpoint-40")
    assert ({*kept.keep}, [*kept.remove]) == ({f"checkpoint-{step}" for step in (20, 30, 40)}, ["checkpoint-10"])


def test_what_only_keep_weights_keeps_is_thinned_and_counts_for_no_other_policy() -> None:
    found = [Candidate(f"checkpoint-{step}", step, NOW, weights_only=step < 30) for step in (10, 20, 30, 40, 50)]
    plan = plan_retention(found, KeepLast(2) | KeepWeights(KeepEvery(15) | KeepEvery(20)), now=NOW, anchor=None)
    assert {*plan.keep} == {"checkpoint-20", "checkpoint-40", "checkpoint-50"}
    assert plan.thin == {"checkpoint-30": "its weights: a multiple of 15 steps"}
    assert {*plan.remove} == {"checkpoint-10"}
    without = plan_retention(found, KeepLast(4), now=NOW, anchor=None)
    assert ({*without.keep}, without.remove) == ({"checkpoint-30", "checkpoint-40", "checkpoint-50"}, {})


@pytest.mark.parametrize("policy", [3, KeepLast(1) | KeepWeights(KeepAll())])
def test_the_weights_of_weights_are_refused(policy: Policy) -> None:
    with pytest.raises(UnsupportedSetting, match="expected another policy"):
        KeepWeights(policy)


def test_reasons_name_the_policy_and_join() -> None:
    found = [Candidate("checkpoint-20", 20, NOW, {"loss": 1.0})]
    policy = KeepLast(2) | KeepBest(1, "loss") | KeepEvery(10) | KeepWithin(timedelta(hours=1))
    reason = plan_retention(found, policy, now=NOW, anchor="checkpoint-20", best="checkpoint-20").keep["checkpoint-20"]
    assert reason == (
        "one of the last 2, one of the 1 best by loss, a multiple of 10 steps, written within 1:00:00, "
        "a restart would resume from it, the best so far"
    )


@pytest.mark.parametrize(
    "make",
    [lambda: KeepLast(0), lambda: KeepBest(0, "x"), lambda: KeepBest(1, "x", mode="least"), lambda: KeepEvery(0)],
)
def test_a_policy_that_can_keep_nothing_is_refused(make: object) -> None:
    with pytest.raises(UnsupportedSetting):
        make()  # type: ignore[operator]


def test_what_the_framework_wants_gone_goes_and_what_is_only_passing_goes_with_it() -> None:
    """Its set of names may grow after the policy was made."""
    found = [Candidate(name, step, NOW) for step, name in enumerate(["old", "best", "resume-3", "last"])]
    unwanted: set[str] = set()
    policy = KeepUnless(unwanted, "resume-")
    unwanted.add("old")
    decided = plan_retention(found, policy, now=NOW, anchor="last")
    assert list(decided.remove) == ["old", "resume-3"]
    assert decided.keep["best"] == "the framework keeps it"
    assert decided.keep["last"] == "the framework keeps it, a restart would resume from it"
    assert list(plan_retention(found, KeepUnless(unwanted), now=NOW, anchor=None).remove) == ["old"]
