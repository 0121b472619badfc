"""The experiments of "Scaling Up Throughput-oriented LLM Inference Applications ... with Pervasive Context Management".

- `settings.py`: the calibration, and each experiment as data.
- `experiments.py`: they are run, and set beside the paper's figures.

docs/simulator.md says what is calibrated on what, and what is not reproduced.
"""

from ctxflow.simulator.pervasive_context.experiments import Row, play, rows
from ctxflow.simulator.pervasive_context.settings import DIRECT, EXPERIMENTS, POOL_FLUID_SECONDS, Settings

__all__ = ["DIRECT", "EXPERIMENTS", "POOL_FLUID_SECONDS", "Row", "Settings", "play", "rows"]
