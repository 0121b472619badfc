"""Clusters and workloads in virtual time: the very scheduler and policies of live runs on the simulated engine.

- `simulation.py`: a workload, the loop that feeds a scheduler, the outcome, and what no scheduler could do better.
- `pools.py`: machines: when they are available, which are bad, how long things take; `tree_staging.py`: files.
- `workload_file.py`: what a workload file may say, and the page that says it.
- `scenario.py`: a site and a workload, from files or from a recorded run, with changes.
- `recorded_log.py`, `recorded_run.py`: an event log, and the parameters that are measured of it.
- `studies.py`: a scenario simulated, once and many times.
- `session_serving.py`, `scaling_profile.py`: sessions in virtual time, and the offline profiler of `closed-loop`.
- `experiments.py`: what `ctxflow reproduce` runs; the papers' experiments are in ctxflow-papers.
"""

from ctxflow.simulator.pools import Drawn, GpuTimes
from ctxflow.simulator.simulation import Simulation, SimulationOutcome, Workload, fluid_seconds
from ctxflow.simulator.tree_staging import Origin, Part, TreeStaging

__all__ = [
    "Drawn",
    "GpuTimes",
    "Origin",
    "Part",
    "Simulation",
    "SimulationOutcome",
    "TreeStaging",
    "Workload",
    "fluid_seconds",
]
