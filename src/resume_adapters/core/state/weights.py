"""Load a model's weights from a checkpoint: check the architecture, match the keys, verify every bit."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from resume_adapters.core.log import first_of
from resume_adapters.core.state import keys
from resume_adapters.core.state.comparison import are_same, bits, first_difference
from resume_adapters.core.state.stateful import give_shape
from resume_adapters.errors import NotRestored, StateMismatch, UnsupportedSetting

if TYPE_CHECKING:
    import torch


_LISTED = 5
"""Names that an error lists at most."""


def architecture(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the dtype and shape of each tensor of a model's state dict, by name without wrapper prefixes."""
    return {name: _form(state[key]) for name, key in keys.canonical(saved_tensors(state)).items()}


def saved_tensors(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors of a state dict, without what modules add by ``get_extra_state()``: data of any kind."""
    return {key: each for key, each in state.items() if hasattr(each, "dtype") and not key.endswith("_extra_state")}


def _form(tensor: torch.Tensor) -> str:
    from torch.nn.parameter import is_lazy

    shape = "[not known yet]" if is_lazy(tensor) else list(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"


def architecture_digest(described: dict[str, str]) -> str:
    """Return the digest of an architecture; the order of the tensors does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(described, sort_keys=True).encode())


def require_architecture(saved: dict[str, str], live: dict[str, str], checkpoint: Path) -> None:
    """Check that the checkpoint is of this model, before any weight is changed.

    Raises:
        StateMismatch: tensors differ; the message names the first of them.
    """
    differing = _differing(saved, live)
    if differing:
        lines = _lines(differing, "saved {}, the model has {}", saved, live)
        raise StateMismatch(
            f"{checkpoint.name} was saved from another model; {len(differing)} of its tensors differ:{lines}\n"
            "Build the model as it was, or start another run directory.",
            path=checkpoint,
        )


def resized(start: dict[str, str], now: dict[str, str], modules: Iterable[torch.nn.Module]) -> dict[str, list[int]]:
    """Return the shapes that training has given to tensors, by name; :func:`resize` gives them to those of a launch.

    Args:
        start: the architecture before the first step, which the script will build again.
        now: the architecture that is to be saved.
        modules: the modules that are trained.

    Raises:
        UnsupportedSetting: tensors were made or removed, or have another dtype; the message names the first of them.
    """
    differing = _differing(start, now)
    live = _whole(modules) if differing else {}
    alike = {name for name in live if start.get(name, "").split("[")[0] == now.get(name, "-").split("[")[0]}
    found = {name: list(live[name].shape) for name in differing if name in alike}
    others = [name for name in differing if name not in found]
    if others:
        lines = _lines(others, "{} before the first step, {} now", start, now)
        raise UnsupportedSetting(
            f"{len(others)} of the model's tensors were made or removed in training, or have another dtype:{lines}\n"
            "The relaunched script builds them as they were before the first step, and what is saved now could not be "
            "loaded into them. Make all from the start, of whatever size; or hold them outside the model, in an object "
            "with state_dict() and load_state_dict() that is registered as a part"
        )
    return found


def resize(modules: Iterable[torch.nn.Module], shapes: Mapping[str, Sequence[int]]) -> None:
    """Give tensors the shapes that training had given them, so that what was saved can be loaded into them."""
    live = _whole(modules) if shapes else {}
    for name in shapes.keys() & live.keys():
        give_shape(live[name], shapes[name])


