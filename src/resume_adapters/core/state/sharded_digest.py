"""A digest of sharded state that does not depend on how it is sharded.

Each rank sums a hash of every element it holds. The hash covers the element's bits, its index in the whole tensor and
the tensor's name, so the sum over all ranks is the same for any sharding on any number of ranks, and no rank gathers a
whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from resume_adapters.core.state import encoding
from resume_adapters.errors import NotRestored

if TYPE_CHECKING:
    import torch

_WORD = (1 << 64) - 1
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd numbers from the finalizers of SplitMix64 and its relatives, as signed 64-bit words."""

_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""The integer type as wide as an element, by its size in bytes."""

_ELEMENTS = 1 << 16
"""Elements hashed at a time on a CPU, so that they fit its cache; on an accelerator 64 times as many."""


class Shard(NamedTuple):
    """What a rank holds of a tensor.

    Attributes:
        local: its elements.
        shape: the shape of the whole tensor.
        offsets: where the first element is there.
        seed: stands for the tensor's name, dtype and shape.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    seed: int


def shard_digest(state: Any, *, is_first: bool) -> int:
    """Return what this rank's shards add to the digest of a state.

    Args:
        state: a tree of dicts, lists, tensors, distributed tensors and other data.
        is_first: this is rank zero, which digests what is the same on all ranks.

    Returns:
        A number of 64 bits; :func:`combine` sums those of all ranks.
    """
    return with_digests(*shards_of(state, is_first=is_first))


def shards_of(state: Any, *, is_first: bool) -> tuple[int, list[Shard]]:
    """Return the digest of what is no tensor, and the shards whose digests are still to be added; see above."""
    found: list[tuple[str, torch.Tensor]] = []
    rest = _without_tensors(state, "", found)
    shards = []
    for name, tensor in found:
        shape = tuple(tensor.shape)
        seed = xxhash.xxh64_intdigest(f"{name} {tensor.dtype} {shape}".encode())
        shards += [Shard(local, shape, at, seed) for local, at in _local_shards(tensor, is_first=is_first)]
    return int(encoding.digest_of(rest) or "0", 16) if is_first else 0, shards


def with_digests(digest: int, shards: Iterable[Shard]) -> int:
    """Add the digests of shards to a digest."""
    return sum((_sum_of_hashes(*each) for each in shards), digest) & _WORD


def fingerprint(state: Any) -> str | None:
    """Return a digest of unsharded state, to detect a change within this process.

    Args:
        state: as for :func:`shard_digest`, without distributed tensors.

    Returns:
        ``None`` if the state holds an object that is not data, so that it cannot be compared.
    """
    found: list[tuple[str, torch.Tensor]] = []
    rest = encoding.digest_of(_without_tensors(state, "", found))
    # XXH3 is faster on a CPU; the sum of hashes is computed on the tensor's own device.
    here = {name: tensor for name, tensor in found if tensor.device.type == "cpu"}
    elsewhere = {name: tensor for name, tensor in found if name not in here}
    on_cpu = encoding.digest_of(here)
    return None if rest is None or on_cpu is None else f"{rest} {on_cpu} {shard_digest(elsewhere, is_first=True):x}"


