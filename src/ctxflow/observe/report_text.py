"""Write a report as text."""

from __future__ import annotations

from collections.abc import Sequence

from ctxflow.errors import counted
from ctxflow.observe.causes import Cause
from ctxflow.observe.formatting import even, figure, percent, seconds, table
from ctxflow.observe.history import AppHistory, Histogram, History, HostFigures, TierHistory, percentiles
from ctxflow.observe.run_report import Report
from ctxflow.observe.summary import summary_text
from ctxflow.observe.transfer_trees import tree_lines

_MOST = 40  # Transfers of a file, if not all are wanted.
_MOST_CAUSES = 8
_MOST_HOSTS = 20


def as_text(report: Report, every: bool = False) -> str:
    """Return a report as text: a summary, calls and contexts as tables, and the tree of each file.

    :param every: show all transfers of large trees.
    """
    parts = [f"Run {report.run}"]
    if report.history is None:
        parts.append("Its event log was not written, so that nothing is known of items and calls.")
        if report.summary is not None:
            parts.append("The summary that was kept:\n\n" + summary_text(report.summary))
    else:
        if report.history.simulated:
            parts.append("It was simulated: all times are virtual, and no worker ran anything.")
        parts.append("\n".join(f"{name:<10}{text}" for name, text in overview(report.history)))
        if report.summary is not None and report.summary["places"]:
            parts.append(summary_text(report.summary))
        parts += [table(heads, rows) for heads, rows in tables(report.history)]
    if report.causes:
        parts.append(causes_text(report.causes, None if every else _MOST_CAUSES))
    if report.trees:
        trees = ["\n".join(tree_lines(tree, report.transfers, None if every else _MOST)) for tree in report.trees]
        parts.append("Transfers\n\n" + "\n\n".join(trees))
    return "\n\n".join(parts)


def causes_text(causes: Sequence[Cause], most: int | None = None) -> str:
    """Return why things failed, a line for each cause and what failed of it.

    >>> print(causes_text([Cause("ValueError", "row N is empty", message="row 3 is empty", calls=5, items=2, rows=2)]))
    Failures
    ValueError: row 3 is empty
      5 calls, 2 items for good, 2 dead letters
    """
    lines = ["Failures"]
    for cause in causes[:most]:
        message = " ".join(cause.message.split())
        shown = message if len(message) <= 300 else f"{message[:297]}..."
        lines += [f"{cause.error}: {shown}" if shown else cause.error, f"  {counts_text(cause)}"]
    if most is not None and len(causes) > most:
        lines.append(f"... and {len(causes) - most} more causes (--all shows them)")
    return "\n".join(lines)


def counts_text(cause: Cause) -> str:
    """Return what failed of a cause."""
    counts = [
        (cause.calls, "call", "calls"), (cause.contexts, "context load", "context loads"),
        (cause.items, "item for good", "items for good"), (cause.rows, "dead letter", "dead letters"),
    ]  # fmt: skip
    return ", ".join(f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count)


def overview(history: History) -> list[tuple[str, str]]:
    """Return what a run came to: (what, in words)."""
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
    chunks = [("Chunks", f"{history.chunks:,} of sessions")] if history.chunks else []
    return [
        ("Duration", f"{seconds(history.duration)}, {figure(rate)} items/s"),
        *chunks,
        ("Items", f"{items.done:,} of {items.submitted:,} done{''.join(', ' + part for part in left)}{again}"),
        ("Workers", f"{history.mean_workers:.1f} on average, {history.peak_workers:,} at most, "
                    f"{workers.joined:,} joined{hosts}{lost}{notices}"),
        ("Contexts", f"{counted(loads, 'load')}{f', {failed:,} failed' if failed else ''}"),
    ]  # fmt: skip


def tables(history: History) -> list[tuple[list[str], list[list[str]]]]:
    """Return calls, context loads, tiers and lifetimes, as far as there are any: heads and rows, remarks as rows of
    one.
    """
    heads = ["count", "mean", "p50", "p90", "p99", "longest"]
    found: list[tuple[list[str], list[list[str]]]] = []
    apps = sorted(history.apps.values(), key=lambda app: -app.calls)
    calls = [row for app in apps if app.calls or app.failed for row in _app_rows(app)]
    if calls:
        found.append((["Calls", *heads], calls))
    loads = [[c.name, *_cells(c.load_seconds)] for c in history.contexts.values() if c.load_seconds.count]
    if loads:
        found.append((["Context loads", *heads], loads))
    if len(history.tiers) > 1 or history.workers.jobs_started or history.workers.held:
        rows = [row for name, tier in history.tiers.items() for row in _tier_rows(name, tier)]
        found.append((["Tiers", "items done", "joined", "evicted", "lost", "given back", "queued p50"], rows))
    if len(history.by_host) > 1:
        found.append(_host_table(history))
    if history.quarantines:
        found.append(_quarantine_table(history))
    if history.plans:
        found.append(_plan_table(history))
    evicted = {name: tier for name, tier in history.tiers.items() if tier.lifetimes}
    rates = even([tier.eviction_rate for tier in evicted.values()])
    lived = [_lifetime_row(name, tier, rate) for (name, tier), rate in zip(evicted.items(), rates, strict=True)]
    if lived:
        found.append((["Evicted after", "count", "a worker-hour", "p10", "p50", "p90", "longest"], lived))
    return found


