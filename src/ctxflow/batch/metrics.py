"""A job's figures for Prometheus, while its driver runs.

What does not live here: the figures (observe/progress.py), and serving (factory/prometheus.py). Needs
prometheus-client, of the extra `factory`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ctxflow.factory.prometheus import limit_metrics, start_server
from ctxflow.observe.progress import Progress

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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
        """The figures."""
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
        yield from limit_metrics("ctxflow_batch", now.limits)


@contextlib.contextmanager
def serving(now: Callable[[], Progress], place: tuple[str, int] | None) -> Iterator[int | None]:
    """Let Prometheus ask how a job stands; gives the port.

    :param place: the address and the port, 0 for any; None for nowhere.
    :raises CtxflowError: if prometheus-client is missing.
    :raises UsageError: if nobody can listen there.
    """
    if place is None:
        yield None
        return
    server = start_server(BatchCollector(now), *place)
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
