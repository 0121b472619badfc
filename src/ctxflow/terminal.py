"""Text on its way to a terminal, which obeys some characters: foreign text must not command it.

Errors quote what models wrote, rows, and what workers and batch systems said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from ctxflow.errors import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def timed(text: str, at: float | None = None) -> str:
    """Return a line with the time of day before it: now, or at so many seconds since 1970."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at))} {text}"


class _Guarded:
    """A terminal's stream, for all that is printed; rich, which commands the terminal, goes past it."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write what is visible of it."""
        self.rich_proxied_file.write(visible(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write what is visible of several lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Let nothing but visible text be printed to this process's terminal; files and pipes get all as it is."""
    before = sys.stdout, sys.stderr
    out, err = (_Guarded(stream) if stream is not None and stream.isatty() else stream for stream in before)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Visible(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record through, with what is visible of its text."""
        record.msg, record.args = visible(record.getMessage()), None
        if record.exc_info and not record.exc_text:  # What is there already is not made anew from the exception.
            record.exc_text = visible(logging.Formatter().formatException(record.exc_info))
        return True


class _Timed(logging.Handler):
    """In place of Python's last resort, for programs that say nothing of logging: the same, with the time of day."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to stderr, unless somebody else takes it."""
        others = [each for each in self._logger.handlers if each is not self]
        if others or (self._logger.propagate and logging.getLogger().handlers) or sys.stderr is None:
            return
        with contextlib.suppress(OSError, ValueError):  # It is closed.
            sys.stderr.write(timed(logging.Formatter().format(record), record.created) + "\n")
            sys.stderr.flush()


def guard_log(logger: logging.Logger) -> None:
    """Have a logger's lines hold visible text alone, and the time of day: without handlers they go to the terminal."""
    if not any(isinstance(each, _Visible) for each in logger.filters):
        logger.addFilter(_Visible())
        logger.addHandler(_Timed(logger))


UNLIMITED = 1 << 16
"""Columns of what is no terminal, unless COLUMNS says how many: a table that goes to a program is whole."""


def visible_console(stderr: bool = False, **options: Any) -> Console:
    r"""Return a console of rich that leaves out of all text what a terminal would obey; rich leaves the escape in.

    Where it is no terminal, it cuts and folds nothing.

    :param stderr: whether it is for the standard error; other options as rich has them.

    >>> from io import StringIO
    >>> console = visible_console(file=StringIO())
    >>> console.print("bad \x1b[2Jrow", markup=False)
    >>> console.file.getvalue()
    'bad [2Jrow\n'
    """
    from rich.console import Console  # Here: most programs that print do without rich, which takes long to import.
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            """Return segments as rich does, without control characters in their text."""
            for segment in super().render(renderable, options):
                if not segment.control and (text := visible(segment.text)) != segment.text:
                    yield Segment(text, segment.style)
                else:
                    yield segment

    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "rich_proxied_file"):  # What all else is printed to.
        options.setdefault("file", stream.rich_proxied_file)
    console = VisibleConsole(stderr=stderr, **options)
    if not (console.is_terminal or console.is_jupyter or "width" in options or "COLUMNS" in os.environ):
        console.width = UNLIMITED
    return console
