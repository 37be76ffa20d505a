"""Objects of a training that a hook puts into a checkpoint as they are, and takes back at a resume.

A library may save its loss, its metrics or the scaling of its data so. Only code of the checkpoint could make them
again. But the launch that resumes has made its own, at the same place: that one is given back to the hook, with what
was captured of it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from resume_adapters.core.observed.leaves import is_array
from resume_adapters.core.observed.paths import Path, get, path_of, type_name
from resume_adapters.core.observed.walk import CODE, PLAIN, content
from resume_adapters.core.state.fingerprint import value_digest
from resume_adapters.core.state.stand_ins import is_stand_in
from resume_adapters.core.state.untouched import ABSENT, attributes, container, is_a, items, slots

_LARGEST_SEARCH = 100_000
"""Values that a search for the objects looks at, at most."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def find(saved: Mapping[str, Any], roots: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return which objects of the training a checkpoint is to hold: root, steps and type, by the place in it.

    Args:
        roots: the objects of the training by name.
    """
    wanted: dict[int, list[str]] = {}
    for place, _, _, value in _objects(saved):
        wanted.setdefault(id(value), []).append(place)
    found: dict[str, list[Any]] = {}
    for path, value in _reached(roots) if wanted else ():
        if id(value) in wanted:
            where = [path.root, [list(step) for step in path.steps], _kind(value)]
            found.update(dict.fromkeys(wanted.pop(id(value)), where))
        if not wanted:
            break
    return found


def give_back(loaded: Mapping[str, Any], saved: Mapping[str, list[Any]], roots: Mapping[str, Any]) -> list[str]:
    """Put the objects of this launch in the place of stand-ins for those that were saved.

    Args:
        loaded: what was read. It is changed.
        saved: what :func:`find` returned.
        roots: the objects of the training by name.

    Returns:
        What this launch has no such object for, in words.
    """
    lacking = []
    for place, holder, key, value in _objects(loaded):
        if place not in saved or not is_stand_in(value):
            continue
        root, steps, kind = saved[place]
        path = path_of(root, steps)
        live = get(roots, path)
        if live is ABSENT or _kind(live) != kind:
            lacking.append(f"{kind} at {path} ({_kind(live)} now)")
        else:
            holder[key] = live
    return lacking


def _kind(value: Any) -> str:
    """Return the type of an object whose content is looked at elsewhere, and the value of any other."""
    if is_a(value, enum.Enum):
        return f"{type_name(value)}.{attributes(value).get('_name_')}"
    if is_a(value, *CODE):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    has_content = attributes(value) or slots(value) or value is ABSENT
    return type_name(value) if has_content else f"{type_name(value)} {value_digest(value, untouched=True)}"


def _objects(tree: Any, prefix: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield what is neither plain data nor a container: its place, the container, the key there, and the value."""
    for key, value in list(dict.items(tree)) if is_a(tree, dict) else enumerate(items(tree)):
        place = f"{prefix}{key if type(key) in PLAIN else value_digest(key, untouched=True)}"
        if container(value) in (dict, list):
            if id(value) not in above:
                yield from _objects(value, f"{place}.", (*above, id(value)))
        elif not is_a(value, *_PLAIN) and not is_array(value):
            yield place, tree, key, value


def _reached(roots: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield what hangs on the roots, nearest first."""
    waiting = deque((Path(name), root) for name, root in roots.items())
    seen = {id(root) for root in roots.values()}
    left = _LARGEST_SEARCH
    while waiting and left > 0:
        path, owner = waiting.popleft()
        for step, value in content(owner):
            left -= 1
            if is_a(value, *_PLAIN) or is_array(value) or id(value) in seen:
                continue
            seen.add(id(value))
            below = path.to(*step)
            yield below, value
            if not is_a(value, *CODE):
                waiting.append((below, value))
