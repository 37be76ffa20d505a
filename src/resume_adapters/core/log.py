"""What the package says to its user, whatever logging is set up.

Messages belong to the logger ``resume_adapters``. They come through the handlers of the program, or of the framework
that trains; where none of these writes to the console, they come on stderr. Who gives that logger a level or a handler
decides what is said and where.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_PREFIX = "resume-adapters: "


def first_of(names: Sequence[object], most: int) -> str:
    """Return the first few of some names, and how many follow, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


class Voice:
    """Says what a run does. Its methods are those of a :class:`logging.Logger`.

    Args:
        logger: the logger to which the messages belong.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._channel = logging.getLogger()

    def use_channel(self, name: str) -> None:
        """Use the handlers of a framework's logger too; those of the root are used in any case."""
        self._channel = logging.getLogger(name)
        if not self._is_configured:
            self._logger.disabled = False  # a configuration of others turns off each logger that it does not name

    def info(self, message: str, *arguments: object) -> None:
        """Log at INFO: what a user expects."""
        self._say(logging.INFO, message, arguments)

    def warning(self, message: str, *arguments: object) -> None:
        """Log at WARNING: what a user should look at."""
        self._say(logging.WARNING, message, arguments)

    def error(self, message: str, *arguments: object) -> None:
        """Log at ERROR: what went wrong."""
        self._say(logging.ERROR, message, arguments)

    @property
    def _is_configured(self) -> bool:
        return bool(self._logger.level or self._logger.handlers or not self._logger.propagate)

    def _say(self, level: int, message: str, arguments: tuple[object, ...]) -> None:
        logger = self._logger
        if logger.disabled or level < (logger.level or logging.INFO) or level <= logger.manager.disable:
            return
        file, line, function, _ = logger.findCaller(stacklevel=3)
        record = logger.makeRecord(logger.name, level, file, line, message, arguments, None, function)
        if not logger.filter(record):
            return
        is_on_console = bool(logger.handlers) or not logger.propagate
        consoles = []
        for handler in self._handlers():
            if level < handler.level:
                continue
            if not _writes_to_console(handler):
                handler.handle(record)
            elif handler.filter(record):
                consoles.append(handler)
        if not consoles and not is_on_console:
            consoles.append(logging.StreamHandler())
        for handler in consoles[:1]:  # what several of them would write is said once
            _write(handler, record)

    def _handlers(self) -> list[logging.Handler]:
        """Return the handlers that get a message, each once."""
        if self._logger.handlers or not self._logger.propagate:
            found = [*_chain(self._logger)]
        else:
            found = [*_chain(self._channel), *logging.getLogger().handlers]
        return list(dict.fromkeys(found))


def _chain(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _writes_to_console(handler: logging.Handler) -> bool:
    """Return whether a handler writes to what the process has as its console, as those of logging and of rich do."""
    stream: Any = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    if stream is None:
        return False
    if any(stream is each for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        return True
    try:
        return stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):
        return False


def _write(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Write a message where a handler would, above the progress bars, and with the package's name in it."""
    shown = _Prefixed(handler)
    if not isinstance(handler, logging.StreamHandler) or type(handler).emit is not logging.StreamHandler.emit:
        handler.handle(shown.with_prefix(record))
        return
    above = logging.StreamHandler(_AboveBars(handler.stream))
    above.setFormatter(shown)
    above.handle(record)


class _Prefixed(logging.Formatter):
    """The format of a handler, with the package's name before the message where the format does not show it."""

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__()
        self._handler = handler

    def format(self, record: logging.LogRecord) -> str:
        return self._handler.format(self.with_prefix(record))

    def with_prefix(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the record, with the name in its message if it is needed there."""
        content = vars(record)
        without_message = logging.makeLogRecord({**content, "msg": "", "args": None})
        if record.name in self._handler.format(without_message):
            return record
        return logging.makeLogRecord({**content, "msg": f"{_PREFIX}{record.getMessage()}", "args": None})


class _AboveBars:
    """A stream that writes above tqdm's progress bars, if there are any.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write whole lines."""
        tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
        # Without a bar, its lock is let alone: a forked process that was killed may hold it for ever.
        if getattr(tqdm, "_instances", None):  # seam: the bars that are shown; tqdm 4.70
            tqdm.write(text, file=self._stream, end="")
        else:
            self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


logger = Voice(logging.getLogger("resume_adapters"))
