"""The tier in an object store: copies of committed checkpoints, and which start may add to them.

Below the URL of a run there is::

    checkpoint-500/@00000003-9f1c20aa-18c2a6b1f40/<files of the framework>
                                                 /resume/<files of this package>
                                                 /resume/manifest.json      last: it makes the checkpoint exist
    .resume/claims/00000003                      a start has taken the URL over
    .resume/aside/00000003-400                   of earlier starts, nothing later than step 400 is resumed from

The directory ``@GENERATION-TOKEN-TIME`` is one save of one start. So no two jobs write the same key, and nothing is
ever overwritten. A store lists what it has; where its listing lags behind, a copy is tried again until it does not.

What a store returns is not trusted: somebody else may have written it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import xxhash

from resume_adapters.core.checkpoint.layout import EXTRAS, LONGEST_NAME, MANIFEST, locate
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, decode_manifest, encode_manifest
from resume_adapters.core.checkpoint.retention import Candidate, Policy, plan_retention
from resume_adapters.core.log import logger
from resume_adapters.core.run_directory.control import next_generation
from resume_adapters.core.storage.base import Bytes, Storage, read_pieces
from resume_adapters.core.tiers.hub import HubStore
from resume_adapters.core.tiers.object_store import ObjectStore
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, FencedOff, FormatTooNew, TierUnavailable, UnsupportedSetting

CLAIMS = ".resume/claims/"

Store = ObjectStore | HubStore

_MARKER = f"/{EXTRAS}/{MANIFEST}"

_PLACE = re.compile(rf"(([^/]+)/@\d{{8,}}-[0-9a-f]+-[0-9a-f]+){re.escape(_MARKER)}")
"""The key of a manifest: where the checkpoint is, and its name."""

_NAME = re.compile(r"(checkpoint[-_]|step-|global_step)\d+|(?!\.)[^/\x00-\x1f\x7f]+\.ckpt")
"""The names that the frameworks give to checkpoints. Under another one a store could write anywhere."""

_CLAIM = re.compile(rf"{re.escape(CLAIMS)}(\d{{1,12}})")
"""The key of a claim. No run has more starts; and a manifest could not be read again whose generation does not fit."""

_LARGEST_MANIFEST, _LONGEST_CLAIM = 64 << 20, 4096
"""Bytes that are read of what should be a manifest, and of what should be a line of text."""

_ASIDE = re.compile(r"\.resume/aside/(\d{1,18})-(-?\d{1,18})")


def place_of(name: str, generation: int, token: str, written: float) -> str:
    """Return where a save goes."""
    return f"{name}/@{generation:08d}-{token}-{round(written * 1000):x}"


class Claims:
    """The claims on one URL: a later start locks an earlier one out, on whatever machine it runs.

    A start creates an object with the next number. The store must refuse to create what exists, so that two starts
    never get one number; some accept that condition and overwrite, so each is asked.

    Args:
        store: the store.
        owner: describes this start, for people; no other start has the same words.

    Attributes:
        generation: what this start has claimed; 0 if it has claimed nothing yet.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self.generation = 0
        self._store = store
        self._owner = owner

    def take(self, after: int) -> int:
        """Claim the URL: from now on, earlier starts add nothing to it.

        Args:
            after: the highest generation that is known elsewhere.

        Returns:
            The generation of this start: higher than ``after`` and than any that has claimed the URL.

        Raises:
            TierUnavailable: the store does not answer.
            UnsupportedSetting: it overwrites what exists.
            RunDirectoryUnusable: somebody has claimed it as no start can.
        """
        newest = self._newest()
        generation = next_generation(max(after, newest), f"{self._store.label}/{CLAIMS}{newest}")
        while not self._create(generation):
            generation += 1
        return generation

    def take_late(self, generation: int) -> None:
        """Claim a generation that this start has already, because the store did not answer at its begin.

        Raises:
            FencedOff: another start has claimed it or a later one meanwhile.
        """
        newest = max(self._newest(), generation)
        if not self._create(newest):
            raise self._fenced_off(generation, newest)

    def _create(self, generation: int) -> bool:
        """Claim a generation; return whether it is this start's now."""
        key, mine = f"{CLAIMS}{generation:08d}", self._owner.encode()
        try:
            self._store.create(key, mine)
        except FileExistsError:
            # A request that was tried again may have met its own first attempt.
            if self._owner_of(generation) != self._owner:
                return False
        else:
            self._require_refused(key, mine)
        self.generation = generation
        return True

    def _require_refused(self, key: str, content: bytes) -> None:
        """Refuse a store that lets create what was just created.

        Raises:
            UnsupportedSetting: it does.
        """
        try:
            self._store.create(key, content)
        except FileExistsError:
            return
        raise UnsupportedSetting(
            f"{self._store.label} overwrites what exists where it is asked to create it only (If-None-Match: *), so "
            "two jobs with one mirror could not know of each other; expected a store that refuses: use another one, or "
            "a later version of its server"
        )

    def _newest(self) -> int:
        claims = map(_CLAIM.fullmatch, self._store.list(CLAIMS))
        return max((int(each[1]) for each in claims if each is not None), default=0)

    def require_owned(self) -> None:
        """Check that no later start has claimed the URL, if this one has.

        Raises:
            FencedOff: one has.
        """
        newest = self._newest()
        if 0 < self.generation < newest:
            raise self._fenced_off(self.generation, newest)

    def owner(self) -> tuple[int, str]:
        """Return the generation that owns the URL, and who that is; zero and nothing if nobody has claimed it."""
        newest = self._newest()
        return newest, self._owner_of(newest) if newest else ""

    def _owner_of(self, generation: int) -> str:
        try:
            return self._store.get(f"{CLAIMS}{generation:08d}", _LONGEST_CLAIM).decode(errors="replace")
        except (FileNotFoundError, CheckpointDamaged):  # somebody has removed or replaced it meanwhile
            return "unknown"

    def _fenced_off(self, generation: int, newest: int) -> FencedOff:
        return FencedOff(
            f"this process is start {generation} of {self._store.label}, which start {newest} "
            f"({self._owner_of(newest)}) owns now: nothing more is saved from here. Two jobs were started with one "
            "mirror; the later one continues"
        )


