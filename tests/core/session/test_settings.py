"""What differs between two launches of a run is said, with the value that is in force, or refused by its name."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters import KeepLast
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.session.settings import (
    LaunchSettings,
    SettingsComparison,
    of_options,
    of_random_state,
    read_settings,
)
from resume_adapters.core.state.stateful import StaticState
from resume_adapters.errors import NotRestored, StateMismatch

from plain_torch import Killed, Launch, killed_after


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The directory of a run that was killed in its first epoch, after it had saved."""
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5))()
    return tmp_path


def said_by(directory: Path, caplog: pytest.LogCaptureFixture, batches: int = 1, **options: Any) -> list[str]:
    """Return what a launch says that is killed after some batches."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "resume_adapters"), pytest.raises(Killed):
        Launch(directory, killed_after(batches), **options)()
    return caplog.messages


def test_one_line_says_what_differs_and_which_value_is_in_force(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not [line for line in said_by(killed, caplog) if "differ" in line]
    given = {"lr": 0.1, "clip": 0.5, "frozen": [0]}
    (line,) = [line for line in said_by(killed, caplog, given=given, verify=False) if "differ" in line]
    assert line == (
        "Settings that differ from checkpoint-4; in force: this launch's clip 0.5 (was 1.0), verify False (was True), "
        "frozen parameters 2 (0.weight, 0.bias) (was none) and the checkpoint's lr 0.05 (given 0.1)."
    )


def test_another_version_is_said_once_with_what_it_means(
    killed: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = torch.__version__
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    (line,) = [line for line in said_by(killed, caplog) if "differ" in line]
    assert line == (
        f"Settings that differ from checkpoint-4; in force: this launch's torch 2.99.0 (was {now}). Under other "
        "versions the same steps may differ in their last bits."
    )


def test_what_is_in_force_is_what_the_next_launch_is_compared_with(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for clip in ("this launch's clip 0.5 (was 1.0) and ", ""):
        found = said_by(killed, caplog, 5, given={"lr": 0.1, "clip": 0.5})
        assert any(f"in force: {clip}the checkpoint's lr 0.05 (given 0.1)." in line for line in found), found
    assert not [line for line in said_by(killed, caplog, given={"clip": 0.5}) if "differ" in line]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": torch.optim.RMSprop}, "the optimizer SGD, this launch has RMSprop: its state cannot be loaded"),
        (
            {"frozen": [0], "only_trained": True},
            r"6 parameters in the optimizer, this launch has 4 \(frozen parameters: none then, 2 \(0.weight, 0.bias\) "
            r"now\): its state cannot be loaded",
        ),
    ],
    ids=["class", "size"],
)
def test_an_optimizer_that_cannot_load_the_state_is_refused_by_its_name(
    killed: Path, given: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StateMismatch, match=f"checkpoint-4 was saved with {message}"):
        Launch(killed, given=given)()
    assert caplog.text.count("This run cannot continue: checkpoint-4 was saved with") == 1


def test_data_of_a_different_seed_are_refused_by_the_seed(killed: Path) -> None:
    """The order follows from the random state, which is restored; these data follow from the seed beside it."""

    def launch(seed: int) -> Launch:
        data = torch.randperm(22, generator=torch.Generator().manual_seed(seed)).tolist()
        return Launch(killed / "run", killed_after(7), data="ahead", seed=seed, dataset=data)

    with pytest.raises(Killed):
        launch(7)()
    with pytest.raises(NotRestored, match="from a seed, and it was saved with seed 7, this launch has 8"):
        launch(8)()


@pytest.mark.parametrize(("first", "then"), [(0, 2), (2, 0), (2, 1)])
def test_plain_data_follow_with_any_number_of_workers(
    tmp_path: Path, first: int, then: int, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"epochs": 2}
    undisturbed = Launch(tmp_path / "undisturbed", **options, workers={"num_workers": first})()
    with pytest.raises(Killed):
        Launch(tmp_path / "run", killed_after(5), **options, workers={"num_workers": first})()
    with caplog.at_level(logging.INFO, "resume_adapters"):
        resumed = Launch(tmp_path / "run", **options, workers={"num_workers": then})()
    assert f"Saved with num_workers {first}, this launch has {then}" in caplog.text
    assert (resumed.trace, resumed.end) == (undisturbed.trace[4:], undisturbed.end)


class Holding(list[int]):
    """Data with a generator of their own."""

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.generator = random.Random(1)


class Drawing(list[int]):
    """Data that are augmented."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) + random.randrange(3)


