"""The tier in an object store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from resume_adapters.core.checkpoint.layout import EXTRAS, MANIFEST
from resume_adapters.core.checkpoint.manifest import FileEntry, Manifest, decode_manifest, encode_manifest
from resume_adapters.core.log import logger
from resume_adapters.core.storage.base import Bytes, Storage
from resume_adapters.core.tiers import keys
from resume_adapters.core.tiers.claims import Claims
from resume_adapters.core.tiers.store import Store
from resume_adapters.core.tiers.tier import LocalFile, TierCheckpoint
from resume_adapters.core.tiers.transfer import download, upload
from resume_adapters.errors import CheckpointDamaged, FormatTooNew, TierUnavailable

_MARKER = f"/{EXTRAS}/{MANIFEST}"


class RemoteTier:
    """A :class:`~resume_adapters.core.tiers.tier.Tier` in an object store.

    Args:
        store: the objects below the URL of the run.
        storage: the file operations of the run directory.
        token: identifies this start; hexadecimal digits, alike on all ranks.
        owner: describes this start, for people.
    """

    def __init__(self, store: Store, storage: Storage, token: str, owner: str) -> None:
        self._store = store
        self._storage = storage
        self._claims = Claims(store, token, f"{owner}, {token}")
        self._manifests: dict[str, Manifest] = {}
        self._unreadable: set[str] = set()
        self._is_given_up = False

    @property
    def label(self) -> str:
        return self._store.label

    @property
    def note(self) -> str:
        is_honest = self._claims.is_honest
        return (
            "the store overwrites what exists, also if asked not to; it is used without relying on that"
            if is_honest is False
            else ""
        )

    def owner(self) -> tuple[int, str]:
        """Return the generation that has claimed the tier, and who that is; zero and nothing if nobody has."""
        return self._claims.owner()

    def claim(self, after: int) -> int:
        return self._claims.take(after)

    def require_owned(self) -> None:
        self._claims.require_owned()

    def set_aside(self, after: int, before: int) -> None:
        if self._claims.generation is None:
            raise TierUnavailable(f"{self.label} did not answer when this start began: launch the same command again")
        self._store.put(keys.aside_key(before, after), b"")

    def checkpoints(self) -> list[TierCheckpoint]:
        listed = self._store.list()
        aside = [each for key in listed if (each := keys.aside_in(key)) is not None]
        places = {key.removesuffix(_MARKER) for key in listed if key.endswith(_MARKER)} | self._hinted()
        found = []
        for place in sorted(places):
            name = keys.name_in(place)
            manifest = None if name is None else self._manifest(place)
            if name is not None and manifest is not None and not _is_aside(manifest, aside):
                found.append(TierCheckpoint(place, name, manifest))
        return sorted(found, key=lambda each: each.identity, reverse=True)

    def _hinted(self) -> set[str]:
        """Return the newest place as ``latest`` names it: a listing may lag behind."""
        try:
            return {self._store.get(keys.LATEST).decode(errors="replace").strip()}
        except FileNotFoundError:
            return set()

    def _manifest(self, place: str) -> Manifest | None:
        """Return the manifest at a place, which is read once; ``None`` where it is gone, or damaged."""
        if place in self._manifests:
            return self._manifests[place]
        try:
            self._manifests[place] = decode_manifest(self._store.get(place + _MARKER))
        except FileNotFoundError:  # retention has removed it meanwhile, or only the hint is left
            return None
        except (CheckpointDamaged, FormatTooNew) as error:
            if place not in self._unreadable:
                logger.warning("%s/%s is not used: %s", self.label, place, error)
            self._unreadable.add(place)
            return None
        return self._manifests[place]

    @property
    def unreadable(self) -> list[str]:
        return sorted(self._unreadable)

    def copy(self, place: str, files: Sequence[LocalFile]) -> None:
        there = self._store.list(f"{place}/")
        missing = [(key, file) for file in files if there.get(key := f"{place}/{file.entry.path}") != file.entry.bytes]
        upload(self._store, self._storage, missing, self._require_wanted)

    def give_up(self) -> None:
        self._is_given_up = True

    def _require_wanted(self) -> None:
        if self._is_given_up:
            raise TierUnavailable(f"{self.label} gets nothing more: this run ends")

    def commit(self, found: TierCheckpoint, generation: int) -> None:
        if (missing := self.missing(found)) is not None:
            raise TierUnavailable(f"{self.label}/{missing} after it was copied: it is copied again")
        if self._claims.generation is None:
            self._claims.take_late(generation)
        self.require_owned()
        self.publish(found)

    def missing(self, found: TierCheckpoint) -> str | None:
        """Return what is wrong with the sizes of a checkpoint's files; ``None`` if nothing is."""
        there = self._store.list(f"{found.place}/")
        for entry in found.manifest.files:
            key = f"{found.place}/{entry.path}"
            size = there[key] if key in there else self._store.size(key)  # a listing may lag behind
            if size != entry.bytes:
                return f"{key} has {'no' if size is None else size} bytes, its manifest says {entry.bytes}"
        return None

    def publish(self, found: TierCheckpoint) -> None:
        """Write the manifest of a checkpoint of which all files are there."""
        self._store.put(found.place + _MARKER, encode_manifest(found.manifest))
        self._manifests[found.place] = found.manifest
        self._store.put(keys.LATEST, f"{found.place}\n".encode())

    def read(self, found: TierCheckpoint, entry: FileEntry) -> Iterator[Bytes]:
        return download(self._store, f"{found.place}/{entry.path}", entry.bytes)

    def remove(self, found: TierCheckpoint) -> None:
        marker = found.place + _MARKER
        self._store.discard([marker])
        self._manifests.pop(found.place, None)
        self._store.discard(sorted({*self._store.list(f"{found.place}/")} - {marker}))


def _is_aside(manifest: Manifest, aside: Sequence[tuple[int, int]]) -> bool:
    return any(manifest.generation < generation and manifest.step > step for generation, step in aside)
