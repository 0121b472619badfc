"""What came of simulations, for people and as data.

What does not live here: the command (simulate.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from ctxflow.consoles import VisibleConsole
from ctxflow.observe.formatting import seconds
from ctxflow.simulator.recorded_run import Recorded
from ctxflow.simulator.studies import Result, Summary
from ctxflow.wording import counted

_DERIVED = ("items_per_second", "efficiency")


def as_data(summary: Summary) -> dict[str, Any]:
    """A case for JSON: the median of each figure and its spread, and every run. Seconds, bytes."""
    names = [f.name for f in dataclasses.fields(Result) if f.name not in ("moved", "finished")] + list(_DERIVED)
    runs = [
        {**dataclasses.asdict(each), **{name: getattr(each, name) for name in _DERIVED}} for each in summary.results
    ]
    return {
        "case": summary.case.name,
        "finished": summary.finished,
        "median": {name: summary.median(name) for name in names},
        "spread": {name: summary.spread(name) for name in names},
        "moved": summary.moved,
        "runs": runs,
    }


def recorded_data(recorded: Recorded) -> dict[str, Any]:
    """What a recorded run came to, and the workload that it showed."""
    names = ("name", "seconds", "items", "done", "evicted", "joined", "loads", "batches", "lost_items")
    return {**{name: getattr(recorded, name) for name in names}, "workload": recorded.workload_values()}


def show(summaries: Sequence[Summary], recorded: Recorded | None) -> None:
    """Print one case as a list of figures, several as a table; and below what is to be known of them."""
    console = VisibleConsole()
    if len(summaries) == 1 and recorded is None:
        print(one(summaries[0]))
    else:
        if recorded is not None:
            print(f"Run {recorded.name}\n")
        print(table(summaries, recorded, console.width))
    for summary in summaries:
        if not summary.finished:
            left = max(result.items - result.done for result in summary.results)
            when = seconds(summary.median("seconds"))
            print(
                f"{summary.case.name}: {counted(left, 'item')} left after {when}: see --until, and whether batches fit"
            )
    if recorded is not None:
        for doubt in recorded.doubts:
            print(f"Note: {doubt}.")


def one(summary: Summary) -> str:
    """The figures of one case, a line each."""
    median = summary.median
    several = len(summary.results) > 1
    around = f" (spread {seconds(summary.spread('seconds'))} over {len(summary.results)} runs)" if several else ""
    moved = ", ".join(f"{size / 1e9:,.4g} GB from {source}" for source, size in summary.moved.items()) or "nothing"
    joined = f"{median('workers'):,.1f} on average, {median('joined'):,.0f} joined, {median('evicted'):,.0f} evicted"
    twice = f"; {median('wasted_items'):,.0f} answered a second time by duplicates" if median("duplicates") else ""
    batches = counted(round(median("batches")), "batch", "batches")
    lines = [
        ("Makespan", f"{seconds(median('seconds'))}, {median('items_per_second'):,.4g} items/s{around}"),
        ("Bound", f"{seconds(median('fluid_seconds'))}: {median('efficiency'):.1%} of what nobody beats"),
        ("Items", f"{median('done'):,.0f} of {median('items'):,.0f} done in {batches}"),
        ("Workers", joined),
        ("Lost", f"{counted(round(median('lost_items')), 'item')} in {seconds(median('lost_seconds'))} of work{twice}"),
        ("Contexts", f"{counted(round(median('loads')), 'load')} in {seconds(median('load_seconds'))}"),
        ("Moved", f"{moved}; staging took {seconds(median('stage_seconds'))} of the workers' time"),
    ]
    if median("raised") or median("dead"):
        failed = counted(round(median("raised")), "call or build", "calls and builds")
        lines.insert(5, ("Failed", f"{failed}; {counted(round(median('dead')), 'item')} given up"))
    return "\n".join(f"{name:9} {text}" for name, text in lines)


def table(summaries: Sequence[Summary], recorded: Recorded | None, width: int) -> str:
    """A row a case; ratios are to the first row. A name that is too long for the width has a line of its own."""
    several = len(summaries[0].results) > 1
    sent = any(summary.moved for summary in summaries)
    head = ["makespan", "ratio", "items/s", "bound", "evicted", "lost", "loads"]
    rows: list[tuple[str, list[str]]] = []
    first = summaries[0].median("seconds")
    if recorded is not None:
        first = recorded.seconds
        rate = recorded.done / first if first else 0.0
        counts = [f"{count:,}" for count in (recorded.evicted, recorded.lost_items, recorded.loads)]
        rows.append(("recorded", [seconds(first), "1", f"{rate:,.4g}", "", *counts]))
    for summary in summaries:
        took = seconds(summary.median("seconds"))
        cells = [took if summary.finished else f"> {took}"]
        cells.append(f"{summary.median('seconds') / first:.3g}" if first else "")
        cells += [f"{summary.median('items_per_second'):,.4g}", f"{summary.median('efficiency'):.1%}"]
        cells += [f"{summary.median(name):,.0f}" for name in ("evicted", "lost_items", "loads")]
        rows.append((summary.case.name, cells))
    if several:
        head.insert(1, "spread")
        spreads = [*([""] if recorded is not None else []), *(seconds(each.spread("seconds")) for each in summaries)]
        for (_, cells), spread in zip(rows, spreads, strict=True):
            cells.insert(1, spread)
    if sent:
        head.append("GB moved")
        for (_, cells), moved in zip(rows[-len(summaries) :], [summary.moved for summary in summaries], strict=True):
            cells.append(f"{sum(moved.values()) / 1e9:,.4g}")
    for name in ("evicted", "lost"):
        column = head.index(name)
        if all(cells[column] == "0" for _, cells in rows):
            del head[column]
            for _, cells in rows:
                del cells[column]
    return aligned(head, rows, width)


def aligned(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], width: int) -> str:
    """Rows under a head: names to the left, figures to the right.

    >>> print(aligned(["s"], [("one", ["1.0"]), ("two", ["12"])], 12))
           s
    one  1.0
    two   12
    """
    columns = itertools.zip_longest(head, *(cells for _, cells in rows), fillvalue="")
    widths = [max(map(len, column)) for column in columns]
    room = width - sum(each + 2 for each in widths)
    longest = max((len(name) for name, _ in rows if len(name) <= room), default=0)
    lines = []
    for name, cells in [("", head), *rows]:
        figures = "".join(f"  {cell:>{each}}" for cell, each in zip(cells, widths, strict=False))
        if len(name) > room:
            lines.append(name)
        lines.append(f"{name if len(name) <= room else '':{longest}}{figures}".rstrip())
    return "\n".join(lines)
