"""The record that makes a checkpoint committed, and its JSON form. Pure: no clock, no disk.

On disk a manifest is an envelope of two fields: the record itself and the digest of the record's bytes, so that one
flipped bit in a manifest is found like one in any other file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Annotated, Any

import msgspec
import xxhash

from resume_adapters.errors import CheckpointDamaged, FormatTooNew

FORMAT = 2
"""The newest version of the on-disk format that this package reads: that of weights alone. All else has version 1, so
that earlier releases resume from it, and refuse what they would take for a checkpoint without an optimizer."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""What every reader of a document can add one to."""

Time = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]
"""From 1970 to the year 9999: no date can be made of another one."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint, as it was when the checkpoint was committed.

    Attributes:
        path: relative to the checkpoint, with forward slashes.
        bytes: size of the file.
        digest: XXH3-128 of the content, 32 hexadecimal digits.
        rank: the rank that wrote it.
    """

    path: str
    bytes: Count
    digest: str
    rank: Count = 0


class PartEntry(msgspec.Struct, frozen=True):
    """One part of the full state: what it is called, who saves it, and what losing it costs.

    Attributes:
        name: the part, for example ``"rng"``.
        by: ``"framework"``, ``"core"``, or ``"missing"``.
        note: the seam it goes through, or for a missing part what the next run will do without it.
    """

    name: str
    by: str
    note: str = ""


class Ancestry(msgspec.Struct, frozen=True):
    """The checkpoint of another run with which a run has begun.

    Attributes:
        run: the run directory of the other.
        checkpoint: its name there.
        step: its optimizer steps.
        taken: the parts of the state that are its.
        fresh: the parts that began as the first launch of this run had made them.
    """

    run: str
    checkpoint: str
    step: Count
    taken: tuple[str, ...]
    fresh: tuple[str, ...]

    def __str__(self) -> str:
        taken, fresh = ", ".join(self.taken), ", ".join(self.fresh)
        return f"{self.run}/{self.checkpoint} (step {self.step}): {taken}; fresh: {fresh}"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a committed checkpoint contains.

    Attributes:
        format: version of the on-disk format.
        step: optimizer steps completed.
        epoch: epochs completed, with the fraction of the running one.
        world_size: number of ranks that wrote it.
        ranks: those whose files are in this directory, where each node has a directory of its own; else ``None``: all.
        generation: which start of the run directory wrote it.
        written: seconds since 1970 (UTC).
        reason: ``"scheduled"``, ``"best"``, ``"finished"`` or the stop's reason.
        metrics: last evaluation, by name; ``None`` where the value was not a finite number.
        files: every file, with size and digest.
        parts: every part of the state, captured or missing.
        architecture: digest of the names, shapes and dtypes of the model's tensors.
        cursor: where in the data the run is, in words that a person can read.
        best: name of the best checkpoint of the run so far, where the run tracks one; no policy removes it.
        package: version of resume-adapters that wrote it.
        framework: framework and version, for example ``"transformers 5.23.0"``.
        weights_only: all but the framework's files of weights was removed; nothing resumes from it.
        ancestry: the checkpoint of another run with which this run has begun; ``None`` where it began by itself.
    """

    format: int = 1
    step: Count
    epoch: Annotated[float, msgspec.Meta(ge=0, le=1 << 53)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    generation: Count
    written: Time
    reason: str
    files: Annotated[tuple[FileEntry, ...], msgspec.Meta(max_length=1 << 18)]
    parts: tuple[PartEntry, ...] = ()
    metrics: dict[str, float | None] = {}
    architecture: str | None = None
    cursor: dict[str, Any] = {}
    best: str | None = None
    ranks: tuple[Count, ...] | None = None
    package: str = ""
    framework: str = ""
    weights_only: bool = False
    ancestry: Ancestry | None = None

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.bytes for entry in self.files)


class _Envelope(msgspec.Struct):
    digest: str
    manifest: msgspec.Raw


class _FormatOnly(msgspec.Struct):
    format: int


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the JSON document of a manifest.

    Raises:
        ValueError: a number of it is out of bounds, or it has too many files: nobody could read the document.
        CheckpointDamaged: nobody could read it for one of its paths.
    """
    _require_paths(manifest)
    record = msgspec.json.encode(manifest)
    try:
        _decode_record(record)
    except msgspec.ValidationError as error:
        raise ValueError(f"no start could read this manifest again: {error}") from error
    envelope = _Envelope(digest=xxhash.xxh3_128_hexdigest(record), manifest=msgspec.Raw(record))
    return msgspec.json.encode(envelope) + b"\n"


