"""The likely cause of a difference, in words, from what differs and from what the runs traced about themselves."""

from __future__ import annotations

from resume_adapters.cli.drill.comparison import STEPS, Difference
from resume_adapters.cli.drill.trace import Run

_FRESH = {
    "batches": "the script is not seeded, or its data have a different order in each process (`set`, `os.listdir`)",
    "rng": "the script is not seeded: seed python, numpy and torch before it draws a number",
}
_NOT_REPEATED = (
    "the weights are not seeded, or the hardware or its kernels do not repeat their results (then use --references 2)"
)
_OF_QUANTITY = {
    "rng": (
        "the batches are the same, but the generator `{where}` is at a different place: something draws from it in one "
        "run and not in the other, such as code between the start of the training and the first step, or an evaluation "
        "or a log that the resumed launch does not repeat; give that code a generator of its own"
    ),
    "loss": (
        "the batch and the random state are the same, so the model is not: something that shapes the loss is outside "
        "of what is saved, such as a buffer that is not in the state_dict, a cache or a counter"
    ),
    "grad_norm": (
        "the loss is the same, its gradients are not: gradients that were accumulated before the save, the loss scale, "
        "or kernels of the backward pass that do not repeat their results (then use --references 2)"
    ),
    "lr": (
        "the schedule of optimizer {where} is not where it was: a scheduler that was not passed to the adapter, or "
        "that is built from the steps that are left"
    ),
    "weights": (
        "everything that leads to the step is the same, and the update is not: the optimizer's moments or step counts "
        "are not those of the reference, or weights are changed outside of the optimizer"
    ),
    "optimizer": (
        "the weights are the same, the optimizer's state is not: it was not restored whole, or it holds something that "
        "does not shape this step yet"
    ),
}
"""Why a step differs in a quantity, where all that leads to it is the same."""


def likely_cause(difference: Difference, reference: Run, interrupted: Run) -> str:
    """Return why a step probably differs, and what to do.

    Args:
        difference: the first difference between the runs.
        reference: the undisturbed run.
        interrupted: the run with the faults.
    """
    quantity = difference.quantity
    if quantity == STEPS and difference.expected is None:
        return "a resumed launch does not know that the run was over: it counts its steps or epochs from the resume on"
    if quantity == STEPS:
        return "a resumed launch ended too early, or resumed after this step from a checkpoint that does not contain it"
    resumed = next(launch.resumed_from for launch in interrupted.launches if launch.number == difference.launch)
    if resumed == 0:
        return f"this launch began at step 0, so no resume is the cause: {_FRESH.get(quantity, _NOT_REPEATED)}"
    if quantity == "batches":
        return _of_batches(difference, reference, interrupted, f"after the resume from step {resumed} the data")
    where = ", group ".join(map(str, difference.where))
    of_events = {"start": "missing", "missing": "parts"}
    parts = dict.fromkeys(part for event in interrupted.of(*of_events) for part in event[of_events[event["event"]]])
    missing = f"; no checkpoint holds {'; '.join(parts)}" if parts and quantity != "rng" else ""
    return _OF_QUANTITY[quantity].format(where=where) + missing


def _of_batches(difference: Difference, reference: Run, interrupted: Run, the_data: str) -> str:
    """Tell a batch of another step or another rank from one that the reference never had."""
    if difference.found is None:
        return "the step has fewer micro-batches than in the reference: an accumulation window was cut short"
    by_rank: dict[int, list[tuple[str, tuple[int, int | str]]]] = {}
    for each in reference.steps:
        batches_of_step = enumerate(each.values.get("batches", ()))
        by_rank.setdefault(each.rank, []).extend((digest, (each.step, index)) for index, digest in batches_of_step)
    mine, place = by_rank[difference.rank], (difference.step, difference.where[0])
    expected = next((position for position, (_, other) in enumerate(mine) if other == place), len(mine))
    found = [position for position, (digest, _) in enumerate(mine) if digest == difference.found]
    if found:
        position = min(found, key=lambda each: abs(each - expected))
        (step, _), shift = mine[position][1], position - expected
        batches = f"{abs(shift)} batch{'' if abs(shift) == 1 else 'es'}"
        of_step = f"it is the reference's batch of step {step}: {the_data}"
        if shift < 0:
            return (
                f"{of_step} repeat {batches}{' from their beginning' if step == 1 else ''}; no checkpoint holds the "
                "position of this loader, so pass the loader that the loop iterates to the adapter"
            )
        return f"{of_step} skip {batches}; look for a loader that reads ahead, or for code that skips batches itself"
    for rank, got in by_rank.items():
        if difference.found in {digest for digest, _ in got}:
            return f"it is a batch that rank {rank} had in the reference: {the_data} are shared out in a different way"
    loaders = [event for event in interrupted.of("data") if event["rank"] == difference.rank]
    who = " or ".join(f"`{name}`" for name in sorted({event["dataset"] for event in loaders}) or ["the dataset"])
    return (
        f"the reference never had this batch: {who}, its transforms, its sampler or its collate function depend on "
        "something that no part holds: a generator in a global or a closure, the time, the process, or the order of a "
        "set; draw from torch's, numpy's or python's global generator, or pass the generator to the adapter as a part"
    )
