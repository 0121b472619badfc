"""Clusters and workloads in virtual time: the very scheduler and policies of live runs on the simulated engine.

- `simulation.py`: the loop that feeds a scheduler, and what came of it.
- `times.py`: how long things take: matching, loading, running, by GPU model, with their spread.
- `staging.py`, `links.py`: where files come from: shared filesystem, internet, peers; links that are shared fairly.
- `pools.py`: machines and when they can be had: Poisson evictions, drains, join curves, traces.
- `bounds.py`: what no scheduler could do better.
- `workload_file.py`, `scenario.py`, `changes.py`: sites and workloads as people give them, with changes.
- `recording.py`, `fitting.py`, `recorded.py`: a recorded run, and parameters measured of it.
- `building.py`, `result.py`, `studies.py`: a scenario simulated, once and many times.

The papers' experiments are in a folder each. One for `ctxflow reproduce` is a function that takes a `Request` and gives
figures (`figures.py`), and pictures (`drawing.py`).
"""

from ctxflow.simulator.bounds import fluid_seconds
from ctxflow.simulator.simulation import Outcome, Simulation, Workload
from ctxflow.simulator.staging import Origin, Part, TreeStaging
from ctxflow.simulator.times import Drawn, GpuTimes

__all__ = [
    "Drawn",
    "GpuTimes",
    "Origin",
    "Outcome",
    "Part",
    "Simulation",
    "TreeStaging",
    "Workload",
    "fluid_seconds",
]
