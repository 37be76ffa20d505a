"""Checkpoints of weights alone, in every command: seen, verified and exported, and never what a launch resumes from."""

from __future__ import annotations

import shutil

import pytest

from resume_adapters import KeepAll, KeepLast, KeepWeights
from resume_adapters.core.checkpoint.thin import WeightsFiles
from resume_adapters.core.run_directory.status import RunState

from miniature import new_run


@pytest.fixture
def thinned(run_dir):
    """The finished run, of whose checkpoints 10 and 20 the weights are left."""
    run = new_run(run_dir, keep=KeepLast(1) | KeepWeights(KeepAll()), weights=WeightsFiles())
    run.open()
    run.saver.prune_later()
    run.saver.flush()
    run.set_state(RunState.FINISHED, step=30)
    run.close()
    return run_dir


def test_they_are_listed_and_verified_and_no_launch_resumes_from_them(command, thinned):
    rows = command("ls", thinned, "--json").json["checkpoints"]
    assert [(row["state"], row["marks"]) for row in rows] == [
        ("weights-only", []),
        ("weights-only", []),
        ("committed", ["anchor", "latest"]),
    ]
    assert rows[0]["bytes"] < rows[2]["bytes"] and "scheduled" in command("ls", thinned, columns=160).out
    assert command("ls", thinned, "--best", "eval_loss:min", "--json").json["checkpoints"][1]["marks"] == ["best"]
    found = command("verify", thinned, "--json")
    assert (found.code, [row["verdict"] for row in found.json["checkpoints"]]) == (0, ["valid"] * 3)
    assert command("status", thinned, "--json").json["resumes_from"]["name"] == "checkpoint-30"
    assert (
        "resume/rank-00000.json is missing in A"
        in command("diff", thinned / "checkpoint-20", thinned / "checkpoint-30").out
    )
    shutil.rmtree(thinned / "checkpoint-30")
    assert "nothing: no checkpoint is valid" in command("status", thinned).out


def test_what_would_resume_from_one_refuses_it(command, thinned, tmp_path):
    for words in (("rewind", thinned, "20"), ("push", thinned, f"file://{tmp_path}/store", "20")):
        done = command(*words)
        assert done.code == 2 and "checkpoint-20 has weights alone" in done.err, done.err


def test_a_prune_by_another_policy_leaves_them(command, thinned):
    done = command("prune", thinned, "--keep-last", "1", "--json").json
    assert [row["name"] for row in done["keep"]] == ["checkpoint-30"] and not done["remove"]
    assert [row["state"] for row in done["untouched"]] == ["weights-only"] * 2
    assert command("verify", thinned, "10", "20").code == 0


def test_a_damaged_one_is_named(command, thinned, flip):
    flip(thinned / "checkpoint-10" / "model.bin")
    found = command("verify", thinned, "--json")
    assert found.code == 1
    assert [row["verdict"] for row in found.json["checkpoints"]] == ["damaged", "valid", "valid"]
