"""Rich's consoles as this house has them: whatever text is drawn, only rich itself speaks to the terminal.

What does not live here: what is printed without rich (terminal.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ctxflow.terminal import visible


class VisibleConsole(Console):
    r"""A console that leaves out of all text what a terminal would obey; rich itself leaves the escape in.

    :param stderr: whether it is for the standard error; others as rich has them.

    >>> from io import StringIO
    >>> console = VisibleConsole(file=StringIO())
    >>> console.print("bad \x1b[2Jrow", markup=False)
    >>> console.file.getvalue()
    'bad [2Jrow\n'
    """

    def __init__(self, stderr: bool = False, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        if hasattr(stream, "rich_proxied_file"):  # What all else is printed to (terminal.py).
            options.setdefault("file", stream.rich_proxied_file)
        super().__init__(stderr=stderr, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return segments as rich does, without control characters in their text."""
        for segment in super().render(renderable, options):
            if not segment.control and (text := visible(segment.text)) != segment.text:
                yield Segment(text, segment.style)
            else:
                yield segment
