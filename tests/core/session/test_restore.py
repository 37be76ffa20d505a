"""Another launch than the one that saved: of a model, of ranks, of parts, of a format that are not the same."""

from __future__ import annotations

import copy
import functools
import json
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from resume_adapters.core.checkpoint import writer
from resume_adapters.core.checkpoint.parts import write_part
from resume_adapters.core.loop.framework import Resumed
from resume_adapters.core.state import encoding
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.stateful import ModuleBuffers, Stateful
from resume_adapters.errors import FormatMismatch, NotRestored, NotSerialisable, StateMismatch

from launch import Server
from plain_torch import WEIGHTS, Killed, Launch, killed_after, manifest

JOB = Path(__file__).parents[1] / "job.py"


@pytest.mark.parametrize("script", ["plain", "followed"])
def test_a_checkpoint_of_the_bare_framework_is_taken_up(
    tmp_path: Path, script: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Launch(tmp_path / "never", script=script)()
    bare = tmp_path / "run" / "checkpoint-8"
    bare.mkdir(parents=True)
    torch.save(torch.load(tmp_path / "never" / "checkpoint-8" / WEIGHTS, weights_only=True), bare / WEIGHTS)
    with caplog.at_level("INFO", "resume_adapters"):
        last = Launch(tmp_path / "run", script=script)()
    assert "checkpoint-8 was made without this package" in caplog.text
    assert [line[:2] for line in last.trace] == [line[:2] for line in whole.trace[8:]]


def test_a_committed_checkpoint_that_holds_nothing_of_the_ranks_is_taken_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the checkpoint plugin of Lightning writes them by itself: what the framework saved, and a manifest."""
    native = write_part

    def write(storage: Any, directory: Path, name: str, document: bytes, tensors: Any) -> None:
        if name != "rank-00000":
            native(storage, directory, name, document, tensors)

    whole = Launch(tmp_path / "never")()
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_part", write)
        with pytest.raises(Killed):
            Launch(tmp_path / "run", killed_after(5))()
    last = Launch(tmp_path / "run")()
    assert last.loop.resume() == Resumed(0, 4, 4)
    assert [line[:2] for line in last.trace] == [line[:2] for line in whole.trace[4:]]


def test_learning_rates_that_numpy_computes_are_resumed(tmp_path: Path) -> None:
    given = {"lr": np.float64(0.05)}
    whole = Launch(tmp_path / "never", given=given)()
    with pytest.raises(Killed):
        Launch(tmp_path / "run", killed_after(5), given=given)()
    last = Launch(tmp_path / "run", given=given)()
    assert [line[:2] for line in last.trace] == [line[:2] for line in whole.trace[4:]]
    assert last.framework.optimizer.state_dict()["param_groups"][0]["lr"] < 0.05


class Preconditioned(torch.optim.SGD):
    """Has an object of its own in its state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.param_groups[0]["preconditioner"] = Preconditioner()


class Preconditioner:
    pass


def test_what_no_resume_could_load_is_refused_at_the_first_save(tmp_path: Path) -> None:
    """Not at the resume: hours of training would be lost."""
    launch = Launch(tmp_path, given={"optimizer": Preconditioned})
    words = r"holds \S*test_restore\.Preconditioner \(at optimizer\S+\), which would have to run code"
    with pytest.raises(NotSerialisable, match=words):
        launch()
    assert len(launch.trace) == 4
    assert not list(tmp_path.glob("checkpoint-*/resume/manifest.json"))


def test_a_class_that_the_script_trusts_is_loaded(tmp_path: Path) -> None:
    given = {"optimizer": Preconditioned}
    with torch.serialization.safe_globals([Preconditioner]):
        with pytest.raises(Killed):
            Launch(tmp_path, killed_after(5), given=given)()
        assert Launch(tmp_path, given=given)().loop.global_step == 18


def test_a_launch_with_another_of_what_is_fixed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), given={"invariants": {"number of stages": 2}})()
    launch = Launch(tmp_path, given={"invariants": {"number of stages": 4}})
    words = "checkpoint-4 was saved with number of stages 2, this launch has 4: it cannot be resumed from"
    with pytest.raises(StateMismatch, match=words):
        launch()
    assert not launch.trace