def _whole(modules: Iterable[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the tensors of modules that are not shards, by name without wrapper prefixes."""
    from torch.distributed.tensor import DTensor

    named = [{**dict(each.named_parameters()), **dict(each.named_buffers())} for each in modules]
    return {name: each for name, each in keys.of_modules(named).items() if not isinstance(each, DTensor)}


def _lines(names: list[str], words: str, one: dict[str, str], other: dict[str, str]) -> str:
    """Return a line for each of the first tensors that differ, with both descriptions in ``words``."""
    rows = (words.format(one.get(name, "nothing"), other.get(name, "nothing")) for name in names[:_LISTED])
    return "".join(f"\n  {name}: {row}" for name, row in zip(names, rows, strict=False))


def _differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def load_weights(module: torch.nn.Module, saved: dict[str, torch.Tensor], checkpoint: Path) -> None:
    """Load weights into a module; wrapper prefixes may differ between the checkpoint and the module.

    Raises:
        StateMismatch: keys are missing (other than of tied weights, of which one is saved) or unexpected.
    """
    found, missing = _pair(saved, module.state_dict())
    if missing or found.unexpected:
        raise StateMismatch(
            f"the weights of {checkpoint.name} do not fit the model: {_listed('missing', missing)}"
            f"{'; ' if missing and found.unexpected else ''}{_listed('unexpected', found.unexpected)}. "
            "Build the model as it was when it was saved",
            path=checkpoint,
        )
    tensors = {key: saved[name] for key, name in found.saved_by_live.items()}
    try:
        module.load_state_dict(tensors, strict=False)
    except TypeError:  # the script has written it, without further arguments
        module.load_state_dict(tensors)


def live_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of a module, with its parameters themselves where its own method can give them."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:  # the script has written it, without arguments
        return module.state_dict()


def updated(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that train and the buffers of a state dict, each once, by name without wrapper prefixes."""
    live, found = live_state(module), dict[str, Any]()
    trained = [*module.buffers(), *(each for each in module.parameters() if each.requires_grad)]
    left = {place_of(each) or id(each) for each in trained}
    for name, key in keys.canonical(live).items():
        place = place_of(live[key]) or id(live[key])
        if place in left:  # a quantised module saves further tensors, which hold what is frozen
            left.remove(place)
            found[name] = live[key].detach()
    return found


def lost_in(module: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that a module lacks, or has with other bits.

    Args:
        expected: what :func:`updated` returned of another one.
    """
    found = keys.of_modules([module.state_dict()])
    known = [name for name in expected if name in found]
    same = dict(zip(known, are_same([(expected[name], found[name]) for name in known]), strict=True))
    return [name for name in expected if not same.get(name)]


def have_names_of(saved: dict[str, Any], live: dict[str, torch.Tensor]) -> bool:
    """Return whether saved weights have the names of the live ones, apart from wrapper prefixes."""
    found, missing = _pair(saved, live)
    return not missing and not found.unexpected


def are_saved_as_they_are(saved: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> bool:
    """Return whether saved weights have the names and the bits of the live ones.

    A framework may save others: experts one by one that are one tensor in memory, or rows in another order.
    """
    found, missing = _pair(saved, live)
    return not (missing or found.unexpected or _first_difference(found.saved_by_live, saved, live))


def _first_difference(names: Mapping[str, str], saved: Mapping[str, Any], live: Mapping[str, Any]) -> str | None:
    return first_difference({key: saved[name] for key, name in names.items()}, {key: live[key] for key in names})


def _pair(saved: dict[str, Any], live: dict[str, torch.Tensor]) -> tuple[keys.Match, list[str]]:
    """Pair saved keys with live ones; also return those missing that no saved one is tied to."""
    found = keys.match(saved, live)
    places = {key: (place_of(each) or (None,))[0] for key, each in saved_tensors(live).items()}
    held = {places.get(key) for key in found.saved_by_live} - {None}
    return found, [key for key in found.missing if places.get(key) not in held]


def verify_weights(
    module: torch.nn.Module, saved: dict[str, torch.Tensor], checkpoint: Path, own: Collection[int] = ()
) -> None:
    """Compare a module's weights with the saved ones of their names, bit for bit.

    Args:
        own: the ids of buffers of which each rank has another; one rank has saved its own.

    Raises:
        NotRestored: a tensor differs; the message names the first one.
    """
    live = module.state_dict()
    apart = keys.of_buffers(module, own)
    names = {key: name for key, name in keys.match(saved, live).saved_by_live.items() if key not in apart}
    difference = _first_difference(names, saved, live)
    if difference is not None:
        raise NotRestored(f"model differs from {checkpoint.name} after loading: {difference}", path=checkpoint)


def weight_digests(live: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the digest of each tensor's bytes, by its name without wrapper prefixes; the same on every device."""
    tensors = saved_tensors(live)
    names = keys.canonical(tensors).items()
    return {name: xxhash.xxh3_128_hexdigest(bits(tensors[key]).numpy().data) for name, key in names}


def verify_digests(saved: Mapping[str, str], live: Mapping[str, torch.Tensor], checkpoint: Path) -> None:
    """Compare a model's weights with the digests that :func:`weight_digests` returned when they were saved.

    Raises:
        NotRestored: a tensor differs; the message names the first one.
    """
    found = weight_digests(live)
    different = [name for name in saved if found.get(name) != saved[name]]
    if different:
        raise NotRestored(
            f"model: {len(different)} of {len(saved)} tensors are not what they were when {checkpoint.name} was saved, "
            f"{different[0]} first. Its weights have other names than the model's, and were loaded through the "
            "framework's own conversion: build the model as it was, with the same versions, or pass verify=False to "
            "continue with the difference",
            path=checkpoint,
        )


def place_of(tensor: Any) -> tuple[int, Any] | None:
    """Return where a plain tensor lies; ``None`` for what is sharded or has no memory yet."""
    from torch.nn.parameter import is_lazy

    is_plain = hasattr(tensor, "data_ptr") and not (hasattr(tensor, "__tensor_flatten__") or is_lazy(tensor))
    return (tensor.data_ptr(), tensor.shape) if is_plain and tensor.numel() else None


def _listed(what: str, names: Iterable[str]) -> str:
    listed = list(names)
    return f"{what} {first_of(listed, _LISTED)}" if listed else ""
