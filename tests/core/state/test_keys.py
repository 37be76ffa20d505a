"""Wrapper prefixes: the same weights have one name, whatever wraps the model."""

from __future__ import annotations

import itertools

import pytest

from resume_adapters.core.state.keys import canonical, match

MODEL = ("embed.weight", "layers.0.attn.weight", "layers.0.attn.bias", "head.weight")
PREFIXES = (
    "",
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "module.module.",
)


def wrapped(prefix: str, keys: tuple[str, ...] = MODEL) -> list[str]:
    return [prefix + key for key in keys]


@pytest.mark.parametrize(("saved", "live"), [*itertools.product(PREFIXES, PREFIXES)])
def test_every_wrapping_fits_every_other(saved: str, live: str) -> None:
    found = match(wrapped(saved), wrapped(live))
    assert found.saved_by_live == dict(zip(wrapped(live), wrapped(saved), strict=True))
    assert not found.missing
    assert not found.unexpected


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_wrapper_in_the_middle_or_at_the_end_of_a_name_is_taken_off(wrapper: str) -> None:
    keys = [f"layers.0.{wrapper}.attn.{wrapper}.weight", f"head.{wrapper}.weight"]
    assert [*canonical(keys)] == ["layers.0.attn.weight", "head.weight"]


@pytest.mark.parametrize("rest", [(), ("head.weight",)])
@pytest.mark.parametrize(("saved", "live"), [*itertools.product(["", "module.", "_orig_mod."], repeat=2)])
def test_a_submodule_that_is_really_called_module_keeps_fitting(saved: str, live: str, rest: tuple[str, ...]) -> None:
    keys = ("module.weight", "module.bias", *rest)
    found = match(wrapped(saved, keys), wrapped(live, keys))
    assert found.saved_by_live == dict(zip(wrapped(live, keys), wrapped(saved, keys), strict=True))


def test_a_name_that_only_contains_a_wrappers_word_is_left_alone() -> None:
    keys = ["module_list.0", "my_orig_mod.x", "head.module.weight"]
    assert canonical(keys) == {key: key for key in keys}


def test_two_keys_of_one_name_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"'a\._orig_mod\.b' and 'a\.b' are both 'a\.b'"):
        canonical(["a._orig_mod.b", "a.b"])


def test_what_does_not_fit_is_named() -> None:
    found = match(["module.a", "module.old"], ["a", "new"])
    assert found.saved_by_live == {"a": "module.a"}
    assert found.missing == ("new",)
    assert found.unexpected == ("module.old",)
