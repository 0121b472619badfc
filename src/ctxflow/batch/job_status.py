"""Tell people and programs how a job stands: in words, as OUTPUT.status.json, and as metrics for Prometheus."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ctxflow.causes import ShortfallCause, duration
from ctxflow.errors import counted, one_line
from ctxflow.observe.progress import ENDED, STATUS, VERSION, Progress, condition, load_status, owner
from ctxflow.ownership import uninterrupted

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ctxflow.executors.live_run import LiveRun
    from ctxflow.observe.progress import Progress

SUFFIX = ".status.json"
_SECONDS = 1.0
_REASON, _SHORT = 500, 200  # Characters.


def status_path(output: Path) -> Path:
    """Return the path of the status file of the job with that output."""
    real = output.resolve()
    return real.with_name(real.name + SUFFIX)


def find_status(path: Path) -> Path | None:
    """Find a status file, given it, its job's output, or a run's directory or the one above it."""
    if path.is_dir():
        inside = [path / STATUS, *path.glob(f"*/{STATUS}")]
        found = sorted((each for each in inside if each.is_file()), key=lambda each: each.stat().st_mtime)
        return found[-1] if found else None
    if path.name == STATUS or path.name.endswith(SUFFIX):
        return path if path.is_file() else None
    beside = status_path(path)
    return beside if beside.is_file() else None


def read_status(path: Path) -> dict[str, Any] | None:
    """Return how a job stands, or stood when its driver ended; None if nothing tells.

    :param path: the job's output, its status file, or a run's directory.
    :returns: the file's JSON: "version", "state" ("starting", "running", "done", "failed", "interrupted"), "reason" (of
        a failure), "updated" (seconds since 1970), "pid" and "host" of the driver, "run" (the run's directory, or
        ""), "output", and the fields of `ctxflow.observe.progress.Progress`. Whether a driver that seems to run still
        does, `ctxflow.observe.progress.condition` tells.

    >>> read_status(Path("no/such/output.jsonl")) is None
    True
    """
    found = find_status(Path(path))
    return None if found is None else load_status(found)


class StatusFile:
    """Write a job's status file while the job runs, once a second, from a thread of its own: a slow disk delays no row.

    The last time is at the end, with the job's outcome. A disk that is full ends no job.

    :ivar progress: how the job stood last.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with StatusFile(Path(folder) / "results.jsonl") as file:
    ...         file.update(Progress(done=3, total=3))
    ...     status = read_status(Path(folder) / "results.jsonl")
    >>> status["state"], status["done"]
    ('done', 3)
    """

    def __init__(self, output: Path) -> None:
        from ctxflow.executors.kept_files import StatusWriter  # Whoever only reads a status needs no run.

        self._paths = [status_path(output)]
        self._facts = {"version": VERSION, "output": str(output.resolve()), "run": "", **owner()}
        self._writer = StatusWriter()
        self._state, self._reason = "starting", ""
        self.progress = Progress()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._rewrite, name="ctxflow-status", daemon=True)

    def update(self, progress: Progress) -> None:
        """Take how the job stands now; it is written within a second."""
        self.progress, self._state = progress, "running"

    def run_began(self, run: LiveRun) -> None:
        """Keep a copy in the run's directory, in place of the run's own status file, which says less."""
        run.keeps_status = False
        self._facts["run"] = run.directory
        self._paths.append(Path(run.directory) / STATUS)

    def __enter__(self) -> StatusFile:
        """Write the first."""
        self._write()
        self._thread.start()
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last."""
        self._ending.set()
        self._thread.join()
        if error is None:
            self._state = "done"
        elif isinstance(error, KeyboardInterrupt):
            self._state = "interrupted"
        else:
            self._state = "failed"
            self._reason = one_line(str(error), _REASON) or type(error).__name__
        self._write()

    def _rewrite(self) -> None:
        while not self._ending.wait(_SECONDS):
            self._write()

    def _write(self) -> None:
        facts = {**self._facts, "state": self._state, "reason": self._reason, "updated": round(time.time(), 3)}
        status = {**facts, **dataclasses.asdict(self.progress)}
        for path in list(self._paths):
            self._writer.write(path, status)


