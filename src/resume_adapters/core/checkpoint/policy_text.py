"""Parse a retention policy, and the periods in it, from text."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import reduce
from operator import or_

from resume_adapters.core.checkpoint.retention import KeepBest, KeepEvery, KeepLast, KeepWithin, Policy
from resume_adapters.errors import UnsupportedSetting

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_BEST = re.compile(r"([^:]+)(?::(min|max)(?::(\d+))?)?")
_PERIOD = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)([smhdw])")


def best(text: str) -> KeepBest:
    """Parse ``METRIC[:min|max[:N]]``.

    Raises:
        UnsupportedSetting: the text has another form.
    """
    found = _BEST.fullmatch(text)
    if found is None:
        raise UnsupportedSetting(f"invalid metric {text!r}: expected METRIC[:min|max[:N]], for example eval_loss:min:2")
    return KeepBest(int(found[3] or 1), found[1], found[2] or "min")


def period(text: str) -> timedelta:
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


def join(last: int | None, bests: list[KeepBest], every: int | None, within: str | None) -> Policy:
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
        policies.append(KeepWithin(period(within)))
    if not policies:
        raise UnsupportedSetting(
            "say what to keep: --keep-last N, --keep-best METRIC, --keep-every STEPS or --keep-within 12h; together "
            "they keep what any of them keeps"
        )
    return reduce(or_, policies)
