"""Tell other terminals and programs how a job stands: OUTPUT.status.json, and metrics for Prometheus.

A copy of the status file lies in the run's directory. How such a file is written, and whether its writer lives, is in
observe/; metrics need prometheus-client, of the extra `factory`, and are imported only where they are asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ctxflow.batch.phrases import duration
from ctxflow.observe.progress import ENDED, STATUS, VERSION, Progress, condition, load_status, owner
from ctxflow.ownership import uninterrupted

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ctxflow.executors.run.live_run import LiveRun


SUFFIX = ".status.json"
_SECONDS = 1.0
_REASON = 500  # Characters.


def status_path(output: Path) -> Path:
    """Return the path of the status file of the job with that output."""
    real = output.resolve()
    return real.with_name(real.name + SUFFIX)


def find_status(path: Path) -> Path | None:
    """Find the status file that is meant.

    :param path: it, its job's output, or a run's directory or the one above it.
    """
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
    """Write a job's status file while the job runs, from a thread of its own: a slow disk delays no row.

    It is rewritten once a second, also when nothing changes, so that a reader sees that the driver lives; the last
    time at the end, with what became of the job. A disk that is full ends no job.

    :param output: the job's output.
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
        from ctxflow.executors.run.kept_files import StatusWriter  # Whoever only reads a status needs no run.

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
            self._reason = " ".join(str(error).split())[:_REASON] or type(error).__name__
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
    """Return the status files below a folder, four levels deep: the live ones first, then the newest.

    A run's copy of a job's status is left out where the job's own is found.
    """
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
    """Return 0 while it runs and when it is done, 3 if rows failed, 1 if it ended otherwise or is silent.

    >>> exit_status({"state": "done", "dead": 2}), exit_status({"state": "failed"})
    (3, 1)
    """
    state = condition(status)
    if state == "done":
        return 3 if status.get("dead") else 0
    return 0 if state in LIVE else 1


def told(status: Mapping[str, Any], now: float | None = None) -> tuple[str, str, str]:
    """Return what became of a job: its condition, a sentence that says more where there is more to say, and a style.

    >>> told({"state": "failed", "reason": "the disk is full"})
    ('failed', 'the disk is full', 'red')
    """
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
    """Reads the figures at the moment that somebody asks. A figure that nobody knows is left out.

    :param now: gives how the job stands.
    """

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
        from ctxflow.factory.limits import limit_metrics

        yield from limit_metrics("ctxflow_batch", now.limits)


@contextlib.contextmanager
def serving(now: Callable[[], Progress], place: tuple[str, int] | None) -> Iterator[int | None]:
    """Serve a job's metrics to Prometheus; yields the port.

    :param place: the address and the port, 0 for any; None for nowhere.
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
