"""The state of the global Mersenne Twisters of python and numpy, read without asking them each time.

``random.getstate()`` takes 10 us and ``numpy.random.get_state()`` 45 us, since both build hundreds of objects; a loader
without workers needs both at every batch that it fetches. Most processes do not draw from these generators between two
batches. So the memory of a generator, 2.5 kB, is compared with what it was at the last call, and the generator is asked
only if it has drawn since: 1 us for each.

Over 5,000 batches of four integers, tracking a loader added 7 us per fetched batch. It added 19 to 24 us with
``random.getstate()``, and 69 to 81 us with both calls (CPython 3.11, numpy 2.4; see ``benchmarks/positions.py``).
Neither has a cheaper public call. Numpy documents the address of its state. Python does not, so the layout of its
generator is verified at import, and a python whose layout differs is asked at each call.
"""

from __future__ import annotations

import ctypes
import random
from array import array
from typing import Any

_WORDS = 624
_SIZE = 4 * _WORDS + 4
"""Bytes of a Mersenne Twister: its words, and its position among them."""


class PythonTwister:
    """Reads python's global generator.

    Attributes:
        fast: the memory has the expected layout.
    """

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
        # seam: CPython 3.10 to 3.13, the layout of _random.Random: object header, position, words. Verified below.
        self._address = id(self._generator) + object.__basicsize__
        self._memory: bytes | None = None
        self._state: Any = None
        words = random.getstate()[1]
        expected = array("I", [words[-1], *words[:-1]]).tobytes()
        self.fast = ctypes.string_at(self._address, _SIZE) == expected

    def state(self) -> Any:
        """Return what ``random.getstate()`` returns."""
        if not self.fast:
            return random.getstate()
        memory = ctypes.string_at(self._address, _SIZE)
        # A normal deviate that is kept for the next call is state outside of the words.
        if memory != self._memory or self._generator.gauss_next != self._state[2]:
            self._memory, self._state = memory, random.getstate()
        return self._state


class NumpyTwister:
    """Reads numpy's global generator."""

    def __init__(self) -> None:
        self._memory: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return what ``numpy.random.get_state(legacy=False)`` returns."""
        import numpy as np

        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in numpy's stubs
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state(legacy=False)
        memory = ctypes.string_at(generator.ctypes.state_address, _SIZE)
        # A normal deviate that is kept for the next call is state outside of the words: its use does not change them.
        if memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, np.random.get_state(legacy=False)
        return self._state
