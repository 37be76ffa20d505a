"""Which checkpoint a start takes, of those in the run directory and those on the tiers: the newest that is valid.

The leaders of the run directories list the tiers, and all ranks decide alike. A save of which each node has only a part
counts where every node has its part, in its run directory or on a tier. Where each node has whole checkpoints on a disk
of its own, one that was replaced has none, and gets the newest from the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resume_adapters.core.checkpoint.catalog import Catalog
from resume_adapters.core.checkpoint.checkpoint import Checkpoint
from resume_adapters.core.checkpoint.manifest import Manifest
from resume_adapters.core.checkpoint.validity import check_digests, read_manifest
from resume_adapters.core.checkpoint.writer import send_missing
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.upkeep import format_bytes
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.core.tiers.tier import BEGIN_A_COPY, Fetch, Identity, Tier, TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, RunDirectoryUnusable, TierUnavailable

_Unusable = CheckpointDamaged | TierUnavailable
"""Why a copy cannot be used."""

OnLeaders = Callable[[Callable[[], Any], str], Mapping[int, Any]]
"""Runs work on the leaders of all run directories, and returns their results by rank, on every rank."""


@dataclass
class TierCandidates:
    """The checkpoints of a run on its tiers, as one start finds them.

    Attributes:
        tiers: what the checkpoints may be taken from; the first of those that have one is asked first.
        catalog: the checkpoints of the run directory.
        ranks: the ranks of the run.
        group: those that share the run directory.
        on_leaders: runs work on the leaders.
        fetched: name and manifest of what this rank has fetched with :meth:`bring`, and proved; ``None`` where it has
            fetched nothing, because its run directory has the checkpoint.
    """

    tiers: Sequence[Tier]
    catalog: Catalog
    ranks: Ranks
    group: StorageGroup
    on_leaders: OnLeaders
    fetched: tuple[str, Manifest] | None = field(default=None, init=False)
    _here: dict[Identity, list[tuple[int, TierCheckpoint]]] = field(default_factory=dict, init=False)

    def find(self, *, has_local: bool) -> list[Identity]:
        """Return the saves that all run directories have or can get, newest first. Every rank calls it.

        Args:
            has_local: the run directory has a checkpoint to resume from.

        Raises:
            TierUnavailable: a tier cannot be listed, and there is nothing else to resume from.
        """
        found = self.on_leaders(self._list, "list the mirror")
        problem = next((error for _, error in found.values() if error), "")
        common = set.intersection(*(set(identities) for identities, _ in found.values()))
        if problem and not has_local and not common:
            raise TierUnavailable(
                f"{problem}. There is no checkpoint in {self.catalog.directory}, and nobody knows whether one in the "
                "mirror can be used: this run does not begin from zero in its place. Launch the same command again "
                "when the store answers, or without the mirror to begin from zero"
            )
        if problem and self.ranks.rank == 0:
            logger.warning("%s. The run resumes from the checkpoints in %s.", problem, self._places(has_local))
        return sorted(common, reverse=True)

    def _places(self, has_local: bool) -> str:
        """Return where this rank has found checkpoints, for a message."""
        used = {number for copies in self._here.values() for number, _ in copies}
        local = [str(self.catalog.directory)] if has_local or not used else []
        return " and ".join([*local, *(self.tiers[number].label for number in sorted(used))])

    def _list(self) -> tuple[list[Identity], str]:
        problem = ""
        for number, tier in enumerate(self.tiers):
            try:
                for each in tier.checkpoints():
                    self._here.setdefault(each.identity, []).append((number, each))
                if tier.unreadable and not self._here:
                    problem = f"{tier.label} holds {len(tier.unreadable)} checkpoints, and no manifest can be read"
            except TierUnavailable as error:
                problem = error.message
        local = saves_here(self.catalog) if self.group.is_partial else {}
        return [*self._here, *local], problem

    def _has_whole(self, identity: Identity) -> bool:
        """Return whether this node has its part, where another may lack its own.

        Where all ranks share one directory, it has no newer one that is valid, or it would have been chosen.
        """
        return self.group.is_partial and _is_whole(self.catalog, saves_here(self.catalog).get(identity), identity)

    def _copies(self, identity: Identity) -> tuple[list[tuple[int, TierCheckpoint]], list[_Unusable]]:
        """Return the copies from which this node can take what it lacks, and why others cannot be used.

        Raises:
            RunDirectoryUnusable: it has no room for one.
        """
        usable, errors = list[tuple[int, TierCheckpoint]](), list[_Unusable]()
        for number, found in [] if self._has_whole(identity) else self._here.get(identity, []):
            tier = self.tiers[number]
            try:
                self._require_room(tier, found)
            except (CheckpointDamaged, TierUnavailable) as error:
                errors.append(error)
            else:
                usable.append((number, found))
        return usable, errors

    def _require_room(self, tier: Tier, found: TierCheckpoint) -> None:
        """Refuse a fetch that would fill the disk: no older checkpoint takes the place of one that has no room.

        Raises:
            CheckpointDamaged: a file has another size than its manifest says.
            RunDirectoryUnusable: there is no room.
        """
        sizes, directory = tier.sizes(found), self.catalog.directory
        for entry in found.manifest.files:
            if (size := sizes.get(entry.path, entry.bytes)) != entry.bytes:  # what is not listed yet may be there
                raise CheckpointDamaged(
                    f"{tier.label}/{found.place}/{entry.path} has {size} bytes, its manifest says {entry.bytes}"
                )
        needed = sum(sizes.get(entry.path, 0) for entry in found.manifest.files)
        if (free := self.catalog.storage.free_bytes(directory)) < needed:
            raise RunDirectoryUnusable(
                f"{found.name} of {tier.label} has {format_bytes(needed)}, and {directory} has {format_bytes(free)} "
                "free: free space, or remove it there to go on from an older one; then launch the same command again",
                path=directory,
            )

    def bring(self, identity: Identity, fetch: Fetch, ranks: Ranks) -> _Unusable | None:
        """Fetch a checkpoint to the run directories that lack it. Every rank calls it.

        Args:
            identity: which one.
            fetch: brings it to one run directory.
            ranks: the ranks of the run, on a channel for copies: some have nothing to fetch, and wait.

        Returns:
            Why no copy can be used, alike on all ranks; ``None`` if all have it now.

        Raises:
            RunDirectoryUnusable: a run directory has no room for it.
        """
        lacking = self.on_leaders(lambda: self._copies(identity), "look at the mirror")
        self.fetched = None

        def bring() -> list[_Unusable]:
            copies: list[tuple[int, TierCheckpoint]]
            errors: list[_Unusable]
            copies, errors = lacking[self.group.leader]
            for number, found in copies:
                if self.ranks.rank == 0:
                    logger.info("%s is fetched from %s.", identity.name, self.tiers[number].label)
                try:
                    fetch.bring(self.tiers[number], found)
                except (CheckpointDamaged, TierUnavailable) as error:
                    errors.append(error)
                else:
                    self.fetched = found.name, found.manifest
                    return []
            return errors

        errors = [each for found in run_on_all_ranks(ranks, bring, f"fetch {identity.name}") for each in found]
        return next((each for each in errors if isinstance(each, TierUnavailable)), errors[0] if errors else None)


def identity_of(checkpoint: Checkpoint | None, directory: Path) -> Identity | None:
    """Return which save a choice is; ``None`` if it is not in the run directory or not committed, or there is none."""
    if checkpoint is None or checkpoint.manifest is None or checkpoint.path.parent != directory:
        return None
    return Identity.of(checkpoint.path.name, checkpoint.manifest)


def saves_here(catalog: Catalog) -> dict[Identity, Manifest]:
    """Return the manifests of the committed checkpoints of a run directory, by which save each is."""
    found = {}
    for name in catalog.committed():
        with contextlib.suppress(CheckpointDamaged, FormatTooNew):
            manifest = read_manifest(catalog.storage, catalog.directory / name)
            found[Identity.of(name, manifest)] = manifest
    return found


def _is_whole(catalog: Catalog, manifest: Manifest | None, identity: Identity) -> bool:
    if manifest is None or manifest.weights_only:
        return False
    with contextlib.suppress(CheckpointDamaged):
        check_digests(catalog.storage, catalog.directory / identity.name, manifest.files)
        return True
    return False


def bring_to_empty_nodes(catalog: Catalog, nodes: Ranks, fetch: Fetch) -> bool:
    """Bring the newest checkpoint that all other nodes have whole to those that have none. Their leaders call it.

    Args:
        catalog: the checkpoints of this node's run directory.
        nodes: the leaders of all nodes.
        fetch: commits a copy in this node's run directory, for its leader alone.

    Returns:
        Whether some were empty, and have it now.

    Raises:
        OSError, ResumeError: this node, or another, could not read or write it.
    """
    is_empty, here = not catalog.committed(), saves_here(catalog)
    found = nodes.gather((is_empty, set(here)))
    held = [saves for is_bare, saves in found if not is_bare]
    if not held or len(held) == len(found):
        return False
    for identity in sorted(set.intersection(*held), reverse=True):
        mine = here.get(identity)
        if all(nodes.gather(is_empty or _is_whole(catalog, mine, identity))):
            sender = next(node for node, (is_bare, _) in enumerate(found) if not is_bare)
            manifest = nodes.broadcast(mine, sender)
            assert manifest is not None, "the sender has it"
            _bring(catalog, nodes, fetch, identity.name, manifest, is_sender=not is_empty)
            return True
    return False


def _bring(catalog: Catalog, nodes: Ranks, fetch: Fetch, name: str, manifest: Manifest, *, is_sender: bool) -> None:
    if is_sender:
        run_on_all_ranks(nodes, lambda: None, BEGIN_A_COPY)
        paths = {entry.path for entry in manifest.files}
        send_missing(catalog.storage, nodes, catalog.directory / name, paths)
    else:
        logger.info("%s is fetched from another node.", name)
        fetch.receive(name, manifest, nodes)
