"""Retention applied to a run directory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from resume_adapters.core.checkpoint import layout, retention
from resume_adapters.core.checkpoint.catalog import Catalog, Summary, newest_first, number_in
from resume_adapters.core.checkpoint.commit import PendingCheckpoint
from resume_adapters.core.checkpoint.layout import SUPERSEDED, superseded_path
from resume_adapters.core.checkpoint.remove import Fence, delete
from resume_adapters.core.checkpoint.retention import Candidate, KeepAll, Plan, Policy
from resume_adapters.core.checkpoint.thin import WeightsFiles, drop_state
from resume_adapters.core.checkpoint.validity import CommitHistory, check_digests, read_manifest
from resume_adapters.core.log import logger
from resume_adapters.core.ranks import SINGLE_PROCESS, Ranks, run_on_all_ranks
from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.run_directory.upkeep import Placeholder
from resume_adapters.core.storage.groups import StorageGroup
from resume_adapters.errors import CheckpointDamaged, FencedOff, FormatTooNew, ResumeError


def plan_prune(
    catalog: Catalog,
    keep: Policy,
    history: CommitHistory,
    *,
    now: float,
    best: str | None = None,
    just_committed: str | None = None,
    leaders: Ranks = SINGLE_PROCESS,
    held: Callable[[], Mapping[str, str]] = dict,
) -> Plan:
    """Apply a policy to the committed checkpoints of a run directory, or of all run directories of a run.

    Checkpoints that are damaged, pending, foreign or of a later version are neither counted nor removed, nor are those
    that the run has not committed under their name: a copy is the user's. The anchor is read whole before anything is
    removed because of it.

    Args:
        catalog: the checkpoints of the run directory. After a commit, of the files that it has looked at before, it
            looks at those again on which it depends what is removed.
        keep: the policy.
        history: what the run has committed in this directory.
        now: seconds since 1970.
        best: name of the best checkpoint; by default that of the newest manifest.
        just_committed: name of a checkpoint that this process has just committed; it is not read again.
        leaders: the leaders of the run's directories; all call this and get the same plan.
        held: returns the names of checkpoints that must stay, each with the reason.
    """
    storage, directory = catalog.storage, catalog.directory
    is_trusting = just_committed is not None

    def look() -> _Found:
        whole = catalog.whole()
        if not is_trusting and catalog.look_again():
            whole = catalog.whole()
        unknown = {
            name
            for name, summary in whole.items()
            if not _has_committed(history, name, summary) and not layout.is_unfinished(storage, directory / name)
        }
        linked = {name: f"{link} points to it" for name, link in catalog.linked.items()}
        return _Found(whole, unknown, {**held(), **linked})

    def agrees(name: str) -> bool:
        if found[leaders.rank].whole[name] is None:
            return False
        with contextlib.suppress(CheckpointDamaged, FormatTooNew):
            check_digests(storage, directory / name, read_manifest(storage, directory / name).files)
            return True
        return False

    def is_whole(name: str) -> bool:
        return name == just_committed or all(run_on_all_ranks(leaders, lambda: agrees(name), f"read {name}"))

    while True:
        found = run_on_all_ranks(leaders, look, "list the checkpoints")
        plan = _plan(found, keep, leaders.gather(now)[0], best, is_whole)
        gone = [*plan.remove, *plan.thin]
        suspects = [*gone, *list(plan.keep)[:_SUSPECTS]] if is_trusting and gone else []
        again = functools.partial(catalog.look_again, suspects)
        if not any(run_on_all_ranks(leaders, again, "look at the checkpoints")):
            return plan


class _Found(NamedTuple):
    """The committed checkpoints of a run directory.

    Attributes:
        whole: what is remembered of each by name; ``None`` for one whose files do not have their sizes.
        unknown: the names under which the run has committed nothing.
        held: the names of what must stay, each with the reason: a link points to it, or it is being copied.
    """

    whole: dict[str, Summary | None]
    unknown: set[str]
    held: dict[str, str]


def _has_committed(history: CommitHistory, name: str, summary: Summary | None) -> bool:
    """Return whether a run has committed a checkpoint under its name.

    Version 0.1.0 journaled steps without names: there the name must be one that a framework gives to this step.
    """
    name = name.removesuffix(SUPERSEDED)
    is_unnamed = summary is not None and history.has_unnamed(summary.step) and number_in(name) == summary.step
    return history.has(name) or is_unnamed


def _plan(
    found_by_all: list[_Found], keep: Policy, now: float, best: str | None, is_whole: Callable[[str], bool]
) -> Plan:
    """Apply a policy to what the leaders of the run's directories have found in them."""
    summaries, partial = _merge([found.whole for found in found_by_all])
    unknown = {name for found in found_by_all for name in found.unknown} & set(summaries)
    summaries = {name: summary for name, summary in summaries.items() if name not in unknown}
    held = {name: reason for found in found_by_all for name, reason in found.held.items()}
    anchor = None
    for name in list(summaries):
        if name not in partial and not summaries[name].weights_only and is_whole(name):
            anchor = name
            break
        del summaries[name]
    candidates = [
        Candidate.of(
            name,
            each,
            superseded=name.endswith(SUPERSEDED) and name.removesuffix(SUPERSEDED) in summaries,
            partial=name in partial,
        )
        for name, each in summaries.items()
    ]
    best = best or (summaries[anchor].best if anchor else None)
    if best is not None and best not in summaries:
        best += SUPERSEDED
    plan = retention.plan_retention(candidates, keep, now=now, anchor=anchor, best=best, held=held)
    return replace(plan, keep={**plan.keep, **dict.fromkeys(sorted(unknown), _NOT_OURS)})


