"""Objects in a script's variables that change as it trains, such as a generator or a queue of keys: nobody saves them.

They are found by comparing: what a variable holds at the first step and still holds at a save, and has another content
by then, is carried from step to step. Variables that a step gives a new value are the matter of ``script.py``.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from resume_adapters.core.observed import paths, walk
from resume_adapters.core.observed.code import KEEPING, code_among, held_by, hooks_of, kept_by, named, replaced_by
from resume_adapters.core.observed.instances import instances
from resume_adapters.core.observed.leaves import LeafKind, is_array
from resume_adapters.core.observed.loaders import LoaderAttributes, are_kept
from resume_adapters.core.observed.paths import Path, is_module, type_name
from resume_adapters.core.observed.script import handing_on, is_code_of_script, rebound, release, script_frames
from resume_adapters.core.observed.walk import CODE, CONTAINERS, Census, Subjects, has_state, is_loader_iterator
from resume_adapters.core.state.rng import is_generator
from resume_adapters.core.state.untouched import attributes, has_attributes, is_a

_CALLS, _ANY = "between calls of ", 0
"""How the scopes begin of what code of the script gives new values, and the identity of what may be replaced."""

_CONTENT = (LeafKind.DATA, LeafKind.INSTANCE, LeafKind.STATEFUL, LeafKind.TENSOR, LeafKind.CODE)


class ScriptVariables:
    """Finds what a script's variables hold, changes as it trains, and is saved by nobody.

    Args:
        saved: returns what is saved, or looked at, by others.
    """

    def __init__(self, saved: Callable[[], Iterable[Any]]) -> None:
        self._saved = saved
        self._start = Census()
        self.has_begun = False
        self._held: dict[tuple[str, str], int] = {}
        self._saves = 0
        self._found: dict[str, str] = {}
        self._with_workers: set[str] = set()

    def begin(self, saved: Iterable[Any]) -> None:
        """Look at the variables of the calls that are running, for :meth:`compare`; within the first step.

        Args:
            saved: what is saved, or looked at, by others now.
        """
        from torch.utils.data import DataLoader

        self.has_begun = True
        known = [*held_by(saved)]  # what is captured of loaders is left out at the save
        scopes = _scopes(known, instances(DataLoader))
        self._held = {
            (scope, name): _ANY if scope.startswith(_CALLS) else id(each)
            for scope, held in scopes.items()
            for name, each in held.items()
        }
        self._start = _look(scopes, known)

    def compare(self) -> None:
        """Look again, before the first two saves of a launch and ever fewer of the later ones; within the loop."""
        from torch.utils.data import DataLoader

        if not self._held:
            return
        self._saves += 1
        if self._saves & (self._saves - 1):  # not the 1st, 2nd, 4th, 8th
            return
        looked_at = [
            each for held in instances(LoaderAttributes) for each in (*held.roots.values(), *held.within_code())
        ]
        loaders = instances(DataLoader)
        tracked = [each for each in loaders if "resume_tracked" in attributes(each)]
        running = [each for each in loaders if are_kept(each) and "resume_tracked" not in attributes(each)]
        self._with_workers |= {type_name(each.dataset) for each in running}
        known = [*held_by([*self._saved(), *looked_at, *tracked])]
        scopes = _scopes(known, loaders)
        same = {
            scope: {name: each for name, each in held.items() if self._held.get((scope, name)) in (id(each), _ANY)}
            for scope, held in scopes.items()
        }
        for path, leaf in self._start.changed(_look(same, known)).items():
            live = paths.get(same, path)
            holds = _may_hold_or_fill if leaf.keeps(self._start.leaves.get(path)) else _may_hold
            is_content = leaf.kind in _CONTENT or type(live) in CONTAINERS or _is_carried(live)
            if is_content and all(map(holds, _owners(same, path))):
                name, text = _shown(same, path)
                self._found.setdefault(name, text)

    @property
    def lost_workers(self) -> list[str]:
        """What is to be said of loaders whose workers outlive a pass, and that nobody tracks."""
        return [
            f"the random state of the persistent workers of a loader of `{name}`: after a resume it starts over. Leave "
            "persistent_workers at False, or read run.batches(loader) in a hand-written loop; where they were started "
            "before the training, begin it with another loader"
            for name in sorted(self._with_workers)
        ]

    def changed(self, known: Iterable[str], restored: Collection[str] = ()) -> list[str]:
        """Return what has changed, as a user knows it.

        Args:
            known: what is named already.
            restored: variables and attributes that the script restores.
        """
        names = {each.split("`")[1] for each in known}
        found = {name: text for name, text in self._found.items() if name.rpartition(".")[2] not in restored}
        return [text for name, text in found.items() if name not in names]


def _look(scopes: Mapping[str, Any], known: list[Any]) -> Census:
    return walk.take(Subjects(roots=scopes, captured=known, ignored=_IGNORED, foreign=_LIBRARIES))


_IGNORED = {"*._flags_cache": "what omegaconf has looked up"}
"""What is passed over, with the reason."""

_LIBRARIES = ("accelerate.", "datasets.", "deepspeed.", "lightning", "tokenizers.", "transformers.tokenization")
"""Modules whose objects hold no state of the script, or others save it."""

_KINDS = (("step", "reset"), ("keys", "__getitem__", "__setitem__"))
"""What the environments of all libraries have, and what the mappings that hold settings have."""


def _scopes(known: Iterable[Any], loaders: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Return the variables that may hold state, by where they are: of running functions, of modules, and of code.

    Args:
        known: objects whose functions belong to the script too, such as the rate of a schedule.
        loaders: all loaders, of which the random generators count.
    """
    found: dict[str, dict[str, Any]] = {}
    frames = script_frames()
    for frame in frames:
        code = frame.f_code
        if code.co_name == "<module>":
            found[code.co_filename] = _variables(frame)
        else:
            found.setdefault(f"{code.co_filename}:{code.co_firstlineno}", _variables(frame))
            held = {name: each for name, each in [*frame.f_globals.items()] if _may_hold_or_fill(each)}
            found.setdefault(code.co_filename, held)
    for loader in loaders:
        for each in filter(is_generator, held_by([loader])):
            found[f"read with {id(each)}"] = {f"generator of {type_name(loader.dataset)}": each}
    hooks = [hook for each in known for hook in hooks_of(each)]
    found["hooks"] = {type_name(each): each for each in hooks if _may_hold(each)}
    values = [each for held in found.values() for each in held.values()]
    modules = [each for frame in frames for each in [*frame.f_globals.values()] if is_a(each, ModuleType)]
    running = {frame.f_globals.get("__name__") for frame in frames}
    identities = {*map(id, known)} - {id(None)}
    shared = {name for frame in frames for name in frame.f_code.co_cellvars}
    for code in code_among([*values, *modules, *known, *hooks]):
        is_running = code.__module__ in running
        within = "" if is_running else f"{code.__module__}."
        found[f"{_CALLS}{id(code)}"] = {f"{within}{name}": each for name, each in replaced_by(code, identities)}
        found[f"kept by {id(code)}"] = _kept(kept_by(code), within, shared)
        found.setdefault(code.__module__, {}).update({} if is_running else _kept(named(code), within))
    for scope, held in found.items():
        if not scope.startswith(_CALLS):  # whose code is gone through by itself
            found[scope] = {name: each for name, each in held.items() if not is_a(each, *KEEPING)}
    return {scope: held for scope, held in found.items() if held}


