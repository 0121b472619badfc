"""What follows from a run for whoever wants the next one quicker: one sentence, from figures alone. Pure.

What does not live here: the figures (accounts.py, summary.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ctxflow.observe.accounts import PARTS
from ctxflow.observe.history import History
from ctxflow.observe.summary import percent
from ctxflow.observe.words import seconds
from ctxflow.wording import counted

_MOSTLY = 0.75  # A share of useful time with which there is little left to gain.
_WENT_INTO = {
    "evicted": "calls that evictions ended", "lost": "calls that were lost with their workers",
    "failed": "calls that failed", "unneeded": "calls whose answers nobody needed",
    "sending": "sending calls and answers", "unfinished": "calls that were not over when the log ended",
    "loading": "loading", "staging": "bringing files",
    "idle": "waiting",
}  # fmt: skip


def conclusion(summary: Mapping[str, Any], history: History | None = None) -> str:
    """Return a sentence or two: what most of the workers' time went into, and why, as far as figures tell.

    :param summary: as `summarise` makes it.
    :param history: of the same run; without one no reason is given.

    >>> hours = {**dict.fromkeys(PARTS, 0.0), "connected": 1.0, "useful": 0.9, "loading": 0.1}
    >>> conclusion({"items": {"submitted": 5, "done": 5}, "workers": {"joined": 1}, "hours": hours})
    '90 % of the time was useful; most of the rest, 10 %, went into loading.'
    """
    items, hours = summary["items"], summary["hours"]
    connected = hours["connected"]
    if not summary["workers"]["joined"] or not connected:
        return "No worker joined, so that nothing could run." if items["submitted"] else "No worker joined."
    share = {part: hours[part] / connected for part in PARTS}
    worst = max((part for part in PARTS if part != "useful"), key=lambda part: share[part])
    because = _reason(worst, summary, history) if history is not None else ""
    into = f"{percent(share[worst])}, went into {_WENT_INTO[worst]}{because}"
    if share["useful"] >= _MOSTLY:
        text = f"{percent(share['useful'])} of the time was useful"
        return f"{text}; most of the rest, {into}." if share[worst] >= 0.01 else f"{text}."
    if not items["submitted"] and not (history is not None and history.chunks):
        return f"Nothing was submitted: {percent(share[worst])} of the time went into {_WENT_INTO[worst]}."
    if share["useful"] >= share[worst]:
        return f"{percent(share['useful'])} of the time was useful; most of the rest, {into}."
    useful = "nothing was useful" if not share["useful"] else f"{percent(share['useful'])} was useful"
    return f"{percent(share[worst])} of the time went into {_WENT_INTO[worst]}{because}; {useful}."


def _reason(part: str, summary: Mapping[str, Any], history: History) -> str:
    found = _REASONS[part](summary, history) if part in _REASONS else ""
    return f", since {found}" if found else ""


def _lived(history: History) -> float:
    """How long a worker was there, on average."""
    return history.workers.worker_seconds / history.workers.joined


def _gone(history: History) -> int:
    return history.workers.evicted + history.workers.unexplained


def _loading(summary: Mapping[str, Any], history: History) -> str:
    loads = sum(context.load_seconds.count for context in history.contexts.values())
    took = sum(context.load_seconds.mean * context.load_seconds.count for context in history.contexts.values())
    failed = sum(context.failed for context in history.contexts.values())
    if not loads:
        return f"no context was built ({failed:,} failed)" if failed else "no context was built to its end"
    load = took / loads
    if _gone(history) and _gone(history) * 2 >= history.workers.joined:
        return f"a worker lived {seconds(_lived(history))} on average, and a load took {seconds(load)}"
    if loads > history.workers.joined * max(1, len(history.contexts)):
        return (
            f"contexts gave way for each other: {counted(loads, 'load')} on {counted(history.workers.joined, 'worker')}"
        )
    return f"a load took {seconds(load)}, and the run was over after {seconds(history.duration)}"


def _staging(summary: Mapping[str, Any], history: History) -> str:
    joined = history.workers.joined
    if _gone(history) * 2 >= joined > 1:
        return f"a worker lived {seconds(_lived(history))} on average, and each got the files anew"
    return f"each of the {joined:,} workers got the files first" if joined > 1 else "the worker got the files first"


def _evicted(summary: Mapping[str, Any], history: History) -> str:
    calls = _mean_call(history)
    lived = f"a worker lived {seconds(_lived(history))} on average"
    return lived if calls is None else f"{lived}, and a call took {seconds(calls)}: smaller batches lose less"


def _mean_call(history: History) -> float | None:
    count = sum(app.call_seconds.count for app in history.apps.values())
    return (
        sum(app.call_seconds.mean * app.call_seconds.count for app in history.apps.values()) / count if count else None
    )


def _idle(summary: Mapping[str, Any], history: History) -> str:
    accounts = history.accounts
    if accounts.begin is None or accounts.end is None:
        return "nothing was submitted" if accounts.begin is None else "nothing was answered"
    idle = sum(group.seconds["idle"] for group in accounts.groups)
    before, _, after = presence_around(history, accounts.begin, accounts.end)
    if before >= idle / 2 and before >= after:
        return f"workers were there before the first item was, for {seconds(before)} together"
    if after >= idle / 2:
        return f"workers stayed after the last answer, for {seconds(after)} together"
    return "too few items were there for all workers at a time"


def presence_around(history: History, begin: float, end: float) -> tuple[float, float, float]:
    """Return the workers' seconds before a time, after it, and after another: connected, whatever they did."""
    found = [0.0, 0.0, 0.0]
    for group in history.accounts.groups:
        for time, change in group.presence:
            stops = [time, max(time, begin), max(time, end), max(time, history.duration)]
            for place in range(3):
                found[place] += change * (stops[place + 1] - stops[place])
    return found[0], found[1], found[2]


def _failed(summary: Mapping[str, Any], history: History) -> str:
    ordered = history.causes.ordered()
    failed = sum(sum(app.failed.values()) for app in history.apps.values())
    return f"{counted(failed, 'call')} did, mostly with {ordered[0].error}" if ordered and failed else ""


def _sending(summary: Mapping[str, Any], history: History) -> str:
    calls = _mean_call(history)
    return "" if calls is None else f"a call took only {seconds(calls)}: larger batches are sent more rarely"


_REASONS: dict[str, Callable[[Mapping[str, Any], History], str]] = {
    "loading": _loading, "staging": _staging, "evicted": _evicted, "idle": _idle, "failed": _failed,
    "sending": _sending,
}  # fmt: skip