@pytest.mark.parametrize(
    ("workers", "then", "dataset"),
    [
        ({"num_workers": 1}, {}, Drawing(range(22))),
        ({}, {"num_workers": 1}, Drawing(range(22))),
        ({}, {"num_workers": 1}, Holding(range(22))),
        ({}, {"num_workers": 1, "persistent_workers": True}, range(22)),
        ({"num_workers": 1, "persistent_workers": True}, {}, range(22)),
    ],
    ids=["drawn by a worker", "drawn by the process", "a generator", "workers that stay", "workers that stayed"],
)
def test_the_number_of_workers_that_shapes_the_data_is_refused(
    tmp_path: Path, workers: dict[str, Any], then: dict[str, Any], dataset: Any
) -> None:
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), workers=workers, dataset=dataset)()
    with pytest.raises(StateMismatch, match="was saved with num_workers"):
        Launch(tmp_path, workers=then, dataset=dataset)()


def test_a_part_that_is_no_longer_given_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), parts={"ema": StaticState(1)})()
    second, third = [
        [line.split(",")[0] for line in said_by(tmp_path, caplog, 5) if "not given in this launch" in line]
        for _ in range(2)
    ]
    assert second == ["checkpoint-4 has ema"] and not third, "the checkpoint of the second launch does not have it"