def test_one_rank_goes_on_as_two_and_two_as_one(server: Server, tmp_path: Path) -> None:
    """Each step has the samples that it would have had; each rank its own random numbers, buffers and batches."""
    expected = Launch(tmp_path / "never", data="elastic")()
    samples = [sorted(line[2]) for line in expected.trace]
    with pytest.raises(Killed):
        Launch(tmp_path / "one", killed_after(5), data="elastic")()
    words = ["train", str(tmp_path / "one"), str(tmp_path / "two")]
    server.start(JOB, words, tmp_path, 2, {}).wait().require_success()
    first, second = (json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2))
    for name, start in (("one", 4), ("two", 0)):
        together = [sorted(mine + other) for mine, other in zip(first[name], second[name], strict=True)]
        assert together == samples[start : start + len(together)], name
    assert len(first["one"]) == 14 and len(first["two"]) == 9, "five steps, and five from step 4 on"
    assert first["weights"] == second["weights"] and first["draws"] != second["draws"]
    last = Launch(tmp_path / "two", data="elastic")()
    assert last.loop.resume().step == 8
    assert [sorted(line[2]) for line in last.trace] == samples[8:]


def test_another_model_is_refused_before_a_weight_is_touched(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5))()
    launch = Launch(tmp_path)
    launch.framework.model.append(torch.nn.Linear(1, 1))
    before = copy.deepcopy(launch.framework.state_dict())
    with pytest.raises(StateMismatch, match=r"3\.bias: saved nothing, the model has float32"):
        launch()
    assert first_difference(before, launch.framework.state_dict()) is None


def test_state_that_is_spread_is_proved(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), spread=lambda framework: {"weights": framework.state_dict()})()
    other: dict[str, Any] = {"spread": lambda framework: {"weights": {"one": torch.ones(1)}}}
    with pytest.raises(NotRestored, match=r"^weights: the state of all ranks together"):
        Launch(tmp_path, **other)()
    assert Launch(tmp_path, verify=False, **other)().loop.global_step == 18


def test_parts_are_restored_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(2)
    parts: dict[str, Stateful] = {"norms": ModuleBuffers({0: norm})}
    norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), parts=parts)()
    norm.running_mean.zero_()  # type: ignore[union-attr]
    resumed = Launch(tmp_path, parts=parts)
    with pytest.raises(Killed), resumed.loop:
        resumed.loop.resume()
        raise Killed
    assert norm.running_mean.tolist() == [3.0, 3.0]  # type: ignore[union-attr]
    said = [(each["name"], each["by"]) for each in manifest(next(tmp_path.glob("checkpoint-*")))["parts"]]
    captured = ("counters", "metrics", "rng", "data", "trackers", "norms", "buffers")
    assert said == [("model", "framework"), *((name, "core") for name in captured)], "each part is said, the user's too"
    with pytest.raises(StateMismatch, match="has no part 'ema'"):
        Launch(tmp_path, parts={**parts, "ema": ModuleBuffers({})})()


def test_a_loss_scale_that_the_checkpoint_lacks_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5))()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with caplog.at_level("WARNING", "resume_adapters"):
        assert Launch(tmp_path, parts={"scaler": scaler})().loop.global_step == 18
    assert "has no loss scale: it begins as in a new run." in caplog.text
    assert scaler.get_scale() == 4.0


LACKING: dict[str, tuple[Any, ...]] = {
    "rank-00000.json": (
        ("shift",),
        ("fixed",),
        ("topology", "gradient_accumulation_steps"),
        ("shares",),
        ("begun",),
        ("losses", "sum"),
        ("framework", "held"),
        ("rng",),
        ("loaders",),
        ("loaders", 0, "number"),
        ("loaders", 0, "samples"),
        ("loaders", 0, "position", "length"),
        ("loaders", 0, "position", "step"),
        ("loaders", 0, "position", "elastic"),
    ),
    "metrics.json": ((), ("checkpoint",)),
    "trackers.json": ((),),
}
"""What other versions of the format may not have, by file; without a key, the whole file."""


