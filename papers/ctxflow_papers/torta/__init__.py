"""The evaluation of TORTA: tasks over the regions of four topologies, beside baselines that react."""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.simulator.experiments import Experiment, ExperimentRequest, Figure


def _run(request: ExperimentRequest) -> Mapping[str, Figure]:
    from ctxflow_papers.torta.reproduction import reproduce

    return reproduce(request)


EXPERIMENT = Experiment("torta", "tasks over regions and time, by optimal transport and urgency", _run)
