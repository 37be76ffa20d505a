"""The state of the global Mersenne Twisters of python and numpy, read without asking them each time.

``random.getstate()`` takes 10 us and ``numpy.random.get_state()`` 45 us, since both build hundreds of objects; a loader
without workers needs both at every batch that it fetches. Most processes do not draw from these generators between two
batches. A draw moves the position among the words of the generator or, where they are used up, makes all of them
again. So the position and a few of the words are compared with what they were at the last call, and the generator is
asked only if it has drawn since: 0.5 us for each. All of its 2.5 kB would have to come from memory at each step.

Over 5,000 batches of four integers, tracking a loader added 7 us per fetched batch. It added 19 to 24 us with
``random.getstate()``, and 69 to 81 us with both calls (CPython 3.11, numpy 2.4; see ``benchmarks/positions.py``).
Neither has a cheaper public call. Numpy documents the address of its state. Python does not, so the layout of its
generator is verified at import, and a python whose layout differs is asked at each call.
"""

from __future__ import annotations

import ctypes
import functools
import random
from array import array
from collections.abc import Callable
from typing import Any

from resume_adapters.core.state.captured import Captured

_WORDS = 624
_SIZE = 4 * _WORDS + 4
"""Bytes of a Mersenne Twister: its words, and its position among them."""

_WATCHED = 64
"""Bytes of words that are compared: those of two rounds, or of two seeds, are never all alike."""


def _view(address: int, size: int) -> memoryview:
    """Return memory of this process. A view of python's own is read in less than an array of ``ctypes`` is."""
    return memoryview((ctypes.c_char * size).from_address(address))


class PythonTwister:
    """Reads python's global generator.

    Attributes:
        fast: the memory has the expected layout.
    """

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
        # seam: CPython 3.10 to 3.13, the layout of _random.Random: object header, position, words. Verified below.
        self._address = id(self._generator) + object.__basicsize__
        self._watched = _view(self._address, 4 + _WATCHED)
        self._memory: bytes | None = None
        self._state: Any = None
        words = random.getstate()[1]
        expected = array("I", [words[-1], *words[:-1]]).tobytes()
        self.fast = ctypes.string_at(self._address, _SIZE) == expected

    def state(self) -> Any:
        """Return what ``random.getstate()`` returns."""
        if not self.fast:
            return random.getstate()
        memory = self._watched.tobytes()
        # A normal deviate that is kept for the next call is state outside of the words.
        if memory != self._memory or self._generator.gauss_next != self._state[2]:
            self._memory, self._state = memory, random.getstate()
        return self._state


@functools.cache
def _numpy_functions() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what returns numpy's global generator, and what returns its state: an import would take as long."""
    import numpy as np

    # Missing in numpy's stubs.
    return np.random.get_bit_generator, functools.partial(np.random.get_state, legacy=False)  # type: ignore[attr-defined]


class NumpyTwister:
    """Reads numpy's global generator."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: Any = None
        self._position: Any = None
        self._memory: tuple[bytes, bytes] | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return what ``numpy.random.get_state(legacy=False)`` returns."""
        find, read = _numpy_functions()
        generator = find()
        if generator is not self._generator:
            self._look_at(generator)
        if self._words is None:
            return read()
        memory = self._words.tobytes(), self._position.tobytes()
        # A normal deviate that is kept for the next call is state outside of the words: its use does not change them.
        if memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, Captured(read())
        return self._state

    def _look_at(self, generator: Any) -> None:
        """Find what is compared of a generator; nothing, if it is no Mersenne Twister."""
        import numpy as np

        self._generator, self._words, self._memory = generator, None, None
        if isinstance(generator, np.random.MT19937):
            address = generator.ctypes.state_address
            self._words = _view(address, _WATCHED)
            self._position = _view(address + 4 * _WORDS, 4)


@functools.cache
def _torch_function() -> Callable[[], Any]:
    """Return what reads the state of torch's generator: an import, and a function of python, take as long as that."""
    import torch

    return torch.default_generator.get_state


class TorchTwister:
    """Reads torch's CPU generator: its state is the same object as long as it has not drawn."""

    def __init__(self) -> None:
        self._last: tuple[bytes, Any] = b"", None

    def state(self) -> Any:
        """Return what ``torch.get_rng_state()`` returns."""
        now = _torch_function()()
        content = now.numpy().tobytes()
        last, state = self._last
        if content == last:
            return state
        self._last = content, now
        return now
