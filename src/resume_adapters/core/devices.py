"""What is asked of an accelerator: by ``torch.accelerator`` and the device's own module, whatever it is called."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from resume_adapters.core.log import logger
from resume_adapters.errors import UnsupportedSetting

# ---- Which device


def kind() -> str | None:
    """Return the kind of accelerator that this process sees, such as ``"cuda"``; ``None`` where it sees none."""
    import torch

    device = torch.accelerator.current_accelerator()  # of this build of torch: the question initialises nothing
    return device.type if device is not None and torch.accelerator.is_available() else None


def kind_in_use() -> str | None:
    """Return the kind of accelerator that this process has initialised; ``None`` where it uses the CPU alone."""
    import torch

    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)  # not every one says whether it is in use
    return device.type if getattr(module, "is_initialized", torch.accelerator.is_available)() else None


def repeats() -> bool:
    """Return whether torch was told to use kernels alone that repeat their results on an accelerator."""
    import torch

    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def place(device: str) -> Any:
    """Return where a device of a checkpoint is in this process: by its index, or else the one that it trains on.

    Args:
        device: such as ``"cpu"`` or ``"cuda:1"``.

    Returns:
        A ``torch.device``; ``None`` where this process sees no device of that kind.
    """
    import torch

    wanted, _, index = device.partition(":")
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted != kind():  # torch may not know the word
        return None
    is_seen = int(index or 0) < torch.accelerator.device_count()
    return torch.device(wanted, int(index or 0) if is_seen else _current_index(wanted))


def kind_of(device: str) -> str:
    """Return the kind of a device, such as ``"cuda"`` of ``"cuda:1"``."""
    return device.partition(":")[0]


def _current_index(kind: str) -> int:
    import torch

    return int(torch.empty(0, device=kind).device.index)


# ---- Random state


class RandomStates(NamedTuple):
    """The random state of the devices that a process sees.

    Attributes:
        kind: of these devices, such as ``"cuda"``.
        current: the index of the one that the process trains on; ``None``: an earlier version did not save it.
        states: of each device, by its index in the process.
    """

    kind: str
    current: int | None
    states: list[Any]

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any] | list[Any]) -> RandomStates | None:
        """Return what ``_asdict()`` returned, or an earlier version's list of the states of CUDA devices."""
        if isinstance(tree, Mapping):
            return cls(**tree)
        return cls("cuda", None, tree) if tree else None


def random_states() -> RandomStates | None:
    """Return the random state of the accelerator; ``None`` where none is in use, or :func:`missing` says why."""
    kind = kind_in_use()  # before it is in use its generators are unused too, and asking would start the driver
    if kind is None or missing() is not None:
        return None
    import torch

    module, count = torch.get_device_module(kind), torch.accelerator.device_count()
    # MPS has one device, and its function no argument.
    states = [module.get_rng_state()] if count == 1 else [module.get_rng_state(index) for index in range(count)]
    return RandomStates(kind, _current_index(kind), states)


def missing() -> str | None:
    """Return what of the random state of the device in use cannot be captured, and what that costs."""
    kind = kind_in_use()
    if kind is None:
        return None
    import torch

    needed = ("get_rng_state", "set_rng_state")
    absent = [name for name in needed if not hasattr(torch.get_device_module(kind), name)]
    if not absent:
        return None
    return (
        f"torch.{kind} has no {' and no '.join(absent)}: after a resume, dropout and whatever else draws on the device "
        "draws other numbers than a run that was not killed"
    )


def restore_random_states(saved: RandomStates) -> None:
    """Restore what :func:`random_states` returned; where there is no device of that kind, one line says so.

    The device that a process trained on gives its state to the one that it trains on now. Others keep their index.

    Raises:
        UnsupportedSetting: the run has drawn from several devices, and this process does not see them.
    """
    if saved.kind != kind():
        log_other_device(saved.kind)
        return
    import torch

    module, count = torch.get_device_module(saved.kind), torch.accelerator.device_count()
    for index, state in _placed(saved, _current_index(saved.kind), count).items():
        module.set_rng_state(*((state,) if count == 1 else (state, index)))


