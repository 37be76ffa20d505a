"""A digest of state that is spread over the ranks, of which no rank holds the whole.

Each rank adds up a hash of every element it holds: of the element's bits, of its place in the whole tensor, of the
tensor's name. The sums of all ranks together are then the same however the tensors are cut, on any number of ranks, and
no tensor is put together to find them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from resume_adapters.core.state import encoding
from resume_adapters.errors import NotRestored

if TYPE_CHECKING:
    import torch

_WORD = (1 << 64) - 1
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd numbers from the finalizers of SplitMix64 and of its kin, as signed 64-bit words."""

_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""The whole numbers that have the bits of an element, by its size in bytes."""

_ELEMENTS = 1 << 16
"""Elements that are hashed at a time on a CPU, so that they stay in its cache; on an accelerator 64 times as many."""


def shard_digest(state: Any, *, is_first: bool) -> int:
    """Return this rank's share of the digest of a state.

    Args:
        state: a tree of dicts, lists, tensors, distributed tensors and other data.
        is_first: this is rank zero, which answers for whatever is alike on all ranks.

    Returns:
        A number of 64 bits; see :func:`together`.
    """
    found: list[tuple[str, torch.Tensor]] = []
    rest = _without_tensors(state, "", found)
    total = int(encoding.digest_of(rest) or "0", 16) if is_first else 0
    for name, tensor in found:
        seed = xxhash.xxh64_intdigest(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for local, offsets in _held(tensor, is_first=is_first):
            total += _sum(local, tuple(tensor.shape), offsets, seed)
    return total & _WORD


def fingerprint(state: Any) -> str | None:
    """Return a digest of a state that is whole on this rank, to tell whether it changes while this process runs.

    Args:
        state: as for :func:`digest`, without distributed tensors.

    Returns:
        ``None`` where the state holds something that is not data, and no comparison is possible.
    """
    found: list[tuple[str, torch.Tensor]] = []
    rest = encoding.digest_of(_without_tensors(state, "", found))
    # The one is quicker on a CPU; the other reads a tensor where it is.
    here = {name: tensor for name, tensor in found if tensor.device.type == "cpu"}
    elsewhere = {name: tensor for name, tensor in found if name not in here}
    on_cpu = encoding.digest_of(here)
    return None if rest is None or on_cpu is None else f"{rest} {on_cpu} {shard_digest(elsewhere, is_first=True):x}"


def combine(shares: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the digests of the whole state by name, from every rank's shares of them."""
    whole: dict[str, int] = {}
    for share in shares:
        for name, value in share.items():
            whole[name] = (whole.get(name, 0) + value) & _WORD
    return whole


def verify_shards(
    saved: Iterable[Mapping[str, int]], live: Iterable[Mapping[str, int]], checkpoint: Path, step: int
) -> None:
    """Compare the shares that all ranks had saved with those that they have now.

    Args:
        saved: every rank's shares by name, as the checkpoint has them.
        live: every rank's shares now.
        checkpoint: the checkpoint.
        step: its step.

    Raises:
        NotRestored: naming the first component that differs.
    """
    loaded = combine(live)
    for name, value in combine(saved).items():
        if loaded.get(name) != value:
            raise NotRestored(
                f"{name}: what the ranks hold of it together, after loading {checkpoint.name}, differs from what was "
                "saved. A hook or a wrapper changes it while it is loaded: mend it, or pass verify=False to continue "
                "with the difference",
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


def _held(tensor: Any, *, is_first: bool) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Yield what this rank answers for of a tensor, and where in the whole it begins."""
    if not hasattr(tensor, "placements"):
        if is_first:
            yield tensor.detach(), (0,) * tensor.dim()
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return
    copies = (at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
    if not any(copies):
        # seam: torch 2.13, DTensor: by this torch.distributed.checkpoint asks where a shard lies.
        (chunk,) = tensor.__create_chunk_list__()
        yield tensor.to_local().detach(), tuple(chunk.offsets)


def _sum(local: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], seed: int) -> int:
    import torch

    if not local.numel():
        return 0
    if local.element_size() not in _WORDS:  # complex numbers of 128 bits
        local, shape, offsets = torch.view_as_real(local.resolve_conj()), (*shape, 2), (*offsets, 0)
    plain = local.resolve_conj().resolve_neg().contiguous()
    row = _places(local.shape[1:], shape[1:], offsets[1:], local.device)
    words = plain.view(getattr(torch, _WORDS[local.element_size()])).reshape(-1, row.numel())
    first, stride = offsets[0] if offsets else 0, math.prod(shape[1:])
    rows = max(1, (_ELEMENTS if local.device.type == "cpu" else _ELEMENTS << 6) // row.numel())
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for begin in range(0, len(words), rows):
        block = words[begin : begin + rows].to(torch.int64).mul(_MULTIPLIERS[1])  # of 64 bits it is the tensor itself
        at = torch.arange(begin + first, begin + first + len(block), device=local.device).mul_(stride)
        places = at[:, None].add(row).mul_(_MULTIPLIERS[0]).add_(_signed(seed))
        total += _mixed(places.bitwise_xor_(block)).sum()
    return int(total)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Let every bit of each value bear upon every bit of the result."""
    for shift, multiplier in ((32, _MULTIPLIERS[1]), (29, _MULTIPLIERS[2]), (32, 1)):
        higher = values.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)
        values = values.bitwise_xor_(higher).mul_(multiplier)
    return values


def _places(held: Iterable[int], shape: tuple[int, ...], offsets: tuple[int, ...], device: Any) -> torch.Tensor:
    """Return, for each element of one row of a shard, its place in a row of the whole."""
    import torch

    places = torch.zeros(1, dtype=torch.int64, device=device)
    for size, whole, offset in zip(held, shape, offsets, strict=True):
        along = torch.arange(offset, offset + size, device=device)
        places = (places[:, None] * whole + along).reshape(-1)
    return places


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
