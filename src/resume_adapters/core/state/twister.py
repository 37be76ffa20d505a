"""The state of the global Mersenne Twisters of python, numpy and torch, read without asking them each time.

``random.getstate()`` takes 10 us and ``numpy.random.get_state()`` 45 us, since both build hundreds of objects;
``torch.get_rng_state()`` takes 2 us, but 10 us between two steps, whose data have emptied the caches. A loader without
workers needs them all at every batch that it fetches. Most processes do not draw from these generators between two
batches. A draw moves the position among the words of the generator or, where they are used up, makes all of them
again. So the position and a few of the words are compared with what they were at the last call, those of all three at
once, and the generators are asked only if one has drawn since. All of their 2.5 kB would have to come from memory at
each step.

Over 5,000 batches of four integers, tracking a loader added 7 us per fetched batch. It added 19 to 24 us with
``random.getstate()``, and 69 to 81 us with both calls (CPython 3.11, numpy 2.4; see ``benchmarks/positions.py``).
Neither has a cheaper public call. Numpy documents the address of its state. Python and torch do not, so the layouts of
their generators are verified, and one whose layout differs is asked at each call.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import random
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from resume_adapters.core.state.captured import Captured

_WORDS = 624
_SIZE = 4 * _WORDS + 4
"""Bytes of a Mersenne Twister: its words, and its position among them."""

_WORD_CODE = "I"
"""Array code of a word (unsigned 32 bit)."""

_WATCHED = 64
"""Bytes of words that are compared: those of two rounds, or of two seeds, are never all alike."""

_TORCH_WORDS = 24
"""Where the words begin in the state that torch returns, which has 64 bits for each."""

_HEADER = 256
"""Bytes of torch's generator, of 2.6 kB, in which its words begin."""

_COUNTS = 20
"""Bytes before the words: the seed, how many words are left, and how many are used."""

_NORMALS = 24
"""Bytes behind the words: a normal deviate of each precision that is kept for the next draw, if there is one."""


def _view(address: int, size: int) -> memoryview:
    """Return memory of this process. A view of python's own is read in less than an array of ``ctypes`` is."""
    return memoryview((ctypes.c_char * size).from_address(address))


_content: Callable[[Iterable[memoryview]], bytes] = b"".join


class PythonTwister:
    """Reads python's global generator.

    Attributes:
        generator: the generator.
        watched: the memory that a draw changes, but for a normal deviate that is kept; empty where the layout is not
            the expected one.
    """

    def __init__(self) -> None:
        self.generator: Any = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
        # seam: CPython 3.10 to 3.13, the layout of _random.Random: object header, position, words. Verified below.
        address = id(self.generator) + object.__basicsize__
        words = random.getstate()[1]
        expected = array(_WORD_CODE, [words[-1], *words[:-1]]).tobytes()
        is_expected = ctypes.string_at(address, _SIZE) == expected
        self.watched: tuple[memoryview, ...] = (_view(address, 4 + _WATCHED),) if is_expected else ()
        self._memory: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return what ``random.getstate()`` returns."""
        if not self.watched:
            return random.getstate()
        memory = _content(self.watched)
        # A normal deviate that is kept for the next call is state outside of the words.
        if memory != self._memory or self.generator.gauss_next != self._state[2]:
            self._memory, self._state = memory, random.getstate()
        return self._state


@functools.cache
def _numpy_functions() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what returns numpy's global generator, and what returns its state: an import would take as long."""
    import numpy as np

    # Missing in numpy's stubs.
    return np.random.get_bit_generator, functools.partial(np.random.get_state, legacy=False)  # type: ignore[attr-defined]


