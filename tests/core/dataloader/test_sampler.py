"""The generators that shape the order of a loader."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, RandomSampler

from resume_adapters.core.dataloader.sampler import LoaderRandomState


def test_a_loader_that_is_not_tracked_repeats_the_order_that_its_restored_state_gives() -> None:
    own = torch.Generator().manual_seed(1)
    sampled = DataLoader(range(20), sampler=RandomSampler(range(20), generator=own))  # type: ignore[arg-type]
    shuffled: DataLoader[int] = DataLoader(range(20), shuffle=True)  # type: ignore[arg-type]
    for loader in (sampled, shuffled):
        state = LoaderRandomState(loader)
        moment = state.capture()
        orders = [torch.cat(list(loader)).tolist() for _ in range(2)]
        state.restore(moment)
        assert [torch.cat(list(loader)).tolist() for _ in range(2)] == orders
        assert orders[0] != orders[1]
