"""What a launch was given: arguments, settings of the optimizers, frozen layers; compared with the checkpoint's.

Of a setting that differs one of the two values is in force after a resume. Arguments are this launch's. What belongs to
the state that was restored is the checkpoint's: seeds, since the random state continues, and the settings of the
optimizers' groups, which frameworks load with the optimizers; of these the live value decides.
"""

from __future__ import annotations

import enum
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

from resume_adapters.core.log import first_of
from resume_adapters.core.session.options import ResumeOptions
from resume_adapters.core.state import keys
from resume_adapters.core.state.records import Record
from resume_adapters.core.state.stateful import innermost
from resume_adapters.errors import StateMismatch

_LONGEST = 200
"""Characters of a value that are compared and shown."""

_SHOWN = 4
"""Names of parameters that are shown."""

_FROZEN = "frozen parameters"


@dataclass
class OptimizerSettings(Record):
    """What an optimizer was made with.

    Attributes:
        kind: its class; empty where a different one can load its state.
        sizes: the number of parameters in each group.
        groups: the settings of each group, as text.
        order: checksums of the parameters' names, over all groups; 0 where the position does not matter or has no name.
    """

    kind: str
    sizes: list[int]
    groups: list[dict[str, str]]
    order: list[int] = field(default_factory=list)


@dataclass
class LaunchSettings(Record):
    """What a launch was given.

    Attributes:
        arguments: arguments and options, as text, by the name under which a user sets them.
        optimizers: what the optimizers were made with.
        schedulers: the classes of the schedules.
        frozen: the parameters that are not trained.
    """

    arguments: dict[str, str] = field(default_factory=dict)
    optimizers: list[OptimizerSettings] = field(default_factory=list)
    schedulers: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)

    def by_name(self) -> dict[str, str]:
        """Return all settings that may be changed from launch to launch, as text."""
        found = dict(self.arguments)
        for number, optimizer in enumerate(self.optimizers):
            found.update(_of_groups(optimizer.groups, f" of optimizer {number}" if len(self.optimizers) > 1 else ""))
        return {**found, _FROZEN: _listed(self.frozen)}


def _of_groups(groups: Sequence[Mapping[str, str]], suffix: str) -> dict[str, str]:
    """Return the settings of groups: one that is alike in all of them by its name alone."""
    found = {}
    for name in dict.fromkeys(name for group in groups for name in group):
        values = [group.get(name, "") for group in groups]
        alike = len(set(values)) == 1
        found[f"{name}{suffix}"] = values[0] if alike else f"[{', '.join(values)}]"
    return found


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({first_of(names, _SHOWN)})" if names else "none"


# ---- Read


def as_text(value: Any) -> str | None:
    """Return a value as text; ``None`` for what is no plain setting."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float | str | os.PathLike | timedelta):
        return str(value)[:_LONGEST]
    if isinstance(value, Mapping):
        items = {key: as_text(each) for key, each in value.items()}
        return f"{{{', '.join(f'{key}: {text}' for key, text in items.items())}}}"[:_LONGEST]
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{', '.join(str(as_text(each)) for each in value)}]"[:_LONGEST]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a tensor, as a learning rate may be
        return str(value.item())
    return None


def read_settings(
    arguments: Mapping[str, Any],
    optimizers: Iterable[Any] = (),
    schedulers: Iterable[Any] = (),
    modules: Iterable[Any] = (),
    *,
    names: Mapping[str, str] | None = None,
    is_fixed: bool = True,
) -> LaunchSettings:
    """Return what a launch was given, as data.

    Args:
        arguments: by the name under which a user sets them; what is no plain setting is left out.
        optimizers: of torch, or what a framework wraps around them.
        schedulers: their schedules, likewise.
        modules: what is trained.
        names: the names under which a user gives settings of the optimizers' groups, by those of torch.
        is_fixed: no optimizer of a different class or size can load the state of one of these.
    """
    by_name = keys.of_modules(dict(module.named_parameters()) for module in modules)
    inner = [innermost(each, "optimizer") for each in optimizers]
    return LaunchSettings(
        texts(arguments),
        [_of_optimizer(each, names or {}, by_name if is_fixed else None) for each in inner],
        [type(innermost(each, "scheduler")).__name__ for each in schedulers],
        [name.partition(keys.OF_MODEL)[0] for name, each in by_name.items() if not each.requires_grad],
    )


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the plain settings among some values, as text."""
    found = {name: as_text(value) for name, value in values.items()}
    return {name: text for name, text in found.items() if text is not None}


