"""The memory of other nodes: each node holds a copy of what one other has in memory, and gives it back after a loss.

The first rank of each node serves the node's memory on one port, for reading only. After each save to memory it copies
what its partner has saved, on a thread: the newest two fit, so there is always a whole save of all nodes, and a copy of
each node's part on another one. A machine that was replaced asks the others what they hold of its ranks. What a rank
has saved is for that rank alone: the manifest of each part names the ranks, and a node takes only its own.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from resume_adapters.core.checkpoint.layout import CONTROL
from resume_adapters.core.checkpoint.manifest import FileEntry, decode_manifest, encode_manifest
from resume_adapters.core.checkpoint.remove import Fence
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.status import MirrorStatus
from resume_adapters.core.storage.base import Storage
from resume_adapters.core.tiers.copying import write_copy
from resume_adapters.core.tiers.held import HeldCheckpoints
from resume_adapters.core.tiers.serving import GOODBYE, THREAD_NAME, Address, Client, Server, own_addresses
from resume_adapters.core.tiers.tier import SHORTAGES, TierCheckpoint, is_one_file
from resume_adapters.core.tiers.wire import Content, Request
from resume_adapters.errors import CheckpointDamaged, FencedOff, TierUnavailable

# ---- What a resume reads


class PeerSource:
    """What other nodes hold of this one's ranks: a :class:`~resume_adapters.core.tiers.tier.Source`.

    Args:
        client: reads from them.
        offers: what they have, each after who has it and in which directory.
        members: the ranks of this node.
    """

    def __init__(self, client: Client, offers: Sequence[tuple[int, str, TierCheckpoint]], members: tuple[int, ...]):
        self._client = client
        self._places = {
            f"rank-{holder}/{root}/{each.name}": (holder, root, each)
            for holder, root, each in offers
            if each.manifest.ranks == members
        }

    @property
    def label(self) -> str:
        return "the memory of other nodes"

    def checkpoints(self) -> list[TierCheckpoint]:
        found = [TierCheckpoint(place, each.name, each.manifest) for place, (_, _, each) in self._places.items()]
        return sorted(found, key=lambda each: each.identity, reverse=True)

    @property
    def unreadable(self) -> list[str]:
        return []

    def read(self, found: TierCheckpoint, entry: FileEntry) -> Iterator[bytes]:
        holder, root, _ = self._places[found.place]
        try:
            yield from self._client.read(Request(holder, root, found.name, entry.path))
        except TierUnavailable as error:  # another checkpoint may be there
            raise CheckpointDamaged(f"{entry.path} could not be fetched: {error.message}") from error


# ---- The copy of another node


class Progress(NamedTuple):
    """How far the copy of another node is.

    Attributes:
        step: of the newest whole one.
        is_behind: a newer one is being copied.
        problem: why that has failed; empty if nothing is wrong.
    """

    step: int | None = None
    is_behind: bool = False
    problem: str = ""


class Replica:
    """Copies what another node has in memory, on a thread: the newest that is due.

    Args:
        held: where the copies are.
        former: returns where those are that earlier starts have made of other nodes.
        client: reads from the node.
        holder: the node, by its first rank.
    """

    def __init__(
        self, held: HeldCheckpoints, former: Callable[[], list[HeldCheckpoints]], client: Client, holder: int
    ) -> None:
        self._held = held
        self._former = former
        self._client = client
        self._holder = holder
        self._changed = threading.Condition()
        self._due: str | None = None
        self._is_closing = False
        self._progress = Progress()
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return self._progress

    def submit(self, name: str) -> None:
        """Copy a checkpoint that the node has committed in its memory."""
        with self._changed:
            self._due = name
            self._progress = self._progress._replace(is_behind=True)
            self._changed.notify()

    def close(self) -> None:
        """End the thread; a copy that is under way is given up."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(GOODBYE)

    def _work(self) -> None:
        try:
            while (name := self._next()) is not None:
                problem, step = "", self._progress.step
                try:
                    step = self._copy(name)
                except FencedOff:
                    raise
                except SHORTAGES as error:
                    problem = str(error) or type(error).__name__
                with self._changed:
                    self._progress = Progress(step, self._due is not None, problem)
        except FencedOff:  # the run learns of it at its own next save
            pass
        except BaseException as error:  # of any kind: else saves to memory would wait for this copy without a word
            with self._changed:
                problem = f"the copies have ended: {type(error).__name__}: {error}"
                self._progress = self._progress._replace(problem=problem)
            raise

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._due is not None or self._is_closing)
            name, self._due = self._due, None
            return None if self._is_closing else name

    def _copy(self, name: str) -> int:
        manifest = decode_manifest(b"".join(self._read(Request(self._holder, "", name))))
        self._held.keep_newest()
        if self._progress.step is not None:  # every node has a copy that was made by this start
            for each in self._former():
                each.remove_after(-1)
        pending = self._held.pending(SINGLE_PROCESS, name, manifest.step, is_file=is_one_file(name, manifest))
        try:
            write_copy(
                pending,
                manifest,
                manifest.files,
                lambda entry: self._read(Request(self._holder, "", name, entry.path)),
                f"the memory of rank {self._holder}",
            )
            pending.complete()
        finally:
            pending.release()
        return manifest.step

    def _read(self, request: Request) -> Iterator[bytes]:
        for piece in self._client.read(request):
            if self._is_closing:
                raise TierUnavailable("this run ends")
            yield piece


