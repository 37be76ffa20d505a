"""Reading the twisters returns what asking them returns, after any draw."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from resume_adapters.core.state import twister
from resume_adapters.core.state.twister import GlobalTwisters, NumpyTwister, PythonTwister, TorchTwister

_OTHER_STATE = torch.Generator().manual_seed(7).get_state()

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "random.seed": lambda: random.seed(3),
    "many": lambda: [random.random() for _ in range(1000)],
    "numpy.rand": lambda: np.random.rand(3),
    "numpy.randn": lambda: np.random.randn(),
    "numpy.seed": lambda: np.random.seed(3),
    "numpy many": lambda: np.random.rand(2000),
    "as many as leave the position": lambda: [random.random() for _ in range(312)],
    "numpy, as many as leave the position": lambda: np.random.rand(312),
    "torch.rand": lambda: torch.rand(1),
    "torch.randn": lambda: torch.randn(1),
    "torch.randn in double precision": lambda: torch.randn(1, dtype=torch.float64),
    "torch.manual_seed": lambda: torch.manual_seed(3),
    "torch many": lambda: torch.rand(2000),
    "torch, as many as leave the position": lambda: torch.rand(624),
    "torch.set_rng_state": lambda: torch.set_rng_state(_OTHER_STATE),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_the_state_is_the_generators_state(draw: str) -> None:
    """Each draw is done twice: the second normal deviate comes from the first draw, and changes no word."""
    python, numpy, of_torch, all_three = PythonTwister(), NumpyTwister(), TorchTwister(), GlobalTwisters()
    for _ in range(3):
        assert python.state() == random.getstate()
        assert torch.equal(of_torch.state(), torch.get_rng_state())
        np.testing.assert_equal(numpy.state(), np.random.get_state(legacy=False))
        _assert_are_read(all_three)
        DRAWS[draw]()


def _assert_are_read(twisters: GlobalTwisters) -> None:
    for python, numpy, of_torch in (twisters.states(), twisters.states()):
        assert python == random.getstate()
        assert torch.equal(of_torch, torch.get_rng_state())
        np.testing.assert_equal(numpy, np.random.get_state(legacy=False))


@pytest.mark.parametrize("has_looked_before", [False, True])
def test_a_normal_deviate_is_put_back(has_looked_before: bool) -> None:
    """The words are those of a moment ago: only the deviate that is kept for the next call tells both states apart."""
    numpy, all_three = NumpyTwister(), GlobalTwisters()
    random.gauss(0.0, 1.0)
    np.random.seed(5)
    np.random.randn()
    kept, of_python = np.random.get_state(legacy=False), random.getstate()
    if has_looked_before:
        numpy.state(), all_three.states()
    np.random.randn()
    random.gauss(0.0, 1.0)
    np.testing.assert_equal(numpy.state(), np.random.get_state(legacy=False))
    _assert_are_read(all_three)
    np.random.set_state(kept)
    random.setstate(of_python)
    np.testing.assert_equal(numpy.state(), np.random.get_state(legacy=False))
    _assert_are_read(all_three)


def test_the_layout_is_the_expected_one() -> None:
    """Fails where an interpreter has a different layout; the package then works, slower."""
    assert PythonTwister().watched
    numpy, of_torch = NumpyTwister(), TorchTwister()
    numpy.state(), of_torch.state()
    assert numpy.watched
    assert of_torch.watched


def test_a_different_layout_falls_back() -> None:
    python, of_torch = PythonTwister(), TorchTwister()
    python.watched, of_torch.watched = (), ()
    for _ in range(2):
        random.random()
        torch.rand(1)
        assert python.state() == random.getstate()
        assert torch.equal(of_torch.state(), torch.get_rng_state())


def test_a_torch_that_keeps_its_words_elsewhere_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twister, "_HEADER", 8)  # they are not among the first bytes
    monkeypatch.setattr(twister, "_is_torch_as_expected", twister._is_torch_as_expected.__wrapped__)
    assert twister._torch_memory() == (), "no memory is read that is not known to be the generator's"
    of_torch = TorchTwister()
    for _ in range(2):
        assert torch.equal(of_torch.state(), torch.get_rng_state())
        torch.rand(1)
    assert of_torch.watched == ()


def test_a_global_generator_of_another_kind_is_asked_each_time() -> None:
    """A script may let numpy's global functions draw from any bit generator."""
    usual, numpy, all_three = np.random.get_bit_generator(), NumpyTwister(), GlobalTwisters()  # type: ignore[attr-defined]
    all_three.states()
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        for _ in range(2):
            np.testing.assert_equal(numpy.state(), np.random.get_state(legacy=False))
            _assert_are_read(all_three)
            np.random.rand(3)
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]


def test_numpys_generator_is_replaced() -> None:
    usual, numpy, all_three = np.random.get_bit_generator(), NumpyTwister(), GlobalTwisters()  # type: ignore[attr-defined]
    numpy.state()
    all_three.states()
    other = np.random.MT19937()
    other.state = {"bit_generator": "MT19937", "state": {"key": usual.state["state"]["key"], "pos": 7}}
    try:
        np.random.set_bit_generator(other)  # type: ignore[attr-defined]
        np.testing.assert_equal(numpy.state(), np.random.get_state(legacy=False))
        _assert_are_read(all_three)
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]
    np.testing.assert_equal(numpy.state(), np.random.get_state(legacy=False))
    _assert_are_read(all_three)


def test_an_unchanged_generator_is_not_asked_again() -> None:
    python, numpy, of_torch = PythonTwister(), NumpyTwister(), TorchTwister()
    np.random.seed(1)
    assert python.state() is python.state()
    assert numpy.state() is numpy.state()
    assert of_torch.state() is of_torch.state()
    all_three = GlobalTwisters()
    all_three.states()
    assert all_three.states() is all_three.states()