@pytest.mark.parametrize(("file", "keys"), [(file, keys) for file, places in LACKING.items() for keys in places])
def test_a_checkpoint_of_another_version_of_the_format_is_refused(
    tmp_path: Path, file: str, keys: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole, and lacks a key that this version reads: the error names it and its file, and nothing is trained."""
    native = write_part

    def write(storage: Any, directory: Path, name: str, document: bytes, tensors: Any) -> None:
        if f"{name}.json" != file:
            native(storage, directory, name, document, tensors)
        elif keys:
            content = encoding.decode(document, tensors)
            holder = functools.reduce(operator.getitem, keys[:-1], content)
            del holder[keys[-1]]
            native(storage, directory, name, *encoding.encode(content))

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_part", write)
        with pytest.raises(Killed):
            Launch(tmp_path, killed_after(5), data="elastic")()
    place = f"{'.'.join(map(str, keys))} in {file}" if keys else file
    batch = 8 if keys[-1:] in (("samples",), ("step",)) else 4
    launch = Launch(tmp_path, data="elastic", batch=batch, on_batch_change="keep-samples", spread=lambda framework: {})
    with pytest.raises(FormatMismatch, match=rf"checkpoint-4 has no {re.escape(place)}.*resume-adapters \d") as refused:
        launch()
    assert (refused.value.path, refused.value.step) == (tmp_path / "checkpoint-4", 4)
    assert not launch.trace


def test_buffers_get_the_shape_that_training_had_given_them() -> None:
    module, before = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(3)
    held = module.running_var
    saved = ModuleBuffers({0: before}).state_dict()
    with pytest.raises(StateMismatch, match=r"the buffer 0\.running_mean was not there"):
        ModuleBuffers({0: module}).load_state_dict({"0.running_var": saved["0.running_var"]})
    assert held is not None and held.tolist() == [1, 1], "nothing was touched"
    ModuleBuffers({0: module}).load_state_dict(saved)
    assert held.tolist() == [1, 1, 1] and held.data_ptr() != saved["0.running_var"].data_ptr()


DAMAGED = [
    ("trackers.json", "", [], "trackers.json holds a list, expected a mapping"),
    ("architecture.json", "", [], "architecture.json holds a list, expected a mapping"),
    ("buffers.json", "0.average", "x", "buffers.json does not hold tensors by name"),
    ("rank-00000.json", "loaders", {}, "loaders in rank-00000.json is a dict, expected list"),
    ("rank-00000.json", "rng", {"cpu": 1}, "rng in rank-00000.json cannot be restored"),
    ("rank-00000.json", "resized", {"weight": [-1]}, "resized in the state of a rank holds a size below 0"),
    ("rank-00000.json", "losses", {"count": 1, "sum": "x"}, "losses.sum in rank-00000.json cannot be restored"),
]
"""What this package does not write: the file, where in it, the content, and what is said of it."""


@pytest.mark.parametrize(("file", "key", "content", "words"), DAMAGED)
def test_content_that_this_package_does_not_write_is_damage(
    tmp_path: Path,
    file: str,
    key: str,
    content: Any,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is named, and the previous checkpoint is resumed."""
    native, written = write_part, list[str]()

    def write(storage: Any, directory: Path, name: str, document: bytes, tensors: Any) -> None:
        written.append(f"{name}.json")
        if written.count(file) == 2 and written[-1] == file:
            damaged = {**encoding.decode(document, tensors), key: content} if key else content
            document, tensors = encoding.encode(damaged)
        native(storage, directory, name, document, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_part", write)
        with pytest.raises(Killed):
            Launch(tmp_path, killed_after(9))()
    resumed = Launch(tmp_path)()
    assert f"checkpoint-8 is damaged: {words}" in caplog.text
    assert "It was set aside. Resuming from checkpoint-4." in caplog.text
    assert len(resumed.trace) == 14
