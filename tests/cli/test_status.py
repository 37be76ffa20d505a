"""``status`` says how the run is, and what the same launch would resume from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import msgspec
import pytest

from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus, signed
from resume_adapters.core.storage.local import LocalStorage

WRITE = """
import sys, time
from pathlib import Path
from resume_adapters.core.checkpoint.manifest import PartEntry
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus, signed
from resume_adapters.core.storage.local import LocalStorage
control = ControlDirectory(LocalStorage(), Path(sys.argv[1]), time.time)
control.status.write(signed(RunStatus(state=RunState.RUNNING, step=10, generation=2), time.time()))
print("written", flush=True)
time.sleep(600)
"""


def rewrite(run_dir, **changes):
    """Write a status of this process with some fields changed."""
    file = ControlDirectory(LocalStorage(), run_dir, time.time).status
    file.write(signed(RunStatus(state=RunState.RUNNING, step=30, generation=1), time.time()))
    changed = msgspec.structs.replace(file.read(), **changes)
    (run_dir / ".resume" / "status.json").write_bytes(msgspec.json.encode(changed))


@pytest.fixture
def running(run_dir):
    """A process that wrote ``running`` and lives."""
    process = subprocess.Popen([sys.executable, "-c", WRITE, run_dir], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"written\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_describes_a_finished_run(command, run_dir):
    done = command("status", run_dir, "--json")
    found = done.json
    assert done.code == 0
    assert (found["state"], found["step"], found["epoch"], found["horizon"]) == ("finished", 30, 3.0, 30)
    assert (found["last_commit"], found["generation"], found["pid"]) == (30, 1, os.getpid())
    assert found["resumes_from"]["name"] == "checkpoint-30"
    assert found["cursor"] == {"epoch": 0, "micro_batches": 30}
    text = command("status", run_dir)
    assert text.code == 0
    for words in ("finished", "30 of 30", "checkpoint-30 (committed)", "epoch 0, 30 batches", "start 1"):
        assert words in text.out


def test_a_live_process_is_running(command, run_dir, running):
    found = command("status", run_dir, "--json").json
    assert (found["state"], found["alive"], found["pid"]) == ("running", True, running.pid)


@pytest.mark.parametrize("is_reaped", [True, False])
def test_running_without_its_process_is_killed(command, run_dir, running, is_reaped):
    running.kill()
    if is_reaped:
        running.wait()
    else:
        os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    found = command("status", run_dir, "--json").json
    assert (found["state"], found["alive"]) == ("killed", False)
    assert found["step"] == 30, "the newest commit is known to be later than the start"
    text = command("status", run_dir).out
    assert "killed" in text
    assert "checkpoint-30 (committed)" in text


def test_a_process_that_began_after_the_status_is_another(command, run_dir):
    rewrite(run_dir, updated=1_000_000_000.0)
    assert command("status", run_dir, "--json").json["state"] == "killed"


def test_a_save_that_is_done_is_not_the_next(command, run_dir):
    for next_save, shown in ((30, None), (35, 35)):
        rewrite(run_dir, step=28, next_save=next_save)
        assert command("status", run_dir, "--json").json["next_save"] == shown


def test_whether_a_process_on_another_host_is_alive_is_unknown(command, run_dir):
    rewrite(run_dir, host="elsewhere.example")
    found = command("status", run_dir, "--json").json
    assert (found["state"], found["alive"]) == ("running", None)
    assert "whether it is alive is unknown" in " ".join(command("status", run_dir).out.split())


@pytest.mark.parametrize("pid", [0, -1, 1 << 70])
def test_a_process_number_that_is_none_is_killed(command, run_dir, pid):
    rewrite(run_dir, pid=0)
    file = run_dir / ".resume" / "status.json"
    file.write_bytes(file.read_bytes().replace(b'"host"', b'"pid":%d,"host"' % pid))
    found = command("status", run_dir, "--json").json
    assert (found["state"], found["alive"]) == ("killed", False)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b'{"state": 5}', None])
def test_a_status_that_cannot_be_read_is_unknown(command, run_dir, content):
    file = run_dir / ".resume" / "status.json"
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    done = command("status", run_dir, "--json")
    assert done.code == 0
    assert done.json["state"] == "unknown"
    assert "status.json" in done.json["reason"]
    assert done.json["resumes_from"]["name"] == "checkpoint-30"


def test_passes_over_what_is_damaged(command, run_dir):
    (run_dir / "checkpoint-30" / "model.bin").unlink()
    done = command("status", run_dir, "--json")
    assert done.code == 1
    assert done.json["resumes_from"]["name"] == "checkpoint-20"
    assert done.json["damaged"] == ["checkpoint-30"]


def test_says_that_nothing_can_be_resumed_from(command, run_dir):
    for step in (10, 20):
        shutil.rmtree(run_dir / f"checkpoint-{step}")
    (run_dir / "checkpoint-30" / "model.bin").unlink()
    done = command("status", run_dir)
    assert done.code == 1
    assert "no checkpoint is valid" in done.out


def test_launches_without_progress_are_counted(command, run_dir, running):
    control = ControlDirectory(LocalStorage(), run_dir, time.time)
    assert command("status", run_dir, "--json").json["without_progress"] == []
    assert "no progress" not in command("status", run_dir).out
    for generation, reason in ((2, "ValueError: [loss] is not finite"), (3, "SIGTERM")):
        control.journal.append("start", generation=generation, step=30)
        control.journal.append("failed" if generation == 2 else "stopped", step=31, reason=reason)
    control.journal.append("start", generation=4, step=30)
    found = command("status", run_dir, "--json").json
    assert found["state"] == "running"
    assert found["without_progress"] == [
        {
            "generation": 2,
            "resumed_from": 30,
            "ended": "failed",
            "step": 31,
            "reason": "ValueError: [loss] is not finite",
        },
        {"generation": 3, "resumed_from": 30, "ended": "stopped", "step": 31, "reason": "SIGTERM"},
    ]
    said = " ".join(command("status", run_dir).out.split())
    assert "2 launches in a row without a step kept: start 3 stopped at step 31 (SIGTERM)" in said
    running.kill()
    running.wait()
    said = " ".join(command("status", run_dir).out.split())
    assert "3 launches in a row without a step kept: start 4 was killed" in said
    control.journal.append("commit", step=31)
    assert command("status", run_dir, "--json").json["without_progress"] == []


def test_recoveries_are_shown_with_what_they_cost(command, run_dir):
    control = ControlDirectory(LocalStorage(), run_dir, time.time)
    assert command("status", run_dir, "--json").json["recoveries"] == []
    assert "recover" not in command("status", run_dir).out + command("ls", run_dir).out
    facts = {"level": "memory", "rank": 1, "error": "Hung: [at] work\nmore", "step": 7, "lost": 0, "seconds": 0.51234}
    control.journal.append("recovery", **facts)
    control.journal.append("recovery", **{**facts, "level": "disk", "step": 20, "lost": 3, "seconds": 2.0})
    found = command("status", run_dir, "--json").json["recoveries"]
    assert [{name: each[name] for name in facts} for each in found] == [
        facts, {**facts, "level": "disk", "step": 20, "lost": 3, "seconds": 2.0},
    ]  # fmt: skip
    assert found == command("ls", run_dir, "--json").json["recoveries"]
    last = "rank 1: Hung: [at] work; from step 20 (disk) in 2 s, 3 steps done again"
    said = " ".join(command("status", run_dir).out.split())
    assert "recoveries 2; the last" in said and said.count(last) == 1
    lines = [line for line in command("ls", run_dir).out.splitlines() if line.startswith("recovered: ")]
    assert lines[0].endswith("ago, rank 1: Hung: [at] work; from step 7 (memory) in 0.512 s")
    assert lines[1].endswith(last)


def test_its_parts_are_listed_where_that_is_asked_for(command, tmp_path, make_run):
    """Each with who saves it; what nobody saves is MISSING there as in the log."""
    entries = [("model", "framework", "save_model"), ("rng", "core", "on every rank"), ("script", "missing", "a list")]
    make_run(tmp_path / "run", {10: {"parts": tuple(PartEntry(*each) for each in entries)}})
    assert "save_model" not in command("status", tmp_path / "run").out
    said = command("status", tmp_path / "run", "--parts").out
    for line in (
        "model  the framework save_model",
        "rng    this package  on every rank",
        "script MISSING       a list",
    ):
        assert line in said, said
    found = command("status", tmp_path / "run", "--json").json["parts"]
    assert [(each["name"], each["by"], each["note"]) for each in found] == entries
    (tmp_path / "fresh" / ".resume").mkdir(parents=True)
    assert "No parts: there is no checkpoint" in command("status", tmp_path / "fresh", "--parts").out
    refused = command("status", "--parts", tmp_path / "run", tmp_path / "fresh")
    assert refused.code == 2 and "--parts" in refused.err