def _of_optimizer(optimizer: Any, names: Mapping[str, str], parameters: Mapping[str, Any] | None) -> OptimizerSettings:
    """Return what an optimizer was made with: of a learning rate with a schedule, the one before the schedule."""
    held = list(getattr(optimizer, "param_groups", ()))
    groups = []
    for group in held:
        start = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
        plain = {key: value for key, value in {**group, **start}.items() if key not in _NOT_SETTINGS}
        groups.append({names.get(key, key): text for key, text in texts(plain).items()})
    if parameters is None:
        return OptimizerSettings("", [], groups)
    # The state of what is sharded is saved by names.
    whole = {name: each for name, each in parameters.items() if not hasattr(each, "placements")}
    named = {id(each): zlib.crc32(name.encode()) for name, each in whole.items()}
    order = [named.get(id(each), 0) for group in held for each in group["params"]]
    return OptimizerSettings(type(optimizer).__name__, [len(group["params"]) for group in held], groups, order)


_NOT_SETTINGS = ("params", "param_names", "initial_lr", "step")


def of_launch(
    found: LaunchSettings, topology: Mapping[str, int], options: ResumeOptions, framework: str
) -> LaunchSettings:
    """Return all that a launch was given.

    Args:
        found: what the framework knows.
        topology: the settings that are compared as the topology.
    """
    given = {**of_random_state(), **found.arguments, **of_options(options), **_versions(framework)}
    return replace(found, arguments={name: text for name, text in given.items() if name not in topology})


def _versions(framework: str) -> dict[str, str]:
    import torch

    return dict(zip(_VERSIONED, (framework, str(torch.__version__), platform.python_version()), strict=True))


_VERSIONED = ("framework", "torch", "python")


def of_options(options: ResumeOptions) -> dict[str, str]:
    """Return the options that are no parts of the state."""
    values = {name: getattr(options, name) for name in _OPTIONS}
    return {name: as_text(value) or repr(value)[:_LONGEST] for name, value in values.items()}


_OPTIONS = ("keep", "stop", "save_every", "mtbf", "verify", "on_batch_change", "on_save_error", "stage")


def of_random_state() -> dict[str, str]:
    """Return the seed that the script has given to torch; nothing where it has given none, and torch drew its own."""
    import torch

    seed = torch.initial_seed()
    return {"seed": str(seed)} if seed < 1 << 32 else {}


# ---- Compare


class _Change(NamedTuple):
    """A setting that differs, with the value in the checkpoint and this launch's."""

    name: str
    saved: str
    given: str

    @property
    def is_seed(self) -> bool:
        return self.name.endswith("seed")