def combine(shard_digests: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the digest of each component, from the shard digests of all ranks."""
    whole: dict[str, int] = {}
    for of_rank in shard_digests:
        for name, value in of_rank.items():
            whole[name] = (whole.get(name, 0) + value) & _WORD
    return whole


def verify_shards(
    saved: Iterable[Mapping[str, int]], live: Iterable[Mapping[str, int]], checkpoint: Path, step: int
) -> None:
    """Compare the saved shard digests of all ranks with the live ones.

    Args:
        saved: each rank's shard digests by component, from the checkpoint.
        live: each rank's shard digests now.
        checkpoint: the checkpoint.
        step: its step.

    Raises:
        NotRestored: a component differs; the message names the first one.
    """
    loaded = combine(live)
    for name, value in combine(saved).items():
        if loaded.get(name) != value:
            raise NotRestored(
                f"{name}: the state of all ranks together, after loading {checkpoint.name}, is not the saved one. A "
                "hook or a wrapper changes it while it is loaded: fix it, or pass verify=False to continue with the "
                "difference",
                path=checkpoint,
                step=step,
            )


def _without_tensors(value: Any, where: str, found: list[tuple[str, torch.Tensor]]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        found.append((where, value))
        return None
    if isinstance(value, Mapping):
        return {key: _without_tensors(each, f"{where}.{key}", found) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_tensors(each, f"{where}.{index}", found) for index, each in enumerate(value)]
    return value


def _local_shards(tensor: Any, *, is_first: bool) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield the shards of a tensor that this rank digests, each with its offsets in the whole tensor."""
    if not hasattr(tensor, "placements"):
        if is_first:
            yield tensor.detach(), (0,) * tensor.dim()
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return
    copies = (at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
    if not any(copies):
        # seam: torch 2.13, DTensor: torch.distributed.checkpoint finds a shard's offsets with this.
        (chunk,) = tensor.__create_chunk_list__()
        yield tensor.to_local().detach(), tuple(chunk.offsets)


def _sum_of_hashes(local: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], seed: int) -> int:
    import torch

    if not local.numel():
        return 0
    if local.element_size() not in _WORDS:  # complex numbers of 128 bits
        local, shape, offsets = torch.view_as_real(local.resolve_conj()), (*shape, 2), (*offsets, 0)
    plain = local.resolve_conj().resolve_neg().contiguous()
    row = _indices(local.shape[1:], shape[1:], offsets[1:], local.device)
    words = plain.view(getattr(torch, _WORDS[local.element_size()])).reshape(-1, row.numel())
    first, stride = offsets[0] if offsets else 0, math.prod(shape[1:])
    rows = max(1, (_ELEMENTS if local.device.type == "cpu" else _ELEMENTS << 6) // row.numel())
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for begin in range(0, len(words), rows):
        # Not mul_: for 64-bit elements, to() returns the shard itself.
        block = words[begin : begin + rows].to(torch.int64).mul(_MULTIPLIERS[1])
        at = torch.arange(begin + first, begin + first + len(block), device=local.device).mul_(stride)
        indices = at[:, None].add(row).mul_(_MULTIPLIERS[0]).add_(_as_signed(seed))
        total += _mix(indices.bitwise_xor_(block)).sum()
    return int(total)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Mix each value, so that every bit of it affects every bit of the result."""
    for shift, multiplier in ((32, _MULTIPLIERS[1]), (29, _MULTIPLIERS[2]), (32, 1)):
        higher = values.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)
        values = values.bitwise_xor_(higher).mul_(multiplier)
    return values


def _indices(held: Iterable[int], shape: tuple[int, ...], offsets: tuple[int, ...], device: Any) -> torch.Tensor:
    """Return the index in a row of the whole tensor of each element of a shard's row."""
    import torch

    indices = torch.zeros(1, dtype=torch.int64, device=device)
    for size, whole, offset in zip(held, shape, offsets, strict=True):
        along = torch.arange(offset, offset + size, device=device)
        indices = (indices[:, None] * whole + along).reshape(-1)
    return indices


def _as_signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


class ShardDigests:
    """This rank's shares of the digests of sharded state, by the name of the component.

    Args:
        state: the sharded state, likewise.
        rank: this rank.
        copy_of: returns the tensor into which the save under way copies one; ``None`` where it does not.

    Attributes:
        known: the shares, without what is copied.
        is_complete: nothing is copied.
    """

    def __init__(self, state: Mapping[str, Any], rank: int, copy_of: Callable[[Any], Any]) -> None:
        self.known: dict[str, int] = {}
        self._copies: dict[str, list[Shard]] = {}
        for name, component in state.items():
            rest, shards = shards_of(component, is_first=rank == 0)
            copies = [(each, copy_of(each.local)) for each in shards]
            self.known[name] = with_digests(rest, [each for each, copy in copies if copy is None])
            self._copies[name] = [each._replace(local=copy) for each, copy in copies if copy is not None]

    @property
    def is_complete(self) -> bool:
        return not any(self._copies.values())

    def complete(self) -> dict[str, int]:
        """Return the shares, once everything is copied."""
        return {name: with_digests(digest, self._copies[name]) for name, digest in self.known.items()}
