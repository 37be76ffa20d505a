"""What a watched run writes of its steps: for a killed and resumed run, the lines of one that was never left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer

from resume_adapters.core.session.options import ResumeOptions, run_directory_override
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.errors import UnsupportedSetting

from plain_torch import Killed, Launch, killed_after

EVERY = 4


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Let the runs that follow write into a file."""

    def watch(name: str) -> Path:
        monkeypatch.setenv("RESUME_ADAPTERS_TRACE", str(tmp_path / name))
        monkeypatch.setenv("RESUME_ADAPTERS_TRACE_EVERY", str(EVERY))
        return tmp_path / name

    return watch


def events(file: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def steps(file: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of the steps; of a step that was done twice, the last."""
    return {line["step"]: {**line, "time": 0.0} for line in events(file, "step")}


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulation": 2},
    "together": {"script": "zip"},
    "followed": {"script": "followed"},
    "followed, fetched ahead": {"script": "followed", "data": "ahead"},
    "a stream": {"data": "stream"},
}


@pytest.mark.parametrize(
    ("case", "batches"),
    [
        pytest.param(case, batches, marks=[pytest.mark.thorough] if case != "plain" and batches == 5 else [])
        for case in CASES
        for batches in (5, 11)
    ],
)
def test_the_lines_of_a_resumed_run_are_those_of_one_that_was_never_left(
    tmp_path: Path, watch: Callable[[str], Path], case: str, batches: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    options = {**CASES[case], "parts": {"draws": GeneratorState(generator)}}
    Launch(tmp_path / "unwatched", **options)()
    whole = watch("whole")
    uninterrupted = Launch(tmp_path / "run", **options)()
    resumed = watch("resumed")
    with pytest.raises(Killed):
        Launch(tmp_path / "again", killed_after(batches), **options)()
    launch = Launch(tmp_path / "again", **options)()
    assert launch.end == uninterrupted.end
    assert launch.trace == uninterrupted.trace[-len(launch.trace) :]
    found, expected = steps(resumed), steps(whole)
    assert found == expected and len(found) == uninterrupted.loop.global_step
    for step, line in found.items():
        micro = options.get("accumulation", 1)
        assert len(line["batches"]) == micro * (2 if case == "together" else 1)
        assert len(line["loss"]) == micro and len(line["lr"]) == 1
        assert line["rng"].keys() == {"python", "numpy", "torch", "draws"}
        assert ("weights" in line) == ("optimizer" in line) == (step % EVERY == 0)
        assert "grad_norm" not in line
    assert len({line["batches"][0] for line in found.values()}) > 3
    assert [line["step"] for line in events(resumed, "start")] == [
        0,
        launch.loop.global_step - len(launch.trace) // micro,
    ]


def test_a_watched_run_trains_as_one_that_nobody_watches(tmp_path: Path, watch: Callable[[str], Path]) -> None:
    unwatched = Launch(tmp_path / "one")
    assert unwatched.loop._session.trace is None
    unwatched()
    watch("trace")
    watched = Launch(tmp_path / "two")()
    assert (watched.trace, watched.end) == (unwatched.trace, unwatched.end)
    assert not optimizer._global_optimizer_pre_hooks, "the run is closed"


def test_a_run_says_what_it_begins_and_ends_with(tmp_path: Path, watch: Callable[[str], Path]) -> None:
    file = watch("trace")
    launch = Launch(tmp_path / "run", max_steps=5)
    launch()
    (start,) = events(file, "start")
    assert start | {"pid": 0, "time": 0} == {
        "event": "start",
        "time": 0,
        "rank": 0,
        "pid": 0,
        "world_size": 1,
        "generation": 1,
        "step": 0,
        "run_directory": str(tmp_path / "run"),
        "framework": "",
        "every": EVERY,
        "keep": "KeepAll()",
        "repeats": False,
        "missing": [],
    }
    (data,) = events(file, "data")
    assert (data["place"], data["dataset"]) == ("loader 0", "range")
    assert [line["name"] for line in events(file, "save")][:2] == ["checkpoint-4", "checkpoint-5"]
    saves = [[line["step"] for line in events(file, kind)] for kind in ("save", "committed")]
    assert saves == [[4, 5, 5], [4, 5, 5]], "and once more what the script did after its last step"
    assert [line["parts"] for line in events(file, "missing")] == [[]]
    (end,) = events(file, "end")
    assert (end["state"], end["step"]) == ("finished", 5)


class Opening(torch.utils.data.Dataset[int]):
    """Opens something at its first read, which is no data."""

    def __init__(self) -> None:
        self.reader: Any = None

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> int:
        self.reader = iter([index])
        return index


def test_what_no_part_holds_is_named(tmp_path: Path, watch: Callable[[str], Path]) -> None:
    file = watch("trace")
    for _ in range(2):
        launch = Launch(tmp_path / "run", killed_after(5))
        loader = torch.utils.data.DataLoader(Opening(), 4)
        launch.loader = lambda loader=loader: loader  # type: ignore[misc]
        with pytest.raises(Killed):
            launch()
        launch.run.close()
    assert [line["dataset"] for line in events(file, "data")] == ["Opening"] * 2
    (missing, _), starts = events(file, "missing"), events(file, "start")
    assert "dataset.reader, a list_iterator, changes when batches are read" in missing["parts"][0]
    assert [line["missing"] for line in starts] == [[], missing["parts"]]


@pytest.mark.parametrize("quantity", ["rng", "batches", "weights", "lr"])
def test_what_was_disturbed_shows_in_its_own_quantity(
    tmp_path: Path, watch: Callable[[str], Path], quantity: str
) -> None:
    def disturb(launch: Launch) -> None:
        if len(launch.trace) != 3:
            return
        if quantity == "rng":
            torch.rand(1)
        elif quantity == "batches":
            launch.loader_data[-1] += 1
        elif quantity == "weights":
            launch.framework.model[1].running_mean.add_(1e-6)  # in training mode, no loss reads it
        else:
            launch.framework.optimizer.param_groups[0]["lr"] *= 1.0000001

    files = []
    for name, die in (("whole", lambda launch: None), ("disturbed", disturb)):
        files.append(watch(name))
        launch = Launch(tmp_path / f"run {name}", die, max_steps=4)
        launch.loader_data = torch.arange(22.0)  # type: ignore[attr-defined]
        launch.loader = lambda data=launch.loader_data: torch.utils.data.DataLoader(data, 4, drop_last=False)  # type: ignore
        launch.loader_data = launch.loader_data[:16]  # the fourth batch
        launch()
    one, other = map(steps, files)
    differing = {name for name in one[4] if one[4][name] != other[4].get(name)}
    assert one[3] == other[3] and quantity in differing
    assert quantity == "rng" or "rng" not in differing
    assert quantity == "batches" or "batches" not in differing
    assert quantity != "weights" or differing == {"weights"}


# ---- One line


class Stub:
    """A framework that has a model, some of it without content."""

    label = "stub 1"

    def __init__(self) -> None:
        self.live: dict[str, Any] = {"here": torch.ones(2), "elsewhere": torch.ones(2, device="meta")}

    def state_dict(self) -> dict[str, Any]:
        return self.live


@pytest.fixture
def stub() -> Stub:
    return Stub()


def last(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "lines").read_text().splitlines()[-1])  # type: ignore[no-any-return]


# ---- What the environment overrides


def test_the_environment_comes_before_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_directory_override() is None and ResumeOptions().cadence() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESUME_ADAPTERS_RUN_DIR", "elsewhere")
    assert run_directory_override() == tmp_path / "elsewhere"
    with monkeypatch.context() as patch:
        patch.setenv("RESUME_ADAPTERS_RUN_DIR", "s3://elsewhere")
        with pytest.raises(UnsupportedSetting, match="'s3://elsewhere'; expected a directory"):
            run_directory_override()
    monkeypatch.setenv("RESUME_ADAPTERS_SAVE_EVERY", "7")
    for options in (ResumeOptions(), ResumeOptions(save_every=3), ResumeOptions(save_every="auto")):
        cadence = options.cadence()
        assert cadence is not None and cadence.steps == 7
    for invalid in ("often", "0", "-1", ""):
        monkeypatch.setenv("RESUME_ADAPTERS_SAVE_EVERY", invalid)
        with pytest.raises(UnsupportedSetting, match=r"save_every=0|RESUME_ADAPTERS_SAVE_EVERY"):
            ResumeOptions().cadence()
