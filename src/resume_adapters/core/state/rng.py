"""Capture and restore the random generators of the process, and generators that the user registers.

Capturing only reads state. It never draws, so a run with this package draws the same numbers as one without.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from resume_adapters.errors import UnsupportedSetting

CpuState: TypeAlias = tuple[Any, Any, Any]
"""The states of python's, numpy's and torch's CPU generator, as each of them returns it."""

_WORDS = "I"
"""Array code of python's Mersenne Twister words (unsigned 32 bit)."""


# ---- The process


class ProcessState(NamedTuple):
    """The state of every generator of the process at one moment. Nothing changes it later.

    Attributes:
        cpu: what :func:`capture_cpu` returned.
        devices: the state of each CUDA device.
    """

    cpu: CpuState
    devices: list[Any]

    def to_tree(self) -> dict[str, Any]:
        """Return it as a tree for a checkpoint."""
        return {"cpu": cpu_to_tree(self.cpu), "devices": self.devices}


def capture_process() -> ProcessState:
    """Return the state of every generator of the process: python, numpy, torch on the CPU and on CUDA."""
    return ProcessState(capture_cpu(), _device_states())


def capture() -> dict[str, Any]:
    """Return what :func:`capture_process` returns, as a tree."""
    return capture_process().to_tree()


def restore(state: Mapping[str, Any]) -> None:
    """Restore what :func:`capture` returned.

    Raises:
        UnsupportedSetting: the number of accelerator devices differs.
    """
    import torch

    restore_cpu(cpu_from_tree(state["cpu"]))
    saved = state["devices"]
    here = torch.cuda.device_count() if saved else 0
    if len(saved) != here:
        raise UnsupportedSetting(
            f"the checkpoint holds the random state of {len(saved)} accelerator devices, this process sees {here}: "
            f"launch it with {len(saved)} devices"
        )
    for index, device_state in enumerate(saved):
        torch.cuda.set_rng_state(device_state, index)  # pragma: no cover  # the tests run where there is no accelerator


