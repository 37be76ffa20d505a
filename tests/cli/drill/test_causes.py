"""Each kind of difference has its likely cause, with the figures and names that lead to it."""

from __future__ import annotations

import pytest

from resume_adapters.cli.drill.comparison import compare, likely_cause
from resume_adapters.cli.drill.job import LaunchTrace, Run


@pytest.fixture
def reference(traces):
    return traces.run(range(1, 41), ranks=2)


@pytest.fixture
def interrupted(traces):
    return traces.run(range(1, 14), range(11, 41), ranks=2, missing=["scheduler: no scheduler was passed"])


def cause(reference, interrupted):
    found = compare(reference, interrupted).first
    assert found is not None
    return likely_cause(found, reference, interrupted)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (9, "the data repeat 4 batches"),
        (1, "the data repeat 20 batches from their beginning"),
        (12, "the data skip 2 batches"),
    ],
)
def test_a_batch_of_another_step_says_how_far_the_data_are_off(traces, reference, interrupted, step, expected):
    other = traces.altered(interrupted, 2, 11, batches=traces.step(step)["batches"])
    found = cause(reference, other)
    assert f"it is the reference's batch of step {step}: after the resume from step 10 {expected};" in found


def test_a_batch_of_another_rank(traces, reference, interrupted):
    other = traces.altered(interrupted, 2, 11, rank=1, batches=traces.step(30, 0)["batches"])
    assert "a batch that rank 0 had in the reference" in cause(reference, other)


def test_a_cut_accumulation_window(traces, reference, interrupted):
    assert "was cut short" in cause(reference, traces.altered(interrupted, 2, 11, batches=lambda old: old[:1]))


def with_data(run, **facts):
    event = {"event": "data", "rank": 0, "place": "train", **facts}
    return Run(tuple(LaunchTrace(launch.number, (event, *launch.events)) for launch in run.launches))


def test_a_batch_that_the_reference_never_had_names_the_dataset(traces, reference, interrupted):
    other = traces.altered(interrupted, 2, 11, batches=["new", "newer"])
    assert "`Crops`, its transforms" in cause(reference, with_data(other, dataset="Crops"))
    assert "`the dataset`, its" in cause(reference, other)


def test_a_generator_is_named(traces, reference, interrupted):
    other = traces.altered(interrupted, 2, 11, rng={"python": "other"})
    assert "the generator `python` is at a different place" in cause(reference, other)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("loss", ["0x1p0", "0x1p0"], "outside of what is saved"),
        ("grad_norm", "0x1p0", "accumulated before the save"),
        ("lr", [["0x1p0"]], "the schedule of optimizer 0, group 0"),
        ("weights", "other", "moments"),
        ("optimizer", "other", "not restored whole"),
    ],
)
def test_what_is_computed_names_what_is_missing(traces, reference, interrupted, name, value, expected):
    found = cause(reference, traces.altered(interrupted, 2, 12, **{name: value}))
    assert expected in found
    assert found.endswith("no checkpoint holds scheduler: no scheduler was passed")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("batches", ["x", "y"], "not seeded, or its data"),
        ("rng", {"torch": "x"}, "seed python"),
        ("loss", [], "repeat"),
    ],
)
def test_a_difference_before_any_resume_is_the_scripts(traces, reference, interrupted, name, value, expected):
    found = cause(reference, traces.altered(interrupted, 1, 3, **{name: value}))
    assert found.startswith("this launch began at step 0, so no resume is the cause")
    assert expected in found


def test_steps_that_only_one_run_did(traces, reference):
    assert "ended too early" in cause(reference, traces.run(range(1, 14), range(15, 41), ranks=2))
    assert "does not know that the run was over" in cause(reference, traces.run(range(1, 14), range(11, 42), ranks=2))