_NOT_OURS = "the journal has no commit of it under this name"

_SUSPECTS = 32
"""How many of the newest kept checkpoints are looked at again before others are removed because of them."""


def _merge(of_all: list[dict[str, Summary | None]]) -> tuple[dict[str, Summary], set[str]]:
    """Return what is damaged in no run directory, as a resume tries it, and the names of what is missing in some."""
    damaged = {name for whole in of_all for name, summary in whole.items() if summary is None}
    found = {
        name: summary
        for whole in reversed(of_all)
        for name, summary in whole.items()
        if summary is not None and name not in damaged
    }
    partial = {name for name in found if any(name not in whole for whole in of_all)}
    order = sorted(found, key=lambda name: newest_first(name, found[name].step, found[name].written))
    return {name: found[name] for name in order}, partial


def prune(catalog: Catalog, plan: Plan, control: ControlDirectory, fence: Fence) -> Plan:
    """Remove the checkpoints that a plan removes. If this is interrupted, the next start removes the rest.

    Args:
        catalog: the checkpoints of the run directory.
        plan: what to remove.
        control: its journal gets an entry for each checkpoint that is removed, and what cannot be removed is counted.
        fence: raises where a later start owns the run directory.

    Returns:
        The plan as it was carried out: what could not be removed is kept. What it thins is left as it is.

    Raises:
        FencedOff: a later start owns the run directory.
    """
    storage, directory, held = catalog.storage, catalog.directory, {}
    for name, reason in plan.remove.items():
        if not layout.root_paths(storage, directory / name):
            continue  # it is in another directory only
        error = delete(storage, directory / name, fence)
        control.leftovers.add(directory / name, error)
        if error is not None and layout.root_paths(storage, directory / name):
            held[name] = f"could not be removed: {error.strerror}"
        else:
            control.journal.append("prune", checkpoint=name, reason=reason)
    remove = {name: reason for name, reason in plan.remove.items() if name not in held}
    return replace(plan, keep={**plan.keep, **held}, remove=remove)


Observed: TypeAlias = Callable[[Mapping[str, str]], contextlib.AbstractContextManager[Any]]


