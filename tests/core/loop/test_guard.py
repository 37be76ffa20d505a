"""Loops that go past the run: what steps or is read without being counted or saved is refused within a few steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from resume_adapters.core.loop.guard import LoopGuard, Trained
from resume_adapters.errors import UnsupportedSetting

from plain_torch import Launch

DATA = range(40)


def scripted(directory: Path, script: Callable[[Launch], None], **options: Any) -> Launch:
    """Run a script that has a loop of its own."""
    launch = Launch(directory, **options)
    with launch.loop:
        script(launch)
    return launch


class Plain(DataLoader[Any]):
    """Iterates as its base class does."""


class Own(DataLoader[Any]):
    """Has its own way to iterate."""

    def __iter__(self) -> Any:
        return super().__iter__()


@pytest.mark.parametrize("kind", [DataLoader, Plain, Own])
def test_a_loader_that_is_not_given_to_the_loop_is_refused_at_its_third_batch(
    tmp_path: Path, kind: type[DataLoader[Any]]
) -> None:
    seen = []

    def script(launch: Launch) -> None:
        for _ in launch.loop.epochs(2):
            for batch in kind(DATA, 4):  # type: ignore[arg-type]  # run.batches is forgotten
                seen.append(batch)
                launch._step(batch)

    with pytest.raises(UnsupportedSetting, match=r"for batch in run\.batches\(loader\):"):
        scripted(tmp_path, script)
    assert len(seen) == 2


def test_an_evaluation_may_read_what_it_likes(tmp_path: Path) -> None:
    def script(launch: Launch) -> None:
        train = DataLoader(DATA, 4)
        for _ in launch.loop.epochs(1):
            endless = itertools.cycle(DataLoader(DATA, 4))
            for batch in launch.loop.batches(train):
                launch._step(batch)
                for values in DataLoader(DATA, 20):  # as a whole, between two steps
                    launch.framework.model(values.float().reshape(-1, 1))
                with torch.no_grad():
                    next(endless)

    assert scripted(tmp_path, script).loop.global_step == 10


def test_a_run_that_has_closed_watches_nothing(tmp_path: Path) -> None:
    native = DataLoader.__iter__
    first, second = Launch(tmp_path / "first"), Launch(tmp_path / "second")
    first.loop.resume()
    second.loop.resume()
    assert DataLoader.__iter__ is not native
    first.run.close()
    assert DataLoader.__iter__ is not native
    second.run.close()
    assert DataLoader.__iter__ is native


# ---- run.step


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_loop_that_never_counts_its_steps_is_refused(tmp_path: Path, is_wrapped: bool) -> None:
    """Within the second body, or where the batches come from elsewhere at the end of the epoch."""
    steps = []

    def script(launch: Launch) -> None:
        for _ in launch.loop.epochs(2):
            for batch in launch.loop.batches(launch.loader()) if is_wrapped else DATA:
                steps.append(launch.framework.train(torch.as_tensor(batch).expand(4)))

    with pytest.raises(UnsupportedSetting, match=r"run\.step\(\) is not called"):
        scripted(tmp_path, script)
    assert len(steps) == (2 if is_wrapped else len(DATA))


def test_a_loop_over_steps_that_never_counts_them_is_refused_in_its_second_body(tmp_path: Path) -> None:
    bodies = []

    def script(launch: Launch) -> None:
        for step in launch.loop.steps(4):
            bodies.append(step)
            assert len(bodies) < 9, "it goes on for ever"
            launch.framework.train(torch.ones(4))

    with pytest.raises(UnsupportedSetting, match=r"run\.step\(\) is not called"):
        scripted(tmp_path, script)
    assert len(bodies) == 2


def test_a_loop_over_steps_that_are_not_counted_does_not_go_on_for_ever(tmp_path: Path) -> None:
    bodies = []

    def script(launch: Launch) -> None:
        for _ in launch.loop.steps(4):
            bodies.append(launch.framework.train(torch.ones(4)))
            assert len(bodies) < 9, "it goes on for ever"
            launch.framework._stepped = False  # an accumulation that ended before the last batch of the body
            launch.loop.step()

    with pytest.raises(UnsupportedSetting, match="not called after it"):
        scripted(tmp_path, script)


def test_a_body_over_steps_may_step_at_any_of_its_batches(tmp_path: Path) -> None:
    def script(launch: Launch) -> None:
        batches = launch.loop.batches(DataLoader(range(40), 4))
        for _ in launch.loop.steps(5):
            launch.framework.train(next(batches))
            next(batches)
            launch.loop.step()

    assert scripted(tmp_path, script).loop.global_step == 5


def test_a_loop_without_epochs_that_never_counts_does_not_finish(tmp_path: Path) -> None:
    def script(launch: Launch) -> None:
        launch.loop.resume()
        launch.framework.train(torch.ones(4))

    with pytest.raises(UnsupportedSetting, match=r"run\.step\(\) is not called"):
        scripted(tmp_path, script)


def test_an_epoch_that_trains_nothing_may_leave_steps_out(tmp_path: Path) -> None:
    def script(launch: Launch) -> None:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(launch.loader()):
                launch.framework.model(batch.float().reshape(-1, 1))

    assert scripted(tmp_path, script).loop.global_step == 0


# ---- What nobody saves


def beside(launch: Launch, made: Callable[[Launch], torch.optim.Optimizer], **options: Any) -> Launch:
    """Step a further optimizer in each body."""
    data, optimizer = launch.loader(), made(launch)
    with launch.loop:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(data):
                for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                launch._step(batch)
    return launch


def of_the_model(launch: Launch) -> torch.optim.Optimizer:
    return torch.optim.Adam(launch.framework.model[2].parameters(), lr=0.0)


def test_an_optimizer_that_nobody_saves_is_refused_at_its_second_step(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    with pytest.raises(
        UnsupportedSetting, match=r"Adam of 2 tensors.*pass it as a part: plain\(\.\.\., optimizer="
    ) as found:
        beside(launch, of_the_model)
    assert "param" not in str(found.value) and len(launch.trace) == 1


def test_an_optimizer_that_is_registered_after_its_first_step_is_saved_from_then_on() -> None:
    layer = torch.nn.Linear(1, 3)
    adam, parts = torch.optim.Adam(layer.parameters()), dict[str, Any]()
    guard = LoopGuard(lambda: Trained([], []), "plain", parts, bool)
    guard.begin()
    adam.step()
    parts.update(optimizer=adam, layer=layer)
    guard.counted += 1
    adam.step()
    guard.close()


def test_as_a_part_it_is_saved(tmp_path: Path) -> None:
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    launch = Launch(tmp_path, parts={"adam": adam})
    adam.param_groups[0]["params"] = list(launch.framework.model[2].parameters())
    assert beside(launch, lambda _: adam).loop.global_step == 6


def test_weights_that_no_saved_model_has_are_refused(tmp_path: Path) -> None:
    loose = torch.nn.Linear(1, 3)
    adam = torch.optim.Adam(loose.parameters())
    with pytest.raises(UnsupportedSetting, match=r"Adam trains 2 tensors that belong to no saved model.*\(3, 1\)"):
        beside(Launch(tmp_path / "lost", parts={"adam": adam}), lambda _: adam)
    beside(Launch(tmp_path / "saved", parts={"adam": adam, "loose": loose}), lambda _: adam)


def test_an_optimizer_that_lives_for_one_step_has_nothing_to_save(tmp_path: Path) -> None:
    """As the inner loop of a meta-learner, or a probe in an evaluation."""

    def script(launch: Launch) -> None:
        for _ in launch.loop.epochs(1):
            for batch in launch.loop.batches(launch.loader()):
                probe = torch.nn.Linear(1, 1)
                inner = torch.optim.Adam(probe.parameters())
                for _ in range(5):
                    probe(batch.float().reshape(-1, 1)).sum().backward()
                    inner.step()
                launch._step(batch)

    assert scripted(tmp_path, script).loop.global_step == 6


class Ascending(torch.optim.Optimizer):
    """Steps another optimizer, as sharpness-aware minimisation does.

    Args:
        base: the other.
        is_whole: its state is in the wrapper's.
    """

    def __init__(self, base: torch.optim.Optimizer, *, is_whole: bool) -> None:
        super().__init__(base.param_groups, {"lr": 0.1})
        self.base, self.param_groups = base, base.param_groups
        if is_whole:
            self.state = base.state

    def step(self, closure: Any = None) -> None:
        self.base.step()


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_optimizer_within_another_is_saved_where_its_state_is(tmp_path: Path, is_whole: bool) -> None:
    def wrap(launch: Launch) -> None:
        base = torch.optim.SGD(launch.framework.model.parameters(), lr=0.05, momentum=0.9)
        launch.framework.optimizer = Ascending(base, is_whole=is_whole)  # type: ignore[assignment]
        data = launch.loader()
        with launch.loop:
            for _ in launch.loop.epochs(1):
                for batch in launch.loop.batches(data):
                    launch._step(batch)

    launch = Launch(tmp_path)
    if is_whole:
        wrap(launch)
        return
    with pytest.raises(UnsupportedSetting, match="an optimizer that is not saved has stepped, SGD of 6 tensors"):
        wrap(launch)


def test_partitions_of_the_weights_belong_to_what_partitions_them() -> None:
    flat = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    for are_partitioned in (True, False):
        trained = Trained([flat], [torch.nn.Linear(1, 3)], are_partitioned=are_partitioned)
        guard = LoopGuard(lambda trained=trained: trained, "plain", {}, bool)  # type: ignore[misc]
        guard.begin()
        flat.step()
        with contextlib.nullcontext() if are_partitioned else pytest.raises(UnsupportedSetting, match="no saved model"):
            guard.counted += 1
            flat.step()
        guard.close()