def test_a_start_and_its_first_save_take_two_lines_and_a_resume_one_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is captured is no news: ``resume-adapters status --parts`` lists it."""
    fresh, resumed = (said_by(tmp_path / "run", caplog, 5) for _ in range(2))
    place = "at epoch 0, 16 of 22 samples, order"
    said = [line.partition(place)[0] for line in (*fresh, *resumed[:2])]
    assert said[:2] == ["No checkpoint yet: starting from step 0.", "checkpoint-4 saved "] and len(fresh) == 2
    assert said[2:] == ["Resuming from checkpoint-4.", "checkpoint-4 resumed "]
    assert len(resumed) == 3 and resumed[2].startswith("checkpoint-8 saved at")


def test_a_checkpoint_of_a_version_that_saved_no_settings_resumes_silently(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read = Launch(killed).framework.settings
    comparison = SettingsComparison(read)
    comparison.begin(None, "checkpoint-4")
    assert (comparison.describe(), comparison.changed_seeds()) == ("", "")
    assert comparison.in_force() == read() == SettingsComparison(read).in_force()


def test_settings_are_read_once_however_often_an_adapter_asks(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, launch = torch.optim.Optimizer.load_state_dict, Launch(killed)
    session, begun = launch.loop._session, []
    session.open()
    begin = session.observed.begin_loading
    monkeypatch.setattr(session.observed, "begin_loading", lambda **given: (begun.append(given), begin(**given)))
    for _ in range(2):
        session.begin_settings()
    assert begun == [{"is_foreign": False}] and torch.optim.Optimizer.load_state_dict is not own
    launch.run.close()
    assert torch.optim.Optimizer.load_state_dict is own


def test_what_the_checkpoint_has_frozen_again_stays_frozen_in_its_settings() -> None:
    layer = torch.nn.Linear(1, 1)
    comparison = SettingsComparison(lambda: read_settings({}, modules=[layer]))
    comparison.begin(LaunchSettings(frozen=["weight"]), "checkpoint-4")
    layer.weight.requires_grad_(False)  # as what is observed is restored
    assert "the checkpoint's frozen parameters 1 (weight) (given none)" in comparison.describe()
    assert comparison.in_force().frozen == ["weight"]


def test_the_options_of_the_run_are_settings() -> None:
    found = of_options(ResumeOptions(keep=KeepLast(3), save_every=5))
    assert (found["keep"], found["save_every"]) == ("KeepLast(count=3)", "5")
    assert json.dumps(found)


def test_only_a_seed_that_was_given_counts() -> None:
    torch.manual_seed(5)
    assert of_random_state() == {"seed": "5"}
    torch.manual_seed(1 << 40)  # as torch draws one
    assert of_random_state() == {}


def test_wrapped_optimizers_and_schedules_are_those_beneath() -> None:
    class Wrapper:
        def __init__(self, **held: Any) -> None:
            vars(self).update(held)

    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.01
    found = read_settings(
        {}, [Wrapper(optimizer=optimizer)], [Wrapper(scheduler=schedule)], names={"lr": "learning_rate"}
    )
    assert found.schedulers == ["StepLR"] and found.optimizers[0].kind == "SGD"
    assert found.optimizers[0].groups[0]["learning_rate"] == "0.1", "before the schedule"
    assert read_settings({}, [optimizer], is_fixed=False).optimizers[0].sizes == []


def test_an_optimizer_whose_parameters_have_moved_is_refused() -> None:
    """Its state is kept by position: each would get the moments of another."""

    def settings(order: str, *, names: str = "abc") -> Any:
        layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})
        groups = [{"params": layers[name].parameters()} for name in order]
        return read_settings({}, [torch.optim.AdamW(groups)], modules=[layers])

    SettingsComparison(lambda: settings("abc")).begin(settings("abc"), "checkpoint-5")
    comparison = SettingsComparison(lambda: settings("acb"))
    with pytest.raises(StateMismatch, match=r"in another order \(4 of 6 have moved\).*sorted where"):
        comparison.begin(settings("abc"), "checkpoint-5")
    renamed = SettingsComparison(lambda: settings("xyz", names="xyz"))
    renamed.begin(settings("abc"), "checkpoint-5")  # as a framework that converts names may have it
    older = settings("abc")
    older.optimizers[0].order = []
    SettingsComparison(lambda: settings("acb")).begin(older, "checkpoint-5")


@pytest.mark.parametrize("what", ["tied", "replaced"])
def test_parameters_that_the_model_has_no_longer_are_named_at_the_save(what: str) -> None:
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    comparison = SettingsComparison(lambda: read_settings({}, [optimizer], modules=[layers]))
    comparison.begin()
    assert comparison.regrouped() == []
    if what == "tied":
        layers[1].weight = layers[0].weight
    else:
        layers[1] = torch.nn.Linear(2, 2)
    (said,) = comparison.regrouped()
    assert said.startswith(f"{1 if what == 'tied' else 2} of the parameters of SGD are no longer those of the model")


def test_groups_that_are_added_on_the_way_are_named_at_the_save_and_refused_by_their_sizes() -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    comparison = SettingsComparison(lambda: read_settings({}, [optimizer], modules=layers))
    comparison.begin()
    assert comparison.regrouped() == []
    optimizer.add_param_group({"params": list(layers[1].parameters())})
    (said,) = comparison.regrouped()
    assert said.startswith("SGD has groups of 2 and 2 parameters, where SGD had 2 at the start: ")
    saved = comparison.in_force()
    again = SettingsComparison(lambda: read_settings({}, [torch.optim.SGD(layers[0].parameters(), lr=0.1)]))
    with pytest.raises(StateMismatch, match=r"4 parameters in the optimizer, this launch has 2.*Make all"):
        again.begin(saved, "step-5")
    every = [each for layer in layers for each in layer.parameters()]
    other = SettingsComparison(lambda: read_settings({}, [torch.optim.SGD(every, lr=0.1)]))
    with pytest.raises(StateMismatch, match="groups of 2 and 2 parameters in the optimizer, this launch has 4: "):
        other.begin(saved, "step-5")
