"""Of what a save copies, the digest is that of the copy."""

from __future__ import annotations

import torch

from resume_adapters.core.session.context import shard_digests
from resume_adapters.core.state.sharded_digest import ShardDigests

STATE = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}, "optimizer": {"lr": 0.1}}


def test_what_is_not_copied_is_digested_at_once() -> None:
    digests = ShardDigests(STATE, 0, lambda tensor: None)
    assert digests.is_complete and digests.known == shard_digests(STATE, 0) == digests.complete()


def test_what_is_copied_is_digested_when_it_is() -> None:
    live = STATE["model"]["a"]
    copy = torch.empty(2, 3)
    digests = ShardDigests(STATE, 0, lambda tensor: copy if tensor.data_ptr() == live.data_ptr() else None)
    assert not digests.is_complete
    copy.copy_(live)
    expected = shard_digests(STATE, 0)
    assert digests.complete() == expected != digests.known
    copy[1, 2] += 1
    assert digests.complete() != expected
