"""A report as text.

What does not live here: a file's tree as text (tree.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ctxflow.observe.history import App, History, Tier
from ctxflow.observe.measures import Histogram, percentiles
from ctxflow.observe.report import Report
from ctxflow.observe.tree import tree_lines

_MOST = 40  # Transfers of a file, if not all are wanted.


def seconds(value: float) -> str:
    """A duration with three digits that count.

    >>> seconds(0.01234), seconds(12.34), seconds(1234.5)
    ('12.3 ms', '12.3 s', '1,234 s')
    """
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def as_text(report: Report, every: bool = False) -> str:
    """A report as text: a summary, calls and contexts as tables, and the tree of each file.

    :param every: show all transfers of large trees.
    """
    parts = [f"Run {report.run}"]
    if report.history is None:
        parts.append("Its event log was not written, so that nothing is known of items and calls.")
    else:
        parts += [_summary(report.history), *_tables(report.history)]
    if report.trees:
        trees = ["\n".join(tree_lines(tree, report.transfers, None if every else _MOST)) for tree in report.trees]
        parts.append("Transfers\n\n" + "\n\n".join(trees))
    return "\n\n".join(parts)


def _summary(history: History) -> str:
    items, workers = history.items, history.workers
    rate = items.done / history.duration if history.duration else 0.0
    rest = {"dead": items.dead, "cancelled": items.cancelled, "without an answer": items.open}
    left = [f"{count:,} {what}" for what, count in rest.items() if count]
    again = f"; {items.run_again:,} ran again after an eviction or a failure" if items.run_again else ""
    gone = {"evicted": workers.evicted, "lost": workers.unexplained, "given back": workers.returned}
    lost = "".join(f", {count:,} {how}" for how, count in gone.items() if count) or ", none lost"
    notices = f", {history.notices:,} eviction notices" if history.notices else ""
    hosts = f" on {len(history.hosts):,} host{'s' * (len(history.hosts) != 1)}"
    loads = sum(context.load_seconds.count for context in history.contexts.values())
    failed = sum(context.failed for context in history.contexts.values())
    lines = [
        ("Duration", f"{seconds(history.duration)}, {rate:,.4g} items/s"),
        ("Items", f"{items.done:,} of {items.submitted:,} done{''.join(', ' + part for part in left)}{again}"),
        ("Workers", f"{history.mean_workers:.1f} on average, {history.peak_workers:,} at most, "
                    f"{workers.joined:,} joined{hosts}{lost}{notices}"),
        ("Contexts", f"{loads:,} loads{f', {failed:,} failed' if failed else ''}"),
    ]  # fmt: skip
    return "\n".join(f"{name:<10}{text}" for name, text in lines)


def _tables(history: History) -> list[str]:
    heads = ["count", "mean", "p50", "p90", "p99", "longest"]
    tables = []
    apps = sorted(history.apps.values(), key=lambda app: -app.calls)
    calls = [row for app in apps if app.calls or app.failed for row in _app_rows(app)]
    if calls:
        tables.append(_table(["Calls", *heads], calls))
    loads = [[c.name, *_cells(c.load_seconds)] for c in history.contexts.values() if c.load_seconds.count]
    if loads:
        tables.append(_table(["Context loads", *heads], loads))
    if len(history.tiers) > 1 or history.workers.jobs_started or history.workers.held:
        rows = [row for name, tier in history.tiers.items() for row in _tier_rows(name, tier)]
        tables.append(_table(["Tiers", "items done", "joined", "evicted", "lost", "given back", "queued p50"], rows))
    lived = [_lifetime_row(name, tier) for name, tier in history.tiers.items() if tier.lifetimes]
    if lived:
        tables.append(_table(["Evicted after", "count", "a worker-hour", "p10", "p50", "p90", "longest"], lived))
    return tables


def _tier_rows(name: str, tier: Tier) -> list[list[str]]:
    counts = [tier.items_done, tier.joined, tier.evicted, tier.unexplained, tier.returned]
    waited = seconds(tier.waits.percentile(50)) if tier.waits.count else "-"
    rows = [[name, *(f"{count:,}" for count in counts), waited]]
    for reason, count in sorted(tier.held.items(), key=lambda item: -item[1]):
        rows.append([f"  held{f' {count:,} times' if count > 1 else ''}: {reason or 'nobody says why'}"])
    return rows


def _lifetime_row(name: str, tier: Tier) -> list[str]:
    rate = tier.eviction_rate or 0.0
    ages = percentiles(tier.lifetimes)
    shown = [seconds(ages[part]) for part in ("p10", "p50", "p90", "most")]
    return [name, f"{tier.evicted:,}", f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", *shown]


def _app_rows(app: App) -> list[list[str]]:
    rows = [[app.name, *_cells(app.call_seconds)]]
    if app.items > app.calls:
        rows.append(["  per item", *_cells(app.item_seconds, app.items)])
    if app.failed:
        rows.append(["  failed: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(app.failed.items()))])
    return rows


def _cells(times: Histogram, count: int | None = None) -> list[str]:
    values = [times.mean, times.percentile(50), times.percentile(90), times.percentile(99), times.most]
    return [f"{times.count if count is None else count:,}", *map(seconds, values)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right.

    >>> print(_table(["Calls", "count"], [["verify", "12"], ["a remark"]]))
    Calls   count
    verify     12
    a remark
    """
    full = [row for row in [heads, *rows] if len(row) == len(heads)]
    widths = [max(len(row[n]) for row in full) for n in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:], strict=False)),
        ]
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)
