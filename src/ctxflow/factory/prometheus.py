"""Serve a factory's figures to Prometheus.

This needs prometheus-client, of the extra `factory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctxflow.errors import CtxflowError, UsageError
from ctxflow.factory.service import Service
from ctxflow.factory.spending import MEASURES
from ctxflow.installing import how_to_install

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric

_STATES = ("queued", "running", "joined", "evicted", "held")
_GAUGES = {
    "wanted": ("workers_wanted", "Workers that runs want now"),
    "granted": ("workers_granted", "Workers that runs may have now, within the tier's maximum"),
    "maximum": ("workers_maximum", "The tier's maximum"),
    "joined": ("workers_joined", "Workers that have joined their runs"),
}
_COUNTERS = {
    "submissions": ("submissions", "Submissions to the batch system"),
    "submitted": ("jobs_submitted", "Jobs submitted"),
    "removed": ("removals", "Jobs that the factory removed"),
    "evictions": ("evictions", "Evictions by the batch system"),
    "holds": ("holds", "Jobs that the batch system put on hold"),
    "failures": ("failures", "Submissions and workers that failed"),
    "queries": ("queries", "Times that the batch system was asked something"),
}


class FactoryCollector:
    """Collect a factory's counts when Prometheus asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the figures, by tier."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = self._service.counts()
        yield GaugeMetricFamily("ctxflow_factory_runs", "Runs that are served", value=self._service.runs())
        jobs = GaugeMetricFamily(
            "ctxflow_factory_jobs", "Jobs now; those that run and have joined count as joined", labels=("tier", "state")
        )
        for tier, its in counts.items():
            for state in _STATES:
                jobs.add_metric((tier, state), its[state])
        yield jobs
        for family, named in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for key, (name, help_text) in named.items():
                metric = family(f"ctxflow_factory_{name}", help_text, labels=("tier",))
                for tier, its in counts.items():
                    metric.add_metric((tier,), its[key])
                yield metric
        lacking = GaugeMetricFamily(
            "ctxflow_factory_workers_lacking",
            "Workers that a run's tier lacks, and why",
            labels=("run", "tier", "reason"),
        )
        for run, tier, reason, lacks in self._service.lacking():
            lacking.add_metric((run, tier, reason), lacks)
        yield lacking
        yield from limit_metrics("ctxflow_factory", self._service.limits(), ("scope", "run"))


def limit_metrics(
    prefix: str, limits: Sequence[Mapping[str, Any]], labels: Sequence[str] = ("scope",)
) -> Iterator[Metric]:
    """Yield what is used of limits of GPU-hours and of cost, and how much they are.

    :param labels: the keys that distinguish entries of one measure; "" where one has none.
    """
    from prometheus_client.core import GaugeMetricFamily

    for measure, name in MEASURES.items():
        for key, what in (("used", "used of a limit"), ("limit", "that may be used")):
            metric = GaugeMetricFamily(
                f"{prefix}_{measure}_{key}", f"{name[0].upper()}{name[1:]} {what}", labels=labels
            )
            for each in limits:
                if each["measure"] == measure:
                    metric.add_metric([str(each.get(label, "")) for label in labels], each[key])
            yield metric


def place_of(text: str) -> tuple[str, int]:
    """Return the address and the port that `[ADDRESS:]PORT` means.

    :raises ValueError: if it means none.

    >>> place_of("9464"), place_of("[::1]:9464")
    (('127.0.0.1', 9464), ('::1', 9464))
    """
    address, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"metrics cannot be served at {text!r}: write a port, or ADDRESS:PORT")
    return address.strip("[]") or "127.0.0.1", int(port)


def serve_metrics(service: Service, address: str, port: int) -> int:
    """Serve a factory's figures for as long as this process lives, and return the port.

    :param port: 0 for any.
    :raises CtxflowError: if prometheus-client is missing.
    :raises UsageError: if the address cannot be listened at.
    """
    return int(start_server(FactoryCollector(service), address, port).server_port)


def start_server(collector: Any, address: str, port: int) -> WSGIServer:
    """Serve a collector's figures on a thread of its own, and return the server, for whoever ends it.

    :param port: 0 for any.
    :raises CtxflowError: if prometheus-client is missing.
    :raises UsageError: if the address cannot be listened at.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise CtxflowError(
            f"metrics need prometheus-client: {how_to_install('prometheus-client', extra='factory')}"
        ) from None
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        raise UsageError(f"metrics cannot be served at {address}:{port}: {error.strerror}; name another") from None
    return server
