"""Read a run's files into a report, and give it as data.

As text: report_text.py; as a page: page.py; pictures: plots.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ctxflow.errors import UsageError
from ctxflow.observe.causes import Cause, Causes
from ctxflow.observe.history import History, TierHistory, percentiles
from ctxflow.observe.history_reader import read_history
from ctxflow.observe.staging_notes import StagingNotes, read_staging
from ctxflow.observe.summary import SUMMARY, summarise
from ctxflow.observe.transfer_trees import FileTree, file_trees
from ctxflow.observe.transfers import Transfers, read_transfers, with_notes

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


def find_run(path: Path | None = None, here: Path = Path()) -> Path:
    """Return the directory of a run.

    :param path: the run's directory, or one above it that holds exactly one; by default, the latest run below
        ./runs, ./runinfo and the folder of `ctxflow demo`.
    :raises UsageError: if there is none, or if it is not clear which is meant.
    """
    if path is None:
        runs = [run for place in _PLACES for run in _runs_below(here / place)]
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
    history = None
    if (run / EVENTS).is_file():
        with open(run / EVENTS, "rb") as file:
            history = read_history(line.decode("utf-8", "replace") for line in _counted(file, advance))
    staging = StagingNotes()
    if (run / STAGING).is_file():
        with open(run / STAGING, "rb") as file:
            staging = read_staging(line.decode("utf-8", "replace") for line in _counted(file, advance))
    transfers = Transfers(files=staging.files, peers=staging.peers)
    logs = _debug_logs(run)
    for log in logs:
        with open(log, "rb") as file:
            read = read_transfers(_counted(file, advance), staging)
        transfers.transfers += read.transfers
        transfers.files.update(read.files)
        transfers.peers.update(read.peers)
    transfers.transfers = with_notes(transfers.transfers, staging)
    causes = history.causes if history is not None else Causes()
    batch = read_object(run / BATCH)
    letters = _dead_letters(batch)
    if letters is not None and letters.is_file():
        with open(letters, "rb") as file:
            causes.dead_letters(_counted(file, advance))
    summary = summarise(history) if history is not None else read_object(run / SUMMARY)
    return Report(run, history, transfers, file_trees(transfers.transfers), summary, causes.ordered(), batch)


def summary_of(run: Path, advance: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Return the summary of a run, from its event log alone; the parameters and errors are those of `read_report`."""
    with open(run / EVENTS, "rb") as file:
        return summarise(read_history(line.decode("utf-8", "replace") for line in _counted(file, advance)))


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


def _counted(file: BinaryIO, advance: Callable[[int], None]) -> Iterable[bytes]:
    count = 0
    for line in file:
        count += len(line)
        if count >= 1 << 20:
            advance(count)
            count = 0
        yield line
    advance(count)


# --- as data


def as_data(report: Report) -> dict[str, Any]:
    """Return all of a report as data for JSON: times in seconds on the run's clock, sizes in bytes."""
    trees = [
        {
            name: getattr(tree, name)
            for name in ("file", "from_manager", "copies", "links", "failed", "depth", "seconds")
        }
        for tree in report.trees
    ]
    history = None if report.history is None else _history_data(report.history)
    return {
        "run": str(report.run),
        "summary": report.summary,
        "history": history,
        "causes": [dataclasses.asdict(cause) for cause in report.causes],
        "batch": report.batch,
        "files": {digest: dataclasses.asdict(file) for digest, file in report.transfers.files.items()},
        "peers": {name: dataclasses.asdict(peer) for name, peer in report.transfers.peers.items()},
        "trees": trees,
        "transfers": [
            {**dataclasses.asdict(transfer), "bytes_per_second": transfer.bytes_per_second}
            for transfer in report.transfers.transfers
        ],
    }


def _history_data(history: History) -> dict[str, Any]:
    return {
        "duration": history.duration,
        "events": history.events,
        "items": {**dataclasses.asdict(history.items), "open": history.items.open},
        "workers": {"mean": history.mean_workers, "peak": history.peak_workers, "notices": history.notices,
                    **_tier_data(history.workers)},
        "hosts": sorted(history.hosts),
        "by_host": {name: dataclasses.asdict(host) for name, host in sorted(history.by_host.items())},
        "tiers": {name: _tier_data(tier) for name, tier in history.tiers.items()},
        "plans": [
            {"since": time, **{key: plan[key] for key in ("tiers", "workers", "holders", "shares", "reasons")}}
            for time, plan in history.plans
        ],
        "quarantines": [
            {"since": time, **{key: each[key] for key in ("host", "worker", "devices", "cause", "until")}}
            for time, each in history.quarantines
        ],
        "losses": [{"time": time, "evicted": evicted} for time, evicted in history.losses],
        "apps": {
            id: {
                "name": app.name, "calls": app.calls, "items": app.items, "failed": app.failed,
                "call_seconds": app.call_seconds.summary(), "item_seconds": app.item_seconds.summary(),
            }
            for id, app in history.apps.items()
        },
        "contexts": {
            id: {
                "name": context.name, "staged": context.staged, "failed": context.failed,
                "load_seconds": context.load_seconds.summary(),
            }
            for id, context in history.contexts.items()
        },
    }  # fmt: skip


def _tier_data(tier: TierHistory) -> dict[str, Any]:
    lifetimes = {"count": len(tier.lifetimes), **(percentiles(tier.lifetimes) if tier.lifetimes else {})}
    return {
        "joined": tier.joined, "lost": tier.lost, "evicted": tier.evicted, "unexplained": tier.unexplained,
        "returned": tier.returned, "items_done": tier.items_done, "worker_seconds": tier.worker_seconds,
        "evictions_per_worker_hour": tier.eviction_rate, "lifetimes": lifetimes, "survival": tier.survival(),
        "jobs_started": tier.jobs_started, "jobs_evicted": tier.jobs_evicted, "queue_seconds": tier.waits.summary(),
        "held": tier.held, "workers": tier.counts, "completed": tier.done.cumulated(),
    }  # fmt: skip
