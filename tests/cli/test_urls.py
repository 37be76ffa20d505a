"""The commands that take the URL of a run's copies; here the store is a directory."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from resume_adapters.cli import run_directory
from resume_adapters.cli.commands.copies import pull, push
from resume_adapters.cli.run_directory import STORAGE
from resume_adapters.core.checkpoint.layout import latest_form, latest_name
from resume_adapters.core.checkpoint.manifest import decode_manifest, encode_manifest
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus
from resume_adapters.errors import UnsupportedSetting


@pytest.fixture
def url(run_dir, tmp_path: Path) -> str:
    """Copies of the first and the last checkpoint of the run directory."""
    url = f"file://{tmp_path}/bucket"
    for name in ("checkpoint-10", "30"):
        push(run_dir, url, name)
    return url


def test_copies_are_pushed_once_and_listed_oldest_first(command, run_dir, url):
    done = command("push", run_dir, url, "--json")
    assert done.json["checkpoint"] == "checkpoint-30" and done.json["was_there"]
    listed = command("ls", url, "--json")
    assert listed.code == 0 and listed.json["run_directory"] == url
    assert [row["name"] for row in listed.json["checkpoints"]] == ["checkpoint-10", "checkpoint-30"]
    assert [row["marks"] for row in listed.json["checkpoints"]] == [[], ["anchor"]]
    assert "checkpoint-10" in command("ls", url).out


def test_a_copy_is_pulled_and_valid(command, url, tmp_path):
    done = command("pull", url, tmp_path / "new", "--json")
    assert (done.code, done.json["checkpoint"]) == (0, "checkpoint-30")
    assert "checkpoint-10" in command("pull", url, tmp_path / "new", "10").out
    verified = command("verify", tmp_path / "new", "--json")
    assert [row["verdict"] for row in verified.json["checkpoints"]] == ["valid", "valid"]
    assert command("verify", url).code == 0


def test_the_best_copy_is_marked(command, url):
    rows = [command("ls", url, "--best", f"eval_loss:{mode}", "--json").json["checkpoints"] for mode in ("min", "max")]
    losses = [row["metrics"]["eval_loss"] for row in rows[0]]
    marked = [[row["metrics"]["eval_loss"] for row in found if "best" in row["marks"]] for found in rows]
    assert marked == [[min(losses)], [max(losses)]] and len(set(losses)) == 2


def test_what_a_lost_machine_has_left_running_is_pulled_by_force(run_dir, url):
    """Its status cannot be checked from here, and only the user knows that it is gone."""
    file = run_dir / ".resume" / "status.json"
    left = msgspec.json.decode(file.read_bytes(), type=RunStatus)
    file.write_bytes(msgspec.json.encode(replace(left, state=RunState.RUNNING, host="lost.example")))
    with pytest.raises(UnsupportedSetting, match=r"on lost\.example.* --force"):
        pull(url, run_dir)
    pull(url, run_dir, force=True)


def test_a_project_directory_gets_it_where_the_other_commands_look(url, tmp_path):
    project = tmp_path / "project"
    for name in ("10", "30"):
        pull(url, project / "checkpoints" if name == "10" else project, name)
    assert [row.path.name for row in run_directory.read(project).rows] == ["checkpoint-10", "checkpoint-30"]
    assert not (project / ".resume").exists()


def test_what_is_pulled_is_later_than_the_start_that_owns_the_copies(url, tmp_path):
    """Else a launch that finds the store down at its begin takes that one for a later one, and is locked out by it."""
    claims = tmp_path / "bucket" / ".resume" / "claims"
    claims.mkdir(parents=True)
    (claims / "00000007").write_text("the machine that was lost")
    pull(url, tmp_path / "new")
    assert ControlDirectory(STORAGE, tmp_path / "new", time.time).fencing.generation() == 8


@pytest.mark.parametrize("framework", ["transformers 5.3.0", "deepspeed 0.18.2"])
def test_latest_is_what_the_framework_reads(url, tmp_path, framework):
    (marker,) = (tmp_path / "bucket" / "checkpoint-30").rglob("manifest.json")
    marker.write_bytes(encode_manifest(replace(decode_manifest(marker.read_bytes()), framework=framework)))
    pull(url, tmp_path / "new")
    latest = tmp_path / "new" / "latest"
    assert latest.is_symlink() == framework.startswith("transformers")
    form = latest_form(STORAGE, tmp_path / "new")
    pull(url, tmp_path / "new", "10")
    assert latest_name(STORAGE, tmp_path / "new") == "checkpoint-10" and latest_form(STORAGE, tmp_path / "new") == form


def test_what_is_damaged_is_named(command, url, tmp_path):
    files = sorted((tmp_path / "bucket" / "checkpoint-30").rglob("*.json"))
    file = next(each for each in files if each.name.startswith("rank-"))
    content = file.read_bytes()
    file.write_bytes(b"!" + content[1:])
    done = command("verify", url, "checkpoint-30", "--json")
    (row,) = done.json["checkpoints"]
    assert (done.code, row["verdict"]) == (1, "damaged") and "its content has changed" in row["damage"][0]["reason"]
    file.write_bytes(content[1:])
    assert command("ls", url, "--json").json["checkpoints"][1]["state"] == "damaged"
    assert command("verify", url).code == 1
    file.unlink()
    assert "has no bytes" in command("ls", url).out
    assert command("pull", url, tmp_path / "new").code == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ls", "{url}x"], 3, "there is no checkpoint at"),
        (["ls", "{url}", "runs"], 2, "expected it alone"),
        (["verify", "{url}", "99"], 2, "there is no checkpoint 99"),
        (["pull", "{url}", "new", "99"], 2, "there is no checkpoint 99"),
        (["push", "{run}", "s3://k:s@bucket/a"], 2, "has credentials or a query"),
        (["push", "{run}", "nowhere"], 2, "is not a URL"),
        (["ls", "{url}", "--best", "los"], 2, "has the metric 'los'; they have"),
        (["ls", "nothing://host/a"], 2, "unknown scheme"),
        (["status", "{url}"], 2, "has copies, which have no status"),
    ],
)
def test_what_cannot_be_done_is_refused(command, run_dir, url, words, code, said):
    done = command(*[word.format(url=url, run=run_dir) for word in words])
    assert (done.code, said in done.err) == (code, True), done.err
