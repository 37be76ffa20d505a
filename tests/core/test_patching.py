"""What is replaced for a while is afterwards what it was: an object's own, its class's, or a module's."""

from __future__ import annotations

import copy
import functools
import pickle

from resume_adapters.core.patching import overridden, unchanged_copy, wrapped


class Counter:
    """Counts by one, from a number of its own."""

    def __init__(self) -> None:
        self.count = 3

    def next(self, by: int = 1) -> int:
        return self.count + by


def test_a_function_stands_before_a_method_and_is_given_it() -> None:
    counter = Counter()
    with wrapped(counter, "next", lambda native, by: 10 * native(by)):
        assert counter.next(by=4) == 70
        with wrapped(counter, "next", lambda native, *args: native(*args) + 1):
            assert counter.next(4) == 71
        assert counter.next(4) == 70
    assert counter.next(4) == 7 and "next" not in vars(counter), "the class's own stands again"


def test_a_copy_shares_what_stands_before_its_method() -> None:
    """Copied with the owner, it would call into a copy of a whole session, with its run and files."""
    seen: list[int] = []
    counter = Counter()
    with wrapped(counter, "next", lambda native: seen.append(native())):
        copy.deepcopy(counter).next()
    assert seen == [4]


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def say(self, word: str = "") -> str:
        return self.name + word


def test_a_copy_of_an_object_has_an_overridden_method_as_it_was() -> None:
    owner = Named("a")
    with overridden(owner, "say", lambda native, word: native(word) + "!"):
        with overridden(owner, "say", functools.partial(lambda end, native, word: native(word) + end, "?")):
            copied = copy.deepcopy(owner)
            copied.name = "b"
            assert (owner.say("x"), copied.say("x")) == ("ax!?", "bx")
        assert owner.say("x") == "ax!"
    assert (owner.say("x"), vars(owner), copied.say()) == ("ax", {"name": "a"}, "b")


def test_what_is_pickled_of_an_object_has_its_methods_as_they_were() -> None:
    """A script may pickle its callbacks, whose methods are wrapped meanwhile."""
    owner = Named("a")
    with (
        wrapped(owner, "say", lambda native, word: native(word) + "!"),
        overridden(owner, "say", lambda native, word: native(word) + "?"),
        wrapped(owner, "say", lambda native, word: native(word) + "."),
    ):
        loaded = pickle.loads(pickle.dumps(owner))
        loaded.name = "b"
        assert (owner.say("x"), loaded.say("x")) == ("ax!?.", "bx")
    assert "say" not in vars(owner)


def test_an_unchanged_copy_has_the_methods_of_before_bound_to_itself() -> None:
    class Greeter:
        name = "one"

        def greet(self) -> str:
            return self.name

    greeter = Greeter()
    with (
        overridden(greeter, "greet", lambda native: "changed"),
        wrapped(greeter, "greet", lambda native: "changed again"),
    ):
        made = unchanged_copy(greeter)
        made.name = "other"
        assert made.greet() == "other"
        assert greeter.greet() == "changed again"
