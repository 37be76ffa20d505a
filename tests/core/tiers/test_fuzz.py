"""Whatever somebody forges in a store, a start resumes from what was committed, or says what is wrong."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import xxhash

from resume_adapters import KeepLast, Remote
from resume_adapters.core.tiers import mirrors, object_store
from resume_adapters.core.tiers.object_store import ObjectStore
from resume_adapters.errors import ResumeError

import forgeries
import fuzz
import miniature
from miniature import Miniature

NUMBER = itertools.count()

CLAIMS = [
    *("0", "1", "00000003", "999999999998", "999999999999", "1" * 40, "-1", "٣", "x", "00000004/x", "1e9", "2" * 240),
    *("00000001", "00000002", "500000000000"),
]

ASIDES = ["00000009-5", "00000009--1", "99999999-400", "1-1", "999999999999999999-0", "9" * 40, "x-y", "0-" + "9" * 18]

PLACES = [
    *("@00000001-aa-0", "@00000009-aa-ff", "@999999999999-aa-0", f"@{'9' * 200}-aa-0", "@1-x-y", "@-1-aa-0", "resume"),
    *("@00000001-aa-0/more", "model.bin", f"@00000001-{'a' * 200}-0"),
]

CHECKPOINTS = [
    *("train.py", ".resume", "x.ckpt", "latest", "latest.ckpt", "checkpoint-" + "9" * 239, "checkpoint-" + "9" * 180),
    *("y" * 245 + ".ckpt", "checkpoint-٣", "notes", "checkpoint-10", "checkpoint-10.superseded", ".hidden.ckpt"),
    *(
        "x.resume.ckpt",
        "checkpoint-10.ckpt.resume",
        "manifest.json",
        "-rf.ckpt",
        "mine.ckpt",
        "CON.ckpt",
        "checkpoint-0",
    ),
]

Objects = dict[str, bytes]


def parts(key: str) -> tuple[str, str, str]:
    """Return the name of the checkpoint, the rest of the place, and the path, of an object of a checkpoint."""
    name, _, rest = key.partition("/")
    place, _, path = rest.partition("/")
    return name, place, path


class StoreDamage:
    """Mutated objects of a store.

    Args:
        objects: by their keys; they are changed.
        seed: what the mutations follow from.
        victims: what nobody may change.
    """

    def __init__(self, objects: Objects, seed: int, victims: Path) -> None:
        self.objects, self.victims, self.is_forged = objects, victims, False
        self.draw = random.Random(seed)
        self.done: list[str] = []
        for _ in range(self.draw.choice([1, 1, 2, 3])):
            mutate = self.draw.choice(MUTATIONS)
            keys = sorted(key for key in objects if "/@" in key)
            if not keys:
                break
            key = self.draw.choice(keys)
            self.done.append(f"{mutate.__name__.lstrip('_')} {key}")
            mutate(self, key)

    def _cut(self, key: str) -> None:
        self.objects[key] = self.objects[key][: self.draw.randrange(len(self.objects[key]) + 1)]

    def _grow(self, key: str) -> None:
        self.objects[key] += b"x" * self.draw.choice([1, 100, 1 << 20])

    def _flip(self, key: str) -> None:
        content = bytearray(self.objects[key] or b"\0")
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        self.objects[key] = bytes(content)

    def _lose(self, key: str) -> None:
        del self.objects[key]

    def _claim(self, key: str) -> None:
        claim = f".resume/claims/{self.draw.choice(CLAIMS)}"
        self.objects[claim] = self.draw.choice([b"", b"me", b"\xff" * 5000, b"{}"])
        self.done[-1] += f" {claim}"

    def _set_aside(self, key: str) -> None:
        aside = f".resume/aside/{self.draw.choice(ASIDES)}"
        self.objects[aside] = b""
        self.done[-1] += f" {aside}"

    def _rename(self, key: str) -> None:
        """Give a checkpoint another name, or another place."""
        name, place, _ = parts(key)
        to = (self.draw.choice(CHECKPOINTS), place) if self.draw.random() < 0.6 else (name, self.draw.choice(PLACES))
        self._move(f"{name}/{place}/", f"{to[0]}/{to[1]}/", copy=self.draw.random() < 0.5)

    def _move(self, prefix: str, to: str, *, copy: bool) -> None:
        self.is_forged = True
        self.done[-1] += f" to {to[:80]}"
        for each in [key for key in self.objects if key.startswith(prefix)]:
            self.objects[to + each.removeprefix(prefix)] = self.objects[each]
            if not copy:
                del self.objects[each]

    def _misplace(self, key: str) -> None:
        """Let a manifest name a file under an absurd path, under which it is."""
        name, place, _ = parts(key)
        record = self._record(f"{name}/{place}")
        if record is None:
            return
        entry, path = self.draw.choice(record["files"]), self.draw.choice(forgeries.NAMES)
        path = path.replace(forgeries.VICTIMS, str(self.victims))
        old = f"{name}/{place}/{entry['path']}"
        self.objects[f"{name}/{place}/{path}"] = self.objects.pop(old, b"")
        entry["path"] = path
        self.done[-1] += f" to {path[:80]!r}"
        self._sign(f"{name}/{place}", record)

    def _forge_value(self, key: str) -> None:
        kind = forgeries.kind_of(Path(key))
        if kind is None:
            return
        try:
            content, at = forgeries.forged(self.objects[key], kind, self.draw, self.victims)
        except Exception:  # it is none of that kind
            return
        self.objects[key], self.is_forged = content, True
        self.done[-1] += f" at {at!r}"
        name, place, path = parts(key)
        record = self._record(f"{name}/{place}") if path != "resume/manifest.json" else None
        if record is not None:
            self._sign(f"{name}/{place}", record)

    def _record(self, place: str) -> Any:
        try:
            record = forgeries.read_manifest(self.objects[f"{place}/resume/manifest.json"])
            return record if record["files"] and all("path" in each for each in record["files"]) else None
        except (KeyError, TypeError, ValueError, RecursionError):
            return None

    def _sign(self, place: str, record: Any) -> None:
        """Write a manifest that agrees with the objects."""
        self.is_forged = True
        for entry in record["files"]:
            content = self.objects.get(f"{place}/{entry['path']}", b"")
            entry.update(bytes=len(content), digest=xxhash.xxh3_128_hexdigest(content))
        self.objects[f"{place}/resume/manifest.json"] = forgeries.write_manifest(record)


MUTATIONS: list[Callable[[StoreDamage, str], None]] = [
    *(StoreDamage._cut, StoreDamage._grow, StoreDamage._flip, StoreDamage._lose, StoreDamage._claim),
    *(
        StoreDamage._set_aside,
        *[StoreDamage._rename] * 2,
        *[StoreDamage._misplace] * 3,
        *[StoreDamage._forge_value] * 6,
    ),
]


@pytest.mark.parametrize("seeds", fuzz.SEEDS)
def test_no_forged_object_is_loaded_or_ends_in_another_error_than_ours(
    tmp_path: Path, seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART", 200)  # so that most files are read in parts
    committed = []
    for is_file in (False, True):
        monkeypatch.setattr(miniature, "FILES", is_file)
        committed.append(saved(tmp_path / f"saved-{is_file}"))
    surroundings = fuzz.Surroundings(tmp_path, committed[0][0], tmp_path / "store")
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        miniature.FILES = seed % 2 == 1
        local, objects = committed[seed % 2]
        damage = StoreDamage(dict(objects), seed, tmp_path / "victims")
        words = fuzz.in_words(seed, damage.done)
        url = damage.draw.choice([f"memory://fuzz-{next(NUMBER)}", (tmp_path / "store").as_uri()])
        directory = tmp_path / "run"
        if damage.draw.random() < 0.3:
            shutil.copytree(local, directory, symlinks=True)
        surroundings.add_strangers(directory)
        strangers = fill(url, damage.objects)
        with surroundings.unharmed(directory, words):
            outcomes[fuzz.outcome_of(words, lambda: start(directory, url, damage))] += 1  # noqa: B023
        assert strangers <= ObjectStore(url, timedelta(seconds=1)).list().keys(), f"{words} removed objects"
        shutil.rmtree(directory)
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        object_store._MEMORY.pop(url, None)
    print(f"mirror: seeds {seeds[0]} to {seeds[-1]}, outcomes {dict(outcomes)}")
    assert len(seeds) == 1 or "resumed" in outcomes


def saved(directory: Path) -> tuple[Path, Objects]:
    """Return a run directory with one checkpoint, and the objects of a store with two."""
    url, local = f"memory://fuzz-{next(NUMBER)}", directory.with_name(f"{directory.name}-local")
    mirrors._USED.clear()
    job = Miniature(directory, mirror=[Remote(url)])
    job.run.begin(0, 0.0)
    for step in (10, 20):
        job.commit(step)
        if step == 10:
            shutil.copytree(directory, local, symlinks=True)
    job.run.finish_copies()
    job.run.close()
    store = ObjectStore(url, timedelta(seconds=1))
    shutil.rmtree(directory)
    return local, {key: store.get(key, 1 << 30) for key in store.list()}


def fill(url: str, objects: Objects) -> set[str]:
    """Put objects into a store, as far as it can have them; return the keys of others, which are nobody's."""
    strangers = {"train.py", "notes/a.txt", "checkpoint-mine/model.bin"}
    store, there = ObjectStore(url, timedelta(seconds=1)), set[str]()
    for key, content in {**objects, **dict.fromkeys(strangers, b"mine")}.items():
        with contextlib.suppress(ResumeError, UnicodeError):  # no store has that key, or a file has that of a directory
            store.put(key, content)
            there.add(key)
    return there & strangers


def start(directory: Path, url: str, damage: StoreDamage) -> str:
    """Start with a store; sometimes go on, save, and remove what is no longer wanted there."""
    mirrors._USED.clear()
    job = Miniature(directory, mirror=[Remote(url, keep=KeepLast(1), timeout=timedelta(seconds=1))])
    try:
        chosen = job.choice.checkpoint
        if chosen is not None:
            state, _ = job.run.reader(chosen).rank_tree(0), job.run.reader(chosen).part("ema")
            assert damage.is_forged or state == {"text": f"state at {chosen.step}"}
        if damage.draw.random() < 0.2:
            job.run.begin(job.step, 0.0)
            job.commit(min(job.step + 1, 1 << 62))
            job.run.finish_copies()
        return "fresh" if chosen is None else "resumed"
    finally:
        job.run.close()
