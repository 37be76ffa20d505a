"""When a training call looks for state that nobody has declared, what it captures from then on, and what it names.

A census is taken before the first step and before each save. What differs, is data and belongs to nobody is captured
from then on at each save, and restored before the first step. What differs and is not data is named. Between saves,
nothing is done.

Gradients that are left at a save, and that a later step uses, are captured there: see :mod:`.gradients`.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakSet

from resume_adapters.core.log import first_of, logger
from resume_adapters.core.observed import leaves, paths, walk
from resume_adapters.core.observed.gradients import LeftGradients
from resume_adapters.core.observed.leaves import LeafKind, can_be_made
from resume_adapters.core.observed.optimizers import UNSAVED, beside_state, registered, unsaved
from resume_adapters.core.observed.paths import Path, is_module, submodules, tensors_of, type_name
from resume_adapters.core.observed.script import is_code_of_script
from resume_adapters.core.observed.steps import watch_steps
from resume_adapters.core.observed.walk import Census, Subjects
from resume_adapters.core.state import encoding
from resume_adapters.core.state.loading import loading
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.rng import GeneratorState, is_generator
from resume_adapters.core.state.stateful import StaticState
from resume_adapters.core.state.untouched import ABSENT
from resume_adapters.errors import NotSerialisable

TENSORS = "observed_tensors"
"""The part that holds observed tensors of modules: alike on all ranks, as a rule, and large."""

_LOOKS = 2
"""Censuses of a launch for which the objects are looked up again; steps of a block that are followed by one."""

_TOGETHER = {
    "tensor": ("tensors", 1),
    "requires_grad": ("requires_grad", 1),
    "mode": ("train() or eval()", 1),
    "grad": ("gradients", 0),
}
"""How a user knows what is observed in numbers: its name, and the steps to the object that has it."""

_STEPPED = "optimizer.params"
"""The root of the tensors whose gradients may be left for a later step."""

_SHOWN = 12
"""Paths that a log line lists at most."""

_NOT_DATA = (
    "has changed since the start and is not data: after a resume it starts over. Give it state_dict() and "
    "load_state_dict(), and register it with {}(...)"
)
_MADE_LATE = (
    "was made after the first step had begun: a resume makes it again, from what is there then. Make it before the "
    "first step, or register it with {}(...)"
)
_CHOSEN = (
    "is another than at the start, and is code: after a resume it is what the launch sets. Choose it by the step or "
    "the epoch, in each launch"
)
_HOOKED = (
    "{} has hooks that were registered after the first step: after a resume it has those that the launch registers. "
    "Register them in each launch"
)
_WHY = {LeafKind.MODULE: _MADE_LATE, LeafKind.CODE: _CHOSEN}
"""Why a value is not restored, and what to do."""


@dataclass
class ObservedLeaf(Record):
    """One value that was captured without being declared.

    Attributes:
        root: the root of its path.
        steps: the steps of its path, as pairs of kind and key.
        owner: type of the object that holds it.
        before: type that it had before the first step.
        type: type that it has now.
        kind: how it was captured: the value of a :class:`LeafKind`.
        in_place: it is a tensor or an array that training fills, and does not replace.
        value: the value; ``None`` for tensors of modules, which are in a part.
    """

    root: str
    steps: list[list[Any]]
    owner: str
    before: str
    type: str
    kind: str
    in_place: bool
    value: Any

    @property
    def path(self) -> Path:
        """The path."""
        return paths.path_of(self.root, self.steps)


class Entry(NamedTuple):
    """What a manifest says of the observed state: the name of a part, who saves it, and what there is to say."""

    name: str
    by: str
    note: str


class ObservedState:
    """Finds, captures and restores the undeclared state of one launch, on this rank.

    Args:
        subjects: returns what is looked at; asked at the first censuses, since objects may be made on the way.
        registers: what registers a part of the state, as a user writes it.
        clock: returns seconds.

    Attributes:
        has_begun: :meth:`begin` was called.
    """

    def __init__(
        self, subjects: Callable[[], Subjects], registers: str, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self.has_begun = False
        self._ask_subjects = subjects
        self._subjects = Subjects({})
        self._registers = registers
        self._clock = clock
        self._roots: Mapping[str, Any] = {}
        self._before: Census | None = None
        self._start = Census()
        self._checked: dict[Path, walk.Leaf | None] = {}
        self._looks = 0
        self._observed: dict[Path, ObservedLeaf] = {}
        self._missing: dict[Path, Entry] = {}
        self._saved: list[ObservedLeaf] = []
        self._tensors: dict[str, Any] = {}
        self._held: list[ObservedLeaf] | None = None
        self._gradients = LeftGradients()
        self._stepped: WeakSet[Any] = WeakSet()
        self._watching, self._loading = contextlib.ExitStack(), contextlib.ExitStack()

    # ---- Resuming

    def load(self, saved: list[ObservedLeaf], tensors: Mapping[str, Any]) -> None:
        """Give what a checkpoint holds; :meth:`begin` restores it.

        Args:
            saved: what :meth:`capture` returned.
            tensors: the state of the part that :meth:`parts` returned.
        """
        self._saved, self._tensors = saved, dict(tensors)

    def prepare(self) -> None:
        """Look at what is there before the framework starts the training, and anything is loaded.

        The tensors that a callback makes on the way to the first step are made of the weights of then: a resume would
        make them of others. So they are captured, changed or not.
        """
        self._before = walk.take(self._ask_subjects(), self._clock)

    def begin_loading(self, *, is_foreign: bool = False) -> None:
        """Let optimizers load what was saved as it is until the first step; see :func:`loading`."""
        self._loading.enter_context(loading(is_foreign=is_foreign))

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Observe what a check before the first step changes: a resume does it not again."""
        before = walk.take(self._ask_subjects(), self._clock)
        yield
        now = walk.take(self._ask_subjects(), self._clock)
        self._checked = {path: before.leaves.get(path) for path in before.changed(now)} | self._checked

    def begin(self) -> None:
        """Restore what the checkpoint holds, and take the census that later ones are compared with; once.

        Call it when everything is loaded and made, before the first step.
        """
        if self.has_begun:
            return
        self.has_begun = True
        subjects = self._look_up()
        if self._saved:
            self._restore_all(subjects)
        self._start = walk.take(subjects, self._clock)
        known = {**self._start.leaves, **self._checked}
        self._start.leaves = {path: leaf for path, leaf in known.items() if leaf is not None}
        self._made = set[Path]() if self._before is None else walk.made(self._before, self._start)
        self._watching.callback(watch_steps(self._after_step))

    def within_code(self) -> Iterable[Any]:
        """Return the objects that code holds, as far as they are captured."""
        return paths.within_code(self._roots, self._observed)

    def restore(self) -> None:
        """Restore what the checkpoint holds."""
        if self._saved:
            self._restore_all(self._look_up())

    def close(self) -> None:
        """Watch the optimizers no longer."""
        self._loading.close()
        self._watching.close()

    def _after_step(self, optimizer: Any) -> None:
        self._loading.close()
        self._stepped.add(optimizer)
        self._gradients.after_step(optimizer)

    def end_step(self) -> None:
        """Look at the gradients that a step has left."""
        if self.has_begun:
            self._gradients.end_step(self._roots[_STEPPED])

    def _look_up(self) -> Subjects:
        """Return what there is to look at."""
        if self._looks <= _LOOKS:  # a look-up may ask for all objects of the process
            self._subjects = self._with_optimizers(self._ask_subjects())
            self._roots = {**self._subjects.roots, _STEPPED: [*self._subjects.stepped]}
        return self._subjects

    def _with_optimizers(self, subjects: Subjects) -> Subjects:
        """Return the subjects with what steps the training and is not, or not wholly, in a ``state_dict()``."""
        steppers = registered(subjects.captured)
        saved = [leaf.path.steps[0].key for leaf in self._saved if leaf.path.root == UNSAVED]
        others, unclear = unsaved([*self._stepped], steppers, subjects.captured, saved)
        roots, ignored = beside_state(steppers, {leaf.path.root for leaf in self._saved})
        return replace(
            subjects,
            roots={**roots, **subjects.roots, UNSAVED: others},
            captured=[*subjects.captured, *steppers],
            ignored={**subjects.ignored, **ignored},
            unnamed=[*subjects.unnamed, *unclear],
        )

    def _restore_all(self, subjects: Subjects) -> None:
        """Restore values where their path still leads to the same type; log those that do not fit."""
        saved, found = {leaf.path for leaf in self._saved}, walk.take(subjects, self._clock).leaves
        others = [each() for path, leaf in found.items() if path not in saved for each in leaf.arrays]
        modules = [part for each in subjects.captured if is_module(each) for _, part in submodules(each)]
        captured = [each for module in modules for each in tensors_of(module).values()]
        stays = {leaves.memory_of(each) for each in [*others, *captured] if each is not None}
        for leaf in sorted(self._saved, key=lambda each: not each.in_place):
            misfit = self._restore(leaf, stays)
            if misfit:
                logger.warning("Not restored: %s (%s).", leaf.path, misfit)
            else:
                self._observed[leaf.path] = leaf

    def _restore(self, leaf: ObservedLeaf, stays: set[int]) -> str:
        """Restore a value; return why it does not fit, or nothing."""
        roots, path, kind = self._roots, leaf.path, LeafKind(leaf.kind)
        owner, live = paths.get(roots, path.owner), paths.get(roots, path)
        value = self._tensors[str(path)] if kind is LeafKind.TENSOR else leaf.value
        was_lazy = kind is LeafKind.TENSOR and hasattr(type(live), "materialize")
        if was_lazy:  # before the first batch of a module, which then is of another class
            live.materialize(value.shape, dtype=value.dtype)
        must_be_there = kind is not LeafKind.DATA and not can_be_made(leaf.type, value, kind)
        expected = [leaf.type] if must_be_there else [leaf.before, leaf.type]
        if owner is ABSENT or (type_name(owner) != leaf.owner and not was_lazy):
            return f"expected a {leaf.owner} that holds it, found {_described(owner)}"
        if type_name(live) not in expected or (live is ABSENT and isinstance(owner, list)):
            return f"expected a {' or '.join(dict.fromkeys(expected))} there, found {_described(live)}"
        is_there = kind is LeafKind.TENSOR and live is not ABSENT
        may_grow = is_there and path.steps[-1].key in paths.inside(owner, "_buffers")
        if is_there and (live.dtype != value.dtype or (live.shape != value.shape and not may_grow)):
            return f"expected {value.dtype} {tuple(value.shape)}, as saved, found {live.dtype} {tuple(live.shape)}"
        try:
            leaves.restore(roots, path, value, kind, in_place=leaf.in_place, stays=stays, type_then=leaf.type)
        except Exception as error:  # of any kind: load_state_dict() is the user's, who did not ask for this
            return f"{type(error).__name__}: {error}"
        return "" if self._is_restored(path, kind, value) else "it did not keep the saved value"

    def _is_restored(self, path: Path, kind: LeafKind, value: Any) -> bool:
        live = paths.get(self._roots, path)
        expected = GeneratorState(live).as_restored(value) if is_generator(live) else value
        return encoding.digest_of(leaves.capture(live, kind)) == encoding.digest_of(encoding.exact(expected))

    # ---- Saving

    def before_save(self) -> None:
        """Compare with the start of the launch."""
        if self.has_begun and self._held is None:
            self._compare()
            self._gradients.look(self._roots[_STEPPED])

    def before_hold(self, *, compares: bool) -> None:
        """Compare with the start of the launch, at the end of two of its steps within a restartable block.

        Args:
            compares: this may be one of them. The first step after a failure is not waited for longer than need be:
                what the attempt before has found is captured in any case.
        """
        if self.has_begun and self._held is None:
            if compares and self._looks < _LOOKS:
                self._compare()
            else:
                self._find_gradients()

    def hold(self) -> None:
        """Freeze the state that :meth:`capture` returns, until :meth:`release`: an evaluation may be interrupted."""
        if self.has_begun:
            self._compare()
            # Copied: what an evaluation changes in place, it must not change here.
            self._held = [replace(each, value=copy.deepcopy(each.value)) for each in self.capture()]

    def release(self) -> None:
        """Return the state of the moment from :meth:`capture` again: the evaluation is over."""
        self._held = None

    def _compare(self) -> None:
        self._looks += 1
        subjects = self._look_up()
        self._find_gradients()
        for number, reason in enumerate(subjects.unnamed):
            self._missing[Path(f"unnamed {number}", ())] = Entry("observed", "missing", reason)
        now = walk.take(subjects, self._clock)
        self._name_hooks(now)
        made = {path: now.leaves[path] for path in now.leaves if path in self._made}
        for path, leaf in {**self._start.changed(now), **walk.trained(subjects, now), **made}.items():
            if path in self._observed or path in self._missing or self._start.tells_of_hooks(now, path):
                continue
            if leaf.kind is LeafKind.TENSOR:
                for each in walk.tensors_with(subjects, path):
                    former = leaf.type if each in self._start.leaves else type_name(ABSENT)
                    self._observed.setdefault(each, _found(each, leaf.kind, former, in_place=True))
                continue
            before = self._start.leaves.get(path)
            kind = before.type if before else type_name(ABSENT)
            if not walk.is_captured(leaf, kind):
                self._name(path, leaf.type, _WHY.get(leaf.kind, _NOT_DATA))
            else:
                self._observed[path] = _found(path, leaf.kind, kind, in_place=leaf.keeps(before))

    def _name_hooks(self, now: Census) -> None:
        """Name the modules for which the script has registered hooks since the start."""
        for path, count in now.hooks.items():
            if count > self._start.hooks.get(path, count):
                held = [hook for each in walk.hooks(paths.get(self._roots, path)) for hook in dict.values(each)]
                if any(map(is_code_of_script, held)):
                    self._missing[path.to("hooks", "")] = Entry("observed", "missing", _HOOKED.format(path))

    def _find_gradients(self) -> None:
        """Observe the gradients that are there now, and no longer those of an earlier save."""
        for path in [path for path in self._observed if path.root == _STEPPED]:
            del self._observed[path]
        for index, tensor in enumerate(self._roots[_STEPPED]):
            if self._gradients.is_needed(tensor):
                path = Path(_STEPPED).to("[]", index).to("grad", "grad")
                self._observed[path] = _found(path, LeafKind.DATA, type_name(ABSENT), in_place=False)

    def _name(self, path: Path, kind: str, why: str = _NOT_DATA) -> None:
        self._missing[path] = Entry("observed", "missing", f"{path}, a {kind}, {why.format(self._registers)}")

    def add_missing(self, part: str, note: str) -> None:
        """Name what a resume will lack, with the part that it belongs to."""
        self._missing[Path(note)] = Entry(part, "missing", note)

    def capture(self) -> list[ObservedLeaf]:
        """Return what is observed, as data; what the checkpoint held, before :meth:`begin`."""
        if not self.has_begun or self._held is not None:
            return self._saved if self._held is None else self._held
        roots = self._roots
        self._tensors, captured = {}, []
        for path, observed in list(self._observed.items()):
            live, kind = paths.get(roots, path), LeafKind(observed.kind)
            try:
                if live is ABSENT:
                    raise NotSerialisable("it is gone")
                value = leaves.capture(live, kind)
            except NotSerialisable:
                del self._observed[path]
                self._name(path, type_name(live))
                continue
            if kind is LeafKind.TENSOR:
                self._tensors[str(path)], value = value, None
            owner = type_name(paths.get(roots, path.owner))
            captured.append(replace(observed, owner=owner, type=type_name(live), value=value))
        return captured

    def parts(self) -> dict[str, StaticState]:
        """Return the part of what :meth:`capture` has found last, where there is one."""
        return {TENSORS: StaticState(self._tensors)} if self._tensors else {}

    # ---- Describing

    def left_out(self) -> str:
        """Return what :meth:`begin` could not look at, as text: there is too much of it."""
        return first_of(self._start.left_out, _SHOWN)

    def describe(self) -> list[Entry]:
        """Return an entry for what is captured, and one for each thing that is not."""
        shown: dict[str, None] = {}
        for path in self._observed:
            named, steps = _TOGETHER.get(path.steps[-1].kind, ("", 0))
            shown[f"{named} of {Path(path.root, path.steps[:steps])}" if named else str(path)] = None
        captured = [Entry("observed", "core", first_of([*shown], _SHOWN))] if shown else []
        return [*captured, *self._missing.values()]


def _found(path: Path, kind: LeafKind, before: str, *, in_place: bool) -> ObservedLeaf:
    """Return what is captured of a path from now on; the rest is known at each save."""
    steps = [list(step) for step in path.steps]
    return ObservedLeaf(path.root, steps, "", before, "", kind.value, in_place, None)


def _described(value: Any) -> str:
    return "nothing" if value is ABSENT else f"a {type_name(value)}"