def _kept(held: Mapping[str, Any], within: str, left_out: Collection[str] = ()) -> dict[str, Any]:
    kept = {name: each for name, each in held.items() if name not in left_out and _may_hold_or_fill(each)}
    return {f"{within}{name}": each for name, each in kept.items()}


def _variables(frame: FrameType) -> dict[str, Any]:
    left_out = rebound(frame.f_code, frame.f_lineno)
    if left_out is None:  # a step's own variables cannot be told from those that it carries
        return {}
    held = frame.f_locals
    found = {name: each for name, each in held.items() if name not in left_out and _may_hold_or_fill(each)}
    release(held, frame.f_code)
    return found


def _may_hold(value: Any) -> bool:
    """Return whether an object can change and keep its identity, and is no machinery of a library."""
    if is_a(value, *CONTAINERS) or is_array(value) or is_generator(value) or _is_carried(value):
        return True
    if is_a(value, *KEEPING):
        return is_code_of_script(value)
    is_own = is_code_of_script(type(value)) or is_a(value, argparse.Namespace, SimpleNamespace)
    is_known = is_own or any(all(hasattr(type(value), name) for name in names) for names in _KINDS)
    return is_module(value) or has_state(value) or (is_known and has_attributes(value))


def _may_hold_or_fill(value: Any) -> bool:
    """Return whether that is so, or an object of a library holds arrays, of which those that it fills count."""
    return _may_hold(value) or (not is_a(value, *CODE) and any(map(is_array, attributes(value).values())))


def _is_carried(value: Any) -> bool:
    """Return whether a value is an iterator whose place nobody saves: of Python or of a loader, not over a run's."""
    if not is_a(value, Iterator) or (has_attributes(value) and not is_loader_iterator(value)):
        return False
    return not any(map(handing_on, (value, *gc.get_referents(value))))  # the loop tells of ``enumerate`` and the like


def _owners(roots: Mapping[str, Any], path: Path) -> Iterator[Any]:
    """Yield the objects that a path leads through, but for those in one of their kind, as in a configuration."""
    through = [paths.get(roots, Path(path.root, path.steps[:count])) for count in range(1, len(path.steps))]
    for at, each in enumerate(through):
        if not any(walk.wraps(holder, each) for holder in through[:at]):
            yield each


def _shown(roots: Mapping[str, Any], path: Path) -> tuple[str, str]:
    """Return the name of what has changed, and how it is shown: of a module and of a container as a whole."""
    name = str(path.steps[0].key)
    held = paths.get(roots, Path(path.root, path.steps[:1]))
    attribute = path.steps[1] if len(path.steps) > 1 else None
    is_private = attribute is not None and str(attribute.key).startswith("_") and not is_code_of_script(type(held))
    if attribute is None or attribute.kind != "." or is_module(held) or is_private:
        return name, f"`{name}` (a {type_name(held)})"
    return f"{name}.{attribute.key}", f"`{name}.{attribute.key}` (of a {type_name(held)})"
