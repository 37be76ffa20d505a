"""Text of a run directory, made safe to print: names, reasons and hosts may come from anybody."""

from __future__ import annotations


def visible(text: str, *, keep: str = "") -> str:
    r"""Return a text with everything that does not print as it is, such as a terminal's escape, written as ``\x1b``.

    Args:
        text: the text.
        keep: characters that stay as they are.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )


def escape(text: str) -> str:
    """Return a text as :func:`visible` does, in which nothing is markup of rich."""
    from rich import markup  # not in every installation; `visible` is for errors too

    return markup.escape(visible(text))
