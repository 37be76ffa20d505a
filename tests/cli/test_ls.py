"""``ls`` shows every checkpoint as it is."""

from __future__ import annotations

import json
import os
import shutil

import msgspec
import pytest

from resume_adapters.core.checkpoint.layout import manifest_path
from resume_adapters.core.checkpoint.manifest import FORMAT, Ancestry, decode_manifest, encode_manifest
from resume_adapters.core.storage.local import LocalStorage

KEYS = {
    *("name", "state", "step", "epoch", "bytes", "written", "reason", "metrics", "generation", "world_size", "marks"),
    *("cursor", "ranks"),
}


def test_lists_the_committed_oldest_first_with_marks(command, run_dir):
    done = command("ls", run_dir, "--json")
    rows = done.json["checkpoints"]
    assert done.code == 0
    assert done.json["run_directory"] == str(run_dir)
    assert [row["name"] for row in rows] == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]
    assert [row["marks"] for row in rows] == [[], [], ["anchor", "latest"]]
    assert all(set(row) == KEYS and row["state"] == "committed" for row in rows)
    assert rows[1]["metrics"] == {"eval_loss": 1.0, "accuracy": 0.1}
    assert (rows[1]["step"], rows[1]["epoch"], rows[1]["reason"]) == (20, 2.0, "scheduled")
    files = [file for file in (run_dir / "checkpoint-20").rglob("*") if file.is_file()]
    assert (
        rows[1]["bytes"]
        == sum(f.stat().st_size for f in files)
        - manifest_path(LocalStorage(), run_dir / "checkpoint-20").stat().st_size
    )


def test_tells_pending_damaged_and_foreign_apart(command, run_dir, pending):
    pending(run_dir, 40)
    (run_dir / "checkpoint-20" / "model.bin").write_bytes(b"short")
    (run_dir / "checkpoint-5").mkdir()
    (run_dir / "checkpoint-50").symlink_to("nowhere")
    (run_dir / "logs").mkdir()
    done = command("ls", run_dir, "--json")
    rows = {row["name"]: row for row in done.json["checkpoints"]}
    assert done.code == 1
    assert {name: row["state"] for name, row in rows.items()} == {
        "checkpoint-5": "foreign",
        "checkpoint-10": "committed",
        "checkpoint-20": "damaged",
        "checkpoint-30": "committed",
        "checkpoint-40": "pending",
        "checkpoint-50": "damaged",
    }
    assert "model.bin has 5 bytes, its manifest says" in rows["checkpoint-20"]["reason"]
    assert "nowhere" in rows["checkpoint-50"]["reason"]
    assert rows["checkpoint-30"]["marks"] == ["anchor", "latest"]
    text = command("ls", run_dir)
    assert text.code == 1
    assert "checkpoint-20 is damaged: model.bin has 5 bytes" in text.out


def test_is_readable_in_80_columns(command, tmp_path, make_run):
    facts = {"epoch": 99.12345, "metrics": {"eval_loss": 1.23456789, "accuracy": 0.5}}
    make_run(tmp_path, {123456: facts, 234567: {**facts, "reason": "stop: SIGTERM"}}, best=234567)
    done = command("ls", tmp_path)
    assert done.code == 0
    assert all(len(line) <= 80 for line in done.out.splitlines()), done.out
    words = done.out.split()
    assert words[:9] == ["name", "step", "epoch", "state", "size", "age", "reason", "eval_loss", "marks"]
    for word in (
        "checkpoint-123456",
        "checkpoint-234567",
        "committed",
        "SIGTERM",
        "1.235",
        "anchor",
        "latest",
        "best",
    ):
        assert word in words, done.out


@pytest.mark.parametrize("steps", [(50, 60), (123456, 234567)])
@pytest.mark.parametrize("name", ["ls", "verify", "prune"])
def test_no_word_is_broken_in_60_columns(command, tmp_path, make_run, name, steps):
    facts = {"epoch": 99.12345, "metrics": {"eval_loss": 1.23456789}, "reason": "scheduled"}
    make_run(tmp_path, dict.fromkeys(steps, facts), best=steps[1])
    words = [name, tmp_path, *(["--keep-last", "1", "--dry-run"] if name == "prune" else [])]
    wide, narrow = command(*words), command(*words, columns=60)
    table = [line for line in narrow.out.splitlines() if "ould remove" not in line]
    assert all(len(line) <= 60 for line in table)
    assert {word for line in table for word in line.split()} <= set(wide.out.split())


@pytest.mark.parametrize(("best", "name"), [("eval_loss", "checkpoint-20"), ("accuracy:max", "checkpoint-10")])
def test_marks_the_best_of_a_metric(command, run_dir, best, name):
    rows = command("ls", run_dir, "--best", best, "--json").json["checkpoints"]
    assert [row["name"] for row in rows if "best" in row["marks"]] == [name]
    metric = best.partition(":")[0]
    assert metric in command("ls", run_dir, "--best", best).out.splitlines()[0]


@pytest.mark.parametrize(
    ("best", "says"), [("eval_los", "accuracy, eval_loss"), ("eval_loss:least", "METRIC[:min|max")]
)
def test_refuses_a_metric_that_nothing_was_evaluated_by(command, run_dir, best, says):
    done = command("ls", run_dir, "--best", best)
    assert (done.code, done.out) == (2, "")
    assert says in done.err


