"""What the benchmarks train, and on what: it needs torch alone."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A million rows of random numbers, more than a run uses."""

    def __init__(self, width: int) -> None:
        self.inputs = torch.randn(64, width)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index % 64]}


class Stack(torch.nn.Module):
    """Square linear layers one after another."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(inputs).square().mean()}
