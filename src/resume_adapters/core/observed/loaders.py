"""What a loader's dataset, samplers and collate function hold, where training or reading changes it.

A curriculum of the dataset, the passes that a sampler counts, the generator of a transform: a batch follows from them,
and they begin again in each launch. What differs from the moment at which the loader was tracked is captured with the
loader's position from then on.
"""

from __future__ import annotations

import copy
import math
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from resume_adapters.core.log import logger
from resume_adapters.core.observed import leaves, paths, walk
from resume_adapters.core.observed.code import generators_of
from resume_adapters.core.observed.leaves import LeafKind, can_be_made, is_array, is_packed, is_row, packed, unpacked
from resume_adapters.core.observed.paths import Path, type_name
from resume_adapters.core.observed.walk import CONTAINERS, Subjects
from resume_adapters.core.state import encoding
from resume_adapters.core.state.rng import is_generator
from resume_adapters.core.state.untouched import (
    ABSENT,
    HOLDING,
    attributes,
    container,
    has_attributes,
    held_by_code,
    is_a,
)
from resume_adapters.errors import NotSerialisable

_OBJECTS = 5_000
"""Values that one look compares at most."""

_SECONDS = 5.0
"""Time that one look takes at most; the number of values bounds it long before, also on a machine under load."""

_DEPTH = 5
"""Objects that a path leads through at most: a dataset, composed transforms, one of them, and those that it applies."""

_VALUES = 1_000
"""Values in one attribute that is captured, at most; numbers of an array count each. More are a cache."""

_FEW = 100
"""Values in one attribute that is copied when workers start, at most."""

ROW_OF_SAMPLER, ROW_OF_CONTENT = 4_000_000, 100_000
"""Numbers in a row that is captured, at most: a sampler's is captured a few times in a pass, and one that the dataset
itself follows at each fetch."""

_ROW_AT_START = 1_000_000
"""Numbers in a row that is compared with that of the launch before, at most: a tenth of a second for a list."""

_OWNERS = 20
"""Objects of which what they hold is compared at each fetch, at most, and items of a container."""

_LOOKS = 3
"""Fetches, and as many positions, before which a look is taken."""

_ELSEWHERE = (
    *("accelerate.", "datasets.", "pyarrow.", "resume_adapters.", "tokenizers.", "torchdata."),
    *("transformers.configuration", "transformers.models.", "transformers.tokenization"),
)
"""Libraries whose objects follow from what the loop tells them at each pass, or hold no state that shapes a batch."""


_PLAIN = (LeafKind.DATA, LeafKind.INSTANCE, LeafKind.TENSOR)

WITH_CHANGES = 2
"""Length of a worker's state with what has changed on its dataset; the random state alone is longer."""


