"""What a loop does to its process and its framework is undone, however the loop ends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from resume_adapters.errors import SaveFailed, Stopped

from miniature import effects, left_behind
from plain_torch import Killed, Launch


def stop(launch: Launch) -> None:
    launch.run.flag.request("SIGTERM")


def fail(launch: Launch) -> None:
    raise ZeroDivisionError


def interrupt(launch: Launch) -> None:
    raise Killed


def lose_directory(launch: Launch) -> None:
    """Let the last save fail."""
    if launch.loop.global_step == 18:
        launch.run.saver.flush()
        launch.run.directory.rename(launch.run.directory.with_name("elsewhere"))
        launch.run.directory.write_text("a file")


ENDS: dict[str, tuple[Callable[[Launch], None], type[BaseException] | None]] = {
    "finished": (lambda launch: None, None),
    "stopped": (stop, Stopped),
    "failed": (fail, ZeroDivisionError),
    "interrupted": (interrupt, Killed),
    "last save failed": (lose_directory, SaveFailed),
}


def require_closed(launch: Launch) -> None:
    assert launch.framework.is_closed
    assert launch.framework.trackers.is_closed


@pytest.mark.parametrize("end", ENDS)
def test_however_a_loop_ends_everything_is_undone(end: str, tmp_path: Path) -> None:
    before = effects()
    die, error = ENDS[end]
    launch = Launch(tmp_path / "run", die)
    if error is None:
        launch()
    else:
        with pytest.raises(error):
            launch()
    require_closed(launch)
    assert not left_behind(before)


@pytest.mark.parametrize("early", [False, True], ids=["at a step", "before the first step"])
def test_a_stop_of_a_loop_without_with_undoes_everything(tmp_path: Path, early: bool) -> None:
    before = effects()
    launch = Launch(tmp_path, stop)
    if early:
        launch.loop.resume()
        stop(launch)
    with pytest.raises(Stopped):
        launch._plain(launch.loader())
    assert bool(launch.trace) is not early, "an early one leaves at the first batch"
    require_closed(launch)
    assert not left_behind(before)


def test_a_loop_that_never_began_undoes_what_it_made(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    with launch.loop:
        pass
    require_closed(launch)
    assert not list(tmp_path.iterdir())


def test_a_resume_that_fails_undoes_everything(tmp_path: Path) -> None:
    """Whoever catches the error may begin another run, without ``with run:`` too."""
    Launch(tmp_path, epochs=1)()
    before = effects()
    launch = Launch(tmp_path, parts={"ema": torch.nn.Linear(1, 1)})
    with pytest.raises(Exception, match="ema"):
        launch.loop.resume()
    require_closed(launch)
    assert not left_behind(before)


class OneLoader(Launch):
    """A launch with the loader of others."""

    data: Any

    def loader(self) -> Any:
        return self.data


def test_the_loader_of_a_run_that_is_over_keeps_nothing_of_it(tmp_path: Path) -> None:
    OneLoader.data = DataLoader(range(22), 4, shuffle=True)
    launch = OneLoader(tmp_path)()
    runs = weakref.ref(launch.run)
    del launch
    gc.collect()
    assert runs() is None
