"""``diff`` says part by part what two checkpoints have alike, and the exit code says whether they are equal."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from resume_adapters.cli.render import printable

import stored_runs
from stored_runs import CHECKPOINTS, recommit


def change_weight(checkpoint) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights[min(weights)].view(-1)[0] += 1
    save_file(weights, checkpoint / "model.safetensors")
    recommit(checkpoint)


@pytest.mark.parametrize("adapter", CHECKPOINTS)
def test_two_run_directories_are_compared_by_their_newest_checkpoints(command, tmp_path, adapter):
    a, b = (stored_runs.copy(adapter, tmp_path / name) for name in ("a", "b"))
    done = command("diff", a.parent, b.parent)
    assert (done.code, done.err) == (0, "")
    assert f"A: {a.name} (step 15) of {a.parent}, the newest valid checkpoint\n" in done.out
    assert "equal by digest, not read" in done.out
    assert done.out.endswith("The states are equal.\n")


def test_the_exit_code_and_the_lines_say_what_differs(command, tmp_path):
    a, b = (stored_runs.copy("accelerate", tmp_path / name) for name in ("a", "b"))
    change_weight(b)
    (b / "optimizer.bin").unlink()
    done = command("diff", a, b)
    assert done.code == 1
    lines = done.out.splitlines()
    assert any(
        line.startswith("model: first.bias") or "first.bias float32[4]: 1 of 4 elements differ" in line
        for line in lines
    )
    assert "optimizer: optimizer.bin is only in A (35 values)" in lines
    assert lines[-1] == "The states differ."
    document = command("diff", a, b, "--json").json
    assert document["a"] == {"run_directory": str(a.parent), "checkpoint": a.name, "step": 15, "newest": False}
    assert not document["equal"]
    (difference,) = next(part for part in document["parts"] if part["part"] == "model")["differences"]
    assert difference["kind"] == "tensor" and difference["file"] == "model" and difference["name"] == "first.bias"
    assert difference["measured"]["differing"] == 1
    assert abs(difference["measured"]["max_absolute"] - 1) < 1e-6


def test_takes_a_name_beside_the_first_a_link_and_a_path(command, tmp_path):
    last = stored_runs.copy("lightning", tmp_path / "run")
    name = "epoch=0-step=10.ckpt"
    for first in (last.parent, last.parent / "latest"):
        document = command("diff", first, name, "--json")
        assert document.code == 1
        assert (document.json["a"]["checkpoint"], document.json["b"]["checkpoint"]) == ("last.ckpt", name)
    done = command("diff", last, last.parent / name)
    assert "rng: the state of the generator torch differs (resume/rank-00000)" in done.out
    assert "more; --json lists all" in done.out
    assert "manifest: manifest: step is 15 in A, 10 in B" in done.out
    assert "(not state)" in done.out


@pytest.mark.parametrize("adapter", ["lightning", "accelerate"])
def test_a_checkpoint_of_the_bare_framework_lacks_only_the_parts_of_this_package(command, tmp_path, adapter):
    a = stored_runs.copy(adapter, tmp_path / "a")
    bare = tmp_path / "bare" / a.name
    bare.parent.mkdir()
    if a.is_file():
        shutil.copy(a, bare)
    else:
        shutil.copytree(a, bare, ignore=shutil.ignore_patterns("resume"))
    document = command("diff", a, bare, "--json")
    assert document.code == 1
    only = [each["file"] for part in document.json["parts"] for each in part["differences"]]
    assert only and all(file.startswith("resume/") for file in only)


def test_a_run_directory_of_the_bare_trainer_with_a_final_model_is_one(command, tmp_path):
    a = stored_runs.copy("hf", tmp_path / "a")
    run = tmp_path / "bare"
    shutil.copytree(a, run / "checkpoint-15", ignore=shutil.ignore_patterns("resume"))
    shutil.copy(a / "model.safetensors", run)
    document = command("diff", run, run / "checkpoint-15", "--json").json
    assert document["equal"] and document["a"]["newest"]
    assert document["a"]["checkpoint"] == document["b"]["checkpoint"] == "checkpoint-15"


def test_what_is_no_checkpoint_is_refused(command, tmp_path):
    a = stored_runs.copy("hf", tmp_path / "a")
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    for other in (tmp_path / "file", tmp_path / "empty", "checkpoint-99"):
        done = command("diff", a, other)
        assert (done.code, done.out) == (3, "")
        assert str(other) in done.err
    assert command("diff", a).code == 2
    (a / "model.safetensors").unlink()
    done = command("diff", a.parent, a.parent)
    assert done.code == 1 and "no valid checkpoint" in done.err


def test_a_name_in_a_file_does_not_reach_the_terminal_as_a_command(command, tmp_path):
    for name, value in (("a", 0.0), ("b", float("nan"))):
        (tmp_path / name / "checkpoint-1").mkdir(parents=True)
        weights = {"\x1b]0;title\x07[red]weight": torch.tensor([value, 1.0]), "other": torch.tensor([value / 0.5])}
        save_file(weights, tmp_path / name / "checkpoint-1" / "model.safetensors")
        torch.save({"\x9b2Jrate": value, "x": "\x1b[2J" + name}, tmp_path / name / "checkpoint-1" / "scheduler.pt")
        (tmp_path / name / "checkpoint-1" / "no\x1b[2Jtes.txt").write_text(name)
    done = command("diff", tmp_path / "a" / "checkpoint-1", tmp_path / "b" / "checkpoint-1")
    assert done.code == 1
    assert all(each.isprintable() or each == "\n" for each in done.out)
    assert "\\x1b]0;title\\x07[red]weight float32[2]: 1 of 2 elements differ, 0 NaN in A, 1 in B" in done.out
    assert "\\x9b2Jrate is 0.0 in A, nan in B" in done.out
    assert "no\\x1b[2Jtes.txt differs" in done.out


def test_a_part_cannot_write_markup(command, tmp_path):
    a, b = (stored_runs.copy("accelerate", tmp_path / name) for name in ("a", "b"))
    for side, value in ((a, 1), (b, 2)):
        (side / "resume" / "[red]part\x1b.json").write_text(json.dumps({"$": "no such kind", "of": value}))
    done = command("diff", a, b)
    assert done.code == 1
    assert "[red]part\\x1b: resume/[red]part\\x1b differs" in done.out


def test_infinite_differences_are_text_in_json(command, tmp_path):
    for name, value in (("a", 0.0), ("b", float("inf"))):
        (tmp_path / name / "checkpoint-1").mkdir(parents=True)
        save_file({"w": torch.tensor([value])}, tmp_path / name / "checkpoint-1" / "model.safetensors")
    sides = [tmp_path / name / "checkpoint-1" for name in "ab"]
    (difference,) = command("diff", *sides, "--json").json["parts"][0]["differences"]
    assert difference["measured"]["max_absolute"] == "inf"
    assert "by at most inf (relative inf)" in command("diff", *sides).out


def test_printable_text_is_unchanged():
    assert printable("Größe 重み ok") == "Größe 重み ok"
    assert printable("a\nb\u202e") == "a\\nb\\u202e"
