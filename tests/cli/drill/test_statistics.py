"""The test of the losses is as often wrong as it says, and finds what it says it finds."""

from __future__ import annotations

import math
import random

import pytest

from resume_adapters.cli.drill.report import LEVEL, shifts, student, student_quantile

RESUMES = [20, 50, 90, 130, 170]


def curve(rng, *, noise=0.1, memory=0.0):
    """A falling loss with noise; with a memory the noise of a step carries over to the next."""
    deviation, losses = 0.0, {}
    for step in range(1, 201):
        deviation = memory * deviation + math.sqrt(1 - memory**2) * rng.gauss(0, noise)
        losses[step] = 3 / math.sqrt(step) + deviation
    return losses


@pytest.mark.parametrize(
    ("t", "freedom", "probability"), [(0, 5, 0.5), (1, 1, 0.75), (2.571, 5, 0.975), (1.96, 100000, 0.975)]
)
def test_students_distribution_is_that_of_the_tables(t, freedom, probability):
    assert student(t, freedom) == pytest.approx(probability, abs=1e-4)
    if t:
        assert student_quantile(probability, freedom) == pytest.approx(t, abs=1e-2)


@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_an_undisturbed_run_is_within_the_spread(memory):
    rng = random.Random(1)
    trials = 100
    wrong = [0, 0]
    for _ in range(trials):
        found = shifts([curve(rng, memory=memory) for _ in range(2)], curve(rng, memory=memory), RESUMES)
        for place, shift in enumerate(found):
            wrong[place] += shift.is_within_the_spread is False
    assert max(wrong) <= 5 * LEVEL * trials


@pytest.mark.thorough
def test_a_shift_of_the_size_that_is_reported_is_found_in_four_of_five_cases():
    rng = random.Random(2)
    trials, found = 100, 0
    for _ in range(trials):
        references, other = [curve(rng), curve(rng)], curve(rng)
        size = shifts(references, other, RESUMES)[1].detectable
        shifted = {step: loss + (size if step > RESUMES[0] else 0) for step, loss in other.items()}
        found += not shifts(references, shifted, RESUMES)[1].is_within_the_spread
    assert 0.7 < found / trials < 0.9


def test_a_bump_after_each_resume_is_found():
    rng = random.Random(3)
    references, other = [curve(rng), curve(rng)], curve(rng)
    bumped = {step: loss + 0.4 * any(0 < step - resume <= 5 for resume in RESUMES) for step, loss in other.items()}
    bump, _ = shifts(references, bumped, RESUMES)
    assert bump.is_within_the_spread is False
    assert bump.mean == pytest.approx(0.4, abs=0.15)
    assert "t-test over 5 stretches of 5 steps, level 0.01" in str(bump)
    assert "would be found with a probability of 80%" in str(bump)


def test_too_few_stretches_are_not_judged():
    rng = random.Random(4)
    bump, _ = shifts([curve(rng), curve(rng)], curve(rng), [20])
    assert bump.is_within_the_spread is None
    assert "too few to judge" in str(bump)


def test_references_that_agree_allow_no_shift():
    losses = curve(random.Random(5))
    same, _ = shifts([losses, losses], losses, RESUMES)
    assert same.is_within_the_spread
    other = {step: loss + 1e-9 for step, loss in losses.items()}
    assert shifts([losses, losses], other, RESUMES)[0].is_within_the_spread is False
