"""Summarise a run: what ran where, how fast, how near to what its workers could do, and what their time went into.

As data, which is kept with the run, and as text; `conclusion` is one sentence for whoever wants the next run faster.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ctxflow.errors import counted
from ctxflow.files import written_whole
from ctxflow.observe.accounts import PARTS, AccountGroup, Accounts
from ctxflow.observe.history import History
from ctxflow.observe.load_times import load_times_data, mostly
from ctxflow.observe.measures import Histogram, even, gpus_text, percent, seconds, span_unit, table

SUMMARY = "summary.json"
PART_NAMES = {
    "useful": "useful", "evicted": "lost to evictions", "lost": "lost with workers", "failed": "failed calls",
    "unneeded": "not needed", "unfinished": "not finished", "sending": "sending", "loading": "loading",
    "staging": "staging", "idle": "idle",
}  # fmt: skip
_ALWAYS = ("useful", "evicted", "loading", "idle")  # Shown even where there is nothing of them.
Kind = TypeVar("Kind")


# --- how fast workers could have been


def speeds(groups: Iterable[AccountGroup]) -> tuple[dict[tuple[str | None, int], float], float]:
    """Return how much work a worker of each kind does in a second of its time, as measured, and how much all did.

    A unit of work takes a worker of this run a second on average: an item of an app counts for the mean of the useful
    seconds that an item of it took. How much faster one kind is than another is taken to be the same for each app.

    :returns: speed by kind (GPU model, GPUs of a worker), of those kinds alone that answered something; and the work.
    """
    groups = list(groups)
    items: dict[str, int] = collections.defaultdict(int)
    taken: dict[str, float] = collections.defaultdict(float)
    for group in groups:
        for app, count in group.items.items():
            items[app] += count
            taken[app] += group.app_seconds[app]
    worth = {app: taken[app] / count for app, count in items.items() if count}
    done: dict[tuple[str | None, int], float] = collections.defaultdict(float)
    busy: dict[tuple[str | None, int], float] = collections.defaultdict(float)
    for group in groups:
        done[group.kind] += sum(worth[app] * n for app, n in group.items.items())
        busy[group.kind] += sum(group.app_seconds.values())
    return {kind: done[kind] / busy[kind] for kind in done if busy[kind] > 0}, sum(taken.values())


def fluid_seconds(
    presence: Iterable[tuple[float, Kind, int]], speed: Mapping[Kind, float], work: float, begin: float = 0.0
) -> float | None:
    """Return the fluid bound: the least time in which the workers that were there could have done the work.

    Each works from its joining to its going at the measured speed of its kind (0 if it has none), and work can be split
    at will: nothing is counted for staging, loading, sending, waiting, evictions, and the tail.

    :param presence: (time, kind, +1 or -1) for every worker that joined or went, in any order.
    :param begin: when the work began to be there; workers could not begin before.
    :returns: seconds from `begin` on; None if these workers could not have done it.
    """
    rate = done = 0.0
    last = begin
    for time, kind, change in sorted(presence, key=lambda each: each[0]):
        now = max(time, begin)
        # What is left of a rate that was added and subtracted is no rate.
        if rate > 1e-12 and done + rate * (now - last) >= work:
            break
        done += rate * (now - last)
        last = now
        rate += change * speed.get(kind, 0.0)
    if done >= work:
        return last - begin
    return last - begin + (work - done) / rate if rate > 1e-12 else None


def _fluid(accounts: Accounts) -> dict[str, float | None]:
    """Return the bound, beside how long it took from the first submission to the last answer."""
    begin, end = accounts.begin, accounts.end
    speed, work = speeds(accounts.groups)
    if begin is None or end is None or not speed:
        return {"took": None, "bound": None, "efficiency": None}
    presence = [(time, group.kind, change) for group in accounts.groups for time, change in group.presence]
    bound = fluid_seconds(presence, speed, work, begin)
    took = end - begin
    return {"took": took, "bound": bound, "efficiency": bound / took if bound is not None and took > 0 else None}


# --- as data


def summarise(history: History) -> dict[str, Any]:
    """Return the summary of a run as data for JSON; docs/report.md describes each figure."""
    groups = history.accounts.groups
    of_gpus = bool(groups) and all(group.gpus for group in groups)
    items = history.items
    fluid = _fluid(history.accounts)
    tokens = [group.tokens for group in groups if group.tokens is not None]
    cached = [group.cached_tokens for group in groups if group.cached_tokens is not None]
    took = fluid["took"] or history.duration
    return {
        "duration": history.duration,
        "items": {"submitted": items.submitted, "done": items.done, "dead": items.dead,
                  "cancelled": items.cancelled, "open": items.open, "run_again": items.run_again},
        "items_per_second": items.done / took if took else None,
        "tokens": sum(tokens) if tokens else None,
        "tokens_per_second": sum(tokens) / took if tokens and took else None,
        "cached_tokens": sum(cached) if cached else None,
        "workers": {"joined": history.workers.joined, "mean": history.mean_workers, "most": history.peak_workers,
                    "evicted": history.workers.evicted, "lost": history.workers.unexplained},
        "loads": sum(context.load_seconds.count for context in history.contexts.values()),
        "load_parts": load_times_data(history.load_times),
        "fluid": fluid,
        "unit": "GPU-hours" if of_gpus else "worker-hours",
        "hours": _hours(groups, of_gpus),
        "models": [_row(alike, of_gpus) for alike in _alike(groups, lambda group: group.kind)],
        "places": [
            {"tier": alike[0].tier, **_row(alike, of_gpus)}
            for alike in _alike(groups, lambda group: (group.tier, *group.kind))
        ],
    }  # fmt: skip


def _alike(groups: Iterable[AccountGroup], key: Callable[[AccountGroup], Any]) -> list[list[AccountGroup]]:
    """Return the groups that have the same key, those with the most time first."""
    found: dict[Any, list[AccountGroup]] = {}
    for group in groups:
        found.setdefault(key(group), []).append(group)
    return sorted(found.values(), key=lambda alike: -sum(group.connected for group in alike))


def _hours(groups: Iterable[AccountGroup], of_gpus: bool) -> dict[str, float]:
    hours = dict.fromkeys(("connected", *PARTS), 0.0)
    for group in groups:
        weight = (group.gpus if of_gpus else 1) / 3600
        hours["connected"] += weight * group.connected
        for part in PARTS:
            hours[part] += weight * group.seconds[part]
    return hours


def _row(alike: list[AccountGroup], of_gpus: bool) -> dict[str, Any]:
    """Return a row for groups of one kind. Rates are of a worker while its calls run."""
    busy = sum(sum(group.app_seconds.values()) for group in alike)
    items = sum(sum(group.items.values()) for group in alike)
    tokens = [group.tokens for group in alike if group.tokens is not None]
    return {
        "gpu_model": alike[0].gpu_model,
        "gpus": alike[0].gpus,
        "hosts": sorted({host for group in alike for host in group.hosts}),
        "workers": sum(group.joined for group in alike),
        "items": items,
        "items_per_second": items / busy if busy else None,
        "tokens_per_second": sum(tokens) / busy if tokens and busy else None,
        "hours": _hours(alike, of_gpus),
    }


def keep(run: Path, name: str, value: Mapping[str, Any]) -> None:
    """Keep an object, such as a summary, as JSON in a run's directory: all of it or nothing."""
    text = json.dumps(value, indent=1, default=str) + "\n"
    with written_whole(run / name) as file:
        file.write(text.encode())


