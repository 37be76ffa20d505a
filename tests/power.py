"""A loss of power by the letter of POSIX: what was not forced onto the disk may be there or not, in any order.

:class:`RecordingStorage` records what is done to a directory tree. :func:`after_power_loss` then returns the trees that
the disk may hold if the power went at one of these moments:

- the content of a file may be any that it had since it was last forced, or a torn one of these, or none;
- an entry of a directory may be any that it was since the directory was last forced, whatever other entries are;
- a rename changes two entries, and is there as a whole or not at all: so do all file systems with a journal or with
  copy-on-write, and the commit assumes it (``docs/format.md``).
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from resume_adapters.core.storage.local import LocalStorage

ROOT = 0


class Slot(NamedTuple):
    """An entry of a directory, by the number of the directory and the name."""

    directory: int
    name: str


@dataclass(frozen=True)
class Renaming:
    """What entries of directories become, all at once: the number of a file, a directory or a link, or nothing."""

    entries: tuple[tuple[Slot, int | None], ...]


@dataclass(frozen=True)
class Writing:
    """What the content of a file becomes."""

    file: int
    content: bytes


@dataclass(frozen=True)
class Forcing:
    """A file or a directory is forced onto the disk."""

    node: int


Event: TypeAlias = Renaming | Writing | Forcing


@dataclass
class Tree:
    """Files, directories and links by their numbers; the root directory is number 0."""

    slots: dict[Slot, int] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)
    directories: set[int] = field(default_factory=lambda: {ROOT})

    def build(self, place: Path, directory: int = ROOT) -> None:
        """Make the tree on the real disk."""
        place.mkdir()
        for slot, node in self.slots.items():
            if slot.directory != directory:
                continue
            if node in self.directories:
                self.build(place / slot.name, node)
            elif node in self.links:
                os.symlink(self.links[node], place / slot.name)
            else:
                (place / slot.name).write_bytes(self.files[node])


class RecordingStorage(LocalStorage):
    """A local disk that records what is done below a directory.

    Args:
        root: the directory; what it holds now is on the disk.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.events: list[Event] = []
        self._numbers = itertools.count(1)
        self._live = Tree()
        self._held_nodes: dict[Path, int] = {}
        self._load(root, ROOT)
        self.first = Tree(dict(self._live.slots), dict(self._live.files), dict(self._live.links), set())
        self.first.directories = set(self._live.directories)

    def _load(self, place: Path, directory: int) -> None:
        for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
            node = next(self._numbers)
            self._live.slots[Slot(directory, entry.name)] = node
            if entry.is_symlink():
                self._live.links[node] = os.readlink(entry.path)
            elif entry.is_dir():
                self._live.directories.add(node)
                self._load(Path(entry.path), node)
            else:
                self._live.files[node] = Path(entry.path).read_bytes()

    @property
    def tree(self) -> Tree:
        """All files, directories and links that there ever were."""
        return self._live

    def _node(self, path: Path) -> int:
        if path in self._held_nodes:
            return self._held_nodes[path]
        return ROOT if path == self.root else self._live.slots[self._slot(path)]

    def _slot(self, path: Path) -> Slot:
        return Slot(self._node(path.parent), path.name)

    def _rename(self, *entries: tuple[Slot, int | None]) -> None:
        self.events.append(Renaming(entries))
        for slot, node in entries:
            if node is None:
                del self._live.slots[slot]
            else:
                self._live.slots[slot] = node

    def write(self, path: Path, content: bytes) -> None:
        super().write(path, content)
        self._set_content(path, content)

    def append(self, path: Path, content: bytes) -> None:
        super().append(path, content)
        former = self._live.slots.get(self._slot(path))
        self._set_content(path, (b"" if former is None else self._live.files[former]) + content)

    def _set_content(self, path: Path, content: bytes) -> None:
        slot = self._slot(path)
        if slot not in self._live.slots:
            node = next(self._numbers)
            self._live.files[node] = b""
            self._rename((slot, node))
        node = self._live.slots[slot]
        self._live.files[node] = content
        self.events.append(Writing(node, content))

    def sync(self, path: Path) -> None:
        super().sync(path)
        if path not in self.root.parents:  # what is above is on the disk
            self.events.append(Forcing(self._node(path)))

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        old, new = self._slot(source), self._slot(target)
        self._rename((new, self._live.slots[old]), (old, None))

    def symlink(self, target: str, link: Path) -> bool:
        super().symlink(target, link)
        node = next(self._numbers)
        self._live.links[node] = target
        self._rename((self._slot(link), node))
        return True

    def make_directory(self, path: Path) -> None:
        missing = [each for each in (path, *path.parents) if not each.exists()]
        super().make_directory(path)
        for each in reversed(missing):
            node = next(self._numbers)
            self._live.directories.add(node)
            self._rename((self._slot(each), node))

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self._rename((self._slot(path), None))

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self._rename((self._slot(path), None))

    def hold(self, directory: Path) -> None:
        super().hold(directory)
        self._held_nodes[directory] = self._node(directory)

    def release(self, directory: Path) -> None:
        super().release(directory)
        self._held_nodes.pop(directory, None)


