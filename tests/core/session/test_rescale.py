"""Resuming with a different global batch: refused, or continued by samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.session.rescale import Rescale
from resume_adapters.errors import StateMismatch, UnsupportedSetting

from plain_torch import Killed, Launch, killed_after

CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"batch": 5}, "batch size 4, this launch has 5: an optimizer step had 4 samples and would now have 5"),
    "accumulation": ({"accumulation": 2}, "gradient_accumulation_steps 1, this launch has 2"),
    "elastic batch": ({"batch": 8, "data": "elastic"}, "an optimizer step had 4 samples and would now have 8"),
    "by steps": (
        {"batch": 8, "data": "elastic", "on_batch_change": "keep-samples", "max_steps": 50},
        "max_steps= counts steps, which have a different number of samples now",
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
    assert "its 4 steps count as 5 steps of the new size" in caplog.text
    seen = [sample for line in [*first.trace[:4], *last.trace] if line[0] == 0 for sample in line[2]]
    assert sorted(seen) == [*range(24)]
    assert last.framework.schedule.last_epoch == 5 + 7
    again = Launch(tmp_path, batch=3, **options)()
    assert (again.loop.global_step, again.framework.schedule.last_epoch) == (4 + 3 + 8, 16)


def test_ordinary_data_go_on_by_samples_where_whole_batches_are_done(tmp_path: Path) -> None:
    """Four of six batches of four, then batches of two: the order of an undisturbed run, and the next pass's."""
    whole = Launch(tmp_path / "whole", epochs=2)()
    options: dict[str, Any] = {"on_batch_change": "keep-samples", "epochs": 2}
    first = Launch(tmp_path / "run", killed_after(5), **options)
    with pytest.raises(Killed):
        first()
    with pytest.raises(StateMismatch, match="16 samples of the pass are used, no whole number of batches of 3"):
        Launch(tmp_path / "run", batch=3, **options)()
    last = Launch(tmp_path / "run", batch=2, **options)()
    for epoch in (0, 1):
        seen = [sample for line in [*first.trace[:4], *last.trace] if line[0] == epoch for sample in line[2]]
        assert seen == [sample for line in whole.trace if line[0] == epoch for sample in line[2]]
    assert (last.loop.global_step, last.framework.schedule.last_epoch) == (4 + 3 + 11, 22)


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


def test_an_option_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSetting, match="got 'keep'"):
        Launch(tmp_path, on_batch_change="keep")


@pytest.mark.parametrize(("carried", "steps"), [(False, 3), (True, 2)])
def test_a_run_is_where_steps_of_this_size_would_have_brought_it(carried: bool, steps: int) -> None:
    """After one epoch of six batches and five batches more, with four in a step."""
    rescale = Rescale("keep-samples", 4, accumulates_across_epochs=carried)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rescale.schedules.remember(schedule)
    assert rescale.resume_by_samples(step=20, epoch=1, consumed=5, length=6) == steps
    assert (rescale.shift, rescale.take_begun(), rescale.take_begun()) == (20 - steps, 1, 0)
    rescale.move_schedules()
    assert schedule.last_epoch == steps
    rescale.resume_by_steps(step=21)
    rescale.move_schedules()
    assert schedule.last_epoch == steps + 1
