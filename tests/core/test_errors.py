"""The errors: each is a ResumeError and a builtin, and carries what it is about."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re
from pathlib import Path

import pytest

from resume_adapters import errors
from resume_adapters.errors import ResumeError, Stopped

EVERY = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, ResumeError) and value is not ResumeError
]


def builtin_of(error: type) -> type:
    """Return the builtin exception that an error also is."""
    return next(base for base in error.__bases__ if base.__module__ == "builtins" and base is not Exception)


@pytest.mark.parametrize("error", EVERY)
def test_every_error_is_a_resume_error_and_a_builtin(error: type[ResumeError]) -> None:
    assert issubclass(error, ResumeError)
    assert getattr(builtins, builtin_of(error).__name__) is builtin_of(error)
    assert error.__doc__


@pytest.mark.parametrize("error", EVERY)
def test_every_error_carries_its_message_path_and_step_also_through_a_pickle(error: type[ResumeError]) -> None:
    made = error("found this; expected that", path="/runs/a/checkpoint-3", step=3)
    for each in (made, pickle.loads(pickle.dumps(made))):
        assert type(each) is error
        assert str(each) == each.message == "found this; expected that"
        assert each.path == Path("/runs/a/checkpoint-3")
        assert each.step == 3
    bare = pickle.loads(pickle.dumps(error("found this")))
    assert (str(bare), bare.path, bare.step) == ("found this", None, None)


@pytest.mark.parametrize("error", EVERY)
def test_every_error_is_caught_as_its_builtin(error: type[ResumeError]) -> None:
    with pytest.raises(builtin_of(error)):
        raise error("found this")


def test_a_notebook_shows_the_sentence_and_what_caused_it() -> None:
    """IPython prints the lines that this method returns in the place of a traceback."""
    made = errors.SaveFailed("nothing was committed")
    assert made._render_traceback_() == ["SaveFailed: nothing was committed"]
    made.__cause__ = OSError(28, "No space left on device")
    assert made._render_traceback_()[1:] == ["OSError: [Errno 28] No space left on device"]


def test_the_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    drawn = dict(re.findall(r"^    [|`]-- (\w+) +\((\w+)\)", errors.__doc__, re.MULTILINE))
    assert drawn == {error.__name__: builtin_of(error).__name__ for error in EVERY}


def test_a_requested_stop_is_no_error_but_an_exit() -> None:
    with pytest.raises(SystemExit) as left:
        raise Stopped("SIGTERM", 75)
    assert (left.value.code, left.value.reason) == (75, "SIGTERM")  # type: ignore[attr-defined]
    assert not issubclass(Stopped, Exception)
