"""Which checkpoints to keep, as a pure plan with reasons. Time is an argument.

A policy says what it keeps; policies are joined with ``|``; what no policy keeps goes, except the anchor (what a
restart would take now) and the best checkpoint, which nothing can remove.
"""

from __future__ import annotations

import abc
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any

from resume_adapters.errors import UnsupportedSetting


@dataclass(frozen=True)
class Candidate:
    """A committed checkpoint, as retention sees it.

    Attributes:
        name: the directory's name, unique in the run directory.
        step: optimizer steps completed.
        written: seconds since 1970.
        metrics: last evaluation; ``None`` where it was not a finite number.
        superseded: a later save of the same name exists.
        partial: not every node has its part of it: it can take no other's place.
        weights_only: nothing resumes from it; only :class:`KeepWeights` counts it.
    """

    name: str
    step: int
    written: float
    metrics: dict[str, float | None] = field(default_factory=dict)
    superseded: bool = False
    partial: bool = False
    weights_only: bool = False

    @classmethod
    def of(cls, name: str, saved: Any, *, superseded: bool = False, partial: bool = False) -> Candidate:
        """Return a checkpoint as retention sees it, of its manifest or what is remembered of that."""
        return cls(name, saved.step, saved.written, saved.metrics, superseded, partial, saved.weights_only)


@dataclass(frozen=True)
class Policy(abc.ABC):
    """A retention policy. Combine two with ``|``: a checkpoint is kept if either keeps it."""

    @abc.abstractmethod
    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        """Return the names it keeps, each with the reason."""

    @property
    def metrics(self) -> frozenset[str]:
        """The metrics by which it ranks, as an evaluation names them."""
        return frozenset()

    @property
    def of_weights(self) -> Policy | None:
        """The policy that says whose weights are kept; ``None``: checkpoints of weights alone stay as they are."""
        return None

    def __or__(self, other: Policy) -> Policy:
        return AnyOf((self, other))


@dataclass(frozen=True)
class AnyOf(Policy):
    """Keeps what any of its policies keeps."""

    policies: tuple[Policy, ...]

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset().union(*(policy.metrics for policy in self.policies))

    @property
    def of_weights(self) -> Policy | None:
        found = [each for policy in self.policies if (each := policy.of_weights) is not None]
        return AnyOf(tuple(found)) if found else None

    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        kept: dict[str, str] = {}
        for policy in self.policies:
            for name, reason in policy.keeps(candidates, now).items():
                kept[name] = f"{kept[name]}, {reason}" if name in kept else reason
        return kept


@dataclass(frozen=True)
class KeepAll(Policy):
    """Keeps everything."""

    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        return {candidate.name: "no limit is set" for candidate in candidates}


@dataclass(frozen=True)
class KeepLast(Policy):
    """Keeps the newest ``count`` checkpoints by step (HF ``save_total_limit``, Accelerate ``total_limit``)."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UnsupportedSetting(f"KeepLast({self.count}) keeps nothing; the least is KeepLast(1)")

    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        newest = sorted(candidates, key=lambda candidate: -candidate.step)[: self.count]
        return {candidate.name: f"one of the last {self.count}" for candidate in newest}


@dataclass(frozen=True)
class KeepBest(Policy):
    """Keeps the ``count`` best checkpoints by a metric (Lightning ``save_top_k``).

    Args:
        count: how many.
        metric: its name in the evaluation, for example ``"eval_loss"``.
        mode: ``"min"`` or ``"max"``: which value is better. Of equal values the earlier step is better.
    """

    count: int
    metric: str
    mode: str = "min"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UnsupportedSetting(f"KeepBest({self.count}, ...) keeps nothing; the least is KeepBest(1, ...)")
        if self.mode not in ("min", "max"):
            raise UnsupportedSetting(f'KeepBest(mode={self.mode!r}): expected "min" or "max"')

    @property
    def metrics(self) -> frozenset[str]:
        return frozenset((self.metric,))

    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        sign = 1.0 if self.mode == "min" else -1.0
        scored = [
            (sign * value, candidate.step, candidate.name)
            for candidate in candidates
            if (value := candidate.metrics.get(self.metric)) is not None and math.isfinite(value)
        ]
        return {name: f"one of the {self.count} best by {self.metric}" for _, _, name in sorted(scored)[: self.count]}


@dataclass(frozen=True)
class KeepEvery(Policy):
    """Keeps milestones: checkpoints whose step is a multiple of ``steps``."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UnsupportedSetting(f"KeepEvery({self.steps}): expected at least 1 step")

    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        return {
            candidate.name: f"a multiple of {self.steps} steps"
            for candidate in candidates
            if candidate.step % self.steps == 0
        }


@dataclass(frozen=True)
class KeepWithin(Policy):
    """Keeps checkpoints written within the last ``period``."""

    period: timedelta

    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        return {
            candidate.name: f"written within {self.period}"
            for candidate in candidates
            if now - candidate.written <= self.period.total_seconds()
        }


