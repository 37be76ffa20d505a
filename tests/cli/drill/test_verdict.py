"""What undisturbed runs repeat is judged exactly, the losses otherwise by statistics."""

from __future__ import annotations

import random

import pytest

from resume_adapters.cli.drill.job import Run
from resume_adapters.cli.drill.report import DIFFERENT, EQUIVALENT, IDENTICAL, UNDECIDED, Shift, judge

SEGMENTS = (range(1, 34), range(31, 68), range(61, 110), range(101, 140), range(131, 161))


def noisy(run, seed, shift=0.0):
    """The run on hardware that does not repeat its results: losses, gradients and weights differ."""
    rng = random.Random(seed)
    for event in run.of("step"):
        event["loss"] = [(3 / event["step"] + rng.gauss(0, 0.1) + shift).hex()] * 2
        event["weights"] = event["optimizer"] = event["grad_norm"] = rng.random().hex()
    return run


def references(traces):
    return [noisy(traces.run(range(1, 161)), seed) for seed in (1, 2)]


def test_one_reference_is_compared_exactly(traces):
    verdict = judge([traces.run(range(1, 161))], traces.run(*SEGMENTS))
    assert (verdict["verdict"], verdict["difference"]) == (IDENTICAL, None)
    assert (verdict["not_repeated"], verdict["statistics"]) == ([], [])
    bug = traces.altered(traces.run(*SEGMENTS), 3, 70, lr=[["0x1p0"]])
    verdict = judge([traces.run(range(1, 161))], bug)
    assert verdict["verdict"] == DIFFERENT
    assert verdict["difference"]["text"].startswith("step 70, rank 0, launch 3: the learning rates")
    assert "schedule" in verdict["difference"]["cause"]


def test_two_references_that_agree_are_as_exact_as_one(traces):
    agreeing = [traces.run(range(1, 161))] * 2
    assert judge(agreeing, traces.run(*SEGMENTS))["verdict"] == IDENTICAL
    assert judge(agreeing, traces.altered(traces.run(*SEGMENTS), 3, 70, loss=[None, None]))["verdict"] == DIFFERENT


def test_what_the_references_do_not_repeat_is_judged_by_statistics(traces):
    verdict = judge(references(traces), noisy(traces.run(*SEGMENTS), 3))
    assert verdict["verdict"] == EQUIVALENT
    assert verdict["not_repeated"] == ["loss", "grad_norm", "weights", "optimizer"]
    assert verdict["compared"]["quantities"] == ("batches", "rng", "lr")
    assert all(Shift(**shift).is_within_the_spread for shift in verdict["statistics"])


def test_batches_are_still_judged_exactly(traces):
    bug = traces.altered(noisy(traces.run(*SEGMENTS), 3), 2, 40, batches=["x", "y"])
    verdict = judge(references(traces), bug)
    assert verdict["verdict"] == DIFFERENT
    assert "the batches" in verdict["difference"]["text"]


def test_losses_outside_of_the_spread_differ(traces):
    verdict = judge(references(traces), noisy(traces.run(*SEGMENTS), 3, shift=0.2))
    assert verdict["verdict"] == DIFFERENT
    assert verdict["difference"]["text"].startswith("the losses, ")
    assert "not resumed" in verdict["difference"]["cause"]


def test_a_run_that_is_too_short_for_its_losses_is_undecided(traces):
    short = [noisy(traces.run(range(1, 9)), seed) for seed in (1, 2)]
    assert judge(short, noisy(traces.run(range(1, 8), range(7, 9)), 3))["verdict"] == UNDECIDED


def test_references_that_do_different_steps_are_no_reference(traces):
    verdict = judge([traces.run(range(1, 161)), traces.run(range(1, 160))], traces.run(*SEGMENTS))
    assert verdict["verdict"] == DIFFERENT
    assert "did not do the same steps" in verdict["difference"]["text"]


@pytest.mark.parametrize("launches", [1, 2])
def test_a_launch_that_ended_before_it_began_does_not_matter(traces, launches):
    early = traces.launch(2, range(1, 1))
    silent = type(early)(2, ())
    run = traces.run(*SEGMENTS)
    run = Run((run.launches[0], *[silent] * launches, *run.launches[1:]))
    assert judge([traces.run(range(1, 161))], run)["verdict"] == IDENTICAL


def test_a_generator_that_the_script_does_not_seed_is_not_compared(traces):
    other = traces.run(*SEGMENTS)
    for event in other.of("step"):
        event["rng"] = {**event["rng"], "python": "other"}
    verdict = judge([traces.run(range(1, 161))], other)
    assert (verdict["verdict"], verdict["unseeded"]) == (IDENTICAL, ("python",))
    assert "rng" in verdict["compared"]["quantities"]
    drawn = judge([traces.run(range(1, 161))], traces.altered(other, 1, 1, batches=["x", "y"]))
    assert drawn["difference"]["text"].startswith("step 1, rank 0, launch 1: the batches")
    assert "no resume is the cause" in drawn["difference"]["cause"]


def test_a_generator_that_only_a_resume_moves_is_compared(traces):
    verdict = judge([traces.run(range(1, 161))], traces.altered(traces.run(*SEGMENTS), 2, 31, rng={"python": "other"}))
    assert verdict["unseeded"] == ()
    assert "the random state (generator python)" in verdict["difference"]["text"]
