"""The evaluation of GH and AGH: placements under stress, with less of everything, without a mechanism, over a day."""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.simulator.experiments import Experiment, ExperimentRequest, Figure


def _run(request: ExperimentRequest) -> Mapping[str, Figure]:
    from ctxflow_papers.gh_agh.reproduction import reproduce

    return reproduce(request)


EXPERIMENT = Experiment("gh-agh", "which models on which GPUs, by a greedy heuristic", _run)