class SettingsComparison:
    """Compares the settings of this launch with those of the checkpoint that it resumes from.

    Args:
        read: returns the settings of now.

    Attributes:
        has_begun: :meth:`begin` was called.
    """

    def __init__(self, read: Callable[[], LaunchSettings]) -> None:
        self._read = read
        self.has_begun = False
        self._given: LaunchSettings | None = None
        self._saved: LaunchSettings | None = None
        self._checkpoint = ""
        self._kept: set[str] = set()
        self._regrouped: dict[int, OptimizerSettings] = {}

    def begin(self, saved: LaunchSettings | None = None, checkpoint: str = "") -> None:
        """Read what this launch was given, before anything is loaded.

        Args:
            saved: the checkpoint's settings; ``None`` for a fresh start, and where an earlier version saved none.

        Raises:
            StateMismatch: the state of the optimizers or schedules cannot be loaded into those of this launch.
        """
        self.has_begun = True
        self._given, self._saved, self._checkpoint = self._read(), saved, checkpoint
        self._require_loadable()

    def _require_loadable(self) -> None:
        given, saved = self._given, self._saved
        if given is None or saved is None:
            return
        pairs = {
            "optimizer": ([each.kind for each in saved.optimizers], [each.kind for each in given.optimizers]),
            "schedule": (saved.schedulers, given.schedulers),
        }
        for what, kinds in pairs.items():
            for kind, here in zip(*kinds, strict=False):
                if kind and here and kind != here:
                    raise self._mismatch(f"the {what} {kind}, this launch has {here}: its state cannot be loaded")
        for one, other in zip(saved.optimizers, given.optimizers, strict=False):
            before, now = one.sizes, other.sizes
            if before and now and sum(before) != sum(now):
                raise self._mismatch(
                    f"{sum(before)} parameters in the optimizer, this launch has {sum(now)}"
                    f"{self._about_frozen()}: its state cannot be loaded. {_GROUPS}"
                )
            if before and now and before != now:
                raise self._mismatch(
                    f"groups of {_numbers(before)} parameters in the optimizer, this launch has {_numbers(now)}: its "
                    f"state cannot be loaded. {_GROUPS}"
                )
            moved = [pair for pair in zip(one.order, other.order, strict=False) if all(pair) and pair[0] != pair[1]]
            if moved and sorted(before for before, _ in moved) == sorted(now for _, now in moved):
                raise self._mismatch(
                    f"the optimizer's parameters in another order ({len(moved)} of {len(other.order)} have moved). "
                    "Their state is kept by their positions: build the modules and groups in the same order in each "
                    "launch, sorted where they come from a set or a dict"
                )

    def _about_frozen(self) -> str:
        changed = next((each for each in self._changes() if each.name == _FROZEN), None)
        return "" if changed is None else f" (frozen parameters: {changed.saved} then, {changed.given} now)"

    def _mismatch(self, found: str) -> StateMismatch:
        return StateMismatch(
            f"{self._checkpoint} was saved with {found}. Launch as before, or start another run directory"
        )

    def _changes(self) -> list[_Change]:
        if self._given is None or self._saved is None:
            return []
        saved, given = self._saved.by_name(), self._given.by_name()
        return [
            _Change(name, saved[name], given[name]) for name in given if name in saved and saved[name] != given[name]
        ]

    def changed_seeds(self) -> str:
        """Return in words which seeds were different when the checkpoint was saved; empty where none is known to be."""
        return "; ".join(
            f"{each.name} {each.saved}, this launch has {each.given}" for each in self._changes() if each.is_seed
        )

    def untrained(self) -> str:
        """Return in words which settings of this launch a finished run was not trained with."""
        changes = [each for each in self._changes() if each.name not in (*_VERSIONED, *_OPTIONS)]
        return _words((each.name, each.given, "was", each.saved) for each in changes) if changes else ""

    def describe(self) -> str:
        """Return in one line what differs from the checkpoint, and which value is in force; empty if nothing does.

        Call it when all is loaded.
        """
        live = self._read().by_name() if self._saved is not None else {}
        kept: list[_Change] = []
        replaced: list[_Change] = []
        for each in self._changes():
            is_argument = self._given is not None and each.name in self._given.arguments
            is_kept = each.is_seed if is_argument else live.get(each.name) != each.given
            (kept if is_kept else replaced).append(each)
        self._kept = {each.name for each in kept}
        said = []
        if replaced:
            said.append(f"this launch's {_words((each.name, each.given, 'was', each.saved) for each in replaced)}")
        if kept:
            said.append(f"the checkpoint's {_words((each.name, each.saved, 'given', each.given) for each in kept)}")
        if not said:
            return ""
        other = any(each.name in _VERSIONED for each in replaced)
        means = " Under other versions the same steps may differ in their last bits." if other else ""
        return f"Settings that differ from {self._checkpoint}; in force: {' and '.join(said)}.{means}"

    def regrouped(self) -> list[str]:
        """Return in words which optimizers have other groups now than at the start; those are saved from then on."""
        if self._given is None:
            return []
        live, found = self._read().optimizers, []
        for number, (one, now) in enumerate(zip(self._given.optimizers, live, strict=False)):
            if (one.kind, one.sizes) != (now.kind, now.sizes):
                found.append(
                    f"{now.kind} has groups of {_numbers(now.sizes)} parameters, where {one.kind} had "
                    f"{_numbers(one.sizes)} at the start: a launch that starts so is refused. {_GROUPS}"
                )
                # A resume compares them with its own before anything is loaded.
                self._regrouped[number] = now
            elif moved := sum(bool(was) and was != other for was, other in zip(one.order, now.order, strict=True)):
                found.append(
                    f"{moved} of the parameters of {now.kind} are no longer those of the model, or have other names: "
                    "it has been given others since the start, as where weights are tied or a layer is replaced. A "
                    "launch that resumes trains it as it is at the start. Do that before the optimizer is made"
                )
        return found

    def in_force(self) -> LaunchSettings:
        """Return the settings to save: this launch's, and the checkpoint's where those are in force."""
        found, saved = self._given or self._read(), self._saved
        if saved is not None and self._kept:
            kept = {name: saved.arguments[name] for name in self._kept if name in saved.arguments}
            is_loaded = bool(self._kept - set(found.arguments) - {_FROZEN})
            found = replace(
                found,
                arguments={**found.arguments, **kept},
                optimizers=saved.optimizers if is_loaded else found.optimizers,
                frozen=saved.frozen if _FROZEN in self._kept else found.frozen,
            )
        optimizers = [self._regrouped.get(number, each) for number, each in enumerate(found.optimizers)]
        return replace(found, optimizers=optimizers)


_GROUPS = "Make all groups before the run begins or resumes: a parameter that is frozen may be in one"


def _numbers(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes)) or "no"


def _words(changes: Iterable[tuple[str, str, str, str]]) -> str:
    return ", ".join(f"{name} {value} ({word} {other})" for name, value, word, other in changes)
