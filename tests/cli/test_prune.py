"""``prune`` removes what no policy keeps, and nothing precious."""

from __future__ import annotations

import json
from datetime import timedelta

import msgspec
import pytest

from resume_adapters import KeepBest, KeepEvery, KeepLast, KeepWithin
from resume_adapters.core.checkpoint.retention import join_policies, parse_best, parse_period
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.status import RunState, RunStatus, signed
from resume_adapters.core.storage.local import LocalStorage


def names(run_dir):
    return sorted(path.name for path in run_dir.glob("checkpoint-*"))


def test_a_dry_run_prints_the_plan_and_changes_nothing(command, run_dir):
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    done = command("prune", run_dir, "--keep-last", "1", "--dry-run", "--json")
    assert done.code == 0
    assert done.json["dry_run"] is True
    assert [(row["name"], row["step"]) for row in done.json["remove"]] == [("checkpoint-10", 10), ("checkpoint-20", 20)]
    assert [row["reason"] for row in done.json["keep"]] == ["one of the last 1, a restart would resume from it"]
    text = command("prune", run_dir, "--keep-last", "1", "--dry-run")
    assert "Would remove 2 of 3 checkpoints" in text.out
    assert "no policy keeps it" in text.out
    assert sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*")) == before


def test_removes_what_no_policy_keeps_and_journals_it(command, run_dir):
    done = command("prune", run_dir, "--keep-best", "eval_loss")
    assert done.code == 0
    assert "Removed 1 of 3 checkpoints" in done.out
    assert names(run_dir) == ["checkpoint-20", "checkpoint-30"]
    journal = [json.loads(line) for line in (run_dir / ".resume" / "journal.jsonl").read_text().splitlines()]
    assert [entry["checkpoint"] for entry in journal if entry["event"] == "prune"] == ["checkpoint-10"]
    assert command("verify", run_dir).code == 0


def test_options_are_joined(command, run_dir):
    command("prune", run_dir, "--keep-best", "accuracy:max", "--keep-every", "20")
    assert names(run_dir) == ["checkpoint-10", "checkpoint-20", "checkpoint-30"]


def test_keeps_the_best_that_the_run_tracks_whatever_the_policy(command, tmp_path, make_run):
    make_run(tmp_path, {10: {}, 20: {}, 30: {}}, best=10).set_state(RunState.FINISHED, step=30)
    assert command("prune", tmp_path, "--keep-last", "1").code == 0
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-30"]


def test_leaves_alone_what_is_not_committed(command, run_dir, pending):
    pending(run_dir, 40)
    (run_dir / "checkpoint-5").mkdir()
    (run_dir / "checkpoint-20" / "model.bin").write_bytes(b"")
    done = command("prune", run_dir, "--keep-last", "1", "--json")
    assert done.json["untouched"] == [
        {"name": "checkpoint-5", "state": "foreign"},
        {"name": "checkpoint-20", "state": "damaged"},
        {"name": "checkpoint-40", "state": "pending"},
    ]
    assert names(run_dir) == ["checkpoint-20", "checkpoint-30", "checkpoint-40", "checkpoint-5"]


def test_a_flipped_bit_in_the_newest_keeps_the_one_before(command, run_dir, flip):
    flip(run_dir / "checkpoint-30" / "model.bin")
    done = command("prune", run_dir, "--keep-last", "1", "--json")
    assert done.json["untouched"] == [{"name": "checkpoint-30", "state": "damaged"}]
    assert names(run_dir) == ["checkpoint-20", "checkpoint-30"]


def test_removes_nothing_where_nothing_is_valid(command, run_dir):
    for step in (10, 20, 30):
        (run_dir / f"checkpoint-{step}" / "model.bin").unlink()
    done = command("prune", run_dir, "--keep-last", "1")
    assert (done.code, done.out) == (1, "")
    assert "no valid checkpoint" in done.err
    assert len(names(run_dir)) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "say what to keep"),
        (["--keep-last", "0"], "keeps nothing"),
        (["--keep-best", "eval_los"], "accuracy, eval_loss"),
        (["--keep-best", "eval_loss:min:two"], "METRIC[:min|max[:N]]"),
        (["--keep-within", "12"], "for example 12h"),
        (["--keep-within", "99999999999w"], "for example 12h"),
    ],
)
def test_refuses_a_policy_that_says_nothing(command, run_dir, words, says):
    done = command("prune", run_dir, *words)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert len(names(run_dir)) == 3


@pytest.mark.parametrize("host", [None, "elsewhere.example"])
def test_refuses_while_the_run_may_be_running(command, run_dir, host):
    status = signed(RunStatus(state=RunState.RUNNING, step=30, generation=1), 4e9)
    ControlDirectory(LocalStorage(), run_dir, lambda: 4e9).status.write(status)
    if host is not None:
        other = msgspec.structs.replace(status, host=host)
        (run_dir / ".resume" / "status.json").write_bytes(msgspec.json.encode(other))
    done = command("prune", run_dir, "--keep-last", "1")
    assert (done.code, done.out) == (2, "")
    assert "--force" in done.err
    assert len(names(run_dir)) == 3
    assert command("prune", run_dir, "--keep-last", "1", "--dry-run").code == 0
    assert command("prune", run_dir, "--keep-last", "1", "--force").code == 0
    assert names(run_dir) == ["checkpoint-30"]


def test_reads_every_option_as_its_policy():
    joined = join_policies(3, [KeepBest(2, "accuracy", "max")], 100, "1.5h")
    expected = KeepBest(2, "accuracy", "max") | KeepLast(3) | KeepEvery(100) | KeepWithin(timedelta(hours=1.5))
    assert joined == expected
    assert parse_best("accuracy:max:2") == KeepBest(2, "accuracy", "max")
    assert parse_best("eval_loss") == KeepBest(1, "eval_loss", "min")
    periods = {"30s": 30, "90m": 5400, "12h": 43200, "7d": 604800, "1w": 604800}
    assert {text: parse_period(text).total_seconds() for text in periods} == periods
