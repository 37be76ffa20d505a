"""Load a copy of a state into what has a ``load_state_dict()``; into optimizers of torch, just as it was saved."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from resume_adapters.core.patching import wrapped
from resume_adapters.core.state.comparison import THREADS, tensors_in, verify_equal
from resume_adapters.core.state.stateful import parameters_of
from resume_adapters.core.state.untouched import attributes

_LARGE = 1 << 16
"""Bytes from which a tensor is copied by a thread."""


def load_verified(name: str, thing: Any, saved: Any, verify: bool = True) -> None:
    """Load a saved tree into what has ``load_state_dict()`` and, with ``verify``, compare its state with the tree.

    It is given a copy: what trains neither lies in a mapped file nor is what proves the load.

    Raises:
        NotRestored: the state after loading differs from what was saved.
    """
    with loading(is_foreign=not verify):
        thing.load_state_dict(copied(saved))
    if verify:
        verify_equal(name, saved, thing.state_dict())


@contextlib.contextmanager
def loading(*, is_foreign: bool = False) -> Iterator[None]:
    """Let optimizers of torch load what was saved as it is, into the groups that they have, while a context lasts.

    By themselves they load into new groups, although others share the list or hold one; and they convert the state of
    a parameter: to its dtype, so that moments in float32 of weights in bfloat16 are rounded, and numbers to tensors.

    Args:
        is_foreign: another program has saved it, of weights that may have had another dtype: convert it.
    """
    from torch.optim.optimizer import Optimizer

    def load(former: Callable[..., None], optimizer: Any, state_dict: Mapping[str, Any]) -> None:
        own = attributes(optimizer).get("param_groups")
        former(optimizer, state_dict)
        if own is None:  # a wrapper, which asks another
            return
        if not is_foreign and _saves_as_it_is(optimizer):
            _restore_converted(optimizer, state_dict)
        _keep_groups(own, optimizer)

    with wrapped(Optimizer, "load_state_dict", load):
        yield


def _saves_as_it_is(optimizer: Any) -> bool:
    """Return whether the ``state_dict()`` of an optimizer has its state, and not what it makes of it."""
    from torch.optim.optimizer import Optimizer

    # seam: torch 2.6-2.13
    hooks = (optimizer._optimizer_state_dict_post_hooks, optimizer._optimizer_load_state_dict_pre_hooks)
    return type(optimizer).state_dict is Optimizer.state_dict and not any(hooks)


def _restore_converted(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    saved = state_dict["state"]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        if number in saved:
            optimizer.state[parameter] = _as_saved(saved[number], optimizer.state[parameter])


def _as_saved(saved: Any, loaded: Any) -> Any:
    """Return what was loaded, with what was saved in the place of what is of another kind."""
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        loaded.update({key: _as_saved(saved[key], loaded[key]) for key in saved.keys() & loaded.keys()})
    elif isinstance(saved, list | tuple) and type(loaded) is type(saved) in (list, tuple):
        return type(saved)(map(_as_saved, saved, loaded))
    elif isinstance(saved, bool | int | float | str):
        return saved
    elif hasattr(saved, "dtype") and hasattr(loaded, "device") and saved.dtype != loaded.dtype:
        return saved.to(loaded.device)
    return loaded


def _keep_groups(own: list[Any], optimizer: Any) -> None:
    loaded = optimizer.param_groups  # new ones, each with the former list of parameters
    if [id(each["params"]) for each in own] == [id(each["params"]) for each in loaded]:
        for group, values in zip(own, [{**each} for each in loaded], strict=True):
            group.clear()
            group.update(values)
        optimizer.param_groups = own


def copied(state: Any) -> Any:
    """Return a deep copy of a state. Of tensors that wrap others, such as quantized moments, torch may make none."""
    import torch

    tensors = {id(each): each for each in tensors_in(state)}
    known = {key: _rewrapped(each) for key, each in tensors.items() if hasattr(each, "__tensor_flatten__")}
    places = Counter(each.untyped_storage().data_ptr() for each in tensors.values() if _has_memory(each))
    alone = [each for each in tensors.values() if _is_whole(each) and places[each.data_ptr()] == 1]
    with ThreadPoolExecutor(THREADS, thread_name_prefix="resume-adapters-copy") as pool:
        known.update(zip(map(id, alone), pool.map(torch.clone, alone), strict=True))
    return copy.deepcopy(state, known)


def _has_memory(tensor: Any) -> bool:
    import torch

    return not hasattr(tensor, "__tensor_flatten__") and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _is_whole(tensor: Any) -> bool:
    """Return whether a plain tensor is all of its memory: if no other uses that, it can be copied by itself."""
    import torch

    if type(tensor) is not torch.Tensor or not _has_memory(tensor) or tensor.requires_grad or vars(tensor):
        return False
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() >= _LARGE)


def _rewrapped(tensor: Any) -> Any:
    names, context = tensor.__tensor_flatten__()
    held = {name: copied(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(held, context, tensor.shape, tensor.stride())
