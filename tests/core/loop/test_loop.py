"""A loop of plain torch, left at any moment and run again, ends as if it had never been left: the loop alone, with no
framework around it, in one process."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from resume_adapters import Memory
from resume_adapters.core.loop.framework import Resumed
from resume_adapters.core.loop.loader import LoopLoader, PassState
from resume_adapters.core.loop.passes import EpochPasses
from resume_adapters.core.session import finished
from resume_adapters.errors import Halted, NotRestored, RunHalted, StateMismatch, Stopped, UnsupportedSetting
from selection import often

from plain_torch import Killed, Launch, killed_after, reasons


def require_same(directory: Path, deaths: list[int], **options: Any) -> Launch:
    """Launch a script again after each death, and compare with the launch that never died."""
    return require_same_as(Launch(directory / "never", **options)(), directory, deaths, **options)


def require_same_as(reference: Launch, directory: Path, deaths: list[int], **options: Any) -> Launch:
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
    "a loader made in each epoch": {"script": "anew", "save_every": 2},
    "samples drawn in each epoch": {"script": "resampled", "save_every": 3, "epochs": 5},
    "initialized after the resume": {"script": "initialized"},
    "loaders in turn": {"script": "in turn", "save_every": 2, "epochs": 5},
    "a loader used twice": {"script": "twice", "save_every": 3},
    "a pass that is never exhausted": {"script": "by hand", "each_epoch": True},
    "batches drawn by next": {"script": "drawn", "save_every": 2, "epochs": 4},
    "the same of a loader that fetches ahead": {"script": "drawn", "data": "ahead", "save_every": 1, "epochs": 4},
    "the same within the loop of the run": {"script": "drawn", "is_wrapped": True, "save_every": 2, "epochs": 4},
    "spread state": {"spread": lambda framework: {"weights": framework.state_dict()}},
}


@pytest.mark.parametrize(
    "script", often(SCRIPTS, "accumulating", "an elastic sampler", "loaders together", "samples drawn in each epoch")
)
def test_left_at_any_batch_and_launched_again(tmp_path: Path, script: str) -> None:
    reference = Launch(tmp_path / "never", **SCRIPTS[script])()
    for deaths in ([5, 3], [6], [14 if script == "by steps" else 17]):
        last = require_same_as(reference, tmp_path / str(deaths), deaths, **SCRIPTS[script])
        assert last.loop.resume().step > 0, "it was a fresh start"


def test_what_is_initialized_after_the_resume_is_loaded_again_between_epochs_too(tmp_path: Path) -> None:
    assert require_same(tmp_path, [8], script="initialized", save_every=100, each_epoch=True).loop.resume().step == 6


def test_a_checkpoint_that_the_bare_script_has_written_is_trained_on(tmp_path: Path) -> None:
    """It says a step and no random state: the first pass goes on behind the batches that are done, and no more."""
    reference = Launch(tmp_path / "never")()
    with pytest.raises(Killed):
        Launch(tmp_path / "run", killed_after(5))()
    shutil.rmtree(tmp_path / "run" / ".resume")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4" / "resume")
    trained = Launch(tmp_path / "run")()
    assert [line[:3] for line in trained.trace[:2]] == [line[:3] for line in reference.trace[4:6]]
    assert trained.end[1] == reference.end[1], "as many steps and epochs"


@pytest.mark.parametrize(("deaths", "accumulation"), [([5, 3], 1), ([6], 2)], ids=str)
def test_left_between_saves_to_the_disk_it_continues_from_memory(
    tmp_path: Path, deaths: list[int], accumulation: int
) -> None:
    (tmp_path / "memory").mkdir()
    memory = Memory(save_every=1, directory=str(tmp_path / "memory"))
    last = require_same(tmp_path, deaths, accumulation=accumulation, save_every=100, mirror=[memory])
    context = last.loop._session.context
    assert context is not None
    assert context.step == sum((each - 1) // accumulation for each in deaths), "a step was lost whose body has ended"


@pytest.mark.parametrize("deaths", [[5], [8, 2], [15]], ids=str)
def test_a_loop_that_cannot_be_wrapped_goes_on_in_the_epoch_that_it_is_told(tmp_path: Path, deaths: list[int]) -> None:
    last = require_same(tmp_path, deaths, script="followed")
    assert last.loop.resume().step > 0


def test_a_save_within_the_last_batch_of_an_elastic_order_resumes_in_the_next_epoch(tmp_path: Path) -> None:
    """The position is behind the last sample, and nothing has said yet that the pass is over."""
    last = require_same(tmp_path, [8], data="elastic", save_every=6)
    assert last.loop.resume().step == 6


@pytest.mark.parametrize("data", ["shuffled", "ahead"])
def test_a_loop_that_cannot_be_wrapped_is_given_an_empty_pass_where_one_was_over(tmp_path: Path, data: str) -> None:
    """Saved between two passes, so that the rest of the first has no batch."""
    options = {"script": "followed", "between": True, "save_every": 100, "data": data}
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


@pytest.mark.parametrize(
    "options",
    [
        {"script": "evaluated"},
        {"script": "in turn", "sizes": (22, 22)},
        *(
            pytest.param({"script": each}, marks=pytest.mark.thorough)
            for each in ("anew", "in turn", "twice", "in phases")
        ),
    ],
    ids=str,
)
def test_saved_between_two_passes_each_loader_goes_on_as_it_was(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"save_every": 100, "epochs": 5, "each_epoch": True, **options}
    reference = Launch(tmp_path / "never", **options)()
    for deaths in ([8], [13], [14, 6]):
        require_same_as(reference, tmp_path / str(deaths), deaths, **options)


def test_a_loader_that_was_interrupted_in_its_second_pass_of_an_epoch_goes_on_there(tmp_path: Path) -> None:
    require_same(tmp_path, [12], script="twice", save_every=3)


@pytest.mark.parametrize(("death", "saves"), [(8, {"save_every": 8}), (14, {"save_every": 100, "each_epoch": True})])
def test_a_checkpoint_that_does_not_say_which_passes_a_loader_had_is_paired_by_the_order_of_first_use(
    death: int, saves: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions wrote it."""
    native = LoopLoader.state

    def state(loader: LoopLoader, *args: Any, **options: Any) -> PassState:
        return replace(native(loader, *args, **options), numbers=None)

    monkeypatch.setattr(LoopLoader, "state", state)
    require_same(tmp_path, [death], script="two", **saves)


