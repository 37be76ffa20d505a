"""A loop of plain torch, left at any moment and run again, ends as if it had never been left: the loop alone, with no
framework around it, in one process."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from resume_adapters.core import comparison, state, tree
from resume_adapters.core.framework import Resumed
from resume_adapters.core.rng import GeneratorState
from resume_adapters.core.state import Buffers, Stateful
from resume_adapters.errors import FormatMismatch, Halted, NotRestored, StateMismatch, Stopped, UnsupportedSetting

from launch import Server
from plain_torch import WEIGHTS, Killed, Launch, PlainTorch, killed_after

JOB = Path(__file__).with_name("job.py")


def require_same(directory: Path, deaths: list[int], **options: Any) -> Launch:
    """Launch a script again after each death, and compare with the launch that never died."""
    reference = Launch(directory / "never", **options)()
    for batches in deaths:
        with pytest.raises(Killed):
            Launch(directory / "run", killed_after(batches), **options)()
    last = Launch(directory / "run", **options)()
    if last.trace:
        assert last.trace == reference.trace[-len(last.trace) :]
    assert last.end == reference.end
    return last


SCRIPTS: dict[str, dict[str, Any]] = {
    "plain": {"each_epoch": True},
    "accumulating": {"accumulation": 2, "save_every": 2},
    "by steps": {"epochs": None, "max_steps": 15},
    "a stream": {"data": "stream"},
    "an elastic sampler": {"data": "elastic"},
    "loaders together": {"script": "zip"},
    "loaders one after the other": {"script": "two"},
    "spread state": {"spread": lambda framework: {"weights": framework.state_dict()}},
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("deaths", [[5, 3], [6], [17]], ids=str)
def test_left_at_any_batch_and_launched_again(tmp_path: Path, script: str, deaths: list[int]) -> None:
    deaths = [min(each, 14) for each in deaths] if script == "by steps" else deaths
    last = require_same(tmp_path, deaths, **SCRIPTS[script])
    assert last.loop.resume().step > 0, "it was a fresh start"


@pytest.mark.parametrize("deaths", [[5], [8, 2], [15]], ids=str)
def test_a_loop_that_cannot_be_wrapped_goes_on_in_the_epoch_that_it_is_told(tmp_path: Path, deaths: list[int]) -> None:
    last = require_same(tmp_path, deaths, script="followed")
    assert last.loop.resume().step > 0


def test_a_loop_that_cannot_be_wrapped_is_given_an_empty_pass_where_one_was_over(tmp_path: Path) -> None:
    """Saved between two passes, so that the rest of the first has no batch."""
    options = {"script": "followed", "between": True, "save_every": 100}
    expected = Launch(tmp_path / "never", **options)()
    with pytest.raises(Killed):
        Launch(tmp_path / "run", killed_after(8), **options)()
    last = Launch(tmp_path / "run", **options)()
    assert last.loop.resume() == Resumed(0, 6, 6) and last.framework.skipped_passes == 1
    assert (last.trace, last.end) == (expected.trace[6:], expected.end)


@pytest.mark.parametrize("deaths", [[13], [8], [9, 5]], ids=str)
def test_a_pass_whose_last_batch_was_known_to_be_the_last_is_empty(tmp_path: Path, deaths: list[int]) -> None:
    """As of loaders that fetch a batch ahead; some of the deaths follow a save within the last batch of a pass."""
    last = require_same(tmp_path, deaths, data="ahead", accumulation=2, save_every=1)
    assert last.framework.skipped_passes == (last.loop.resume().step % 3 == 0)


@pytest.mark.parametrize("deaths", [[7], [9]], ids=str)
def test_where_the_last_step_is_in_one_loader_the_next_gives_nothing(tmp_path: Path, deaths: list[int]) -> None:
    last = require_same(tmp_path, deaths, script="two", epochs=None, max_steps=11)
    assert last.loop.global_step == 11
    assert [len(line[2]) for line in last.trace[-3:]] == [4, 4, 4]


# ---- Stopping and ending


def test_a_stop_saves_when_the_body_of_the_loop_has_ended(tmp_path: Path) -> None:
    reference = Launch(tmp_path / "never")()

    def stop(launch: Launch) -> None:
        if len(launch.trace) == 7:
            launch.run.flag.request("SIGTERM")

    with pytest.raises(Stopped) as left:
        Launch(tmp_path / "run", stop)()
    assert left.value.reason == "SIGTERM"
    last = Launch(tmp_path / "run")()
    assert last.loop.resume().step == 8, "alone, it is heeded at the next step"
    assert (last.trace, last.end) == (reference.trace[8:], reference.end)


def test_a_halt_saves_and_the_run_does_not_start_again(tmp_path: Path) -> None:
    def halt(launch: Launch) -> None:
        if len(launch.trace) == 5:
            launch.loop.halt("look at the loss")

    with pytest.raises(Halted):
        Launch(tmp_path, halt)()
    assert (tmp_path / "checkpoint-6" / "resume" / "manifest.json").exists()


def test_a_stop_before_the_first_step_leaves_at_the_first_batch(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    launch.loop.resume()
    launch.run.flag.request("SIGTERM")
    with pytest.raises(Stopped):
        launch()
    assert not launch.trace


def test_an_error_of_the_script_is_recorded(tmp_path: Path) -> None:
    def fail(launch: Launch) -> None:
        raise ZeroDivisionError("one by zero")

    with pytest.raises(ZeroDivisionError):
        Launch(tmp_path, fail)()
    status = json.loads((tmp_path / ".resume" / "status.json").read_text())
    assert (status["state"], status["reason"], status["step"]) == ("failed", "ZeroDivisionError: one by zero", 1)


def test_an_error_before_the_run_owns_its_directory_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Launch(tmp_path).loop:
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{}, {"epochs": None, "max_steps": 9}])
def test_a_finished_run_launched_again_does_nothing(tmp_path: Path, options: Any) -> None:
    first = Launch(tmp_path, **options)()
    before = sorted(tmp_path.glob("checkpoint-*"))
    again = Launch(tmp_path, **options)()
    assert (again.trace, again.end) == ([], first.end)
    assert sorted(tmp_path.glob("checkpoint-*")) == before
    longer = Launch(tmp_path, **{**options, "epochs": 4, "max_steps": None})()
    assert longer.loop.global_step == 24


def test_a_loop_that_is_left_early_goes_on_within_its_epoch(tmp_path: Path) -> None:
    expected = Launch(tmp_path / "never")().trace
    first = Launch(tmp_path / "run")
    with first.loop:
        data = first.loader()
        for _ in first.loop.epochs(3):
            for batch in first.loop.batches(data):
                first._step(batch)
                if len(first.trace) == 8:
                    break
            else:
                continue
            break
    last = Launch(tmp_path / "run", max_steps=100)()
    assert first.trace + last.trace == expected


def test_a_loop_that_never_began_finishes_nothing(tmp_path: Path) -> None:
    with Launch(tmp_path).loop:
        pass
    assert not list(tmp_path.iterdir())


def test_an_end_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetting, match="needs a number of epochs, max_steps="):
        next(Launch(tmp_path).loop.epochs())


def test_what_is_left_of_a_pass_may_be_dropped_after_its_epoch(tmp_path: Path) -> None:
    """The loop goes on as if the script had broken off the pass within it."""
    traces = []
    for dropped_in_time in (True, False):
        launch = Launch(tmp_path / str(dropped_in_time))
        with launch.loop:
            data = launch.loader()
            for _ in launch.loop.epochs(1):
                batches = launch.loop.batches(data)
                for batch in itertools.islice(batches, 4):
                    launch._step(batch)
                if dropped_in_time:
                    batches.close()  # type: ignore[attr-defined]
            batches.close()  # type: ignore[attr-defined]
        traces.append(launch.trace)
        assert Launch(tmp_path / str(dropped_in_time), epochs=1)().trace == []
    assert traces[0] == traces[1] and len(traces[0]) == 4


# ---- What the script says


def test_a_save_that_is_asked_for_comes_when_the_body_has_ended(tmp_path: Path) -> None:
    def ask(launch: Launch) -> None:
        if len(launch.trace) == 5:
            launch.loop.save("by hand")
            assert not (tmp_path / "checkpoint-5").exists()

    launch = Launch(tmp_path, ask, save_every=100)
    with launch.loop:
        launch.loop.resume()
        launch.loop.save("before anything")
        launch._plain(launch.loader())
    assert reasons(tmp_path) == {0: "before anything", 5: "by hand", 18: "finished"}


def reasons(directory: Path) -> dict[int, str]:
    """Return why each step was saved."""
    found = [manifest(path) for path in directory.glob("checkpoint-*")]
    return {each["step"]: each["reason"] for each in found}


def manifest(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "resume" / "manifest.json").read_text())["manifest"]
    return found


def test_the_best_is_saved_and_remembered(tmp_path: Path) -> None:
    found = []

    def evaluate(launch: Launch) -> None:
        values = {3: 2.0, 5: 1.0, 7: float("nan"), 9: 1.5, 11: 0.5}
        if launch.loop.global_step in values:
            found.append(launch.loop.best(values[launch.loop.global_step], name="eval_loss"))
        killed_after(8)(launch)

    with pytest.raises(Killed):
        Launch(tmp_path, evaluate, save_every=100)()
    assert found == [True, True, False]
    found.clear()
    Launch(tmp_path, evaluate, save_every=100, epochs=2)()
    assert found == [False, False, True], "step 7 comes again"
    assert reasons(tmp_path) == {3: "best", 5: "best", 11: "best", 12: "finished"}
    saved = manifest(tmp_path / "checkpoint-11")
    assert (saved["metrics"]["eval_loss"], saved["best"]) == (0.5, "checkpoint-11")


def test_the_best_may_be_the_greatest_and_nothing_else(tmp_path: Path) -> None:
    found = []
    Launch(tmp_path, lambda launch: found.append(launch.loop.best(-abs(4 - len(launch.trace)), mode="max")))()
    assert found == [True] * 4 + [False] * 14
    with pytest.raises(UnsupportedSetting, match="mode='least' says neither"):
        Launch(tmp_path).loop.best(1.0, mode="least")


def test_a_step_may_tell_no_loss_and_other_metrics(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    assert launch.loop.mean_loss == 0.0
    with launch.loop:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(launch.loader()):
                launch.framework.train(batch)
                launch.loop.step(metrics={"norm": 0.25})
    assert manifest(tmp_path / "checkpoint-4")["metrics"] == {"norm": 0.25}
    assert launch.loop.mean_loss == 0.0


def test_a_generator_that_is_nobodys_part_is_named_and_registered_it_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Augmenting:
        def __init__(self) -> None:
            self.generator = torch.Generator()

        def __len__(self) -> int:
            return 22

        def __getitem__(self, index: int) -> float:
            return index + torch.rand((), generator=self.generator).item()

    for registered in (False, True):
        data = Augmenting()
        parts = {"generator": GeneratorState(data.generator)} if registered else {}
        caplog.clear()
        launch = Launch(tmp_path / str(registered), parts=parts, epochs=1)
        launch.loader = lambda data=data: DataLoader(data, 4)  # type: ignore[method-assign, misc, assignment]
        with caplog.at_level("INFO", "resume_adapters"):
            launch()
        said = [message for message in caplog.messages if "dataset.generator is a generator of its own" in message]
        assert len(said) == (not registered)
        assert not said or "register it with plain(generator=dataset.generator)" in said[0]


# ---- Another launch than the one that saved


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
    native = state._write_encoded

    def write(storage: Any, directory: Path, name: str, document: bytes, tensors: Any) -> None:
        if name != "rank-00000":
            native(storage, directory, name, document, tensors)

    whole = Launch(tmp_path / "never")()
    with monkeypatch.context() as patch:
        patch.setattr(state, "_write_encoded", write)
        with pytest.raises(Killed):
            Launch(tmp_path / "run", killed_after(5))()
    last = Launch(tmp_path / "run")()
    assert last.loop.resume() == Resumed(0, 4, 4)
    assert [line[:2] for line in last.trace] == [line[:2] for line in whole.trace[4:]]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch": 5}, "batch size 4, this launch has 5: the order of the batches depends on it"),
    "accumulation": ({"accumulation": 2}, "gradient_accumulation_steps 1, this launch has 2"),
    "elastic batch": ({"batch": 8, "data": "elastic"}, "an optimizer step had 4 samples and would now have 8"),
    "by steps": (
        {"batch": 8, "data": "elastic", "on_batch_change": "keep-samples", "max_steps": 50},
        "max_steps= counts steps, which have another number of samples now",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_launch_whose_steps_would_be_others_is_refused(tmp_path: Path, change: str) -> None:
    options, words = CHANGES[change]
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), data=options.get("data", "shuffled"))()
    launch = Launch(tmp_path, **options)
    with pytest.raises(StateMismatch, match=words):
        launch()
    assert not launch.trace


def test_a_launch_with_another_of_what_is_fixed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainTorch, "fixed", {"number of stages": 2})
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5))()
    monkeypatch.setattr(PlainTorch, "fixed", {"number of stages": 4})
    launch = Launch(tmp_path)
    words = "checkpoint-4 was saved with number of stages 2, this launch has 4: it cannot be resumed from"
    with pytest.raises(StateMismatch, match=words):
        launch()
    assert not launch.trace


def test_several_loaders_do_not_go_on_by_samples(tmp_path: Path) -> None:
    options = {"script": "two", "data": "elastic"}
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(9), **options)()
    with pytest.raises(StateMismatch, match="of several training loaders each would have to be divided alike"):
        Launch(tmp_path, batch=8, on_batch_change="keep-samples", **options)()


def test_going_on_by_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Four of six batches of four, then batches of three: each sample once, the schedule as if always of three."""
    options = {"data": "elastic", "on_batch_change": "keep-samples", "epochs": 2}
    first = Launch(tmp_path, killed_after(5), **options)
    with pytest.raises(Killed):
        first()
    with caplog.at_level("INFO", "resume_adapters"):
        last = Launch(tmp_path, killed_after(7), batch=3, **options)
        with pytest.raises(Killed):
            last()
    assert "after 4 steps the run is where 5 steps of this size would have brought it" in caplog.text
    seen = [sample for line in [*first.trace[:4], *last.trace] if line[0] == 0 for sample in line[2]]
    assert sorted(seen) == [*range(24)]
    assert last.framework.schedule.last_epoch == 5 + 7
    again = Launch(tmp_path, batch=3, **options)()
    assert (again.loop.global_step, again.framework.schedule.last_epoch) == (4 + 3 + 8, 16)