class RemoteTier:
    """A :class:`~resume_adapters.core.tiers.tier.Tier` in an object store.

    One start of a run uses it, from one thread at a time. Every rank copies the files that it answers for; the leader
    of the run directory does the rest. What has raised :class:`TierUnavailable` may be called again.

    Args:
        store: the objects below the URL of the run.
        storage: the file operations of the run directory.
        owner: describes this start, for people; no other start has the same words.

    Attributes:
        claims: which start may add to it.
        unreadable: the places that :meth:`checkpoints` has found whose manifests cannot be used.
    """

    def __init__(self, store: Store, storage: Storage, owner: str) -> None:
        self.claims = Claims(store, owner)
        self._store = store
        self._storage = storage
        self._manifests: dict[str, Manifest] = {}
        self.unreadable: list[str] = []

    @property
    def label(self) -> str:
        return self._store.label

    def set_aside(self, after: int, before: int) -> None:
        if not self.claims.generation:
            raise TierUnavailable(f"{self.label} did not answer when this start began: launch the same command again")
        self._store.put(f".resume/aside/{before:08d}-{after}", b"")

    def checkpoints(self) -> list[TierCheckpoint]:
        listed = self._store.list()
        aside = [(int(each[1]), int(each[2])) for key in listed if (each := _ASIDE.fullmatch(key)) is not None]
        found = []
        for key in sorted(listed):
            parts = _PLACE.fullmatch(key)
            manifest = None if parts is None else self._manifest(parts[1], parts[2])
            if parts is not None and manifest is not None and not _is_aside(manifest, aside):
                found.append(TierCheckpoint(parts[1], parts[2], manifest))
        return sorted(found, key=lambda each: each.identity, reverse=True)

    def _manifest(self, place: str, name: str) -> Manifest | None:
        """Return the manifest at a place, which is read once; ``None`` where it is gone, or cannot be used."""
        if place in self._manifests:
            return self._manifests[place]
        try:
            if _NAME.fullmatch(name) is None or len(os.fsencode(name)) > LONGEST_NAME:
                raise CheckpointDamaged(f"{name!r} is no name that a framework gives to a checkpoint")
            self._manifests[place] = decode_manifest(self._store.get(place + _MARKER, _LARGEST_MANIFEST))
        except FileNotFoundError:  # retention has removed it meanwhile
            return None
        except (CheckpointDamaged, FormatTooNew) as error:
            if place not in self.unreadable:
                logger.warning("%s/%s is not used: %s", self.label, place, error)
                self.unreadable.append(place)
            return None
        return self._manifests[place]

    def copy(
        self,
        place: str,
        checkpoint: Path,
        entries: Iterable[FileEntry],
        require_wanted: Callable[[], object] = bool,
    ) -> None:
        """Copy files of a committed checkpoint; what an earlier call has copied is not copied again.

        Args:
            place: where to.
            checkpoint: where they are.
            entries: those that this rank answers for.
            require_wanted: is called again and again, and raises where no more is to be copied.

        Raises:
            CheckpointDamaged: a file is no longer what the manifest says: it was pruned, or its name saved again.
        """
        there = self._store.list(f"{place}/")
        for entry in entries:
            if there.get(key := f"{place}/{entry.path}") != entry.bytes:
                file = locate(self._storage, checkpoint, entry.path)
                self._store.put_pieces(key, self._content(file, entry, require_wanted), entry.bytes, file)

    def flush(self) -> None:
        """Store what :meth:`copy` has copied; :meth:`publish` does it with the manifest."""
        self._store.flush()

    def _content(self, file: Path, entry: FileEntry, require_wanted: Callable[[], object]) -> Iterator[bytes]:
        """Yield the content of a file, and raise behind it where it is not what the manifest says: it is not stored."""
        hasher, left = xxhash.xxh3_128(), entry.bytes
        require_wanted()
        try:
            for piece in read_pieces(self._storage, file):
                require_wanted()
                hasher.update(piece)
                left -= len(piece)
                if left < 0:
                    break
                yield piece
        except TierUnavailable:
            raise
        except OSError as error:
            raise CheckpointDamaged(
                f"{entry.path} cannot be read ({error.strerror}): it is not copied", path=file
            ) from error
        if left or hasher.hexdigest() != entry.digest:
            raise CheckpointDamaged(f"{entry.path} is no longer what its manifest says: it is not copied", path=file)

    def commit(self, found: TierCheckpoint, generation: int) -> None:
        """Check that all files of a checkpoint are there, and write its manifest: from then on it is on the tier.

        Args:
            found: the checkpoint; an earlier start may have saved it.
            generation: of this start, which claims the tier with it where that has failed at its begin.

        Raises:
            FencedOff: a later start has claimed the tier.
        """
        if (missing := self.missing(found)) is not None:
            raise TierUnavailable(f"{self.label}/{missing} after it was copied: it is copied again")
        if not self.claims.generation:
            self.claims.take_late(generation)
        self.claims.require_owned()
        self.publish(found)

    def missing(self, found: TierCheckpoint) -> str | None:
        """Return what is wrong with the sizes of a checkpoint's files; ``None`` if nothing is."""
        there = self.sizes(found)
        for entry in found.manifest.files:
            if there.get(entry.path) != entry.bytes:
                has = there.get(entry.path, "no")
                return f"{found.place}/{entry.path} has {has} bytes, its manifest says {entry.bytes}"
        return None

    def sizes(self, found: TierCheckpoint) -> dict[str, int]:
        listed = self._store.list(f"{found.place}/")
        return {key.removeprefix(f"{found.place}/"): size for key, size in listed.items()}

    def publish(self, found: TierCheckpoint) -> None:
        """Write the manifest of a checkpoint of which all files are there."""
        self._store.put(found.place + _MARKER, encode_manifest(found.manifest))
        self._manifests[found.place] = found.manifest

    def read(self, found: TierCheckpoint, entry: FileEntry) -> Iterator[Bytes]:
        return self._store.get_pieces(f"{found.place}/{entry.path}", entry.bytes)

    def prune(self, keep: Policy, *, now: float, best: str | None) -> None:
        """Remove the checkpoints that a policy does not keep.

        Args:
            keep: the policy.
            now: seconds since 1970.
            best: name of the best checkpoint.

        Raises:
            FencedOff: a later start has claimed the tier.
        """
        found = self.checkpoints()
        newest: dict[str, str] = {}
        for each in found:
            newest.setdefault(each.name, each.place)
        candidates = [
            Candidate.of(each.place, each.manifest, superseded=newest[each.name] != each.place) for each in found
        ]
        anchor = found[0].place if found else None
        plan = plan_retention(candidates, keep, now=now, anchor=anchor, best=newest.get(best or ""))
        if plan.remove:
            self.claims.require_owned()  # listing them may have taken minutes
        for each in found:
            if each.place in plan.remove:
                self._remove(each.place)

    def _remove(self, place: str) -> None:
        """Remove a checkpoint: the manifest first, then the files."""
        marker = place + _MARKER
        self._store.discard([marker, *sorted({*self._store.list(f"{place}/")} - {marker})])
        self._manifests.pop(place, None)


def _is_aside(manifest: Manifest, aside: Sequence[tuple[int, int]]) -> bool:
    return any(manifest.generation < generation and manifest.step > step for generation, step in aside)