# Made here, once: msgspec crashes where two threads are the first to decode the same class.
_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_format = msgspec.json.Decoder(_FormatOnly).decode
_decode_record = msgspec.json.Decoder(Manifest).decode


def decode_manifest(document: bytes) -> Manifest:
    """Read the JSON document of a manifest.

    Raises:
        CheckpointDamaged: the document is not a manifest, fails its digest, or names a file outside the checkpoint.
        FormatTooNew: it was written by a later format.
    """
    try:
        envelope = _decode_envelope(document)
        record = bytes(envelope.manifest)
        if xxhash.xxh3_128_hexdigest(record) != envelope.digest:
            raise CheckpointDamaged("manifest.json fails its own digest")
        written_by = _decode_format(record).format
        if written_by > FORMAT:
            raise FormatTooNew(
                f"the manifest has format {written_by}, this version of resume-adapters reads up to {FORMAT}: "
                "upgrade resume-adapters to resume from it"
            )
        manifest = _decode_record(record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointDamaged(f"manifest.json is not a manifest ({len(document)} bytes): {error}") from error
    _require_paths(manifest)
    return manifest


_LONGEST_NAME, _LONGEST_PATH = 255, 1_000
"""Bytes of a file's name, and of its path in a checkpoint, at most: what can be written on any machine."""


_MOST_BYTES = 1 << 50
"""Of all files of a checkpoint: no file system that can be had today holds two of them."""


def _require_paths(manifest: Manifest) -> None:
    """Refuse files that no directory can have side by side, or that another machine could not write.

    Raises:
        CheckpointDamaged: naming the path.
    """
    if manifest.bytes > _MOST_BYTES:
        raise CheckpointDamaged(f"the manifest names files of {manifest.bytes:,} bytes; expected at most 2^50")
    names, directories = {entry.path for entry in manifest.files}, {""}
    if len(names) < len(manifest.files):
        raise CheckpointDamaged(f"the manifest names {len(names)} files in {len(manifest.files)} entries")
    for path in names:
        require_inside(path, "the manifest")
        parts = path.split("/")
        if "" in parts or "." in parts:
            raise CheckpointDamaged(f"the manifest names {path[:60]!r}, which is not the path of a file")
        if len(path) > _LONGEST_NAME // 4 and _is_too_long(parts):  # a character has four bytes at most
            raise CheckpointDamaged(f"the manifest names {path[:60]!r}..., which is too long to be written")
        while (path := path.rpartition("/")[0]) not in directories:
            directories.add(path)
    if both := sorted(names & directories):
        raise CheckpointDamaged(f"the manifest names {both[0][:60]!r} and files in it: one cannot be beside the other")


def _is_too_long(parts: Sequence[str]) -> bool:
    lengths = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    return max(lengths) > _LONGEST_NAME or sum(lengths) + len(lengths) > _LONGEST_PATH


def require_inside(path: str, named_by: str) -> None:
    """Refuse a file path that leaves the checkpoint.

    Args:
        path: the path.
        named_by: the file that names it, for the error.

    Raises:
        CheckpointDamaged: the path is absolute, contains ``..``, or is empty.
    """
    if path.startswith("/") or path == "" or "\0" in path or (".." in path and ".." in path.split("/")):
        raise CheckpointDamaged(f"{named_by} names {path!r}, which is outside the checkpoint")


def finite_metrics(metrics: dict[str, Any]) -> dict[str, float | None]:
    """Keep the numbers of an evaluation, with ``None`` for those that are not finite (JSON has no NaN)."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def describe_cursor(cursor: Mapping[str, Any]) -> str:
    """Return the cursor of a manifest in words, for example ``epoch 3, 51,200 of 100,000 samples, order 7f3a90c1``."""
    counts = {name: value for name, value in cursor.items() if isinstance(value, int)}  # somebody may have forged it
    words = [f"epoch {counts['epoch']}"] if "epoch" in counts else []
    if "samples" in counts:
        words.append(f"{counts['samples']:,}" + (f" of {counts['of']:,}" if counts.get("of") else "") + " samples")
    elif "micro_batches" in counts:
        words.append(f"{counts['micro_batches']:,} batches")
    if cursor.get("order"):
        words.append(f"order {cursor['order']}")
    return ", ".join(words)
