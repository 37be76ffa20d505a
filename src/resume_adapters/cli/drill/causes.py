"""The likely cause of a difference, in words, from what differs and from what the runs traced about themselves."""

from __future__ import annotations

from typing import Any

from resume_adapters.cli.drill.comparison import STEPS, Difference
from resume_adapters.cli.drill.trace import Run

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
        "something that no part holds: a generator in a global or a closure, the time, the process, or the order of a "
        "set; draw from torch's, numpy's or python's global generator, or pass the generator to the adapter as a part"
    )
