"""What an adapter asks of a session between its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.ranks import SingleProcess
from resume_adapters.core.run.run import ResumableRun
from resume_adapters.core.session.options import OptionsCallback
from resume_adapters.core.session.session import Session
from resume_adapters.core.state.rng import GeneratorState
from resume_adapters.core.state.stateful import StatefulGroup

from plain_torch import NoTrackers


def begun(directory: Path, parts: dict[str, Any] | None = None, **options: Any) -> Session:
    """Return a session that has chosen what it resumes from."""
    run = ResumableRun(directory, ranks=SingleProcess())
    session = Session(run, parts or {}, trackers=NoTrackers(), verify=True, topology={}, **options)
    session.choose()
    return session


def test_a_stop_is_heard_between_two_ends_of_a_step_and_stays(tmp_path: Path) -> None:
    session = begun(tmp_path)
    assert not session.ask_to_stop() and not session.stopping
    session.run.flag.request("SIGTERM")
    assert session.ask_to_stop()
    assert (session.stopping, session.reason) == (True, "stop: SIGTERM")
    session.reason = "the validation's end"
    assert session.ask_to_stop() and session.end_step(1, 0.1).stop
    assert session.reason == "the validation's end"
    session.run.close()


def test_a_run_is_finished_at_the_step_and_with_the_horizon_that_it_was_left_at(tmp_path: Path) -> None:
    first = begun(tmp_path)
    assert not first.is_finished(5, 5)
    first.run.record("finished", step=5, horizon=5)
    first.run.close()
    second = begun(tmp_path)
    asked = [(5, 5), (4, 5), (5, 6)]
    assert [second.is_finished(step, horizon) for step, horizon in asked] == [True, False, False]
    second.run.record("stopped", step=5, horizon=5)
    second.run.close()
    third = begun(tmp_path)
    assert not third.is_finished(5, 5)
    third.run.close()


def test_the_random_state_is_also_that_of_the_registered_generators(tmp_path: Path) -> None:
    generator = torch.Generator()
    session = begun(tmp_path, {"generator": GeneratorState(generator)})
    before = session.random_state()
    expected = torch.rand(3).tolist(), torch.rand(3, generator=generator).tolist()
    session.restore_random_state(before)
    assert (torch.rand(3).tolist(), torch.rand(3, generator=generator).tolist()) == expected
    session.run.close()


@pytest.mark.parametrize(("accumulation", "together", "other"), [(1, 4, False), (2, 2, False), (2, 4, True)])
def test_steps_are_others_where_they_have_another_number_of_samples(
    tmp_path: Path, accumulation: int, together: int, other: bool
) -> None:
    saving = begun(tmp_path)
    saved = saving.loader_state({}, consumed=3, together=4)
    saving.run.close()
    session = begun(tmp_path, accumulation=accumulation)
    assert session.is_rebatched(saved, together) == other
    session.run.close()


def test_several_statefuls_are_one_part_in_whatever_order() -> None:
    first, second, new = (torch.nn.Linear(1, 1, bias=False) for _ in range(3))
    saved = {"first": {"weight": torch.ones(1, 1)}, "second": {"weight": torch.zeros(1, 1)}}
    several = StatefulGroup({"new": new, "second": second, "first": first})
    expected = {**saved, "new": {"weight": new.weight.detach().clone()}}
    several.load_state_dict(saved)
    assert several.state_dict() == expected


def test_a_callback_halts_the_run_of_the_call_that_is_under_way(tmp_path: Path) -> None:
    callback = OptionsCallback(ema=torch.nn.Linear(1, 1))
    callback.halt("nothing is under way")
    session = callback.session = begun(tmp_path, dict(callback.parts))
    assert set(session.parts) == {"ema"} and not session.ask_to_stop()
    callback.halt("the loss is not a number")
    assert session.ask_to_stop() and session.run.flag.halted
    session.run.close()
