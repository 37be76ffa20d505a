"""Words and tables that fit 80 columns. Their text is rich's markup."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from rich.console import Console, JustifyMethod
from rich.table import Table

from resume_adapters.core.run_directory.upkeep import format_bytes

_Item = TypeVar("_Item")

_STYLES = {
    **dict.fromkeys(("committed", "valid", "finished", "running", "keep"), "green"),
    **dict.fromkeys(("readable", "foreign", "weights-only"), "cyan"),
    **dict.fromkeys(("pending", "stopped", "newer"), "yellow"),
    **dict.fromkeys(("damaged", "killed", "failed"), "bold red"),
    "halted": "bold yellow",
    "remove": "red",
}
_PERIODS = (("d", 86400), ("h", 3600), ("m", 60))


def size(count: int | None) -> str:
    """Format a number of bytes; nothing for ``None``."""
    return "" if count is None else format_bytes(count)


def age(moment: float | None) -> str:
    """Format how long ago a moment was (seconds since 1970), in its largest unit."""
    if moment is None:
        return ""
    seconds = max(0, int(time.time() - moment))
    return next((f"{seconds // length}{unit}" for unit, length in _PERIODS if seconds >= length), f"{seconds}s")


def ahead(moment: float) -> str:
    """Format the time until a moment (seconds since 1970), to the minute or second."""
    seconds = max(0, round(moment - time.time()))
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds % 60:02}s"


def number(value: float | None) -> str:
    """Format a number with four digits; nothing for ``None``."""
    return "" if value is None else f"{value:.4g}"


def state(word: str) -> str:
    """Return a state with its colour."""
    return f"[{_STYLES[word]}]{word}[/]" if word in _STYLES else escape(word)


_WRAPPED = ("reason", "marks", "why", "what")
"""Columns of several words, which a narrow terminal wraps between them."""


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return a table without rows; ``right`` are the columns of numbers."""
    found = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for column in columns:
        justify: JustifyMethod = "right" if column in right else "left"
        found.add_column(column, justify=justify, overflow="fold", no_wrap=column not in _WRAPPED)
    return found


_GIVE_WAY = ("data", "epoch", "age", "reason", "last commit", "checkpoints", "size")
"""Columns that a narrow terminal does without, in this order, before it would break a word."""


def give_way(found: Table, console: Console) -> None:
    """Remove columns of a table until the words of the others are whole on a console."""
    for column in found.columns:
        measured = [console.measure(each) for each in (column.header, *column.cells)]
        # Without this, rich would reduce a column down to letters.
        column.min_width = max(each.maximum if column.no_wrap else each.minimum for each in measured)
    for name in _GIVE_WAY:
        if sum(1 + (column.min_width or 0) for column in found.columns) > console.width:
            found.columns[:] = [column for column in found.columns if column.header != name]
    room = console.width - sum(1 + (column.min_width or 0) for column in found.columns)
    for column in found.columns if room >= 0 else ():  # rich would take from each alike, its longest word or not
        if not column.no_wrap:
            longest = max(console.measure(each).maximum for each in (column.header, *column.cells))
            column.width = min(longest, (column.min_width or 0) + room)
            room -= column.width - (column.min_width or 0)


def facts(document: Mapping[str, Any]) -> list[Table]:
    """Return a document as a table of labels and values; a checkpoint in it by its name."""
    lines = {}
    for key, value in document.items():
        if isinstance(value, dict):
            value = f"{value['name']} ({value['state']})"
        elif isinstance(value, list):
            value = ", ".join(value)
        text = size(value) if key == "bytes" else "" if value is None else str(value)
        lines[key.replace("_", " ")] = escape(text)
    return [labels(lines)]


def labels(lines: Mapping[str, str]) -> Table:
    """Return a table of labels and values, without those that are empty."""
    found = Table(box=None, show_header=False, pad_edge=False)
    found.add_column(style="bold")
    found.add_column()
    for label, text in lines.items():
        if text:
            found.add_row(label, text)
    return found


def tracked(what: str, items: Sequence[_Item]) -> Iterable[_Item]:
    """Return the items, with a progress bar on standard error if that is a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal:  # before rich 14.3 even a bar that is disabled ends in an empty line
        return items
    from rich.progress import track

    return track(items, escape(what), console=errors, transient=True)


def working(what: str) -> AbstractContextManager[object]:
    """Say what is being done, on standard error if that is a terminal."""
    errors = Console(stderr=True)
    return errors.status(escape(what)) if errors.is_terminal else nullcontext()


def visible(text: str, *, keep: str = "") -> str:
    r"""Return a text with everything that does not print as it is, such as a terminal's escape, written as ``\x1b``.

    Args:
        keep: characters that stay as they are.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def escape(text: str) -> str:
    """Return a text as :func:`visible` does, in which nothing is markup of rich."""
    from rich import markup  # not in every installation; `visible` is for errors too

    return markup.escape(visible(text))
