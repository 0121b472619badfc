"""The live view of the streaming example: a line for each user, with where the session is and what it says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import speaker
from happenings import Happenings
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ctxflow import ContextExecutor

if TYPE_CHECKING:
    from streaming import Person

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


def watch(console: Console, people: Sequence[Person], executor: ContextExecutor, seen: Happenings) -> None:
    """Show how it stands, until all have ended."""

    def now() -> Group:
        return view(people, executor, seen, console.width)

    with Live(console=console, refresh_per_second=8, transient=True, get_renderable=now):
        while any(person.is_alive() for person in people):
            time.sleep(0.1)


def view(people: Sequence[Person], executor: ContextExecutor, seen: Happenings, width: int) -> Group:
    """The screen at this moment."""
    colours: dict[str, str] = {}
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name, right in (("who", False), ("session", False), ("worker", False), ("chunks", True), ("ms", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("says", no_wrap=True)
    for person in people:
        status = person.session.status
        said = _end(" ".join(speech.text for speech in seen.speeches[person.name][-20:]), max(20, width - 50))
        if status is None:
            table.add_row(person.name, "over", "", "", "", Text(said, "dim"))
            continue
        place = status.worker or ""
        colour = colours.setdefault(place, _COLOURS[len(colours) % len(_COLOURS)]) if place else ""
        state = "idle" if status.state == "placed" and status.idle else status.state
        took = f"{1000 * status.chunk_seconds:.0f}" if status.chunk_seconds else ""
        words = Text(said, "dim" if status.idle else "")
        table.add_row(person.name, state, Text(place, colour), str(status.chunks), took, words)
    counts = (
        f"{executor.status().workers} workers, {seen.chunks} chunks, {seen.count('->')} moves, "
        f"{seen.count('suspended')} suspensions, {seen.count('taken away')} evictions"
    )
    waiting = "" if seen.chunks else "The workers build the model..."
    return Group(table, Text(waiting), Text(counts, "dim"), Text(speaker.NOTICE, "dim"))


def _end(text: str, width: int) -> str:
    """The last words that fit.

    >>> _end("one two three", 10)
    'two three'
    """
    return text if len(text) <= width else text[-width:].partition(" ")[2]


def summary(seen: Happenings) -> str:
    """What came of it, in a few lines."""
    seconds = max((s.at for each in seen.speeches.values() for s in each), default=seen.first) - seen.first
    return (
        f"{len(seen.users)} users got {seen.chunks} chunks of {speaker.CHUNK_WORDS} words in {seconds:.0f} s; "
        f"{seen.count('->')} moves, {seen.count('suspended')} suspensions, {seen.count('taken away')} evictions.\n"
        f"{speaker.NOTICE}"
    )