def forked(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Derive the state of a rank that has none in the checkpoint from another rank's, reproducibly.

    Args:
        state: what :func:`capture` returned on the other rank.
        rank: the rank.
    """
    import numpy as np
    import torch

    before = capture_cpu()
    restore_cpu(cpu_from_tree(state["cpu"]))
    seeds = np.random.SeedSequence([int(torch.randint(2**62, ())), rank]).generate_state(3).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])
    derived = {"cpu": cpu_to_tree(capture_cpu()), "devices": state["devices"]}
    restore_cpu(before)
    return derived


def _device_states() -> list[Any]:
    # Before torch uses a device its generators are unused too, and asking for them would start the driver.
    if _uses_device()():  # pragma: no cover  # the tests run where there is no accelerator
        import torch

        return [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
    return []


@functools.cache
def _uses_device() -> Callable[[], bool]:
    """Return what tells whether torch uses a device: an import takes as long as that, at each step."""
    import torch

    return torch.cuda.is_initialized


# ---- The CPU's generators alone


def capture_cpu() -> CpuState:
    """Return the state of python's, numpy's and torch's CPU generator; it takes some 60 us, most of it numpy's."""
    import numpy as np
    import torch

    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def restore_cpu(state: CpuState) -> None:
    """Restore what :func:`capture_cpu` returned."""
    import numpy as np
    import torch

    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def cpu_to_tree(state: CpuState) -> dict[str, Any]:
    """Return a CPU state as a tree for a checkpoint."""
    version, words, gauss = state[0]
    python = {"version": version, "words": array(_WORDS, words).tobytes(), "gauss": gauss}
    return {"python": python, "numpy": state[1], "torch": state[2]}


def cpu_from_tree(tree: Mapping[str, Any]) -> CpuState:
    """Return the CPU state that :func:`cpu_to_tree` returned as a tree."""
    python = tree["python"]
    return (python["version"], _unpack_words(python["words"]), python["gauss"]), tree["numpy"], tree["torch"]


def pack_cpu(state: CpuState) -> tuple[Any, ...]:
    """Pack a CPU state for a pipe: few large objects instead of many small ones."""
    version, words, gauss = state[0]
    return version, array(_WORDS, words).tobytes(), gauss, state[1], state[2].numpy().tobytes()


def unpack_cpu(packed: tuple[Any, ...]) -> CpuState:
    """Return the CPU state that :func:`pack_cpu` packed."""
    import torch

    version, words, gauss, numpy_state, torch_bytes = packed
    torch_state = torch.frombuffer(bytearray(torch_bytes), dtype=torch.uint8)
    return (version, _unpack_words(words), gauss), numpy_state, torch_state


def _unpack_words(content: bytes) -> tuple[int, ...]:
    words = array(_WORDS)
    words.frombytes(content)
    return tuple(words)


# ---- Generators that the user registers


class GeneratorState:
    """Makes a generator Stateful: a ``torch.Generator``, ``random.Random``, or one of ``numpy.random``."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        import torch

        if isinstance(self.generator, torch.Generator):
            return {"state": self.generator.get_state()}
        if isinstance(self.generator, random.Random):
            return {"state": self.generator.getstate()}
        if _is_legacy(self.generator):
            return {"state": self.generator.get_state(legacy=False)}
        return {"state": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        import torch

        if isinstance(self.generator, torch.Generator):
            self.generator.set_state(state["state"])
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(state["state"])
        elif _is_legacy(self.generator):
            self.generator.set_state(state["state"])
        else:
            self.generator.bit_generator.state = state["state"]


def is_generator(value: Any) -> bool:
    """Return whether :class:`GeneratorState` can make ``value`` Stateful."""
    import numpy as np
    import torch

    return isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState)


_BIT_GENERATORS = frozenset(("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"))
"""The classes in ``numpy.random`` that a generator of numpy draws from."""


def generator_of(kind: str, state: Any) -> Any:
    """Return a new generator with the state of one that a library makes when it first needs it.

    Args:
        kind: the name of its class.
        state: what :meth:`GeneratorState.state_dict` returned.

    Returns:
        ``None`` where that is no class of generators on the CPU, or not its state.
    """
    import numpy as np
    import torch

    content = state.get("state") if isinstance(state, Mapping) else None
    made: Any = None
    if kind == "Random" and isinstance(content, tuple | list):
        made = random.Random()
    elif kind == "RandomState" and isinstance(content, Mapping):
        made = np.random.RandomState()
    elif kind == "Generator" and isinstance(content, torch.Tensor):
        made = torch.Generator()
        made = made if content.shape == made.get_state().shape else None  # that of a device is shorter
    elif kind == "Generator" and isinstance(content, Mapping) and content.get("bit_generator") in _BIT_GENERATORS:
        made = np.random.Generator(getattr(np.random, content["bit_generator"])())
    if made is not None:
        GeneratorState(made).load_state_dict(state)
    return made


def _is_legacy(generator: Any) -> bool:
    import numpy as np

    return isinstance(generator, np.random.RandomState)


def capture_generators(generators: Mapping[str, GeneratorState]) -> dict[str, Any]:
    """Return the states of registered generators, by name."""
    return {name: generator.state_dict() for name, generator in generators.items()}


def restore_generators(states: Mapping[str, Any], generators: Mapping[str, GeneratorState]) -> None:
    """Restore what :func:`capture_generators` returned; a generator that has no saved state keeps its own."""
    for name, generator in generators.items():
        if name in states:
            generator.load_state_dict(states[name])


def capture_with(generators: Mapping[str, GeneratorState]) -> dict[str, Any]:
    """Return the state of the process and of registered generators."""
    return {"process": capture(), "registered": capture_generators(generators)}


def restore_with(state: Mapping[str, Any], generators: Mapping[str, GeneratorState]) -> None:
    """Restore what :func:`capture_with` returned."""
    restore(state["process"])
    restore_generators(state["registered"], generators)