@pytest.mark.parametrize("script", ["", "evaluated"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_another_batch_size_is_noticed_between_two_passes(tmp_path: Path, script: str, epochs: int) -> None:
    """Also where a loader that is only evaluated has the shape that the training loader had."""
    options = {"save_every": 100, "each_epoch": True, "script": script}
    with pytest.raises(Killed):
        Launch(tmp_path, killed_after(6 * epochs + 1), **options)()
    last = Launch(tmp_path, batch=5, **options)
    with pytest.raises(StateMismatch, match="batch size 4, this launch has 5"):
        last()
    assert not last.trace


def test_a_checkpoint_that_does_not_say_how_many_loaders_were_alike_had_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier versions wrote it."""
    native = EpochPasses.states
    monkeypatch.setattr(
        EpochPasses, "states", lambda passes, process: [replace(each, alike=None) for each in native(passes, process)]
    )
    require_same(tmp_path, [8], script="in turn", save_every=100, each_epoch=True)


def test_what_an_older_checkpoint_does_not_say_of_a_loader_is_said_by_a_save_before_its_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = EpochPasses.states

    class Early(Launch):
        def _followed(self, data: Any) -> None:
            self.loop.resume(data)
            self.loop.save("before its first batch")
            self.run.saver.flush()
            raise Killed

    expected = Launch(tmp_path / "never", script="followed", save_every=100)()
    with monkeypatch.context() as of_older, pytest.raises(Killed):
        of_older.setattr(
            EpochPasses,
            "states",
            lambda passes, process: [replace(each, alike=None) for each in native(passes, process)],
        )
        Launch(tmp_path / "run", killed_after(9), script="followed")()
    with pytest.raises(Killed):
        Early(tmp_path / "run", script="followed")()
    state = json.loads((tmp_path / "run" / "latest" / "resume" / "rank-00000.json").read_text())
    assert [each["alike"] for each in state["loaders"]] == [[1, 1]]
    last = Launch(tmp_path / "run", script="followed", save_every=100)()
    assert (last.trace, last.end) == (expected.trace[8:], expected.end)


def test_loaders_that_are_made_in_each_epoch_are_not_kept(tmp_path: Path) -> None:
    Launch(tmp_path, script="anew", epochs=6)()
    state = json.loads((tmp_path / "latest" / "resume" / "rank-00000.json").read_text())
    assert json.dumps(state).count("made_in_loop") == 1


@pytest.mark.parametrize("epoch", [0, 1])
def test_data_that_were_changed_since_the_save_are_noticed_without_workers(tmp_path: Path, epoch: int) -> None:
    """A plain loader fetches nothing ahead by itself, so that there was nothing to compare."""

    class Shifted(Launch):
        shift = 0

        def loader(self) -> Any:
            return DataLoader([index + self.shift for index in range(22)], 4, shuffle=True)

    with pytest.raises(Killed):
        Shifted(tmp_path, killed_after(5 + 6 * epoch), save_every=2)()
    Shifted.shift = 1
    with pytest.raises(NotRestored, match="is not the batch that followed"):
        Shifted(tmp_path)()


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


@pytest.mark.parametrize(("at", "saved"), [(5, 6), (18, 18)], ids=["on the way", "after the last step"])
def test_a_halt_saves_and_the_run_does_not_start_again(tmp_path: Path, at: int, saved: int) -> None:
    def halt(launch: Launch) -> None:
        if len(launch.trace) == at:
            launch.loop.halt("look at the loss")

    with pytest.raises(Halted):
        Launch(tmp_path, halt)()
    assert (tmp_path / f"checkpoint-{saved}" / "resume" / "manifest.json").exists()
    with pytest.raises(RunHalted, match=f"was halted at step {saved}: look at the loss"):
        Launch(tmp_path)()


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


def test_another_training_where_this_process_has_finished_one_is_refused_and_closed(tmp_path: Path) -> None:
    first = Launch(tmp_path)()
    of_process = dict(finished._FINISHED)
    again = Launch(tmp_path)
    finished._FINISHED.update(of_process)  # as in the process of the first
    with pytest.raises(UnsupportedSetting, match="has finished a training of 3 epochs"):
        next(again.loop.epochs(3))
    assert again.framework.is_closed
    finished._FINISHED.clear()
    assert Launch(tmp_path)().end == first.end, "the finished run is left as it was"


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


def test_a_cell_that_was_interrupted_and_is_run_again_is_refused_until_the_run_is_made_anew(tmp_path: Path) -> None:
    expected = Launch(tmp_path / "never")()
    first = Launch(tmp_path / "run", killed_after(9))
    data = first.loader()

    def cell() -> None:
        for _ in first.loop.epochs(3):
            for batch in first.loop.batches(data):
                first._step(batch)

    with pytest.raises(Killed):
        cell()
    with pytest.raises(UnsupportedSetting, match=r"the run \(plain\) again before it, and it resumes"):
        cell()
    assert len(first.trace) == 9
    assert Launch(tmp_path / "run")().end == expected.end


def test_an_end_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetting, match="needs a number of epochs, max_steps="):
        next(Launch(tmp_path).loop.epochs())


class Unsized(BatchSampler):
    """Says in its own words that it has no length, as one whose batches differ in size."""

    def __len__(self) -> int:
        raise ValueError("ambiguous")


class OfUnsized(Launch):
    def loader(self) -> Any:
        return DataLoader(range(22), batch_sampler=Unsized(RandomSampler(range(22)), 4, drop_last=False))


def test_a_loader_whose_sampler_refuses_to_have_a_length_goes_on(tmp_path: Path) -> None:
    whole = OfUnsized(tmp_path / "whole", save_every=3, epochs=2)()
    with pytest.raises(Killed):
        OfUnsized(tmp_path / "killed", killed_after(4), save_every=3, epochs=2)()
    last = OfUnsized(tmp_path / "killed", save_every=3, epochs=2)()
    assert last.trace == whole.trace[3:] and last.end == whole.end


def test_the_length_of_a_pass_is_that_of_the_loader_in_each_launch(tmp_path: Path) -> None:
    lengths: list[list[int]] = []

    class Measured(Launch):
        def _plain(self, data: Any) -> None:
            lengths.append([])
            for _ in self._epochs():
                batches, fewer, more = (self.loop.batches(data, limit=limit) for limit in (None, 2, 9))
                lengths[-1] += [len(batches), len(fewer), len(more)]
                for batch in batches:
                    self._step(batch)

    with pytest.raises(Killed):
        Measured(tmp_path, killed_after(4), save_every=3, epochs=2)()
    Measured(tmp_path, save_every=3, epochs=2)()
    assert lengths == [[6, 2, 6], [6, 2, 6] * 2]
    with pytest.raises(TypeError):
        len(Launch(tmp_path / "stream").loop.batches(DataLoader(IterableDataset(), 2)))


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


def test_a_pass_that_goes_on_in_the_next_epoch_is_refused_before_it_is_trained_on(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    with pytest.raises(UnsupportedSetting, match=r"call run\.batches\(loader\) in each epoch"), launch.loop:
        batches = launch.loop.batches(launch.loader())
        for _ in launch.loop.epochs(3):
            for batch in itertools.islice(batches, 2):
                launch._step(batch)
    assert [line[0] for line in launch.trace] == [0, 0]


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


def test_nothing_is_saved_for_a_run_that_has_not_begun_or_has_ended(tmp_path: Path) -> None:
    launch = Launch(tmp_path, save_every=100)
    launch.loop.save("before the run owns its directory")
    with launch.loop:
        launch._plain(launch.loader())
    launch.loop.save("after the end")
    assert reasons(tmp_path) == {18: "finished"}
