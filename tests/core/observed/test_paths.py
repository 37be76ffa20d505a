"""Paths that are followed together lead to what each of them leads to."""

from __future__ import annotations

from typing import Any

import torch

from resume_adapters.core.observed import paths
from resume_adapters.core.observed.paths import ABSENT, Path, Paths


def test_paths_that_share_steps_lead_where_each_leads() -> None:
    """Also where something on the way was replaced, is gone, or is no longer a module."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    roots: dict[str, Any] = {"model": model, "options": {"sizes": [1, 2]}}
    ends = [
        Path("model").to(".", "0").to("tensor", "weight"),
        Path("model").to(".", "0").to("requires_grad", "weight"),
        Path("model").to(".", "0").to("requires_grad", "bias"),
        Path("model").to(".", "1").to("tensor", "running_mean"),
        Path("options").to("[]", "sizes").to("[]", 1),
        Path("options").to("[]", "sizes").to("[]", 7),
        Path("nothing").to(".", "0"),
        Path("model"),
    ]
    together = Paths(ends)

    def assert_are_alike() -> list[Any]:
        found = together.get(roots)
        assert all(one is other for one, other in zip(found, [paths.get(roots, each) for each in ends], strict=True))
        return found

    assert [each is ABSENT for each in assert_are_alike()] == [False] * 5 + [True, True, False]
    model[0].weight.requires_grad_(False)
    model[1] = torch.nn.Identity()
    roots["options"]["sizes"] = [3, 4]
    found = assert_are_alike()
    assert (found[1], found[2], found[3], found[4]) == (False, True, ABSENT, 4)
    del model[0]
    assert_are_alike()
    roots["model"] = None
    assert [each is ABSENT for each in assert_are_alike()[:4]] == [True] * 4
