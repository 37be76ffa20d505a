"""``doctor`` finds what would keep a run from coming back, and leaves the run directory bit for bit as it is."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import waiting
from resume_adapters.cli import checks
from resume_adapters.cli.checks import Finding, Measured
from resume_adapters.cli.commands import doctor
from resume_adapters.cli.commands.run import base_environment, reached
from resume_adapters.cli.drill.job import Job
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.storage.base import Stamp
from resume_adapters.core.storage.local import LocalStorage

from faults import Disturbed, refuse

Command = Callable[..., Any]

SCRIPT = """
import collections, random, sys
import torch
from torch.utils.data import DataLoader
from resume_adapters import KeepLast
from resume_adapters.loop import register_for_resume

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(torch.arange(24.0).unsqueeze(1), 2)
run = register_for_resume(sys.argv[1], model=model, optimizer=optimizer, save_every=4, keep=KeepLast(3))
recent = collections.deque(maxlen=3)
for epoch in run.epochs(100_000):
    for batch in run.batches(loader):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if len(recent) > 2:
            optimizer.param_groups[0]["weight_decay"] = recent[0] * 1e-6
        run.step(loss=loss)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def tree(directory: Path) -> dict[str, Any]:
    """Return all that a directory holds, by name."""
    return {
        str(each.relative_to(directory)): os.readlink(each)
        if each.is_symlink()
        else each.read_bytes()
        if each.is_file()
        else None
        for each in directory.rglob("*")
    }


