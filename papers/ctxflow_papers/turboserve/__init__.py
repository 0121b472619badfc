"""The evaluation of TurboServe: traces of sessions, served with and without migration and autoscaling."""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.simulator.experiments import Experiment, ExperimentRequest, Figure


def _run(request: ExperimentRequest) -> Mapping[str, Figure]:
    from ctxflow_papers.turboserve.reproduction import reproduce

    return reproduce(request)


EXPERIMENT = Experiment("turboserve", "long-lived sessions: where they go, and on how many GPUs", _run)
