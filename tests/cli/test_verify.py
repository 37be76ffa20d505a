"""``verify`` reads everything and names what is damaged."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from resume_adapters.core.checkpoint.layout import manifest_path
from resume_adapters.core.storage.local import LocalStorage


def test_finds_a_whole_run_valid(command, run_dir):
    done = command("verify", run_dir, "--json")
    assert done.code == 0
    rows = done.json["checkpoints"]
    assert [(row["name"], row["verdict"], row["damage"]) for row in rows] == [
        (f"checkpoint-{step}", "valid", []) for step in (10, 20, 30)
    ]
    assert all(row["files"] == 3 and row["bytes"] > 0 for row in rows)
    assert done.err == "", "no progress bar where standard error is no terminal"
    text = command("verify", run_dir)
    assert (text.code, text.out.count("valid")) == (0, 3)


def test_names_every_damaged_file(command, run_dir, flip):
    flip(run_dir / "checkpoint-20" / "model.bin")
    (run_dir / "checkpoint-20" / "resume" / "ema.json").unlink()
    done = command("verify", run_dir, "--json")
    assert done.code == 1
    verdicts = {row["name"]: row for row in done.json["checkpoints"]}
    assert [name for name, row in verdicts.items() if row["verdict"] == "damaged"] == ["checkpoint-20"]
    reasons = {damage["file"]: damage["reason"] for damage in verdicts["checkpoint-20"]["damage"]}
    assert set(reasons) == {"model.bin", "resume/ema.json"}
    assert "its content has changed" in reasons["model.bin"]
    text = command("verify", run_dir)
    assert text.code == 1
    assert "checkpoint-20 is damaged: model.bin has the digest" in text.out
    assert "checkpoint-20 is damaged: resume/ema.json cannot be read: No such file" in text.out


def test_finds_every_flipped_bit(command, run_dir, flip):
    checkpoint = run_dir / "checkpoint-30"
    files = [file for file in checkpoint.rglob("*") if file.is_file()]
    assert len(files) == 4
    for file in files:
        before = file.read_bytes()
        flip(file)
        done = command("verify", run_dir, "checkpoint-30", "--json")
        assert done.code == 1, file
        damage = done.json["checkpoints"][0]["damage"]
        assert [each["file"] for each in damage] == [file.relative_to(checkpoint).as_posix()]
        file.write_bytes(before)


def test_verifies_only_what_is_named_by_name_or_by_path(command, run_dir, flip):
    flip(run_dir / "checkpoint-10" / "model.bin")
    assert command("verify", run_dir, "checkpoint-20").code == 0
    assert command("verify", run_dir, f"{run_dir}/checkpoint-10/").code == 1


def test_refuses_a_name_that_is_no_checkpoint(command, run_dir):
    done = command("verify", run_dir, "checkpoint-99")
    assert (done.code, done.out) == (2, "")
    assert "checkpoint-10, checkpoint-20, checkpoint-30" in done.err


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff"])
def test_names_a_manifest_that_cannot_be_read(command, run_dir, content):
    file = manifest_path(LocalStorage(), run_dir / "checkpoint-30")
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    done = command("verify", run_dir, "--json")
    assert done.code == 1
    assert done.json["checkpoints"][-1]["damage"][0]["file"] == "resume/manifest.json"


def test_says_where_there_is_nothing_to_verify(command, run_dir, tmp_path, pending):
    shutil.rmtree(run_dir / "checkpoint-10")
    pending(tmp_path / "other", 5)
    done = command("verify", tmp_path / "other")
    assert (done.code, done.out) == (1, "There is no checkpoint to verify.\n")
    named = command("verify", tmp_path / "other", "5")
    assert named.code == 2, "a pending one has no step"
    named = command("verify", tmp_path / "other", "checkpoint-5")
    assert named.code == 1
    assert "checkpoint-5 is pending: it has no manifest" in named.out


@pytest.fixture
def foreign(run_dir):
    """A checkpoint that was made without this package."""
    checkpoint = run_dir / "checkpoint-5"
    checkpoint.mkdir()
    shard = "model-00001-of-00001.safetensors"
    save_file({"weight": torch.ones(40)}, checkpoint / shard)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": shard}}))
    (checkpoint / "trainer_state.json").write_text('{"global_step": 5}')
    torch.save({"state": torch.ones(40)}, checkpoint / "optimizer.pt")
    (checkpoint / "scheduler.pt").write_bytes(pickle.dumps({"last_epoch": 5}))
    (checkpoint / "notes.txt").write_text("no format that is known")
    return checkpoint


def test_without_digests_only_the_structure_is_verified(command, run_dir, foreign):
    done = command("verify", run_dir, "--json")
    assert done.code == 0
    assert [(row["name"], row["verdict"], row["files"]) for row in done.json["checkpoints"]][:2] == [
        ("checkpoint-5", "readable", 6),
        ("checkpoint-10", "valid", 3),
    ]
    assert "checkpoint-5 is readable: it was made without this package" in command("verify", run_dir, 5).out


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("trainer_state.json", "half"),
        ("optimizer.pt", "half"),
        ("model-00001-of-00001.safetensors", "half"),
        ("scheduler.pt", b""),
        ("model.safetensors.index.json", b'{"weight_map": {"weight": "model-2.safetensors"}}'),
    ],
)
def test_a_torn_or_missing_file_of_a_foreign_one_is_named(command, run_dir, foreign, file, content):
    whole = (foreign / file).read_bytes()
    (foreign / file).write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    done = command("verify", run_dir, foreign.name, "--json")
    assert done.code == 1
    assert [each["file"] for each in done.json["checkpoints"][0]["damage"]] == [file]