def by_check(found: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [each for each in found if each["check"] == name]


def level_of(found: list[Finding], name: str) -> tuple[str, str]:
    return next((each.level, each.found) for each in found if each.check == name)


def test_a_run_directory_is_bit_for_bit_the_same_after_it(command: Command, run_dir: Path) -> None:
    before = tree(run_dir)
    done = command("doctor", run_dir, "--json")
    assert done.code == 0 and done.json["verdict"] in ("green", "yellow"), done.out
    assert tree(run_dir) == before
    names = [each["check"] for each in done.json["checks"]]
    assert {"rename", "fsync", "space", "grace", "walltime", "PYTHONHASHSEED", "kernels", "torch", "state"} <= {*names}
    assert done.json["save"]["step"] == 30 and done.json["save"]["seconds"] > 0
    on_disk = list((run_dir / "checkpoint-30").rglob("*"))
    assert done.json["save"]["files"] == len(on_disk) + 1


def test_where_there_is_no_run_yet_nothing_is_left(command: Command, tmp_path: Path) -> None:
    done = command("doctor", tmp_path / "runs" / "a")
    assert done.code == 0 and "there is no save to look at" in done.out and "space: " in done.out
    assert not [*tmp_path.iterdir()]


def test_the_first_save_of_a_script_says_what_it_takes_and_what_it_lacks(
    command: Command, run_dir: Path, script: Path
) -> None:
    """The script names the run directory itself; what it saves there, it saves elsewhere now."""
    before = tree(run_dir)
    done = command("doctor", run_dir, "--json", "--", script, run_dir)
    assert tree(run_dir) == before
    assert done.code == 0 and done.json["verdict"] == "yellow", done.out
    save, found = done.json["save"], done.json["checks"]
    assert save["step"] == 4 and save["bytes"] > 100 and 0 < save["seconds"] < 60 and save["step_seconds"] > 0
    assert [each["name"] for each in save["parts"] if each["by"] == "missing"] == ["script"]
    missing, held = by_check(found, "state")
    assert missing["level"] == "yellow" and "script MISSING: `recent`" in missing["found"]
    assert held["level"] == "green" and "optimizer" in held["found"] and "step 4" in held["found"]
    assert "a step and a save take" in by_check(found, "grace")[0]["found"]
    assert "room for 4 more" in by_check(found, "space")[0]["expected"], "it keeps three"
    assert by_check(found, "PYTHONHASHSEED")[0]["level"] == "green"


def test_a_command_that_saves_again_before_it_ends_is_measured_by_its_first_save(
    tmp_path: Path, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Job):
        def wait(self, points: Any, until: Any = bool) -> str | None:
            return super().wait(points, lambda: len([*self.trace.of("committed")]) > 1)

    monkeypatch.setattr(doctor, "Job", Late)
    environment = base_environment()
    words = reached([str(script), str(tmp_path / "run")], environment)
    save, *_ = doctor._first_save(words, environment, tmp_path / "job", None, 60)
    assert save is not None and save.manifest.step == 4


@pytest.mark.thorough
def test_a_command_that_saves_nothing_is_red(command: Command, tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit('no data at /data')")
    done = command("doctor", tmp_path, "--", failing)
    assert done.code == 1 and "ended with exit code 1 and without a save" in done.out and "no data at /data" in done.out
    failing.write_text(
        "import torch\nlayer = torch.nn.Linear(1, 1)\n"
        "while True:\n    layer(torch.ones(1)).sum().backward()\n    layer.zero_grad()\n"
    )
    done = command("doctor", tmp_path, "--", failing)
    assert done.code == 1 and "the command trains without this package" in done.out
    failing.write_text("import time\ntime.sleep(600)")
    done = command("doctor", tmp_path, "--timeout", "2", "--", failing)
    assert done.code == 1 and "hangs: it traced nothing for 2 s" in done.out
    assert [each.name for each in tmp_path.iterdir()] == ["failing.py"]


ELSEWHERE = """
import json, os, time
start = {"event": "start", "rank": 0, "pid": os.getpid(), "world_size": 1, "step": 0, "run_directory": "/elsewhere"}
open(os.environ["RESUME_ADAPTERS_TRACE"], "a").write(json.dumps({**start, "missing": []}) + "\\n")
time.sleep(600)
"""


def test_a_command_that_saves_elsewhere_is_ended(command: Command, tmp_path: Path) -> None:
    done = command("doctor", tmp_path, "--", sys.executable, "-c", ELSEWHERE)
    assert done.code == 1 and "the command saves into /elsewhere" in done.out and "write {run_dir} into" in done.out


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_one_that_is_killed_confuses_neither_a_prune_nor_a_start(
    command: Command, start_command: Callable[..., Any], run_dir: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    """In the middle of a save, say: SIGTERM lets it clear up, and after SIGKILL the next start does."""
    script, pid = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    before = tree(run_dir)
    running = start_command(tmp_path / "doctor", "doctor", run_dir, "--", script)
    waiting.until(lambda: pid.exists() and pid.read_text() != "")
    left = next((run_dir / ".resume").glob("remove-doctor-*"))
    checkpoint = left / "job" / "run" / "checkpoint-40"
    shutil.copytree(run_dir / "checkpoint-30", checkpoint)
    running.signal(ending)
    running.wait()
    if ending is signal.SIGTERM:
        assert tree(run_dir) == before
        return
    os.kill(int(pid.read_text()), signal.SIGKILL)
    names = [each["name"] for each in command("ls", run_dir, "--json").json["checkpoints"]]
    assert names == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    assert command("status", run_dir, "--json").json["resumes_from"]["name"] == "checkpoint-30"
    assert command("prune", run_dir, "--keep-last", "2").code == 0
    assert checkpoint.is_dir()
    run = ResumableRun(run_dir)
    chosen = run.open().checkpoint
    assert chosen is not None and chosen.path.name == "checkpoint-30"
    run.close()
    assert not left.exists()


def test_what_is_no_directory_for_a_run_is_refused(command: Command, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", run_dir / "checkpoint-30"):
        before = tree(tmp_path)
        done = command("doctor", path)
        assert done.code == 3 and str(path) in done.err
        assert tree(tmp_path) == before


# ---- The disk


@pytest.mark.thorough
def test_a_disk_that_runs_out_of_names_or_bytes_is_said(run_dir: Path, tmp_path: Path) -> None:
    """A real one, of few inodes or few bytes, in a mount namespace of its own."""
    place = tmp_path / "mounted"
    place.mkdir()

    def doctor(options: str, filling: str = "true") -> subprocess.CompletedProcess[str]:
        steps = (
            f"mount -t tmpfs -o {options} tmpfs {place} && cp -a {run_dir} {place}/run && cd {place} && {filling}; "
            f"{sys.executable} -m resume_adapters.cli doctor run && rm -f filled* ; find run | wc -l"
        )
        return subprocess.run(["unshare", "-rm", "sh", "-c", steps], capture_output=True, text=True)

    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    count = len(tree(run_dir)) + 1
    takes = len([*(run_dir / "checkpoint-30").rglob("*")]) + 1
    few = doctor(f"nr_inodes={1 + count + takes + 3}")
    assert f"yellow inodes: {takes + 3} free, and a checkpoint takes {takes}; expected room for 2 more" in few.stdout
    assert "yellow file system: tmpfs: memory, lost with the machine" in few.stdout and str(count) in few.stdout
    none = doctor(f"nr_inodes={1 + count}")
    assert "red    inodes: 0 free" in none.stdout and "red    disk: cannot be written: No space left" in none.stdout
    full = doctor("size=4m", "head -c 4m /dev/zero > filled 2> /dev/null")
    assert "red    space: 0 B free" in full.stdout and "red    disk: cannot be written: No space left" in full.stdout


class Lying(LocalStorage):
    """A disk on which fsync returns at once, and whose clock is an hour behind."""

    def sync(self, path: Path) -> None:
        pass

    def stamp(self, path: Path) -> Stamp | None:
        found = super().stamp(path)
        return found and found._replace(changed=found.changed - 3600 * 10**9)


class Copying(LocalStorage):
    """A disk whose rename leaves the target, if there is one."""

    def replace(self, source: Path, target: Path) -> None:
        if not target.exists():
            super().replace(source, target)


def test_a_disk_that_lies_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*checks.disk(Lying(), tmp_path)]
    assert level_of(found, "fsync")[0] == "yellow"
    assert level_of(found, "clocks of the disk and here") == ("yellow", "they differ by 3600 s")
    assert level_of(found, "rename")[0] == "green"
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libeatmydata.so")
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert level_of([*checks.disk(LocalStorage(), tmp_path)], "fsync")[0] == "red"


def test_a_disk_whose_rename_does_not_replace_is_red(tmp_path: Path) -> None:
    assert level_of([*checks.disk(Copying(), tmp_path)], "rename") == ("red", "a rename does not replace a file")

    def fail(operation: str, path: Path) -> None:
        if operation == "replace" and path.is_dir() is False and path.exists():
            refuse(errno.EEXIST)

    level, found = level_of([*checks.disk(Disturbed(fail), tmp_path)], "rename")
    assert level == "red" and found == "a rename fails: File exists"


@pytest.mark.parametrize("operation", ["write", "sync", "replace", "make_directory", "remove_file"])
def test_a_disk_that_fails_is_red(tmp_path: Path, operation: str) -> None:
    def fail(name: str, path: Path) -> None:
        if name == operation:
            refuse(errno.EROFS)

    found = [*checks.disk(Disturbed(fail), tmp_path)]
    assert level_of(found, "disk") == ("red", f"cannot be written: {os.strerror(errno.EROFS)}")


@pytest.mark.parametrize(("kept", "to_come", "count"), [(3, 900, 4), (1, 900, 2), (None, 900, 900), (None, 0, 2)])
def test_room_is_for_what_the_policy_keeps_or_else_for_all(
    tmp_path: Path, kept: int | None, to_come: int, count: int
) -> None:
    free = LocalStorage().free_bytes(tmp_path)
    save = Measured(manifest=_manifest(free // count), kept=kept, to_come=to_come)
    assert save.room_for == count
    levels = []
    for size in (free // count // 2, int(free / count * 1.5), free * 2):
        save = Measured(manifest=_manifest(size), kept=kept, to_come=to_come)
        levels.append(level_of([*checks.room(tmp_path, save)], "space")[0])
    assert levels == ["green", "yellow", "red"]


def _manifest(size: int) -> Manifest:
    files = (FileEntry("model/a.bin", size, "0" * 32), FileEntry("model/b.bin", 0, "0" * 32))
    facts: dict[str, Any] = {"step": 1, "epoch": 0.0, "world_size": 1, "generation": 1, "written": 0.0, "reason": ""}
    return Manifest(files=files, **facts)


def test_clocks_of_launches_that_differ_are_said() -> None:
    now = time.time()
    assert checks.clocks_of_run([now - 60, now - 30, now - 31], now).level == "green"
    assert checks.clocks_of_run([now - 60, now - 90], now).found == "they differ by 30 s"
    assert checks.clocks_of_run([now + 40], now).found == "they differ by 40 s", "it is written in the future"


# ---- The scheduler, determinism, versions


@pytest.mark.parametrize(("grace", "level"), [(5.0, "red"), (20.0, "yellow"), (60.0, "green")])
def test_the_grace_is_held_against_the_time_of_a_save(grace: float, level: str) -> None:
    save = Measured(manifest=_manifest(1), seconds=10.0, step_seconds=2.0)
    found = next(checks.scheduler({}, save, grace, 0.0))
    assert (found.level, found.expected) == (level, "29 s"), "half as long again, two steps, and ten seconds to leave"


@pytest.mark.parametrize(
    ("environment", "level", "words"),
    [
        ({}, "green", "no scheduler's job"),
        ({"SLURM_JOB_END_TIME": "1000"}, "green", "over in 900 s (SLURM_JOB_END_TIME)"),
        ({"SLURM_JOB_END_TIME": "150"}, "yellow", "over in 50 s"),
        ({"PBS_JOBID": "7"}, "yellow", "job 7 does not say when it ends"),
        ({"RESUME_ADAPTERS_MAX_RUNTIME": "soon"}, "red", "invalid walltime 'soon'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_the_end_of_a_job_is_known(
    environment: dict[str, str], level: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    _, found = checks.scheduler(environment, None, 30.0, 100.0)
    assert found.check == "walltime" and found.level == level and words in found.found


def test_what_does_not_repeat_itself_is_said() -> None:
    start: dict[str, Any] = {"device": "cuda", "repeats": False}
    seed, kernels = checks.determinism({}, start)
    assert (seed.level, kernels.level) == ("yellow", "yellow")
    assert "use_deterministic_algorithms" in kernels.found and "CUBLAS_WORKSPACE_CONFIG" in kernels.found
    set_up = {"PYTHONHASHSEED": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert [each.level for each in checks.determinism(set_up, {**start, "repeats": True})] == ["green", "green"]
    assert [each.level for each in checks.determinism(set_up, {"repeats": False})] == ["green", "green"], "a CPU"


@pytest.mark.parametrize(
    ("wanted", "level"), [(">=2.6", "green"), (">=2.6,<99", "green"), (">=99", "red"), (">=1.0,<2.6", "yellow")]
)
def test_versions_outside_of_what_is_tested_are_said(wanted: str, level: str) -> None:
    found = [*checks.versions([f"torch{wanted}", "torch>=1.0; extra == 'all'", "rich>=99"])]
    assert level_of(found, "torch")[0] == level
    assert not [each for each in found if each.check == "rich"]
