"""The evaluation of TORTA: tasks over the regions of four topologies, beside baselines that react."""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install_package
from ctxflow.simulator.experiments import Experiment, ExperimentRequest, Figure, Training, TrainingRequest


def _run(request: ExperimentRequest) -> Mapping[str, Figure]:
    from ctxflow_papers.torta.reproduction import reproduce

    return reproduce(request)


def _train(request: TrainingRequest) -> str:
    try:
        from ctxflow_papers.torta import training
    except ModuleNotFoundError as error:
        raise CtxflowError(f"training needs {error.name}: {how_to_install_package(error.name or '')}") from None
    return training.write_trained(request)


EXPERIMENT = Experiment(
    "torta",
    "tasks over regions and time, by optimal transport and PPO",
    _run,
    Training(("abilene", "polska", "gabriel", "cost2"), _train),
)