def test_marks_the_best_that_the_run_itself_tracks(command, tmp_path, make_run):
    make_run(tmp_path, {10: {}, 20: {}}, best=10)
    rows = command("ls", tmp_path, "--json").json["checkpoints"]
    assert [row["marks"] for row in rows] == [["best"], ["anchor", "latest"]]


def test_does_not_list_a_link_to_a_checkpoint_twice(command, run_dir):
    (run_dir / "favourite").symlink_to("checkpoint-10")
    assert len(command("ls", run_dir, "--json").json["checkpoints"]) == 3


@pytest.mark.parametrize("step", [20, 30])
def test_a_checkpoint_of_a_later_format_is_newer_and_not_damaged(command, run_dir, step):
    """A launch refuses it where it is the newest, and takes no older one instead: nobody says that it resumes."""
    name = f"checkpoint-{step}"
    file = manifest_path(LocalStorage(), run_dir / name)
    later = msgspec.structs.replace(decode_manifest(file.read_bytes()), format=FORMAT + 1)
    file.write_bytes(encode_manifest(later))
    file = run_dir / ".resume" / "status.json"
    status = {**json.loads(file.read_bytes()), "state": "running", "updated": 1e9}
    file.write_text(json.dumps(status))
    is_refused = step == 30
    for words in ("ls", "status", "verify"):
        done = command(words, run_dir)
        said = " ".join(done.out.split())
        assert done.code == int(is_refused or words == "verify"), words
        assert "damaged" not in said
        assert ("upgrade resume-adapters to resume from it" in said) is (is_refused or words != "status"), words
        assert ("the same launch resumes" in said) is (words == "status" and not is_refused)
    rows = {row["name"]: row for row in command("ls", run_dir, "--json").json["checkpoints"]}
    assert rows[name]["state"] == "newer"
    assert [each for each, row in rows.items() if "anchor" in row["marks"]] == ([] if is_refused else ["checkpoint-30"])
    found = command("status", run_dir, "--json").json
    assert (found["resumes_from"] is None, found["damaged"]) == (is_refused, [])


def test_reads_a_directory_of_foreign_checkpoints_only(command, tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    done = command("ls", tmp_path, "--json")
    assert done.code == 0
    assert [(row["step"], row["state"]) for row in done.json["checkpoints"]] == [(7, "foreign")]


def test_says_that_a_run_has_not_saved_yet(command, run_dir):
    for step in (10, 20, 30):
        shutil.rmtree(run_dir / f"checkpoint-{step}")
    done = command("ls", run_dir)
    assert (done.code, os.path.lexists(run_dir / "latest")) == (0, True)
    assert "No checkpoint yet" in done.out


# ---- Several runs


@pytest.fixture
def runs(tmp_path, make_run):
    """Two runs, one in a project directory."""
    above = tmp_path / "runs"
    for number, place in enumerate(("a", "b/checkpoints"), 1):
        make_run(above / place, {step: {} for step in range(10, 10 * number + 1, 10)})
    (above / "notes.txt").write_text("")
    (above / "empty").mkdir()
    return above


@pytest.mark.parametrize("name", ["ls", "status"])
def test_several_runs_are_an_overview(command, runs, name):
    given = sorted(runs.iterdir())
    done = command(name, *given, "--json")
    assert done.code == 0, "what is no run directory is left out"
    found = {os.path.relpath(each["run_directory"], runs): each for each in done.json["runs"]}
    assert {name: each["last_commit"] for name, each in found.items()} == {
        "a": 10,
        "b/checkpoints": 20,
    }
    assert [each["checkpoints"] for each in done.json["runs"]] == [1, 2]
    lines = command(name, *given).out.splitlines()
    assert lines[0].split()[:3] == ["name", "state", "step"] and len(lines) == 3
    (runs / "a" / "checkpoint-10" / "model.bin").unlink()
    assert command(name, *given).code == 1


def test_a_project_directory_has_its_run_directory_in_checkpoints(command, runs):
    done = command("ls", runs / "b", "--json")
    assert done.json["run_directory"] == str(runs / "b" / "checkpoints")
    assert command("status", runs / "b", "--json").json["last_commit"] == 20


def test_says_with_which_checkpoint_of_another_run_it_has_begun(command, run_dir):
    assert command("ls", run_dir, "--json").json["ancestry"] is None
    marker = manifest_path(LocalStorage(), run_dir / "checkpoint-30")
    found = Ancestry("/runs/a", "checkpoint-9", 9, ("model",), ("optimizer", "rng"))
    manifest = msgspec.structs.replace(decode_manifest(marker.read_bytes()), ancestry=found)
    marker.write_bytes(encode_manifest(manifest))
    assert command("ls", run_dir, "--json").json["ancestry"] == msgspec.json.decode(msgspec.json.encode(found))
    for name in ("ls", "status"):
        said = " ".join(command(name, run_dir).out.split())
        assert "forked from /runs/a/checkpoint-9 (step 9): model; fresh: optimizer, rng" in said
