"""Capture and restore of every random generator the process has, and of generators that the user names.

Capturing reads state only: it never draws, so a run with this package draws the same numbers as one without.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import Any

from resume_adapters.core.state.twister import NumpyTwister, PythonTwister
from resume_adapters.errors import UnsupportedSetting

Tree = dict[str, Any]

_PYTHON = PythonTwister()
_NUMPY = NumpyTwister()

_WORDS = "I"
"""Array code of python's Mersenne Twister words (unsigned 32 bit)."""


def capture_cpu() -> tuple[Any, Any, Any]:
    """Return the state of python's, numpy's and torch's CPU generator, in a few microseconds where none has drawn."""
    import torch

    return _PYTHON.state(), _NUMPY.state(), torch.get_rng_state()


def restore_cpu(state: tuple[Any, Any, Any]) -> None:
    """Put back what :func:`capture_cpu` returned."""
    import numpy as np
    import torch

    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def cpu_to_tree(state: tuple[Any, Any, Any]) -> Tree:
    """Turn a captured CPU state into a tree that a checkpoint can carry."""
    version, words, gauss = state[0]
    return {
        "python": {"version": version, "words": array(_WORDS, words).tobytes(), "gauss": gauss},
        "numpy": state[1],
        "torch": state[2],
    }


def cpu_from_tree(tree: Tree) -> tuple[Any, Any, Any]:
    """Turn a tree back into what :func:`restore_cpu` takes."""
    python = tree["python"]
    words = array(_WORDS)
    words.frombytes(python["words"])
    return (python["version"], tuple(words), python["gauss"]), tree["numpy"], tree["torch"]


def capture() -> Tree:
    """Return the state of every generator of this process: python, numpy, torch on the CPU and on CUDA."""
    return {"cpu": cpu_to_tree(capture_cpu()), "devices": _device_states()}


def restore(tree: Tree) -> None:
    """Put back what :func:`capture` returned.

    Raises:
        UnsupportedSetting: this process sees another number of devices than the one that saved.
    """
    import torch

    restore_cpu(cpu_from_tree(tree["cpu"]))
    saved = tree["devices"]
    here = torch.cuda.device_count() if saved else 0
    if len(saved) != here:
        raise UnsupportedSetting(
            f"the checkpoint holds the random state of {len(saved)} accelerator devices, this process sees {here}: "
            "start it with the devices that it had"
        )
    for index, state in enumerate(saved):
        torch.cuda.set_rng_state(state, index)  # pragma: no cover  # the tests run where there is no accelerator


def forked(saved: Tree, rank: int) -> Tree:
    """Return a process state for a rank that had none when another rank's was saved, the same one every time."""
    import numpy as np
    import torch

    before = capture_cpu()
    restore_cpu(cpu_from_tree(saved["cpu"]))
    seeds = np.random.SeedSequence([int(torch.randint(2**62, ())), rank]).generate_state(3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])
    made = {"cpu": cpu_to_tree(capture_cpu()), "devices": saved["devices"]}
    restore_cpu(before)
    return made


def _device_count() -> int:
    import torch

    # Before torch touches a device its generators are untouched too, and asking would start the driver.
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device_count() if initialised else 0


def _device_states() -> list[Any]:
    import torch

    return [torch.cuda.get_rng_state(index) for index in range(_device_count())]


def to_bytes(state: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """Pack a CPU state for a trip through a pipe: few large objects instead of many small ones."""
    version, words, gauss = state[0]
    numpy_state = state[1]
    return version, array(_WORDS, words).tobytes(), gauss, numpy_state, state[2].numpy().tobytes()


def from_bytes(packed: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Unpack what :func:`to_bytes` packed."""
    import torch

    version, content, gauss, numpy_state, torch_bytes = packed
    words = array(_WORDS)
    words.frombytes(content)
    torch_state = torch.frombuffer(bytearray(torch_bytes), dtype=torch.uint8)
    return (version, tuple(words), gauss), numpy_state, torch_state


class GeneratorState:
    """Makes a generator Stateful: a ``torch.Generator``, ``numpy.random.Generator`` or ``random.Random``."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> Tree:
        """Return the generator's state as data."""
        import torch

        if isinstance(self.generator, torch.Generator):
            return {"state": self.generator.get_state()}
        if isinstance(self.generator, random.Random):
            return {"state": self.generator.getstate()}
        return {"state": self.generator.bit_generator.state}

    def load_state_dict(self, state: Tree) -> None:
        """Put back what :meth:`state_dict` returned."""
        import torch

        if isinstance(self.generator, torch.Generator):
            self.generator.set_state(state["state"])
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(state["state"])
        else:
            self.generator.bit_generator.state = state["state"]


def registered_states(generators: Mapping[str, GeneratorState]) -> Tree:
    """Return the states of generators that the user registered, by name."""
    return {name: generator.state_dict() for name, generator in generators.items()}


def restore_registered(states: Tree, generators: Mapping[str, GeneratorState]) -> None:
    """Put back what :func:`registered_states` returned."""
    for name, generator in generators.items():
        if name in states:
            generator.load_state_dict(states[name])


def capture_with(generators: Mapping[str, GeneratorState]) -> Tree:
    """Return the state of the process and of generators that the user registered."""
    return {"process": capture(), "registered": registered_states(generators)}


def restore_with(saved: Mapping[str, Any], generators: Mapping[str, GeneratorState]) -> None:
    """Put back what :func:`capture_with` returned."""
    restore(saved["process"])
    restore_registered(saved["registered"], generators)


def is_generator(value: Any) -> bool:
    """Return whether :class:`GeneratorState` can make ``value`` Stateful."""
    import numpy as np
    import torch

    return isinstance(value, torch.Generator | random.Random | np.random.Generator)
