"""Numbers and messages as a person reads them. Pure.

What does not live here: sentences about jobs (display.py), and the view (view.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctxflow.terminal import visible
from ctxflow.wording import counted


def duration(seconds: float) -> str:
    """A time span for people.

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
    """A figure to three digits, or all before the point.

    >>> number(0), number(0.01234), number(12.345), number(99.96), number(30340.2)
    ('0', '0.0123', '12.3', '100', '30,340')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def hours(value: float) -> str:
    """Hours of workers or GPUs.

    >>> hours(0.0312), hours(48), hours(1234.5)
    ('0.03', '48.0', '1,234')
    """
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def time_left(left: float | None, low: float | None, high: float | None) -> str:
    """How long it takes still, and between which bounds that is likely.

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
    """Why tiers have fewer workers than were asked for.

    >>> lacking({"gpu": {"joined": 0, "asked": 4, "reason": "all 4 machines are busy"}})
    ['gpu lacks 4 workers: all 4 machines are busy']
    """
    return [
        f"{name} lacks {counted(tier['asked'] - tier['joined'], 'worker')}: {one_line(tier['reason'])}"
        for name, tier in tiers.items()
        if tier.get("reason") and (tier["asked"] or 0) > tier["joined"]
    ]


def one_line(text: str, most: int = 300) -> str:
    r"""A message on one line, of bounded length, without what a terminal would obey.

    >>> one_line("one\n  two\x1b[2J")
    'one two[2J'
    """
    joined = " ".join(visible(text).split())
    return joined if len(joined) <= most else joined[: most - 3] + "..."