class NumpyTwister:
    """Reads numpy's global generator.

    Attributes:
        watched: the memory that a draw changes, and so does another generator in its place; empty where the layout is
            not the expected one, for another kind of generator, and before the first look.
    """

    def __init__(self) -> None:
        self.watched: tuple[memoryview, ...] = ()
        self._generator: Any = None
        self._memory: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return what ``numpy.random.get_state(legacy=False)`` returns."""
        find, read = _numpy_functions()
        generator = find()
        if generator is not self._generator:
            self._look_at(generator)
        if not self.watched:
            return read()
        memory = _content(self.watched)
        if memory != self._memory:
            self._memory, self._state = memory, Captured(read())
        return self._state

    def _look_at(self, generator: Any) -> None:
        """Find what is compared of a generator; nothing, if it is no Mersenne Twister."""
        import numpy as np

        self._generator, self._memory = generator, None
        is_known = isinstance(generator, np.random.MT19937) and _is_numpy_as_expected()
        of_module: Any = np.random.get_state  # a bound method
        self.watched = _numpy_memory(generator, of_module.__self__) if is_known else ()


def _numpy_memory(generator: Any, drawing: Any) -> tuple[memoryview, ...]:
    """Return where a draw shows in the memory of numpy.

    Args:
        generator: the generator.
        drawing: the ``RandomState`` that draws from it. It keeps a normal deviate for the next call, whose use changes
            no word.
    """
    address = generator.ctypes.state_address
    size = type(drawing).__basicsize__ - object.__basicsize__  # seam: numpy 2.4, RandomState. Verified below.
    own = _view(id(drawing) + object.__basicsize__, size)
    return _view(address, _WATCHED), _view(address + 4 * _WORDS, 4), own


@functools.cache
def _is_numpy_as_expected() -> bool:
    """Return whether each draw of a generator shows in its memory, also one that only uses up a normal deviate."""
    import numpy as np

    generator = np.random.MT19937(1)
    drawing = np.random.RandomState(generator)
    watched = _numpy_memory(generator, drawing)
    seen = [_content(watched)]
    for draw in (drawing.random_sample, drawing.standard_normal, drawing.standard_normal):
        draw()
        seen.append(_content(watched))
    return all(before != after for before, after in itertools.pairwise(seen))


@functools.cache
def _torch_function() -> Callable[[], Any]:
    """Return what reads the state of torch's generator: an import, and a function of python, take as long as that."""
    import torch

    return torch.default_generator.get_state


class TorchTwister:
    """Reads torch's CPU generator: its state is the same object as long as it has not drawn.

    Attributes:
        watched: the memory that a draw changes; empty where the layout is not the expected one, and ``None`` before the
            first look.
    """

    def __init__(self) -> None:
        self.watched: tuple[memoryview, ...] | None = None
        self._memory: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return what ``torch.get_rng_state()`` returns."""
        if self.watched is None:
            self.watched = _torch_memory() if _is_torch_as_expected() else ()
        if not self.watched:
            return _torch_function()()
        memory = _content(self.watched)
        if memory != self._memory:
            self._memory, self._state = memory, _torch_function()()
        return self._state


def _torch_memory(generator: Any = None) -> tuple[memoryview, ...]:
    """Return where a draw shows in the memory of torch's generator: its position, some words, and normal deviates.

    Returns:
        Nothing, if the words are not where they are expected.
    """
    import torch

    generator = torch.default_generator if generator is None else generator
    state = generator.get_state().numpy().tobytes()
    words = array(_WORD_CODE, memoryview(state)[_TORCH_WORDS : _TORCH_WORDS + 8 * _WORDS].cast("Q").tolist()).tobytes()
    # seam: torch 2.13, CPUGeneratorImpl: words left and used, the words, the next normal deviates. Verified below.
    address = generator._cdata
    place = ctypes.string_at(address, _HEADER).find(words[:_WATCHED])
    if place < 0:
        return ()
    engine = _view(address + place - _COUNTS, _COUNTS + _WATCHED)
    behind = place + 4 * _WORDS
    return engine, _view(address + behind + -behind % 8, _NORMALS)


@functools.cache
def _is_torch_as_expected() -> bool:
    """Return whether each draw of a generator shows in its memory, also one that only uses up a normal deviate."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(1)
    watched = _torch_memory(generator)
    seen = [_content(watched)]
    for dtype in (torch.float64, torch.float32):
        for draw in (torch.rand, torch.randn, torch.randn):
            draw(1, generator=generator, dtype=dtype)
            seen.append(_content(watched))
    return bool(watched) and all(before != after for before, after in itertools.pairwise(seen))


class GlobalTwisters:
    """Reads all three: between two steps, one comparison takes a third of the time that three take."""

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = PythonTwister(), NumpyTwister(), TorchTwister()
        self._generator = self._python.generator
        self._watched: tuple[memoryview, ...] = ()
        self._known: tuple[bytes | None, Any] = None, None

    def states(self) -> tuple[Any, Any, Any]:
        """Return the states of python's, numpy's and torch's generator; the same object until one has drawn."""
        memory, states = self._known
        # Of a normal deviate that python keeps for the next call, the state holds the very object.
        if memory == _content(self._watched) and self._generator.gauss_next is states[0][2]:
            return states  # type: ignore[no-any-return]
        return self._ask()

    def _ask(self) -> tuple[Any, Any, Any]:
        before, watched = _content(self._watched), self._watched  # read first: another thread may draw meanwhile
        states = self._python.state(), self._numpy.state(), self._torch.state()
        found = self._python.watched, self._numpy.watched, self._torch.watched or ()
        self._watched = tuple(itertools.chain(*found)) if all(found) else ()
        is_same = len(watched) == len(self._watched) and all(map(operator.is_, watched, self._watched))
        self._known = before if is_same and watched else None, states
        return states