_DEPTH = 4
_MOST_FOLDERS = 5000
LIVE = ("starting", "running")


def found_below(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the status files below a folder, four levels deep, the live ones first, then the newest; none twice."""
    found = [(path, status) for path in _files(folder) if (status := load_status(path)) is not None]
    outputs = {path for path, _ in found if path.name != STATUS}
    ours = [each for each in found if each[0].name != STATUS or Path(f"{each[1]['output']}{SUFFIX}") not in outputs]
    ours.sort(key=lambda each: (condition(each[1]) in LIVE, each[1].get("updated") or 0.0), reverse=True)
    return ours


def _files(folder: Path) -> Iterator[Path]:
    base = folder.resolve()
    for number, (where, folders, names) in enumerate(os.walk(base)):
        if number >= _MOST_FOLDERS:
            return
        here = Path(where)
        deep = len(here.relative_to(base).parts) >= _DEPTH
        folders[:] = [] if deep else sorted(name for name in folders if not name.startswith("."))
        yield from (here / name for name in names if name == STATUS or name.endswith(SUFFIX))


def exit_status(status: Mapping[str, Any]) -> int:
    """Return 0 while it runs and when it is done, 3 if rows failed, 1 if it ended otherwise or is silent."""
    state = condition(status)
    if state == "done":
        return 3 if status.get("dead") else 0
    return 0 if state in LIVE else 1


def told(status: Mapping[str, Any], now: float | None = None) -> tuple[str, str, str]:
    """Return a job's condition, a sentence with details where there are any, and a style."""
    now = time.time() if now is None else now
    state = condition(status, now)
    age = duration(max(0.0, now - float(status.get("updated") or 0.0)))
    host, pid = status.get("host"), status.get("pid")
    again = "the same command goes on from there"
    if state == "died":
        return state, f"its driver (process {pid} on {host}) is gone without a last word, {age} ago; {again}", "red"
    if state == "silent":
        return state, f"its driver (process {pid} on {host}) has said nothing for {age}: see if it lives", "yellow"
    if state == "interrupted":
        return state, f"stopped {age} ago; {again}", "yellow"
    style = {"done": "green", "failed": "red"}.get(state, "")
    return state, str(status.get("reason") or "") if state in ENDED else "", style


_GAUGES = {
    "total": ("input_rows", "Rows of the input, estimated while they are not counted"),
    "running": ("running_rows", "Rows that are queued or at a worker"),
    "rate": ("rows_per_second", "Rows a second now"),
    "left": ("left_seconds", "Seconds that the rest takes at the rate of the last minutes"),
}
_COUNTERS = {
    "done": ("rows_done", "Rows that have a result, of all runs of the job"),
    "dead": ("rows_dead", "Rows in the dead letters, of all runs of the job"),
    "tokens": ("tokens", "Tokens that models read and wrote"),
    "evictions": ("evictions", "Workers that were taken back"),
    "crashes": ("crashes", "Library processes that died"),
    "loads": ("loads", "Contexts that were built or began to be"),
}


class BatchCollector:
    """Read a job's figures when Prometheus asks, without those that are unknown."""

    def __init__(self, now: Callable[[], Progress]) -> None:
        self._now = now

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._now()
        for family, named in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for key, (name, help_text) in named.items():
                value = getattr(now, key)
                if value is not None:
                    yield family(f"ctxflow_batch_{name}", help_text, value=value)
        contexts = GaugeMetricFamily(
            "ctxflow_batch_contexts", "Workers that stage or load a context, or have it warm", labels=("name", "state")
        )
        for name, counts in now.contexts.items():
            for state, count in counts.items():
                contexts.add_metric((name, state), count)
        yield contexts
        yield from self._of_tiers(now)

    @staticmethod
    def _of_tiers(now: Progress) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures: tuple[tuple[Any, str, str, str, int], ...] = (
            (GaugeMetricFamily, "joined", "workers", "Workers that are connected", 1),
            (GaugeMetricFamily, "asked", "workers_asked", "Workers that were asked for last", 1),
            (CounterMetricFamily, "gpu_hours", "gpu_seconds", "Seconds that workers' GPUs were connected", 3600),
            (CounterMetricFamily, "worker_hours", "worker_seconds", "Seconds that workers were connected", 3600),
        )
        for family, key, name, help_text, factor in figures:
            metric = family(f"ctxflow_batch_{name}", help_text, labels=("tier",))
            for tier, its in now.tiers.items():
                if its[key] is not None:
                    metric.add_metric((tier,), factor * its[key])
            yield metric
        reasons = GaugeMetricFamily(
            "ctxflow_batch_workers_lacking", "Workers that a tier lacks, and why", labels=("tier", "reason")
        )
        for tier, its in now.tiers.items():
            if its.get("reason"):
                reasons.add_metric((tier, its["reason"]), (its["asked"] or 0) - its["joined"])
        yield reasons
        causes = GaugeMetricFamily(
            "ctxflow_batch_causes", "Why less runs than was asked for: causes", labels=("kind", "tier", "host")
        )
        found = Counter((each.kind, each.tier, each.host) for each in map(ShortfallCause.of, now.causes))
        for labels, many in found.items():
            causes.add_metric(labels, many)
        yield causes
        from ctxflow.factory.limits import limit_metrics

        yield from limit_metrics("ctxflow_batch", now.limits)


@contextlib.contextmanager
def serving(now: Callable[[], Progress], place: tuple[str, int] | None) -> Iterator[int | None]:
    """Serve a job's metrics to Prometheus at an address and port, 0 for any, or not at all; yields the port.

    :raises CtxflowError: if prometheus-client is missing.
    :raises UsageError: if nobody can listen there.
    """
    if place is None:
        yield None
        return
    from ctxflow.factory.service import start_server

    server = start_server(BatchCollector(now), *place)
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()


def number(value: float) -> str:
    """Return a figure to three digits, or all before the point.

    >>> number(0), number(0.01234), number(12.345), number(99.96), number(30340.2)
    ('0', '0.0123', '12.3', '100', '30,340')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def hours(value: float) -> str:
    """Return hours of workers or GPUs as text."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def time_left(left: float | None, low: float | None, high: float | None) -> str:
    """Return how long it still takes, and the likely bounds.

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


def lacking(now: Progress, most: int = _REASON) -> list[str]:
    """Return why something does not run, or less than was asked for, of each with so many characters at most.

    >>> tiers = {"gpu": {"joined": 1, "asked": 2, "reason": "1 job waits for a machine"}}
    >>> lacking(Progress(tiers=tiers, causes=[{"kind": "drain", "text": "host n2 is drained", "host": "n2"}]))
    ['gpu lacks 1 worker: 1 job waits for a machine', 'host n2 is drained']
    """
    causes = [ShortfallCause.of(each) for each in now.causes]
    found = []
    for name, tier in now.tiers.items():
        lacks = (tier["asked"] or 0) - tier["joined"]
        if lacks > 0 and tier.get("reason"):
            told = "; ".join(each.sentence() for each in causes if each.tier == name) or str(tier["reason"])
            found.append(f"{name} lacks {counted(lacks, 'worker')}: {told}")
    lacked = {name for name, tier in now.tiers.items() if (tier["asked"] or 0) > tier["joined"]}
    found += [each.sentence(of_tier=True) for each in causes if each.tier not in lacked]
    return [one_line(each, most) for each in found]


def describe(now: Progress, ended: bool = False) -> str:
    """Return a line on how a job stands, with why it has no more workers unless it has ended.

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
    return "; ".join([", ".join(parts), *([] if ended else lacking(now, _SHORT))])
