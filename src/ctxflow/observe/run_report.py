"""Read a run's files into a report, and give it as data or as text; as a page: page.py; pictures: plots.py."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxflow.errors import UsageError, counted
from ctxflow.observe.history import AppHistory, Cause, Causes, History, TierHistory, history_data
from ctxflow.observe.history_reader import read_history
from ctxflow.observe.load_times import load_table
from ctxflow.observe.manager_log import read_transfers
from ctxflow.observe.measures import Histogram, even, figure, percent, percentiles, seconds, table
from ctxflow.observe.summary import SUMMARY, summarise, summary_text
from ctxflow.observe.transfers import (
    FileTree,
    Transfers,
    file_trees,
    read_staging,
    tree_lines,
    with_notes,
)

EVENTS = "events.jsonl"
BATCH = "batch.json"
"""What a batch job notes of itself beside them: `job` (its settings), `site`, `output`, `errors` (its dead letters)."""
STAGING = os.path.join("taskvine", "staging.jsonl")
_DEBUG = "taskvine/*/vine-logs/debug"
_MARKS = (EVENTS, STAGING, SUMMARY)
_PLACES = ("runs", "runinfo", ".demo/runs", "prompt-for-fact/runs")  # The last two are the demo's and its example's.
_DEPTH = 3


@dataclasses.dataclass
class Report:
    """What is known of a run.

    :ivar history: None if its event log was not written, or is gone; `summary` likewise, if none was kept either.
    :ivar causes: why something failed, the dead letters of a batch job's output among it.
    :ivar batch: what a batch job noted of itself, None for other runs.
    """

    run: Path
    history: History | None
    transfers: Transfers
    trees: list[FileTree]
    summary: dict[str, Any] | None = None
    causes: list[Cause] = dataclasses.field(default_factory=list)
    batch: dict[str, Any] | None = None


def find_run(path: Path | None = None) -> Path:
    """Return the directory of a run.

    :param path: the run's directory, or one above it that holds exactly one; by default, the latest run below
        ./runs, ./runinfo and the folder of `ctxflow demo`.
    :raises UsageError: if there is none, or if it is not clear which is meant.
    """
    if path is None:
        runs = [run for place in _PLACES for run in _runs_below(Path(place))]
        if not runs:
            raise UsageError(
                "no run below ./runs, ./runinfo or ./.demo: name a run's directory, as in `ctxflow report DIR`"
            )
        return max(runs, key=_age)
    if path.is_file() and path.name == EVENTS:
        path = path.parent
    if not path.is_dir():
        raise UsageError(f"there is no directory {path}: name a run's directory, which holds {EVENTS}")
    runs = list(_runs_below(path))
    if not runs:
        raise UsageError(f"{path} holds no run: name a directory with an {EVENTS} in it, or one above")
    if len(runs) > 1:
        latest = max(runs, key=_age)
        raise UsageError(f"{path} holds {len(runs)} runs: name one of them (the latest is {latest})")
    return runs[0]


def _runs_below(path: Path, depth: int = _DEPTH) -> Iterator[Path]:
    if any((path / name).is_file() for name in _MARKS):
        yield path
    elif depth and path.is_dir():
        for inner in sorted(path.iterdir()):
            if inner.is_dir() and not inner.is_symlink():
                yield from _runs_below(inner, depth - 1)


def _age(run: Path) -> float:
    return max((run / name).stat().st_mtime for name in _MARKS if (run / name).is_file())


def logs_of(run: Path) -> list[Path]:
    """Return all files that a report on a run reads."""
    letters = _dead_letters(read_object(run / BATCH))
    found = [path for path in (run / EVENTS, run / STAGING, letters) if path is not None and path.is_file()]
    return found + _debug_logs(run)


def _debug_logs(run: Path) -> list[Path]:
    # TaskVine keeps a link, most-recent, beside the directories of its managers.
    return sorted({path.resolve() for path in run.glob(_DEBUG) if path.is_file()})


def read_report(run: Path, advance: Callable[[int], None] = lambda count: None) -> Report:
    """Read all that a run wrote. It may be going on still.

    :param run: its directory, from `find_run`.
    :param advance: called with the number of bytes read since the last call, now and then.
    :raises ValueError: if the event log is none.
    :raises OSError: if a file cannot be read.
    """
    history = read_history(_text(run / EVENTS, advance)) if (run / EVENTS).is_file() else None
    staging = read_staging(_text(run / STAGING, advance) if (run / STAGING).is_file() else [])
    transfers = Transfers(files=staging.files, peers=staging.peers)
    for log in _debug_logs(run):
        read = read_transfers(_lines(log, advance), staging)
        transfers.transfers += read.transfers
        transfers.files.update(read.files)
        transfers.peers.update(read.peers)
    transfers.transfers = with_notes(transfers.transfers, staging)
    causes = history.causes if history is not None else Causes()
    batch = read_object(run / BATCH)
    letters = _dead_letters(batch)
    if letters is not None and letters.is_file():
        causes.dead_letters(_lines(letters, advance))
    summary = summarise(history) if history is not None else read_object(run / SUMMARY)
    return Report(run, history, transfers, file_trees(transfers.transfers), summary, causes.ordered(), batch)


def summary_of(run: Path, advance: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Return the summary of a run, from its event log alone; the parameters and errors are those of `read_report`."""
    return summarise(read_history(_text(run / EVENTS, advance)))


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is none, or another thing."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _dead_letters(batch: dict[str, Any] | None) -> Path | None:
    errors = None if batch is None else batch.get("errors")
    return Path(errors) if isinstance(errors, str) else None


