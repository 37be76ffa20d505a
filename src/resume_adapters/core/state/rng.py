"""Capture and restore the random generators of the process, and generators that the user registers.

Capturing only reads state. It never draws, so a run with this package draws the same numbers as one without.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from resume_adapters.core import devices
from resume_adapters.core.devices import RandomStates
from resume_adapters.errors import StateMismatch

CpuState: TypeAlias = tuple[Any, Any, Any]
"""The states of python's, numpy's and torch's CPU generator, as each of them returns it."""

_WORDS = "I"
"""Array code of python's Mersenne Twister words (unsigned 32 bit)."""


# ---- The process


class ProcessState(NamedTuple):
    """The state of every generator of the process at one moment. Nothing changes it later.

    Attributes:
        cpu: what :func:`capture_cpu` returned.
        devices: that of the accelerator, where one is in use.
    """

    cpu: CpuState
    devices: RandomStates | None

    def to_tree(self) -> dict[str, Any]:
        """Return it as a tree for a checkpoint."""
        return {"cpu": cpu_to_tree(self.cpu), "devices": self.devices._asdict() if self.devices else []}


def capture_process() -> ProcessState:
    """Return the state of every generator of the process: python, numpy, torch on the CPU and on devices in use."""
    return ProcessState(capture_cpu(), devices.random_states())


def capture() -> dict[str, Any]:
    """Return what :func:`capture_process` returns, as a tree."""
    return capture_process().to_tree()


def restore(state: Mapping[str, Any]) -> None:
    """Restore what :func:`capture` returned.

    Raises:
        UnsupportedSetting: the run has drawn from several devices, and this process does not see them.
    """
    restore_cpu(cpu_from_tree(state["cpu"]))
    if (saved := RandomStates.from_tree(state["devices"])) is not None:
        devices.restore_random_states(saved)


def resume(state: Mapping[str, Any]) -> None:
    """Restore what a checkpoint holds, and log where that is nothing of the device in use.

    Raises:
        UnsupportedSetting: as :func:`restore`.
    """
    restore(state)
    if not state["devices"] and devices.kind_in_use() is not None and devices.missing() is None:
        devices.log_other_device("cpu")


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
    seeds = np.random.SeedSequence([int(torch.randint(2**62, ())), rank]).generate_state(4).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])
    saved = RandomStates.from_tree(state["devices"])
    derived = ProcessState(capture_cpu(), devices.reseeded(saved, seeds[3]) if saved else None)
    restore_cpu(before)
    return derived.to_tree()


# ---- What is read, before it is restored; what these functions raise, of any kind, says what is wrong with it


def require(state: Mapping[str, Any]) -> None:
    """Try what :func:`capture` returned on generators that nobody draws from."""
    require_cpu(cpu_from_tree(state["cpu"]))
    if (saved := RandomStates.from_tree(state["devices"])) is not None:
        require_generators(dict(enumerate(saved.states)))


def require_with(state: Mapping[str, Any]) -> None:
    """Try what :func:`capture_with` returned, as :func:`require` does."""
    require(state["process"])
    dict(state["registered"])


def require_cpu(state: CpuState) -> None:
    """Try what :func:`capture_cpu` returned, as :func:`require` does."""
    import numpy as np
    import torch

    random.Random().setstate(state[0])
    np.random.RandomState(type(np.random.get_bit_generator())()).set_state(state[1])  # type: ignore[attr-defined]
    torch.Generator().set_state(state[2])


def require_generators(states: Mapping[Any, Any]) -> None:
    """Check the form of the states of torch's generators, on any device."""
    import torch

    for state in states.values():
        if state.dtype != torch.uint8 or state.dim() != 1:
            raise TypeError(f"{state.dtype} of {tuple(state.shape)} is no state of a generator")


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
            return {"state": self.generator.get_state(), **self._device()}
        if isinstance(self.generator, random.Random):
            return {"state": self.generator.getstate()}
        if _is_legacy(self.generator):
            return {"state": self.generator.get_state(legacy=False)}
        return {"state": self.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; that of another kind of device is not, and one line says so.

        Raises:
            StateMismatch: it is no state of such a generator.
        """
        try:
            self._restore(state)
        except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            raise StateMismatch(
                f"what was saved is no state of a {type(self.generator).__name__}: {error}. Launch with the generator "
                "of before; where nobody has changed it, remove the checkpoint: the next launch takes the one before it"
            ) from error

    def _restore(self, state: dict[str, Any]) -> None:
        import torch

        if isinstance(self.generator, torch.Generator):
            if self._is_of_this_kind(state):
                self.generator.set_state(state["state"])
            else:
                devices.log_other_device(devices.kind_of(state.get("device", "cpu")))
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(state["state"])
        elif _is_legacy(self.generator):
            self.generator.set_state(state["state"])
        else:
            self.generator.bit_generator.state = state["state"]

    def as_restored(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what :meth:`state_dict` returns when :meth:`load_state_dict` has restored a state."""
        import torch

        if not isinstance(self.generator, torch.Generator):
            return state
        return {"state": state["state"], **self._device()} if self._is_of_this_kind(state) else self.state_dict()

    def _device(self) -> dict[str, str]:
        return {} if self.generator.device.type == "cpu" else {"device": str(self.generator.device)}

    def _is_of_this_kind(self, state: dict[str, Any]) -> bool:
        here: str = self.generator.device.type
        if "device" in state:
            return devices.kind_of(state["device"]) == here
        # An earlier version did not say it, and the state of the CPU's generator is longer than that of a device.
        return here == "cpu" or len(state["state"]) == len(self.generator.get_state())


def is_generator(value: Any) -> bool:
    """Return whether :class:`GeneratorState` can make ``value`` Stateful."""
    import numpy as np
    import torch

    return issubclass(type(value), torch.Generator | random.Random | np.random.Generator | np.random.RandomState)


_BIT_GENERATORS = frozenset(("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"))
"""The classes in ``numpy.random`` that a generator of numpy draws from."""


def generator_of(kind: str, state: Any) -> Any:
    """Return a new generator with the state of one that a library makes when it first needs it.

    Args:
        kind: the name of its class.
        state: what :meth:`GeneratorState.state_dict` returned.

    Returns:
        ``None`` where that is no class of generators, or not its state, or this process does not see its device.
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
        device = devices.place(state.get("device", "cpu"))
        made = None if device is None else torch.Generator(device=device)
        if made is not None and content.shape != made.get_state().shape:
            made = None  # an earlier version did not say that it was that of a device, which is shorter
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
    """Restore what :func:`capture_with` returned, as :func:`resume` does."""
    resume(state["process"])
    restore_generators(state["registered"], generators)
