"""What a session saves on each rank, as typed records. Their names on disk are those of the format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from resume_adapters.core.dataloader.progress import LoaderPosition
from resume_adapters.core.observed.when import ObservedLeaf
from resume_adapters.core.session.settings import LaunchSettings
from resume_adapters.core.state import encoding
from resume_adapters.core.state.records import FRESH, Record, Stored

SHARD_DIGESTS = "shares"
"""The name on disk of :attr:`LaunchState.shard_digests`."""


@dataclass
class LoaderState(Record):
    """Where a training loader is.

    Attributes:
        position: the position of the torch loader; ``None`` where only a count of batches is known.
        consumed: batches of the training loop that are done in this pass.
        global_batch: samples in such a batch, on all ranks together; 0 where that is not known.
        samples: samples in an optimizer step.
    """

    position: Annotated[LoaderPosition | None, FRESH]
    consumed: int
    global_batch: Annotated[int, Stored("together")]
    samples: int


@dataclass
class RankState(Record):
    """What one rank saves for itself; each framework derives its own."""

    @property
    def loader_states(self) -> Sequence[LoaderState]:
        """The states of the training loaders."""
        return ()


@dataclass
class LaunchState(Record):
    """What the session adds to the state of each rank.

    Attributes:
        topology: settings that the order of the data may depend on, by the name under which a user sets them.
        invariants: settings that a resume must find unchanged, likewise.
        shard_digests: this rank's share of the digests of sharded state, by the name of the component.
        shift: optimizer steps that the run has taken beyond those of a run with today's batch size.
        ddp_buckets: for each DDP module the order in which its gradients become ready.
        settings: what the launch was given; ``None`` where the version that saved it did not look.
        observed: values that nobody has declared; ``None`` where the version that saved it did not look for them.
        resized: the shapes that training has given to tensors of the model, by name.
    """

    topology: dict[str, int]
    invariants: Annotated[dict[str, int], Stored("fixed")]
    shard_digests: Annotated[dict[str, int], Stored(SHARD_DIGESTS)]
    shift: int
    ddp_buckets: Annotated[list[list[str]], Stored("buckets")]
    observed: list[ObservedLeaf] | None = None
    settings: LaunchSettings | None = None
    resized: dict[str, list[int]] | None = None


class OrderDigest:
    """Digests the order of a pass: one object, at all saves within the pass."""

    def __init__(self) -> None:
        self._order: Any = None
        self._digest = ""

    def of(self, order: Any) -> str:
        """Return eight hexadecimal digits; none where it is not data."""
        if order is not self._order:
            self._order, self._digest = order, (encoding.digest_of(order) or "")[:8]
        return self._digest


def data_cursor(epochs: float, loaders: Sequence[LoaderState], digest: OrderDigest) -> dict[str, Any]:
    """Return, for people, where the first loader that is in the middle of a pass is."""
    known = [(each, each.position) for each in loaders if each.position is not None]
    current = next(((each, position) for each, position in known if not position.ended), known[0] if known else None)
    if current is None:
        return {"epoch": int(epochs)}
    state, position = current
    done = 0 if position.ended else state.consumed
    elastic = (position.elastic or {}).get("cursor", {})
    samples = elastic.get("consumed", done * state.global_batch) if done else 0
    order = [elastic["seed"], elastic["epoch"]] if elastic else (position.sampler or {}).get("iter")
    return {
        "epoch": int(epochs),
        "micro_batches": done,
        "samples": samples if samples or not done else None,
        "of": position.length,
        "order": digest.of(order) if done and order else None,
    }