def _placed(saved: RandomStates, current: int, count: int) -> dict[int, Any]:
    """Return the states that devices of this process get, by their index."""
    drawn = {index for index, state in enumerate(saved.states) if _is_drawn_from(saved.kind, state)}
    is_numbered_alike = saved.current == current or (saved.current is None and (current in drawn or not drawn))
    if is_numbered_alike and max(drawn, default=0) < count:
        return dict(enumerate(saved.states[:count]))
    home = saved.current if len(drawn) != 1 else min(drawn)
    if home is None or drawn - {home}:
        raise UnsupportedSetting(
            f"the run has drawn random numbers from {len(drawn)} {saved.kind} devices, of index {sorted(drawn)}, and "
            f"trained on that of index {home}; this process sees {count} and trains on that of index {current}: launch "
            "it with the same visible devices"
        )
    return {current: saved.states[home]}


def _is_drawn_from(kind: str, state: Any) -> bool:
    """Return whether a generator with this state has given a number since it was seeded."""
    import torch

    generator = torch.Generator(device=kind)
    generator.set_state(state)
    return not torch.equal(state, generator.manual_seed(generator.initial_seed()).get_state())


def reseeded(states: RandomStates, seed: int) -> RandomStates:
    """Return the states that these devices have after a seed; as they are, where this process sees none of the kind."""
    import torch

    if states.kind != kind():
        return states
    state = torch.Generator(device=states.kind).manual_seed(seed).get_state()
    return states._replace(states=[state] * len(states.states))


@functools.cache  # one line for a launch, however many loaders and generators restore theirs
def log_other_device(saved: str) -> None:
    """Log that random state of another kind of device is not restored here.

    Args:
        saved: the kind of device.
    """
    logger.warning(
        "The run was saved on %s and is resumed on %s, where the random state of %s does not serve: dropout and "
        "whatever else draws on the device draws other numbers from here on, and the run is no longer exact.",
        saved,
        kind_in_use() or "cpu",
        saved,
    )


# ---- Streams and memory


_PORTABLE = 1
"""The flag of ``cudaHostRegister`` by which the memory is pinned for every device."""


def free_bytes(kind: str) -> int | None:
    """Return the memory that is free on the current device of a kind; ``None`` where it does not say."""
    import torch

    ask = getattr(torch.get_device_module(kind), "mem_get_info", None)
    return None if ask is None else int(ask()[0])


def pin(address: int, size: int, device: Any) -> Callable[[], object] | None:
    """Pin memory of the host, so that a device copies into it while the host goes on.

    Args:
        address: where the memory begins.
        size: bytes.
        device: a ``torch.device``.

    Returns:
        What undoes it; ``None`` where the device's module cannot pin memory that is there already, as CUDA's can.
    """
    import torch

    runtime = getattr(torch.get_device_module(device), "cudart", None)
    if runtime is None or int(runtime().cudaHostRegister(address, size, _PORTABLE)) != 0:
        return None
    return functools.partial(runtime().cudaHostUnregister, address)


def record_event(device: Any) -> Any:
    """Return an event that comes when a device has done all that its current stream has been given so far."""
    import torch

    return torch.accelerator.current_stream(device).record_event()


# ---- Health


def require_device(seconds: float) -> None:
    """Check that the accelerator that this process uses, if it uses one, still answers.

    Args:
        seconds: within which it must.

    Raises:
        RuntimeError: it does not.
    """
    import torch

    if (kind := kind_in_use()) is not None:

        def ask() -> None:
            torch.zeros(1, device=kind).add_(1)
            torch.accelerator.synchronize()

        require_answer(ask, seconds)


def require_answer(ask: Callable[[], object], seconds: float) -> None:
    """Check that a question is answered; a thread that waits for ever is left behind.

    Raises:
        RuntimeError: it is not answered in time, or with an error.
    """
    answers: list[Exception | None] = []

    def run() -> None:
        try:
            ask()
            answers.append(None)
        except Exception as error:  # of any kind: another thread raises it
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise RuntimeError(f"the device does not answer within {seconds:g} s")
    if answers[0] is not None:
        raise RuntimeError("the device does not answer") from answers[0]
