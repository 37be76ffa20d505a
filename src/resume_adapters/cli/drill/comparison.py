"""The first difference between two runs, in causal order.

Of two runs of one command, every step of every rank must be equal in whatever both traced. What differs first in time
is nearest to the cause; within a step, a quantity can only be changed by those before it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from resume_adapters.cli.drill.job import Event, Run

STEPS = "steps"
"""The difference of a step that only one of the two runs did, in place of a quantity."""

NAMES = {
    "batches": "batches",
    "rng": "random state",
    "loss": "losses",
    "grad_norm": "gradient norms",
    "lr": "learning rates",
    "weights": "weights",
    "optimizer": "optimizer state",
}
"""What is traced of a step, in causal order, with its name for a reader."""

QUANTITIES = tuple(NAMES)

Where = tuple[str | int, ...]
"""Which micro-batch (from 0), generator, or optimizer and group; empty where there is only one value."""

_WHERE = {"batches": "micro-batch {}", "loss": "micro-batch {}", "rng": "generator {}", "lr": "optimizer {}, group {}"}


@dataclass(frozen=True)
class Difference:
    """A quantity of one step that is not what it is in the reference.

    Attributes:
        launch: the launch of the interrupted run that did the step.
        quantity: of ``QUANTITIES``, or ``STEPS``: only one of the runs did the step.
        where: which micro-batch (from 0), generator, or optimizer and group; empty where there is only one value.
        expected: its value in the reference.
        found: its value in the interrupted run.
    """

    step: int
    rank: int
    launch: int
    quantity: str
    where: Where = ()
    expected: Any = None
    found: Any = None

    @property
    def causal_order(self) -> tuple[int, int, int, int]:
        """Sorts differences: the earliest in time first, then what changes the rest of a step."""
        place = -1 if self.quantity == STEPS else QUANTITIES.index(self.quantity)
        return self.step, place, self.rank, self.launch

    def __str__(self) -> str:
        if self.quantity == STEPS:
            by = "the reference did not do" if self.expected is None else "the interrupted run never did"
            return f"step {self.step}, rank {self.rank}: {by} this step"
        where = f" ({_WHERE.get(self.quantity, '').format(*self.where)})" if self.where else ""
        return (
            f"step {self.step}, rank {self.rank}, launch {self.launch}: the {NAMES[self.quantity]}{where} differ: "
            f"{_readable(self.expected)} in the reference, {_readable(self.found)} here"
        )


def _readable(value: Any) -> str:
    """Format a traced value: numbers with all their digits, digests as they are."""
    if isinstance(value, str) and ("0x" in value or value in ("nan", "inf", "-inf")):
        return repr(float.fromhex(value))
    return "nothing" if value is None else str(value)


@dataclass
class Comparison:
    """What two runs were compared in, and where they differ.

    Attributes:
        steps: how many steps were compared; a step of several ranks counts once.
        done_twice: how many of them the interrupted run did more than once.
        ranks: how many ranks.
        quantities: what both runs traced, in causal order.
        differing: the quantities that differ in some step.
        first: the first difference; ``None`` if the runs are identical.
    """

    steps: int = 0
    done_twice: int = 0
    ranks: int = 0
    quantities: tuple[str, ...] = ()
    differing: set[str] = field(default_factory=set)
    first: Difference | None = None


def unseeded(one: Run, other: Run) -> tuple[str, ...]:
    """Return the random generators that two fresh starts of a command leave at different places.

    The script does not seed them. If something draws from them, it shows in the batches and losses.
    """
    found: dict[str, None] = {}
    first = {step["rank"]: step for step in reversed(_fresh_steps(one))}
    for step in _fresh_steps(other):
        if (same := first.get(step["rank"])) is not None and same["step"] == step["step"]:
            found |= {str(where[0]): None for where, _, _ in _differences(same, step, "rng", ())}
    return tuple(found)


def _fresh_steps(run: Run) -> list[Event]:
    fresh = {launch.number for launch in run.launches if launch.resumed_from == 0}
    return [step for step in run.steps if step["launch"] in fresh]


def compare(
    reference: Run, interrupted: Run, quantities: Collection[str] = QUANTITIES, without: Collection[str] = ()
) -> Comparison:
    """Compare every step of a run with the reference.

    Args:
        interrupted: the run to compare with it.
        quantities: what to compare.
        without: random generators that are not compared.
    """
    expected = {(step["step"], step["rank"]): step for step in reference.steps}
    missing = dict.fromkeys(expected)
    differences: list[Difference] = []
    done: dict[int, set[int]] = {}
    compared: set[str] = set()
    for step in interrupted.steps:
        place = step["step"], step["rank"], step["launch"]
        missing.pop(place[:2], None)
        if (same := expected.get(place[:2])) is None:
            differences.append(Difference(*place, STEPS, found="done"))
            continue
        done.setdefault(step["step"], set()).add(step["launch"])
        for name in quantities:
            if same.get(name) is not None and step.get(name) is not None:
                compared.add(name)
                found = _differences(same, step, name, without)
                differences += [Difference(*place, name, *each) for each in found[:1]]
    differences += [Difference(*place, len(interrupted.launches), STEPS, expected="done") for place in missing]
    return Comparison(
        steps=len(done),
        done_twice=sum(len(launches) > 1 for launches in done.values()),
        ranks=len({rank for _, rank in expected.keys() - missing}),
        quantities=tuple(name for name in QUANTITIES if name in compared),
        differing={difference.quantity for difference in differences},
        first=min(differences, key=lambda each: each.causal_order, default=None),
    )


def _differences(expected: Event, found: Event, name: str, without: Collection[str]) -> list[tuple[Where, Any, Any]]:
    """Return where a quantity of a step differs, with both values."""
    one, other = _leaves(expected.get(name)), _leaves(found.get(name))
    places = dict.fromkeys([*one, *other])
    if name == "rng":  # a generator may be made later in one run than in the other
        places = {where: None for where in one if where in other and where[0] not in without}
    return [(where, one.get(where), other.get(where)) for where in places if one.get(where) != other.get(where)]


def _leaves(value: Any, where: Where = ()) -> dict[Where, Any]:
    """Return the single values of nested lists and dictionaries, by their place."""
    if not isinstance(value, dict | list):
        return {where: value}
    items: Iterable[tuple[str | int, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    return {place: leaf for key, each in items for place, leaf in _leaves(each, (*where, key)).items()}


_REPEAT = "kernels that do not repeat their results (then use --references 2)"
_FRESH = {
    "batches": "the script is not seeded, or its data have a different order in each process (`set`, `os.listdir`)",
    "rng": "the script is not seeded: seed python, numpy and torch before it draws a number",
}
_OF_QUANTITY = {
    "rng": "the generator `{}` is at a different place: something draws from it in one of the runs only, such as code "
    "before the first step, or an evaluation or a log that is not repeated; give that code a generator of its own",
    "loss": "something that shapes the loss is outside of what is saved, such as a buffer, a cache or a counter",
    "grad_norm": f"gradients that were accumulated before the save, the loss scale, or {_REPEAT}",
    "lr": "the schedule of optimizer {} is not where it was: a scheduler that was not passed to the adapter, or "
    "that is built from the steps that are left",
    "weights": "the optimizer's moments or step counts are not those of the reference, or others change the weights",
    "optimizer": "it was not restored whole, or holds something that does not shape this step yet",
}
"""Why a step differs in a quantity, where all that leads to it is the same."""


def likely_cause(difference: Difference, reference: Run, interrupted: Run) -> str:
    """Return why a step probably differs, the first of an interrupted run that does, and what to do."""
    quantity = difference.quantity
    if quantity == STEPS and difference.expected is None:
        return "a resumed launch does not know that the run was over: it counts its steps or epochs from the resume on"
    if quantity == STEPS:
        return "a resumed launch ended too early, or resumed after this step from a checkpoint that does not contain it"
    resumed = next(launch.resumed_from for launch in interrupted.launches if launch.number == difference.launch)
    if resumed == 0:
        cause = _FRESH.get(quantity, f"the weights are not seeded, or {_REPEAT}")
        return f"this launch began at step 0, so no resume is the cause: {cause}"
    if quantity == "batches":
        return _of_batches(difference, reference, interrupted, f"after the resume from step {resumed} the data")
    missing = [part for event in interrupted.of("start") for part in event["missing"]]
    missing += [part for event in interrupted.of("missing") for part in event["parts"]]
    no_part = f"; no checkpoint holds {'; '.join(dict.fromkeys(missing))}" if missing and quantity != "rng" else ""
    return _OF_QUANTITY[quantity].format(", group ".join(map(str, difference.where))) + no_part


def _of_batches(difference: Difference, reference: Run, interrupted: Run, the_data: str) -> str:
    """Tell a batch of another step or another rank from one that the reference never had."""
    if difference.found is None:
        return "the step has fewer micro-batches than in the reference: an accumulation window was cut short"
    had: list[tuple[int, str, tuple[int, Any]]] = [
        (each["rank"], digest, (each["step"], index))
        for each in reference.steps
        for index, digest in enumerate(each.get("batches") or ())
    ]
    mine = [(digest, place) for rank, digest, place in had if rank == difference.rank]
    places = [place for _, place in mine]
    expected = places.index((difference.step, difference.where[0]))
    shifts = [position - expected for position, (digest, _) in enumerate(mine) if digest == difference.found]
    if shifts:
        shift = min(shifts, key=abs)
        step, _ = places[expected + shift]
        moved = f"{'repeat' if shift < 0 else 'skip'} {abs(shift)} batch{'' if abs(shift) == 1 else 'es'}"
        moved += " from their beginning" if shift < 0 and step == 1 else ""
        why = "pass the loader that the loop iterates to the adapter" if shift < 0 else "does a loader read ahead?"
        return f"it is the reference's batch of step {step}: {the_data} {moved}; {why}"
    for rank, digest, _ in had:
        if digest == difference.found:
            return f"it is a batch that rank {rank} had in the reference: {the_data} are shared out in a different way"
    loaders = [event["dataset"] for event in interrupted.of("data") if event["rank"] == difference.rank]
    who = " or ".join(f"`{name}`" for name in sorted(set(loaders)) or ["the dataset"])
    return (
        f"the reference never had this batch: {who}, its transforms, its sampler or its collate function depend on "
        "something that no part holds: a count or a cache in a global or a closure, the time, the process, or the "
        "order of a set; draw from torch's, numpy's or python's global generator, or pass the generator "
        "to the adapter as a part"
    )