def after_power_loss(storage: RecordingStorage, at: int, samples: int, seed: int) -> Iterator[Tree]:
    """Yield trees that the disk may hold if the power goes before an event; all if they are few, else a sample.

    Args:
        storage: has recorded the events.
        at: the event.
        samples: the number of trees.
        seed: of the sample.
    """
    done = storage.events[:at]
    forced = _forced(done)
    choices = random.Random(f"{seed} {at}")
    for kept in _subsets([number for number in range(at) if number not in forced], samples, choices):
        yield _disk(storage, done, forced | kept, choices)


def _forced(done: list[Event]) -> set[int]:
    """Return the events that a later one has forced onto the disk, and with them those that they build on."""
    found, nodes, slots = set(), set[int](), set[Slot]()
    for number in reversed(range(len(done))):
        event = done[number]
        if isinstance(event, Forcing):
            found.add(number)
            nodes.add(event.node)
        elif isinstance(event, Writing):
            if event.file in nodes:
                found.add(number)
        elif any(slot.directory in nodes or slot in slots for slot, _ in event.entries):
            found.add(number)  # a rename between two directories is there with either of them
            slots |= {slot for slot, _ in event.entries}
    return found


def _subsets(numbers: list[int], samples: int, choices: random.Random) -> Iterator[set[int]]:
    """Yield all subsets of a few numbers; of many, none, all, each alone, all but each, and random ones."""
    if 1 << len(numbers) <= samples:
        for size in range(len(numbers) + 1):
            yield from map(set, itertools.combinations(numbers, size))
        return
    notable = [set[int](), set(numbers)]
    single = [found for each in numbers for found in ({each}, set(numbers) - {each})]
    choices.shuffle(single)
    drawn = [{each for each in numbers if choices.random() < 0.5} for _ in range(samples)]
    yield from [*notable, *single[: samples // 2], *drawn][:samples]


def _disk(storage: RecordingStorage, done: list[Event], there: set[int], choices: random.Random) -> Tree:
    """Return what the disk holds if only some of the events are there."""
    everything = storage.tree
    found = Tree(dict(storage.first.slots), {}, everything.links, everything.directories)
    found.files = {node: storage.first.files.get(node, b"") for node in everything.files}
    lost: set[Slot] = set()  # a later change of the same entry is lost too
    for number, event in enumerate(done):
        if isinstance(event, Writing):
            former = found.files[event.file]
            begun = len(former) if event.content.startswith(former) else 0
            if number in there:
                found.files[event.file] = event.content
            elif choices.random() < 0.5:
                found.files[event.file] = event.content[: (begun + len(event.content)) // 2]
        elif isinstance(event, Renaming):
            slots = {slot for slot, _ in event.entries}
            if number not in there or slots & lost:
                lost |= slots
                continue
            for slot, node in event.entries:
                if node is None:
                    found.slots.pop(slot, None)
                else:
                    found.slots[slot] = node
    return found
