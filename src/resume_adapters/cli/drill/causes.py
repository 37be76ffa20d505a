"""The likely cause of a difference, in words, from what differs and from what the runs traced about themselves."""

from __future__ import annotations

from resume_adapters.cli.drill.comparison import STEPS, Difference
from resume_adapters.cli.drill.trace import Run, Step

_UNSEEDED = {
    "batches": "the script is not seeded, or its data have a different order in each process (`set`, `os.listdir`)",
    "rng": "the script is not seeded: seed python, numpy and torch before it draws a number",
}


def likely_cause(difference: Difference, reference: Run, interrupted: Run) -> str:
    """Return why a step probably differs, and what to do.

    Args:
        difference: the first difference between the runs.
        reference: the undisturbed run.
        interrupted: the run with the faults.
    """
    if difference.quantity == STEPS:
        return _of_steps(difference)
    if _resumed_from(difference, interrupted) == 0:
        return _of_a_fresh_start(difference)
    return {
        "batches": _of_batches,
        "rng": _of_random_state,
        "loss": _of_loss,
        "grad_norm": _of_gradients,
        "lr": _of_learning_rate,
        "weights": _of_weights,
        "optimizer": _of_optimizer,
    }[difference.quantity](difference, reference, interrupted)


def _resumed_from(difference: Difference, interrupted: Run) -> int | None:
    return next(launch.resumed_from for launch in interrupted.launches if launch.number == difference.launch)


def _of_steps(difference: Difference) -> str:
    if difference.expected is None:
        return "a resumed launch does not know that the run was over: it counts its steps or epochs from the resume on"
    return "a resumed launch ended too early, or resumed after this step from a checkpoint that does not contain it"


def _of_a_fresh_start(difference: Difference) -> str:
    """Explain a difference in a launch that resumed from nothing: a resume cannot be its cause."""
    if difference.quantity in _UNSEEDED:
        return f"this launch began at step 0, so no resume is the cause: {_UNSEEDED[difference.quantity]}"
    return (
        "this launch began at step 0, so no resume is the cause: the weights are not seeded, or the hardware or its "
        "kernels do not repeat their results (then use --references 2)"
    )


def _of_batches(difference: Difference, reference: Run, interrupted: Run) -> str:
    mine = _micro_batches(reference, difference.rank)
    others = {digest: rank for rank in _ranks(reference) for digest, _ in _micro_batches(reference, rank)}
    (index,) = difference.where
    expected = next(
        (position for position, (_, place) in enumerate(mine) if place == (difference.step, index)),
        len(mine),
    )
    found = [position for position, (digest, _) in enumerate(mine) if digest == difference.found]
    if difference.found is None:
        return "the step has fewer micro-batches than in the reference: an accumulation window was cut short"
    if found:
        position = min(found, key=lambda each: abs(each - expected))
        return _of_a_shift(position - expected, mine[position][1][0], resumed=_resumed_from(difference, interrupted))
    if difference.found in others:
        return (
            f"it is a batch that rank {others[difference.found]} had in the reference: the ranks share out the data in "
            "a different way after the resume"
        )
    return _of_an_unknown_batch(difference, interrupted)


def _of_a_shift(shift: int, step: int, resumed: int | None) -> str:
    """Explain a batch that is the reference's of another step."""
    if shift < 0:
        again = " from their beginning" if step == 1 else ""
        return (
            f"it is the reference's batch of step {step}: after the resume from step {resumed} the data repeat "
            f"{_count(-shift)}{again}; no checkpoint holds the position of this loader, so pass the loader that the "
            "loop iterates to the adapter"
        )
    return (
        f"it is the reference's batch of step {step}: after the resume from step {resumed} the data skip "
        f"{_count(shift)}; look for a loader that reads ahead, or for code that skips batches beside this package"
    )


def _count(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches"


def _of_an_unknown_batch(difference: Difference, interrupted: Run) -> str:
    loaders = [event for event in interrupted.of("data") if event["rank"] == difference.rank]
    datasets = sorted({event["dataset"] for event in loaders}) or ["the dataset"]
    who = " or ".join(f"`{name}`" for name in datasets)
    return (
        f"the reference never had this batch: {who}, its transforms, its sampler or its collate function depend on "
        "something that no part holds: a generator in a global or a closure, the time, the process, or the order of a "
        "set; draw from torch's, numpy's or python's global generator, or pass the generator to the adapter as a part"
    )


def _of_random_state(difference: Difference, reference: Run, interrupted: Run) -> str:
    (name,) = difference.where
    if _resumed_at(difference, interrupted):
        when = f"in the first step after the resume from step {difference.step - 1}"
    else:
        when = f"{difference.step - (_resumed_from(difference, interrupted) or 0)} steps after a resume"
    return (
        f"the batches are the same, but the generator `{name}` is at a different place {when}: something draws from it "
        "in one run and not in the other, such as code between the start of the training and the first step, or an "
        "evaluation or a log that the resumed launch does not repeat; give that code a generator of its own"
    )


def _of_loss(difference: Difference, reference: Run, interrupted: Run) -> str:
    return (
        "the batch and the random state are the same, so the model is not: something that shapes the loss is outside "
        f"of what is saved, such as a buffer that is not in the state_dict, a cache or a counter{_missing(interrupted)}"
    )


def _of_gradients(difference: Difference, reference: Run, interrupted: Run) -> str:
    return (
        "the loss is the same, its gradients are not: gradients that were accumulated before the save, the loss scale, "
        "or kernels of the backward pass that do not repeat their results (then use --references 2)"
        f"{_missing(interrupted)}"
    )


def _of_learning_rate(difference: Difference, reference: Run, interrupted: Run) -> str:
    optimizer, group = difference.where
    return (
        f"the schedule of optimizer {optimizer}, group {group} is not where it was: a scheduler that was not passed to "
        f"the adapter, or that is built from the steps that are left{_missing(interrupted)}"
    )


def _of_weights(difference: Difference, reference: Run, interrupted: Run) -> str:
    return (
        "everything that leads to the step is the same, and the update is not: the optimizer's moments or step counts "
        f"are not those of the reference, or weights are changed outside of the optimizer{_missing(interrupted)}"
    )


def _of_optimizer(difference: Difference, reference: Run, interrupted: Run) -> str:
    return (
        "the weights are the same, the optimizer's state is not: it was not restored whole, or it holds something that "
        f"does not shape this step yet{_missing(interrupted)}"
    )


def _missing(interrupted: Run) -> str:
    """Return the parts that no checkpoint holds, as the end of a sentence."""
    of_events = {"start": "missing", "missing": "parts"}
    parts = dict.fromkeys(part for event in interrupted.of(*of_events) for part in event[of_events[event["event"]]])
    return f"; no checkpoint holds {'; '.join(parts)}" if parts else ""


def _resumed_at(difference: Difference, interrupted: Run) -> bool:
    return _resumed_from(difference, interrupted) == difference.step - 1


def _ranks(run: Run) -> list[int]:
    return sorted({step.rank for step in run.steps})


def _micro_batches(run: Run, rank: int) -> list[tuple[str, tuple[int, int]]]:
    """Return the digests that a rank got, in order, each with its step and its place in the step."""
    steps: list[Step] = [step for step in run.steps if step.rank == rank]
    return [
        (digest, (step.step, index)) for step in steps for index, digest in enumerate(step.values.get("batches", ()))
    ]
