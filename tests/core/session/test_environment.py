"""The options that the environment gives the callbacks which it adds."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta

import pytest

from resume_adapters import KeepEvery, KeepWithin, StopOn
from resume_adapters.core.session.options import ResumeOptions, options_of_environment, options_of_mapping
from resume_adapters.errors import UnsupportedSetting

NAME = "RESUME_ADAPTERS_OPTIONS"


@pytest.mark.parametrize(
    ("given", "expected"), [("500", 500), ("auto", "auto"), ("90s", timedelta(seconds=90)), (7, 7), (None, None)]
)
def test_how_often_to_save(given: object, expected: object) -> None:
    text = (
        "{}"
        if given is None
        else f'{{"save_every": {given}}}'
        if isinstance(given, int)
        else f'{{"save_every": "{given}"}}'
    )
    assert options_of_environment({NAME: text})["save_every"] == expected


def test_a_policy_and_a_period() -> None:
    found = options_of_environment({NAME: '{"keep_every": 100, "keep_within": "2h", "mtbf": "6h"}'})
    assert found["keep"] == KeepEvery(100) | KeepWithin(timedelta(hours=2))
    assert found["mtbf"] == timedelta(hours=6)
    assert options_of_environment({NAME: "{}"})["keep"] is None


def test_nothing_is_said_without_the_variable() -> None:
    assert options_of_environment({}) == options_of_environment({NAME: ""}) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("keep_last=3", "Expected options"),
        ('{"keep_lst": 3}', "keep_lst"),
        ('{"keep_last": "3"}', "keep_last"),
        ('{"save_every": "often"}', "invalid save_every 'often'"),
        ('{"save_every": "²"}', "invalid save_every '²'"),
        ('{"walltime": "long"}', "invalid walltime 'long'"),
    ],
)
def test_what_is_wrong_is_refused(text: str, said: str) -> None:
    with pytest.raises(UnsupportedSetting, match=".*".join(["", said.replace("²", ".")])):
        options_of_environment({NAME: text})


def test_a_mapping_of_another_file_is_read_alike() -> None:
    assert options_of_mapping({"save_every": 5}, "the YAML") == options_of_environment({NAME: '{"save_every": 5}'})
    with pytest.raises(UnsupportedSetting, match=r"^the YAML: .*keep_lst"):
        options_of_mapping({"keep_lst": 5}, "the YAML")


def test_every_option_of_a_callback_can_be_said_in_the_environment() -> None:
    options = {each.name for each in fields(ResumeOptions)} - {"parts"}
    assert options_of_environment({NAME: "{}"}).keys() == options
    assert ResumeOptions(**options_of_environment({NAME: "{}"})) == ResumeOptions(stop=StopOn())
