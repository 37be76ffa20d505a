"""The global Mersenne Twisters of python and numpy, read cheaply.

Asking either for its state builds hundreds of objects: 10 to 60 microseconds, at every batch that a loader fetches.
Most processes do not draw from them between two batches. So the generator's memory, 2.5 kB, is compared with what it
was when the state was last asked for, and only a generator that has drawn since is asked again.

Where the memory is not laid out as expected, the state is asked for every time.
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
    """Python's global generator."""

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
        # seam: CPython 3.10 to 3.13, the layout of _random.Random: object header, position, words. Checked below.
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
        # A normal deviate kept for the next call is state beside the words.
        if memory != self._memory or self._generator.gauss_next != self._state[2]:
            self._memory, self._state = memory, random.getstate()
        return self._state


class NumpyTwister:
    """Numpy's global generator."""

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
        # A normal deviate kept for the next call is state beside the words, and its use does not show in them.
        if memory != self._memory or self._state["has_gauss"]:
            self._memory, self._state = memory, np.random.get_state(legacy=False)
        return self._state
