"""The experiments of "Scaling Up Throughput-oriented LLM Inference Applications ... with Pervasive Context Management".

- `settings.py`: the calibration, and each experiment as data.
- `experiments.py`: they are run, and set beside the paper's figures.

docs/simulator.md says what is calibrated on what, and what is not reproduced.
"""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.simulator.experiments import Experiment, ExperimentRequest, Figure


def _run(request: ExperimentRequest) -> Mapping[str, Figure]:
    from ctxflow_papers.pervasive_context.reproduction import reproduce

    return reproduce(request)


EXPERIMENT = Experiment("pervasive-context", "a context is kept from call to call, on opportunistic GPUs", _run)
