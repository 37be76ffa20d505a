"""Tensors that training leaves as the script has built them, and that a framework's files need not hold.

Frozen weights beside an adapter, and buffers that no ``state_dict()`` has. A launch that builds them otherwise (a head
without a seed, a decomposition with another result) would train another model. So their digests are saved, and of the
small ones their values, which a resume restores; of the others a difference is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from resume_adapters.core.log import logger
from resume_adapters.core.state import keys
from resume_adapters.core.state.comparison import are_same
from resume_adapters.core.state.stateful import fill
from resume_adapters.core.state.weights import live_state, place_of, saved_tensors, weight_digests
from resume_adapters.errors import NotRestored

CONSTANTS = "constant_tensors"
"""The part that holds them."""

_SAVED = 1 << 21
"""Bytes of the tensors that are saved themselves, together: the smallest ones."""


def is_captured(value: Any) -> bool:
    """Return whether a value is what :meth:`Constants.capture` returns."""
    return isinstance(value, Mapping) and all(isinstance(value.get(name), Mapping) for name in ("digests", "tensors"))


class Constants:
    """The constant tensors of one training call."""

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._marks: dict[str, tuple[int, int, bool]] = {}
        self._is_proved = False

    def begin(self, modules: Iterable[Any], saved: Mapping[str, Any] | None, checkpoint: Path | None) -> None:
        """Restore and compare them, when all else is loaded and nothing is trained.

        Args:
            modules: what is trained.
            saved: what :meth:`capture` returned; ``None`` for a fresh start.
            checkpoint: what is resumed from.

        Raises:
            NotRestored: one is not what it was, and was too large to be saved.
        """
        live = dict(_constants(modules))
        self._digests = weight_digests(live)
        if saved is not None and checkpoint is not None:
            known = saved["digests"]
            differing = [name for name in live if known.get(name, self._digests[name]) != self._digests[name]]
            _restore(live, differing, saved["tensors"], checkpoint)
            self._digests = {name: each for name, each in known.items() if name in live}
        self._marks = {name: _mark(live[name]) for name in self._digests}

    def capture(self, modules: Iterable[Any]) -> dict[str, Any]:
        """Return those that have not changed since the beginning, as data."""
        live = {name: each for name, each in _constants(modules) if self._marks.get(name) == _mark(each)}
        if not self._is_proved:  # not every change is counted: averages are often written through `.data`
            found = weight_digests(live)
            live = {name: each for name, each in live.items() if self._digests[name] == found[name]}
            self._is_proved = True
        self._marks = {name: self._marks[name] for name in live}
        return {"digests": {name: self._digests[name] for name in live}, "tensors": dict(_smallest(live))}


def _constants(modules: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the frozen parameters and the buffers that no ``state_dict()`` has, by name without wrappers, once each."""
    from torch.nn.parameter import is_lazy

    seen: set[int] = set()
    for name, each in keys.of_modules(map(_held_by, modules)).items():
        is_plain = not (hasattr(each, "__tensor_flatten__") or is_lazy(each) or each.is_meta)
        if is_plain and each.numel() and id(each) not in seen:
            seen.add(id(each))
            yield name, each


def _held_by(module: Any) -> dict[str, Any]:
    saved = live_state(module)
    frozen = {name: each for name, each in module.named_parameters() if not each.requires_grad}
    return {**frozen, **{name: each for name, each in module.named_buffers() if name not in saved}}


def left_out(modules: Iterable[Any]) -> list[Any]:
    """Return the trained parameters and the buffers that no ``state_dict()`` has as they are.

    A hook of the script removes them, for example, or saves them in half precision, or their average.
    """
    found = []
    for module in modules:
        if any(keys.FSDP in name for name, _ in module.named_parameters()):  # FSDP1 would gather the whole model
            continue
        saved = keys.of_modules([saved_tensors(live_state(module))])  # FSDP2 shards it again for that
        trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
        places = {place_of(each) for each in saved.values()} - {None}
        others = keys.of_modules([trained | dict(module.named_buffers())])
        others = {name: each for name, each in others.items() if place_of(each) not in (None, *places)}
        found += [each for name, each in others.items() if not _is_copy(saved.get(name), each)]
    return found


def _is_copy(saved: Any, live: Any) -> bool:
    """Return whether what is saved under a tensor's name has its bits; a shard, or the whole of one, counts as such."""
    is_elsewhere = place_of(saved) is None  # on other ranks, too
    return saved is not None and (is_elsewhere or saved.shape != live.shape or all(are_same([(saved, live)])))


def _smallest(live: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    left = _SAVED
    for name, each in sorted(live.items(), key=lambda item: (item[1].nbytes, item[0])):
        left -= each.nbytes
        if left < 0:
            return
        yield name, each.detach().clone()


def _mark(tensor: Any) -> tuple[int, int, bool]:
    """Return what an assignment or an operation in place changes, as long as it is counted, and whether it trains."""
    return tensor.data_ptr(), tensor._version, tensor.requires_grad  # seam: torch 2.6-2.13


def _restore(live: Mapping[str, Any], names: list[str], saved: Mapping[str, Any], checkpoint: Path) -> None:
    lacking = [name for name in names if getattr(saved.get(name), "dtype", None) != live[name].dtype]
    if lacking:
        raise NotRestored(
            f"{len(lacking)} tensors that training does not change, and that {checkpoint.name} does not hold, are not "
            f"what they were: {lacking[0]} first. The script builds them otherwise in this launch: seed it before the "
            "model is made, load them from a file, or let them be saved (peft: modules_to_save); or pass verify=False "
            "to continue with the difference",
            path=checkpoint,
        )
    for name in names:
        fill(live[name], saved[name])
    if names:
        logger.info(
            "%d tensors that training does not change were built otherwise in this launch; restored from %s: %s.",
            len(names),
            checkpoint.name,
            ", ".join(names[:3]) + ("" if len(names) <= 3 else ", ..."),
        )
