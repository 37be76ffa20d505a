"""Which faults there are, and which of them a seed chooses for a run."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resume_adapters.errors import UnsupportedSetting

KINDS = {
    "step": "SIGKILL of all processes between two steps",
    "save": "SIGKILL of all processes inside a save",
    "prune": "SIGKILL of all processes while old checkpoints are removed",
    "rank": "SIGKILL of one rank",
    "launcher": "SIGKILL of the launching process alone",
    "term": "SIGTERM to the launching process",
    "stop": "a stop file",
    "twice": "SIGKILL of all processes, and again before the next commit",
}
"""The kinds of faults, in words."""


@dataclass(frozen=True)
class Fault:
    """What happens to a run, and exactly where.

    Attributes:
        kind: of ``KINDS``.
        step: the step after which it happens; for ``save`` and ``prune`` the step that is saved.
        operation: before which file operation of the save or prune, from 1.
        rank: the rank that is killed.
    """

    kind: str
    step: int
    operation: int | None = None
    rank: int | None = None

    @property
    def point(self) -> str:
        """Where the processes are to pause, as RESUME_ADAPTERS_PAUSE names it."""
        if self.operation is not None:
            return f"{self.kind}:{self.step}:{self.operation}"
        return f"step:{self.step}" + ("" if self.rank is None else f"@{self.rank}")

    def __str__(self) -> str:
        if self.kind == "save":
            return f"SIGKILL before file operation {self.operation} of the save of step {self.step}"
        if self.kind == "prune":
            return f"SIGKILL before file operation {self.operation} of a removal after the save of step {self.step}"
        if self.kind in ("step", "twice"):
            return f"SIGKILL after step {self.step}"
        whom = f"SIGKILL of rank {self.rank}" if self.kind == "rank" else KINDS[self.kind]
        return f"{whom}, after step {self.step}"


@dataclass(frozen=True)
class Facts:
    """What a reference run did that decides where faults can be.

    Attributes:
        last: its last step.
        saves: the steps that it saved, each with the number of file operations until its commit.
        prunes: the saved steps after which it removed checkpoints, each with the number of file operations.
        ranks: the number of ranks.
        has_launcher: whether the launched process only starts the ranks.
    """

    last: int
    saves: Mapping[int, int]
    prunes: Mapping[int, int]
    ranks: int
    has_launcher: bool


@dataclass
class Plan:
    """The faults of one run, in the order of their steps, and the kinds that do not apply, each with the reason."""

    faults: list[Fault] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> tuple[str, ...]:
    """Read kinds from text such as ``step,save,step``.

    Raises:
        UnsupportedSetting: there is no such kind.
    """
    kinds = tuple(name.strip() for name in text.split(","))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UnsupportedSetting(f"there is no fault {', '.join(unknown)!r}: choose from {', '.join(KINDS)}")
    return kinds


def choose(facts: Facts, kinds: Sequence[str], seed: int) -> Plan:
    """Choose where the faults of a run happen: each at a step of its own, after the first checkpoint.

    A kill falls where no checkpoint is, so that steps are done twice, and as few kills as possible fall between the
    same two checkpoints.

    Args:
        facts: of the reference run.
        kinds: which faults; a kind may occur several times.
        seed: the same seed gives the same faults.

    Raises:
        UnsupportedSetting: the reference saved nothing before its last step, or no kind applies.
    """
    first = min(facts.saves, default=facts.last)
    if first >= facts.last - 1:
        saved = f"the first save is that of step {first}" if facts.saves else "nothing is saved"
        raise UnsupportedSetting(
            f"{saved}, and the run has {facts.last} steps, so no launch could resume: do more steps (--steps N), or "
            "save more often (--save-every N)"
        )
    plan, taken = Plan(), list[int]()
    saves = sorted(facts.saves)

    def crowd(step: int) -> int:
        """Return how many faults are between the same two saves."""
        return sum(bisect_left(saves, step) == bisect_left(saves, each) for each in taken)

    for number, kind in enumerate(kinds):
        rng = random.Random(f"{seed} {number} {kind}")  # its own: a kind that is left out changes no other
        reason = _obstacle(facts, kind)
        free = [] if reason else [step for step in _places(facts, kind, first) if step not in taken]
        if not free:
            plan.left_out[kind] = reason or "no step is left for it"
            continue
        fewest = min(map(crowd, free))
        step = rng.choice([step for step in free if crowd(step) == fewest])
        inside = {"save": facts.saves, "prune": facts.prunes}.get(kind)
        operation = None if inside is None else rng.randint(1, max(1, inside[step]))
        rank = rng.randrange(facts.ranks) if kind == "rank" else None
        taken.append(step)
        plan.faults.append(Fault(kind, step, operation, rank))
    if not plan.faults:
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in plan.left_out.items())
        raise UnsupportedSetting(f"none of these faults applies to this run ({reasons}): choose others with --faults")
    plan.faults.sort(key=lambda fault: fault.step)
    return plan


def _obstacle(facts: Facts, kind: str) -> str:
    """Return why a kind does not apply to a run; empty if it does."""
    obstacles = {
        "rank": "" if facts.ranks > 1 else "there is one rank",
        "launcher": "" if facts.has_launcher else "no process launches the ranks",
        "prune": "" if facts.prunes else "the reference removed no checkpoint",
    }
    return obstacles.get(kind, "")


def _places(facts: Facts, kind: str, first: int) -> list[int]:
    """Return the steps at which a kind can be.

    Inside a save: where there are others, neither the first, nor the last, which the end of the run may cut short.
    """
    if kind in ("save", "prune"):
        inside = sorted(step for step in (facts.saves if kind == "save" else facts.prunes) if step < facts.last)
        ample = [step for step in inside if first < step < max(facts.saves)]
        return ample or inside[:1]
    after = range(first + 1, facts.last)
    return [step for step in after if step not in facts.saves] or list(after)