def test_a_schedule_of_the_users_goes_on_by_samples_too(tmp_path: Path) -> None:
    for batch, steps in ((4, 0), (3, 5)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        options: dict[str, Any] = {"batch": batch, "parts": {"schedule": schedule}}
        with pytest.raises(Killed):
            Launch(tmp_path, killed_after(5), data="elastic", on_batch_change="keep-samples", **options)()
        assert (schedule.last_epoch, schedule.get_last_lr()) == (steps, [0.1 / (1 + steps)])


def test_going_on_by_samples_within_an_accumulation(tmp_path: Path) -> None:
    """Three of six batches of four, then two of six where four make a step: two are done of the first."""
    options = {"data": "elastic", "on_batch_change": "keep-samples", "epochs": 1}
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(4), save_every=3, **options)()
    last = Launch(tmp_path, batch=6, accumulation=4, **options)()
    assert [(line[1], len(line[2])) for line in last.trace] == [(3, 6), (4, 6)]


def test_the_same_global_batch_goes_on_exactly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"data": "elastic", "on_batch_change": "keep-samples"}
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), **options)()
    with caplog.at_level("INFO", "resume_adapters"):
        last = Launch(tmp_path, batch=2, accumulation=2, **options)()
    assert "each optimizer step has 4 samples, as before" in caplog.text
    assert last.loop.global_step == 18 and last.framework.schedule.last_epoch == 18


