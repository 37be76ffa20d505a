"""Random state: captured without a draw, and restored so that the same numbers follow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from resume_adapters.core.state import encoding, rng
from resume_adapters.core.state.comparison import first_difference
from resume_adapters.core.state.stateful import named_parts
from resume_adapters.errors import StateMismatch, UnsupportedSetting


def draw() -> list[Any]:
    """Draw from every generator, in ways that keep half-used numbers (the second of a pair of normals)."""
    drawn = [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.random(),
        np.random.standard_normal(),
    ]
    return [*drawn, np.random.randint(9), torch.rand(2).tolist(), torch.randn(3).tolist(), torch.randperm(5).tolist()]


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def through_disk(state: Any) -> Any:
    document, tensors = encoding.encode(state)
    return encoding.decode(document, load(save(tensors)) if tensors else {})


@given(st.integers(0, 2**32 - 1), st.integers(0, 7))
def test_the_same_numbers_follow_a_restore(value: int, drawn: int) -> None:
    seed(value)
    for _ in range(drawn):
        draw()
    state = rng.capture()
    expected = [draw() for _ in range(3)]
    seed(value + 1 & 0xFFFFFFFF)
    rng.restore(through_disk(state))
    assert [draw() for _ in range(3)] == expected


@given(st.integers(0, 2**32 - 1))
def test_capturing_draws_nothing(value: int) -> None:
    seed(value)
    expected = [draw(), draw()]
    seed(value)
    rng.capture()
    rng.capture_cpu()
    first = draw()
    rng.pack_cpu(rng.capture_cpu())
    assert [first, draw()] == expected


def test_another_generator_of_numpy_is_captured_too() -> None:
    former = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    try:
        state = rng.capture()
        expected = np.random.rand(3)
        rng.restore(through_disk(state))
        assert (np.random.rand(3) == expected).all()
    finally:
        np.random.set_bit_generator(former)  # type: ignore[attr-defined]


def test_a_state_packed_for_a_pipe_is_the_same_state() -> None:
    seed(3)
    draw()
    state = rng.capture_cpu()
    expected = draw()
    rng.restore_cpu(rng.unpack_cpu(rng.pack_cpu(state)))
    assert draw() == expected
    carried = rng.unpack_cpu(rng.pack_cpu(state))
    assert first_difference(rng.cpu_to_tree(state), rng.cpu_to_tree(carried)) is None


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda each: torch.randn(3, generator=each).tolist()),
    "python": (lambda: random.Random(1), lambda each: [each.gauss(0, 1), each.random()]),
    "RandomState": (lambda: np.random.RandomState(1), lambda each: each.standard_normal(3).tolist()),
    "PCG64": (lambda: np.random.default_rng(1), lambda each: each.standard_normal(3).tolist()),
    "MT19937": (lambda: np.random.Generator(np.random.MT19937(1)), lambda each: each.random(3).tolist()),
    "Philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda each: each.integers(0, 9, 3).tolist()),
    "SFC64": (lambda: np.random.Generator(np.random.SFC64(1)), lambda each: each.random(3).tolist()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_the_users_is_a_part_like_any_other(kind: str) -> None:
    make, use = GENERATORS[kind]
    generator = make()
    use(generator)
    part = named_parts({"noise": generator})["noise"]
    saved = through_disk(part.state_dict())
    expected = [use(generator), use(generator)]
    other = make()
    fresh = named_parts({"noise": other})["noise"]
    fresh.load_state_dict(saved)
    assert first_difference(saved, fresh.state_dict()) is None
    assert [use(other), use(other)] == expected


@pytest.mark.parametrize("name", ["Upper", "with-dash", "", "rng/../x", "buffers", "1st"])
def test_a_part_whose_name_is_unfit_for_a_file_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedSetting, match="cannot name a part"):
        named_parts({name: random.Random()})


def test_a_part_that_cannot_save_its_state_is_refused() -> None:
    with pytest.raises(UnsupportedSetting, match=r"ema=object\(\.\.\.\) has no state_dict"):
        named_parts({"ema": object()})


def test_a_rank_that_had_no_random_state_gets_its_own_the_same_each_time() -> None:
    seed(5)
    saved = rng.capture()
    seed(6)
    before = rng.capture()
    made = {rank: rng.forked(saved, rank) for rank in (1, 2)}
    assert first_difference(before, rng.capture()) is None, "the generators are left as they were"
    assert first_difference(made[1], rng.forked(saved, 1)) is None
    numbers = []
    for state in (saved, *made.values()):
        rng.restore(through_disk(state))
        numbers.append(draw())
    assert all(len({each[kind] for each in numbers}) == 3 for kind in (0, 3)), "python's and numpy's"
    assert len({tuple(each[-2]) for each in numbers}) == 3, "torch's"


@pytest.mark.parametrize(
    "generator", [torch.Generator(), random.Random(), np.random.RandomState(), np.random.default_rng()]
)
@pytest.mark.parametrize(
    "state", [1, "x", {}, {"state": "x"}, {"state": torch.zeros(3)}, {"state": {"bit_generator": 1}}]
)
def test_what_is_no_state_of_a_generator_is_said(generator: Any, state: Any) -> None:
    with pytest.raises(StateMismatch, match=f"no state of a {type(generator).__name__}"):
        rng.GeneratorState(generator).load_state_dict(state)