def _lines(path: Path, advance: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the lines of a file, reporting how many bytes were read since the last report."""
    count = 0
    with open(path, "rb") as file:
        for line in file:
            count += len(line)
            if count >= 1 << 20:
                advance(count)
                count = 0
            yield line
    advance(count)


def _text(path: Path, advance: Callable[[int], None]) -> Iterator[str]:
    return (line.decode("utf-8", "replace") for line in _lines(path, advance))


# --- as data


def as_data(report: Report) -> dict[str, Any]:
    """Return all of a report as data for JSON: times in seconds on the run's clock, sizes in bytes."""
    of_tree = ("file", "from_manager", "copies", "links", "failed", "depth", "seconds")
    return {
        "run": str(report.run),
        "summary": report.summary,
        "history": None if report.history is None else history_data(report.history),
        "causes": [dataclasses.asdict(cause) for cause in report.causes],
        "batch": report.batch,
        "files": {digest: dataclasses.asdict(file) for digest, file in report.transfers.files.items()},
        "peers": {name: dataclasses.asdict(peer) for name, peer in report.transfers.peers.items()},
        "trees": [{name: getattr(tree, name) for name in of_tree} for tree in report.trees],
        "transfers": [
            {**dataclasses.asdict(transfer), "bytes_per_second": transfer.bytes_per_second}
            for transfer in report.transfers.transfers
        ],
    }


# --- as text

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
        loads = loads_table(report.history)
        if loads is not None:
            parts.append(table(*loads))
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
    calls, loads = counted(cause.calls, "call"), counted(cause.contexts, "context load")
    items, rows = counted(cause.items, "item for good", "items for good"), counted(cause.rows, "dead letter")
    return ", ".join(text for text in (calls, loads, items, rows) if not text.startswith("0 "))


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
    hosts = f" on {counted(len(history.hosts), 'host')}"
    loads = sum(context.load_seconds.count for context in history.contexts.values())
    failed = sum(context.failed for context in history.contexts.values())
    woken = sum(context.wake_seconds.count for context in history.contexts.values())
    more = "".join(f", {count:,} {how}" for how, count in (("failed", failed), ("woken", woken)) if count)
    chunks = [("Chunks", f"{history.chunks:,} of sessions")] if history.chunks else []
    return [
        ("Duration", f"{seconds(history.duration)}, {figure(rate)} items/s"),
        *chunks,
        ("Items", f"{items.done:,} of {items.submitted:,} done{''.join(', ' + part for part in left)}{again}"),
        ("Workers", f"{history.mean_workers:.1f} on average, {history.peak_workers:,} at most, "
                    f"{workers.joined:,} joined{hosts}{lost}{notices}"),
        ("Contexts", f"{counted(loads, 'load')}{more}"),
    ]  # fmt: skip


def tables(history: History) -> list[tuple[list[str], list[list[str]]]]:
    """Return calls, context loads, tiers and lifetimes, as far as there are any: heads and rows (of one: remarks)."""
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
    lived = []
    for (name, tier), rate in zip(evicted.items(), rates, strict=True):
        ages = percentiles(tier.lifetimes)
        lived.append(
            [name, f"{tier.evicted:,}", rate, *(seconds(ages[part]) for part in ("p10", "p50", "p90", "most"))]
        )
    if lived:
        found.append((["Evicted after", "count", "a worker-hour", "p10", "p50", "p90", "longest"], lived))
    return found


def loads_table(history: History) -> tuple[list[str], list[list[str]]] | None:
    """Return what the time of each context's loads went into: heads and rows; None where nobody told it."""
    return load_table({context.name: context.times for context in history.contexts.values()}, history.load_times)


def _host_table(history: History) -> tuple[list[str], list[list[str]]]:
    """Return what was done on each host, and what failed there: those with the most trouble first."""
    hosts = sorted(history.by_host.items(), key=lambda named: (-named[1].trouble, -named[1].calls, named[0]))
    columns = ("joined", "jobs_failed", "calls", "failed", "contexts_failed", "lost", "evicted", "quarantines")
    rows = [[name, *(f"{getattr(host, each):,}" for each in columns)] for name, host in hosts[:_MOST_HOSTS]]
    if len(hosts) > _MOST_HOSTS:
        rows.append([f"  ... and {len(hosts) - _MOST_HOSTS:,} more (--json has them)"])
    heads = ["workers", "jobs failed", "calls done", "failed", "contexts failed", "lost", "evicted", "quarantined"]
    return ["Hosts", *heads], rows


def _quarantine_table(history: History) -> tuple[list[str], list[list[str]]]:
    """Return the hosts and workers that got no work for a while, or kept it though they were slow, and why."""
    rows = []
    for since, each in history.quarantines:
        gpus = f", GPU {', '.join(each['devices'])}" if each["devices"] else ""
        what = f"worker {each['worker']} on {each['host']}{gpus}" if each["worker"] else each["host"]
        left = seconds(each["until"] - since) if each["until"] > since else "kept its work"
        rows += [[what, seconds(since), left], [f"  {each['cause']}"]]
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
    rows += [[f"  {margin}"] for margin in _margin_texts(plan, dict(zip(contexts, names, strict=True)))]
    rows += [[f"  {reason}"] for reason in plan["reasons"]]
    number = len(history.plans)
    rows.append([f"  the {number}. placement of the run, since {seconds(since)}"])
    return ["Planned", "workers", *names], rows


def _margin_texts(plan: dict[str, Any], names: dict[str, str]) -> list[str]:
    """Return the margins of a plan in words: what it counts on beyond what was measured."""
    texts = []
    for context, tier, work, delay in plan.get("margins", ()):
        shares = [f"{percent(work)} more work than measured"] if work else []
        shares += [f"{percent(delay)} below a limit on delays"] if delay else []
        texts.append(f"margin for {names.get(context, context)} on {tier}: {', '.join(shares)}")
    return texts


def _tier_rows(name: str, tier: TierHistory) -> list[list[str]]:
    counts = [tier.items_done, tier.joined, tier.evicted, tier.unexplained, tier.returned]
    waited = seconds(tier.waits.percentile(50)) if tier.waits.count else "-"
    rows = [[name, *(f"{count:,}" for count in counts), waited]]
    for reason, count in sorted(tier.held.items(), key=lambda item: -item[1]):
        rows.append([f"  held{f' {count:,} times' if count > 1 else ''}: {reason or 'nobody says why'}"])
    return rows


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
