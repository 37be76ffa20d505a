"""Options that are misspelt, or not what they should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resume_adapters.core.checkpoint.retention import KeepBest, KeepLast
from resume_adapters.core.session.options import OptionsCallback, ResumeOptions, parts_among
from resume_adapters.errors import UnsupportedSetting


@pytest.mark.parametrize(
    ("keyword", "value", "meant"),
    [
        ("save_evry", 10, "save_every"),
        ("keeps", KeepLast(3), "keep"),
        ("veryfy", False, "verify"),
        ("run_dr", "a", "run_dir"),
    ],
)
def test_a_misspelt_option_is_a_question(keyword: str, value: Any, meant: str) -> None:
    with pytest.raises(UnsupportedSetting, match=f"{keyword}=.* is no option: did you mean `{meant}`"):
        parts_among({keyword: value}, "run_dir")


def test_a_part_may_have_a_name_that_is_like_an_option() -> None:
    parts = {"keeper": torch.nn.Linear(1, 1), "stopp": torch.Generator()}
    assert parts_among(parts).keys() == parts.keys()
    with pytest.raises(UnsupportedSetting, match="has no state_dict"):
        parts_among({"ema": object()})


@pytest.mark.parametrize("value", [True, False, None, 3])
def test_resume_is_a_word_or_a_path(value: Any) -> None:
    with pytest.raises(UnsupportedSetting, match=f'resume={value}: expected "auto", the default'):
        OptionsCallback(resume=value)


def test_a_misspelt_word_of_resume_is_a_question() -> None:
    with pytest.raises(UnsupportedSetting, match=r"did you mean `scratch`\? A path of that name is \./scrach"):
        ResumeOptions("scrach")
    for given in ("auto", "scratch!", "./scrach", "runs/a", Path("runs/a"), "checkpoint-5"):
        assert ResumeOptions(given).resume == given


def test_a_policy_knows_the_metrics_by_which_it_ranks() -> None:
    assert KeepLast(1).metrics == frozenset()
    assert (KeepLast(1) | KeepBest(1, "a") | KeepBest(2, "b", "max")).metrics == {"a", "b"}