@dataclass(frozen=True)
class KeepWeights(Policy):
    """Keeps the weights of what a policy keeps. Of a checkpoint that no other policy keeps, all else is removed.

    What is left is loaded by the framework alone, and no run resumes from it.

    Args:
        policy: whose weights are kept, for example ``KeepEvery(1000)``.
    """

    policy: Policy

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy) or self.policy.of_weights is not None:
            raise UnsupportedSetting(f"KeepWeights({self.policy!r}): expected another policy, such as KeepEvery(1000)")

    @property
    def metrics(self) -> frozenset[str]:
        return self.policy.metrics

    @property
    def of_weights(self) -> Policy:
        return self.policy

    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        return {}


@dataclass(frozen=True)
class KeepUnless(Policy):
    """Keeps everything except what the framework or the user wants removed.

    Args:
        unwanted: names of checkpoints; it may grow.
        passing: what the names of checkpoints begin with that are only wanted until there is a newer one.
    """

    unwanted: set[str]
    passing: str = ""

    def keeps(self, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        return {
            candidate.name: "the framework keeps it"
            for candidate in candidates
            if candidate.name not in self.unwanted and not (self.passing and candidate.name.startswith(self.passing))
        }


@dataclass(frozen=True)
class Plan:
    """The names to keep, to remove (oldest first), and of which the weights alone are kept, each with the reason."""

    keep: dict[str, str]
    remove: dict[str, str]
    thin: dict[str, str] = field(default_factory=dict)


def plan_retention(
    candidates: Sequence[Candidate],
    policy: Policy,
    *,
    now: float,
    anchor: str | None,
    best: str | None = None,
    held: Mapping[str, str] = types.MappingProxyType({}),
) -> Plan:
    """Plan what to keep and what to remove. The anchor, the best and what is held are kept under every policy.

    Args:
        candidates: the committed checkpoints.
        policy: what to keep beyond the anchor and the best.
        now: seconds since 1970, on the clock of :attr:`Candidate.written`.
        anchor: name of the checkpoint that a restart would take now.
        best: name of the best checkpoint, where the run tracks one.
        held: names of checkpoints that must not be removed, each with the reason.
    """
    current = [candidate for candidate in candidates if not candidate.superseded]
    whole = sorted((each for each in current if not each.weights_only), key=lambda candidate: candidate.step)
    keep = _keeps(policy, whole, now)
    for name, reason in ((anchor, "a restart would resume from it"), (best, "the best so far"), *held.items()):
        if name is not None and any(candidate.name == name for candidate in candidates):
            keep[name] = f"{keep[name]}, {reason}" if name in keep else reason
    if policy.of_weights is None:
        reasons, candidates = {}, [each for each in candidates if each.superseded or not each.weights_only]
    else:
        of_weights = _keeps(policy.of_weights, current, now)
        reasons = {name: f"its weights: {why}" for name, why in of_weights.items() if name not in keep}
    thin = {each.name: reasons.pop(each.name) for each in whole if each.name in reasons and not each.partial}
    keep |= reasons
    gone = [candidate for candidate in candidates if candidate.name not in {**keep, **thin}]
    gone.sort(key=lambda candidate: (candidate.step, candidate.written))
    remove = {
        candidate.name: "saved again under its name" if candidate.superseded else "no policy keeps it"
        for candidate in gone
    }
    return Plan(keep=keep, remove=remove, thin=thin)


def _keeps(policy: Policy, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
    return policy.keeps(candidates, now) | policy.keeps([each for each in candidates if not each.partial], now)


# ---- From text


_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_BEST = re.compile(r"([^:]+)(?::(min|max)(?::(\d+))?)?")
_PERIOD = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)([smhdw])")


def parse_best(text: str) -> KeepBest:
    """Parse ``METRIC[:min|max[:N]]``.

    Raises:
        UnsupportedSetting: the text has another form.
    """
    found = _BEST.fullmatch(text)
    if found is None:
        raise UnsupportedSetting(f"invalid metric {text!r}: expected METRIC[:min|max[:N]], for example eval_loss:min:2")
    return KeepBest(int(found[3] or 1), found[1], found[2] or "min")


def parse_period(text: str) -> timedelta:
    """Parse a period such as ``12h``.

    Raises:
        UnsupportedSetting: the text has another form.
    """
    found = _PERIOD.fullmatch(text)
    if found is None:
        raise UnsupportedSetting(
            f"invalid period {text!r}: expected a number and one of s, m, h, d, w, for example 12h"
        )
    return timedelta(**{_UNITS[found[2]]: float(found[1])})


def join_policies(last: int | None, bests: list[KeepBest], every: int | None, within: str | None) -> Policy:
    """Join the options with ``|``: what any of them keeps is kept.

    Raises:
        UnsupportedSetting: no option is given, or one of them keeps nothing.
    """
    policies: list[Policy] = [*bests]
    if last is not None:
        policies.append(KeepLast(last))
    if every is not None:
        policies.append(KeepEvery(every))
    if within is not None:
        policies.append(KeepWithin(parse_period(within)))
    if not policies:
        raise UnsupportedSetting(
            "say what to keep: --keep-last N, --keep-best METRIC, --keep-every STEPS or --keep-within 12h; together "
            "they keep what any of them keeps"
        )
    return reduce(or_, policies)