def _host_table(history: History) -> tuple[list[str], list[list[str]]]:
    """Return what was done on each host, and what failed there: those with the most trouble first."""

    def trouble(named: tuple[str, HostFigures]) -> tuple[int, int, str]:
        name, host = named
        return -(host.failed + host.contexts_failed + host.lost + host.quarantines), -host.calls, name

    hosts = sorted(history.by_host.items(), key=trouble)
    rows = [
        [name, *(f"{count:,}" for count in (
            host.joined, host.calls, host.failed, host.contexts_failed, host.lost, host.evicted, host.quarantines
        ))]
        for name, host in hosts[:_MOST_HOSTS]
    ]  # fmt: skip
    if len(hosts) > _MOST_HOSTS:
        rows.append([f"  ... and {len(hosts) - _MOST_HOSTS:,} more (--json has them)"])
    heads = ["Hosts", "workers", "calls done", "failed", "contexts failed", "lost", "evicted", "quarantined"]
    return heads, rows


def _quarantine_table(history: History) -> tuple[list[str], list[list[str]]]:
    """Return the hosts and workers that got no work for a while, and why."""
    rows = []
    for since, each in history.quarantines:
        gpus = f", GPU {', '.join(each['devices'])}" if each["devices"] else ""
        what = f"worker {each['worker']} on {each['host']}{gpus}" if each["worker"] else each["host"]
        rows += [[what, seconds(since), seconds(each["until"] - since)], [f"  {each['cause']}"]]
    return ["Quarantine", "since", "for"], rows


def _plan_table(history: History) -> tuple[list[str], list[list[str]]]:
    """Return the placement that held when the log ended: workers by tier, and how many of them hold each context."""
    since, plan = history.plans[-1]
    contexts = list(dict.fromkeys(context for context, *_ in [*plan["tiers"], *plan["holders"]]))
    names = [history.contexts[each].name if each in history.contexts else each for each in contexts]
    holders = {(context, tier): count for context, tier, count in plan["holders"]}
    allowed = dict(plan["tiers"])
    rows = []
    for tier, low, high in plan["workers"]:
        cells = [
            f"{holders[context, tier]:,}" if (context, tier) in holders
            else "any" if tier in allowed.get(context, (tier,)) else "-"
            for context in contexts
        ]  # fmt: skip
        rows.append([tier, f"{high:,}" if low == high else f"{low:,} to {high:,}", *cells])
    for app, context, share in plan["shares"]:
        name = history.apps[app].name if app in history.apps else app
        rows.append(
            [f"  {percent(share)} of {name} by {dict(zip(contexts, names, strict=True)).get(context, context)}"]
        )
    rows += [[f"  {reason}"] for reason in plan["reasons"]]
    number = len(history.plans)
    rows.append([f"  the {number}. placement of the run, since {seconds(since)}"])
    return ["Planned", "workers", *names], rows


def _tier_rows(name: str, tier: TierHistory) -> list[list[str]]:
    counts = [tier.items_done, tier.joined, tier.evicted, tier.unexplained, tier.returned]
    waited = seconds(tier.waits.percentile(50)) if tier.waits.count else "-"
    rows = [[name, *(f"{count:,}" for count in counts), waited]]
    for reason, count in sorted(tier.held.items(), key=lambda item: -item[1]):
        rows.append([f"  held{f' {count:,} times' if count > 1 else ''}: {reason or 'nobody says why'}"])
    return rows


def _lifetime_row(name: str, tier: TierHistory, rate: str) -> list[str]:
    ages = percentiles(tier.lifetimes)
    shown = [seconds(ages[part]) for part in ("p10", "p50", "p90", "most")]
    return [name, f"{tier.evicted:,}", rate, *shown]


def _app_rows(app: AppHistory) -> list[list[str]]:
    rows = [[app.name, *_cells(app.call_seconds)]]
    if app.items > app.calls:
        rows.append(["  per item", *_cells(app.item_seconds, app.items)])
    if app.failed:
        rows.append(["  failed: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(app.failed.items()))])
    return rows


def _cells(times: Histogram, count: int | None = None) -> list[str]:
    values = [times.mean, times.percentile(50), times.percentile(90), times.percentile(99), times.most]
    return [f"{times.count if count is None else count:,}", *map(seconds, values)]
