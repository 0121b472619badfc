"""FlexTopo's experiments: preemption on clusters of 100 nodes with 8 GPUs each, and the snapshot of 41 nodes."""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.simulator.experiments import Experiment, ExperimentRequest, Figure


def _run(request: ExperimentRequest) -> Mapping[str, Figure]:
    from ctxflow_papers.flextopo.reproduction import reproduce

    return reproduce(request)


EXPERIMENT = Experiment("flextopo", "preemption that respects a machine's topology", _run)
