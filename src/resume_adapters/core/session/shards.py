"""The digests of what is sharded over the ranks, in a save: of what is copied, they are those of the copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from resume_adapters.core.state.sharded_digest import Shard, shards_of, with_digests


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
