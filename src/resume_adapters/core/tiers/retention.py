"""Retention on a tier: what its policy does not keep is removed, never the newest or the best checkpoint."""

from __future__ import annotations

from resume_adapters.core.checkpoint.retention import Candidate, Policy, plan_retention
from resume_adapters.core.tiers.tier import Tier


def prune(tier: Tier, keep: Policy, *, now: float, best: str | None) -> dict[str, str]:
    """Remove the checkpoints of a tier that a policy does not keep.

    Args:
        tier: the tier, owned by this start.
        keep: the policy.
        now: seconds since 1970.
        best: name of the best checkpoint.

    Raises:
        FencedOff: a later start has claimed the tier.

    Returns:
        The places that were removed, each with the reason.
    """
    found = tier.checkpoints()
    newest: dict[str, str] = {}
    for each in found:
        newest.setdefault(each.name, each.place)
    candidates = [
        Candidate(
            each.place,
            each.manifest.step,
            each.manifest.written,
            each.manifest.metrics,
            superseded=newest[each.name] != each.place,
        )
        for each in found
    ]
    anchor = found[0].place if found else None
    plan = plan_retention(candidates, keep, now=now, anchor=anchor, best=newest.get(best or ""))
    if plan.remove:
        tier.require_owned()  # listing them may have taken minutes
    for each in found:
        if each.place in plan.remove:
            tier.remove(each)
    return plan.remove
