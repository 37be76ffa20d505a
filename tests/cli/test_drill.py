"""``drill`` on real jobs: it finds nothing where nothing is, and the first difference where there is one."""

from __future__ import annotations

import os
import random
import re
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
JOB = HERE / "drill" / "job.py"
ENVIRONMENT = {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
"""The tests' own modules; one thread, for the number of threads changes the order of additions."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def drill(command, directory, *words):
    """Run a drill whose options end at ``--``; return its outcome."""
    return command("drill", "--dir", directory, *words)


@pytest.mark.thorough
def test_a_run_that_was_killed_and_stopped_in_every_way_is_identical(command, tmp_path):
    faults = "save,prune,term,twice"
    done = drill(command, tmp_path / "drill", "--faults", faults, "--json", "--", sys.executable, JOB, "{run_dir}")
    assert done.code == 0, done.err
    found = done.json
    assert (found["verdict"], found["difference"], found["seed"]) == ("identical", None, 0)
    assert found["compared"]["quantities"] == ["batches", "rng", "loss", "lr", "weights", "optimizer"]
    assert (found["compared"]["steps"], found["compared"]["ranks"]) == (24, 1)
    assert found["compared"]["done_twice"] > 0
    assert found["unseeded"] == ["python", "numpy"]
    struck = [launch["fault"] for launch in found["launches"] if launch["fault"]]
    assert sorted(fault["kind"] for fault in struck) == ["prune", "save", "term", "twice", "twice"]
    assert all(fault["happened"] for fault in struck)
    resumed = [launch["resumed_from"] for launch in found["launches"]]
    assert resumed[0] == 0
    assert resumed[1:] == sorted(resumed[1:])
    again = [launch for launch in found["launches"] if launch["fault"] and launch["fault"]["kind"] == "twice"]
    assert again[1]["resumed_from"] <= again[0]["last_step"] == again[1]["last_step"], "again before the next commit"
    stopped = next(launch for launch in found["launches"] if launch["fault"] and launch["fault"]["kind"] == "term")
    assert resumed[stopped["launch"]] == stopped["last_step"], "SIGTERM saves"
    assert found["final_loss"]["reference"] == found["final_loss"]["interrupted"]
    assert command("verify", tmp_path / "drill" / "interrupted" / "run").code == 0
    assert done.err.count("SIGKILL") == 4


@pytest.mark.thorough
@pytest.mark.long
def test_two_ranks_survive_the_loss_of_one_and_of_their_launcher(command, tmp_path):
    port = random.SystemRandom().randrange(10_000, 32_000)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    options = ["--steps", "14", "--save-every", "4", "--faults", "rank,launcher", "--json"]
    done = drill(command, tmp_path / "drill", *options, "--", *launcher, JOB, "{run_dir}", "--steps", "1000")
    assert done.code == 0, done.err
    found = done.json
    assert (found["verdict"], found["compared"]["ranks"], found["compared"]["steps"]) == ("identical", 2, 14)
    happened = {launch["fault"]["kind"]: launch["fault"]["happened"] for launch in found["launches"] if launch["fault"]}
    assert happened["rank"]
    assert happened["launcher"]
    assert found["launches"][-1]["last_step"] == 14, "the run would do 1000 steps"


@pytest.mark.thorough
def test_a_dataset_that_counts_in_a_global_is_told_by_step_and_cause(command, tmp_path):
    """No part of the state holds it."""
    job = [sys.executable, JOB, "{run_dir}", "--augment", "--steps", "12"]
    done = drill(command, tmp_path / "drill", "--faults", "step", "--seed", "3", "--", *job)
    assert done.code == 1, done.err
    lines = done.out.splitlines()
    row = next(line for line in lines if line.startswith("2 "))
    resumed = int(row.split("step ")[1])
    difference = next(line for line in lines if line.startswith("different: "))
    where = re.search(r"different: step (\d+), rank 0, launch 2: the batches \(micro-batch 0\) differ", difference)
    assert where is not None and int(where[1]) > resumed
    cause = next(line for line in lines if line.startswith("likely cause: "))
    assert "`Numbers`, its transforms, its sampler or its collate function depend on something that no part" in cause


def test_a_run_that_never_saves_is_refused_with_what_to_do(command, tmp_path):
    job = [sys.executable, JOB, "{run_dir}", "--steps", "5", "--save-every", "50"]
    done = drill(command, tmp_path / "drill", "--", *job)
    assert done.code == 2
    assert "the first save is that of step 5, and the run has 5 steps, so no launch could resume" in done.err
    assert "--save-every N" in done.err


def test_a_command_that_fails_shows_the_end_of_its_log(command, tmp_path):
    done = drill(command, tmp_path / "drill", "--", sys.executable, "-c", "raise SystemExit('no such dataset')")
    assert (done.code, done.out) == (4, "")
    assert "launch 1 ended with exit code 1 after step 0, and not by a fault of the drill" in done.err
    assert done.err.endswith("no such dataset\n")


def test_a_command_without_a_trace_is_not_judged(command, tmp_path):
    done = drill(command, tmp_path / "drill", "--", sys.executable, "-c", "pass")
    assert done.code == 4
    assert "ended without a traced step: does it train with resume_adapters?" in done.err


HANG = "import time; time.sleep(600)"


@pytest.mark.thorough
def test_a_hang_shows_where(command, tmp_path):
    done = drill(command, tmp_path / "drill", "--timeout", "4", "--", sys.executable, "-c", HANG)
    assert done.code == 4
    assert "launch 1 hangs: it traced nothing for 4 s after step 0" in done.err
    assert 'File "<string>", line 1 in <module>' in done.err


ELSEWHERE = """
import json, os, time
start = {"event": "start", "rank": 0, "pid": os.getpid(), "world_size": 1, "step": 0, "run_directory": "/elsewhere"}
open(os.environ["RESUME_ADAPTERS_TRACE"], "a").write(json.dumps({**start, "missing": []}) + "\\n")
time.sleep(600)
"""


@pytest.mark.thorough
def test_a_stop_file_reaches_a_run_that_saves_below_the_run_directory(command, tmp_path):
    job = [sys.executable, JOB, "{run_dir}/below", "--steps", "12"]
    done = drill(command, tmp_path / "drill", "--faults", "stop", "--json", "--", *job)
    assert done.code == 0, done.err
    assert [launch["fault"]["happened"] for launch in done.json["launches"] if launch["fault"]] == [True]
    assert done.json["launches"][1]["resumed_from"] == done.json["launches"][0]["last_step"], "a stop saves"


def test_a_command_that_saves_into_its_own_run_directory_is_stopped(command, tmp_path):
    done = drill(command, tmp_path / "drill", "--", sys.executable, "-c", ELSEWHERE)
    assert done.code == 4
    assert "the command saves into /elsewhere; expected it to save into" in done.err
    assert "write {run_dir} into the command" in done.err


def test_refuses_a_directory_that_is_in_use_and_an_unknown_fault(command, tmp_path):
    (tmp_path / "precious").write_text("kept")
    done = drill(command, tmp_path, "--", "true")
    assert (done.code, done.out) == (2, "")
    assert "is not an empty directory" in done.err
    assert (tmp_path / "precious").read_text() == "kept"
    unknown = drill(command, tmp_path / "new", "--faults", "crash", "--", "true")
    assert unknown.code == 2
    assert "choose from step, save" in unknown.err
    assert not os.path.exists(tmp_path / "new")