def test_one_rank_goes_on_as_two_and_two_as_one(server: Server, tmp_path: Path) -> None:
    """Each step has the samples that it would have had; each rank its own random numbers, buffers and batches."""
    expected = Launch(tmp_path / "never", data="elastic")()
    samples = [sorted(line[2]) for line in expected.trace]
    with pytest.raises(Killed):
        Launch(tmp_path / "one", killed_after(5), data="elastic")()
    words = ["train", str(tmp_path / "one"), str(tmp_path / "two")]
    server.start(JOB, words, tmp_path, 2, {}).wait(60).require_success()
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
    assert comparison.first_difference(before, launch.framework.state_dict()) is None


def test_state_that_is_spread_is_proved(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), **SCRIPTS["spread state"])()
    other: dict[str, Any] = {"spread": lambda framework: {"weights": {"one": torch.ones(1)}}}
    with pytest.raises(NotRestored, match=r"^weights: what the ranks hold of it together"):
        Launch(tmp_path, **other)()
    assert Launch(tmp_path, verify=False, **other)().loop.global_step == 18


def test_parts_are_restored_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(2)
    parts: dict[str, Stateful] = {"norms": Buffers({0: norm})}
    norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(5), parts=parts)()
    norm.running_mean.zero_()  # type: ignore[union-attr]
    Launch(tmp_path, killed_after(5), parts=parts).loop.resume()
    assert norm.running_mean.tolist() == [3.0, 3.0]  # type: ignore[union-attr]
    with pytest.raises(StateMismatch, match="has no part 'ema'"):
        Launch(tmp_path, parts={**parts, "ema": Buffers({})})()


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
    native = state._write_encoded

    def write(storage: Any, directory: Path, name: str, document: bytes, tensors: Any) -> None:
        if f"{name}.json" != file:
            native(storage, directory, name, document, tensors)
        elif keys:
            content = tree.decode(document, tensors)
            holder = functools.reduce(operator.getitem, keys[:-1], content)
            del holder[keys[-1]]
            native(storage, directory, name, *tree.encode(content))

    with monkeypatch.context() as patch:
        patch.setattr(state, "_write_encoded", write)
        with pytest.raises(Killed):
            Launch(tmp_path, killed_after(5), data="elastic")()
    place = f"{'.'.join(map(str, keys))} in {file}" if keys else file
    batch = 8 if keys[-1:] in (("samples",), ("step",)) else 4
    launch = Launch(tmp_path, data="elastic", batch=batch, on_batch_change="keep-samples", spread=lambda framework: {})
    with pytest.raises(FormatMismatch, match=rf"checkpoint-4 has no {re.escape(place)}.*resume-adapters \d") as refused:
        launch()
    assert (refused.value.path, refused.value.step) == (tmp_path / "checkpoint-4", 4)
    assert not launch.trace


def test_an_option_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetting, match="on_batch_change='keep' is neither"):
        Launch(tmp_path, on_batch_change="keep")