class Pruner:
    """Applies the retention policy of a run to its directory.

    Args:
        catalog: the checkpoints of the run directory.
        control: its journal gets an entry for each checkpoint that is removed, and what cannot be removed is counted.
        placeholder: is removed after the first commit.
        keep: the policy.
        fence: raises where a later start owns the run directory.
        held: returns the names of checkpoints that must stay, each with the reason.
        observed: returns the context in which the checkpoints of a plan are removed, by name and reason.
        weights: where the framework's checkpoints hold the weights, for a policy that keeps these alone.
    """

    def __init__(
        self,
        catalog: Catalog,
        control: ControlDirectory,
        placeholder: Placeholder,
        *,
        keep: Policy,
        fence: Fence,
        held: Callable[[], Mapping[str, str]],
        observed: Observed | None = None,
        weights: WeightsFiles | None = None,
    ) -> None:
        self.directory = catalog.directory
        self._catalog = catalog
        self.keep = keep
        self._control = control
        self.fence = fence
        self._placeholder = placeholder
        self._has_committed = False
        self._is_first = True
        self._held = held
        self._observed: Observed = contextlib.nullcontext if observed is None else observed
        self._weights = weights
        self._not_thinned: dict[str, str] = {}

    def prune(self, group: StorageGroup, best: str | None, just_committed: str | None = None) -> Plan:
        """Remove the checkpoints that the policy does not keep. The leaders of all run directories call it together.

        Args:
            group: the ranks that share the run directory.
            best: name of the best checkpoint.
            just_committed: name of the checkpoint that was just committed.

        Returns:
            What is kept and what was removed, with reasons; nothing after a commit where all is kept.
        """
        run_on_all_ranks(group.leaders, self.fence, "prune")
        if just_committed is not None and not self._has_committed:
            self._placeholder.remove(self._control.leftovers, self.fence)
            self._has_committed = True
        if just_committed is not None and not group.is_partial and self._keeps_all(just_committed):
            return Plan({}, {})
        plan = plan_prune(
            self._catalog,
            self.keep,
            self._control.journal.committed(),
            now=self._control.clock(),
            best=best,
            just_committed=just_committed,
            leaders=group.leaders,
            held=lambda: {**self._not_thinned, **self._held()},
        )
        with self._observed({**plan.thin, **plan.remove}):
            thinned = {name + SUPERSEDED: reason for name, reason in plan.thin.items() if self._thin(name)}
            return prune(self._catalog, replace(plan, remove={**thinned, **plan.remove}), self._control, self.fence)

    def _thin(self, name: str) -> bool:
        """Leave the weights of a checkpoint alone; return whether that is done. What fails is not tried again."""
        assert self._weights is not None, "RunOptions refuses such a policy without them"
        storage, path = self._catalog.storage, self.directory / name
        try:
            step = self._catalog.summary(path).step
            is_file = layout.has_sidecar(storage, path)
            pending = PendingCheckpoint(storage, SINGLE_PROCESS, path, step, self.fence, is_file=is_file)
            drop_state(pending, self._weights)
        except FencedOff:
            raise
        except ResumeError as error:
            reason = error.__cause__ or error
            logger.warning("%s keeps all of its state, of which KeepWeights wanted the weights: %s", name, reason)
            self._not_thinned[name] = f"could not be thinned: {reason}"
        return name not in self._not_thinned

    def _keeps_all(self, just_committed: str) -> bool:
        """Return whether nothing can be removed after a commit, so that no checkpoint needs to be looked at."""
        if not isinstance(self.keep, KeepAll):
            return False
        if self._is_first:  # a crash may have left one that was superseded, of any name
            self._is_first = False
            return not any(SUPERSEDED in entry.name for entry in self._catalog.storage.entries(self.directory))
        return not layout.root_paths(self._catalog.storage, superseded_path(self.directory / just_committed))
