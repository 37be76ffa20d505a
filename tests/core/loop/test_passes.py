"""Passes within each other, together and over and over: left at any batch, a loop goes on where each of them was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from resume_adapters.errors import UnsupportedSetting
from selection import often

from plain_torch import Killed, Launch, killed_after

BATCHES = (4, 5, 8, 11, 12, 19)
"""After which the loop is left: before, at and behind the end of a pass, of one loader or of another."""


def cycle(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


class Several(Launch):
    """Trains with three loaders: of five batches, of three, and of four with a generator of its own."""

    def _plain(self, data: Any) -> None:
        self.a, self.b = DataLoader(range(20), 4, shuffle=True), DataLoader(range(24), 8, shuffle=True)
        self.c = DataLoader(range(22), 6, shuffle=True, generator=torch.Generator().manual_seed(1))
        SHAPES[self.options["shape"]](self)

    def given(self, loader: Any) -> Iterator[Any]:
        return iter(self.loop.batches(loader))

    def endless(self, loader: Any) -> Iterator[Any]:
        while True:
            yield from self.loop.batches(loader)

    def step(self, *batches: Any) -> None:
        self._step(torch.cat(batches))


def nested(run: Several) -> None:
    for _ in run._epochs():
        for one in run.given(run.a):
            for two in run.given(run.b):
                run.step(one, two)


def nested_in_turn(run: Several) -> None:
    for _ in run._epochs():
        for index, one in run.loop.enumerate(run.a):
            for two in run.given(run.b if index % 2 else run.c):
                run.step(one, two)
        for three in run.given(run.c):
            run.step(three)


def nested_and_made_anew(run: Several) -> None:
    for _ in run._epochs():
        for one in run.given(run.a):
            for two in run.given(DataLoader(range(12), 4, shuffle=True)):
                run.step(one, two)


def nested_beside_an_endless_one(run: Several) -> None:
    for _ in run._epochs():
        others = run.endless(run.c)
        for one in run.given(run.a):
            for two in run.given(DataLoader(range(12), 4, shuffle=True)):
                run.step(one, two)
            run.step(one, next(others))


def beside_an_endless_one(run: Several) -> None:
    for _ in run._epochs():
        others = run.endless(run.b)
        for one, two in zip(run.given(run.a), others, strict=False):
            run.step(one, two)
        for three in run.given(run.c):
            run.step(three)


def an_endless_one_leads(run: Several) -> None:
    for _ in run._epochs():
        for one, two in zip(run.endless(run.b), run.given(run.a), strict=False):
            run.step(one, two)


def three_together(run: Several) -> None:
    for _ in run._epochs():
        for one, two, three in zip(run.given(run.a), run.endless(run.b), run.endless(run.c), strict=False):
            run.step(one, two, three)


def the_shorter_one_first(run: Several) -> None:
    for _ in run._epochs():
        for one, two in zip(run.given(run.c), run.given(run.b), strict=False):
            run.step(one, two)
        for one in run.given(run.a):
            run.step(one)
        for one, two in zip(run.given(run.b), run.given(run.c), strict=False):
            run.step(one, two)


def several_steps_of_an_endless_one(run: Several) -> None:
    for _ in run._epochs():
        others = run.endless(run.c)
        for one in run.given(run.a):
            for _ in range(3):
                run.step(next(others))
            run.step(one)


def endless_ones_without_epochs(run: Several) -> None:
    ones, others = run.endless(run.a), run.endless(run.c)
    for _ in run.loop.steps(24):
        run.step(next(ones), next(others))


def begun_again_by_hand_without_epochs(run: Several) -> None:
    passes = {loader: run.given(loader) for loader in (run.a, run.c)}

    def draw(loader: Any) -> Any:
        try:
            return next(passes[loader])
        except StopIteration:
            passes[loader] = run.given(loader)
            return next(passes[loader])

    for _ in run.loop.steps(24):
        run.step(draw(run.a), draw(run.c))


def made_once_for_all_epochs(run: Several) -> None:
    batches = run.loop.batches(run.a)
    for _ in run._epochs():
        for one in batches:
            run.step(one)


def cycled_without_epochs(run: Several) -> None:
    ones, others = cycle(run.loop.batches(run.a)), cycle(run.loop.batches(run.c))
    for _ in run.loop.steps(24):
        run.step(next(ones), next(others))


def asked_for_the_next_pass_without_epochs(run: Several) -> None:
    batches = run.loop.batches(run.a)
    for _ in run.loop.steps(24):
        if (one := next(batches, None)) is None:
            one = next(iter(batches))
        run.step(one)


def looked_at_after_a_step(run: Several) -> None:
    for _ in run._epochs():
        looked = run.endless(run.c)
        for index, one in run.loop.enumerate(run.a):
            run.step(one)
            if index % 2:
                run.trace[-1].append(next(looked).tolist())


def looked_at_after_a_step_without_epochs(run: Several) -> None:
    ones, looked = run.endless(run.a), run.endless(run.c)
    for step in run.loop.steps(24):
        run.step(next(ones))
        if step % 3 == 0:
            run.trace[-1].append(next(looked).tolist())


def fetched_ahead_from_the_second(run: Several) -> None:
    for _ in run._epochs():
        others = run.given(run.b if run.loop.epoch else DataLoader(range(40), 8, shuffle=True))
        two = None
        for one in run.given(run.a):
            two = next(others, None) if two is None else two
            run.step(one, *([] if two is None else [two]))
            two = next(others, None)


SHAPES: dict[str, Callable[[Several], None]] = {
    each.__name__: each
    for each in (
        nested,
        nested_in_turn,
        nested_and_made_anew,
        nested_beside_an_endless_one,
        beside_an_endless_one,
        an_endless_one_leads,
        three_together,
        the_shorter_one_first,
        several_steps_of_an_endless_one,
        endless_ones_without_epochs,
        begun_again_by_hand_without_epochs,
        made_once_for_all_epochs,
        cycled_without_epochs,
        asked_for_the_next_pass_without_epochs,
        looked_at_after_a_step,
        looked_at_after_a_step_without_epochs,
        fetched_ahead_from_the_second,
    )
}


OFTEN = (
    "nested",
    "three_together",
    "begun_again_by_hand_without_epochs",
    "made_once_for_all_epochs",
    "cycled_without_epochs",
    "looked_at_after_a_step",
    "looked_at_after_a_step_without_epochs",
    "fetched_ahead_from_the_second",
)


@pytest.mark.parametrize("shape", often(SHAPES, *OFTEN, seldom=SHAPES.keys() - {*OFTEN}))
def test_left_at_any_batch_each_pass_goes_on(tmp_path: Path, shape: str) -> None:
    options = {"shape": shape, "epochs": 2, "save_every": 1}
    reference = Several(tmp_path / "never", **options)()
    fresh = 0
    for batches in (each for each in BATCHES if each < len(reference.trace)):
        with pytest.raises(Killed):
            Several(tmp_path / str(batches), killed_after(batches), **options)()
        last = Several(tmp_path / str(batches), **options)()
        fresh += last.loop.resume().step == 0
        assert last.trace == reference.trace[len(reference.trace) - len(last.trace) :], batches
        assert last.end == reference.end, batches
    assert fresh <= 1, "it went on from a checkpoint"


def test_batches_that_are_handed_out_are_iterated_again_and_again_like_a_loader(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    data = launch.loader()
    with launch.loop:
        batches = launch.loop.batches(data)
        for _ in launch.loop.epochs(3):
            for batch in batches:
                launch._step(batch)
    assert len(launch.trace) == 3 * len(data)


def test_a_generator_over_a_loader_is_refused_and_takes_the_batches_of_the_run_instead(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    data = launch.loader()
    with launch.loop, pytest.raises(UnsupportedSetting, match=r"cycle\(run\.batches\(loader\)\)"):
        next(launch.loop.batches(cycle(data)))
    with launch.loop:
        batches = cycle(launch.loop.batches(data))
        for _ in launch.loop.steps(2 * len(data)):
            launch._step(next(batches))
    assert len(launch.trace) == 2 * len(data)


def test_a_second_loader_to_follow_is_refused(tmp_path: Path) -> None:
    launch = Launch(tmp_path)
    data = launch.loader()
    with launch.loop, pytest.raises(UnsupportedSetting, match=r"second loader: give both to run\.batches\(\)"):
        launch.loop.resume(data)
        launch.loop.resume(data)
        launch.loop.resume(launch.loader())
