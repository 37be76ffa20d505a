"""The first difference is the one that is nearest to the cause."""

from __future__ import annotations

import math

import pytest

from resume_adapters.cli.drill.comparison import QUANTITIES, compare


@pytest.fixture
def reference(traces):
    return traces.run(range(1, 41), ranks=2)


@pytest.fixture
def interrupted(traces):
    return traces.run(range(1, 14), range(11, 30), range(26, 41), ranks=2)


def test_the_last_bit_of_a_loss_is_a_difference(traces, reference, interrupted):
    other = traces.altered(
        interrupted, 3, 33, loss=lambda old: [old[0], math.nextafter(float.fromhex(old[1]), 1).hex()]
    )
    found = compare(reference, other).first
    assert (found.step, found.rank, found.launch, found.quantity, found.where) == (33, 0, 3, "loss", (1,))
    expected = float.fromhex(found.expected)
    assert str(found) == (
        f"step 33, rank 0, launch 3: the losses (micro-batch 1) differ: {expected!r} in the reference, "
        f"{math.nextafter(expected, 1)!r} here"
    )


def test_the_earliest_step_comes_first_then_the_causal_order_then_the_rank(traces, reference, interrupted):
    other = interrupted
    for step, rank, name in [(35, 0, "batches"), (30, 0, "weights"), (30, 1, "loss"), (30, 0, "loss"), (30, 1, "rng")]:
        change = {"batches": ["0"] * 2, "rng": {"numpy": "0"}, "loss": [None, None], "weights": "0"}[name]
        other = traces.altered(other, 3, step, rank, **{name: change})
    found = compare(reference, other)
    assert (found.first.step, found.first.rank, found.first.quantity) == (30, 1, "rng")
    assert found.first.where == ("numpy",)
    assert found.differing == {"batches", "rng", "loss", "weights"}
    assert compare(reference, other, ("loss",)).first.rank == 0


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_quantity_is_compared(traces, reference, interrupted, name):
    new = {"batches": ["x", "y"], "rng": {"python": "x"}, "loss": ["0x1p0", "0x1p0"], "lr": [["0x1p0"]]}
    other = traces.altered(interrupted, 2, 20, 1, **{name: new.get(name, "0x1p0")})
    assert compare(reference, other).first.quantity == name


def test_a_step_that_was_left_out_and_one_too_many_are_differences(traces, reference):
    skipped = compare(reference, traces.run(range(1, 14), range(15, 41), ranks=2)).first
    assert str(skipped) == "step 14, rank 0: the interrupted run never did this step"
    longer = compare(reference, traces.run(range(1, 14), range(11, 42), ranks=2)).first
    assert str(longer) == "step 41, rank 0: the reference did not do this step"
