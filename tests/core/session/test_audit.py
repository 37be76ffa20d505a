"""What an audit says of ranks that differ, and where none can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from resume_adapters import Audit
from resume_adapters.core.session.audit import _described, _differing
from resume_adapters.core.session.options import options_of_mapping
from resume_adapters.errors import UnsupportedSetting
from resume_adapters.recovery import restartable

from plain_torch import Launch

ALIKE = {"weight": "a", "exp_avg of weight": "b"}


def test_of_three_the_one_that_differs_is_named() -> None:
    found = _differing([ALIKE, ALIKE, {**ALIKE, "weight": "c"}])
    assert found == {"weight": [2]}
    assert "after step 8 rank 2 (third) differs from the others in weight," in _described(
        found, ["first", "second", "third"], 8
    )


def test_of_two_nobody_knows_which_is_wrong() -> None:
    found = _differing([ALIKE, {**ALIKE, "weight": "c"}])
    assert found == {"weight": [0, 1]} and "ranks 0 (a), 1 (b) differ in weight," in _described(found, ["a", "b"], 8)


def test_state_that_each_rank_has_for_itself_is_not_compared() -> None:
    """As that of an optimizer which is sharded."""
    assert _differing([{"weight": "a", "exp_avg of weight": "b"}, {"weight": "a", "exp_avg of bias": "c"}]) == {}


@pytest.mark.parametrize("every", [0, -1, True, "4"])
def test_how_often_must_be_a_positive_number(every: object) -> None:
    with pytest.raises(UnsupportedSetting, match="expected every how many optimizer steps"):
        Audit(every)  # type: ignore[arg-type]


def test_the_option_as_text_is_the_same() -> None:
    assert options_of_mapping({"audit_every": 4}, "the part")["verify"] == Audit(4)


def test_one_rank_alone_trains_on(tmp_path: Path) -> None:
    assert Launch(tmp_path, verify=Audit(4))().loop.global_step > 4


def test_a_restartable_block_is_refused(tmp_path: Path) -> None:
    @restartable()
    def main(attempt: object) -> Launch:
        return Launch(tmp_path, verify=Audit(4))()

    with pytest.raises(UnsupportedSetting, match="within a restartable block"):
        main()
