"""A second training in a run directory that this process has finished."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.run_directory.status import RunState
from resume_adapters.core.session import finished
from resume_adapters.core.session.finished import Extent, mark_finished, require_continuation
from resume_adapters.errors import UnsupportedSetting

from miniature import new_run
from plain_torch import Launch

SAMPLES = {"samples in the dataset": 52}


def finish(directory: Path, extent: Extent) -> None:
    run = ResumableRun(directory, ranks=SingleProcess())
    run.open()
    run.set_state(RunState.FINISHED, step=10, epoch=2.5, horizon=10)
    mark_finished(run, extent, 2.5, 10)
    run.close()


def ask(directory: Path, extent: Extent, **options: Any) -> None:
    run = new_run(directory, **options)
    try:
        require_continuation(run, extent, "output_dir=...")
    finally:
        run.close()


@pytest.mark.parametrize("extent", [Extent(None, 10), Extent(None, 9), Extent(2.5, None), Extent(2, 10)], ids=str)
def test_it_is_refused_where_it_asks_for_no_more(extent: Extent, tmp_path: Path) -> None:
    finish(tmp_path, Extent(None, 10))
    with pytest.raises(UnsupportedSetting, match=f"of {extent} there: .* its own run directory: output_dir=") as error:
        ask(tmp_path, extent)
    assert f"finished a training of 2.5 epochs and 10 steps in {tmp_path}" in error.value.message


@pytest.mark.parametrize("extent", [Extent(None, 11), Extent(3, None), Extent(2, 11)], ids=str)
def test_it_continues_where_it_asks_for_more(extent: Extent, tmp_path: Path) -> None:
    finish(tmp_path, Extent(None, 10))
    ask(tmp_path, extent)


def test_it_is_refused_where_it_trains_something_else(tmp_path: Path) -> None:
    """The second fold of a cross-validation, and a second phase in which more layers are trained."""
    finish(tmp_path, Extent(None, 10, SAMPLES))
    ask(tmp_path, Extent(None, 20, SAMPLES))
    with pytest.raises(UnsupportedSetting, match="with 48 samples in the dataset, 52 then: it would"):
        ask(tmp_path, Extent(None, 20, {"samples in the dataset": 48}))
    with pytest.raises(UnsupportedSetting, match="of 20 steps there with a new trainer: it would"):
        ask(tmp_path, Extent(None, 20, SAMPLES, begins="a new trainer"))


def test_others_may_begin_there(tmp_path: Path) -> None:
    """Another process, one that sets the checkpoints aside first, and one that has removed the directory."""
    finish(tmp_path / "a", Extent(None, 10))
    ask(tmp_path / "b", Extent(None, 10))
    ask(tmp_path / "a", Extent(None, 10), resume="scratch!")
    after = ResumableRun(tmp_path / "a", ranks=SingleProcess())
    after.open()
    with pytest.raises(UnsupportedSetting):
        require_continuation(after, Extent(None, 10), "")  # opened: the status says running, and the run remembers
    after.close()
    left = after.control.status.read()
    assert left is not None and (left.state, left.step, left.horizon) == (RunState.FINISHED, 10, 10)
    with pytest.raises(UnsupportedSetting):
        ask(tmp_path / "a", Extent(None, 10))
    later = ResumableRun(tmp_path / "a", ranks=SingleProcess())
    later.open()
    later.set_state(RunState.FINISHED, step=10)
    later.close()
    ask(tmp_path / "a", Extent(None, 10))  # a later start, of another process, has finished it
    finish(tmp_path / "a", Extent(None, 10))
    shutil.rmtree(tmp_path / "a")
    ask(tmp_path / "a", Extent(None, 10))
    finish(tmp_path / "a", Extent(None, 10))
    finished._FINISHED.clear()
    ask(tmp_path / "a", Extent(None, 10))


def test_a_loop_is_refused_before_it_changes_anything(tmp_path: Path) -> None:
    Launch(tmp_path, epochs=1)()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = dict(finished._FINISHED)
    again = Launch(tmp_path, epochs=1)
    finished._FINISHED.update(done)
    with pytest.raises(UnsupportedSetting, match="this process has finished a training of 1 epochs"):
        again()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    longer = Launch(tmp_path, epochs=2)
    finished._FINISHED.update(done)
    assert longer().loop.epoch == 2
