"""``demo`` keeps the promise before one's eyes, and would say so if it did not."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import random

import pytest

from resume_adapters.cli.demo.kills import Launch, Point, choose
from resume_adapters.cli.demo.result import Run
from resume_adapters.cli.demo.run import SAVE_STEPS, STEPS, example, first_difference


def run(*segments, digest="a" * 64):
    """Make a run that did these ranges of steps, each in a launch of its own, as any run would do them."""
    launches = []
    for number, steps in enumerate(segments):
        points = tuple(Point(step, random.Random(step).random(), 1 / step) for step in steps)
        launches.append(Launch(points, points[-1].step if number < len(segments) - 1 else None))
    return Run(tuple(launches), tuple(steps.start - 1 for steps in segments), digest)


REFERENCE = run(range(1, STEPS + 1))
INTERRUPTED = run(range(1, 14), range(11, 30), range(26, STEPS + 1))


def altered(whole, step, **changes):
    """Change one step of the last launch."""
    last = whole.launches[-1]
    points = tuple(dataclasses.replace(point, **changes) if point.step == step else point for point in last.points)
    return dataclasses.replace(whole, launches=(*whole.launches[:-1], dataclasses.replace(last, points=points)))


def test_identical_runs_have_no_difference():
    assert first_difference(REFERENCE, INTERRUPTED) is None


def test_a_difference_in_the_last_bit_is_one():
    loss = REFERENCE.points[39].loss
    found = first_difference(REFERENCE, altered(INTERRUPTED, 40, loss=math.nextafter(loss, 1)))
    assert found is not None
    assert found.startswith("step 40: the loss is")
    rate = first_difference(REFERENCE, altered(INTERRUPTED, 41, learning_rate=0.5))
    assert rate is not None
    assert "learning_rate" in rate


def test_a_step_that_was_left_out_and_other_weights_are_differences():
    assert first_difference(REFERENCE, run(range(1, 14), range(15, STEPS + 1))) == "step 14 was never trained"
    other = dataclasses.replace(INTERRUPTED, digest="b" * 64)
    assert "final weights" in (first_difference(REFERENCE, other) or "")


@pytest.mark.parametrize("seed", range(20))
def test_kills_are_apart_after_a_save_and_one_is_inside_one(seed):
    kills = choose(seed, STEPS, SAVE_STEPS)
    steps = [kill.step for kill in kills]
    assert kills == choose(seed, STEPS, SAVE_STEPS)
    assert [kill.inside_save for kill in kills].count(True) == 1
    assert all(later - earlier > 2 * SAVE_STEPS for earlier, later in itertools.pairwise(steps))
    assert all(SAVE_STEPS + 1 < step < STEPS for step in steps)
    assert all((kill.step % SAVE_STEPS == 0) == kill.inside_save for kill in kills)


def test_the_example_is_found():
    assert example("hf").is_file()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing")
def test_refuses_a_directory_that_is_in_use(command, tmp_path):
    (tmp_path / "precious").write_text("kept")
    done = command("demo", "--dir", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "is not an empty directory" in done.err
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing")
def test_a_run_killed_three_times_is_identical_to_one_that_never_was(command, tmp_path):
    done = command("demo", "--dir", tmp_path / "demo", "--seed", "1", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["identical"] is True
    assert found["weights"]["reference"] == found["weights"]["interrupted"]
    assert found["final_loss"]["reference"] == found["final_loss"]["interrupted"]
    assert found["steps_compared"] > found["steps"] == STEPS, "some steps are done again after a kill"
    assert len(found["kills"]) == 3
    assert [kill["inside_save"] for kill in found["kills"]].count(True) == 1
    assert all(0 < kill["resumed_from"] <= kill["step"] for kill in found["kills"])
    assert (tmp_path / "demo" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert command("verify", tmp_path / "demo" / "interrupted").code == 0
    assert command("status", tmp_path / "demo" / "interrupted", "--json").json["state"] == "finished"
    assert done.err.count("SIGKILL after step") == 3
