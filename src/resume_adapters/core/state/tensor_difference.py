"""Measure how two tensors differ, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resume_adapters.core.state.comparison import bits

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorDifference:
    """How two tensors of one dtype and shape differ.

    Attributes:
        elements: elements of each.
        differing: elements whose bits differ.
        max_absolute: the greatest difference of two numbers; ``None`` where a NaN is in every differing pair.
        max_relative: the greatest difference of two numbers, divided by the larger one's magnitude.
        nan_a: differing elements that are NaN in the first.
        nan_b: differing elements that are NaN in the second.
    """

    elements: int
    differing: int
    max_absolute: float | None
    max_relative: float | None
    nan_a: int
    nan_b: int


def measure(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> TensorDifference | None:
    """Return how two tensors differ; ``None`` if they are equal bit for bit.

    Args:
        pieces: the corresponding pieces of both, flat and on the CPU; they may be read while this iterates.
    """
    elements = differing = nan_a = nan_b = 0
    absolute: list[float] = []
    relative: list[float] = []
    for one, other in pieces:
        elements += one.numel()
        changed = _changed(one, other)
        if changed is None:
            continue
        a, b = (_numbers(each[changed]) for each in (one, other))
        differing += a.numel()
        nan_a, nan_b = nan_a + int(a.isnan().sum()), nan_b + int(b.isnan().sum())
        numbers = ~(a.isnan() | b.isnan())
        a, b = a[numbers], b[numbers]
        if a.numel():
            distance, larger = (a - b).abs(), a.abs().maximum(b.abs())
            absolute.append(float(distance.max()))
            # Where both are zero (of two signs), the larger one is too; an infinite one is infinitely far away.
            relative.append(float((distance / larger.clamp(min=_TINY)).nan_to_num(nan=float("inf")).max()))
    if not differing:
        return None
    return TensorDifference(elements, differing, max(absolute, default=None), max(relative, default=None), nan_a, nan_b)


_TINY = 5e-324
"""The smallest positive number of 64 bits."""


def _changed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Return which elements of two flat tensors have other bits; ``None`` if none has."""
    import torch

    first, second = bits(one), bits(other)
    if torch.equal(first, second):
        return None
    return (first != second).view(one.numel(), one.element_size()).any(dim=1)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """Return numbers of any type in double precision."""
    import torch

    return values.to(torch.complex128 if values.is_complex() else torch.float64)
