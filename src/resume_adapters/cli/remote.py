"""Copies of a run in an object store, for the commands."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import xxhash

from resume_adapters.cli import documents
from resume_adapters.cli.documents import Damage, Document, Verdict
from resume_adapters.cli.run_directory import STORAGE, best_by
from resume_adapters.core.checkpoint.checkpoint import CheckpointInfo
from resume_adapters.core.checkpoint.layout import CheckpointState
from resume_adapters.core.checkpoint.retention import KeepBest
from resume_adapters.core.tiers.mirrors import open_tier
from resume_adapters.core.tiers.options import Remote, is_url
from resume_adapters.core.tiers.remote import RemoteTier
from resume_adapters.core.tiers.tier import TierCheckpoint
from resume_adapters.errors import CheckpointDamaged, RunDirectoryUnusable, UnsupportedSetting


@dataclass(frozen=True)
class Place:
    """A run directory, or the URL of its copies, as it was typed."""

    text: str

    @property
    def is_url(self) -> bool:
        """Whether it is a URL."""
        return is_url(self.text)

    @property
    def path(self) -> Path:
        """The run directory."""
        return Path(self.text)

    def __str__(self) -> str:
        return self.text


def open_url(url: str) -> RemoteTier:
    """Return the copies at a URL, without claiming them.

    Raises:
        MissingFramework: obstore is not installed.
        UnsupportedSetting: it is no URL of a store.
    """
    return open_tier(Remote(url, timeout=_TIMEOUT), STORAGE, uuid.uuid4().hex)


_TIMEOUT = timedelta(minutes=1)


def checkpoints(tier: RemoteTier) -> list[TierCheckpoint]:
    """Return the checkpoints at a URL, oldest first.

    Raises:
        RunDirectoryUnusable: there is none.
    """
    found = tier.checkpoints()
    if not found:
        raise RunDirectoryUnusable(f"there is no checkpoint at {tier.label}; expected the URL that a run copies to")
    return found[::-1]


def chosen(tier: RemoteTier, names: list[str]) -> list[TierCheckpoint]:
    """Return some checkpoints at a URL by name or step, the newest of each; all of them where nothing is named.

    Raises:
        UnsupportedSetting: there is none of that name or step.
    """
    found = checkpoints(tier)
    if not names:
        return found
    by_name = {key: each for each in found for key in (each.name, str(each.manifest.step))}
    missing = [name for name in names if name not in by_name]
    if missing:
        known = ", ".join(each.name for each in found)
        raise UnsupportedSetting(f"there is no checkpoint {missing[0]} at {tier.label}; it holds {known}")
    return [by_name[name] for name in names]


def rows(tier: RemoteTier) -> list[CheckpointInfo]:
    """Return the checkpoints at a URL as a listing has them; one whose files lack their sizes is damaged."""
    found = []
    for each in checkpoints(tier):
        missing = tier.missing(each)
        state = CheckpointState.COMMITTED if missing is None else CheckpointState.DAMAGED
        manifest = each.manifest if missing is None else None
        found.append(CheckpointInfo(Path(each.name), state, each.manifest.step, manifest, missing or ""))
    return found


def listing(url: str, wanted: KeepBest | None = None) -> Document:
    """Describe the checkpoints at a URL, oldest first, as those of a run directory are.

    Args:
        url: the URL.
        wanted: the metric by which one is marked as the best.

    Raises:
        UnsupportedSetting: no checkpoint has that metric.
    """
    found = rows(open_url(url))
    committed = [row for row in found if row.manifest is not None]
    newest = committed[-1] if committed else None
    best = best_by(wanted, found, url) if wanted is not None else None
    facts = [{"anchor": row is newest, "best": row.path.name == best} for row in found]
    marks = [[mark for mark, holds in each.items() if holds] for each in facts]
    return {"run_directory": url, "checkpoints": list(map(documents.checkpoint, found, marks))}


def status(url: str) -> Document:
    """Describe what is at a URL, and which start has claimed it."""
    tier = open_url(url)
    found = rows(tier)
    committed = [row for row in found if row.manifest is not None]
    generation, owner = tier.owner()
    return {
        "run_directory": url,
        "checkpoints": len(found),
        "bytes": sum(row.manifest.bytes for row in committed if row.manifest is not None),
        "resumes_from": documents.checkpoint(committed[-1], ["anchor"]) if committed else None,
        "generation": generation,
        "owner": owner,
        "damaged": [row.path.name for row in found if row.manifest is None],
    }


def verify(tier: RemoteTier, found: TierCheckpoint) -> Verdict:
    """Read every file of a copy and compare it with the manifest's digest."""
    damage = []
    for entry in found.manifest.files:
        hasher = xxhash.xxh3_128()
        try:
            for piece in tier.read(found, entry):
                hasher.update(piece)
        except CheckpointDamaged as error:
            damage.append(Damage(entry.path, str(error)))
            continue
        if hasher.hexdigest() != entry.digest:
            reason = f"{entry.path} has the digest {hasher.hexdigest()}, its manifest says {entry.digest}"
            damage.append(Damage(entry.path, f"{reason}: its content has changed"))
    verdict = "damaged" if damage else "valid"
    return Verdict(found.name, verdict, len(found.manifest.files), found.manifest.bytes, tuple(damage))
