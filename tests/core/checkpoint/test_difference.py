"""Two checkpoints are compared part by part: real ones of every adapter, changed in one place."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from resume_adapters.core.checkpoint import contents as contents_module
from resume_adapters.core.checkpoint.contents import Contents, Stored
from resume_adapters.core.checkpoint.difference import Difference, compare
from resume_adapters.core.checkpoint.layout import sidecar_dir

import stored_runs
from stored_runs import CHECKPOINTS, STORAGE, change_tensor, contents, recommit

ADAPTERS = sorted(CHECKPOINTS)


@pytest.fixture(params=ADAPTERS)
def adapter(request):
    return request.param


@pytest.fixture
def pair(adapter, tmp_path):
    return stored_runs.copy(adapter, tmp_path / "a"), stored_runs.copy(adapter, tmp_path / "b")


def differing(a: Contents, b: Contents) -> dict[str, list[Difference]]:
    return {name: part.differences for name, part in compare(a, b).parts.items() if part.differences}


def bare(tmp_path: Path, name: str, **files) -> Contents:
    """A checkpoint of a bare framework."""
    directory = tmp_path / name / "checkpoint-1"
    directory.mkdir(parents=True)
    for file, content in files.items():
        path = directory / file.replace("__", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".json":
            path.write_text(json.dumps(content))
        elif path.suffix == ".safetensors":
            save_file(content, path)
        else:
            torch.save(content, path)
    return Contents(STORAGE, directory, None)


# ---- The four adapters


def test_files_with_equal_digests_are_equal_unread(pair):
    found = compare(*map(contents, pair))
    assert found.is_equal and found.by_digest == {}
    assert found.parts["model"].same_files and not found.parts["model"].values
    assert [*found.parts][:2] == ["manifest", "model"]


def test_a_checkpoint_is_equal_to_itself_where_everything_is_read(pair):
    found = compare(*(contents(each, manifest=False) for each in pair))
    assert found.is_equal and found.by_digest == {}
    counts = {name: part.values for name, part in found.parts.items()}
    assert all(counts[part] > 0 for part in ("model", "optimizer", "scheduler", "rng", "data", "counters"))


def test_a_checkpoint_of_the_bare_framework_is_read(pair):
    for each in pair:
        shutil.rmtree(sidecar_dir(each) if each.is_file() else each / "resume")
    found = compare(*(contents(each, manifest=False) for each in pair))
    assert found.is_equal and found.parts["optimizer"].values and found.parts["model"].values


@pytest.mark.parametrize("part", ["model", "optimizer", "rng", "data"])
def test_names_the_one_tensor_that_differs(pair, part):
    before = contents(pair[1])
    item, located = next(
        (item, each)
        for item, each in before.index(frozenset()).items()
        if (item.part, type(each.value)) == (part, Stored)
        and ("exp_avg" in item.name or part != "optimizer")
        and not each.file.endswith((".pth", ".pkl"))
    )
    change_tensor(pair[1], located)
    found = differing(*map(contents, pair))
    assert [*found] == [part] and len(found[part]) == 1
    (difference,) = found[part]
    assert difference.where == item.where
    if part == "rng":
        assert (difference.kind, difference.name, difference.values) == ("generator", item.generator, (item.name,))
        assert item.generator in ("python", "numpy", "torch")
    else:
        assert (difference.kind, difference.name) == ("tensor", item.name)
        assert difference.measured is not None and difference.measured.differing == 1
        assert difference.measured.max_absolute is not None
    assert not compare(*map(contents, pair)).is_equal


@pytest.mark.parametrize(
    ("adapter", "file", "keys", "name"),
    [
        ("hf", "scheduler.pt", (), "last_epoch"),
        ("accelerate", "scheduler.bin", (), "last_epoch"),
        ("lightning", "", ("lr_schedulers", 0), "lr_schedulers.0.last_epoch"),
        ("deepspeed", "mp_rank_00_model_states.pt", ("lr_scheduler",), "lr_scheduler.last_batch_iteration"),
    ],
    indirect=["adapter"],
)
def test_names_the_field_of_a_schedule(pair, file, keys, name):
    path = pair[1] / file if file else pair[1]
    content = torch.load(path, weights_only=True)
    inner = content
    for key in keys:
        inner = inner[key]
    inner[name.rpartition(".")[2]] += 1
    torch.save(content, path)
    recommit(pair[1])
    found = differing(*map(contents, pair))
    assert {part: [(each.kind, each.name) for each in each_part] for part, each_part in found.items()} == {
        "scheduler": [("value", name)]
    }


def test_names_a_field_of_the_data_cursor_and_of_the_manifest(pair):
    document = (sidecar_dir(pair[1]) if pair[1].is_file() else pair[1] / "resume") / "rank-00000.json"
    text = document.read_text()
    assert '"workers":0' in text
    document.write_text(text.replace('"workers":0', '"workers":2'))
    recommit(pair[1], step=16, world_size=2, framework="another 1.0", metrics={"loss": 1.0}, reason="SIGTERM")
    found = compare(*map(contents, pair))
    names = {name: {each.name.rpartition(".")[2] for each in part.differences} for name, part in found.parts.items()}
    assert names["data"] == {"workers"}
    assert names["manifest"] == {"step", "world_size", "framework"}
    assert "reason" in names["circumstances"]
    assert "loss" in names["metrics"]


def test_when_and_why_it_was_saved_is_no_difference_of_state(pair):
    recommit(pair[1], written=1.0, reason="SIGTERM", generation=7)
    found = compare(*map(contents, pair))
    assert found.is_equal
    part = found.parts["circumstances"]
    assert not part.is_counted
    assert {each.name: each.b for each in part.differences} == {
        "written": "1.0",
        "reason": "'SIGTERM'",
        "generation": "7",
    }


@pytest.mark.parametrize("adapter", ["hf"], indirect=True)
def test_a_file_that_one_lacks_is_one_difference(pair):
    (pair[1] / "optimizer.pt").unlink()
    assert differing(*map(contents, pair)) == {
        "optimizer": [Difference("optimizer.pt", "", "only_a", values=("110",))],
    }
    assert differing(*map(contents, reversed(pair))) == {
        "optimizer": [Difference("optimizer.pt", "", "only_b", values=("110",))],
    }


@pytest.mark.parametrize("adapter", ["hf"], indirect=True)
def test_a_file_of_another_size_than_in_the_manifest_is_read(pair):
    ema = load_file(pair[1] / "resume" / "ema.safetensors")
    save_file({name: tensor + 1 for name, tensor in ema.items()}, pair[1] / "resume" / "ema.safetensors", {"a": "b"})
    assert [*differing(*map(contents, pair))] == ["ema"]


@pytest.mark.parametrize("adapter", ["hf"], indirect=True)
def test_a_torn_file_is_compared_by_its_digest(pair):
    for name in ("optimizer.pt", "model.safetensors", "trainer_state.json", "resume/rank-00000.json"):
        for each in pair:
            (each / name).write_bytes((each / name).read_bytes()[:200])
    found = compare(*(contents(each, manifest=False) for each in pair))
    assert found.is_equal
    assert found.by_digest.keys() == {
        "optimizer.pt",
        "model.safetensors",
        "trainer_state.json",
        "resume/rank-00000.json",
    }
    (pair[1] / "optimizer.pt").write_bytes(b"changed")
    found = compare(*(contents(each, manifest=False) for each in pair))
    assert [each.kind for each in found.parts["optimizer"].differences] == ["content"]


@pytest.mark.parametrize("adapter", ["accelerate"], indirect=True)
def test_a_part_without_its_tensors_is_compared_by_its_digest(pair):
    (pair[1] / "resume" / "ema.safetensors").unlink()
    found = compare(*(contents(each, manifest=False) for each in pair))
    assert "which is missing" in found.by_digest["resume/ema.json"]
    assert [each.kind for each in found.parts["ema"].differences] == ["only_a", "only_b"]


# ---- Layouts of other checkpoints


def test_shards_and_formats_of_a_model_do_not_matter(tmp_path):
    one, two = torch.arange(6.0), torch.arange(4.0)
    a = bare(tmp_path, "a", model__safetensors={"one": one, "two": two})
    b = bare(
        tmp_path,
        "b",
        **{
            "model-00001-of-00002__safetensors": {"one": one},
            "model-00002-of-00002__safetensors": {"two": two + 1},
            "model__safetensors__index__json": {"weight_map": {}},
        },
    )
    c = bare(tmp_path, "c", pytorch_model__bin=OrderedDict(one=one, two=two))
    assert [each.name for each in differing(a, b)["model"]] == ["two"]
    assert compare(a, c).is_equal and compare(a, c).parts["model"].values == 2


def test_a_tensor_of_another_shape_or_type(tmp_path):
    a = bare(tmp_path, "a", model__safetensors={"one": torch.zeros(2), "two": torch.zeros(3)})
    b = bare(tmp_path, "b", model__safetensors={"one": torch.zeros(3), "two": torch.zeros(3).half()})
    assert [(each.kind, each.a, each.b) for each in differing(a, b)["model"]] == [
        ("form", "float32[2]", "float32[3]"),
        ("form", "float32[3]", "float16[3]"),
    ]


def optimizer(names: list[str] | None, moment: float) -> dict:
    group = {"lr": 0.1, "params": [0, 1], **({"param_names": names} if names else {})}
    state = {index: {"exp_avg": torch.full((2,), moment + index)} for index in (0, 1)}
    return {"state": state, "param_groups": [group]}


def test_moments_have_the_names_of_the_parameters_where_the_file_has_them(tmp_path):
    named = [bare(tmp_path, f"named{n}", optimizer__pt=optimizer(["head.weight", "head.bias"], n)) for n in (0, 1)]
    plain = [bare(tmp_path, f"plain{n}", optimizer__pt=optimizer(None, n)) for n in (0, 1)]
    names = [[each.name for each in differing(*two)["optimizer"]] for two in (named, plain)]
    assert names == [
        ["state.head.weight.exp_avg", "state.head.bias.exp_avg"],
        ["state.0.exp_avg", "state.1.exp_avg"],
    ]
    assert compare(named[0], named[0]).is_equal


def test_generators_of_every_file_are_named(tmp_path):
    def states(change: int) -> dict:
        return {
            "rng_state__pth": {
                "python": (3, (change, 2), None),
                "numpy": ("MT19937", np.array([change], dtype=np.uint32), 1, 0, 0.0),
                "cpu": torch.tensor([change]),
                "cuda": [torch.tensor([1]), torch.tensor([change])],
            },
            "random_states_1__pkl": {
                "step": change,
                "random_state": (3, (change,), None),
                "torch_cuda_manual_seed": [torch.tensor([change])],
            },
        }

    a, b = bare(tmp_path, "a", **states(0)), bare(tmp_path, "b", **states(1))
    found = differing(a, b)["rng"]
    assert {(each.where, each.name, each.kind) for each in found} == {
        ("rng_state", "python", "generator"),
        ("rng_state", "numpy", "generator"),
        ("rng_state", "torch", "generator"),
        ("rng_state", "cuda 1", "generator"),
        ("random_states_1", "step", "value"),
        ("random_states_1", "python", "generator"),
        ("random_states_1", "cuda 0", "generator"),
    }


def test_a_registered_generator_has_its_own_name(tmp_path):
    def rank(position: int) -> dict:
        return {"position": {"step": {"process": {}, "registered": {"torch": {"state": position}}}}}

    sides = []
    for number in (0, 1):
        side = bare(tmp_path, f"run{number}")
        (side.checkpoint / "resume").mkdir()
        (side.checkpoint / "resume" / "rank-00000.json").write_text(json.dumps(rank(number)))
        sides.append(Contents(STORAGE, side.checkpoint, None))
    (difference,) = differing(*sides)["rng"]
    assert (difference.name, difference.kind) == ("registered torch", "generator")


def test_a_value_in_place_of_a_tensor(tmp_path):
    a = bare(tmp_path, "a", scheduler__pt={"rate": torch.zeros(2), "more": "x" * 100})
    b = bare(tmp_path, "b", scheduler__pt={"rate": 1.0, "more": "y", "extra": []})
    found = {each.name: each for each in differing(a, b)["scheduler"]}
    assert (found["rate"].kind, found["rate"].a, found["rate"].b) == ("value", "a tensor float32[2]", "1.0")
    assert len(found["more"].a) < 70 and found["more"].a.endswith("...")
    assert found["extra"].kind == "only_b"


def test_objects_of_unknown_classes_are_compared_by_their_state_and_run_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return subprocess.call, (["touch", str(tmp_path / "executed")],)

    a = bare(tmp_path, "a", training_args__bin={"evil": Evil(), "share": Fraction(1, 2)})
    b = bare(tmp_path, "b", training_args__bin={"evil": Evil(), "share": Fraction(1, 3)})
    found = compare(a, b)
    assert found.is_equal, "settings are no state"
    assert [(each.name, each.a, each.b) for each in found.parts["settings"].differences] == [("share.1", "2", "3")]
    assert not (tmp_path / "executed").exists()


class Table(dict):
    """A dict of its own class, which torch does not fill."""


class Row(list):
    """A list of its own class."""


def test_what_a_container_of_its_own_class_holds_is_compared(tmp_path):
    a = bare(tmp_path, "a", training_args__bin={"table": Table(rate=1.0, row=Row([1, 2]))})
    b = bare(tmp_path, "b", training_args__bin={"table": Table(rate=2.0, row=Row([1, 3]))})
    found = compare(a, b).parts["settings"].differences
    assert [(each.name, each.a, each.b) for each in found] == [("table.rate", "1.0", "2.0"), ("table.row.1", "2", "3")]


class Settings:
    """An object with state, as TrainingArguments are."""

    def __init__(self, rate):
        self.rate = rate


class Empty:
    """An object without state."""


class Slotted:
    """An object whose state is not a dict."""

    def __getstate__(self):
        return 5

    def __setstate__(self, state):
        raise AssertionError("code of the checkpoint's class ran")


def test_the_state_of_an_object_has_names(tmp_path):
    a = bare(tmp_path, "a", training_args__bin=[Settings(1.0), Empty(), Slotted()])
    b = bare(tmp_path, "b", training_args__bin=[Settings(2.0), Empty(), Slotted()])
    found = compare(a, b).parts["settings"]
    assert [(each.name, each.a) for each in found.differences] == [("0.rate", "1.0")]
    assert found.values == 3


def test_sharded_files_of_torch_and_unknown_files_are_compared_by_digest(tmp_path):
    sides = [bare(tmp_path, name, notes__txt=b"one") for name in "ab"]
    for number, side in enumerate(sides):
        (side.checkpoint / "pytorch_model_fsdp_0").mkdir()
        (side.checkpoint / "pytorch_model_fsdp_0" / "__0_0.distcp").write_bytes(bytes([number]))
    a, b = (Contents(STORAGE, side.checkpoint, None) for side in sides)
    found = compare(a, b)
    assert [(each.where, each.kind) for each in found.parts["model"].differences] == [
        ("pytorch_model_fsdp_0/__0_0.distcp", "content")
    ]
    assert not found.parts["files"].differences
    assert found.by_digest.keys() == {"pytorch_model_fsdp_0/__0_0.distcp", "notes.txt"}


def test_a_name_in_two_files_is_compared_in_both(tmp_path):
    sides = [
        bare(tmp_path, name, model__safetensors={"one": torch.zeros(1)}, pytorch_model__bin={"one": torch.zeros(1) + x})
        for x, name in enumerate("ab")
    ]
    assert [each.where for each in differing(*sides)["model"]] == ["pytorch_model.bin"]


def test_a_path_in_the_run_directory_is_not_a_difference(tmp_path):
    a, b = (
        bare(tmp_path, name, trainer_state__json={"best_model_checkpoint": f"{prefix}/{name}/checkpoint-1", "step": 1})
        for name, prefix in (("a", tmp_path), ("b", tmp_path.name))
    )
    assert compare(a, b).is_equal
    c = bare(tmp_path, "c", trainer_state__json={"best_model_checkpoint": "elsewhere/checkpoint-1", "step": 1})
    assert [each.name for each in differing(a, c)["metrics"]] == ["best_model_checkpoint"]


def test_large_and_sparse_tensors_are_compared_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(contents_module, "_PIECE", 8)
    monkeypatch.setattr(contents_module, "_WINDOW", 64)
    tensor = torch.arange(100.0)
    changed = tensor.clone()
    changed[[3, 70, 99]] += 1
    sparse, other = torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()
    a = bare(tmp_path, "a", pytorch_model__bin={"x": tensor, "t": tensor.view(10, 10).T, "s": sparse})
    b = bare(tmp_path, "b", pytorch_model__bin={"x": changed, "t": changed.view(10, 10).T, "s": other})
    measured = {each.name: each.measured for each in differing(a, b)["model"]}
    assert {name: each.differing for name, each in measured.items()} == {"x": 3, "t": 3, "s": 3}
    assert measured["x"].elements == measured["t"].elements == 100


MEMORY = """
import sys
from pathlib import Path
import torch
from resume_adapters.core.checkpoint.contents import Contents
from resume_adapters.core.checkpoint.difference import compare
from resume_adapters.core.storage.local import LocalStorage

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

small, a, b = (Contents(LocalStorage(), Path(each), None) for each in sys.argv[1:])
compare(small, small)
before = peak()
differences = compare(a, b).parts["model"].differences
print(peak() - before, len(differences), sum(each.measured.differing for each in differences))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("file", ["model__safetensors", "pytorch_model__bin"])
def test_memory_is_bounded_however_large_the_checkpoints_are(tmp_path, file):
    """One tensor of 160 MB and several of 10 MB, on both sides: 400 MB are read."""

    def weights(change: int) -> dict[str, torch.Tensor]:
        made = {"large": torch.zeros(40_000_000), **{f"small{n}": torch.zeros(2_500_000) for n in range(4)}}
        made["large"][-1] = made["small3"][0] = change
        return made

    sides = [bare(tmp_path, name, **{file: weights(change)}) for change, name in enumerate("ab")]
    small = bare(tmp_path, "small", **{file: {"x": torch.zeros(2_000_000)}})
    paths = [str(each.checkpoint) for each in (small, *sides)]
    done = subprocess.run([sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    grown, count, elements = map(int, done.stdout.split())
    assert (count, elements) == (2, 2)
    assert grown < 200e6, f"{grown / 1e6:.0f} MB"
