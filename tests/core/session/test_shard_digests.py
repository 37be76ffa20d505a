"""Of what a save copies, the digest is that of the copy."""

from __future__ import annotations

import types
from typing import Any

import torch

from resume_adapters.core.session.context import shard_digests
from resume_adapters.core.session.records import LaunchState, RankState
from resume_adapters.core.session.session import _SessionContent
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


def test_a_checkpoint_gets_the_digests_of_copies_when_those_are_made() -> None:
    copies: list[Any] = []

    def copy_of(tensor: Any) -> Any:
        copies.append((torch.empty_like(tensor), tensor))
        return copies[-1][0]

    session: Any = types.SimpleNamespace(
        shard_digests=lambda: ShardDigests(STATE, 0, copy_of),
        launch_state=lambda digests: LaunchState({"ranks": 1}, {}, digests, 0, []),
    )
    loop: Any = types.SimpleNamespace(rank_state=RankState)
    content = _SessionContent(session, loop, "checkpoint-1")
    state = content.rank_state()
    for copy, live in copies:
        copy.copy_(live)
    assert {**state, **content.completed()} == {**state, "shares": shard_digests(STATE, 0)}
