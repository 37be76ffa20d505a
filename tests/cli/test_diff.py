"""``diff`` tells whether a resume would restore the same from two checkpoints, by its exit code too."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from resume_adapters.core.state import encoding

import stored_runs
from stored_runs import CHECKPOINTS, recommit


def change_weight(checkpoint) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights[min(weights)].view(-1)[0] += 1
    save_file(weights, checkpoint / "model.safetensors")
    recommit(checkpoint)


@pytest.mark.parametrize("adapter", CHECKPOINTS)
def test_two_run_directories_are_compared_by_their_newest_checkpoints(command, tmp_path, adapter):
    """When and why a checkpoint was saved, and where, does not count."""
    a, b = (stored_runs.copy(adapter, tmp_path / name) for name in ("a", "b"))
    recommit(b, written=1.0, reason="SIGTERM", generation=7)
    done = command("diff", a.parent, b.parent)
    assert (done.code, done.err) == (0, "")
    assert f"A: {a.name} (step 15) of {a.parent}, the newest valid checkpoint\n" in done.out
    assert done.out.endswith("The states are equal.\n")


def test_the_exit_code_and_the_lines_say_what_differs(command, tmp_path):
    a, b = (stored_runs.copy("accelerate", tmp_path / name) for name in ("a", "b"))
    change_weight(b)
    (b / "optimizer.bin").unlink()
    done = command("diff", a, b)
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[2].startswith("model.safetensors: first.bias is float32[4], digest ")
    assert any(line.startswith("optimizer.bin: param_groups") and line.endswith("is missing in B") for line in lines)
    assert lines[-2].endswith("more differ; --json lists all") and lines[-1] == "The states differ."
    document = command("diff", a, b, "--json").json
    assert document["a"] == {"run_directory": str(a.parent), "checkpoint": a.name, "step": 15, "newest": False}
    assert not document["equal"]
    first, *others = document["differences"]
    assert first["name"] == "model.safetensors: first.bias" and first["a"] != first["b"]
    assert {each["name"].partition(":")[0] for each in others} == {"optimizer.bin"} and not any(
        each["b"] for each in others
    )


@pytest.mark.parametrize(
    ("adapter", "file", "keys", "name"),
    [
        ("hf", "scheduler.pt", (), "scheduler.pt: last_epoch"),
        ("accelerate", "scheduler.bin", (), "scheduler.bin: last_epoch"),
        ("lightning", "", ("lr_schedulers", 0), ": lr_schedulers.0.last_epoch"),
        (
            "deepspeed",
            "mp_rank_00_model_states.pt",
            ("lr_scheduler",),
            "mp_rank_00_model_states.pt: lr_scheduler.last_batch_iteration",
        ),
    ],
)
def test_names_the_one_value_that_differs(command, tmp_path, adapter, file, keys, name):
    a, b = (stored_runs.copy(adapter, tmp_path / each) for each in ("a", "b"))
    path = b / file if file else b
    content = torch.load(path, weights_only=True)
    inner = content
    for key in keys:
        inner = inner[key]
    inner[name.rpartition(".")[2].rpartition(" ")[2]] += 1
    torch.save(content, path)
    recommit(b)
    (difference,) = command("diff", a, b, "--json").json["differences"]
    assert difference["name"] == name and int(difference["b"]) == int(difference["a"]) + 1


@pytest.mark.parametrize("adapter", CHECKPOINTS)
def test_names_the_random_state_that_differs(command, tmp_path, adapter):
    a, b = (stored_runs.copy(adapter, tmp_path / each) for each in ("a", "b"))
    sidecar = b.with_name(f"{b.name}.resume") if b.is_file() else b / "resume"
    tensors = load_file(sidecar / "rank-00000.safetensors")
    changed = next(key for key in tensors if key.endswith("python.words"))
    tensors[changed].view(-1)[0] ^= 1
    save_file(tensors, sidecar / "rank-00000.safetensors")
    recommit(b)
    (difference,) = command("diff", a, b, "--json").json["differences"]
    assert difference["name"] == f"resume/rank-00000.safetensors: {changed.partition('.')[2]}"


def test_what_recognises_changed_data_does_not_count(command, tmp_path):
    """Where a launch began decides which batch a position keeps for that, if any, and each process hashes otherwise."""
    a, b = (stored_runs.copy("hf", tmp_path / each) for each in ("a", "b"))
    for each, has_batch in ((a, True), (b, False)):
        rank = each / "resume" / "rank-00000"
        state = encoding.decode(rank.with_suffix(".json").read_bytes(), load_file(rank.with_suffix(".safetensors")))
        batch = {"indices": [1, 2], "before": {"torch": torch.ones(3)}, "digest": "0"}
        state["position"] |= {"check": batch if has_batch else None, "word_hash": int(has_batch)}
        state["later"] = torch.ones(2)
        document, tensors = encoding.encode(state)
        rank.with_suffix(".json").write_bytes(document)
        save_file(tensors, rank.with_suffix(".safetensors"))
        recommit(each)
    done = command("diff", a, b)
    assert (done.code, done.out.splitlines()[2:]) == (0, ["The states are equal."])


def test_takes_a_name_beside_the_first_a_link_and_a_path(command, tmp_path):
    last = stored_runs.copy("lightning", tmp_path / "run")
    name = "epoch=0-step=10.ckpt"
    for first in (last.parent, last.parent / "latest"):
        document = command("diff", first, name, "--json")
        assert document.code == 1
        assert (document.json["a"]["checkpoint"], document.json["b"]["checkpoint"]) == ("last.ckpt", name)
    done = command("diff", last, last.parent / name)
    assert "\nglobal_step is 15 in A, 10 in B\n" in done.out


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
    only = document.json["differences"]
    assert only and all(each["name"].startswith("resume/") and not each["b"] for each in only)


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


@pytest.fixture
def sides(tmp_path):
    """Two directories that are named as checkpoints of a bare framework."""
    found = [tmp_path / name / "checkpoint-1" for name in ("a", "b")]
    for each in found:
        each.mkdir(parents=True)
    return found


def test_a_torn_file_and_one_of_another_format_are_compared_as_a_whole(command, sides):
    for each in sides:
        torch.save({"step": 1}, each / "optimizer.pt")
        (each / "optimizer.pt").write_bytes((each / "optimizer.pt").read_bytes()[:100])
        (each / "notes.txt").write_text("the same")
        (each / "resume").mkdir()
        (each / "resume" / "[red]part.json").write_text(json.dumps({"$": "no such kind"}))
        save_file({"w": torch.zeros(1)}, each / "model.safetensors")
    assert command("diff", *sides).code == 0
    (sides[1] / "optimizer.pt").write_bytes(b"torn elsewhere")
    (sides[1] / "resume" / "[red]part.json").write_text(json.dumps({"$": "no other kind"}))
    done = command("diff", *sides)
    assert done.code == 1
    assert "optimizer.pt is a file, digest" in done.out and "resume/[red]part.json is a file, digest" in done.out


def test_what_a_clock_measured_and_what_a_launch_was_given_does_not_count(command, sides):
    for each, seconds in zip(sides, (1.0, 2.0), strict=True):
        log = [{"loss": 0.5, "eval_runtime": seconds, "eval_samples_per_second": 1 / seconds}]
        state = {"log_history": log, "best_model_checkpoint": f"{each.parent}/checkpoint-1", "elapsed": seconds}
        (each / "trainer_state.json").write_text(json.dumps(state))
        torch.save({"output_dir": str(each)}, each / "training_args.bin")
        torch.save({"hyper_parameters": {"directory": str(each)}, "nan": float("nan")}, each / "more.pt")
    assert command("diff", *sides).code == 0


def test_a_bit_a_dtype_and_a_sparse_tensor_are_told_apart(command, sides):
    indices = torch.tensor([[0, 1]])
    for each, value in zip(sides, (0.0, -0.0), strict=True):
        torch.save(
            {
                "zero": torch.tensor(value),
                "form": torch.zeros(2, dtype=torch.float16 if str(value)[0] == "-" else torch.float32),
                "sparse": torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0 + (str(value)[0] == "-")])),
                "brain": torch.ones(2, dtype=torch.bfloat16),
            },
            each / "optimizer.pt",
        )
    found = command("diff", *sides, "--json").json["differences"]
    assert [each["name"] for each in found] == [f"optimizer.pt: {name}" for name in ("zero", "form", "sparse")]


def test_a_name_in_a_file_does_not_reach_the_terminal_as_a_command(command, sides):
    for each, value in zip(sides, (0.0, float("nan")), strict=True):
        save_file({"\x1b]0;title\x07[red]weight": torch.tensor([value, 1.0])}, each / "model.safetensors")
        torch.save({"\x9b2Jrate": value, "x": "\x1b[2J" + each.parent.name}, each / "scheduler.pt")
        (each / "no\x1b[2Jtes.txt").write_text(str(value))
    done = command("diff", *sides)
    assert done.code == 1
    assert all(each.isprintable() or each == "\n" for each in done.out)
    assert "\\x1b]0;title\\x07[red]weight is float32[2]" in done.out
    assert "\\x9b2Jrate is 0.0 in A, nan in B" in done.out
    assert "no\\x1b[2Jtes.txt is a file" in done.out