# --- as text


def efficiency_text(summary: Mapping[str, Any]) -> str:
    """Return a sentence on the fluid bound; empty if there is none."""
    fluid = summary["fluid"]
    if fluid["efficiency"] is None:
        return ""
    could, took = seconds(fluid["bound"]), seconds(fluid["took"])
    share = percent(fluid["efficiency"])
    return f"{share} of the fluid bound: these workers could have done it in {could}, and took {took}"


def parts_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, float, float]]:
    """Return (part, its name, time in the unit that fits, share of what was connected) for each part that there is."""
    hours = summary["hours"]
    scale, _ = span_unit(summary["unit"], hours["connected"])
    total = hours["connected"] or 1.0
    return [
        (part, PART_NAMES[part], scale * hours[part], hours[part] / total)
        for part in PARTS
        if part in _ALWAYS or hours[part] > 5e-5 * total
    ]


def places_table(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return what ran where: the heads of a table, and its rows."""
    scale, unit = span_unit(summary["unit"], summary["hours"]["connected"])
    counted = summary["tokens"] is not None
    heads = ["tier", "GPU", "hosts", "workers", "items", "items/s busy", *(["tokens/s busy"] * counted), unit, "useful"]
    of = [(place["tier"], place) for place in summary["places"]]
    if len(summary["places"]) > len(summary["models"]):
        of += [("all tiers", model) for model in summary["models"]]
    columns: list[list[str]] = [
        [tier for tier, _ in of],
        [gpus_text(row["gpu_model"], row["gpus"]) for _, row in of],
        [f"{len(row['hosts']):,}" for _, row in of],
        [f"{row['workers']:,}" for _, row in of],
        [f"{row['items']:,}" for _, row in of],
        even([row["items_per_second"] for _, row in of]),
        *([even([row["tokens_per_second"] for _, row in of])] * counted),
        even([scale * row["hours"]["connected"] for _, row in of]),
        [percent(row["hours"]["useful"] / row["hours"]["connected"]) if row["hours"]["connected"] else "-"
         for _, row in of],
    ]  # fmt: skip
    return heads, [list(row) for row in zip(*columns, strict=True)]


def summary_text(summary: Mapping[str, Any]) -> str:
    """Return a summary as text: what ran where, the efficiency, and what the time went into."""
    if not summary["places"]:
        return "No worker joined."
    heads, rows = places_table(summary)
    scale, unit = span_unit(summary["unit"], summary["hours"]["connected"])
    rows_of_parts = parts_rows(summary)
    *values, connected = even([*(value for _, _, value, _ in rows_of_parts), scale * summary["hours"]["connected"]])
    parts = [[row[1], value, percent(row[3])] for row, value in zip(rows_of_parts, values, strict=True)]
    parts.append(["connected", connected, "100 %"])
    texts = [table(["Ran on", *heads[1:]], rows, words=2), table([unit, "", "share"], parts)]
    efficiency, cached = efficiency_text(summary), summary.get("cached_tokens")
    if efficiency:
        texts.append(f"Efficiency  {efficiency}")
    if cached is not None and summary["tokens"]:
        share = percent(cached / summary["tokens"])
        texts.append(f"Prefix cache  {cached:,} of {summary['tokens']:,.0f} tokens were found in it ({share})")
    return "\n\n".join(texts)


_MOSTLY = 0.75  # A share of useful time with which there is little left to gain.
_WENT_INTO = {
    "evicted": "calls that evictions ended", "lost": "calls that were lost with their workers",
    "failed": "calls that failed", "unneeded": "calls whose answers nobody needed",
    "sending": "sending calls and answers", "unfinished": "calls that were not over when the log ended",
    "loading": "loading", "staging": "bringing files",
    "idle": "waiting",
}  # fmt: skip


def conclusion(summary: Mapping[str, Any], history: History | None = None) -> str:
    """Return a sentence or two: what most of the workers' time went into, and, with the run's history, why."""
    items, hours = summary["items"], summary["hours"]
    connected = hours["connected"]
    if not summary["workers"]["joined"] or not connected:
        return "No worker joined, so that nothing could run." if items["submitted"] else "No worker joined."
    share = {part: hours[part] / connected for part in PARTS}
    worst = max((part for part in PARTS if part != "useful"), key=lambda part: share[part])
    found = _REASONS[worst](history) if history is not None and worst in _REASONS else ""
    because = f", since {found}" if found else ""
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


def _lived(history: History) -> float:
    """Return how long a worker was there, on average."""
    return history.workers.worker_seconds / history.workers.joined


def _gone(history: History) -> int:
    return history.workers.evicted + history.workers.unexplained


def _loading(history: History) -> str:
    load, loads = _mean(context.load_seconds for context in history.contexts.values())
    failed = sum(context.failed for context in history.contexts.values())
    if not loads:
        return f"no context was built ({failed:,} failed)" if failed else "no context was built to its end"
    took = f"a load took {seconds(load)}{mostly(history.load_times)}"
    if _gone(history) and _gone(history) * 2 >= history.workers.joined:
        return f"a worker lived {seconds(_lived(history))} on average, and {took}"
    if loads > history.workers.joined * max(1, len(history.contexts)):
        on = f"{counted(loads, 'load')} on {counted(history.workers.joined, 'worker')}"
        return f"contexts replaced each other: {on}"
    return f"{took}, and the run was over after {seconds(history.duration)}"


def _staging(history: History) -> str:
    joined = history.workers.joined
    if _gone(history) * 2 >= joined > 1:
        return f"a worker lived {seconds(_lived(history))} on average, and each got the files anew"
    return f"each of the {joined:,} workers got the files first" if joined > 1 else "the worker got the files first"


def _evicted(history: History) -> str:
    call, calls = _mean(app.call_seconds for app in history.apps.values())
    lived = f"a worker lived {seconds(_lived(history))} on average"
    return f"{lived}, and a call took {seconds(call)}: smaller batches lose less" if calls else lived


def _mean(times: Iterable[Histogram]) -> tuple[float, int]:
    """Return the mean of all durations, 0 of none, and how many there are."""
    all_times = list(times)
    count = sum(each.count for each in all_times)
    return sum(each.total for each in all_times) / count if count else 0.0, count


def _idle(history: History) -> str:
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


def _failed(history: History) -> str:
    ordered = history.causes.ordered()
    failed = sum(sum(app.failed.values()) for app in history.apps.values())
    return f"{counted(failed, 'call')} did, mostly with {ordered[0].error}" if ordered and failed else ""


def _sending(history: History) -> str:
    call, calls = _mean(app.call_seconds for app in history.apps.values())
    return f"a call took only {seconds(call)}: larger batches are sent more rarely" if calls else ""


_REASONS: dict[str, Callable[[History], str]] = {
    "loading": _loading, "staging": _staging, "evicted": _evicted, "idle": _idle, "failed": _failed,
    "sending": _sending,
}  # fmt: skip
