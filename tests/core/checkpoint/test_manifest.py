"""The manifest: what is written is read, and nothing else is."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from resume_adapters.core.checkpoint.manifest import (
    FORMAT,
    FileEntry,
    Manifest,
    PartEntry,
    decode_manifest,
    encode_manifest,
    finite_metrics,
)
from resume_adapters.errors import CheckpointDamaged, FormatTooNew

numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text("abcXYZ019-_. é", min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))
entries = st.builds(
    FileEntry,
    path=st.lists(names, min_size=1, max_size=3).map("/".join),
    bytes=st.integers(0, 2**48),
    digest=st.text("0123456789abcdef", min_size=32, max_size=32),
    rank=st.integers(0, 4096),
)


def are_apart(files: list[FileEntry]) -> bool:
    """Return whether no file is where another one is, or has its directory."""
    paths = [each.path for each in files]
    return len({*paths}) == len(paths) and not any(one.startswith(f"{other}/") for one in paths for other in paths)


documents = st.builds(
    Manifest,
    step=st.integers(0, 2**62),
    epoch=st.floats(0, 2**53),
    world_size=st.integers(1, 4096),
    generation=st.integers(1, 2**31),
    written=st.floats(0, 253_402_300_799),
    reason=texts,
    files=st.lists(entries, max_size=4).filter(are_apart).map(tuple),
    parts=st.lists(st.builds(PartEntry, texts, texts, texts), max_size=3).map(tuple),
    metrics=st.dictionaries(texts, st.none() | numbers, max_size=3),
    architecture=st.none() | texts,
    cursor=st.dictionaries(texts, st.integers(-(2**62), 2**62) | texts, max_size=3),
    best=st.none() | texts,
)


def small(**fields: Any) -> Manifest:
    known = {"step": 7, "epoch": 0.5, "world_size": 1, "generation": 1, "written": 1.5, "reason": "scheduled"}
    return Manifest(**{**known, "files": (FileEntry("model.bin", 3, "0" * 32),), **fields})


def signed(record: dict[str, Any]) -> bytes:
    """Return a document with a right digest, whatever its record says."""
    content = msgspec.json.encode(record)
    return msgspec.json.encode({"digest": xxhash.xxh3_128_hexdigest(content), "manifest": msgspec.Raw(content)})


@given(documents)
def test_what_is_written_is_read(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_every_single_flipped_bit_is_found() -> None:
    document = encode_manifest(small(metrics={"eval_loss": 0.25}, parts=(PartEntry("rng", "core"),)))
    for bit in range(8 * len(document)):
        flipped = bytearray(document)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointDamaged):
            decode_manifest(bytes(flipped))


def test_every_shorter_document_is_found() -> None:
    document = encode_manifest(small())
    for length in range(len(document) - 1):  # the last byte is the newline
        with pytest.raises(CheckpointDamaged):
            decode_manifest(document[:length])


def test_a_newer_format_is_refused_with_what_to_do_even_if_its_fields_are_unknown() -> None:
    with pytest.raises(FormatTooNew, match=f"format {FORMAT + 1}.*reads up to {FORMAT}.*upgrade"):
        decode_manifest(signed({"format": FORMAT + 1, "shards": []}))


def test_a_field_of_a_later_version_with_the_same_format_is_ignored() -> None:
    record = msgspec.json.decode(msgspec.json.encode(small()))
    assert decode_manifest(signed({**record, "novelty": 1})) == small()


def test_a_missing_or_mistyped_field_is_damage() -> None:
    record = msgspec.json.decode(msgspec.json.encode(small()))
    for name in ("step", "files", "format", "epoch"):
        with pytest.raises(CheckpointDamaged):
            decode_manifest(signed({key: value for key, value in record.items() if key != name}))
        with pytest.raises(CheckpointDamaged):
            decode_manifest(signed({**record, name: {"not": "this"}}))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "..", "", "a/..", "a\0b"])
def test_a_path_that_leaves_the_checkpoint_is_refused(path: str) -> None:
    with pytest.raises(CheckpointDamaged, match="outside the checkpoint"):
        decode_manifest(encode_manifest(small(files=(FileEntry(path, 3, "0" * 32),))))


def test_metrics_keep_their_numbers_and_say_none_for_what_is_not_finite() -> None:
    found = finite_metrics(
        {
            "loss": 0.5,
            "steps": 3,
            "nan": math.nan,
            "inf": -math.inf,
            "f32": np.float32(0.25),
            "f32nan": np.float32("nan"),
            "text": "no number",
        }
    )
    assert found == {"loss": 0.5, "steps": 3.0, "nan": None, "inf": None, "f32": 0.25, "f32nan": None}
    assert decode_manifest(encode_manifest(small(metrics=found))).metrics == found


@pytest.mark.parametrize("field", ["epoch", "written", "step", "generation", "world_size"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1, 1 << 63])
def test_a_manifest_that_nobody_could_read_is_not_written(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        encode_manifest(small(**{field: value}))


def test_the_files_of_a_manifest_are_bounded() -> None:
    files = tuple(FileEntry(f"{number}", 0, "") for number in range((1 << 18) + 1))
    with pytest.raises(ValueError, match="files"):
        encode_manifest(small(files=files))
    with pytest.raises(CheckpointDamaged, match="files"):
        decode_manifest(signed(msgspec.to_builtins(small(files=files))))


def test_its_size_is_the_sum_of_its_files() -> None:
    assert small(files=(FileEntry("a", 3, ""), FileEntry("b", 4, ""))).bytes == 7