# ---- All of it


@dataclass(frozen=True)
class _Offer:
    """What a node offers to the others: its address, and its checkpoints, each with its directory and name."""

    address: Address
    documents: list[tuple[str, str, bytes]]


class Peers:
    """The other nodes of a run, as a rank of one node sees them.

    Args:
        storage: the file operations.
        directory: of this node, for the copies.
        own: what this node's ranks have saved to memory.
        fence: raises if a later start owns the run.
        clock: returns seconds since 1970.

    Attributes:
        source: what they hold of this node's ranks; known after :meth:`connect`.
    """

    def __init__(
        self, storage: Storage, directory: Path, own: HeldCheckpoints, fence: Fence, clock: Callable[[], float]
    ) -> None:
        self.source = PeerSource(Client(b"", {}), (), ())
        self._storage = storage
        self._directory = directory
        self._own = own
        self._fence = fence
        self._clock = clock
        self._server: Server | None = None
        self._replica: Replica | None = None
        self._state = MirrorStatus(tier=self.source.label)

    # ---- A start

    def connect(self, ranks: Ranks, seen: Sequence[tuple[int, ...]], environment: Mapping[str, str]) -> None:
        """Open this node's port, and learn what the other nodes hold. Every rank calls it.

        Args:
            ranks: the ranks of the run.
            seen: for each rank the ranks of its node.
            environment: the environment variables.

        Raises:
            TierUnavailable: the memory of a node cannot be read.
        """
        members, nodes = seen[ranks.rank], sorted(set(seen))
        is_leader = ranks.rank == members[0]
        token = bytes.fromhex(ranks.gather(secrets.token_hex(32))[0])
        gathered = run_on_all_ranks(
            ranks,
            lambda: self._offer(token, ranks.rank, environment) if is_leader else None,
            "offer its memory",
            lambda cause: TierUnavailable(f"the memory of this node cannot be read: {cause}"),
        )
        offers = {rank: offer for rank, offer in enumerate(gathered) if offer is not None}
        client = Client(token, {rank: offer.address for rank, offer in offers.items()})
        found = [
            (rank, root, TierCheckpoint(name, name, decode_manifest(document)))
            for rank, offer in offers.items()
            for root, name, document in offer.documents
        ]
        self.source = PeerSource(client, found, members)
        if len(nodes) == 1 and ranks.rank == 0:
            logger.warning("Memory(peers=True): all ranks are on one node, so no other one holds a copy.")
        if len(nodes) > 1 and is_leader:
            partner = nodes[(nodes.index(members) + len(nodes) // 2) % len(nodes)][0]
            mine = f"ranks-{partner:05d}"
            self._replica = Replica(self._held(mine), lambda: self._others(mine), client, partner)

    def _others(self, mine: str) -> list[HeldCheckpoints]:
        return [self._held(root) for root in self._roots() if root != mine]

    def _offer(self, token: bytes, rank: int, environment: Mapping[str, str]) -> _Offer:
        documents = [
            (root, each.name, encode_manifest(each.manifest))
            for root in ("", *self._roots())
            for each in self._held(root).checkpoints()
        ]
        try:
            self._server = Server(token, rank, self._find)
            return _Offer(Address(own_addresses(environment), self._server.port), documents)
        except OSError as error:
            logger.warning("no port can be opened for the memory of this node: %s. The training goes on.", error)
            return _Offer(Address((), 0), documents)

    def _roots(self) -> list[str]:
        if not self._storage.is_directory(self._directory):
            return []
        return sorted(entry.name for entry in self._storage.entries(self._directory))

    def _held(self, root: str) -> HeldCheckpoints:
        if not root:
            return self._own
        return HeldCheckpoints(self._storage, self._directory / root, self._fence, self._clock)

    def _find(self, request: Request) -> Content:
        """Return a file that a client asks for: one that the manifest of a committed checkpoint names, or that."""
        for held in [self._held(root) for root in ("", *self._roots()) if root == request.root]:
            for found in [each for each in held.checkpoints() if each.name == request.name]:
                if not request.path:
                    document = encode_manifest(found.manifest)
                    return Content(len(document), iter([document]))
                for entry in [each for each in found.manifest.files if each.path == request.path]:
                    return Content(entry.bytes, held.read(found, entry))
        raise CheckpointDamaged(f"{request.name}/{request.path} is not in that node's memory any more")

    def sweep(self) -> None:
        """Remove what crashed copies have left. The leader of each node calls it, and the next one."""
        for root in self._roots():
            self._storage.make_directory(self._directory / root / CONTROL)
            self._held(root).sweep()

    def remove_after(self, step: int) -> None:
        """Remove the copies of checkpoints whose step is later; -1 for all of them."""
        for root in self._roots():
            self._held(root).remove_after(step)

    # ---- While the run trains

    def submit(self, name: str) -> None:
        """Copy what the partner of this node has committed in its memory. The leader of each node calls it."""
        if self._replica is not None:
            self._replica.submit(name)

    def agree(self, ranks: Ranks) -> bool:
        """Return whether all nodes have copied what is due, or cannot. Every rank calls it.

        Args:
            ranks: the ranks of the run, on the channel of the calling thread.
        """
        gathered = ranks.gather(None if self._replica is None else self._replica.progress)
        found = [each for each in gathered if each is not None]
        had_problem = bool(self._state.problem)
        problem = next((each.problem for each in found if each.problem), "")
        is_behind = any(each.is_behind and not each.problem for each in found)
        steps = [each.step for each in found if each.step is not None]
        self._state = replace(
            self._state,
            step=min(steps) if steps and len(steps) == len(found) else None,
            behind=self._state.behind + 1 if is_behind else 0,
            problem=problem,
        )
        if problem and not had_problem and ranks.rank == 0:
            logger.warning("the nodes do not hold copies of each other's memory: %s. The training goes on.", problem)
        return not is_behind

    @property
    def state(self) -> MirrorStatus:
        """What ``status.json`` says of the copies, as of the last save to memory."""
        return self._state

    @property
    def has_partner(self) -> bool:
        """Whether this node holds the copies of another one."""
        return self._replica is not None

    @property
    def bytes(self) -> int:
        """The size of the copies on this node."""
        return sum(each.manifest.bytes for root in self._roots() for each in self._held(root).checkpoints())

    def close(self) -> None:
        """Close the port, and end the threads."""
        if self._replica is not None:
            self._replica.close()
        if self._server is not None:
            self._server.close()
        self._server = self._replica = None
