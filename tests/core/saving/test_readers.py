"""Methods of a script that stand in for a framework's are found, however they were put there."""

from __future__ import annotations

import functools
import json
from types import MethodType
from typing import Any

import pytest

from resume_adapters.core.patching import overridden
from resume_adapters.core.saving.staging import own_methods


class Unchanged(json.JSONEncoder):
    pass


class Own(json.JSONEncoder):
    def default(self, o: Any) -> Any:
        return super().default(o)


class Partial(json.JSONEncoder):
    def _default(self, o: Any, kind: str) -> Any:
        return super().default(o)

    default = functools.partialmethod(_default, kind="any")  # type: ignore[assignment]


class Wrapping(json.JSONEncoder):
    @functools.wraps(json.JSONEncoder.default)
    def default(self, o: Any) -> Any:
        return super().default(o)


def on_the_object() -> json.JSONEncoder:
    encoder = json.JSONEncoder()
    encoder.default = MethodType(lambda self, o: o, encoder)  # type: ignore[method-assign]
    return encoder


@pytest.mark.parametrize("owner", [json.JSONEncoder(), Unchanged()])
def test_the_framework_s_own_are_not_returned(owner: Any) -> None:
    assert own_methods(owner, ["default", "encode", "no_such_method"], ["json"]) == []


@pytest.mark.parametrize("owner", [Own(), Partial(), Wrapping(), on_the_object()])
def test_a_method_of_the_script_is_returned(owner: Any) -> None:
    assert own_methods(owner, ["default", "encode"], ["json"]) == [f"{type(owner).__name__}.default"]


def test_what_this_package_has_put_there_is_not_returned() -> None:
    encoder = Unchanged()
    with overridden(encoder, "default", lambda native, *given: native(*given)):
        assert own_methods(encoder, ["default"], ["json"]) == []
