"""What a person is told of a job: numbers, how it stands, and how it ended. Pure."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ctxflow.errors import counted
from ctxflow.terminal import visible

if TYPE_CHECKING:
    from ctxflow.observe.progress import Progress


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: all its rows are done or dead.

    :ivar done: rows with a result; `dead`, rows in the dead letters.
    :ivar done_now: those of this run; `dead_now` likewise.
    :ivar seconds: that this run took.
    :ivar already: whether there was nothing to do, since an earlier run had finished.
    :ivar truncated_now: rows of this run whose input was too long and was cut, as `too_long` of the job said.
    :ivar nulled: values of this run that the output's form cannot hold, so that null stands in their place, by column;
        `altered`, texts and keys of dictionaries that had to be written otherwise.
    :ivar summary: of this run, as observe/summary.py makes it; None if nothing ran.

    >>> Outcome(done=3, dead=1, done_now=3, dead_now=1, seconds=1.0).exit_status
    3
    """

    done: int
    dead: int
    done_now: int
    dead_now: int
    seconds: float
    already: bool = False
    nulled: dict[str, int] = dataclasses.field(default_factory=dict)
    altered: dict[str, int] = dataclasses.field(default_factory=dict)
    summary: dict[str, Any] | None = None
    truncated_now: int = 0

    @property
    def exit_status(self) -> int:
        """Return 0 if all rows have a result, 3 if some are dead."""
        return 3 if self.dead else 0


def duration(seconds: float) -> str:
    """Return a time span for people.

    >>> duration(3.21), duration(75), duration(4000), duration(200_000)
    ('3.2 s', '1 min 15 s', '1 h 06 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def number(value: float) -> str:
    """Return a figure to three digits, or all before the point.

    >>> number(0), number(0.01234), number(12.345), number(99.96), number(30340.2)
    ('0', '0.0123', '12.3', '100', '30,340')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def hours(value: float) -> str:
    """Return hours of workers or GPUs as text.

    >>> hours(0.0312), hours(48), hours(1234.5)
    ('0.03', '48.0', '1,234')
    """
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def time_left(left: float | None, low: float | None, high: float | None) -> str:
    """Return how long it still takes, and between which bounds that is likely.

    >>> time_left(100, 90, 120), time_left(100, 60, None), time_left(7, 6.99, 7.01), time_left(100, None, None)
    ('1 min 40 s, likely 1 min 30 s to 2 min 00 s', '1 min 40 s, likely 1 min 00 s at least', '7.0 s', '1 min 40 s')
    """
    if left is None:
        return "cannot be told yet"
    text = duration(left)
    if low is None:
        return text
    if high is None:
        return f"{text}, likely {duration(low)} at least"
    return text if duration(low) == duration(high) else f"{text}, likely {duration(low)} to {duration(high)}"


def lacking(tiers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return why tiers have fewer workers than requested.

    >>> lacking({"gpu": {"joined": 0, "asked": 4, "reason": "all 4 machines are busy"}})
    ['gpu lacks 4 workers: all 4 machines are busy']
    """
    return [
        f"{name} lacks {counted(tier['asked'] - tier['joined'], 'worker')}: {one_line(tier['reason'])}"
        for name, tier in tiers.items()
        if tier.get("reason") and (tier["asked"] or 0) > tier["joined"]
    ]


def one_line(text: str, most: int = 300) -> str:
    r"""Return a message on one line, of bounded length, without control sequences.

    >>> one_line("one\n  two\x1b[2J")
    'one two[2J'
    """
    joined = " ".join(visible(text).split())
    return joined if len(joined) <= most else joined[: most - 3] + "..."


def describe(now: Progress) -> str:
    """Return a line on how a job stands.

    >>> from ctxflow.observe.progress import Progress
    >>> describe(Progress(done=1200, dead=3, total=5000, rate=20.0, left=190.0, workers=2, evictions=1))
    '1,200 of 5,000 rows, 3 dead, 20 rows/s, 3 min 10 s left, 2 workers, 1 eviction'
    >>> describe(Progress(sessions={"running": 7, "idle": 2}, chunks=120, chunks_per_s=4.5, workers=2))
    '9 sessions (7 running), 4.5 chunks/s, 2 workers'
    """
    total = "" if now.total is None else f" of {'about ' if now.guessed else ''}{now.total:,}"
    parts = []
    if now.counts_rows:
        parts.append(f"{now.done:,}{total} {now.unit}")
        if now.dead:
            parts.append(f"{now.dead:,} dead")
        parts.append(f"{number(now.rate)} {now.unit}/s")
    if now.sessions:
        parts.append(f"{counted(sum(now.sessions.values()), 'session')} ({now.sessions.get('running', 0):,} running)")
        parts.append(f"{number(now.chunks_per_s)} chunks/s")
    if now.tokens_per_s is not None:
        parts.append(f"{number(now.tokens_per_s)} tokens/s")
    if now.left:
        parts.append(f"{duration(now.left)} left")
    if now.workers is not None:
        parts.append(counted(now.workers, "worker"))
    parts += [f"{amount} {state}" for state, amount in now.by_state.items() if state != "warm"]
    if now.evictions:
        parts.append(counted(now.evictions, "eviction"))
    return "; ".join([", ".join(parts), *lacking(now.tiers)])


def summary(outcome: Outcome, output: str, goes_on: bool = True) -> str:
    """Return a sentence or two on how a job ended.

    :param goes_on: whether it can be taken up again.
    """
    if outcome.already:
        text = f"nothing to do: {counted(outcome.done, 'row')} done before, in {output}"
    else:
        text = f"{counted(outcome.done_now, 'row')} done in {duration(outcome.seconds)}"
        text += f", {outcome.done:,} in all: {output}" if outcome.done != outcome.done_now else f": {output}"
    if outcome.truncated_now:
        text += f'\n{counted(outcome.truncated_now, "row")} of these too long, and cut: they say "truncated": true'
    for column, many in outcome.nulled.items():
        values = counted(many, "value")
        text += f"\n{values} of {column} became null, since the output cannot hold {'it' if many == 1 else 'them'}"
    for column, many in outcome.altered.items():
        were, are = ("was", "it as it is") if many == 1 else ("were", "them as they are")
        texts = counted(many, "text or key", "texts or keys")
        text += f"\n{texts} of {column} {were} written otherwise, since the output cannot hold {are}"
    if outcome.dead:
        text += f"\n{counted(outcome.dead, 'row')} failed"
        if output != os.devnull:
            text += f", see {output}.errors.jsonl" + ("; --retry-errors tries them again" if goes_on else "")
    return text
