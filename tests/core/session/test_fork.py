"""A new run begins with what another has learnt, or is refused with the reason before its first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resume_adapters import Fork
from resume_adapters.core.session.fork import fork
from resume_adapters.core.session.options import options_of_mapping
from resume_adapters.errors import CheckpointDamaged, PeerFailed, ResumeError, StateMismatch, UnsupportedSetting
from resume_adapters.loop import register_for_resume

from faults import flip
from rank_threads import on_nodes

Make = Callable[[], torch.nn.Module]


class Adapted(torch.nn.Module):
    """A layer with an adapter around it, under the names that peft gives them."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(inside, 1).requires_grad_(False)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(inside, 1, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_A["default"](x)


def plain(width: int = 2) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))


def adapted() -> torch.nn.Module:
    return torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": Chain()})})


class Chain(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(2, 2), Adapted(2))


def train(
    directory: Path, make: Make = plain, kind: Any = torch.optim.AdamW, *, steps: int = 4, **options: Any
) -> torch.nn.Module:
    torch.manual_seed(3)
    model = make()
    optimizer = kind([each for each in model.parameters() if each.requires_grad], lr=0.1)
    run = register_for_resume(directory, model=model, optimizer=optimizer, save_every=2, **options)
    inner = model["base_model"]["model"] if make is adapted else model
    for _ in run.steps(steps):
        inner(torch.randn(2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    return model


def ancestry(run: Path) -> list[dict[str, Any]]:
    files = sorted(run.glob("step-*/resume/manifest.json"))
    return [json.loads(file.read_bytes())["manifest"]["ancestry"] for file in files]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    train(tmp_path / "other")
    return tmp_path / "other"


def test_of_a_run_directory_the_newest_checkpoint_is_taken_and_the_list_is_in_each_manifest(
    tmp_path: Path, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        train(tmp_path / "new", resume=Fork(other), mtbf=None, ema=torch.nn.Linear(1, 1))
    (one, two) = ancestry(tmp_path / "new")
    assert one == two and (one["run"], one["checkpoint"], one["step"]) == (str(other), "step-4", 4)
    assert one["taken"] == ["model"] and {"optimizer", "rng", "data", "counters", "ema"} <= {*one["fresh"]}
    assert "This run begins with" in caplog.text and "model; fresh: optimizer" in caplog.text
    assert ancestry(other) == [None, None]
    shutil.rmtree(other)
    train(tmp_path / "new", resume=Fork(other), steps=6, ema=torch.nn.Linear(1, 1))
    assert ancestry(tmp_path / "new") == [one] * 3


def test_adapters_that_the_other_run_lacks_are_named(tmp_path: Path, other: Path) -> None:
    weights = torch.load(other / "step-2" / "training.pt", weights_only=True)["model"]
    model = train(tmp_path / "new", adapted, resume=Fork(other / "step-2"))
    assert torch.equal(model.state_dict()["base_model.model.1.base_layer.weight"], weights["1.weight"])
    assert ancestry(tmp_path / "new")[0]["fresh"][-1] == "1 tensors (base_model.model.1.lora_A.default.weight)"


REFUSED: dict[str, tuple[dict[str, Any], type[ResumeError], str]] = {
    "other shapes": ({"make": lambda: plain(3)}, StateMismatch, r"0\.weight \[2, 2\], the model has \[3, 2\]"),
    "other names": ({"make": lambda: torch.nn.Sequential(plain())}, StateMismatch, r"missing 0\.0\.weight"),
    "more layers": ({"make": lambda: plain().append(torch.nn.Linear(1, 1))}, StateMismatch, "missing 2.weight"),
    "another optimizer": ({"kind": torch.optim.SGD, "take": True}, StateMismatch, "AdamW, this launch has SGD"),
    "fewer parameters": ({"make": adapted, "take": True}, StateMismatch, "4 parameters in the optimizer, this launch"),
    "no such checkpoint": ({"path": "step-8"}, UnsupportedSetting, "is not there"),
    "no checkpoint": ({"path": ".resume"}, CheckpointDamaged, "it is not a checkpoint"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_its_names(case: str, tmp_path: Path, other: Path) -> None:
    given, error, words = REFUSED[case]
    path, take = given.get("path", "step-4"), "weights+optimizer" if "take" in given else "weights"
    options = {name: each for name, each in given.items() if name in ("make", "kind")}
    with pytest.raises(error, match=words):
        train(tmp_path / "new", resume=Fork(other / path, take), **options)
    assert not ancestry(tmp_path / "new")


def test_a_damaged_checkpoint_and_one_of_another_framework_are_refused(tmp_path: Path, other: Path) -> None:
    from msgspec.structs import replace

    from resume_adapters.core.checkpoint.manifest import decode_manifest, encode_manifest

    marker = other / "step-2" / "resume" / "manifest.json"
    marker.write_bytes(encode_manifest(replace(decode_manifest(marker.read_bytes()), framework="fabric 2.6")))
    with pytest.raises(UnsupportedSetting, match=r"saved by fabric 2\.6, and this is torch"):
        train(tmp_path / "new", resume=Fork(other / "step-2"))
    flip(other / "step-4" / "training.pt")
    with pytest.raises(CheckpointDamaged, match=r"training\.pt"):
        train(tmp_path / "new", resume=Fork(other))


def test_the_option_as_text_is_the_same() -> None:
    given = {"resume": "runs/a", "take": "weights+optimizer"}
    assert options_of_mapping(given, "here")["resume"] == Fork("runs/a", "weights+optimizer")
    for wrong in ({"resume": "auto", "take": "weights"}, {"resume": "runs/a", "take": "all"}):
        with pytest.raises(UnsupportedSetting, match="take"):
            options_of_mapping(wrong, "here")


def test_a_rank_that_does_not_see_the_checkpoint_lets_no_other_wait(tmp_path: Path) -> None:
    def begin(rank: int, options: dict[str, Any]) -> object:
        given: Any = Fork(tmp_path if rank == 0 else tmp_path / "elsewhere")
        run: Any = SimpleNamespace(**options)
        framework: Any = None
        return fork(run, framework, given, [], verify=True)

    seeing, other = on_nodes(begin)
    assert isinstance(other, UnsupportedSetting) and "is not there" in str(other)
    assert isinstance(seeing, PeerFailed) and "is not there" in str(seeing)
