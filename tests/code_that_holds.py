"""Functions, methods and partial arguments that add what they hold, and what makes each of them hold another number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Made = tuple[Callable[[Any], Any], Callable[[], None]]


class Adding:
    def __init__(self) -> None:
        self.number = 1

    def __call__(self, value: Any) -> Any:
        return value + self.number

    def raise_it(self) -> None:
        self.number = 2


def _method() -> Made:
    adder = Adding()
    return adder.__call__, adder.raise_it


def _default() -> Made:
    numbers = {"by": 1}

    def adding(value: Any, *, held: Any = numbers) -> Any:
        return value + held["by"]

    return adding, lambda: numbers.update(by=2)


def _attribute() -> Made:
    def adding(value: Any) -> Any:
        return value + adding.by  # type: ignore[attr-defined]

    adding.by = 1  # type: ignore[attr-defined]
    return adding, lambda: setattr(adding, "by", 2)


def _variable() -> Made:
    number = 1

    def change() -> None:
        nonlocal number
        number = 2

    return lambda value: value + number, change


def _object() -> Made:
    adder = Adding()
    return lambda value: adder(value), adder.raise_it


def _function() -> Made:
    adding, change = _variable()
    return lambda value: adding(value), change


def _argument() -> Made:
    adder = Adding()
    return functools.partial(lambda held, value: held(value), adder), adder.raise_it


def _named_argument() -> Made:
    numbers = {"by": 1}
    return functools.partial(lambda value, held: value + held["by"], held=numbers), lambda: numbers.update(by=2)


HOLDING: dict[str, Callable[[], Made]] = {
    "a method": _method,
    "a default": _default,
    "an attribute of a function": _attribute,
    "a variable of an outer function": _variable,
    "an object in one": _object,
    "a function in one": _function,
    "an argument": _argument,
    "a named argument": _named_argument,
}
