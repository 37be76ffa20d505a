"""``demo`` keeps the promise before one's eyes."""

from __future__ import annotations

import importlib.util

import pytest

from resume_adapters.cli.commands.drill import DEMO_STEPS, example

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is missing"
)


@pytest.mark.parametrize("framework", ["hf", "accelerate", "lightning", "deepspeed"])
def test_the_example_is_found(framework):
    assert example(framework).is_file()


@pytest.mark.thorough
@pytest.mark.long
@needs_transformers
def test_a_run_killed_three_times_is_identical_to_one_that_never_was(command, tmp_path):
    done = command("demo", "--dir", tmp_path / "demo", "--seed", "1", "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["verdict"] == "identical"
    assert found["compared"]["quantities"] == ["batches", "rng", "loss", "grad_norm", "lr", "weights", "optimizer"]
    assert (found["compared"]["steps"], found["unseeded"]) == (DEMO_STEPS, [])
    assert found["compared"]["done_twice"] > 0, "some steps are done again after a kill"
    assert found["final_loss"]["reference"] == found["final_loss"]["interrupted"]
    struck = [launch for launch in found["launches"] if launch["fault"]]
    assert sorted(launch["fault"]["kind"] for launch in struck) == ["save", "step", "step"]
    assert all(launch["fault"]["happened"] for launch in struck)
    assert all(0 < launch["resumed_from"] <= launch["last_step"] for launch in found["launches"][1:])
    run = tmp_path / "demo" / "interrupted" / "run"
    assert command("verify", run).code == 0
    assert command("status", run, "--json").json["state"] == "finished"
    assert done.err.count("SIGKILL") == 3