class LoaderAttributes:
    """The attributes of some objects of a loader that have changed since they were first looked at.

    Args:
        roots: the objects, by the name under which a user knows them.
        without: objects that hang on these and are not looked at.
        longest_row: numbers in a row that is captured, at most.
        is_copy: the objects are those of a worker. What processes share is captured by the one that has started it.

    Attributes:
        roots: the objects, as they were given.
        changing: what is known to change, by its path: its kind, the type that it had at first, and whether its
            tensors and arrays are filled, and not replaced.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        without: Iterable[Any] = (),
        longest_row: int = ROW_OF_CONTENT,
        is_copy: bool = False,
    ) -> None:
        self.roots = roots
        self._subjects = _subjects(roots, longest_row, captured=without)
        self._is_copy = is_copy
        self._start = self._walk()
        self.changing: dict[Path, tuple[LeafKind, str, bool]] = {}
        self._fresh: dict[Path, list[Any]] = {}
        self._missing: dict[Path, str] = {}
        self._kept: dict[Path, Any] = {}
        self._looks = {"fetch": _LOOKS, "position": _LOOKS}
        self._owners = self._entered(self._start)
        self._held: dict[tuple[int, str], list[Any]] = {}  # from the first fetch here on: it keeps what is replaced
        self._replaced = set[tuple[int, str]]()

    def _walk(self) -> walk.Census:
        return walk.take(self._subjects, objects=_OBJECTS, seconds=_SECONDS)

    @property
    def missing(self) -> dict[str, str]:
        """What has changed and is not captured: paths, with the names of the types."""
        return {str(path): kind for path, kind in self._missing.items()}

    def look(self) -> None:
        """Find what has changed. Call it where a pass begins."""
        if not self._subjects.roots:
            return
        now = self._walk()
        self._owners = self._entered(now)
        changed = {path: leaf for path, leaf in self._start.changed(now).items() if path not in self.changing}
        opened = {path.owner for path, leaf in changed.items() if leaf.kind is LeafKind.OPAQUE and self._may_hold(path)}
        opened |= {path.owner for path in self._missing if self._may_hold(path)}
        for path, leaf in changed.items():
            if self._is_copy and self._is_shared(path):
                continue
            # Of an object that has opened a file or a pool, an attribute may say so: it belongs to this launch.
            is_plain = leaf.kind in _PLAIN and path.owner not in opened and self._is_kept(self._live(path))
            before = self._start.leaves.get(path)
            kind = before.type if before else type_name(ABSENT)
            if (is_plain and walk.is_captured(leaf, kind)) or leaf.kind is LeafKind.STATEFUL:
                self.changing[path] = (leaf.kind, kind, leaf.keeps(before))
            else:
                self._missing[path] = leaf.type

    def look_early(self, moment: str) -> bool:
        """Find what has changed, at the first few moments of a kind.

        Args:
            moment: ``"fetch"`` or ``"position"``.

        Returns:
            Whether it would look at the next one, too.
        """
        if self._looks[moment]:
            self._looks[moment] -= 1
            self.look()
        return self._looks[moment] > 0

    def look_if_replaced(self) -> None:
        """Find what has changed, if an attribute holds another object than at the last call: once for each of them."""
        before, self._held = self._held, self._holding()
        others = {name for name, now in self._held.items() if not _are_same(before.get(name, now), now)}
        if others - self._replaced:
            self._replaced |= others
            self.look()

    def _entered(self, census: walk.Census) -> list[Any]:
        """Return the objects whose attributes are looked at before each fetch, which takes microseconds."""
        nearest = sorted(census.entered, key=lambda path: len(path.steps))[:_OWNERS]
        return [each for each in map(self._live, nearest) if has_attributes(each)]

    def _holding(self) -> dict[tuple[int, str], list[Any]]:
        """Return what the attributes of some objects hold, and a container of few items these."""
        held = ((id(owner), [*{**attributes(owner), **held_by_code(owner)}.items()]) for owner in self._owners)
        return {(owner, name): _with_items(each) for owner, names in held for name, each in names}

    def _may_hold(self, path: Path) -> bool:
        """Return whether what is at a path may hold a file, a pool or a thread: not a value or an endless iterator."""
        live = self._live(path)
        if live is ABSENT:
            return True
        is_value = container(live) in (set, frozenset, deque) or is_array(live)
        if is_value or (is_a(live, Iterator) and not hasattr(type(live), "close")):
            return False
        return is_a(live, Mapping, list, tuple) or hasattr(type(live), "close") or has_attributes(live)

    def _live(self, path: Path) -> Any:
        return paths.get(self._subjects.roots, path)

    def _is_shared(self, path: Path) -> bool:
        """Return whether what is at a path is in memory that workers share."""
        arrays = (each() for each in self._start.leaves[path].arrays) if path in self._start.leaves else ()
        return path.steps[-1].kind == "memory" or any(each is not None and leaves.is_shared(each) for each in arrays)

    @property
    def changes_shared(self) -> bool:
        """Whether something changes that workers see at once, whichever batch they are at."""
        return any(map(self._is_shared, self.changing))

    def _is_kept(self, value: Any) -> bool:
        return is_row(value, self._subjects.longest_row) or _count(value) <= _VALUES

    def _as_data(self, value: Any, kind: LeafKind) -> Any:
        """Return a value as data that later changes do not reach.

        Raises:
            NotSerialisable: it is not data.
        """
        if type(value) is list and is_row(value, self._subjects.longest_row):
            return packed(value)
        return copy.deepcopy(leaves.capture(value, kind))

    def capture(self) -> list[Any]:
        """Return what is known to change, as data that later changes do not reach."""
        found = []
        for path, (kind, before, in_place) in list(self.changing.items()):
            live = self._live(path)
            is_not_made = live is ABSENT or (live is None and kind is LeafKind.STATEFUL)
            if is_not_made and type_name(live) == before:
                continue  # it is made when it is first needed
            try:
                if live is ABSENT or (kind in _PLAIN and not self._is_kept(live)):
                    raise NotSerialisable("it is gone, or has become large")
                value = self._as_data(live, kind)
            except NotSerialisable:
                del self.changing[path]
                self._missing[path] = type_name(live)
                continue
            steps = [list(step) for step in path.steps]
            found.append([path.root, steps, kind.value, before, type_name(live), value, in_place])
        return found

    def keep(self) -> None:
        """Copy the small values of now: some may turn out to change later, and workers that start now have these."""
        self._kept, left = {}, _OBJECTS
        for path, leaf in self._walk().leaves.items():
            is_copied = leaf.kind is LeafKind.DATA and not self._is_shared(path)
            live = self._live(path) if is_copied else ABSENT
            if live is not ABSENT and _count(live) <= min(_FEW, left):
                self._kept[path] = copy.deepcopy(live)
                left -= _count(live)

    def kept(self) -> list[Any]:
        """Return what :meth:`keep` has copied, as :meth:`capture` does: numbers, and what is known to change by now."""
        found = []
        for path, value in self._kept.items():
            if type(value) in (bool, int, float) or is_row(value, _FEW) or path in self.changing:
                kind = type_name(value)
                content = leaves.capture(value, LeafKind.DATA)
                found.append([path.root, [list(step) for step in path.steps], LeafKind.DATA.value, kind, kind, content])
        return found

    def restore_kept(self, kept: list[Any]) -> None:
        """Restore those of :meth:`kept` that are others now, or known to change, and say which the launch has set."""
        entries, others = [], []
        for entry in kept:
            path, value = paths.path_of(*entry[:2]), entry[5]
            live = self._live(path)
            if path not in self.changing and walk.fingerprint(live) == walk.fingerprint(value):
                continue
            entries.append(entry)
            others += [] if path in self.changing else [f"{path} {value!r} (now {live!r})"]
        self.restore(entries, leaves_shared=True)
        if others:
            logger.info("Workers that outlive a pass go on with what they were started with: %s.", ", ".join(others))

    def within_code(self) -> Iterable[Any]:
        """Return the objects that code holds, as far as they are known to change."""
        return paths.within_code(self._subjects.roots, self.changing)

    def places(self) -> set[Any]:
        """Return where what is known to change is: alike for others that it is shared with."""
        return {self._place(path) for path in self.changing}

    def _place(self, path: Path) -> Any:
        live = self._live(path)
        return id(live) if is_generator(live) else (id(paths.get(self.roots, path.owner)), path.steps[-1:])

    def restore(self, saved: list[Any], without: Set[Any] = frozenset(), *, leaves_shared: bool = False) -> None:
        """Restore what :meth:`capture` returned, where its path leads to the same type; the rest as in a new launch.

        Args:
            without: the places of what others have restored, and changed since.
            leaves_shared: leave what is in memory that workers share as it is.
        """
        roots, given = self._subjects.roots, {paths.path_of(root, steps): rest for root, steps, *rest in saved}
        given = {path: rest for path, rest in given.items() if self._place(path) not in without}
        stays = self._memory_beside(given)
        for path, (name, before, kept, value, *filled) in {**self._fresh, **given}.items():
            if leaves_shared and self._is_shared(path):
                continue
            live, kind, in_place = self._live(path), LeafKind(name), filled == [True]
            if value is not ABSENT:
                value = unpacked(value) if is_packed(value) else encoding.as_loaded(value)
            owner = paths.get(roots, path.owner)
            is_there = kind in (LeafKind.DATA, LeafKind.TENSOR) or type_name(live) == kept
            fits = type_name(live) in (before, kept) and (is_there or can_be_made(kept, value, kind))
            if owner is ABSENT or not fits:
                logger.warning("Not restored: %s (it is %s now).", path, type_name(live))
                continue
            if path not in self.changing:
                self.changing[path] = (kind, before, in_place)
                of_start = kind if is_there else LeafKind.DATA
                at_start = ABSENT if live is ABSENT else self._as_data(live, of_start)
                self._fresh[path] = [of_start.value, kept, before, at_start, in_place]
            if value is ABSENT and live is not ABSENT:
                leaves.remove(roots, path)
            elif value is not ABSENT:
                leaves.restore(roots, path, value, kind, in_place=in_place, stays=stays, type_then=kept)

    def restore_shared(self, saved: list[Any]) -> None:
        """Restore only what is in memory that workers share."""
        self.restore([entry for entry in saved if self._is_shared(paths.path_of(*entry[:2]))])

    def _memory_beside(self, given: Mapping[Path, Any]) -> set[int]:
        """Return where the memory of the arrays begins that stay as they are."""
        staying = [leaf for path, leaf in self._start.leaves.items() if path not in given]
        arrays = [each() for leaf in staying for each in leaf.arrays]
        return {leaves.memory_of(each) for each in arrays if each is not None}


def _with_items(value: Any) -> list[Any]:
    is_small = type(value) in CONTAINERS and len(value) <= _OWNERS
    return [value, *(value.values() if is_a(value, dict) else value)] if is_small else [value]


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def require_changes(saved: list[Any]) -> None:
    """Check the form of what :meth:`LoaderAttributes.capture` returned; what it raises says what is wrong."""
    for root, steps, kind, *_ in saved:
        hash(paths.path_of(root, steps))
        LeafKind(kind)


def rows_at_start(roots: Mapping[str, Any]) -> dict[str, str]:
    """Return digests of the rows of numbers in some objects, by path: of those that have one for each of its items.

    The indices of a split, the order of a dataset, its labels: where a launch draws them without a seed, other samples
    follow than before.

    Args:
        roots: the objects, by the name under which a user knows them.
    """
    subjects = _subjects(roots, _ROW_AT_START)
    found = walk.take(subjects, objects=_OBJECTS).leaves  # within half a second
    return {str(path): leaf.fingerprint for path, leaf in found.items() if _has_one_for_each(roots, path)}


def _has_one_for_each(roots: Mapping[str, Any], path: Path) -> bool:
    owner, row = paths.get(roots, path.owner), paths.get(roots, path)
    if container(owner) or not is_row(row, _ROW_AT_START):
        return False
    try:
        return len(row) == len(owner)
    except Exception:  # of any kind: it has no length, or says so in its own way
        return False


def content_of(dataset: Any, collate: Any) -> dict[str, Any]:
    """Return what the batches of a loader are made by, by name.

    Random generators that the code of these takes from modules of the script are among it.
    """
    found = {"dataset": dataset, "collate_fn": collate}
    holding = {name: each for name, each in found.items() if has_attributes(each) or is_a(each, *HOLDING)}
    held = {name: each for name, each in holding.items() if not is_a(each, type)}
    generators = generators_of([dataset, collate])
    return {**held, "script": generators} if generators else held


def begins_itself(loader: Any) -> bool:
    """Return whether a loader begins its passes in its own way, and what it holds may say how.

    Workers that outlive a pass know it as it was at their start.
    """
    from torch.utils.data import DataLoader

    if not is_a(loader, DataLoader):
        return has_attributes(loader)
    return type(loader).__iter__ is not DataLoader.__iter__ and not loader.persistent_workers


def _of_torch(roots: Mapping[str, Any]) -> dict[str, str]:
    """Return what torch and this package hold on the loaders among some objects."""
    from torch.utils.data import DataLoader

    loaders = [name for name, root in roots.items() if is_a(root, DataLoader)]
    own = (*vars(DataLoader(())), "resume_tracked", "resume_made") if loaders else ()  # type: ignore[arg-type]
    return {f"{name}.{each}": "torch's own" for name in loaders for each in own}


def are_kept(loader: Any) -> bool:
    """Return whether a loader's workers outlive its passes and are running."""
    return attributes(loader).get("_iterator") is not None  # seam: torch 2.13, DataLoader


def _subjects(roots: Mapping[str, Any], longest_row: int, **options: Any) -> Subjects:
    return Subjects(
        ignored=_of_torch(roots),
        roots={name: root for name, root in roots.items() if not type(root).__module__.startswith(_ELSEWHERE)},
        foreign=_ELSEWHERE,
        enters_data=True,
        largest=_VALUES,
        longest_row=longest_row,
        depth=_DEPTH,
        **options,
    )


def _count(value: Any) -> int:
    """Return how many values there are in data."""
    if is_array(value):
        return int(math.prod(value.shape))
    if isinstance(value, dict):
        return 1 + sum(map(_count, value.values()))
    if isinstance(value, str | bytes):
        return 1 + len(value) // 64
    return 1 + sum(map(_count, value)) if hasattr(value, "__iter__") else 1
